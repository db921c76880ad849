"""When units are gathered, resharded and prefetched, and the sweep at the end of backward.

Must not know: nn.Module internals, how hooks are registered, how a gather works.

[Note: Holds] Hooks need not balance: checkpointing recomputes a forward that never finishes, a unit may run twice, a
forward may have no backward. So nothing is counted down that must reach zero:

- forward: a unit is held from its pre-forward to its post-forward (a depth, forgotten at the end of a pass)
- backward: a unit is held while one of its calls is between "a gradient reached its outputs" and "all gradients of its
  inputs are known". Fully trainable units are let go earlier, when all their parameters have their gradient
- inside a backward hold, forward hooks of the unit do nothing: that is a recomputation, the weights are there
- kept: nobody would tell us when its backward comes (no output with a graph), or an output is a view of its weights.
  Kept units stay to the end of the pass
- the root is held from the first forward of any module to the end of backward, or without grad to the end of the
  outermost forward

[Note: Pass] With grad a pass lasts from the first forward to the end of backward; without, it is one outermost forward.
The order of gathers of the last pass of its kind is the prediction for the next one. A wrong prediction switches
prefetching off for the rest of the pass; it changes time, never results.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from shardengine.collectives import Collectives
from shardengine.ddp import Reducer
from shardengine.stages import Stage
from shardengine.unit import Unit, Weights


class Trace:
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


class Hold:
    """Why a unit may not be resharded now ([Note: Holds])."""

    def __init__(self) -> None:
        self.depth = 0
        self.calls: set[int] = set()
        self.left: set[int] = set()
        self.fired: set[int] = set()
        self.kept = False
        self.lent = False

    def leave(self, calls: set[int]) -> None:
        """The backwards of ``calls`` are over; a late announcement of one of them means nothing."""
        self.left |= calls
        self.calls -= calls

    def clear(self) -> None:
        """The pass is over."""
        self.depth = 0
        self.calls.clear()
        self.left.clear()
        self.fired.clear()
        self.kept = self.lent = False


class Schedule:
    """Answers the events of a pass. ``units[0]`` is the root. prefetch: elements gathered ahead at most, 0: none."""

    def __init__(
        self, units: list[Unit], stage: Stage, collectives: Collectives, reducer: Reducer, prefetch: int
    ) -> None:
        self.units = units
        self._stage = stage
        self._collectives = collectives
        self._reducer = reducer
        self._prefetch_elements = prefetch
        self._holds = [Hold() for _ in units]
        self._unit_of = {index: unit for unit in units for index in unit.trainable}
        self._traces = {True: Trace(), False: Trace()}
        self._grad_pass = True
        self._outermost: object | None = None
        self._backward_expected = False
        self._in_backward = False

    def trains(self, index: int) -> bool:
        """Whether unit ``index`` has trainable parameters."""
        return bool(self.units[index].trainable)

    def observes(self, index: int) -> bool:
        """Whether forwards of unit ``index`` matter now: not in a recomputation, not inside ``full_params``."""
        return not self._holds[index].calls and not self.units[index].pinned

    # Events of forward. ``grad``: whether autograd records.

    def enter(self, module: object, grad: bool) -> None:
        """``module`` begins its forward; the outermost one opens a pass and holds the root.

        Where the outermost one begins again, its last forward raised.
        """
        if self._in_backward or self._outermost not in (None, module):
            return
        self._outermost = module
        self._grad_pass = grad
        self._backward_expected |= grad
        for hold in self._holds:
            hold.depth = 0
        root = self.units[0]
        if not root.pinned:
            if root.state is Weights.SHARDED:
                root.gather(self._collectives)
            self._prefetch()
            self._await(root)

    def leave(self, module: object, views: Sequence[Tensor]) -> None:
        """``module`` ended its forward; ``views``: tensors that it returned, which may be views of weights."""
        if module is not self._outermost:
            return
        self._outermost = None
        self._lend(0, views)
        if self._grad_pass:
            return
        self._end_pass(spare_kept=self._backward_expected)
        self._grad_pass = True

    def before_forward(self, index: int) -> int:
        """Unit ``index`` begins a forward: it must be full. Returns its depth, 0 where this call is not observed."""
        if not self.observes(index):
            return 0
        hold = self._holds[index]
        hold.depth += 1
        self._demand(index)
        return hold.depth

    def after_forward(self, index: int, grad: bool, keep: bool, views: Sequence[Tensor]) -> None:
        """Unit ``index`` ended a forward. ``keep``: its backward will not announce itself; views: as in ``leave``."""
        hold = self._holds[index]
        hold.depth = max(0, hold.depth - 1)
        hold.kept |= keep
        self._lend(index, views)
        if not hold.depth and (not grad or self._stage.reshards_after_forward):
            self._let_go(index)

    # Events of backward

    def begin_backward(self) -> None:
        """A backward starts: the root must be full."""
        self._in_backward = True
        if self._stage.moves_weights:
            self._await(self.units[0])

    def backward_reached(self, index: int, call: int) -> None:
        """A gradient reached the outputs of call ``call`` of unit ``index``."""
        hold = self._holds[index]
        if call in hold.calls or call in hold.left:
            return
        if not hold.calls:
            hold.fired.clear()
        hold.calls.add(call)
        self._demand(index)

    def backward_left(self, index: int, call: int) -> None:
        """The gradients of all inputs of call ``call`` are known: its weights are not needed any more."""
        hold = self._holds[index]
        if call in hold.calls:
            hold.leave({call})
            self._let_go(index)

    def gradient_ready(self, parameter: int, gradient: Tensor) -> None:
        """``gradient`` of a parameter is final for this micro-batch."""
        self._reducer.on_gradient(parameter, gradient)
        unit = self._unit_of[parameter]
        if unit.index == 0 or not self._stage.moves_weights:
            return
        hold = self._holds[unit.index]
        hold.fired.add(parameter)
        if hold.calls and not unit.has_frozen and len(hold.fired) == len(unit.trainable):
            hold.leave(set(hold.calls))
            self._let_go(unit.index)

    def backward_failed(self) -> None:
        """The backward that was begun raised."""
        self._in_backward = False

    def end_backward(self) -> None:
        """The sweep: every unit goes to rest, what was not reduced is reduced."""
        self._in_backward = False
        self._rest()
        self._reducer.sweep()

    def rest(self) -> None:
        """Outside of any pass: bring every unit to rest (after a forward that had no backward, or that failed)."""
        self._in_backward = False
        self._rest()

    def forward_failed(self) -> None:
        """The outermost forward raised; the next one opens its pass anew."""
        self._outermost = None

    def _rest(self) -> None:
        self._outermost = None
        self._backward_expected = False
        self._grad_pass = True
        self._end_pass(spare_kept=False)

    def _end_pass(self, *, spare_kept: bool) -> None:
        self._traces[self._grad_pass].end()
        if not self._stage.moves_weights:
            return
        for unit, hold in zip(self.units, self._holds, strict=True):
            if spare_kept and (unit.index == 0 or hold.kept or hold.calls):
                continue
            if unit.state is Weights.GATHERING:
                unit.await_full()
            if unit.state is Weights.FULL:
                unit.reshard(abandon=hold.lent)
            hold.clear()

    def _demand(self, index: int) -> None:
        unit = self.units[index]
        self._traces[self._grad_pass].demand(index)
        if unit.state is Weights.SHARDED:
            unit.gather(self._collectives)
        self._prefetch()
        self._await(unit)

    def _await(self, unit: Unit) -> None:
        if unit.state is Weights.SHARDED:
            unit.gather(self._collectives)
        if unit.state is Weights.GATHERING:
            unit.await_full()

    def _let_go(self, index: int) -> None:
        """Reshard unit ``index`` unless something holds it; then there is room to gather ahead."""
        unit, hold = self.units[index], self._holds[index]
        if hold.depth or hold.calls or hold.kept or hold.lent or unit.state is not Weights.FULL:
            return
        unit.reshard()
        self._prefetch()

    def _lend(self, index: int, views: Sequence[Tensor]) -> None:
        keys = {view.untyped_storage()._cdata for view in views}
        for unit, hold in zip(self.units, self._holds, strict=True):
            if unit.index in (0, index) and unit.state is Weights.FULL and unit.owns_storage(keys):
                hold.lent = True

    def _prefetch(self) -> None:
        """Start gathering the units that are predicted next, up to the budget, at least one of them.

        A prediction that returns to a unit ends there: what is needed again after the turn from forward to backward
        would otherwise be gathered as soon as it was resharded.
        """
        budget = self._prefetch_elements
        seen: set[int] = set()
        for index in self._traces[self._grad_pass].ahead():
            unit = self.units[index]
            if budget <= 0 or unit.state is Weights.FULL or index in seen:
                return
            seen.add(index)
            if unit.state is Weights.SHARDED:
                if budget < unit.elements and budget < self._prefetch_elements:
                    return
                unit.gather(self._collectives)
            budget -= unit.elements
