"""Predictions of the unit that is needed next, from the last pass of its kind; gathers that ranks have agreed on.

Must not know: units, collectives, why.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence


class PrefetchOrder:
    """The recorded order of a pass's unshards, replayed as a prediction.

    It knows which of the next units are in flight (``start``), so that nobody has to go through them at every unit.
    """

    def __init__(self) -> None:
        self.elements_ahead = 0
        self._plan: list[int] = []
        self._recorded: list[int] = []
        self._started: dict[int, int] = {}
        self._on_track = True

    def request(self, unit: int) -> None:
        """Record that ``unit`` is needed now."""
        position = len(self._recorded)
        self._recorded.append(unit)
        self.elements_ahead -= self._started.pop(unit, 0)
        if position >= len(self._plan) or self._plan[position] != unit:
            self._on_track = False

    def ahead(self, most: int | None = None) -> Sequence[int]:
        """Return the units predicted next, at most ``most``; empty if the prediction failed."""
        position = len(self._recorded)
        return self._plan[position : None if most is None else position + most] if self._on_track else ()

    def upcoming(self) -> int | None:
        """Return the next unit to start; None at the end of the plan, or if that unit is in flight already."""
        position = len(self._recorded) + len(self._started)
        if not self._on_track or position >= len(self._plan) or self._plan[position] in self._started:
            return None
        return self._plan[position]

    def start(self, unit: int, elements: int) -> None:
        """Record that ``upcoming``, with so many elements, is in flight until it is needed."""
        self._started[unit] = elements
        self.elements_ahead += elements

    def stop(self) -> None:
        """Record that no unit ahead is in flight any more."""
        self._started.clear()
        self.elements_ahead = 0

    def end(self) -> None:
        """End the pass: the recorded order, if anything ran, is the next prediction."""
        if self._recorded:
            self._plan = self._recorded
        self._recorded, self._on_track = [], True
        self.stop()


class PrefetchOrders:
    """The predictions for passes with grad and without. last: the number of the unit that was needed last."""

    def __init__(self) -> None:
        self.of = {True: PrefetchOrder(), False: PrefetchOrder()}
        self.last = 0
        self._met = -1

    def request(self, grad: bool, unit: int, *, turned: bool = False) -> None:
        """Record that ``unit`` is needed now. turned: in backward; a recomputed unit is then counted once."""
        if not turned or self._met != unit:
            self.of[grad].request(unit)
        self._met = unit if turned else -1
        self.last = unit


class AgreedOrder:
    """The order of gathers that all ranks have agreed on, so that they need not ask each other again.

    [Note: Agreed gathers] Backends match gathers by their order alone. If ranks gather different units, gloo ends the
    process, and NCCL hangs or returns wrong weights. So each sequence of the last few gathers has one expected
    successor: the unit that followed the same sequence before. A rank that gathers another unit, or follows a new
    sequence, asks the others first. All ranks have the same past, so all expect the same unit. A rank that gathers the
    expected unit needs no answer: a rank that gathers another one is the one that asks. A gather that follows the same
    sequence as last time asks nothing; if a sequence has several successors, each change asks once. Each window begins
    without a past, so the second window sends the same messages as all later ones.
    """

    _PAST = 3

    def __init__(self) -> None:
        self.digest = 0
        self._past: tuple[int, ...] = ()
        self._next: dict[tuple[int, ...], int] = {}

    def begin_window(self) -> None:
        """Begin a window, after all ranks have agreed on gradients: the next gather follows no other."""
        self._past = ()

    def gathers_as_expected(self, unit: int) -> bool:
        """Whether every rank knows that ``unit`` is gathered now. If so, record the gather."""
        if self._next.get(self._past) != unit:
            return False
        self._past = (*self._past, unit)[-self._PAST :]
        return True

    def note(self, unit: int) -> None:
        """Record that ``unit`` is gathered on all ranks."""
        if self._next.get(self._past) != unit:
            self._next[self._past] = unit
            self.digest = zlib.crc32(b"%d" % unit, self.digest)
        self._past = (*self._past, unit)[-self._PAST :]
