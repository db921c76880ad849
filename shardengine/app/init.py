"""`shardengine init`: plans a config that fits, and writes it with remarks and the commands that run it.

Owns: the questions, the values of a new config that no plan chooses. Must not know: how a config is chosen.

Exit codes: 0 written · 1 nothing fits, and nothing is written · 2 wrong usage.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import shlex
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from shardengine.app import planning
from shardengine.app.settings import check_model, require, require_lora
from shardengine.comm import devices
from shardengine.errors import UsageError
from shardengine.planner import Hardware, choose, show_bytes

FULL, LORA, QLORA = METHODS = ("full", "lora", "qlora")
_RATES = {FULL: 1e-5, LORA: 2e-4, QLORA: 2e-4}
_LORA_KEYS = {LORA: "r=16,targets=all-linear", QLORA: "r=16,targets=all-linear,bits=4"}
_SAID = {FULL: "all weights", LORA: "LoRA adapters", QLORA: "LoRA adapters on a base of 4 bits"}
_SAMPLES = 16
"""The least samples per step."""
_REMARKS = {
    "train_batch_size": "samples of a step, of all ranks together; it belongs to the learning rate",
    "train_micro_batch_size_per_gpu": "samples that a rank computes at once: the fastest that fits",
    "gradient_clipping": "the largest norm of a step's gradient",
    "bf16": "weights and gradients are bf16; the optimizer keeps weights in fp32",
    "optimizer": "lr is the highest rate: a tenth of the steps leads up to it, then a cosine to a tenth of it",
    "zero_optimization": "what is sharded over ranks (stage 0: nothing; 3: all), and what rests beside the GPU",
    "activation_checkpointing": "true: less memory, because activations are computed again, which takes time",
}


def run(options: argparse.Namespace) -> int:
    """Ask for missing options, choose and write the config; return the exit code."""
    require("transformers", extra="hf", what="init")
    model = _ask(options.model, "--model", "model (a folder, or a name on the Hub)")
    gpus = _ask(options.gpus, "--gpus", "GPUs, as 4x24GB", _here())
    method = _ask(options.method, "--method", f"method ({', '.join(METHODS)})", LORA)
    said = _ask(options.length and str(options.length), "--length", "tokens of a sample", "2048")
    if not said.isdecimal() or int(said) < 1:
        raise UsageError(f"--length {said}: expected an integer >= 1", code="length-invalid")
    length = int(said)
    if method not in METHODS:
        raise UsageError(f"--method {method}: expected one of {', '.join(METHODS)}", code="init-method-unknown")
    hardware = Hardware.parse(gpus, host_memory=options.host_memory, nvme=options.nvme)
    file = Path(options.output or f"my-{method}-{'-'.join(gpus.lower().split()).removesuffix('gb').rstrip('-')}.json")
    if file.exists() or not file.absolute().parent.is_dir():
        raise UsageError(
            f"--output {file}: expected the name of a new file in a directory that is there", code="init-output-not-new"
        )
    check_model(model)
    lora = _LORA_KEYS.get(method)
    if lora is not None:
        require_lora(lora, f"--method {method}")
    logging.getLogger("shardengine").setLevel(logging.ERROR)  # no run starts: drop its messages
    told = lambda text: print(text, file=sys.stderr, flush=True)  # noqa: E731
    base = base_config(method, hardware.ranks, nvme=options.nvme is not None)
    make = lambda: planning.model_of(model, lora, base)  # noqa: E731
    found = choose(make, base, hardware, length=length, told=told, in_slices=method != QLORA)
    print(planning.text_of_choice(found))
    if found.config is None or found.plan is None:
        return 1
    words = ["--config", str(file), "--model", model, "--length", str(length), *(["--lora", lora] if lora else [])]
    places = ["--gpus", gpus, *(["--host-memory", options.host_memory] if options.host_memory else [])]
    places += ["--nvme", options.nvme] if options.nvme else []
    rest = ["--data", "data.jsonl", "--epochs", "3", "--save-every", "100"]
    commands = {
        "_plan": shlex.join(["shardengine", "plan", *words, *places]),
        "_train": shlex.join(["shardengine", "train", *words, *rest]),
    }
    head = f"{model}, {_SAID[method]}, {length} tokens, {hardware}: "
    tree = {"_": head + "; ".join(found.plan.sentences()), **commands, **_with_remarks(found.config)}
    file.write_text(json.dumps(tree, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    print("", f"written to {file}; to train (--data is UTF-8 text or JSON lines, --help says which):", sep="\n")
    print(f"  {commands['_train']}")
    return 0


def base_config(method: str, ranks: int, *, nvme: bool) -> dict[str, Any]:
    """Return the values of the config that the plan does not choose."""
    zero = {"offload_optimizer": {"device": "nvme", "nvme_path": "offload"}} if nvme else {}
    params = {"lr": _RATES[method], "betas": [0.9, 0.95], "weight_decay": 0.1 if method == FULL else 0.0}
    return {
        "train_batch_size": ranks * math.ceil(_SAMPLES / ranks),
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": params},
        "zero_optimization": zero,
        "steps_per_print": 10,
        "seed": 42,
    }


def _with_remarks(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``config`` with a remark before each key that has one."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        if key in _REMARKS:
            found[f"_{key}"] = _REMARKS[key]
        found[key] = value
    return found


def _ask(given: str | None, option: str, question: str, default: str | None = None) -> str:
    """Return ``given``, or an answer from a terminal, or the default. UsageError if none of these exists."""
    if given:
        return given
    answer = ""
    if sys.stdin.isatty():
        with suppress(EOFError):
            answer = input(f"{question}{f' [{default}]' if default else ''}: ").strip()
    if not (answer or default):
        raise UsageError(f"expected {option}: {question}", code="init-answer-missing")
    return answer or str(default)


def _here() -> str | None:
    """Return this machine's GPUs in the form of --gpus; None if it has none."""
    import torch

    count = devices.count()
    return f"{count}x{show_bytes(torch.cuda.get_device_properties(0).total_memory).replace(' ', '')}" if count else None
