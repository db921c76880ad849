"""What ``from shardengine import *`` costs on top of ``import torch``: fresh processes, interleaved (A B A B …).

``python -m benchmarks.import_time`` prints a table and writes ``benchmarks/results/import_time-<machine>.json``.
The target is at most 100 ms over torch.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.reporting import machine, table, write_result

TARGET_MS = 100.0
MIN_IMPORT_ROUNDS = 10
"""Fewer paired rounds than this decide nothing."""
ROOT = Path(__file__).resolve().parent.parent
STATEMENTS = {"torch": "import torch", "torch + shardengine": "import torch; from shardengine import *"}


def import_ms(statement: str, bytecode: str) -> float:
    """Milliseconds that ``statement`` takes inside a fresh interpreter (its own start-up not counted).

    bytecode: a directory for what is compiled, as an installed package has it.
    """
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPYCACHEPREFIX"] = bytecode
    code = f"import time; t = time.perf_counter(); {statement}; print((time.perf_counter() - t) * 1e3)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise SystemExit(f"`{statement}` failed in a fresh process:\n{done.stderr}")
    return float(done.stdout.strip().splitlines()[-1])


def measure(rounds: int) -> dict[str, Any]:
    """Run ``rounds`` paired rounds after one that compiles, and warms the file cache; the difference is taken pair by
    pair."""
    samples: dict[str, list[float]] = {name: [] for name in STATEMENTS}
    with tempfile.TemporaryDirectory() as bytecode:
        for round_number in range(rounds + 1):
            order = list(STATEMENTS) if round_number % 2 else list(reversed(STATEMENTS))
            taken = {name: import_ms(STATEMENTS[name], bytecode) for name in order}
            if round_number:
                for name, value in taken.items():
                    samples[name].append(value)
    base, ours = samples.values()
    extra = np.asarray(ours) - np.asarray(base)
    picks = np.random.default_rng(0).integers(0, rounds, size=(4000, rounds))
    low, high = (float(value) for value in np.percentile(np.median(extra[picks], axis=1), [2.5, 97.5]))
    outcome = "not decided"
    if rounds >= MIN_IMPORT_ROUNDS and not low <= TARGET_MS < high:
        outcome = "reached" if high <= TARGET_MS else "missed"
    return {
        "benchmark": "import_time",
        "machine": machine(),
        "rounds": rounds,
        "median_ms": {name: statistics.median(values) for name, values in samples.items()},
        "over_torch_ms": {"median": float(np.median(extra)), "low": low, "high": high},
        "target_ms": TARGET_MS,
        "verdict": outcome,
        "samples_ms": samples,
    }


def main(argv: list[str] | None = None) -> int:
    """Command line. Returns 0 whatever the verdict: a benchmark reports, a test decides."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.import_time", description=__doc__)
    parser.add_argument("--rounds", type=int, default=11, help="paired rounds of fresh processes (default 11)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON instead of a table")
    options = parser.parse_args(argv)
    if options.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {options.rounds}")
    result = measure(options.rounds)
    path = write_result("import_time", result)
    if options.json:
        print(json.dumps(result, indent=1))
        return 0
    rows = [[name, f"{value:.0f}"] for name, value in result["median_ms"].items()]
    print(table(["import", "median ms"], rows))
    over = result["over_torch_ms"]
    print(
        f"shardengine over torch: {over['median']:.0f} ms [{over['low']:.0f}, {over['high']:.0f}], "
        f"target {TARGET_MS:.0f} ms: {result['verdict']}"
    )
    print(f"written to {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
