"""The placements of a bucket, and the cost of moving it between them.

Owns the placements and the transition table. Knows no tensors, no groups, no stages.

A placement has a letter for each axis of the mesh: inside of a shard group, and across the groups, which are replicas
of each other. A mesh that is not hybrid has one group of all ranks, and nothing is across. R: the same on all ranks, S:
each rank its own slice, P: still to be summed over the ranks. One letter stands for both axes.

    from → to    operation        axes            contents of each rank afterwards
    S → R        all-gather       across, inside  every rank the whole bucket
    S → SR       all-gather       across          every rank its group's slice
    SR → R       all-gather       inside          every rank the whole bucket
    P → S        reduce-scatter   inside, across  every rank its slice of the sum over ranks
    P → SP       reduce-scatter   inside          every rank its group's slice of the sum over the group
    SP → S       reduce-scatter   across          every rank its slice of the sum over ranks
    P → R, SR    all-reduce                       the sum (a reduce-scatter followed by an all-gather)
    R → S, SR    local slice                      every rank keeps its slice; nothing is sent
    SR → S
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

from shardengine.errors import InternalError


class Axis(enum.StrEnum):
    """An axis of a mesh. ALL: both of them."""

    ALL = "all"
    INSIDE = "inside"
    ACROSS = "across"


class Placement(enum.Enum):
    """The distribution of a bucket's elements over the ranks; the value is the letters, inside first."""

    REPLICATED = "R"  #: every rank holds the same full-size tensor
    SHARDED = "S"  #: every rank holds its own slice
    PARTIAL = "P"  #: every rank holds a full-size tensor that still has to be summed over ranks
    SHARDED_INSIDE = "SR"  #: a slice for each rank of a shard group, the same in every group
    PARTIAL_ACROSS = "SP"  #: a slice for each rank of a shard group, still to be summed over the groups

    def __init__(self, letters: str) -> None:
        self.inside = letters[0]
        """The letter inside of a shard group."""
        self.across = letters[-1]
        """The letter across the groups."""
        over = Axis.ALL if self.across == "S" else Axis.INSIDE
        self.sharded_over: Axis | None = over if self.inside == "S" else None
        """The axis whose ranks hold a slice each; None: each rank has the full size."""

    __hash__ = object.__hash__  # members are singletons; the hash of their names is slower

    def slices(self, ranks: int, replicas: int = 1) -> int:
        """Return the number of slices of the full size. replicas: shard groups of the ``ranks``."""
        return {Axis.ALL: ranks, Axis.INSIDE: ranks // replicas, None: 1}[self.sharded_over]

    def fraction(self, ranks: int, replicas: int = 1) -> float:
        """Return the part of the full size that one rank holds."""
        return 1 / self.slices(ranks, replicas)


class Operation(enum.Enum):
    """The operation that moves a bucket from one placement to another."""

    NOTHING = "nothing"
    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_REDUCE = "all-reduce"
    LOCAL_SLICE = "local slice"


_R, _S, _P = Placement.REPLICATED, Placement.SHARDED, Placement.PARTIAL
_SR, _SP = Placement.SHARDED_INSIDE, Placement.PARTIAL_ACROSS

TRANSITIONS: dict[tuple[Placement, Placement], tuple[Operation, tuple[Axis, ...]]] = {
    **{(each, each): (Operation.NOTHING, ()) for each in Placement},
    (_S, _R): (Operation.ALL_GATHER, (Axis.ACROSS, Axis.INSIDE)),
    (_S, _SR): (Operation.ALL_GATHER, (Axis.ACROSS,)),
    (_SR, _R): (Operation.ALL_GATHER, (Axis.INSIDE,)),
    (_P, _S): (Operation.REDUCE_SCATTER, (Axis.INSIDE, Axis.ACROSS)),
    (_P, _SP): (Operation.REDUCE_SCATTER, (Axis.INSIDE,)),
    (_SP, _S): (Operation.REDUCE_SCATTER, (Axis.ACROSS,)),
    (_P, _R): (Operation.ALL_REDUCE, ()),
    (_P, _SR): (Operation.ALL_REDUCE, ()),
    (_R, _S): (Operation.LOCAL_SLICE, ()),
    (_R, _SR): (Operation.LOCAL_SLICE, ()),
    (_SR, _S): (Operation.LOCAL_SLICE, ()),
}


def _transition(source: Placement, target: Placement) -> tuple[Operation, tuple[Axis, ...]]:
    try:
        return TRANSITIONS[source, target]
    except KeyError:
        raise InternalError(f"no operation moves a bucket from {source.name} to {target.name}") from None


def operation(source: Placement, target: Placement) -> Operation:
    """Return the operation that moves a bucket from ``source`` to ``target``. Raises InternalError if there is none."""
    return _transition(source, target)[0]


def axes(source: Placement, target: Placement) -> Sequence[Axis]:
    """Return the axes of the operation, in order; () if nothing is sent, or if it consists of two operations."""
    return _transition(source, target)[1]


def wire_fraction(op: Operation, ranks: int) -> float:
    """Return the bytes that one rank sends for ``op`` per byte of the bucket: (N-1)/N per pass over the ring."""
    passes = {Operation.ALL_GATHER: 1, Operation.REDUCE_SCATTER: 1, Operation.ALL_REDUCE: 2}.get(op, 0)
    return passes * (ranks - 1) / ranks
