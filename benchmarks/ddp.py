"""The sweeps of the DDP paper's figures beside torch DDP: sizes of buckets, overlap, how often ranks synchronise.

``python -m benchmarks.ddp`` starts the ranks itself, one thread each, pinned to a core, on 2 and then on 4 ranks,
prints a table for each sweep and writes ``benchmarks/results/ddp-<machine>.json`` and ``.svg``, sweep by sweep, beside
those that are there (``--sweeps hooks`` measures one anew). It wants an idle machine and about 15 minutes. All configs
of a sweep are in the same processes and take turns, round by round, so that ratios are of paired rounds. A turn is one
optimizer step of ``every`` micro-batches, forward to update; its time, that of the slowest rank, is divided by
``every``.

    size     elements of a bucket, ours with "auto" among them; torch DDP's ``bucket_cap_mb``
    overlap  with and without; torch has no such switch: one bucket is full when backward is over
    sync     every 1, 2, 4, 8 micro-batches: accumulation, torch's ``no_sync``
    hooks    what travels: ours of the config, torch's fp16 and PowerSGD (in one bucket: on gloo it stands still with
             several), and no communication at all

Targets: "auto" takes at most 1.03 × the time of the sweep's best point of ours, and no more than torch DDP takes at its
own best size. The best points are found in the same run that compares with them, which favours them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks.charts import finish
from benchmarks.ranks import collected, joined, leave
from benchmarks.reporting import MIN_ROUNDS, Ratio, machine, paired_ratio, result_path, table, verdict, write_result
from benchmarks.variants import Ours
from benchmarks.workload import PlainLoop, Setting, batch_of, make_model

AUTO, BASE = "ours auto", "torch 25 MB"
"""What the targets are about, and what every ratio of the tables is taken to; both are in every sweep."""
SETTING = Setting(ranks=2, layers=6, hidden=384, vocabulary=8192, batch=1, sequence=64)
"""14M parameters, so that all configs of a sweep on 4 ranks fit into 24 GiB at once."""
RANK = 4
"""Of PowerSGD."""
TARGETS = {"best of ours": 1.03, "best of torch": 1.0}


@dataclass(frozen=True)
class Point:
    """One config. size: of ours in elements or "auto", of torch in MB · every: micro-batches of a step · more: further
    keys of our config · hook: of torch's."""

    ours: bool
    size: float | str
    every: int = 1
    more: Mapping[str, Any] = field(default_factory=dict)
    hook: str = ""

    def build(self, model: nn.Module, setting: Setting) -> Turns:
        """It, at work."""
        return (_OurTurns if self.ours else _TorchTurns)(model, setting, self)


class Turns:
    """A config at work, by its training loop and what must not end the window."""

    loop: Any

    def apart(self) -> AbstractContextManager[Any]:
        """Around the micro-batches that are not synchronised."""
        return nullcontext()

    def run(self, setting: Setting, number: int, every: int) -> float:
        """The seconds of one step."""
        batches = [batch_of(setting, dist.get_rank(), number * every + micro) for micro in range(every)]
        dist.barrier()
        start = time.perf_counter()
        for micro, batch in enumerate(batches):
            with self.apart() if micro + 1 < every else nullcontext():
                self.loop.backward(self.loop.forward(batch))
                if micro + 1 < every:
                    self.between()
        self.loop.update()
        return time.perf_counter() - start

    def between(self) -> None:
        """After a micro-batch that does not end the window."""

    def found(self) -> dict[str, Any]:
        """What it says of itself."""
        return {}


class _OurTurns(Turns):
    def __init__(self, model: nn.Module, setting: Setting, point: Point) -> None:
        zero = {"stage": 0, "reduce_bucket_size": point.size}
        more = {"gradient_accumulation_steps": point.every, **point.more}
        self.loop = Ours(model, setting, zero=zero, more=more)

    def between(self) -> None:
        """Off the boundary ``step`` counts."""
        self.loop.engine.step()

    def found(self) -> dict[str, Any]:
        engine = self.loop.engine
        return {"buckets": len(engine._core.layout.buckets), "tuning": engine.tuning(),
                "elements": engine.config.zero_optimization.reduce_bucket_size}  # fmt: skip


class _Accumulating(PlainLoop):
    """As the plain loop, with the loss divided by the micro-batches of a step."""

    every = 1

    def backward(self, loss: Any) -> None:
        """Plain autograd."""
        super().backward(loss / self.every if self.every > 1 else loss)


class _TorchTurns(Turns):
    def __init__(self, model: nn.Module, setting: Setting, point: Point) -> None:
        self._wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=float(point.size))
        if point.hook == "fp16":
            self._wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
        elif point.hook == "power_sgd":
            state = powerSGD_hook.PowerSGDState(None, RANK, start_powerSGD_iter=2)
            self._wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        self.loop = _Accumulating(self._wrapped, setting)
        self.loop.every = point.every

    def apart(self) -> AbstractContextManager[Any]:
        """DDP's own."""
        return self._wrapped.no_sync()


def _ours(*sizes: float | str, **options: Any) -> dict[str, Point]:
    return {f"ours {size if size == 'auto' else f'{float(size) / 1e6:g}M'}": Point(True, size, **options)
            for size in sizes}  # fmt: skip


def _torch(*sizes: float, **options: Any) -> dict[str, Point]:
    return {f"torch {size:g} MB": Point(False, size, **options) for size in sizes}


def _hook(name: str, **params: Any) -> dict[str, Point]:
    return {f"ours {name}": Point(True, "auto", more={"comm_hook": {"name": name, "params": params}})}


def _every(count: int) -> dict[str, Point]:
    both = {**_ours("auto", every=count), **_torch(25, every=count)}
    return both if count == 1 else {f"{name}, every {count}": point for name, point in both.items()}


SWEEPS: dict[str, dict[str, Point]] = {
    "size": {
        **_ours(262_144, 1_000_000, 2_000_000, 4_000_000, 8_000_000, 50_000_000, "auto"),
        **_torch(1, 2, 5, 10, 25, 100),
    },
    "overlap": {
        **_ours("auto"),
        "ours auto, no overlap": Point(True, "auto", more={"overlap_comm": False}),
        **_torch(25),
        "torch one bucket": Point(False, 1e4),
    },
    "sync": {name: point for count in (1, 2, 4, 8) for name, point in _every(count).items()},
    "hooks": {
        **_ours("auto"),
        **_torch(25),
        **{name: point for hook in ("fp16", "int8", "int4") for name, point in _hook(hook).items()},
        **_hook("power_sgd", rank=RANK, start_step=2),
        **_hook("noop"),
        "torch fp16": Point(False, 25, hook="fp16"),
        "torch power_sgd": Point(False, 1e4, hook="power_sgd"),
    },
}


@dataclass(frozen=True)
class Plan:
    """What a group of ranks does."""

    setting: Setting
    sweep: str
    rounds: int
    warmup: int
    folder: str


def rank_main(rank: int, plan: Plan) -> None:
    """One rank from start to end."""
    points = SWEEPS[plan.sweep]
    with joined(rank, plan.setting.ranks, plan.folder):
        built = {name: point.build(make_model(plan.setting, own=True), plan.setting) for name, point in points.items()}
        names = list(built)
        seconds: dict[str, list[float]] = {name: [] for name in names}
        for number in range(plan.warmup + plan.rounds):
            first = number % len(names)
            for name in (*names[first:], *names[:first]):
                taken = built[name].run(plan.setting, number, points[name].every)
                if number >= plan.warmup:
                    seconds[name].append(taken / points[name].every)
            if rank == 0:
                print(f"\r{plan.sweep}: round {number + 1}", end="", file=sys.stderr, flush=True)
        leave(rank, plan.folder, {"seconds": seconds, "found": {name: turns.found() for name, turns in built.items()}})
        for turns in built.values():
            turns.loop.close()


def run_sweep(setting: Setting, sweep: str, rounds: int, warmup: int) -> dict[str, Any]:
    """Config → seconds per micro-batch and round, of the slowest rank, with its ratio to ``BASE``; and the targets."""
    with tempfile.TemporaryDirectory(prefix="shardengine-bench-") as folder:
        ranks = collected(rank_main, Plan(setting, sweep, rounds, warmup, folder), setting.ranks, folder)
    print(file=sys.stderr)
    seconds = {
        name: [max(each) for each in zip(*(rank["seconds"][name] for rank in ranks), strict=True)]
        for name in SWEEPS[sweep]
    }
    return summarise(sweep, seconds, ranks[0]["found"])


def summarise(sweep: str, seconds: Mapping[str, Sequence[float]], found: Mapping[str, Any]) -> dict[str, Any]:
    """Rows of a sweep; of that over sizes also how "auto" compares with both best points."""
    rows = {
        name: {"median_ms": statistics.median(of) * 1e3, "of_base": asdict(paired_ratio(of, seconds[BASE])),
               **found[name], "seconds": list(of)}
        for name, of in seconds.items()
    }  # fmt: skip
    summary: dict[str, Any] = {"sweep": sweep, "rows": rows}
    if sweep == "size":
        summary["targets"] = {}
        for whose, ours in (("best of ours", True), ("best of torch", False)):
            chosen = [name for name, point in SWEEPS[sweep].items() if point.ours is ours and name != AUTO]
            best = min(chosen, key=lambda name: statistics.median(seconds[name]))
            ratio = paired_ratio(seconds[AUTO], seconds[best])
            summary["targets"][whose] = {"point": best, "ratio": asdict(ratio), "target": TARGETS[whose],
                                         "verdict": verdict(ratio, TARGETS[whose])}  # fmt: skip
    return summary


def tables(result: Mapping[str, Any]) -> str:
    """All sweeps, for people."""
    texts = []
    for run in result["runs"]:
        rows = [
            [name, f"{row['median_ms']:.1f}", str(Ratio(**row["of_base"])), str(row.get("buckets", "")),
             "; ".join(row.get("tuning", []))]
            for name, row in run["rows"].items()
        ]  # fmt: skip
        header = [f"{run['sweep']}, {run['ranks']} ranks", "ms per micro-batch", f"× {BASE} [95%]", "buckets", ""]
        lines = [
            f"{AUTO} × {whose}, {of['point']}: {Ratio(**of['ratio'])}, target {of['target']:.2f}: {of['verdict']}"
            for whose, of in run.get("targets", {}).items()
        ]
        texts.append("\n".join([table(header, rows), *lines]))
    return "\n\n".join(texts)


def draw(result: Mapping[str, Any], path: Path) -> None:
    """A row of charts for each number of ranks: over sizes, overlap, over how often ranks synchronise."""
    import matplotlib.pyplot as plt

    numbers = sorted({run["ranks"] for run in result["runs"]})
    figure, grid = plt.subplots(
        len(numbers), len(SWEEPS), figsize=(4.4 * len(SWEEPS), 3.1 * len(numbers)), squeeze=False
    )
    for run in result["runs"]:
        axes = grid[numbers.index(run["ranks"])][list(SWEEPS).index(run["sweep"])]
        _draw_run(axes, run)
        axes.set_title(f"{run['sweep']}, {run['ranks']} ranks", fontsize=8)
        axes.set_ylabel("ms per micro-batch", fontsize=8)
    setting = result["setting"]
    title = (f"GPT-2, {setting['parameters'] / 1e6:.0f}M parameters, fp32, {result['machine']['processor']}, "
             f"torch {result['machine']['torch']}, {result['rounds']} rounds")  # fmt: skip
    finish(figure, list(grid.flat), title, path)


def _draw_run(axes: Any, run: Mapping[str, Any]) -> None:
    points, rows = SWEEPS[run["sweep"]], run["rows"]
    if run["sweep"] in ("overlap", "hooks"):
        names = list(reversed(rows))
        colors = ["#1f6feb" if points[name].ours else "#57606a" for name in names]
        axes.barh(names, [rows[name]["median_ms"] for name in names], color=colors)
        return
    for ours, shade, label in ((True, "#1f6feb", "shardengine, stage 0"), (False, "#57606a", "torch DDP")):
        line = [
            (points[name].every if run["sweep"] == "sync" else _megabytes(points[name], row), row["median_ms"])
            for name, row in rows.items()
            if points[name].ours is ours and (run["sweep"] == "sync" or name != AUTO)
        ]
        axes.plot(*zip(*line, strict=True), color=shade, marker="o", markersize=3, label=label)
    if run["sweep"] == "size":
        axes.plot([rows[AUTO]["elements"] * 4e-6], [rows[AUTO]["median_ms"]], "*", color="#d1495b", label="auto")
        axes.set_xscale("log")
    axes.set_xlabel("MB of a bucket" if run["sweep"] == "size" else "micro-batches of a step", fontsize=8)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=7)


def _megabytes(point: Point, row: Mapping[str, Any]) -> float:
    return float(row["elements"]) * 4e-6 if point.ours else float(point.size)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ddp", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--sweeps", nargs="+", choices=list(SWEEPS), default=list(SWEEPS))
    parser.add_argument("--rounds", type=int, default=MIN_ROUNDS, help="paired rounds (fewer than 20 decide nothing)")
    parser.add_argument("--warmup", type=int, default=3, help="steps of each config before the first measured round")
    parser.add_argument("--layers", type=int, default=SETTING.layers)
    parser.add_argument("--hidden", type=int, default=SETTING.hidden)
    parser.add_argument("--vocabulary", type=int, default=SETTING.vocabulary)
    parser.add_argument("--batch", type=int, default=SETTING.batch, help="sequences per rank and micro-batch")
    parser.add_argument("--sequence", type=int, default=SETTING.sequence, help="tokens per sequence")
    parser.add_argument("--json", action="store_true", help="print the result as JSON instead of tables")
    parser.add_argument("--no-write", action="store_true", help="leave benchmarks/results as it is")
    parser.add_argument("--draw", action="store_true", help="measure nothing, draw this machine's result")
    options = parser.parse_args(argv)
    if min(*options.ranks, options.rounds, options.layers) < 1 or min(options.ranks) < 2 or options.warmup < 0:
        parser.error("--ranks must be at least 2, --rounds and --layers at least 1, --warmup at least 0")
    if options.hidden % 64:
        parser.error(f"--hidden must be a multiple of 64 (one attention head has 64), got {options.hidden}")
    return options


def with_earlier(path: Path, result: Mapping[str, Any], runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """``runs``, and those of other sweeps that ``path`` has of the same setting, machine and rounds."""
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    same = all(before.get(key) == result[key] for key in ("machine", "rounds", "setting"))
    found = {(run["ranks"], run["sweep"]): run for run in [*(before["runs"] if same else ()), *runs]}
    return [found[key] for key in sorted(found, key=lambda key: (key[0], list(SWEEPS).index(key[1])))]


def main(argv: list[str] | None = None) -> int:
    """Command line. Returns 0 whatever the verdicts: a benchmark reports, a test decides."""
    options = parse(argv)
    chart = result_path("ddp", {"machine": machine()}).with_suffix(".svg")
    if options.draw:
        draw(json.loads(chart.with_suffix(".json").read_text(encoding="utf-8")), chart)
        print(f"drawn: {os.path.relpath(chart)}")
        return 0
    setting = Setting(2, options.layers, options.hidden, options.vocabulary, options.batch, options.sequence)
    result: dict[str, Any] = {
        "benchmark": "ddp", "machine": machine(), "rounds": options.rounds,
        "setting": asdict(setting) | {"parameters": setting.parameters(), "cores": len(os.sched_getaffinity(0))},
    }  # fmt: skip
    keeps = setting == SETTING and not options.no_write
    runs: list[dict[str, Any]] = []
    for ranks in options.ranks:
        for sweep in options.sweeps:
            began = time.perf_counter()
            found = run_sweep(replace(setting, ranks=ranks), sweep, options.rounds, options.warmup)
            took = {"seconds": round(time.perf_counter() - began), "load_after": os.getloadavg()[0]}
            runs.append({"ranks": ranks, **found, **took})
            if keeps:
                write_result("ddp", result | {"runs": with_earlier(chart.with_suffix(".json"), result, runs)})
    print(json.dumps(result | {"runs": runs}, indent=1) if options.json else tables({"runs": runs}))
    if not keeps:
        why = ", as asked" if options.no_write else ": results are kept for one model"
        print(f"not written{why}", file=sys.stderr)
        return 0
    print(f"written to {os.path.relpath(chart.with_suffix('.json'))}", file=sys.stderr)
    draw(json.loads(chart.with_suffix(".json").read_text(encoding="utf-8")), chart)
    return 0


if __name__ == "__main__":
    sys.exit(main())
