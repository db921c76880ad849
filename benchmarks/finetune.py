"""A Hugging Face Llama with a billion parameters, fine-tuned for some steps with everything away from the GPU.

``python -m benchmarks.finetune`` makes the model from a config, with random weights, on the GPU, and trains it in bf16
at stage 3 with weights and optimizer in host memory and blocks computed again in backward, on one batch again and
again: the loss must fall. It prints JSON: seconds per step, losses, tokens per second, peaks of device and host memory
beside the model's own bytes. ``--device cpu --tiny`` tries the program.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import time
from typing import Any

import torch
from torch import nn

import shardengine
from benchmarks.device import synchronise
from benchmarks.ranks import rss_bytes

MODEL = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 2048,
}  # fmt: skip
TINY = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 96, "max_position_embeddings": 64,
}  # fmt: skip
BATCH, LENGTH = 4, 1024
TINY_LENGTH = 16
HOST = {"device": "cpu"}
WARMUP = 2
FEWEST_STEPS = WARMUP + 2


def make_model(sizes: dict[str, int], device: str) -> nn.Module:
    """A Llama with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**sizes, tie_word_embeddings=True, use_cache=False, bos_token_id=0, eos_token_id=0)
    torch.manual_seed(0)
    with torch.device(device):
        model: nn.Module = LlamaForCausalLM(config).to(torch.bfloat16)
    return model.train()


def finetune(device: str, sizes: dict[str, int], length: int, steps: int, until: float) -> dict[str, Any]:
    """Train for ``steps``, or until ``time.monotonic()`` is ``until``; what was seen."""
    target = torch.device(device)
    start = time.perf_counter()
    model = make_model(sizes, device)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 3, "offload_param": HOST, "offload_optimizer": HOST},
        "bf16": {"enabled": True},
        "activation_checkpointing": {"enabled": True},
    }
    engine = shardengine.initialize(model, config)
    built_s = time.perf_counter() - start
    if target.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    tokens = torch.randint(0, sizes["vocab_size"], (BATCH, length), generator=torch.Generator().manual_seed(1))
    tokens = tokens.to(target)
    losses: list[float] = []
    seconds: list[float] = []
    while len(losses) < FEWEST_STEPS or (len(losses) < steps and time.monotonic() < until):
        synchronise(target)
        begin = time.perf_counter()
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        synchronise(target)
        seconds.append(time.perf_counter() - begin)
        losses.append(float(loss.detach()))
    cuda = target.type == "cuda"
    found = {
        "model": "Llama of transformers, random weights",
        "parameters": parameters,
        "tokens_per_step": BATCH * length,
        "built_s": built_s,
        "losses": losses,
        "loss_fell": losses[-1] < losses[0],
        "seconds": seconds,
        "median_s": statistics.median(seconds[WARMUP:]),
        "tokens_per_s": BATCH * length / statistics.median(seconds[WARMUP:]),
        "peak_allocated_bytes": torch.cuda.max_memory_allocated() if cuda else None,
        "bf16_weights_bytes": 2 * parameters,
        "peak_rss_bytes": rss_bytes(peak=True),
    }
    engine.close()
    return found


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.finetune", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: with --tiny, to try it")
    parser.add_argument("--tiny", action="store_true", help="a model of some thousand parameters")
    parser.add_argument("--steps", type=int, default=12, help="at most")
    parser.add_argument("--budget", type=float, default=45.0, metavar="SECONDS", help="after which no step begins")
    options = parser.parse_args(argv)
    if importlib.util.find_spec("transformers") is None:
        parser.error("expected transformers, which has the model: pip install transformers")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU here; --device cpu --tiny tries the program on a CPU")
    return options


def main(argv: list[str] | None = None) -> int:
    """Command line. Returns 1 if the loss did not fall."""
    options = parse(argv)
    sizes, length = (TINY, TINY_LENGTH) if options.tiny else (MODEL, LENGTH)
    found = finetune(options.device, sizes, length, options.steps, time.monotonic() + options.budget)
    print(json.dumps(found))
    return int(not found["loss_fell"])


if __name__ == "__main__":
    sys.exit(main())
