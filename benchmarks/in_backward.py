"""Stepping in backward: a step whose optimizer rests on the host, with ``step_in_backward`` and without, in one run.

``python -m benchmarks.in_backward`` prints a table and writes ``benchmarks/results/in_backward-<machine>.json``. It
wants an idle machine with two cores and about 3 minutes. One rank trains a stack of linear layers (fp32, AdamW, no
clipping) with one thread, so that the thread that steps has a core of its own: here a CPU plays the device, too. Rows:

    backward, step   the two parts, as they are without
    after            both, one after the other
    beside           with ``step_in_backward``, and its two parts; the bound is the longer part of ``after`` and what
                     the last bucket takes. The new weights, which have to be sent to a GPU anyway, are copied here

The engines have the same bits after every step, which is compared at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

import shardengine
from benchmarks.reporting import MIN_ROUNDS, machine, paired_ratio, table, write_result
from shardengine.comm import mesh as mesh_module

HEADER = ["", "median ms", "× after [95%]"]
ROWS = ("backward", "step", "after", "backward beside", "step beside", "beside")


def make(width: int, layers: int, mesh: mesh_module.Mesh, *, early: bool) -> shardengine.Engine:
    """An engine of its own model; all are alike."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers)))
    offload = {"device": "cpu", "step_in_backward": early}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 2, "reduce_bucket_size": width * width + width, "offload_optimizer": offload},
    }
    return shardengine.initialize(model, config, mesh=mesh)


def run(engine: shardengine.Engine, batch: torch.Tensor) -> tuple[float, float]:
    """Seconds of backward and of the step."""
    loss = engine(batch).square().mean()
    start = time.perf_counter()
    engine.backward(loss)
    middle = time.perf_counter()
    engine.step()
    return middle - start, time.perf_counter() - middle


def measure(engines: dict[str, shardengine.Engine], batch: torch.Tensor, rounds: int) -> dict[str, list[float]]:
    """Seconds of each row and round; the engines take turns at being first. The first two rounds do not count."""
    found: dict[str, list[float]] = {name: [] for name in ROWS}
    for number in range(rounds + 2):
        for name in sorted(engines, reverse=bool(number % 2)):
            backward, step = run(engines[name], batch)
            if number < 2:
                continue
            parts = ("backward", "step") if name == "after" else ("backward beside", "step beside")
            for row, spent in zip((name, *parts), (backward + step, backward, step), strict=True):
                found[row].append(spent)
    return found


def summarise(seconds: dict[str, list[float]]) -> dict[str, dict[str, Any]]:
    """Row → median and its ratio to ``after``."""
    return {
        name: {"median_s": statistics.median(of), "of_after": asdict(paired_ratio(of, seconds["after"]))}
        for name, of in seconds.items()
    }


def cells(rows: dict[str, dict[str, Any]]) -> list[list[str]]:
    """The table under ``HEADER``."""
    return [
        [name, f"{row['median_s'] * 1e3:.1f}", "{median:.3f} [{low:.3f}, {high:.3f}]".format(**row["of_after"])]
        for name, row in rows.items()
    ]


def same_bits(engines: dict[str, shardengine.Engine]) -> bool:
    """Whether all engines have the same weights."""
    first, *others = (engine.state_dict() for engine in engines.values())
    return all(torch.equal(first[name], other[name]) for other in others for name in first)


def main(argv: list[str] | None = None) -> int:
    """Command line. Returns 0 whatever is found: a benchmark reports, a test decides."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.in_backward", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--rounds", type=int, default=MIN_ROUNDS, help="paired rounds (fewer than 20 decide nothing)")
    parser.add_argument("--width", type=int, default=2048, help="of a layer")
    parser.add_argument("--layers", type=int, default=16, help="each a bucket of width² parameters")
    parser.add_argument("--rows", type=int, default=256, help="of the batch: sets how long backward takes")
    parser.add_argument("--json", action="store_true", help="print the result as JSON instead of a table")
    parser.add_argument("--no-write", action="store_true", help="leave benchmarks/results as it is")
    options = parser.parse_args(argv)
    if min(options.rounds, options.width, options.layers, options.rows) < 1:
        parser.error("expected at least 1 of each")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    mesh = mesh_module.build(torch.device("cpu"))
    try:
        engines = {
            name: make(options.width, options.layers, mesh, early=name == "beside") for name in ("after", "beside")
        }
        seconds = measure(engines, torch.ones(options.rows, options.width), options.rounds)
        same = same_bits(engines)
        for engine in engines.values():
            engine.close()
    finally:
        mesh.destroy(orderly=True)
        torch.set_num_threads(threads)
    if not same:
        raise SystemExit("the two engines have different weights")
    setting = {name: getattr(options, name) for name in ("width", "layers", "rows")}
    setting["parameters"] = options.layers * (options.width**2 + options.width)
    result: dict[str, Any] = {
        "benchmark": "in_backward", "machine": machine(), "rounds": options.rounds, "setting": setting,
        "load_after": os.getloadavg()[0], "rows": summarise(seconds), "seconds": seconds,
    }  # fmt: skip
    print(json.dumps(result, indent=1) if options.json else table(HEADER, cells(result["rows"])))
    where = "not written, as asked" if options.no_write else f"written to {write_result('in_backward', result)}"
    print(where, file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
