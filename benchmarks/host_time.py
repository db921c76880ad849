"""What Python does per step, in ms: of thin models beside DDP and FSDP2, and of the layouts of large ones.

``python -m benchmarks.host_time`` prints two tables and writes ``benchmarks/results/host_time-<machine>.json``. It
wants an idle machine and less than 6 minutes. One process is rank 0 of eight in a process group that carries nothing,
so that no time is spent on other ranks.

    thin      blocks like Llama's, 16 wide, so that a block computes next to nothing; a bucket, and at stage 3 a unit,
              per block. Rows are ms per block that forward, backward and step take longer than the same model in a
              plain torch loop with the same optimizer; calls into torch.distributed and kernels are included
    layouts   of GPT-2 1.5B, Llama 8B and 70B, without memory (``host_layouts.py``): ms per step for everything that is
              neither a collective nor a kernel. Some of it is the meta device's own

Times are of the processor, so that what else runs disturbs them less. Variants take turns, round by round; each number
is the median of paired differences with its 95% interval.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import shardengine
from benchmarks import host_layouts
from benchmarks.host_layouts import LAYOUTS, PHASES, RANKS, STAGES, Shape, carry_nothing
from benchmarks.reporting import MIN_ROUNDS, machine, table, write_result
from shardengine.comm.mesh import Mesh
from shardengine.core import closing

WIDTH = 16
BUCKETS = (12_500_000, 100_000_000)
PER_UNIT_MS = 0.3
"""The target for a unit of stage 3 and a pass, forward or backward."""
PER_STEP_MS = 10.0
"""The target for Llama 8B and a step."""


class _Block(nn.Module):
    """The parameters of a Llama block, without attention."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.norm_1, self.norm_2 = (nn.Parameter(torch.ones(WIDTH)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.norm_1
        x = x + 0.1 * self.o(self.q(y) + self.k(y) + self.v(y))
        y = x * self.norm_2
        shown: Tensor = x + 0.1 * self.down(self.gate(y) * self.up(y))
        return shown


class Thin(nn.Module):
    """So many blocks between two linear layers."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.blocks = nn.ModuleList(_Block() for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        """A scalar."""
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        loss: Tensor = self.last(x).mean()
        return loss


class Loop(Protocol):
    """One variant; a step is the three in this order."""

    def forward(self, x: Tensor) -> Tensor:
        """The loss."""

    def backward(self, loss: Tensor) -> None:
        """Gradients."""

    def step(self) -> None:
        """Step and forget gradients."""


class _Torch:
    """The plain loop over ``model``, which may be wrapped."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self._model(x)
        return loss

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()


class _Ours:
    """The engine at one stage; two units are gathered ahead, as in a model whose blocks are large."""

    def __init__(self, layers: int, stage: str, mesh: Mesh) -> None:
        model = Thin(layers)
        block = sum(parameter.numel() for parameter in model.blocks[0].parameters())
        zero = {**STAGES[stage], "reduce_bucket_size": block, "stage3_prefetch_bucket_size": 2 * block}
        self.engine = shardengine.initialize(
            model,
            {
                "train_micro_batch_size_per_gpu": 1,
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
                "reproducible": True,
                "nonfinite_gradients": "step",  # what the group "fake" leaves in a buffer is undefined
                "zero_optimization": zero,
            },
            mesh=mesh,
        )

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.engine(x)
        return loss

    def backward(self, loss: Tensor) -> None:
        self.engine.backward(loss)

    def step(self) -> None:
        self.engine.step()


def _ddp(layers: int) -> Loop:
    """Its own all-reduce wants a result, which this process group has not: a hook returns the bucket at once."""

    def keep(bucket: Any) -> torch.futures.Future[Tensor]:
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    wrapped = DistributedDataParallel(Thin(layers), gradient_as_bucket_view=True)
    wrapped.register_comm_hook(None, lambda state, bucket: keep(bucket))
    return _Torch(wrapped)


def _fsdp2(layers: int) -> Loop:
    model, mesh = Thin(layers), init_device_mesh("cpu", (RANKS,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _Torch(model)


def variants(layers: int, mesh: Mesh) -> dict[str, Loop]:
    """All that take turns; "plain" is what the others are compared with."""
    ours: dict[str, Loop] = {f"stage {stage}": _Ours(layers, stage, mesh) for stage in STAGES}
    return {"plain": _Torch(Thin(layers)), **ours, "DDP": _ddp(layers), "FSDP2": _fsdp2(layers)}


def run(loop: Loop, x: Tensor) -> list[float]:
    """CPU seconds of one step's phases."""
    times = [time.process_time()]
    loss = loop.forward(x)
    times.append(time.process_time())
    loop.backward(loss)
    times.append(time.process_time())
    loop.step()
    times.append(time.process_time())
    return [after - before for before, after in itertools.pairwise(times)]


def measure_thin(layers: int, rounds: int, mesh: Mesh) -> dict[str, dict[str, list[float]]]:
    """Variant → phase → seconds per block and round over the plain loop's. The first two rounds do not count."""
    loops, x = variants(layers, mesh), torch.ones(1, WIDTH)
    found: dict[str, list[list[float]]] = {name: [] for name in loops if name != "plain"}
    for number in range(rounds + 2):
        taken = {name: run(loops[name], x) for name in sorted(loops, reverse=bool(number % 2))}
        for name in found if number >= 2 else ():
            found[name].append([(o - p) / layers for o, p in zip(taken[name], taken["plain"], strict=True)])
    with mock.patch.object(closing, "part", lambda *_args, **_options: ""):  # the other ranks never say that they close
        for loop in loops.values():
            if isinstance(loop, _Ours):
                loop.engine.close()
    return {name: {phase: [row[i] for row in rows] for i, phase in enumerate(PHASES)} for name, rows in found.items()}


def interval(seconds: Sequence[float]) -> dict[str, float]:
    """The median in ms, with the 95% interval of that median over bootstraps."""
    samples = np.asarray(seconds, dtype=np.float64) * 1e3
    picks = np.random.default_rng(0).integers(0, len(samples), size=(4000, len(samples)))
    low, high = np.percentile(np.median(samples[picks], axis=1), [2.5, 97.5])
    return {"median": float(np.median(samples)), "low": float(low), "high": float(high)}


def verdict(found: Mapping[str, float], target: float, rounds: int) -> str:
    """Whether a number of ms is at most ``target``: only if its whole interval says so."""
    if rounds < MIN_ROUNDS or found["low"] <= target < found["high"]:
        return "not decided"
    return "reached" if found["high"] <= target else "missed"


def summarise(seconds: Mapping[str, Sequence[float]]) -> dict[str, dict[str, float]]:
    """Phase → ``interval``, and of their sum."""
    total = [sum(phases) for phases in zip(*seconds.values(), strict=True)]
    return {**{name: interval(of) for name, of in seconds.items()}, "sum": interval(total)}


def thin_part(layers: Sequence[int], rounds: int, mesh: Mesh) -> list[dict[str, Any]]:
    """Rows of the first table."""
    rows = []
    for count in layers:
        for name, seconds in measure_thin(count, rounds, mesh).items():
            row: dict[str, Any] = {"layers": count, "variant": name, "ms_per_block": summarise(seconds)}
            if name in ("stage 3", "stage 3k"):
                passes = ("forward", "backward")
                row["verdict"] = {of: verdict(row["ms_per_block"][of], PER_UNIT_MS, rounds) for of in passes}
            rows.append(row)
    return rows


def layout_part(layouts: Mapping[str, Shape], buckets: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    """Rows of the second table."""
    rows = []
    for name, shape in layouts.items():
        for bucket in buckets:
            for stage, found in host_layouts.measure(shape, bucket, rounds).items():
                row: dict[str, Any] = {"layout": name, "bucket_elements": bucket, "stage": stage}
                row |= {"buckets": found["buckets"], "ms_per_step": summarise(found["seconds"])}
                if name == "Llama 8B":
                    row["verdict"] = verdict(row["ms_per_step"]["sum"], PER_STEP_MS, rounds)
                rows.append(row)
    return rows


def _cells(found: Mapping[str, Mapping[str, float]], digits: int) -> list[str]:
    shown: Callable[[float], str] = f"{{:.{digits}f}}".format
    return [f"{shown(of['median'])} [{shown(of['low'])}, {shown(of['high'])}]" for of in found.values()]


def tables(result: Mapping[str, Any]) -> str:
    """Both, for people."""
    columns = [*PHASES, "sum"]
    thin = [[row["variant"], str(row["layers"]), *_cells(row["ms_per_block"], 3)] for row in result["thin"]]
    layouts = [
        [f"{row['layout']}, stage {row['stage']}", f"{row['bucket_elements'] / 1e6:g}M", str(row["buckets"]),
         *_cells(row["ms_per_step"], 1), row.get("verdict", "")]
        for row in result["layouts"]
    ]  # fmt: skip
    first = table(["ms per block over plain", "layers", *columns], thin)
    return f"{first}\n\n{table(['ms per step', 'bucket', 'buckets', *columns, '8B: at most 10 ms'], layouts)}"


def main(argv: list[str] | None = None) -> int:
    """Command line. Returns 0 whatever is found: a benchmark reports, a test decides."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host_time", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=MIN_ROUNDS, help="paired rounds (fewer than 20 decide nothing)")
    parser.add_argument("--layers", type=int, nargs="+", default=[32, 80], help="of the thin models")
    parser.add_argument("--layouts", nargs="*", choices=list(LAYOUTS), default=list(LAYOUTS))
    parser.add_argument("--json", action="store_true", help="print the result as JSON instead of tables")
    parser.add_argument("--no-write", action="store_true", help="leave benchmarks/results as it is")
    options = parser.parse_args(argv)
    if min(options.rounds, *options.layers) < 1:
        parser.error("expected at least 1 of each")
    torch.set_num_threads(1)
    began = time.perf_counter()
    thin = thin_part(options.layers, options.rounds, carry_nothing(torch.device("cpu")))
    chosen = {name: LAYOUTS[name] for name in options.layouts}
    result: dict[str, Any] = {
        "benchmark": "host_time", "machine": machine(), "rounds": options.rounds, "ranks": RANKS,
        "targets_ms": {"unit_and_pass": PER_UNIT_MS, "llama_8b_step": PER_STEP_MS}, "thin": thin,
        "layouts": layout_part(chosen, BUCKETS, options.rounds),
        "seconds": round(time.perf_counter() - began), "load_after": os.getloadavg()[0],
    }  # fmt: skip
    print(json.dumps(result, indent=1) if options.json else tables(result))
    where = "not written, as asked" if options.no_write else f"written to {write_result('host_time', result)}"
    print(where, file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
