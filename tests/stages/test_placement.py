"""placement.py: which moves exist, and what they send."""

from __future__ import annotations

import itertools

import pytest

from shardengine.errors import InternalError
from shardengine.stages.placement import TRANSITIONS, Operation, Placement, operation, wire_fraction

R, S, P = Placement.REPLICATED, Placement.SHARDED, Placement.PARTIAL


def test_the_docstring_table_is_the_transition_table() -> None:
    assert operation(S, R) is Operation.ALL_GATHER
    assert operation(P, S) is Operation.REDUCE_SCATTER
    assert operation(P, R) is Operation.ALL_REDUCE
    assert operation(R, S) is Operation.LOCAL_SLICE
    assert {pair for pair, op in TRANSITIONS.items() if op is Operation.NOTHING} == {(R, R), (S, S), (P, P)}


def test_a_move_that_no_operation_makes_is_refused_by_name() -> None:
    missing = [pair for pair in itertools.product(Placement, repeat=2) if pair not in TRANSITIONS]
    assert missing == [(R, P), (S, P)]
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
