"""Which unit is needed next: the order of the last pass of its kind. Must not know: units, gathers, why."""

from __future__ import annotations

from collections.abc import Sequence


class Prediction:
    """The order of gathers in a pass, recorded, and replayed as a prediction."""

    def __init__(self) -> None:
        self._plan: list[int] = []
        self._recorded: list[int] = []
        self._on_track = True

    def demand(self, unit: int) -> None:
        """``unit`` is needed now."""
        position = len(self._recorded)
        self._recorded.append(unit)
        if position >= len(self._plan) or self._plan[position] != unit:
            self._on_track = False

    def ahead(self) -> Sequence[int]:
        """The units predicted to be needed next; empty where the prediction failed."""
        return self._plan[len(self._recorded) :] if self._on_track else ()

    def end(self) -> None:
        """The pass is over: what was recorded (if anything ran) is the next prediction."""
        if self._recorded:
            self._plan = self._recorded
        self._recorded, self._on_track = [], True


class Predictions:
    """The predictions for passes with grad and without. ``last``: the unit that was needed last, by number."""

    def __init__(self) -> None:
        self.of = {True: Prediction(), False: Prediction()}
        self.last = 0

    def demand(self, grad: bool, unit: int) -> None:
        """``unit`` is needed now."""
        self.last = unit
        self.of[grad].demand(unit)
