"""Which unit is needed next, by the last pass of its kind; which gathers ranks have agreed on.

Must not know: units, collectives, why.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence


class PrefetchOrder:
    """The order in which a pass unshards units, recorded, and replayed as a prediction.

    It knows which units ahead are on their way (``start``), so that nobody has to go through them at every unit.
    """

    def __init__(self) -> None:
        self.elements_ahead = 0
        self._plan: list[int] = []
        self._recorded: list[int] = []
        self._started: dict[int, int] = {}
        self._on_track = True

    def request(self, unit: int) -> None:
        """``unit`` is needed now."""
        position = len(self._recorded)
        self._recorded.append(unit)
        self.elements_ahead -= self._started.pop(unit, 0)
        if position >= len(self._plan) or self._plan[position] != unit:
            self._on_track = False

    def ahead(self, most: int | None = None) -> Sequence[int]:
        """The units predicted to be needed next, at most so many; empty where the prediction failed."""
        position = len(self._recorded)
        return self._plan[position : None if most is None else position + most] if self._on_track else ()

    def upcoming(self) -> int | None:
        """The first unit ahead that is not on its way; None where there is none, or the plan returns to one that is."""
        position = len(self._recorded) + len(self._started)
        if not self._on_track or position >= len(self._plan) or self._plan[position] in self._started:
            return None
        return self._plan[position]

    def start(self, unit: int, elements: int) -> None:
        """``upcoming``, with so many elements, is on its way until it is needed."""
        self._started[unit] = elements
        self.elements_ahead += elements

    def stop(self) -> None:
        """Nothing ahead is on its way any more."""
        self._started.clear()
        self.elements_ahead = 0

    def end(self) -> None:
        """The pass is over: what was recorded (if anything ran) is the next prediction."""
        if self._recorded:
            self._plan = self._recorded
        self._recorded, self._on_track = [], True
        self.stop()


class PrefetchOrders:
    """The predictions for passes with grad and without. ``last``: the unit that was needed last, by number."""

    def __init__(self) -> None:
        self.of = {True: PrefetchOrder(), False: PrefetchOrder()}
        self.last = 0
        self._met = -1

    def request(self, grad: bool, unit: int, *, turned: bool = False) -> None:
        """``unit`` is needed now. turned: in backward, where one that is computed again is needed once."""
        if not turned or self._met != unit:
            self.of[grad].request(unit)
        self._met = unit if turned else -1
        self.last = unit


class AgreedOrder:
    """In which order ranks gather units: what they have agreed on, so that they need not ask each other again.

    [Note: Agreed gathers] Backends match gathers by their order alone. Where ranks gather different units gloo ends the
    process, NCCL hangs or brings wrong weights. So after each few gathers one unit is expected, the one that came after
    the same few before. A rank that gathers another one, or for the first time, asks the others before it does. As all
    have the same past, all expect the same, and a rank that gathers what is expected needs nobody's answer: one that
    does not is the one that asks. A gather that follows the same few as last time asks nothing; where the same few have
    several successors, each change asks once. Each window begins without a past, so the second window sends what all
    later ones send.
    """

    _PAST = 3

    def __init__(self) -> None:
        self.digest = 0
        self._past: tuple[int, ...] = ()
        self._next: dict[tuple[int, ...], int] = {}

    def begin_window(self) -> None:
        """All ranks have agreed on the gradients of a window. The next gather follows none."""
        self._past = ()

    def gathers_as_expected(self, unit: int) -> bool:
        """Whether every rank knows that ``unit`` is gathered now. If so, that is noted."""
        if self._next.get(self._past) != unit:
            return False
        self._past = (*self._past, unit)[-self._PAST :]
        return True

    def note(self, unit: int) -> None:
        """``unit`` is gathered, on all ranks."""
        if self._next.get(self._past) != unit:
            self._next[self._past] = unit
            self.digest = zlib.crc32(b"%d" % unit, self.digest)
        self._past = (*self._past, unit)[-self._PAST :]
