"""transfer.py: compiled once per layout, and dropped with it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardengine.comm.collectives import Collectives
from shardengine.comm.flight_recorder import Purpose
from shardengine.comm.mesh import Mesh
from shardengine.errors import InternalError
from shardengine.stages import Placement
from tests.support.parts import CPU, PARTIAL, REPLICATED, SHARDED, collectives

LAYOUT: Any = SimpleNamespace(label="bucket 0", names=("a",))


def alone() -> Collectives:
    return collectives(Mesh(0, 1, CPU))


def gather(link: Collectives, dtype: torch.dtype = torch.float32, length: int = 32) -> Any:
    """The transfer that a gather of ``LAYOUT`` uses."""
    link.move(torch.zeros(length, dtype=dtype), SHARDED, REPLICATED, LAYOUT, Purpose.WEIGHTS).wait()
    return list(link._transfers.values())[-1]


def test_one_is_compiled_for_each_kind_of_tensor_and_used_again() -> None:
    link = alone()
    first = gather(link)
    assert gather(link) is first and len(link._transfers) == 1
    assert gather(link, torch.bfloat16) is not first and gather(link, length=64) is not first
    assert len(link._transfers) == 3


@pytest.mark.parametrize("how", ["a new layout", "new groups"])
def test_they_are_dropped_with_what_they_were_compiled_for(how: str) -> None:
    link = alone()
    first = gather(link)
    if how == "a new layout":
        link.forget_transfers()
    else:
        link.use(Mesh(0, 1, CPU))
    assert not link._transfers and gather(link) is not first


def test_one_of_groups_that_were_replaced_refuses_itself() -> None:
    link = collectives(Mesh(1, 2, CPU, backend="gloo"))
    full = torch.zeros(32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(link.mesh.wire), "broadcast", lambda *_args: SimpleNamespace())
        link.move(full, SHARDED, REPLICATED, LAYOUT, Purpose.WEIGHTS)
        (kept,) = link._transfers.values()
        link.use(Mesh(1, 2, CPU, backend="gloo"))
        with pytest.raises(
            InternalError, match=r"all-gather bucket 0: .*compiled for groups that reset\(\) has replac"
        ):
            kept.start(full)


def test_terms_are_those_of_a_reduce_scatter() -> None:
    full = torch.zeros(32)
    with pytest.raises(InternalError, match="a reduce-scatter needs a function that takes its terms"):
        alone().move(full, PARTIAL, SHARDED, LAYOUT, Purpose.GRADIENTS)
    with pytest.raises(InternalError, match="only a reduce-scatter has terms"):
        alone().move(full, SHARDED, REPLICATED, LAYOUT, Purpose.WEIGHTS, lambda terms: None)
    with pytest.raises(InternalError, match="all-reduce from PARTIAL to REPLICATED is no single move"):
        alone().move(full, Placement.PARTIAL, REPLICATED, LAYOUT, Purpose.GRADIENTS)
