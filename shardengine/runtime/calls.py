"""The forwards of units in a pass, in order, and which of them are over in backward.

Must not know: units' weights, gradients, hooks.

[Note: Order of calls] Autograd runs ready nodes latest-created first, so backward visits the calls of a forward in
reverse. When it reaches one, all later calls are over on this rank, whether it came through them or not. Every rank
makes the same calls in forward. So every rank meets them in the same order in backward, provided that it also meets
those that its own backward skipped.

- A line is the list of calls of one forward of the outermost module. Parts of a model that are called one by one form
  one line until one of them is called again. A run of autograd that turns to another line has left the one before.
- A call without grad, in a pass with grad, is one that re-entrant checkpointing recomputes in backward, and a call with
  grad there has its backward in one piece. A region (the calls that one checkpoint recomputes, in forward order) begins
  with a call whose inputs need a gradient. A recomputation belongs to the calls whose numbers (autograd's count of
  nodes) come next after that of the running node.
- A call inside another call, of the same unit or of another one, is in no line: it is over when its own hooks say so.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch

_MOST = 64
"""Forwards whose calls are known at the same time. The backward of an older one is that of a line by itself."""


class UnitCall:
    """One forward of unit ``unit``. line None: the call is in no line.

    number: autograd's count of nodes when it began · replayed: it ran without grad, and is recomputed in backward ·
    announced: its inputs announce the end of its backward · computed: it has been recomputed · reached: a gradient has
    reached its outputs · over: its backward is over.
    """

    def __init__(self, unit: int, line: CallLine | None = None, *, replayed: bool = False) -> None:
        self.unit = unit
        self.line = line
        self.place = 0 if line is None else len(line.calls)
        self.group: list[UnitCall] = [self]
        self.number = torch._C._autograd._get_sequence_nr()
        self.replayed = replayed
        self.announced = False
        self.renew()

    def renew(self) -> None:
        """Reset the call before a backward."""
        self.computed = self.reached = self.over = False

    def expect_end(self) -> None:
        """Record that its inputs announce the end of its backward."""
        self.announced = True

    @property
    def task(self) -> int:
        """The last run of autograd that came through it; for a call in no line, the present run."""
        return torch._C._current_graph_task_id() if self.line is None else self.line.task

    def note_computed(self) -> None:
        """Record that it is recomputed."""
        self.computed = True

    def note_reached(self) -> None:
        """Record that a gradient has reached its outputs."""
        self.reached = True


class CallLine:
    """The calls of one forward.

    left: how many calls, from the first on, are not over · modules: the outermost ones of this line · task: the latest
    run of autograd that came through it · outstanding: number of calls that are not over, by unit.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.calls: list[UnitCall] = []
        self.modules: set[int] = set()
        self.renew()

    def renew(self) -> None:
        """Reset the line: no backward has come through it."""
        self.left = len(self.calls)
        self.task = -1
        self.outstanding = Counter(call.unit for call in self.calls)
        for call in self.calls:
            call.renew()

    def add(self, call: UnitCall, *, begins: bool) -> None:
        """Append ``call``, whose forward begins. begins: a region begins with it, if it is replayed."""
        before = self.calls[-1] if self.calls else None
        if call.replayed and not begins and before is not None and before.replayed:
            call.group = before.group
            call.group.append(call)
        self.calls.append(call)
        self.left = len(self.calls)
        self.outstanding[call.unit] += 1

    def down_to(self, place: int) -> Iterator[list[UnitCall]]:
        """Yield the groups after ``place``, last one first, that are not known to be over; they are over afterwards."""
        while self.left > place:
            group = self.calls[self.left - 1].group
            if group[0].place < place:
                return
            self.left = group[0].place
            if not all(call.over for call in group):
                yield group


class Calls:
    """The lines of a pass.

    running: the line that backward comes through at the moment · inside: the units whose forward is open ·
    may_differentiate: whether a unit that trains was called in the last line, so that later calls have a backward at
    least on ranks that do not cut the graph.
    """

    def __init__(self) -> None:
        self.inside: set[int] = set()
        self.may_differentiate = False
        self.lines: list[CallLine] = []
        self.running: CallLine | None = None
        self._paused: list[CallLine] = []
        self._count = 0

    def forget(self) -> None:
        """Forget all lines: no backward comes any more."""
        self.lines.clear()
        self._paused.clear()
        self.running = None

    def pause(self) -> None:
        """End a run of autograd but not the backward: a later run may bring more of the running line."""
        if self.running is not None:
            self._paused.append(self.running)
            self.running = None

    def leave(self) -> None:
        """End the run of autograd that came through a line; the calls that it skipped are not over."""
        self.running = None

    def enter(self, module: object) -> None:
        """Begin a forward with grad of ``module``, an outermost one."""
        if not self.lines or id(module) in self.lines[-1].modules or self.lines[-1].task >= 0:
            self._count += 1
            self.lines.append(CallLine(self._count))
            self.may_differentiate = False
            del self.lines[:-_MOST]  # of forwards with grad that have no backward
        self.lines[-1].modules.add(id(module))

    def begin(self, unit: int, *, grad: bool, differentiable: bool, trains: bool) -> UnitCall:
        """Begin a forward of ``unit``. differentiable: one of its inputs needs a gradient · trains: the unit does."""
        self.may_differentiate |= trains
        if not self.lines:
            return UnitCall(unit)
        call = UnitCall(unit, self.lines[-1], replayed=not grad)
        self.lines[-1].add(call, begins=differentiable)
        return call

    def computed_again(self, unit: int) -> UnitCall | None:
        """Return the call that is recomputed, if ``unit`` begins a forward in backward; None if it is unknown."""
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

    def that_ran(self, unit: int, number: int) -> UnitCall | None:
        """Return the call of ``unit`` that made autograd's node ``number``; None if that call is in no line."""
        found: UnitCall | None = None
        for line in self.lines:
            place = bisect_right(line.calls, number, key=lambda call: call.number)
            if place and (found is None or line.calls[place - 1].number > found.number):
                found = line.calls[place - 1]
        return found if found is not None and found.unit == unit else None

    def approach(self, call: UnitCall) -> Iterator[list[UnitCall]]:
        """Yield the groups of calls that are over, in order, because backward has come to ``call``."""
        line, task = call.line, torch._C._current_graph_task_id()
        if line is None:
            return
        if line is not self.running or (call.over and task > line.task):
            yield from self.turn_to(line)
        line.task = max(line.task, task)
        yield from line.down_to(call.group[-1].place + 1)

    def is_late(self, call: UnitCall) -> bool:
        """Whether a gradient reaches ``call`` in a run of autograd that has left it already."""
        return call.over and call.line is not None and torch._C._current_graph_task_id() <= call.line.task

    def turn_to(self, line: CallLine) -> Iterator[list[UnitCall]]:
        """Yield the groups that are over because backward has come to ``line``.

        It has come to the result of the line's forward, or to a call in it.
        """
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

    def finish(self) -> Iterator[list[UnitCall]]:
        """End the backward and yield the groups that are over with it.

        If it came through no line, these are the groups of the last line.
        """
        if self.running is None and not self._paused and self.lines:
            self.running = self.lines[-1]
        last = self.running
        self.pause()
        for line in self._paused:
            yield from line.down_to(0)
        self._paused.clear()
        self.lines = [line for line in self.lines if line.task < 0 and line is not last]

    def over(self, call: UnitCall) -> None:
        """Record that the backward of ``call`` is over."""
        line = call.line
        if line is None or call.over:
            return
        call.over = True
        line.outstanding[call.unit] -= 1
        while line.left and line.calls[line.left - 1].over:
            line.left -= 1

    def is_last(self, call: UnitCall) -> bool:
        """Whether no other call of its unit is outstanding in its line."""
        return call.line is not None and call.line.outstanding[call.unit] <= (0 if call.over else 1)

    def waits_for_others(self, call: UnitCall) -> bool:
        """Whether an earlier line that backward may yet turn to has calls of the same unit."""
        line = call.line
        return any(
            line is not None and each.number < line.number and each.task < 0 and each.outstanding[call.unit] > 0
            for each in self.lines
        )

    def is_followed(self, call: UnitCall) -> bool:
        """Whether the next call that backward reaches after ``call`` is of the same unit, which therefore stays."""
        line = call.line
        return line is not None and call.place > 0 and line.calls[call.place - 1].unit == call.unit
