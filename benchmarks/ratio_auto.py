"""``"ratio": "auto"`` on one GPU of several sizes: what it takes, and how much is never used.

``python -m benchmarks.ratio_auto`` trains a GPT-2 of 0.8B parameters in bf16 at stage 2, blocks computed again, with
``offload_optimizer`` on the CPU and no ``device_memory``. A tensor that nobody uses makes the GPU as small as wanted,
so that what does not fit is out of memory there, too. It prints a line of JSON per size, as soon as it is known:

    free_bytes            of the device when the engine is made, weights of the model included
    share_bytes           what the engine may take of that, need_bytes: what it says it takes at most, ratio: with which
    peak_allocated_bytes  over all steps, with activations; peak_reserved_bytes: with what torch's allocator keeps
    left_bytes            what no step has used, NCCL, cuBLAS and the allocator's blocks counted as used

``--device cpu --tiny`` tries the program: the size is told as ``device_memory``, and no bytes of a device are counted.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from contextlib import suppress
from typing import Any

import torch

import shardengine
from benchmarks.device import synchronise
from benchmarks.workload import CLIP, LEARNING_RATE, Setting, batch_of, make_model
from shardengine.offload.tiers import SHARE

SETTING, SIZES = Setting(1, 36, 1280, 50257, 4, 1024), (10_000_000_000, 16_000_000_000, 7_000_000_000)
"""Of about 13e9 bytes with everything on the device; the sizes in order of what they tell."""
TINY, TINY_SIZES = Setting(1, 4, 64, 96, 2, 16), (3_000_000, 12_000_000)
BUCKET = 12_500_000
"""Elements, as without the key; of a tiny model fewer, so that a part of it can be away."""
STEPS, WARMUP = 5, 2


def measure(setting: Setting, size: int, device: str) -> dict[str, Any]:
    """Train on a device of ``size`` bytes; what was seen."""
    target, cuda = torch.device(device), device == "cuda"
    with target:
        model = make_model(setting, own=True).bfloat16()
    away: dict[str, Any] = {"device": "cpu", "ratio": "auto"}
    held, free, filler = sum(parameter.nbytes for parameter in model.parameters()), size, None
    if cuda:
        torch.cuda.empty_cache()
        unwanted = torch.cuda.mem_get_info()[0] + held - size
        if unwanted < 0:
            raise ValueError(f"expected {size} free bytes, got {size + unwanted}")
        filler = torch.empty(unwanted, dtype=torch.uint8, device=target)
        free = torch.cuda.mem_get_info()[0] + held
    else:
        away["device_memory"] = round(SHARE * size)
    config = {
        "train_micro_batch_size_per_gpu": setting.batch,
        "gradient_clipping": CLIP,
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE}},
        "zero_optimization": {
            "stage": 2, "offload_optimizer": away, "reduce_bucket_size": min(BUCKET, setting.parameters() // 20),
        },
        "bf16": {"enabled": True},
        "activation_checkpointing": {"enabled": True},
    }  # fmt: skip
    engine = shardengine.initialize(model, config)
    try:
        memory = engine.memory()
        found = {
            "free_bytes": free,
            "share_bytes": round(SHARE * free),
            "need_bytes": memory["predicted_model_state_bytes"] + memory["predicted_buffer_bytes"],
            "ratio": memory["offload_ratio"],
        }
        batch = {key: tokens.to(target) for key, tokens in batch_of(setting, 0, 0).items()}
        if cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        try:
            return found | _train(engine, batch, target, filler)
        except torch.OutOfMemoryError as error:
            return found | {"failed": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
    finally:
        with suppress(Exception):  # after a step that ran out of memory
            engine.close()


def _train(
    engine: shardengine.Engine, batch: dict[str, torch.Tensor], target: torch.device, filler: torch.Tensor | None
) -> dict[str, Any]:
    losses, seconds = [], []
    for _ in range(STEPS):
        synchronise(target)
        start = time.perf_counter()
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        synchronise(target)
        seconds.append(time.perf_counter() - start)
        losses.append(float(loss.detach()))
    found: dict[str, Any] = {"losses": losses, "median_s": statistics.median(seconds[WARMUP:])}
    if filler is not None:
        found |= {
            "peak_allocated_bytes": torch.cuda.max_memory_allocated() - filler.nbytes,
            "peak_reserved_bytes": torch.cuda.max_memory_reserved() - filler.nbytes,
            "left_bytes": torch.cuda.mem_get_info()[0],
        }
    return found


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ratio_auto", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: with --tiny, to try it")
    parser.add_argument("--tiny", action="store_true", help="a model of some thousand parameters")
    parser.add_argument("--budget", type=float, default=60.0, metavar="SECONDS", help="after which no size begins")
    options = parser.parse_args(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU here; --device cpu --tiny tries the program on a CPU")
    if options.device == "cpu" and not options.tiny:
        parser.error("--device cpu: expected --tiny with it; the model is for a GPU")
    return options


def main(argv: list[str] | None = None) -> int:
    """Command line. Returns 1 if a step ran out of memory."""
    options = parse(argv)
    end, failed = time.monotonic() + options.budget, False
    for size in TINY_SIZES if options.tiny else SIZES:
        if time.monotonic() > end:
            break
        found = measure(TINY if options.tiny else SETTING, size, options.device)
        failed |= "failed" in found
        print(json.dumps({f"{size / 1e9:g} GB": found}), flush=True)
        gc.collect()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
