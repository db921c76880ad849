"""When units are unsharded, resharded and prefetched, and what ends a backward.

Must not know: nn.Module internals, how hooks are registered, how a unit is unsharded.

[Note: Holds] Hooks need not balance: checkpointing recomputes a forward that never finishes, a unit may run twice, a
forward may have no backward. So nothing is counted down that must reach zero:

- forward: a unit is held from its pre-forward to its post-forward (a depth, forgotten at the end of a pass)
- backward: a unit is held while one of its calls is between "a gradient reached its outputs" and "its backward is
  over" (a node that produced an input runs). Where no input has a node, a fully trainable unit is resharded when all
  its parameters have their gradient, others at the end of backward
- inside a backward hold, forward hooks of the unit do nothing: that is a recomputation, the weights are there
- kept: nobody would tell us when its backward comes (no tensor came out, nor are there records of what was saved), or
  an output is a view of its weights.
  Kept units stay until the window ends: another backward may need them. So do units through which a graph of the
  backward itself was recorded (create_graph)
- the unit whose forward ended last waits until another unit is needed: at the turn from forward to backward it is
  needed at once (the head, mostly), and is not unsharded again
- a weight that is read outside of its unit's forward, in a forward of something around it, has its unit unsharded and
  kept
- a backward that does not read the weights (``Hold.forward_only``) unshards nothing
- a weight that autograd asks for while its unit is not whole: as if a gradient had reached the outputs of the call that
  saved it (saved_weights: [Note: On demand]). Where that is in no line, the unit is kept
- what a run of autograd holds that accumulates nothing (``autograd.grad``) is held until the next run or forward
- the root is held from the first forward of any module to the end of backward, or without grad to the end of the
  outermost forward

[Note: Pass] With grad a pass lasts from the first forward to the end of backward; without, it is one outermost forward.
The order in which the last pass of its kind unsharded units is the prediction for the next one. A wrong prediction
switches prefetching off for the rest of the pass; it changes time, never results.

    event                  what happens
    pre_forward_root       outermost module: a pass opens, the root is unsharded
    pre_forward            the unit is unsharded, the next ones are unsharded ahead
    post_forward           the unit waits to be resharded (3k: stays), unless held
    weight_read            the unit is unsharded and kept, unless its own forward is open
    post_forward_root      outermost module, without grad: everything is resharded
    begin_backward         the micro-batch is counted, the reducer begins, the root is unsharded if it is not
    pre_backward_root      as begin_backward, for the weights only: a gradient reached the outermost module's output
    pre_backward           what came after it in forward is over; then as pre_forward
    saved_weight_read      as pre_backward, where that has not come
    post_accumulate_grad   the reducer takes the gradient; the first outside of begin_backward begins a bare one
    post_backward          the unit is closed and resharded, unless held or called elsewhere
    finalize_backward      all calls are over, everything is resharded and reduced; then maybe ``finish_gradients``
    finish_open_backward   ends a bare backward

[Note: End of a unit] A rank that waits in a gather must have launched every reduction for which another one may wait
before it joins that gather. Ranks meet calls of units in one order, the reverse of forward (calls: [Note: Order of
calls]). When backward comes to a call, those after it are over, and then, in this order:

- one through which it did not come (a detached part, a frozen one) is served: its unit is gathered, because others
  gather it, and let go, unless the next call that backward comes to is of the same unit
- when the last outstanding call of a unit is over, the unit is closed: what is left of its buckets is launched, zeros
  included, before anything else is gathered. A gradient that comes after that is a late one. Not so a unit that is
  kept: what has read its weights elsewhere brings gradients of its own
- the unit of the call is gathered, and admitted if no other call of it is outstanding: its buckets may be launched

A rank that waits for the reduction of a unit has issued all gathers up to that unit; the others reach the end of that
unit without it, and launch there. What comes out of two forwards in one backward stays open until the earlier one's
calls are over, where autograd still has gradients to accumulate. Within a unit's call nothing is gathered.

[Note: Bare backward] ``loss.backward()`` without the engine begins with its first gradient. The window's last
one ends with the run of autograd in which a gradient reached what the outermost module returned: its end is awaited
from there, because a callback that is queued inside re-entrant checkpointing fires too early. Others, and those of a
loss that was not made of the outermost module's output, last until the engine is called next, the model's next forward
with grad, or the first use of a gradient that a parameter shows: then nothing more can come. A part of the model that
runs in between (a loss in chunks) belongs to the same micro-batch, at every stage.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardengine.comm import BLOCKS, EVALUATE, Coding, Collectives, Purpose, gathering
from shardengine.ddp import Forward, Phase, Reducer, StepState
from shardengine.errors import MismatchError, UsageError
from shardengine.runtime.calls import Call, Calls, Line
from shardengine.runtime.prefetch_order import AgreedOrder, PrefetchOrders
from shardengine.runtime.recorded_window import Event, MicroBatch, RecordedWindow, What, in_order
from shardengine.runtime.transforms import unwrapped
from shardengine.runtime.unit import Unit, UnshardState
from shardengine.runtime.written_weights import WrittenWeights
from shardengine.stages import Stage
from shardengine.trace import COMPUTE, Moment

_FETCHED_AHEAD = 4
"""Units whose shards are brought from their tier before they are unsharded, as far as it has room."""


class Backward(enum.Enum):
    """Whether a backward is open, and who began it."""

    NONE = "none"
    ENGINE = "engine.backward"
    BARE = "loss.backward"
    RETIRED = "another schedule has taken over"


class Hold:
    """Why a unit may not be resharded now ([Note: Holds]).

    depth: forwards of it that are open · calls: those whose backward has begun and is not over · silent: those of them
    whose end nobody will announce · over: whose backward is over, with the run of autograd in which it was · fired: its
    parameters that got their gradient since it is held in backward · kept: until the window ends · lent: a view of its
    weights was handed out · since: when the open forward or backward began, for the trace · forward_only: its backward
    does not read its weights, always (an embedding's).
    """

    def __init__(self) -> None:
        self.depth = 0
        self.calls: set[Call] = set()
        self.silent: set[Call] = set()
        self.over: set[tuple[Call, int]] = set()
        self.fired: set[int] = set()
        self.kept = False
        self.lent = False
        self.since: Moment | None = None
        self.forward_only = False

    def finish(self, calls: set[Call]) -> None:
        """The backwards of ``calls`` are over; a late announcement in the same run of autograd means nothing."""
        self.over |= {(call, call.task) for call in calls}
        self.calls -= calls

    def clear(self) -> None:
        """The pass is over."""
        self.depth = 0
        self.calls.clear()
        self.silent.clear()
        self.over.clear()
        self.fired.clear()
        self.kept = self.lent = False


class Turn:
    """The unit whose forward ended last, which waits for what comes: another unit's turn, or its own backward.

    waiting: it, while it waits · last: the one with which the last pass turned from forward to backward.
    """

    def __init__(self) -> None:
        self.waiting: int | None = None
        self.last: int | None = None

    def take(self) -> int | None:
        """What has waited, and does so no longer."""
        waiting, self.waiting = self.waiting, None
        return waiting


class Schedule:
    """Answers the events of a pass. ``units[0]`` is the root. prefetch: elements unsharded ahead at most, 0: none ·
    coding: makes what travels of weights."""

    def __init__(
        self,
        units: list[Unit],
        stage: Stage,
        collectives: Collectives,
        reducer: Reducer,
        prefetch: int,
        coding: Coding | None = None,
    ) -> None:
        self.units = units
        self.coding = coding
        self._stage = stage
        self._collectives = collectives
        self._reducer = reducer
        self._prefetch_elements = prefetch
        self._holds = [Hold() for _ in units]
        self._unit_of = {index: unit for unit in units for index in unit.trainable}
        self._keeps_inside = stage.keeps_inside_after_forward
        if stage.moves_weights:
            reducer.divide({index: unit.index for index, unit in self._unit_of.items()})
        self._orders = PrefetchOrders()
        self._agreed = {True: AgreedOrder(), False: AgreedOrder()}
        self._fetches = any(
            flat_buffer.homes.weights is not None for unit in units for flat_buffer in unit.flat_buffers
        )
        self._calls = Calls()
        self.recorded = RecordedWindow()
        self._grad_pass = True
        self._outermost: list[object] = []  # as often as it has called itself
        self._backward_expected = False
        self._backward = Backward.NONE
        self._is_scaled = False
        self._step_state = reducer.step_state
        self._window = reducer.step_state.window
        self._awaited_task = -1
        self._task = -1
        self._complete: Callable[[Collection[int]], None] = lambda touched: None
        self._written: WrittenWeights | None = None
        self.turn = Turn()

    def tell(self, written: WrittenWeights) -> None:
        """``written`` hears when backwards begin and end, from now on."""
        self._written = written

    @property
    def step_state(self) -> StepState:
        """The window's."""
        return self._step_state

    @property
    def last_requested(self) -> Unit:
        """The unit that was needed last."""
        return self.units[self._orders.last]

    @property
    def unsharded_once(self) -> set[int]:
        """The units that the last pass unsharded once: the root, that of the turn, those whose backward reads none."""
        spared = {index for index, hold in enumerate(self._holds) if hold.forward_only}
        return spared | {0} | ({self.turn.last} if self.turn.last is not None else set())

    @property
    def in_backward(self) -> bool:
        """Whether autograd runs now, so that a forward is a recomputation."""
        return self._backward is Backward.ENGINE or torch._C._current_graph_task_id() >= 0

    def trains(self, index: int) -> bool:
        """Whether unit ``index`` has trainable parameters."""
        return bool(self.units[index].trainable)

    def observes(self, index: int) -> bool:
        """Whether forwards of unit ``index`` matter now: not in a recomputation."""
        return not (self._holds[index].calls and self.in_backward)

    def depth_of(self, index: int) -> int:
        """How many forwards of unit ``index`` are open."""
        return self._holds[index].depth

    @property
    def line(self) -> Line | None:
        """What the running forward of the outermost module has called so far, or the last one."""
        return self._calls.lines[-1] if self._calls.lines else None

    # Events of forward. ``grad``: whether autograd records.

    def pre_forward_root(self, module: object, grad: bool, *, part: bool = False) -> None:
        """``module`` begins its forward; the outermost one opens a pass and unshards the root.

        part: it is not the whole model, whose forward alone ends the micro-batch of a bare backward.
        """
        if self.in_backward:
            return
        if self._outermost:
            if self._outermost[0] is module:
                self._outermost.append(module)  # it calls itself
            return
        if grad and part:
            self._go_on()
        elif grad:
            self.finish_open_backward()
        elif self._stage.moves_weights:
            self._step_state.require("a call of every rank", "a forward without grad")
        self._outermost.append(module)
        self._grad_pass = grad
        self._backward_expected |= grad
        self._calls.inside.clear()
        if grad:
            self._begin_run()
            self._calls.enter(module)
        for hold in self._holds:
            hold.depth = 0
        if not self.units[0].summoned:
            self._need(0)

    def _begin_run(self) -> None:
        """Unless this run of autograd goes on: those before it are over. What they held is held no longer, where they
        accumulated nothing (``autograd.grad``); such a run ends at what was asked for, and left nothing to be served.
        """
        task = torch._C._current_graph_task_id()
        if self._backward is not Backward.NONE or 0 <= task == self._task:
            return
        self._task = task
        self._calls.leave()
        for unit, hold in zip(self.units, self._holds, strict=True):
            if hold.calls:
                hold.finish(set(hold.calls))
                hold.silent.clear()
                self._reshard_unless_held(unit.index)

    def post_forward_root(self, module: object, views: Sequence[Tensor]) -> bool:
        """``module`` ended its forward; ``views``: tensors that it returned, which may be views of weights.

        Returns whether it was the outermost one.
        """
        if not self._outermost or module is not self._outermost[0] or self.in_backward:
            return False
        self._outermost.pop()
        if self._outermost:
            return False
        self._lend(0, views)
        if self._grad_pass:
            return True
        expected = self._backward_expected
        if not expected:  # a forward with grad would go on with casts that are older than its calls
            torch.clear_autocast_cache()
        self._end_pass(lambda unit, hold: expected and (unit.index == 0 or hold.kept or bool(hold.calls)))
        self._grad_pass = True
        return True

    def pre_forward(self, index: int, *, grad: bool, differentiable: bool) -> Call | None:
        """Unit ``index`` begins a forward: it must be unsharded. Returns the call, None where this one is not observed.

        differentiable: whether one of its inputs needs a gradient.
        """
        if not self.observes(index):
            return None
        call = self._begin_call(index, grad=grad, differentiable=differentiable)
        hold = self._holds[index]
        hold.depth += 1
        if not self.units[index].summoned:
            self._request(index)
        hold.since = self._collectives.trace.mark()
        return call

    def _begin_call(self, index: int, *, grad: bool, differentiable: bool) -> Call:
        if self.in_backward:
            found = self._calls.computed_again(index) if grad else None
            if found is None:
                return Call(index)
            self._leave_behind(self._calls.approach(found))
            found.note_computed()
            return found
        nested = bool(self._calls.inside)
        self._calls.inside.add(index)
        trains = self.trains(index)
        if nested or not self._grad_pass or not (trains or differentiable or self._calls.may_differentiate):
            return Call(index)
        return self._calls.begin(index, grad=grad, differentiable=differentiable, trains=trains)

    def post_forward(self, index: int, grad: bool, keep: bool, views: Sequence[Tensor]) -> None:
        """Unit ``index`` ended a forward.

        keep: its backward will not announce itself · views: as in ``post_forward_root``.
        """
        hold = self._holds[index]
        self._trace("forward", index, hold)
        hold.depth = max(0, hold.depth - 1)
        if not hold.depth:
            self._calls.inside.discard(index)
        hold.kept |= keep
        self._lend(index, views)
        recomputed = grad and self.in_backward and not hold.forward_only  # its backward comes next
        if hold.depth or recomputed or (self._grad_pass and not self._stage.reshards_after_forward):
            return  # also where this call had no grad: on another rank it may have had
        if self._grad_pass and not self.in_backward:
            self._end_wait(but=index)
            self.turn.waiting = index
        else:
            self._reshard_unless_held(index)

    def weight_read(self, index: int) -> bool:
        """A weight of unit ``index`` is read; whether that is outside of the unit's forward, and inside of another one.

        Its backward will not announce itself, so the unit is kept.
        """
        unit, hold = self.units[index], self._holds[index]
        if self.in_backward:
            if not unit.summoned:
                self.saved_weight_read(index)  # by a recomputation of a part of it
            return False
        if hold.depth or not self._outermost or unit.summoned:
            return False
        if not hold.kept or unit.state is not UnshardState.UNSHARDED:
            hold.kept = True
            self._request(index)
        return True

    def read_in_forward_only(self, index: int) -> None:
        """Once, at start: the backward of unit ``index`` does not read its weights."""
        self._holds[index].forward_only = True

    # Events of backward

    def begin_backward(self, *, bare: bool = False, current: int | None = None) -> None:
        """A backward starts: it is counted, the reducer knows what it is for, the root is unsharded.

        current: the parameter whose gradient has come first.
        """
        window = self._window
        if self._written is not None:
            self._written.begin_backward(masters=self._reducer.early_use.enabled)
        self._step_state.require("another backward")
        self._begin_run()
        window.begin_backward()
        final = window.is_boundary and window.synchronises
        synchronise = window.synchronises and (final or self._reducer.rules.sharded)
        try:
            self._reducer.views.adopt(but=current)
            self._reducer.begin_backward(synchronise=synchronise, final=final)
        except UsageError:
            window.backward_failed()
            raise
        self._backward = Backward.BARE if bare else Backward.ENGINE
        self.recorded.begin_backward(synchronises=window.synchronises)
        self.pre_backward_root()

    def pre_backward_root(self, forward: Forward | None = None, line: Line | None = None) -> None:
        """A gradient reached what the outermost module returned in ``forward``: the root must be unsharded.

        line: what that forward called.

        Where nobody has announced this backward, and it is the window's last, it hears of its end.
        """
        self._require_weights()
        self._begin_run()
        if forward is not None and self._backward is not Backward.NONE:
            self._window.claim(forward)
        if line is not None:
            self._leave_behind(self._calls.turn_to(line))
        if self._backward is Backward.NONE and self._written is not None:
            self._written.before_backward(masters=self._reducer.early_use.enabled)
        if self._backward is not Backward.ENGINE and self._window.is_boundary and self._window.synchronises:
            self._await_end()
        if self._stage.moves_weights:
            self._wait_for_unshard(self.units[0])

    def _await_end(self) -> None:
        """Be told when the running backward is over ([Note: Bare backward])."""
        task = torch._C._current_graph_task_id()
        if task < 0 or task == self._awaited_task:
            return
        self._awaited_task = task

        def over() -> None:
            if self._backward is Backward.BARE and self._window.ends:
                self.finalize_backward()

        torch.autograd.Variable._execution_engine.queue_callback(over)

    def pre_backward(self, index: int, call: Call, *, announced: bool) -> None:
        """A gradient reached the outputs of ``call`` of unit ``index``; announced: ``post_backward`` will come."""
        self._require_weights()
        self._begin_run()
        hold = self._holds[index]
        if self.turn.waiting is not None and not hold.forward_only:
            self.turn.last = index if self.turn.waiting == index else None
        if call in hold.calls or (call, torch._C._current_graph_task_id()) in hold.over or self._calls.is_late(call):
            return
        if self._backward is Backward.NONE and self._collects(index):
            self._begin_bare()
        self._leave_behind(self._calls.approach(call))
        call.note_reached()
        if not hold.forward_only:
            self._hold_for_backward(index, call, announced=announced)
        if call.line is None or (self._calls.is_last(call) and not self._calls.waits_for_others(call)):
            self.recorded.note(What.ADMIT, index)
            self._reducer.admit(index)

    def saved_weight_read(self, index: int) -> None:
        """Autograd, where it runs, reads a weight of unit ``index`` that a forward saved (saved_weights: [Note: On
        demand]). Where nobody has announced that, a gradient reaches the unit's call now."""
        unit = self.units[index]
        if unit.is_whole or torch._C._current_graph_task_id() < 0:
            return
        node: Any = torch._C._current_autograd_node()
        call = None if node is None else self._calls.that_ran(index, node._sequence_nr())
        if call is not None:
            self.pre_backward(index, call, announced=call.announced)
        if not unit.is_whole:
            self._require_weights()
            self._holds[index].kept = True
            self._request(index)

    def _hold_for_backward(self, index: int, call: Call, *, announced: bool) -> None:
        hold = self._holds[index]
        hold.kept |= torch.is_grad_enabled()  # create_graph: backward through this backward announces nothing
        if not announced:
            hold.silent.add(call)
        if not hold.calls:
            hold.fired.clear()
        hold.calls.add(call)
        self._request(index)
        hold.since = self._collectives.trace.mark()

    def _collects(self, index: int) -> bool:
        """Whether the running backward accumulates a gradient of a parameter of unit ``index``."""
        unit = self.units[index]
        return any(_is_due(m.parameter) for m in unit.members if m.index in unit.trainable)

    def post_backward(self, index: int, call: Call) -> None:
        """A gradient of an input of ``call`` is known: its weights are not needed any more."""
        hold = self._holds[index]
        if call in hold.calls:
            self._trace("backward", index, hold)
            self._end_call(call)

    def _end_call(self, call: Call) -> None:
        """The backward of ``call`` is over: of its unit's gradients nothing more comes, unless by other calls."""
        hold = self._holds[call.unit]
        hold.finish({call})
        if call.line is not None:
            hold.depth = 0  # of recomputations that were broken off
            self._calls.over(call)
            if self._calls.is_last(call) and not hold.kept and not self._may_grow(call):
                self.recorded.note(What.CLOSE, call.unit)
                self._reducer.close(call.unit)
        if not self._calls.is_followed(call):
            self._reshard_unless_held(call.unit)

    def _may_grow(self, call: Call) -> bool:
        """Whether an earlier forward's backward, which is to come in this run, brings more gradients of the unit."""
        if not self._calls.waits_for_others(call):
            return False
        unit, fired = self.units[call.unit], self._holds[call.unit].fired
        due = (m.parameter for m in unit.members if m.index in unit.trainable and m.index not in fired)
        return call.replayed or any(_is_due(parameter) for parameter in due)

    def _leave_behind(self, groups: Iterable[Sequence[Call]]) -> None:
        """Calls that backward has left behind, also those through which it did not come on this rank: others may have
        gathered their units, and wait for this rank's part of them."""
        for group in groups:
            for call in reversed(group):
                if not call.reached and not self._holds[call.unit].forward_only:
                    self._request(call.unit)
                if not call.over:
                    self._end_call(call)

    def post_accumulate_grad(self, parameter: int, gradient: Tensor) -> None:
        """Autograd has accumulated ``gradient`` of a parameter."""
        self._take(parameter, gradient)
        self._reducer.views.expect_more(parameter)

    def begin_scaled(self) -> None:
        """The loss of the running backward was scaled, which also holds for backwards inside of it (recomputation)."""

        def over() -> None:
            self._is_scaled = False

        self._is_scaled = True
        torch.autograd.Variable._execution_engine.queue_callback(over)

    def _require_scale(self) -> None:
        """The running backward is one without the engine."""
        if self._reducer.rules.scaled and not self._is_scaled:
            raise UsageError(
                "Loss scaling is required: expected engine.backward(loss) or engine.scale(loss).backward() for each "
                "loss, got a loss.backward() that leaves the loss scale out. To pass on a gradient of a scaled loss: "
                "engine.backward(output, gradient.float() / engine.get_loss_scale())"
            )

    def _begin_bare(self, current: int | None = None) -> None:
        self._require_scale()
        self.begin_backward(bare=True, current=current)
        if self._window.ends and torch._C._current_graph_task_id() != self._awaited_task:
            self._reducer.views.expect(self.finish_open_backward)

    def _take(self, parameter: int, gradient: Tensor) -> None:
        if self._backward is Backward.NONE:
            self._begin_bare(parameter)
        elif self._backward is Backward.BARE:
            self._require_scale()
        unit = self._unit_of[parameter]
        if unit.index == 0 or not self._stage.moves_weights:
            self._reducer.on_gradient(parameter, gradient)
            return
        whole = unit.state is UnshardState.UNSHARDED or unit.is_summoned(parameter)
        if unit.was_summoned and not whole and not self._holds[unit.index].forward_only:
            raise UsageError(
                f"parameter {unit.name_of(parameter)!r} of unit {unit.name!r} received a gradient while its weights "
                "were sharded, so the gradient was computed from NaN: expected its use inside a forward of the model, "
                "or the backward of a loss on parameters inside the same `with engine.full_params():` as the loss"
            )
        self._reducer.on_gradient(parameter, gradient)
        hold = self._holds[unit.index]
        hold.fired.add(parameter)
        complete = not unit.has_frozen and len(hold.fired) == len(unit.trainable)
        if hold.calls and hold.calls <= hold.silent and complete:
            for call in list(hold.calls):
                self._end_call(call)

    def backward_failed(self) -> None:
        """The backward that was begun raised."""
        self._backward, self._is_scaled = Backward.NONE, False
        self._calls.forget()
        if self._written is not None:
            self._written.end_backward(failed=True)
        self._step_state.backward_failed()

    def finalize_backward(self) -> None:
        """Every unit is resharded, what was not reduced is reduced."""
        self._backward = Backward.NONE
        if self._stage.moves_weights:
            self._leave_behind(self._calls.finish())
        self._rest(spare_kept=True)
        self.recorded.end_micro_batch(final=self._window.ends)
        self._end_writes()
        self._finish_gradients()

    def _end_writes(self) -> None:
        """UsageError where a weight has changed in this backward."""
        try:
            if self._written is not None:
                self._written.end_backward()
        except UsageError:
            self.backward_failed()
            raise

    def _finish_gradients(self) -> None:
        """No more gradients come in this backward."""
        self._reducer.finalize_backward()
        if self._step_state.phase is Phase.REDUCED:
            self.complete_gradients()

    def complete_gradients(self) -> None:
        """The window's gradients are complete on this rank: agree on them, then call what waits for them."""
        self._reducer.finish_gradients()
        for agreed in self._agreed.values():
            agreed.begin_window()
        self._complete(self._reducer.touched)

    def call_when_complete(self, call: Callable[[Collection[int]], None]) -> None:
        """``call`` is told of the parameters whose gradients ranks have agreed on."""
        self._complete = call

    def finish_open_backward(self) -> None:
        """End a bare backward ([Note: Bare backward])."""
        self._is_scaled = False  # a run that raises tells nobody of its end
        if self._backward is Backward.BARE:
            self.finalize_backward()

    def _go_on(self) -> None:
        """A bare backward goes on with that of what runs now: what its last run of autograd has left open is over."""
        if self._backward is Backward.BARE:
            torch.clear_autocast_cache()  # as in ``_rest``
            for call in [call for hold in self._holds for call in hold.calls]:
                self._end_call(call)
            self._calls.pause()

    def reshard_all(self) -> None:
        """Outside of any pass: reshard every unit (after a forward that had no backward, or that failed)."""
        self._backward = Backward.NONE
        self._calls.forget()
        self._rest(spare_kept=False)

    def recover(self) -> None:
        """After a failure: nothing is in flight or predicted (ranks may have recorded other orders)."""
        self._backward = Backward.NONE
        for unit in self.units:
            unit.recover()
        self._orders = PrefetchOrders()
        self._agreed = {True: AgreedOrder(), False: AgreedOrder()}
        self._calls.forget()
        self.recorded.drop()

    def begin_serving(self) -> None:
        """This rank has run out of data, maybe in the middle of a micro-batch, whose units stay where they are."""
        self._backward = Backward.NONE
        self._calls.forget()
        self._outermost.clear()

    @property
    def guesses(self) -> bool:
        """Whether ``next_micro_batch`` cannot know in which order units are gathered."""
        return self._stage.moves_weights and self.recorded.is_empty

    def next_micro_batch(self) -> MicroBatch:
        """What other ranks do in the micro-batch for which this one has no data (recorded_window: [Note: Serving])."""
        return self.recorded.micro_batch(self._window.micro_batches, MicroBatch(self._expected()))

    def serve(self, events: Sequence[Event]) -> None:
        """Take part with zeros in a micro-batch of other ranks, as ``events`` say; the backward is over then."""
        self._grad_pass = True
        try:
            with self.recorded.paused():
                for what, index in events:
                    self._serve(what, index)
                self.turn.take()
                self._orders.of[True].end()
                for unit in self.units if self._keeps_inside else ():
                    unit.forget_kept()
            self._backward = Backward.NONE
            self._end_writes()
            self._finish_gradients()
        except BaseException:
            self.backward_failed()
            raise

    def _expected(self) -> list[Event]:
        if not self._stage.moves_weights:
            return [(What.BACKWARD, 0)]
        units = range(1, len(self.units))
        first = next((index for index in units if self.trains(index)), len(self.units))
        spared = [index for index in units if self._holds[index].forward_only]
        after = What.KEEP if self._keeps_inside else What.RESHARD if self._stage.reshards_after_forward else None
        return in_order(units, range(len(units), first - 1, -1), spared, after)

    def _serve(self, what: What, index: int) -> None:
        unit = self.units[index]
        if what is What.BACKWARD:
            self.begin_backward()
        elif what in (What.REQUEST, What.AGAIN):
            self._orders.request(True, index, turned=what is What.AGAIN)
        elif what is What.NEED:
            self._need(index)
        elif what is What.AHEAD:
            self._prefetch()
        elif what in (What.RESHARD, What.KEEP) and unit.state is not UnshardState.SHARDED:
            self._wait_for_unshard(unit)
            unit.reshard(keep_inside=what is What.KEEP)
        elif what is What.ADMIT:
            self._reducer.admit(index)
        elif what is What.CLOSE:
            self._reducer.close(index)

    def detach(self) -> None:
        """At rest: another schedule takes over. Graphs of old forwards still reach this one, and are refused."""
        self._backward = Backward.RETIRED

    def _require_weights(self) -> None:
        """The weights that this backward needs are where its forward has left them."""
        self._step_state.require("any")
        if self._backward is Backward.RETIRED:
            raise UsageError(
                "the forward of this loss ran before parameters were unfrozen or a parameter group was added, which "
                "moved the weights: run it again, after engine.zero_grad()"
            )

    def restart(self) -> None:
        """The next forward is an outermost one: the engine is called, or the last forward raised."""
        self._outermost.clear()
        self._grad_pass = True

    def _rest(self, *, spare_kept: bool) -> None:
        # Autocast keeps casts of weights until its outermost region ends: one region around several steps would go on
        # with the casts of the first, whose nodes belong to a backward that is over.
        torch.clear_autocast_cache()
        self._outermost.clear()
        self._backward_expected = False
        self._grad_pass = True
        self._end_pass(lambda unit, hold: spare_kept and hold.kept)

    def _end_pass(self, spare: Callable[[Unit, Hold], bool]) -> None:
        self._orders.of[self._grad_pass].end()
        self._orders.of[not self._grad_pass].stop()
        self.turn.take()
        if not self._stage.moves_weights:
            return
        for unit, hold in zip(self.units, self._holds, strict=True):
            if spare(unit, hold):
                continue
            if unit.state is not UnshardState.SHARDED:
                self._note(What.RESHARD, unit.index)
                self._wait_for_unshard(unit)
                unit.reshard(abandon=hold.lent)
            if self._grad_pass:
                unit.forget_kept()
                unit.forget_summoned()
            hold.clear()

    def _request(self, index: int) -> None:
        turned = not self._outermost
        self._note(What.AGAIN if turned else What.REQUEST, index)
        self._orders.request(self._grad_pass, index, turned=turned)
        self._end_wait(but=index)
        self._need(index)

    def _need(self, index: int) -> None:
        self._note(What.NEED, index)
        unit = self.units[index]
        if unit.state is UnshardState.SHARDED:
            self._unshard(unit)
        self._prefetch()
        self._wait_for_unshard(unit)

    def _unshard(self, unit: Unit) -> None:
        agreed = self._agreed[self._grad_pass]
        if not agreed.gathers_as_expected(unit.index):
            self._ask(unit, agreed)
            agreed.note(unit.index)
        unit.unshard(self._collectives, Purpose.WEIGHTS if self._grad_pass else Purpose.EVALUATION, self.coding)

    def _ask(self, unit: Unit, agreed: AgreedOrder) -> None:
        """Whether every rank gathers ``unit`` now (prefetch_order: [Note: Agreed gathers]); ``MismatchError`` on all of
        them where not."""
        mesh = self._collectives.mesh
        if mesh.ranks == 1:
            return
        said = torch.tensor([unit.index, self._grad_pass, agreed.digest], dtype=torch.int64).view(torch.uint8)
        what = gathering(unit.name, grad=self._grad_pass)
        heard = self._collectives.exchange(said, what, self._reducer.finish_what_is_there)
        rows = heard.contiguous().view(torch.int64).tolist()
        other = next((rank for rank, row in enumerate(rows) if row != rows[0]), 0)
        if not other:
            return
        if rows[0][1] != rows[other][1]:
            trains, evaluates = (0, other) if rows[0][1] else (other, 0)
            raise MismatchError(
                f"rank {evaluates} is in a forward without grad where rank {trains} trains (this is rank {mesh.rank}). "
                f"{EVALUATE}"
            )
        if rows[0][0] == rows[other][0]:
            raise MismatchError(
                f"ranks 0 and {other} have gathered the weights of different units before that of "
                f"{self.units[rows[0][0]].name!r} (this is rank {mesh.rank}). {BLOCKS}"
            )
        ours, theirs = (self.units[row[0]].name for row in (rows[0], rows[other]))
        raise MismatchError(
            f"ranks run different modules: rank 0 needs the weights of unit {ours!r} where rank {other} needs those of "
            f"{theirs!r} (this is rank {mesh.rank}). {BLOCKS}"
        )

    def _wait_for_unshard(self, unit: Unit) -> None:
        if unit.state is UnshardState.SHARDED:
            self._unshard(unit)
        if unit.state is UnshardState.UNSHARDING:
            unit.wait_for_unshard()

    def _note(self, what: What, index: int = 0) -> None:
        """Without grad a rank may run what others do not."""
        if self._grad_pass:
            self.recorded.note(what, index)

    def _end_wait(self, *, but: int) -> None:
        """What waits since its forward is resharded, as another unit than ``but`` is needed."""
        waiting = self.turn.take()
        if waiting is not None and waiting != but:
            self._reshard(waiting)

    def _reshard_unless_held(self, index: int) -> None:
        """Reshard unit ``index`` unless something holds it; then there is room to unshard ahead."""
        if self._reshard(index):
            self._note(What.AHEAD)
            self._prefetch()

    def _reshard(self, index: int) -> bool:
        unit, hold = self.units[index], self._holds[index]
        if hold.depth or hold.calls or hold.kept or hold.lent or unit.state is not UnshardState.UNSHARDED:
            return False
        keeps = self._keeps_inside and not self.in_backward and not hold.forward_only
        keeps = keeps and (self._grad_pass or unit.keeps_inside)
        self._note(What.KEEP if keeps else What.RESHARD, index)
        unit.reshard(keep_inside=keeps)
        return True

    def _trace(self, what: str, index: int, hold: Hold) -> None:
        trace = self._collectives.trace
        if trace.recording and hold.since is not None:
            trace.add(COMPUTE, f"{what} {self.units[index].name}", hold.since, trace.moment())

    def _lend(self, index: int, views: Sequence[Tensor]) -> None:
        keys = {view.untyped_storage()._cdata for view in map(unwrapped, views) if view.layout is torch.strided}
        for number in {0, index}:
            if self.units[number].state is UnshardState.UNSHARDED and self.units[number].owns_storage(keys):
                self._holds[number].lent = True

    def _prefetch(self) -> None:
        """Unshard ahead, and bring the shards of the units after those from where they rest."""
        self._unshard_ahead()
        if not self._fetches:
            return
        for index in self._orders.of[self._grad_pass].ahead(_FETCHED_AHEAD):
            if self.units[index].state is UnshardState.SHARDED:
                self.units[index].prefetch()

    def _unshard_ahead(self) -> None:
        """Start unsharding the units that are predicted next, up to the budget, at least one of them.

        A prediction that returns to a unit ends there: what is needed again after the turn from forward to backward
        would otherwise be gathered as soon as it was resharded.
        """
        prediction = self._orders.of[self._grad_pass]
        while (index := prediction.upcoming()) is not None:
            unit, budget = self.units[index], self._prefetch_elements - prediction.elements_ahead
            if budget <= 0 or unit.state is UnshardState.UNSHARDED:
                return
            if unit.state is UnshardState.SHARDED:
                if budget < unit.elements and prediction.elements_ahead:
                    return
                self._unshard(unit)
            prediction.start(index, unit.elements)


def _is_due(parameter: nn.Parameter) -> bool:
    """Whether the running backward accumulates into ``parameter``, or has done so."""
    if not parameter.requires_grad or torch._C._current_graph_task_id() < 0:
        return False
    try:
        node = torch.autograd.graph.get_gradient_edge(parameter).node
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # of a parameter for which autograd.grad was asked
        return False
