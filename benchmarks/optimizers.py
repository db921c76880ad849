"""A step of the engine beside the same class of optimizer in plain torch, on one rank, in one run.

``python -m benchmarks.optimizers`` prints a table and writes ``benchmarks/results/optimizers-<machine>.json``. It wants
an idle machine and about 4 minutes. Both have a stack of linear layers in fp32 and step with gradients that are there
already; the engine is at stage 0 without clipping, so that its step takes no norm and sends nothing. Rows: AdamW and
SGD by the engine's kernels, Muon by owners of its matrices (which are all that its layers have, an eighth as wide),
Adafactor by sums over rows and columns that are exact, other classes by themselves on slices. "beside" is what plain
torch's step took, in paired rounds that take turns at being first; the weights of classes and of Muon are compared at
the end, bit for bit. Muon has DeepSpeed's beside it, at stage 1, where that is installed: forward, backward and step of
both, because each makes its products where it wants. The trial is what ``initialize`` takes to admit the class.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import shardengine
from benchmarks.peers import import_deepspeed
from benchmarks.reporting import MIN_ROUNDS, machine, paired_ratio, table, write_result
from shardengine.comm import mesh as mesh_module
from shardengine.optim import probe

HEADER = ["", "stepped by", "trial ms", "step ms", "× plain torch [95%]", "× DeepSpeed [95%]"]
CLASSES: dict[str, tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {"fused": True}),
    "SGD, momentum": (torch.optim.SGD, {"momentum": 0.9, "fused": True}),
    "AMSGrad": (torch.optim.AdamW, {"amsgrad": True}),
    "NAdam": (torch.optim.NAdam, {}),
    "RAdam": (torch.optim.RAdam, {}),
    "Adagrad": (torch.optim.Adagrad, {}),
    "RMSprop": (torch.optim.RMSprop, {}),
    "Adamax": (torch.optim.Adamax, {}),
    "Muon": (torch.optim.Muon, {}),
    "Adafactor": (torch.optim.Adafactor, {}),
}
_WAYS = {"AdamW": "kernels", "SGD, momentum": "kernels", "Muon": "owners", "Adafactor": "exact sums"}
"""How a row is stepped, if not by its class."""
_OTHER_BITS = ("kernels", "exact sums")
"""Ways that add or round in another order than torch."""
_NARROWER = {"Muon": 8}
"""How many times narrower a row's layers are: its products of bf16 matrices take minutes on many CPUs."""


def their_muon(model: nn.Module) -> Any:
    """DeepSpeed's engine with its Muon, at stage 1; None where it is not installed."""
    if find_spec("deepspeed") is None:
        return None
    for parameter in model.parameters():
        parameter.use_muon = True  # type: ignore[attr-defined]  # what its Muon looks for
    config = {
        "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True,
        "optimizer": {"type": "Muon", "params": {"lr": 1e-4}},
    }  # fmt: skip
    if not dist.is_initialized():
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    deepspeed = import_deepspeed()
    return deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config, dist_init_required=False
    )[0]


def make(width: int, layers: int, *, bias: bool) -> nn.Module:
    """The model of every row."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width, bias=bias) for _ in range(layers)))


def train_on(engine: Any, batch: torch.Tensor) -> None:
    """Forward, backward and step: where an engine does which part of Muon is its own matter."""
    engine.backward(engine(batch).square().mean())
    engine.step()


def timed(call: Callable[[], Any]) -> float:
    """Seconds that it takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure(name: str, width: int, layers: int, rounds: int, mesh: mesh_module.Mesh) -> dict[str, Any]:
    """Seconds of both sides in each round, of the trial, and whether the weights are equal. Two rounds do not count."""
    made_by, options = CLASSES[name]
    width = max(width // _NARROWER.get(name, 1), 1)
    ours, plain, other = (make(width, layers, bias=name != "Muon") for _ in range(3))
    optimizer, given = made_by(plain.parameters(), lr=1e-4, **options), made_by(ours.parameters(), lr=1e-4, **options)
    start = time.perf_counter()
    if name not in _WAYS:
        probe.elementwise(given, name)
    trial = 0.0 if name in _WAYS else time.perf_counter() - start
    config = {"train_micro_batch_size_per_gpu": 1, "nonfinite_gradients": "step", "zero_optimization": {"stage": 0}}
    engine = shardengine.initialize(ours, config, optimizer=given, mesh=mesh)
    theirs = their_muon(other) if name == "Muon" else None
    batch = torch.ones(4, width)
    seconds: dict[str, list[float]] = {"ours": [], "plain": []}
    whole: dict[str, list[float]] = {} if theirs is None else {"ours": [], "deepspeed": []}
    for number in range(rounds + 2):
        engine.backward(engine(batch).square().mean())
        optimizer.zero_grad()
        plain(batch).square().mean().backward()
        for side in sorted(seconds, reverse=bool(number % 2)):
            step: Callable[[], Any] = engine.step if side == "ours" else optimizer.step
            took = timed(step)
            seconds[side] += [took] if number >= 2 else []
        for side in sorted(whole, reverse=bool(number % 2)):
            took = timed(functools.partial(train_on, engine if side == "ours" else theirs, batch))
            whole[side] += [took] if number >= 2 else []
        if theirs is not None:  # the engine is a step ahead
            optimizer.zero_grad()
            plain(batch).square().mean().backward()
            optimizer.step()
    weights = engine.state_dict()
    same = all(torch.equal(weights[key], value) for key, value in plain.state_dict().items())
    engine.close()
    if theirs is not None:
        theirs.destroy()
    return {"seconds": seconds, "whole": whole, "trial_s": trial, "same_bits": same, "by": _WAYS.get(name, "its class")}


def summarise(found: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Row → median, ratio to plain torch, and the rest."""
    return {
        name: {
            "median_s": statistics.median(row["seconds"]["ours"]),
            "of_plain": asdict(paired_ratio(row["seconds"]["ours"], row["seconds"]["plain"])),
            **_beside_deepspeed(row.get("whole", {})),
            **{key: row[key] for key in ("trial_s", "same_bits", "by")},
        }
        for name, row in found.items()
    }


def _beside_deepspeed(whole: dict[str, list[float]]) -> dict[str, Any]:
    return {"of_deepspeed": asdict(paired_ratio(whole["ours"], whole["deepspeed"]))} if whole else {}


def cells(rows: dict[str, dict[str, Any]]) -> list[list[str]]:
    """The table under ``HEADER``."""
    return [
        [
            name,
            row["by"],
            f"{row['trial_s'] * 1e3:.0f}" if row["trial_s"] else "",
            f"{row['median_s'] * 1e3:.1f}",
            _ratio(row["of_plain"]),
            _ratio(row["of_deepspeed"]) if "of_deepspeed" in row else "",
        ]
        for name, row in rows.items()
    ]


def _ratio(found: dict[str, Any]) -> str:
    return "{median:.3f} [{low:.3f}, {high:.3f}]".format(**found)


def main(argv: list[str] | None = None) -> int:
    """Command line. Returns 0 whatever is found: a benchmark reports, a test decides."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.optimizers", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=MIN_ROUNDS, help="paired rounds (fewer than 20 decide nothing)")
    parser.add_argument("--width", type=int, default=1024, help="of a layer")
    parser.add_argument("--layers", type=int, default=16, help="of width² parameters each")
    parser.add_argument("--json", action="store_true", help="print the result as JSON instead of a table")
    parser.add_argument("--no-write", action="store_true", help="leave benchmarks/results as it is")
    options = parser.parse_args(argv)
    if min(options.rounds, options.width, options.layers) < 1:
        parser.error("expected at least 1 of each")
    mesh = mesh_module.build(torch.device("cpu"))
    try:
        found = {name: measure(name, options.width, options.layers, options.rounds, mesh) for name in CLASSES}
    finally:
        mesh.destroy(orderly=True)
    if differing := [name for name, row in found.items() if row["by"] not in _OTHER_BITS and not row["same_bits"]]:
        raise SystemExit(f"other weights than plain torch: {', '.join(differing)}")
    setting = {name: getattr(options, name) for name in ("width", "layers")}
    setting["parameters"] = options.layers * (options.width**2 + options.width)
    result: dict[str, Any] = {
        "benchmark": "optimizers", "machine": machine(), "rounds": options.rounds, "setting": setting,
        "threads": torch.get_num_threads(), "load_after": os.getloadavg()[0], "rows": summarise(found),
        "seconds": {name: row["seconds"] for name, row in found.items()},
        "seconds_of_whole_steps": {name: row["whole"] for name, row in found.items() if row["whole"]},
    }  # fmt: skip
    print(json.dumps(result, indent=1) if options.json else table(HEADER, cells(result["rows"])))
    where = "not written, as asked" if options.no_write else f"written to {write_result('optimizers', result)}"
    print(where, file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
