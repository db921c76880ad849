"""Where a bucket rests, and what it costs to move it.

Owns the three placements and the transition table. Knows no tensors, no groups, no stages.

    from → to    operation        who holds what afterwards
    S → R        all-gather       every rank the whole bucket
    P → S        reduce-scatter   every rank its slice of the sum over ranks
    P → R        all-reduce       every rank the whole sum (a reduce-scatter followed by an all-gather)
    R → S        local slice      every rank keeps its slice; nothing is sent
"""

from __future__ import annotations

import enum

from shardengine.errors import InternalError


class Placement(enum.Enum):
    """How the elements of a bucket are spread over the ranks."""

    REPLICATED = "R"  #: every rank holds the same full-size tensor
    SHARDED = "S"  #: every rank holds its own slice
    PARTIAL = "P"  #: every rank holds a full-size tensor that still has to be summed over ranks

    def fraction(self, ranks: int) -> float:
        """Part of the full size that one rank holds."""
        return 1 / ranks if self is Placement.SHARDED else 1.0


class Operation(enum.Enum):
    """What moves a bucket from one placement to another."""

    NOTHING = "nothing"
    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_REDUCE = "all-reduce"
    LOCAL_SLICE = "local slice"


_R, _S, _P = Placement.REPLICATED, Placement.SHARDED, Placement.PARTIAL

TRANSITIONS: dict[tuple[Placement, Placement], Operation] = {
    (_R, _R): Operation.NOTHING,
    (_S, _S): Operation.NOTHING,
    (_P, _P): Operation.NOTHING,
    (_S, _R): Operation.ALL_GATHER,
    (_P, _S): Operation.REDUCE_SCATTER,
    (_P, _R): Operation.ALL_REDUCE,
    (_R, _S): Operation.LOCAL_SLICE,
}


def operation(source: Placement, target: Placement) -> Operation:
    """The operation that moves a bucket from ``source`` to ``target``; ``InternalError`` where there is none."""
    try:
        return TRANSITIONS[source, target]
    except KeyError:
        raise InternalError(f"no operation moves a bucket from {source.name} to {target.name}") from None


def wire_fraction(op: Operation, ranks: int) -> float:
    """Bytes that one rank sends for ``op``, as a multiple of the bucket's full size: (N-1)/N per pass over the ring."""
    passes = {Operation.ALL_GATHER: 1, Operation.REDUCE_SCATTER: 1, Operation.ALL_REDUCE: 2}.get(op, 0)
    return passes * (ranks - 1) / ranks
