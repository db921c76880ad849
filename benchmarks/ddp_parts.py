"""Where the time of a short step at stage 0 goes, beside torch DDP's and beside no communication at all.

``python -m benchmarks.ddp_parts`` starts the ranks itself, one thread each, pinned to a core, on 2 and then on 4 ranks,
prints tables and writes ``benchmarks/results/ddp_parts-<machine>.json``. It wants an idle machine and 3 minutes. The
model is that of ``benchmarks.ddp``. In every round each config takes one step, whose phases are timed, and then each
operation runs alone, once, on as many elements as the model has: gloo's all-reduce, which torch DDP calls; the
all-to-all, the sum and the broadcasts that take its place here; the copy into a bucket; squares for the norm, which
torch's loop computes in its update.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.ddp import SETTING, Point
from benchmarks.ranks import collected, joined, leave
from benchmarks.reporting import MIN_ROUNDS, Ratio, machine, paired_ratio, table, write_result
from benchmarks.workload import PlainLoop, Setting, batch_of, make_model
from shardengine.kernels import flatten, ordered_sum, sum_of_squares

BASE = "torch 25 MB"
PHASES = ("forward", "backward", "update", "all")
POINTS: dict[str, Point | None] = {
    "no communication": None,
    BASE: Point(False, 25),
    "torch one bucket": Point(False, 1e4),
    "ours auto": Point(True, "auto"),
    "ours one bucket": Point(True, 50_000_000),
    "ours noop": Point(True, "auto", more={"comm_hook": {"name": "noop"}}),
}
"""None: the plain loop. noop: gradients are not reduced, and gathered all the same."""
PIECES = 76
"""Tensors that are copied into a bucket."""


@dataclass(frozen=True)
class Plan:
    """What a group of ranks does."""

    setting: Setting
    rounds: int
    warmup: int
    folder: str


def operations(elements: int, ranks: int) -> dict[str, Callable[[], object]]:
    """Each alone, on a gradient of so many elements."""
    elements -= elements % (ranks * PIECES)
    full, received = torch.zeros(elements), torch.zeros(elements)
    own, pieces = torch.zeros(elements // ranks), list(torch.zeros(elements).chunk(PIECES))
    starts = [number * len(pieces[0]) for number in range(PIECES)]

    def broadcasts() -> None:
        works: list[Any] = [dist.broadcast(part, r, async_op=True) for r, part in enumerate(full.chunk(ranks))]
        for work in works:
            work.wait()

    return {
        "gloo's all-reduce": lambda: dist.all_reduce(full),
        "all-to-all": lambda: dist.all_to_all_single(received, full),
        "sum of the slices": lambda: ordered_sum(received.chunk(ranks), own, divisor=ranks),
        "broadcasts of the slices": broadcasts,
        "copy into a bucket": lambda: flatten(pieces, starts, full),
        "squares of a slice": lambda: sum_of_squares(own),
    }


def step(loop: Any, batch: dict[str, Tensor]) -> list[float]:
    """The seconds of each phase, and of all."""
    marks = [time.perf_counter()]
    loss = loop.forward(batch)
    marks.append(time.perf_counter())
    loop.backward(loss)
    marks.append(time.perf_counter())
    loop.update()
    marks.append(time.perf_counter())
    return [after - before for before, after in pairwise(marks)] + [marks[-1] - marks[0]]


def rank_main(rank: int, plan: Plan) -> None:
    """One rank from start to end."""
    setting = plan.setting
    with joined(rank, setting.ranks, plan.folder):
        loops: dict[str, Any] = {}
        for name, point in POINTS.items():
            model = make_model(setting, own=True)
            loops[name] = PlainLoop(model, setting) if point is None else point.build(model, setting).loop
        alone, names = operations(setting.parameters(), setting.ranks), list(loops)
        seconds: dict[str, list[list[float]]] = {name: [] for name in (*names, *alone)}
        for number in range(plan.warmup + plan.rounds):
            first = number % len(names)
            for name in (*names[first:], *names[:first], *alone):
                batch = batch_of(setting, rank, number)
                dist.barrier()
                if name in loops:
                    taken = step(loops[name], batch)
                else:
                    start = time.perf_counter()
                    alone[name]()
                    taken = [time.perf_counter() - start]
                if number >= plan.warmup:
                    seconds[name].append(taken)
        leave(rank, plan.folder, {"seconds": seconds})
        for loop in loops.values():
            loop.close()


def run(setting: Setting, rounds: int, warmup: int) -> dict[str, Any]:
    """Of the slowest rank: milliseconds of each phase, of each operation, and a step's ratio to ``BASE``."""
    with tempfile.TemporaryDirectory(prefix="shardengine-bench-") as folder:
        ranks = collected(rank_main, Plan(setting, rounds, warmup, folder), setting.ranks, folder)
    seconds = {
        name: [[max(each) for each in zip(*taken, strict=True)] for taken in zip(*of_ranks, strict=True)]
        for name in ranks[0]["seconds"]
        for of_ranks in [[rank["seconds"][name] for rank in ranks]]
    }
    return summarise(seconds)


def summarise(seconds: dict[str, list[list[float]]]) -> dict[str, Any]:
    """Config or operation → its rounds, each a list of phases → medians."""
    whole = {name: [taken[-1] for taken in of] for name, of in seconds.items()}
    steps = {
        name: {
            **{phase: _median_ms([taken[number] for taken in seconds[name]]) for number, phase in enumerate(PHASES)},
            "of_base": asdict(paired_ratio(whole[name], whole[BASE])),
        }
        for name in POINTS
    }
    return {"steps": steps, "alone": {name: _median_ms(of) for name, of in whole.items() if name not in POINTS}}


def _median_ms(seconds: Sequence[float]) -> float:
    return statistics.median(seconds) * 1e3


def tables(runs: Sequence[dict[str, Any]]) -> str:
    """All runs, for people."""
    texts = []
    for found in runs:
        rows = [
            [name, *(f"{row[phase]:.1f}" for phase in PHASES), str(Ratio(**row["of_base"]))]
            for name, row in found["steps"].items()
        ]
        texts.append(table([f"{found['ranks']} ranks, ms", *PHASES, f"× {BASE} [95%]"], rows))
        texts.append(table(["alone", "ms"], [[name, f"{ms:.1f}"] for name, ms in found["alone"].items()]))
    return "\n\n".join(texts)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ddp_parts", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=MIN_ROUNDS, help="paired rounds (fewer than 20 decide nothing)")
    parser.add_argument("--warmup", type=int, default=3, help="steps of each config before the first measured round")
    parser.add_argument("--hidden", type=int, default=SETTING.hidden, help="a multiple of 64")
    parser.add_argument("--no-write", action="store_true", help="leave benchmarks/results as it is")
    options = parser.parse_args(argv)
    if min(options.ranks) < 2 or options.rounds < 1 or options.warmup < 0 or options.hidden % 64:
        parser.error("--ranks must be at least 2, --rounds at least 1, --warmup at least 0, --hidden a multiple of 64")
    return options


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    options = parse(argv)
    setting = replace(SETTING, hidden=options.hidden)
    runs = []
    for ranks in options.ranks:
        runs.append({"ranks": ranks, **run(replace(setting, ranks=ranks), options.rounds, options.warmup)})
    result = {
        "benchmark": "ddp_parts", "machine": machine(), "rounds": options.rounds,
        "setting": {key: value for key, value in asdict(setting).items() if key != "ranks"}
        | {"parameters": setting.parameters(), "cores": len(os.sched_getaffinity(0))},
        "runs": runs,
    }  # fmt: skip
    print(tables(runs))
    if options.no_write or setting != SETTING or options.rounds < MIN_ROUNDS:
        why = ", as asked" if options.no_write else f": results are kept for one model and {MIN_ROUNDS} rounds or more"
        print(f"not written{why}", file=sys.stderr)
        return 0
    write_result("ddp_parts", json.loads(json.dumps(result)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
