"""The order of streams, without a GPU: the bits of the oracle where every copy and every collective is as late as it
may be, and no two accesses to the same memory without an order between them.

The engine believes that its device has a memory of its own and that NCCL carries its collectives.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from shardengine.comm import Mesh
from tests.parity.late_cases import (
    APART,
    LEAVES,
    OPTIONS,
    PLACES,
    PLACES_OF_WEIGHTS,
    PRECISIONS,
    USER,
    Case,
    run,
)
from tests.support import cases
from tests.support.comparing import assert_equal_to_truth
from tests.support.covering import covering
from tests.support.late_streams import DEFAULT, Race, adversary
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]
STEPS = 3


def assert_right(pools: Pools, ranks: int, chosen: list[Case], folder: Path, steps: int = STEPS) -> None:
    by_rank = pools(ranks).run(run, chosen, steps, str(folder))
    for number, case in enumerate(chosen):
        found = [results[number] for results in by_rank]
        orders = [result.pop("issued") for result in found]
        assert all(order == orders[0] for order in orders), f"{case}: ranks issue collectives in different orders"
        counts = [result.pop("counts") for result in found]
        assert all(each.get("collectives", 0) > 0 or ranks == 1 for each in counts), case
        assert_equal_to_truth(found, case.truth(ranks, steps), str(case))


HANDFUL = [
    Case("0", 3, "fp32", stream=USER),
    Case("1", 1, "bf16", "a part on the host", "weights later"),
    Case("2", 3, "bf16", "states on the host", stream=USER),
    Case("2", 1, "bf16", "stepped in backward"),
    Case("3", 1, "bf16", "all on the host", "blocks computed again", stream=LEAVES),
    Case("3", 3, "fp32", "weights on disk", around=("evaluation", "whole weights")),
    Case("3k", 1, "bf16", "weights on the host", "no overlap", around=("saved behind",), model="gpt2"),
    Case("2", 1, "bf16", model="a step skipped"),
    Case("3", 3, "fp32", model="a step skipped", around=("saved",)),
    Case("0", 3, "fp32", "states on the host", stream=USER, model="sparse"),
    Case("0", 1, "bf16", options="no overlap", model="sparse"),
]


@pytest.mark.parametrize("ranks", [1, 2])
def test_late_copies_and_collectives_change_no_bit(pools: Pools, tmp_path: Path, ranks: int) -> None:
    assert_right(pools, ranks, HANDFUL, tmp_path)


HYBRID = [
    Case("1 hybrid", 3, "fp32", stream=USER),
    Case("1 hybrid", 1, "bf16", "a part on the host", "weights later", around=("evaluation",)),
    Case("2 hybrid", 3, "bf16", "states on the host", stream=USER, around=("saved behind",)),
    Case("2 hybrid", 3, "fp16", options="no overlap", around=("reset",)),
    Case("3k hybrid", 1, "bf16", "weights on the host", around=("whole weights",)),
    Case("3 hybrid", 3, "bf16", "all on the host", "blocks computed again", stream=LEAVES),
    Case("3 hybrid", 1, "fp32", "weights on disk", around=("evaluation", "written")),
    Case("3 hybrid", 3, "fp32", model="gradients twice", around=("loaded",)),
    Case("3 hpZ", 3, "bf16", stream=USER, around=("evaluation",)),
    Case("3 hpZ", 1, "fp32", "weights on the host", "no overlap", around=("written",)),
    Case("3 hpZ", 3, "bf16 stepped itself", "weights on disk, states on the host", around=("saved", "freed")),
    Case("3 hpZ", 1, "bf16", "all on the host", "blocks computed again", stream=LEAVES),
    Case("3 hpZ", 1, "bf16", model="a step skipped", around=("reset",)),
]
"""A gather or a reduction along both axes is two collectives, the second of which waits for the first on a stream."""


@pytest.mark.parametrize("stage", cases.HYBRID)
def test_both_axes_of_a_hybrid_mesh(pools: Pools, tmp_path: Path, stage: str) -> None:
    assert_right(pools, 4, [case for case in HYBRID if case.stage == stage], tmp_path)


STEPPING_APART = [
    Case("1 hybrid", 1, "bf16", options="groups step apart", stream=USER),
    Case("2 hybrid", 3, "fp32", "states on the host", "groups gossip"),
    Case("3k hybrid", 3, "fp32", options="groups gossip", model="gradients twice"),
    Case("3 hybrid", 3, "bf16", "all on the host", "groups step apart", stream=LEAVES),
]


def test_groups_that_step_apart(pools: Pools, tmp_path: Path) -> None:
    assert_right(pools, 4, STEPPING_APART, tmp_path)


COMPILED = [
    Case("0", 3, "fp32", stream=USER, compiled=("blocks", "eager")),
    Case("1", 1, "bf16", "states on the host", "weights later", compiled=("blocks", "aot_eager")),
    Case("2", 3, "bf16", "a part on the host", stream=LEAVES, compiled=("root", "eager")),
    Case("3k", 1, "bf16", "weights on the host", around=("evaluation",), compiled=("root", "aot_eager")),
    Case("3", 1, "fp32", "weights on disk", around=("whole weights",), compiled=("blocks", "eager")),
    Case("3", 3, "bf16", "all on the host", "no overlap", USER, compiled=("blocks", "aot_eager")),
]
"""By backends of torch.compile that call torch's operations one by one: the judge sees those of compiled code, too."""


def test_compiled_models_wait_as_others_do(pools: Pools, tmp_path: Path) -> None:
    assert_right(pools, 2, [replace(case, model="chain") for case in COMPILED], tmp_path)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_what_is_compiled_is_judged(backend: str) -> None:
    def add(x: Tensor) -> Tensor:
        return (x + 1).sin()

    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(add, backend=backend)
    with adversary(Mesh(0, 1, torch.device("cpu"))) as foe:
        here, there = foe.mesh.platform.host_empty(8, torch.float32, pinned=True).fill_(1.0), torch.zeros(8)
        assert torch.equal(compiled(there), add(there))
        copied = foe.mesh.platform.loads.copy(here, there)
        with pytest.raises(Race, match=r"aten\.add"):
            compiled(there)
        copied.wait()
        assert torch.equal(compiled(there), add(torch.ones(8)))
    assert counters["stats"]["unique_graphs"] > 0


def possible(stage: str, micros: int, precision: str, place: str, options: str, stream: str, around: str) -> bool:
    """What a config can say."""
    weights = place in PLACES_OF_WEIGHTS
    if options in APART or (weights and stage not in ("3", "3k")):
        return False
    if options == "weights later" and stage not in ("1", "2"):
        return False
    if place == "stepped in backward" and (stage == "0" or precision in ("fp16", "bf16 stepped itself")):
        return False
    if around == "reset" and options == "weights later":
        return False  # what is in flight is broken off on the device, which tests/engine/test_faults_on_nccl.py plays
    return not (around and stream == LEAVES)


AROUND = (
    "",
    "evaluation",
    "saved",
    "saved behind",
    "loaded",
    "whole weights",
    "states written",
    "written",
    "freed",
    "reset",
)
STREAMS = (DEFAULT, USER, LEAVES)
PRODUCT = itertools.product(
    cases.STAGES, (1, 3), PRECISIONS, (*PLACES, *PLACES_OF_WEIGHTS), OPTIONS, STREAMS, AROUND,
)  # fmt: skip


def _case(stage: str, micros: int, precision: str, place: str, options: str, stream: str, around: str) -> Case:
    return Case(stage, micros, precision, place, options, stream, (around,) if around else ())


ROWS = covering([row for row in PRODUCT if possible(*row)])
MATRIX = [(ranks, _case(*row)) for *row, ranks in covering([(*row, ranks) for row in ROWS for ranks in (2, 1, 3)])]
"""Every pair of options, and every option on each number of ranks."""


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("stage", cases.STAGES)
def test_every_pair_of_options_under_late_streams(pools: Pools, tmp_path: Path, ranks: int, stage: str) -> None:
    chosen = [case for number, case in MATRIX if (number, case.stage) == (ranks, stage)]
    assert chosen
    assert_right(pools, ranks, chosen, tmp_path)
