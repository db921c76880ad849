"""What a plan says of a step's time beside the time that the step takes on this machine: real ranks over gloo.

``python -m benchmarks.plan_time`` trains every row of its matrix on real ranks, in turn, a step of each in a round; it
prints a table and writes ``benchmarks/results/plan_time-<machine>.json``. It wants an idle machine.

    measured   the median over rounds of the slowest rank's seconds, forward, backward and step
    planned    the tape of a dry run as this rank, replayed with rates that the ranks measured just before: each
               operation of the tapes alone, with its shapes, on all ranks at once; α and β of the engine's groups
    error      (planned − measured) / measured
    bound      the plan's: what no schedule of the same work can be faster than
    ranked     of all pairs of rows whose measured times differ by more than 5%, the share that the plan has in the
               same order; the goal is 90%
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

import shardengine
from benchmarks.plan import loss_of
from benchmarks.plan_cases import LLAMA, STATES, Case, Text, words
from benchmarks.reporting import machine, table, write_result
from shardengine.comm import GroupName, GroupSpeed, cores, measure_gathers, measure_reduction
from shardengine.planner import ModelPlace, Rates, Times, dry_run, measured, measured_calls, simulate
from tests.support.forks import Forks
from tests.support.program_runs import free_port, join

GOAL, DIFFER = 0.9, 0.05
ROUNDS, TURNS, WARMUP = 6, 2, 3
SMALL = 150_000
MODELS = {
    name: Text("LlamaForCausalLM", "LlamaConfig", LLAMA | {"num_hidden_layers": 4} | more)
    for name, more in {
        "narrow": {},
        "wide": {"hidden_size": 384, "intermediate_size": 1024},
    }.items()
}
_TWO = [Case("narrow", 2, stage, precision) for precision in ("fp32", "bf16") for stage in "0123"]
_TWO += [Case("wide", 2, stage) for stage in "0123"]
_TWO += [Case("narrow", 2, stage, checkpointed=True) for stage in "023"]
_TWO += [Case("narrow", 2, stage, micros=3) for stage in "0123"]
_TWO += [Case("narrow", 2, stage, tier=STATES) for stage in "23"]
_TWO += [Case("narrow", 2, stage, bucket=SMALL) for stage in "023"]
_ONE = [Case("narrow", 1, "0"), Case("narrow", 1, "3"), Case("narrow", 1, "0", "bf16"), Case("wide", 1, "0")]
_ONE += [Case("narrow", 1, "0", checkpointed=True), Case("narrow", 1, "2", micros=3)]
MATRIX = (*_TWO, *_ONE)


def title(case: Case) -> str:
    """Of a row."""
    return f"{case}, small buckets" if case.bucket == SMALL else str(case)


# On a rank


def _life(say: Callable[[Any], None], rank: int, port: int, cases: Sequence[Case], rounds: int) -> None:
    join(rank, cases[0].ranks, port)
    torch.manual_seed(0)
    tapes = {case: _tape(case, rank) for case in cases}
    engines = {case: shardengine.initialize(MODELS[case.model](), case.config()) for case in cases}
    for case, _ in itertools.product(cases, range(WARMUP)):
        _step(engines[case])
    rates = _rates(list(tapes.values()), engines[cases[0]])
    seconds: dict[Case, list[list[float]]] = {case: [] for case in cases}
    for number in range(rounds):
        first = number % len(cases)
        for case in [*cases[first:], *cases[:first]]:
            if dist.is_initialized():
                dist.barrier()
            seconds[case].append(_step(engines[case]))
    for case in cases:
        say((title(case), seconds[case], _facts(simulate(tapes[case], rates, case.ranks))))
    for engine in engines.values():
        engine.close()


def _tape(case: Case, rank: int) -> Any:
    place = ModelPlace(case.ranks, rank, apart=False)
    return dry_run(lambda _: MODELS[case.model](), words, case.config(), place, loss_of).tape


def _step(engine: Any) -> list[float]:
    """Seconds of forwards, backwards and steps."""
    spent = [0.0, 0.0, 0.0]
    for _ in range(engine.gradient_accumulation_steps()):
        batch = words()
        marks = [time.perf_counter()]
        value = loss_of(engine(**batch))
        marks.append(time.perf_counter())
        engine.backward(value)
        del value
        marks.append(time.perf_counter())
        engine.step()
        marks.append(time.perf_counter())
        spent = [
            total + after - before for total, (before, after) in zip(spent, itertools.pairwise(marks), strict=True)
        ]
    return spent


def _rates(tapes: Sequence[Any], engine: Any) -> Rates:
    groups: dict[str, GroupSpeed] = {}
    collectives, ranks = engine._core.collectives, engine._core.mesh.ranks
    if ranks > 1:
        groups[GroupName.REDUCE] = measure_reduction(collectives, torch.float32)
        groups[GroupName.GATHER] = measure_gathers(collectives, torch.float32)
    exchange = groups[GroupName.GATHER].latency_s if groups else 0.0
    more: dict[str, Any] = {"groups": groups, "cores": cores() if ranks > 1 else 0, "exchange_s": exchange}
    found = measured(tapes[0], **more)
    for tape in tapes[1:]:
        found = dataclasses.replace(found, calls=measured_calls(tape, known=found.calls))
    return found


def _facts(times: Times) -> dict[str, Any]:
    return times.as_dict()


# The report


def rows_of(forks: Forks, cases: Sequence[Case], rounds: int) -> dict[str, Any]:
    """By title: what all ranks said. Cases of as many ranks are measured together."""
    found: dict[str, Any] = {}
    for _, each in itertools.groupby(cases, key=lambda case: case.ranks):
        together = list(each)
        said = forks.live(_life, free_port(), together, rounds, ranks=together[0].ranks)
        for ranks in zip(*said, strict=True):
            found[ranks[0][0]] = [rank[1:] for rank in ranks]
    return found


def row_of(case: Case, turns: Sequence[Sequence[tuple[list[list[float]], Mapping[str, Any]]]]) -> dict[str, Any]:
    """Of a case, from each turn's ranks: seconds of rounds by phase, and the plan."""
    slowest = [max(rounds, key=sum) for turn in turns for rounds in zip(*(rank[0] for rank in turn), strict=True)]
    plans = [rank[1] for turn in turns for rank in turn]
    taken = statistics.median(map(sum, slowest))
    planned = statistics.median(plan["seconds"] for plan in plans)
    phases = [statistics.median(column) for column in zip(*slowest, strict=True)]
    return {
        "case": title(case), "ranks": case.ranks, "stage": case.stage, "measured": taken, "planned": planned,
        "error": planned / taken - 1, "bound": statistics.median(plan["bound_seconds"] for plan in plans),
        "phases": dict(zip(("forward", "backward", "step"), phases, strict=True)), "plan": plans[0],
        "rounds": [sum(each) for each in slowest],
    }  # fmt: skip


def ranking(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of the pairs that differ by more than ``DIFFER``: how many, the share in the right order, and the others."""
    pairs = [
        (one, other) for one, other in itertools.permutations(rows, 2)
        if other["measured"] > (1 + DIFFER) * one["measured"]
    ]  # fmt: skip
    wrong = [(one["case"], other["case"]) for one, other in pairs if one["planned"] >= other["planned"]]
    return {"pairs": len(pairs), "right": 1 - len(wrong) / len(pairs) if pairs else 1.0, "wrong": wrong}


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Errors of each stage and of all, and how rows are ranked, all together and those of as many ranks."""
    of = {f"stage {stage}": [row["error"] for row in rows if row["stage"] == stage] for stage in "0123"}
    of["all"] = [row["error"] for row in rows]
    errors = {
        name: {"rows": len(each), "median": statistics.median(each), "median_size": statistics.median(map(abs, each)),
               "largest": max(each, key=abs)}
        for name, each in of.items() if each
    }  # fmt: skip
    counts = sorted({row["ranks"] for row in rows})
    ranked = {f"of {count} ranks": ranking([row for row in rows if row["ranks"] == count]) for count in counts}
    return {"errors": errors, "ranked": {"all": ranking(rows), **ranked}}


def _cells(row: Mapping[str, Any]) -> list[str]:
    numbers = [f"{1e3 * row[name]:.1f}" for name in ("measured", "planned", "bound")]
    return [row["case"], *numbers, f"{100 * row['error']:+.1f}%"]


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.plan_time", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--only", default="", help="rows whose name has this in it; writes no result")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"of each of {TURNS} turns (default {ROUNDS})")
    options = parser.parse_args(argv)
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    forks = Forks()
    cases = [case for case in MATRIX if options.only in title(case)]
    turns = [rows_of(forks, cases, options.rounds) for _ in range(TURNS)]
    forks.end()
    rows = [row_of(case, [turn[title(case)] for turn in turns]) for case in cases]
    print(table(["ms", "measured", "planned", "bound", "error"], [_cells(row) for row in rows]))
    found = summary(rows)
    for name, errors in found["errors"].items():
        print(f"{name}: median error {100 * errors['median']:+.1f}%, largest {100 * errors['largest']:+.1f}%")
    for name, ranked in found["ranked"].items():
        print(f"ranked, {name}: {100 * ranked['right']:.1f}% of {ranked['pairs']} pairs (goal {100 * GOAL:.0f}%)")
    if not options.only:
        result = {"machine": machine(), "setting": {"rounds": options.rounds, "turns": TURNS, "goal": GOAL},
                  "summary": found, "rows": rows}  # fmt: skip
        print(f"written: {os.path.relpath(write_result('plan_time', result))}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
