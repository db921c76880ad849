"""The recorded order of a window's gathers and reductions, which a rank without data repeats.

Must not know: units' weights, gradients, why there is no data.

[Note: Serving] A rank that has run out of data (ddp/joining: [Note: Uneven inputs]) still has to issue every collective
of the others, in the order of each group. If weights rest replicated, that is the reducer's one order of launches. If
units are gathered, it is the order of the units in the model's run, which a rank without a batch cannot observe. So
every rank records its schedule's actions in a window: which units are needed and resharded, when others are unsharded
ahead, and which units' buckets may be launched (``Schedule``: [Note: End of a unit]). The recording is the last window
that this rank had data for from start to end. No rank may wait in a gather before it has launched the reductions that
others may wait for. The repetition keeps that rule, because the recording rank kept it. Units that are unsharded ahead
are predicted again, as on the other ranks, whose predictions may have changed.

A rank that never had such a window takes the order of units in the model, forward and back. If the model runs them
otherwise, the collectives do not match: ranks compare the collectives that they have issued before they step, and all
raise ``MismatchError``.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass


class What(enum.Enum):
    """An action of a schedule.

    REQUEST, AGAIN: a unit is the next that is needed, in forward or in backward · NEED: it is unsharded and waited for,
    others are unsharded ahead · AHEAD: units are unsharded ahead · RESHARD: a unit is resharded · KEEP: it is
    resharded, but not inside the shard group · BACKWARD: one begins · ADMIT, CLOSE: the reducer admits or ends a unit.
    """

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
"""The action and the unit."""


_MOST = 1 << 16
"""Events of a micro-batch; one with more events (forwards with grad that have no backward) is not recorded."""


@dataclass(frozen=True)
class MicroBatch:
    """The events of one micro-batch. synchronises: it was outside of ``no_sync`` · final: the window ended with it."""

    events: Sequence[Event]
    synchronises: bool = True
    final: bool = True


class RecordedWindow:
    """The last whole window, and the events of the running one so far."""

    def __init__(self) -> None:
        self._last: list[MicroBatch] = []
        self._running: list[MicroBatch] = []
        self._events: list[Event] = []
        self._synchronises = True
        self._is_paused = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, events are not this rank's own and are not recorded."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def note(self, what: What, unit: int = 0) -> None:
        """Record an event of the schedule."""
        if not self._is_paused and len(self._events) < _MOST:
            self._events.append((what, unit))

    def begin_backward(self, *, synchronises: bool) -> None:
        """Record that a backward begins. synchronises: outside of ``no_sync``; a bare backward that begins inside may
        end outside."""
        self.note(What.BACKWARD)
        self._synchronises = synchronises

    def end_micro_batch(self, *, final: bool) -> None:
        """Record the end of a backward."""
        number, done = len(self._running), MicroBatch(self._events, self._synchronises, final)
        alike = (*self._running[-1:], *self._last[number : number + 1])  # mostly all are: kept once
        self._running.append(next((before for before in alike if before == done), done))
        self._events = []

    def end_window(self, *, regular: bool = True) -> None:
        """End the window after its step. regular: its end was not set by the user."""
        whole = bool(self._running) and self._running[-1].final
        if regular and whole and all(len(each.events) < _MOST for each in self._running):
            self._last = self._running
        self.drop()

    def drop(self) -> None:
        """Forget the running window."""
        self._running, self._events = [], []

    @property
    def is_empty(self) -> bool:
        """Whether this rank has never had a whole window."""
        return not self._last

    def micro_batch(self, number: int, otherwise: MicroBatch) -> MicroBatch:
        """Return micro-batch ``number`` of the last window, or its last one, without the events that are done already.

        otherwise: the result if there is no last window.
        """
        found = self._last[min(number, len(self._last) - 1)] if self._last else otherwise
        done, self._events = len(self._events), []
        return MicroBatch(found.events[done:], found.synchronises, found.final)


def in_order(units: Sequence[int], back: Sequence[int], spared: Collection[int], after: What | None) -> list[Event]:
    """Return the events of a model that runs ``units`` one after the other, and ``back`` in backward.

    units: without the root, 0 · back: the last unit first · spared: units whose backward needs no weights · after: the
    event that follows a unit's forward.
    """
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
