"""How long plans of large models take: CPU seconds of one core, in fresh processes, with all that these import.

``python -m benchmarks.plan_speed`` runs ``shardengine plan`` and prints a table; it writes
``benchmarks/results/plan_speed-<machine>.json``. Nothing is loaded: of a model a config.json is enough.

    8B       a Llama of 8 billion parameters on 16 GPUs, stage 3, activations computed again
    70B      one of 70 billion on 64 GPUs, with the time of a step
    choose   the fastest config that fits for that of 8 billion on 4 GPUs of 24 GB, of some two dozen that are planned;
             ``first`` is when stderr has named one that fits

Seconds are of the process (user and system), so that what else runs on the machine does not count as a wait; on a core
that is shared they grow all the same. ``imports`` are those of torch and transformers alone.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.reporting import machine, table, write_result

ROOT = Path(__file__).resolve().parent.parent
LIMITS = {"8B": 5.0, "70B": 20.0, "choose": 30.0, "first": 5.0}
"""Seconds that a case may take."""
_LLAMA: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16", "vocab_size": 128_256,
    "num_key_value_heads": 8, "max_position_embeddings": 8192, "tie_word_embeddings": False, "hidden_act": "silu",
}  # fmt: skip
MODELS: Mapping[str, Mapping[str, Any]] = {
    "8B": {**_LLAMA, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
           "intermediate_size": 14_336},
    "70B": {**_LLAMA, "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64,
            "intermediate_size": 28_672},
}  # fmt: skip
_BASE: Mapping[str, Any] = {
    "bf16": {"enabled": True}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}, "zero_optimization": {"stage": 3}
}  # fmt: skip
_WHOLE = {**_BASE, "train_micro_batch_size_per_gpu": 1, "activation_checkpointing": {"enabled": True}}
CASES: Mapping[str, tuple[str, Mapping[str, Any], list[str]]] = {
    "8B": ("8B", _WHOLE, ["--gpus", "16x24GB"]),
    "70B": ("70B", _WHOLE, ["--gpus", "64x80GB", "--node", "8", "--tflops", "312", "--link", "25GB/s@20us"]),
    "choose": ("8B", _BASE, ["--gpus", "4x24GB", "--host-memory", "128GB", "--choose"]),
}
"""The model, the config, and further options."""


def seconds_of(command: list[str], folder: Path) -> tuple[float, float | None, str]:
    """CPU seconds of a fresh process, those after which it has named a config that fits, and what it printed."""
    with (folder / "out").open("w+") as out:
        process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.PIPE, text=True)
        assert process.stderr is not None
        first, said = None, []
        for line in process.stderr:
            said.append(line)
            if first is None and "best so far" in line:
                first = _cpu_seconds(process.pid)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode not in (0, 1):
            raise SystemExit(f"{' '.join(command)} failed:\n{''.join(said[-20:])}")
        out.seek(0)
        return usage.ru_utime + usage.ru_stime, first, out.read()


def _cpu_seconds(process: int) -> float | None:
    """Of a process that runs; None where the system does not tell."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(rounds: int) -> dict[str, Any]:
    """``rounds`` of all cases, one after the other, after one that warms the file cache."""
    samples: dict[str, list[float]] = {name: [] for name in ("imports", *CASES, "first")}
    plans: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        for name, values in MODELS.items():
            (folder / name).mkdir()
            (folder / name / "config.json").write_text(json.dumps(values))
        imports = [sys.executable, "-c", "import torch, transformers; transformers.LlamaForCausalLM"]
        seconds_of(imports, folder)
        for _ in range(rounds):
            samples["imports"].append(seconds_of(imports, folder)[0])
            for name, (model, config, options) in CASES.items():
                (folder / "run.json").write_text(json.dumps(config))
                command = [sys.executable, "-m", "shardengine", "plan", "--json", "--length", "2048", "--model",
                           str(folder / model), "--config", str(folder / "run.json"), *options]  # fmt: skip
                taken, first, printed = seconds_of(command, folder)
                samples[name].append(taken)
                plans[name] = json.loads(printed).get("tried", 1)
                if first is not None:
                    samples["first"].append(first)
    return {
        "benchmark": "plan_speed",
        "machine": machine(),
        "rounds": rounds,
        "cpu_seconds": {name: statistics.median(values) for name, values in samples.items() if values},
        "limits": LIMITS,
        "plans": plans,
        "samples": samples,
    }


def main(argv: list[str] | None = None) -> int:
    """Command line. Returns 0 whatever was measured: a benchmark reports."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plan_speed", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="rounds of fresh processes (default 3)")
    options = parser.parse_args(argv)
    if options.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {options.rounds}")
    began = time.perf_counter()
    result = measure(options.rounds)
    path = write_result("plan_speed", result)
    rows = [
        [name, str(result["plans"].get(name, "")), f"{seconds:.1f}", f"{LIMITS[name]:.0f}" if name in LIMITS else ""]
        for name, seconds in result["cpu_seconds"].items()
    ]
    print(table(["case", "plans", "CPU seconds", "at most"], rows))
    print(f"{time.perf_counter() - began:.0f} s; written to {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
