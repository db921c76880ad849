"""What goes between host and device in a step, frozen: each line of ``TABLE`` costs a GPU time, none comes unseen."""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import pytest
from torch import nn

from tests.dry.runs import OPTIONS, PRECISIONS, TIERS, Case, Facts, Run, run
from tests.support.cases import STAGES
from tests.support.covering import covering
from tests.support.dry_run import Crossing


class Line(NamedTuple):
    """A crossing, and how many a step has."""

    place: str
    what: str
    how: str
    times: Callable[[Case, Facts], int]


def skips(case: Case) -> bool:
    """Whether a step with gradients that are not finite is not taken."""
    return case.option != "any gradient"


def asked(case: Case) -> bool:
    """Whether the call after a step asks whether it was skipped, before the next one would."""
    return case.option in ("saved", "saved behind") and case.precision != "fp16"


def is_low(case: Case) -> bool:
    """Whether there are master weights beside the weights wherever those rest."""
    return case.precision in ("bf16", "fp16")


def scalars(case: Case, facts: Facts) -> int:
    """What the update needs on the host: whether it is skipped, what gradients are multiplied with."""
    on_host = case.states_on_host or (case.weights_on_host and is_low(case))
    known = case.option == "in backward"
    return (on_host and not known) * (skips(case) + (case.option == "clipped" or case.precision == "fp16"))


def spills(case: Case, facts: Facts) -> int:
    """Sums over ranks that leave the device. At stage 0 gradients stay."""
    each = case.micros if case.stage in ("2", "3k", "3") and case.option != "no_sync" else 1
    return (case.stage != "0") * facts.away * each


def fetched(case: Case, facts: Facts) -> int:
    """Whole gradients, to be stepped on the host."""
    return (case.stage == "0") * facts.away


def squares(case: Case, facts: Facts) -> int:
    """Parts of the norm that were summed on the host, where micro-batches were added there: together, or one by one
    where some are on the device."""
    added = case.stage in ("2", "3k", "3") and case.micros > 1 and case.option != "no_sync"
    return added * (facts.pieces if facts.near else facts.pieces > 0)


def sent_on(case: Case, facts: Facts) -> int:
    """Stepped weights on their way from the host to the device."""
    return facts.spans * (not case.weights_on_host)


def sent_home(case: Case, facts: Facts) -> int:
    """Weights that rest on the host, stepped on the device."""
    return facts.buckets * (case.tier == "weights")


def fetched_to_step(case: Case, facts: Facts) -> int:
    """Those that have no masters there, and are stepped themselves."""
    return sent_home(case, facts) * (not is_low(case))


def is_read_back(case: Case) -> bool:
    """Whether the call after a step reads, on the host, weights that went home; it waits for those still under way."""
    saved = case.option.startswith("saved") and not is_low(case)
    return case.tier == "weights" and (saved or case.option in ("full_params", "state_dict"))


def waits_to_send(case: Case, facts: Facts) -> int:
    """For buffers of stepped weights. Two buckets are still under way when a step ends."""
    return sent_on(case, facts) + sent_home(case, facts) - 2 * is_read_back(case)


def loads(case: Case, facts: Facts) -> int:
    """Shards on their way to be gathered."""
    return facts.loads * case.weights_on_host


def inputs(case: Case, facts: Facts) -> int:
    """What checkpointed blocks keep on the host."""
    return 3 * case.micros * (case.option == "activations away")


TABLE = [
    # once per step: nothing below these is needed without offload, and the first two are one number
    Line("optim/update.py:Verdict.applied", "read", "", lambda case, _: skips(case) and not asked(case)),
    Line("optim/optimizer.py:ShardedOptimizer.note_if_spoiled", "read", "",
         lambda case, _: case.option == "in backward"),
    Line("optim/update.py:Update.scalars_on.<locals>.<dictcomp>", "to host", "blocking", scalars),
    Line("engine/monitors.py:Monitors._write", "read", "", lambda case, _: case.option == "monitored"),
    # gradients that leave, bucket by bucket
    Line("ddp/gradient_bucket.py:GradientBucket._sum", "to host", "stream", spills),
    Line("ddp/reducer.py:Reducer._complete_flights", "wait", "", spills),
    Line("ddp/gradient_bucket.py:GradientBucket.fetch", "to host", "stream", fetched),
    Line("ddp/gradient_bucket.py:GradientBucket.gradient_to_step", "wait", "", fetched),
    Line("optim/optimizer.py:ShardedOptimizer._payload", "to device", "blocking", squares),
    # stepped weights
    Line("optim/update.py:rewrite_bucket", "to device", "stream", fetched_to_step),
    Line("optim/update.py:send", "to device", "stream", sent_on),
    Line("optim/update.py:send", "to host", "stream", sent_home),
    Line("optim/update.py:send", "wait", "", waits_to_send),
    # weights that rest on the host
    Line("sharding/bucket.py:Bucket.load_shard", "to device", "stream", loads),
    Line("offload/shard_store.py:MemoryStore.check_out", "wait", "",
         lambda case, facts: facts.buckets * (case.tier == "both")),
    # activations
    Line("runtime/activation_offload.py:_Stretch.__init__", "to host", "stream", inputs),
    Line("runtime/activation_offload.py:_Stretch.fetch", "to device", "stream", inputs),
]  # fmt: skip


VERDICT = Crossing("optim/update.py:Verdict.applied", "read")
BUFFER = Crossing("offload/nvme/file_tier.py:FileTier.take_buffer", "wait")
"""For a buffer of what is read from disk: how often depends on the disk, once per load and step at most."""


def expected(case: Case, facts: Facts) -> Counter[Crossing]:
    """What a step of ``case`` crosses, beyond the first."""
    counts = {Crossing(line.place, line.what, line.how): int(line.times(case, facts)) for line in TABLE}
    return +Counter(counts)


def expected_of_call(case: Case) -> set[Crossing]:
    """What the call after a step crosses, however often."""
    away, verdict = case.weights_on_host, (asked(case), (VERDICT.place, VERDICT.what, VERDICT.how))
    behind = ("checkpoint/background.py:_copy.<locals>.<listcomp>", "to host", "stream")
    saved = ("checkpoint/tensor_file.py:Stream.put", "to host", "stream")
    lines: dict[str, list[tuple[bool, tuple[str, str, str]]]] = {
        "norm read": [(True, ("engine/engine.py:Engine.get_global_grad_norm", "read", ""))],
        "evaluation": [(away, ("sharding/bucket.py:Bucket.load_shard", "to device", "stream"))],
        "full_params": [(away, ("runtime/unit.py:Unit.summon", "to device", "blocking"))],
        "state_dict": [
            (not away or case.ranks > 1, ("sharding/flat_slices.py:join", "to host", "blocking")),
            (True, ("core/export.py:_copy", "to host", "blocking")),  # a buffer
            (away and case.ranks > 1, ("core/gathering.py:gathered", "to device", "blocking")),
        ],
        "saved": [verdict, (True, saved), (True, ("checkpoint/tensor_file.py:_await", "wait", ""))],
        "saved behind": [verdict, (True, behind), (True, ("checkpoint/background.py:_copy", "wait", ""))],
    }
    found = {Crossing(*line) for there, line in lines.get(case.option, []) if there}
    return found | ({Crossing("offload/shard_store.py:MemoryStore.tensors", "wait")} if is_read_back(case) else set())


FIRST = {
    ("sharding/bucket.py:Bucket.adopt_weights.<locals>.<genexpr>", "read", ""),
    ("sharding/bucket.py:_written", "to host", "blocking"),
    ("optim/update.py:Update.scalars_on.<locals>.<dictcomp>", "to host", "blocking"),
}
"""In the first step alone: weights are compared with their masters, ``step_in_backward`` does not begin before the
second one."""
TOLD = Crossing("core/overflow.py:describe", "to host", "blocking")
"""Of a skipped step, once, when the host learns that it was."""
START = {
    ("offload/shard_store.py:MemoryStore.add", "to host", "blocking"),
    ("offload/nvme/file_tier.py:FileStore.add", "to host", "blocking"),
}
"""At initialize: what rests away goes there."""
END = {
    ("offload/nvme/file_tier.py:FileTier.take_back_lent", "wait", ""),
    ("sharding/bucket.py:Bucket.load_shard", "to device", "stream"),
    ("ddp/reducer.py:Reducer.abandon", "wait", ""),
    ("offload/shard_store.py:MemoryStore.drop", "wait", ""),
    ("engine/monitors.py:Monitors._write", "read", ""),
    ("optim/update.py:Verdict.applied", "read", ""),
}
"""In ``close()``: weights are gathered, and what is under way is waited for."""


def tell(run: Run, found: Counter[Crossing], wanted: Counter[Crossing]) -> str:
    """What differs, with lines."""
    rows = [
        f"{found[each]} times, expected {wanted[each]}: {' '.join(each)} ({run.log.lines.get(each, 'not seen')})"
        for each in sorted(found.keys() | wanted.keys())
        if found[each] != wanted[each]
    ]
    return "\n".join([f"{run.case}, {run.facts}", *rows])


def check(case: Case, folder: Path) -> None:
    """Run ``case`` and compare what crosses with the table."""
    found = run(case, folder)
    wanted = expected(case, found.facts)
    for crossed in (*found.steps, *found.calls, found.end):
        waits = crossed.pop(BUFFER, 0)
        assert waits <= 2 * (loads(case, found.facts) + found.facts.buckets) * case.in_files, tell(
            found, crossed, wanted
        )
    first, *later = found.steps
    assert later[0].pop(TOLD, 0) == (case.option == "skipped")
    for step in later:
        assert step == wanted, tell(found, step, wanted)
    beyond = set(first - wanted) - {each for each in first if each.what == "wait"}
    assert beyond <= FIRST, tell(found, first, wanted)
    assert set(found.start) <= START, tell(found, found.start, Counter())
    for call in found.calls:
        assert set(call) == expected_of_call(case), tell(found, call, Counter(expected_of_call(case)))
    assert set(found.end) <= END, tell(found, found.end, Counter())


def cases_of(rows: Iterable[tuple[str, str, str, str]]) -> list[Case]:
    """Numbers of ranks, backends and micro-batches take turns."""
    turns = zip(itertools.cycle((4, 1024, 64, 1, 4)), itertools.cycle(("nccl", "gloo", "nccl")), strict=False)
    found = []
    for (stage, tier, precision, option), (ranks, backend), micros in zip(
        rows, turns, itertools.cycle((1, 3, 1, 1, 3, 3, 1)), strict=False
    ):
        ranks = 1 if option.startswith("saved") else ranks
        found.append(Case(stage, tier, precision, option, ranks, backend, micros))
    return found


POSSIBLE = [row for row in itertools.product(STAGES, TIERS, PRECISIONS, OPTIONS) if Case(*row, ranks=1).is_possible]
MATRIX = cases_of(covering(POSSIBLE))
PLAIN = [Case(stage, precision=precision) for stage in STAGES for precision in ("fp32", "bf16")]


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_without_offload_the_host_reads_one_flag_of_the_step_before(case: Case, tmp_path: Path) -> None:
    """Whether that was skipped; where ``nonfinite_gradients`` is "step", nothing."""
    found = run(case, tmp_path)
    assert [step[VERDICT] for step in found.steps] == [0, 1, 1] and found.end[VERDICT] == 1
    assert found.steps[1:] == [{VERDICT: 1}] * 2
    found = run(Case(case.stage, precision=case.precision, option="any gradient"), tmp_path)
    assert found.steps[1:] == [{}, {}]


@pytest.mark.parametrize("case", MATRIX, ids=str)
def test_what_a_step_crosses(case: Case, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    check(case, tmp_path)


@pytest.mark.parametrize("stage", ["1", "3"])
def test_a_rank_that_holds_padding_alone(stage: str, tmp_path: Path) -> None:
    found = run(Case(stage, ranks=1024), tmp_path, model=lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)))
    assert found.facts.near == 0
    assert found.steps[1:] == [{VERDICT: 1}] * 2
