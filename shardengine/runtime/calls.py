"""The forwards of units that a pass has seen, in order, and which of them are over in backward.

Must not know: units' weights, gradients, hooks.

[Note: Order of calls] Autograd runs ready nodes latest-created first, so it leaves the calls of a forward in reverse:
when it reaches one, all calls after that are over on this rank, whether it came through them or not. Every rank makes
the same calls in forward, so every rank meets them in the same order, if those that a rank has left out are met, too.

- a line is what one forward of the outermost module called. Parts of a model that are called one by one are one line
  until one of them is called again. A run of autograd that turns to another line has left the one before
- a call without grad, in a pass with grad, is one that re-entrant checkpointing computes again in backward, where a
  call with grad has its backward in one piece. A region (what one checkpoint computes again, in forward order) begins
  with a call whose inputs need a gradient. A recomputation belongs to the calls whose numbers (autograd's count of
  nodes) come next after that of the node that is running
- a call inside of the same unit's, or another unit's, call is in no line: it is over when its own hooks say so
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch

_MOST = 64
"""Forwards whose calls are known at the same time. An older one's backward is that of a line by itself."""


class Call:
    """One forward of unit ``unit``. line None: in none.

    number: autograd's, when it began · replayed: it ran without grad, and is computed again in backward · announced:
    its inputs say when its backward is over · computed: it has been computed again · reached: a gradient has reached
    its outputs · over: its backward is.
    """

    def __init__(self, unit: int, line: Line | None = None, *, replayed: bool = False) -> None:
        self.unit = unit
        self.line = line
        self.place = 0 if line is None else len(line.calls)
        self.group: list[Call] = [self]
        self.number = torch._C._autograd._get_sequence_nr()
        self.replayed = replayed
        self.announced = False
        self.renew()

    def renew(self) -> None:
        """Before the backward."""
        self.computed = self.reached = self.over = False

    def expect_end(self) -> None:
        """Its inputs say when its backward is over."""
        self.announced = True

    @property
    def task(self) -> int:
        """The run of autograd that came through it last, or runs now."""
        return torch._C._current_graph_task_id() if self.line is None else self.line.task

    def note_computed(self) -> None:
        """It is computed again."""
        self.computed = True

    def note_reached(self) -> None:
        """A gradient has reached its outputs."""
        self.reached = True


class Line:
    """The calls of one forward. left: how many, from the first on, are not over · modules: that were outermost in it ·
    task: the latest run of autograd that came through it · outstanding: calls that are not over, by unit."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.calls: list[Call] = []
        self.modules: set[int] = set()
        self.renew()

    def renew(self) -> None:
        """No backward has come through it."""
        self.left = len(self.calls)
        self.task = -1
        self.outstanding = Counter(call.unit for call in self.calls)
        for call in self.calls:
            call.renew()

    def add(self, call: Call, *, begins: bool) -> None:
        """``call`` begins its forward. begins: a region begins with it, if it is replayed."""
        before = self.calls[-1] if self.calls else None
        if call.replayed and not begins and before is not None and before.replayed:
            call.group = before.group
            call.group.append(call)
        self.calls.append(call)
        self.left = len(self.calls)
        self.outstanding[call.unit] += 1

    def down_to(self, place: int) -> Iterator[list[Call]]:
        """The groups after ``place``, from the last one on, that are not known to be over; they are afterwards."""
        while self.left > place:
            group = self.calls[self.left - 1].group
            if group[0].place < place:
                return
            self.left = group[0].place
            if not all(call.over for call in group):
                yield group


class Calls:
    """The lines of a pass. ``running``: the one through which backward comes at the moment · inside: the units whose
    forward is open · may_differentiate: whether a unit that trains was called in the last line, so that later calls
    have a backward at least on ranks that do not cut the graph.
    """

    def __init__(self) -> None:
        self.inside: set[int] = set()
        self.may_differentiate = False
        self.lines: list[Line] = []
        self.running: Line | None = None
        self._paused: list[Line] = []
        self._count = 0

    def forget(self) -> None:
        """No backward comes any more."""
        self.lines.clear()
        self._paused.clear()
        self.running = None

    def pause(self) -> None:
        """A run of autograd has ended, the backward has not: more of the running line may come in a later one."""
        if self.running is not None:
            self._paused.append(self.running)
            self.running = None

    def leave(self) -> None:
        """The run of autograd that came through a line is over, and what it left out is not over with it."""
        self.running = None

    def enter(self, module: object) -> None:
        """The outermost ``module`` begins a forward with grad."""
        if not self.lines or id(module) in self.lines[-1].modules or self.lines[-1].task >= 0:
            self._count += 1
            self.lines.append(Line(self._count))
            self.may_differentiate = False
            del self.lines[:-_MOST]  # of forwards with grad that have no backward
        self.lines[-1].modules.add(id(module))

    def begin(self, unit: int, *, grad: bool, differentiable: bool, trains: bool) -> Call:
        """A forward of ``unit`` begins. differentiable: one of its inputs needs a gradient · trains: the unit does."""
        self.may_differentiate |= trains
        if not self.lines:
            return Call(unit)
        call = Call(unit, self.lines[-1], replayed=not grad)
        self.lines[-1].add(call, begins=differentiable)
        return call

    def computed_again(self, unit: int) -> Call | None:
        """The call that is computed again where ``unit`` begins a forward in backward; None where none is known."""
        node: Any = torch._C._current_autograd_node()
        if node is None:
            return None
        for line in self.lines:
            place = bisect_right(line.calls, node._sequence_nr(), key=lambda call: call.number)
            if place < len(line.calls):
                found = line.calls[place]
                waits = (call for call in found.group if call.unit == unit and not (call.computed or call.over))
                return next(waits, None) if found.replayed else None
        return None

    def that_ran(self, unit: int, number: int) -> Call | None:
        """The call of ``unit`` in which autograd's node ``number`` was made; None where it is in no line."""
        found: Call | None = None
        for line in self.lines:
            place = bisect_right(line.calls, number, key=lambda call: call.number)
            if place and (found is None or line.calls[place - 1].number > found.number):
                found = line.calls[place - 1]
        return found if found is not None and found.unit == unit else None

    def approach(self, call: Call) -> Iterator[list[Call]]:
        """Backward has come to ``call``: the groups of calls that are over now, in order."""
        line, task = call.line, torch._C._current_graph_task_id()
        if line is None:
            return
        if line is not self.running or (call.over and task > line.task):
            yield from self.turn_to(line)
        line.task = max(line.task, task)
        yield from line.down_to(call.group[-1].place + 1)

    def is_late(self, call: Call) -> bool:
        """Whether a gradient comes to ``call`` in a run of autograd that has left it."""
        return call.over and call.line is not None and torch._C._current_graph_task_id() <= call.line.task

    def turn_to(self, line: Line) -> Iterator[list[Call]]:
        """Backward has come to what ``line``'s forward returned, or to a call of it."""
        task = torch._C._current_graph_task_id()
        if line.task >= task:
            return  # it came before, in this run
        if self.running is not None:
            yield from self.running.down_to(0)
        if line not in self.lines:
            self.lines.append(line)
        line.renew()
        line.task, self.running = task, line
        self._paused = [each for each in self._paused if each is not line]

    def finish(self) -> Iterator[list[Call]]:
        """The backward has ended: the groups that are over with it. Where it came through none: of the last line."""
        if self.running is None and not self._paused and self.lines:
            self.running = self.lines[-1]
        last = self.running
        self.pause()
        for line in self._paused:
            yield from line.down_to(0)
        self._paused.clear()
        self.lines = [line for line in self.lines if line.task < 0 and line is not last]

    def over(self, call: Call) -> None:
        """The backward of ``call`` is over."""
        line = call.line
        if line is None or call.over:
            return
        call.over = True
        line.outstanding[call.unit] -= 1
        while line.left and line.calls[line.left - 1].over:
            line.left -= 1

    def is_last(self, call: Call) -> bool:
        """Whether no other call of its unit is outstanding in its line."""
        return call.line is not None and call.line.outstanding[call.unit] <= (0 if call.over else 1)

    def waits_for_others(self, call: Call) -> bool:
        """Whether an earlier line, to which backward may yet turn, has calls of the same unit."""
        line = call.line
        return any(
            line is not None and each.number < line.number and each.task < 0 and each.outstanding[call.unit] > 0
            for each in self.lines
        )

    def is_followed(self, call: Call) -> bool:
        """Whether the next call to be reached after ``call`` is of the same unit, which therefore stays."""
        line = call.line
        return line is not None and call.place > 0 and line.calls[call.place - 1].unit == call.unit
