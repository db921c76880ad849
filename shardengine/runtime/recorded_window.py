"""In which order a window gathered units and launched their reductions, so that a rank without data does the same.

Must not know: units' weights, gradients, why there is no data.

[Note: Serving] A rank that has run out of data (ddp/joining: [Note: Uneven inputs]) still has to issue every collective
of the others, each group's in their order. Where weights rest replicated that is the reducer's one order of launches.
Where units are gathered, it is the order in which the model runs them, which nobody can ask a rank that has nothing to
run. So every rank writes down what its schedule does in a window: what it unshards, waits for and reshards, and which
units' buckets may be launched (``Schedule``: [Note: End of a unit]). What is repeated keeps the rule that no rank waits
in a gather before it has launched what others may wait for, because the rank that wrote it down kept it; it is the last
window that this rank took part in from start to end.

A rank that never had such a window takes the order in which the model lists its units, there and back. Where the model
runs them otherwise the collectives do not match: ranks compare what they have issued before they step, and all of them
raise ``MismatchError``.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass


class What(enum.Enum):
    """What a schedule does. BACKWARD: one begins · ADMIT, CLOSE: as the reducer has them."""

    UNSHARD = enum.auto()
    WAIT = enum.auto()
    RESHARD = enum.auto()
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
        self.is_paused = False

    def note(self, what: What, unit: int = 0) -> None:
        """The schedule does this now."""
        if not self.is_paused and len(self._events) < _MOST:
            self._events.append((what, unit))

    def end_micro_batch(self, *, synchronises: bool, final: bool) -> None:
        """A backward is over."""
        if self.is_paused:
            return
        number, done = len(self._running), MicroBatch(self._events, synchronises, final)
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

    def micro_batch(self, number: int, otherwise: MicroBatch) -> MicroBatch:
        """Number ``number`` of the last window, or its last one; without what this rank has done of it already.

        otherwise: where there is no last window.
        """
        found = self._last[min(number, len(self._last) - 1)] if self._last else otherwise
        done, self._events = len(self._events), []
        return MicroBatch(found.events[done:], found.synchronises, found.final)


def in_order(units: Sequence[int], back: Sequence[int], *, reshards: bool) -> list[Event]:
    """What a model does that runs ``units`` (without the root, 0) one after the other, and ``back`` in backward, the
    last unit first. reshards: after forward."""
    events: list[Event] = [(What.UNSHARD, 0), (What.WAIT, 0)]
    before: int | None = None
    for unit in units:
        if reshards and before is not None:
            events.append((What.RESHARD, before))
        events += [(What.UNSHARD, unit), (What.WAIT, unit)]
        before = unit
    events.append((What.BACKWARD, 0))
    for unit in back:
        events += [(What.UNSHARD, unit), (What.WAIT, unit), (What.ADMIT, unit), (What.CLOSE, unit)]
        events.append((What.RESHARD, unit))
    return events
