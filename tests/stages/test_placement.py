"""placement.py: which moves exist, and what they send."""

from __future__ import annotations

import itertools

import pytest

from shardengine.errors import InternalError
from shardengine.stages.placement import TRANSITIONS, Axis, Operation, Placement, axes, operation, wire_fraction

R, S, P = Placement.REPLICATED, Placement.SHARDED, Placement.PARTIAL
SR, SP = Placement.SHARDED_INSIDE, Placement.PARTIAL_ACROSS


def test_the_docstring_table_is_the_transition_table() -> None:
    assert operation(S, R) is operation(S, SR) is operation(SR, R) is Operation.ALL_GATHER
    assert operation(P, S) is operation(P, SP) is operation(SP, S) is Operation.REDUCE_SCATTER
    assert operation(P, R) is operation(P, SR) is Operation.ALL_REDUCE
    assert operation(R, S) is operation(R, SR) is operation(SR, S) is Operation.LOCAL_SLICE
    assert {pair for pair, (op, _) in TRANSITIONS.items() if op is Operation.NOTHING} == {(p, p) for p in Placement}


def test_a_move_goes_along_the_axes_whose_letter_changes() -> None:
    """Gathers across first, while there is little to send; sums inside first, so that little is left to send."""
    for (source, target), (op, along) in TRANSITIONS.items():
        if op not in (Operation.ALL_GATHER, Operation.REDUCE_SCATTER):
            assert along == ()
            continue
        changed = [Axis.INSIDE] * (source.inside != target.inside) + [Axis.ACROSS] * (source.across != target.across)
        assert list(along) == (changed[::-1] if op is Operation.ALL_GATHER else changed) == list(axes(source, target))


def test_a_move_that_no_operation_makes_is_refused_by_name() -> None:
    missing = [pair for pair in itertools.product(Placement, repeat=2) if pair not in TRANSITIONS]
    assert [(a.value, b.value) for a, b in missing] == [
        *(("R", "P"), ("R", "SP"), ("S", "P"), ("S", "SP"), ("SR", "P"), ("SR", "SP")),
        *(("SP", "R"), ("SP", "P"), ("SP", "SR")),
    ]
    with pytest.raises(InternalError, match="from SHARDED to PARTIAL"):
        operation(S, P)


@pytest.mark.parametrize("ranks", [1, 2, 3, 64])
def test_a_move_sends_one_ring_pass_per_collective(ranks: int) -> None:
    ring = (ranks - 1) / ranks
    sent = {op: wire_fraction(op, ranks) for op in Operation}
    assert sent == {
        Operation.NOTHING: 0,
        Operation.LOCAL_SLICE: 0,
        Operation.ALL_GATHER: ring,
        Operation.REDUCE_SCATTER: ring,
        Operation.ALL_REDUCE: 2 * ring,
    }


def test_an_all_reduce_costs_what_its_two_halves_cost() -> None:
    halves = wire_fraction(operation(P, S), 4) + wire_fraction(operation(S, R), 4)
    assert wire_fraction(operation(P, R), 4) == halves


def test_only_a_sharded_bucket_divides_its_memory() -> None:
    assert [placement.fraction(4) for placement in (R, S, P)] == [1, 0.25, 1]
    assert [placement.fraction(12, replicas=3) for placement in (R, S, P, SR, SP)] == [1, 1 / 12, 1, 0.25, 0.25]
