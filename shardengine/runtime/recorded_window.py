"""In which order a window gathered units and launched their reductions, so that a rank without data does the same.

Must not know: units' weights, gradients, why there is no data.

[Note: Serving] A rank that has run out of data (ddp/joining: [Note: Uneven inputs]) still has to issue every collective
of the others, each group's in their order. Where weights rest replicated that is the reducer's one order of launches.
Where units are gathered, it is the order in which the model runs them, which nobody can ask a rank that has nothing to
run. So every rank writes down what its schedule does in a window: which units are needed and resharded, where others
are unsharded ahead, and which units' buckets may be launched (``Schedule``: [Note: End of a unit]). What is repeated
keeps the rule that no rank waits in a gather before it has launched what others may wait for, because the rank that
wrote it down kept it; it is the last window in which this rank had data from start to end. What is unsharded ahead is
predicted anew, as the other ranks do it: what they predict may have changed since.

A rank that never had such a window takes the order in which the model lists its units, there and back. Where the model
runs them otherwise the collectives do not match: ranks compare what they have issued before they step, and all of them
raise ``MismatchError``.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass


class What(enum.Enum):
    """What a schedule does. REQUEST, AGAIN: a unit is the next that is needed, in forward or in backward · NEED: it is
    unsharded and waited for, others are unsharded ahead · AHEAD: only that · RESHARD: a unit is resharded · KEEP: not
    inside of the shard group · BACKWARD: one begins · ADMIT, CLOSE: as the reducer has them."""

    REQUEST = enum.auto()
    AGAIN = enum.auto()
    NEED = enum.auto()
    AHEAD = enum.auto()
    RESHARD = enum.auto()
    KEEP = enum.auto()
    BACKWARD = enum.auto()
    ADMIT = enum.auto()
    CLOSE = enum.auto()


Event = tuple[What, int]
"""What, and the unit."""


_MOST = 1 << 16
"""Events of a micro-batch; what has more (forwards with grad that have no backward) is not written down."""


@dataclass(frozen=True)
class MicroBatch:
    """What one did. synchronises: it was outside of ``no_sync`` · final: the window ended with it."""

    events: Sequence[Event]
    synchronises: bool = True
    final: bool = True


class RecordedWindow:
    """The last whole window, and what the running one has done so far."""

    def __init__(self) -> None:
        self._last: list[MicroBatch] = []
        self._running: list[MicroBatch] = []
        self._events: list[Event] = []
        self._synchronises = True
        self._is_paused = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What happens inside is not this rank's own."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def note(self, what: What, unit: int = 0) -> None:
        """The schedule does this now."""
        if not self._is_paused and len(self._events) < _MOST:
            self._events.append((what, unit))

    def begin_backward(self, *, synchronises: bool) -> None:
        """A backward begins. synchronises: outside of ``no_sync``, in which a bare one may not end."""
        self.note(What.BACKWARD)
        self._synchronises = synchronises

    def end_micro_batch(self, *, final: bool) -> None:
        """A backward is over."""
        number, done = len(self._running), MicroBatch(self._events, self._synchronises, final)
        alike = (*self._running[-1:], *self._last[number : number + 1])  # mostly all are: kept once
        self._running.append(next((before for before in alike if before == done), done))
        self._events = []

    def end_window(self, *, regular: bool = True) -> None:
        """The step was taken. regular: the user has not said himself where it ends."""
        whole = bool(self._running) and self._running[-1].final
        if regular and whole and all(len(each.events) < _MOST for each in self._running):
            self._last = self._running
        self.drop()

    def drop(self) -> None:
        """The window is forgotten."""
        self._running, self._events = [], []

    @property
    def is_empty(self) -> bool:
        """Whether this rank has never had a whole window."""
        return not self._last

    def micro_batch(self, number: int, otherwise: MicroBatch) -> MicroBatch:
        """Number ``number`` of the last window, or its last one; without what this rank has done of it already.

        otherwise: where there is no last window.
        """
        found = self._last[min(number, len(self._last) - 1)] if self._last else otherwise
        done, self._events = len(self._events), []
        return MicroBatch(found.events[done:], found.synchronises, found.final)


def in_order(units: Sequence[int], back: Sequence[int], spared: Collection[int], after: What | None) -> list[Event]:
    """What a model does that runs ``units`` (without the root, 0) one after the other, and ``back`` in backward, the
    last unit first. spared: whose backward needs no weights · after: what follows a unit's forward."""
    events: list[Event] = [(What.NEED, 0)]
    waiting: int | None = None
    for unit in units:
        events.append((What.REQUEST, unit))
        if waiting is not None and after is not None:
            events.append((What.RESHARD if waiting in spared else after, waiting))
        events.append((What.NEED, unit))
        waiting = unit
    events.append((What.BACKWARD, 0))
    for unit in back:
        if unit not in spared:
            events.append((What.AGAIN, unit))
            if waiting is not None and waiting != unit and after is not None:
                events.append((What.RESHARD, waiting))
            waiting = None
            events.append((What.NEED, unit))
        events += [(What.ADMIT, unit), (What.CLOSE, unit), (What.RESHARD, unit), (What.AHEAD, 0)]
    return [*events, *((What.RESHARD, unit) for unit in (*units, 0))]
