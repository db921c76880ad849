"""``"debug": true`` through the engine: a collective that differs between ranks is named before it is sent."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from shardengine.errors import MismatchError
from tests.support import cases
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]
FIELDS = ("sequence", "operation", "bytes", "subject")


def leave_out(model: Any, number: int) -> None:
    """Let the forward pass over a block."""

    def forward(x: Tensor) -> Tensor:
        x = model.inp(x)
        for index, block in enumerate(model.blocks):
            x = x + block(x) * model.scale if index != number else x
        out: Tensor = model.out(x)
        return out

    model.forward = forward


def step_apart(stage: str, difference: str) -> str:
    """What is said where rank 1 differs from rank 0 in its first step."""
    engine = cases.make_engine(
        cases.make_mlp(), cases.config_of(stage, zero={"reduce_bucket_size": 600}, debug=True), "SGD"
    )
    if engine.rank == 1 and difference == "sequence":
        engine._core.collectives._ledger._sequence += 1
    elif engine.rank == 1 and difference == "bytes":
        engine._core.reducer.buckets[1].wire = torch.bfloat16
    elif engine.rank == 1:
        leave_out(engine.module, {"operation": 2, "subject": 1}[difference])
    try:
        engine.backward(cases.loss_of(engine, 0, engine.rank, 0))
    except MismatchError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("stage", "difference"), [("1", "sequence"), ("2", "bytes"), ("3", "bytes"), ("3k", "sequence")]
)
def test_the_first_collective_that_differs_is_named_with_what_differs(
    pools: Pools, stage: str, difference: str
) -> None:
    zero, one = pools(2).run(step_apart, stage, difference)
    assert zero == one
    field = r"\[(\d+) ([a-z-]+) (\d+) bytes (.+)\]"
    found = re.match(f"collectives differ between ranks: rank 0 issues {field}, rank 1 issues {field}; expected", zero)
    assert found, zero
    ours, theirs = (dict(zip(FIELDS, found.groups()[first : first + 4], strict=True)) for first in (0, 4))
    assert [name for name in FIELDS if ours[name] != theirs[name]] == [difference]
    if difference == "bytes":
        assert ours["subject"].startswith("bucket 1 (") and int(ours["bytes"]) == 2 * int(theirs["bytes"])


@pytest.mark.parametrize(
    ("stage", "difference", "expected"),
    [
        ("3k", "operation", "rank 0 is in [gathering of unit 'blocks.2'] where rank 1 is in [what is issued next "
         "(debug)]"),
        ("3", "subject", "ranks run different modules: rank 0 needs the weights of unit 'blocks.1' where rank 1 needs "
         "those of 'blocks.2'"),
    ],
)  # fmt: skip
def test_gathers_that_differ_are_named_before_they_are_compared(
    pools: Pools, stage: str, difference: str, expected: str
) -> None:
    """Ranks agree on a gather before it is issued (prefetch_order: [Note: Agreed gathers])."""
    for rank, said in enumerate(pools(2).run(step_apart, stage, difference)):
        assert said.startswith(expected) and f"(this is rank {rank})" in said
