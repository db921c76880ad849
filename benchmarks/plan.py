"""What a plan says of a run's memory beside what the run took: ``shardengine.planner.dry_run`` against real ranks.

``python -m benchmarks.plan`` trains each row of the matrix (``plan_cases.py``) on real ranks over gloo, and runs it dry
in one process; it prints a table and writes ``benchmarks/results/plan-<machine>.json``. Only bytes are compared; how
fast the machine is does not matter.

    measured   the most that torch's CPU allocator had given out at one moment of the last step, by its own counter,
               which torch.profiler notes at each event: temporaries inside of operations and all threads included.
               Buffers between memory and a disk are mapped, which no allocator sees: they are the kernel's list of
               mappings that no fork is given. Of the rank that is planned, and of the rank with the most
    planned    the peak of a dry run's step as that rank
    error      (planned − measured) / measured, of the same rank
    at         the phase of the peak, as measured and as planned

A run's pool has its final size once a rank has waited for others everywhere; until then a peak is lower by a bucket or
two. So each rank is late in one step, and one of ``STEPS`` later ones is measured.

Below that, on one rank, plain torch beside ``torch.distributed._tools.MemTracker``, and the engine beside a dry run.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile, record_function

import shardengine
from benchmarks.plan_cases import ARCHITECTURES, BUCKET, HELD_OUT, MATRIX, Architecture, Case
from benchmarks.reporting import machine, table, write_result
from shardengine.planner import DryRun, ModelPlace, dry_run, without_weights
from tests.support.forks import Forks
from tests.support.program_runs import free_port, join

STEPS = 3
LATE_S = 0.5
GOAL = 0.03
PEERS = ("GPT-2", "Llama")
_SPAN = "plan: "


def rank_of(case: Case) -> int:
    """The rank that is planned: one in the middle."""
    return case.ranks // 2


def loss_of(found: Any) -> Tensor:
    """What is trained, of what a model of transformers returns."""
    value: Tensor = found.loss
    return value


def planned(case: Case, chosen: Architecture) -> DryRun:
    """A dry run as ``rank_of`` it."""
    make: Callable[[Any], nn.Module] = lambda _: chosen.make()  # noqa: E731
    if chosen.in_parts:
        with torch.device("meta"):
            whole = chosen.make()
        make = lambda mode: without_weights(whole, mode)  # noqa: E731
    place = ModelPlace(case.ranks, rank_of(case), apart=False)
    return dry_run(make, chosen.batch, case.config(), place, loss_of)


# On real ranks


def measured(forks: Forks, case: Case, chosen: Architecture, steps: int = STEPS) -> list[dict[str, Any]]:
    """Of each rank: "bytes", "at" and "at_rest" of the last step."""
    said = forks.live(_life, free_port(), case, chosen, steps, ranks=case.ranks)
    return [words[0] for words in said]


def _life(say: Callable[[Any], None], rank: int, port: int, case: Case, chosen: Architecture, steps: int) -> None:
    join(rank, case.ranks, port)
    torch.manual_seed(0)
    before = mapped()
    with counted():
        engine = shardengine.initialize(chosen.make(), case.config())
        for late in (
            *range(case.ranks),
            *range(case.ranks),
        ):  # the others issue everything before it, and their pools have their final sizes
            _step(engine, chosen.batch)
            _step(engine, chosen.batch, LATE_S * (rank == late))
        found = highest_of(lambda: _step(engine, chosen.batch), steps)
        more = mapped() - before
        engine.close()
    say(found | {name: found[name] + more for name in ("bytes", "at_rest")})


def _plain_life(say: Callable[[Any], None], _rank: int, model: str) -> None:
    with counted():
        train = _plain(ARCHITECTURES[model])
        say(highest_of(train, 3))


@contextmanager
def counted() -> Iterator[None]:
    """Torch's CPU allocator counts from now on, on every thread."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    flag = ctypes.c_bool.in_dll(library, "FLAGS_caffe2_report_cpu_memory_usage")
    flag.value = True
    try:
        yield
    finally:
        flag.value = False


def mapped() -> int:
    """Bytes of the mappings of this process of which a fork gets nothing (MADV_DONTFORK), as those beside a disk."""
    found = size = 0
    for line in Path("/proc/self/smaps").read_text(encoding="ascii", errors="replace").splitlines():
        name, *words = line.split()
        if name == "Size:":
            size = int(words[0]) * 1024
        elif name == "VmFlags:" and "dc" in words:
            found += size
    return found


def highest_of(step: Callable[[], None], steps: int) -> dict[str, Any]:
    """Of the last step: the most "bytes", the span in which that was ("at"), and what is there after it."""
    for _ in range(steps - 1):
        step()
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
        torch.empty(1)  # one more event
    results: Any = profiled.profiler
    events = list(_flat(results.kineto_results.experimental_event_tree()))
    spans = [(each.start_time_ns, each.end_time_ns, each.name) for each in events if each.name.startswith(_SPAN)]
    counts = sorted((each for each in events if each.typed[0] == _EventType.Allocation), key=lambda e: e.start_time_ns)
    most = max(counts, key=lambda each: each.typed[1].total_allocated)
    at = next((name for begin, end, name in spans if begin <= most.start_time_ns <= end), _SPAN)
    rest = counts[-1].typed[1].total_allocated
    return {"bytes": most.typed[1].total_allocated, "at": at.removeprefix(_SPAN), "at_rest": rest}


def _flat(nodes: Sequence[Any]) -> Iterator[Any]:
    for node in nodes:
        yield node
        yield from _flat(node.children)


def _step(engine: Any, batch: Callable[[], Mapping[str, Any]], late_s: float = 0.0) -> None:
    """late_s: sleep before backward."""
    for _ in range(engine.gradient_accumulation_steps()):
        with record_function(f"{_SPAN}forward"):
            value = loss_of(engine(**batch()))
        time.sleep(late_s)
        with record_function(f"{_SPAN}backward"):
            engine.backward(value)
            del value
        with record_function(f"{_SPAN}step"):
            engine.step()


# Plain torch, and torch's own tracker


def _plain(chosen: Architecture, watch: Callable[..., None] | None = None) -> Callable[[], None]:
    """A step of plain torch; ``watch`` is given model, optimizer and batch before."""
    model = chosen.make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batch = chosen.batch()
    if watch is not None:
        watch(model, optimizer, *batch.values())

    def step() -> None:
        loss_of(model(**batch)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def tracked(chosen: Architecture) -> tuple[int, float]:
    """The peak of two plain steps without values that ``MemTracker`` finds, and its seconds."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    began = time.perf_counter()
    with FakeTensorMode():
        tracker = MemTracker()
        step = _plain(chosen, tracker.track_external)
        with tracker:
            step()
            tracker.reset_mod_stats()
            step()
        peak = tracker.get_tracker_snapshot("peak")
    return sum(each["Total"] for each in peak.values()), time.perf_counter() - began


def peers(forks: Forks) -> list[dict[str, Any]]:
    """Rows of plain torch beside ``MemTracker``, and of an engine on one rank beside a dry run."""
    found = []
    for model in PEERS:
        bytes_, seconds = tracked(ARCHITECTURES[model])
        real = forks.live(_plain_life, model)[0][0]["bytes"]
        row = {"model": model, "measured": real, "tracked": bytes_, "error": bytes_ / real - 1, "seconds": seconds}
        ours = row_of(forks, Case(model, 1, "0"))
        names = ("measured", "planned", "error", "seconds")
        found.append(row | {"engine": {name: ours[name] for name in names}})
    return found


# The report


def row_of(forks: Forks, case: Case, steps: int = STEPS) -> dict[str, Any]:
    """Measured and planned."""
    chosen = ARCHITECTURES[case.model]
    plan = planned(case, chosen)
    ranks = measured(forks, case, chosen, steps)
    own = ranks[rank_of(case)]
    return {
        "case": str(case), "model": case.model, "ranks": case.ranks, "rank": rank_of(case),
        "measured": own["bytes"], "most": max(each["bytes"] for each in ranks), "planned": plan.peak.bytes,
        "error": plan.peak.bytes / own["bytes"] - 1, "measured_at": own["at"], "planned_at": plan.peak.phase,
        "held_out": case in HELD_OUT, "at_rest": own["at_rest"], "planned_at_rest": plan.at_rest.bytes,
        "seconds": round(plan.seconds, 2),
    }  # fmt: skip


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of all rows and of those that were held out."""
    errors = [abs(row["error"]) for row in rows]
    return {
        "rows": len(rows),
        "within_goal": sum(error <= GOAL for error in errors),
        "largest_error": max(errors),
        "median_error": statistics.median(errors),
        "same_phase": sum(row["measured_at"] == row["planned_at"] for row in rows),
        "median_seconds": statistics.median(row["seconds"] for row in rows),
    }


def _cells(row: Mapping[str, Any]) -> list[str]:
    bytes_ = [f"{row[name] / 1e6:.2f}" for name in ("measured", "most", "planned")]
    at = " / ".join(dict.fromkeys((row["measured_at"], row["planned_at"])))
    return [row["case"], *bytes_, f"{100 * row['error']:+.2f}%", at, f"{row['seconds']:.1f}"]


def markdown(result: Mapping[str, Any]) -> str:
    """The table of docs/benchmarks.md."""
    lines = ["| run | measured MB | planned | error |", "|---|---|---|---|"]
    for row in result["rows"]:
        name = f"*{row['case']}*" if row["held_out"] else row["case"]
        numbers = f"{row['measured'] / 1e6:.2f} | {row['planned'] / 1e6:.2f} | {100 * row['error'] + 0.0:+.2f}%"
        lines.append(f"| {name} | {numbers} |")
    return "\n".join(lines)


def sentence(result: Mapping[str, Any]) -> str:
    """Of docs/benchmarks.md."""
    found, held = result["summary"], result["held_out"]
    return (
        f"{found['within_goal']} of {found['rows']} runs are within 3%, {held['within_goal']} of {held['rows']} of "
        f"models that nobody looked at before; the median error is {100 * found['median_error']:.2f}%, the largest "
        f"{100 * found['largest_error']:.1f}%. The phase of the peak is the same in {found['same_phase']}."
    )


def peer_sentence(result: Mapping[str, Any]) -> str:
    """Of docs/benchmarks.md."""
    told = [
        f"{row['model']}: `MemTracker` {100 * row['error'] + 0.0:+.2f}% in {row['seconds']:.1f} s, a dry run "
        f"{100 * row['engine']['error'] + 0.0:+.2f}% in {row['engine']['seconds']:.1f} s"
        for row in result["peers"]
    ]
    return "; ".join(told)


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plan", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--only", default="", help="rows whose name has this in it; writes no result")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"the last of how many is measured (default {STEPS})")
    parser.add_argument("--markdown", metavar="FILE", help="print the table and sentences of docs of a result, and end")
    options = parser.parse_args(argv)
    if options.markdown:
        result = json.loads(Path(options.markdown).read_text(encoding="utf-8"))
        print(markdown(result), sentence(result), peer_sentence(result), sep="\n\n")
        return 0
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    forks = Forks()
    header = ["", "measured MB", "most", "planned", "error", "at", "seconds"]
    rows = []
    for case in (*MATRIX, *HELD_OUT):
        if options.only in str(case):
            rows.append(row_of(forks, case, options.steps))
            print("  ".join(_cells(rows[-1])), flush=True)
    print("", table(header, [_cells(row) for row in rows]), sep="\n")
    if not options.only:
        result = {
            "machine": machine(),
            "setting": {"steps": options.steps, "bucket": BUCKET, "goal": GOAL},
            "summary": summary(rows),
            "held_out": summary([row for row in rows if row["held_out"]]),
            "peers": peers(forks),
            "rows": rows,
        }
        print(f"written: {os.path.relpath(write_result('plan', result))}")
    forks.end()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
