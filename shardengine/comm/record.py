"""What one collective is: what for, of which bucket and parameters, how many bytes. Must not know torch.distributed."""

from __future__ import annotations

import enum
import functools
from collections.abc import Sequence
from typing import NamedTuple

from shardengine.comm.positions import Waiting


class Purpose(enum.Enum):
    """What bytes are sent for; ``STEP`` are those that a stage's formula counts."""

    GRADIENTS = "gradients: reduce-scatter"
    WHOLE_GRADIENTS = "gradients: all-gather"
    WEIGHTS = "weights: all-gather"
    EVALUATION = "weights without grad: all-gather"
    WHOLE_WEIGHTS = "full_params and state_dict"
    WHOLE_STATE = "full_grads and full_optimizer_state"
    BUFFERS = "buffers"
    RELAYOUT = "new layout"
    START = "start"
    CONTROL = "control"


EVALUATE = "evaluate"
"""The group that gathers weights for forwards without grad (mesh)."""
STEP = (Purpose.GRADIENTS, Purpose.WHOLE_GRADIENTS, Purpose.WEIGHTS)


class Record(NamedTuple):
    """What a collective is. sequence: among all that this rank issued; place: among those of its group.

    what: the bucket, or what is exchanged · names: the parameters in it · sent: bytes that this rank sends
    """

    sequence: int
    place: int
    group: str
    operation: str
    what: str
    names: tuple[str, ...]
    sent: int
    purpose: Purpose

    @property
    def subject(self) -> str:
        """The bucket with its parameters, or what is exchanged."""
        return _subject(self.what, self.names)

    @property
    def title(self) -> str:
        """In a trace."""
        return f"{self.operation} {self.what}" if self.what else self.operation

    @property
    def summary(self) -> str:
        """What ranks must agree on: the same at every step."""
        return _summary(self.operation, self.what, self.names, self.sent)

    @property
    def announcement(self) -> str:
        """What debug mode compares."""
        return f"{self.sequence} {self.operation} {self.sent} bytes {self.subject}"

    def describe(self, rank: int) -> str:
        """For errors."""
        return f"{self.operation} number {self.place} on rank {rank} for {self.subject}"

    def waiting(self, rank: int) -> Waiting:
        """For the other ranks, while this one waits."""
        key = f"{self.group} {self.place} {self.operation} {self.subject}"
        shape = f"{self.operation} {self.sent}"
        where = "a forward without grad" if self.group == EVALUATE else ""
        return Waiting(self.describe(rank), key, self.group, self.place, shape, where=where)


@functools.lru_cache(maxsize=65536)
def _subject(what: str, names: tuple[str, ...]) -> str:
    """Made once: every step moves the same buckets."""
    shown = _shorten(names)
    return f"{what} ({shown})" if what and shown else what or shown


@functools.lru_cache(maxsize=65536)
def _summary(operation: str, what: str, names: tuple[str, ...], sent: int) -> str:
    return f"{operation} of {_subject(what, names)}, {sent} bytes"


def _shorten(names: Sequence[str], limit: int = 4) -> str:
    """The first few names, and how many more there are."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
