# The command line and the library in an image, for the CPU or for NVIDIA GPUs:
#
#     docker build -t shardengine .
#     docker build -t shardengine --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 .
#     docker run --rm shardengine env
#     docker run --rm --gpus all --shm-size 8g -v "$PWD:/training" shardengine train --config config.json
#
# g++ stays: the CPU kernels are compiled when the package is installed, the launchers of Triton's when they first run.
FROM python:3.12-slim

# The image's Debian decides the compiler's version.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*

ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY constraints.txt /source/
RUN pip install --no-cache-dir --constraint /source/constraints.txt --index-url "$TORCH_INDEX" torch

COPY pyproject.toml hatch_build.py README.md LICENSE /source/
COPY shardengine /source/shardengine
COPY configs /source/configs
RUN SHARDENGINE_NATIVE=require pip install --no-cache-dir --constraint /source/constraints.txt '/source[hf,plot,fast]' \
    && useradd --create-home --uid 1000 shardengine \
    && install --directory --owner 1000 /training

USER 1000
WORKDIR /training
ENTRYPOINT ["shardengine"]
CMD ["--help"]
