"""When units are unsharded, resharded and prefetched, and when a backward ends.

Must not know: nn.Module internals, how hooks are registered, how a unit is unsharded.

[Note: Holds] Hooks need not balance: checkpointing recomputes a forward that never finishes, a unit may run twice, a
forward may have no backward. So no count has to reach zero:

- forward: a unit is held from its pre-forward to its post-forward (a depth, forgotten at the end of a pass)
- backward: a unit is held while one of its calls is between "a gradient reached its outputs" and "its backward is over"
  (a node that produced an input runs). If no input has a node, a fully trainable unit is resharded when all its
  parameters have their gradient, others at the end of backward
- inside a backward hold, forward hooks of the unit do nothing: the forward is a recomputation, and the weights are
  there
- kept: its backward will not be announced (no tensor came out, and there are no records of saved tensors), or an output
  is a view of its weights. Kept units stay until the window ends: another backward may need them. A unit is also kept
  if a graph of the backward itself was recorded through it (create_graph)
- the unit whose forward ended last waits until another unit is needed: at the turn from forward to backward it is
  needed at once (the head, mostly), and is not unsharded again
- a weight that is read outside of its unit's forward, in a forward of a module around it: its unit is unsharded and
  kept
- a backward that does not read the weights (``Hold.forward_only``) unshards nothing
- a weight that autograd requests while its unit is not whole: the schedule acts as if a gradient had reached the
  outputs of the call that saved it (saved_weights: [Note: On demand]). If that call is in no line, the unit is kept
- units held by a run of autograd that accumulates nothing (``autograd.grad``) are held until the next run or forward
- the root is held from the first forward of any module to the end of backward, or without grad to the end of the
  outermost forward

[Note: Pass] With grad a pass lasts from the first forward to the end of backward; without, it is one outermost forward.
The order of unshards in the last pass of its kind is the prediction for the next one. A wrong prediction switches
prefetching off for the rest of the pass; it changes time, never results.

    event                  what happens
    pre_forward_root       outermost module: a pass opens, the root is unsharded
    pre_forward            the unit is unsharded, the next ones are unsharded ahead
    post_forward           the unit waits to be resharded (3k: stays), unless held
    weight_read            the unit is unsharded and kept, unless its own forward is open
    post_forward_root      outermost module, without grad: everything is resharded
    begin_backward         the micro-batch is counted, the reducer begins, the root is unsharded if it is not
    pre_backward_root      as begin_backward, for the weights only: a gradient reached the outermost module's output
    pre_backward           later calls are over; then as pre_forward
    saved_weight_read      as pre_backward, if that has not come
    post_accumulate_grad   the reducer takes the gradient; the first outside of begin_backward begins a bare one
    post_backward          the unit is closed and resharded, unless held or called elsewhere
    finalize_backward      all calls are over, everything is resharded and reduced; then maybe ``finish_gradients``
    finish_open_backward   ends a bare backward

[Note: End of a unit] Before a rank waits in a gather, it must have launched every reduction that another rank may wait
for before that rank joins the gather. Ranks meet calls of units in one order, the reverse of forward (calls: [Note:
Order of calls]). When backward comes to a call, all later calls are over. Then, in this order:

- A call that backward skipped (a detached part, a frozen one) is served: its unit is gathered, because other ranks
  gather it, and resharded, unless the next call that backward comes to is of the same unit.
- When the last outstanding call of a unit is over, the unit is closed: the rest of its buckets is launched, zeros
  included, before anything else is gathered. A gradient that comes after that is a late one. A kept unit is not closed:
  code that has read its weights elsewhere brings further gradients.
- The unit of the call is gathered, and admitted if no other call of it is outstanding: its buckets may be launched.

A rank that waits for the reduction of a unit has issued all gathers up to that unit. The others reach the end of that
unit without it, and launch there. If two forwards share one backward, their units stay open until the earlier one's
calls are over, as long as autograd still has gradients to accumulate. Within a unit's call nothing is gathered.

[Note: Bare backward] ``loss.backward()`` without the engine begins with its first gradient. The window's last bare
backward ends with the run of autograd that brought a gradient to the output of the outermost module. Its end is awaited
from there, because a callback that is queued inside re-entrant checkpointing fires too early. Other bare backwards, and
those of a loss that was not made of the outermost module's output, last until the next call of the engine, the model's
next forward with grad, or the first use of a gradient that a parameter shows: after that no more gradients can come. A
part of the model that runs in between (a loss in chunks) belongs to the same micro-batch, at every stage.
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
from shardengine.runtime.calls import CallLine, Calls, UnitCall
from shardengine.runtime.prefetch_order import AgreedOrder, PrefetchOrders
from shardengine.runtime.recorded_window import Event, MicroBatch, RecordedWindow, What, in_order
from shardengine.runtime.transforms import unwrapped
from shardengine.runtime.unit import Unit, UnshardState
from shardengine.runtime.written_weights import WrittenWeights
from shardengine.stages import Stage
from shardengine.trace import COMPUTE, Moment

_FETCHED_AHEAD = 4
"""Units whose offloaded shards are loaded before they are unsharded, as far as there is room."""


class Backward(enum.Enum):
    """Whether a backward is open, and who began it."""

    NONE = "none"
    ENGINE = "engine.backward"
    BARE = "loss.backward"
    RETIRED = "another schedule has taken over"


class Hold:
    """The reasons that a unit may not be resharded now ([Note: Holds]).

    depth: its open forwards · calls: those whose backward has begun and is not over · silent: those of them whose end
    will not be announced · over: calls whose backward is over, each with its run of autograd · fired: its parameters
    that got their gradient since it is held in backward · kept: until the window ends · lent: a view of its weights was
    returned to the user · since: when the open forward or backward began, for the trace · forward_only: its backward
    never reads its weights (an embedding's).
    """

    def __init__(self) -> None:
        self.depth = 0
        self.calls: set[UnitCall] = set()
        self.silent: set[UnitCall] = set()
        self.over: set[tuple[UnitCall, int]] = set()
        self.fired: set[int] = set()
        self.kept = False
        self.lent = False
        self.since: Moment | None = None
        self.forward_only = False

    def finish(self, calls: set[UnitCall]) -> None:
        """End the backwards of ``calls``; late announcements in the same run of autograd are then ignored."""
        self.over |= {(call, call.task) for call in calls}
        self.calls -= calls

    def clear(self) -> None:
        """End the pass."""
        self.depth = 0
        self.calls.clear()
        self.silent.clear()
        self.over.clear()
        self.fired.clear()
        self.kept = self.lent = False


class Turn:
    """The unit whose forward ended last; it waits for another unit's forward or for its own backward.

    waiting: that unit, while it waits · last: the unit at the last pass's turn from forward to backward.
    """

    def __init__(self) -> None:
        self.waiting: int | None = None
        self.last: int | None = None

    def take(self) -> int | None:
        """Return the waiting unit, if any; it waits no longer."""
        waiting, self.waiting = self.waiting, None
        return waiting


class Schedule:
    """Answers the events of a pass. ``units[0]`` is the root.

    prefetch: elements unsharded ahead at most, 0: none · coding: encodes weights for transfers.
    """

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
        self._outermost: list[object] = []  # once for each of its nested calls
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
        """Notify ``written`` when backwards begin and end, from now on."""
        self._written = written

    @property
    def step_state(self) -> StepState:
        """The state of the window's step."""
        return self._step_state

    @property
    def last_requested(self) -> Unit:
        """The unit that was needed last."""
        return self.units[self._orders.last]

    @property
    def unsharded_once(self) -> set[int]:
        """Units that the last pass unsharded once: the root, the turn's, and those whose backward reads no weights."""
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
        """Whether forwards of unit ``index`` count now: not in a recomputation."""
        return not (self._holds[index].calls and self.in_backward)

    def depth_of(self, index: int) -> int:
        """Return how many forwards of unit ``index`` are open."""
        return self._holds[index].depth

    @property
    def line(self) -> CallLine | None:
        """The calls of the outermost module's running forward, or of its last one."""
        return self._calls.lines[-1] if self._calls.lines else None

    # Events of forward. ``grad``: whether autograd records.

    def pre_forward_root(self, module: object, grad: bool, *, part: bool = False) -> None:
        """Begin the forward of ``module``; the outermost one opens a pass and unshards the root.

        part: it is not the whole model; only a forward of the whole model ends the micro-batch of a bare backward.
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
        """Begin a run of autograd, unless it goes on already; earlier runs are over.

        Units held by a run that accumulated nothing (``autograd.grad``) are released. Such a run ends at the requested
        tensors, so it left no calls to be served.
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
                self._reshard_then_prefetch(unit.index)

    def post_forward_root(self, module: object, views: Sequence[Tensor]) -> bool:
        """End the forward of ``module``; return whether it was the outermost one.

        views: tensors that it returned, which may be views of weights.
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
        if not expected:  # a later forward with grad would use casts that are older than its calls
            torch.clear_autocast_cache()
        self._end_pass(lambda unit, hold: expected and (unit.index == 0 or hold.kept or bool(hold.calls)))
        self._grad_pass = True
        return True

    def pre_forward(self, index: int, *, grad: bool, differentiable: bool) -> UnitCall | None:
        """Begin a forward of unit ``index``: unshard it. Return the call; None if it is not observed.

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

    def _begin_call(self, index: int, *, grad: bool, differentiable: bool) -> UnitCall:
        if self.in_backward:
            found = self._calls.computed_again(index) if grad else None
            if found is None:
                return UnitCall(index)
            self._leave_behind(self._calls.approach(found))
            found.note_computed()
            return found
        nested = bool(self._calls.inside)
        self._calls.inside.add(index)
        trains = self.trains(index)
        if nested or not self._grad_pass or not (trains or differentiable or self._calls.may_differentiate):
            return UnitCall(index)
        return self._calls.begin(index, grad=grad, differentiable=differentiable, trains=trains)

    def post_forward(self, index: int, grad: bool, keep: bool, views: Sequence[Tensor]) -> None:
        """End a forward of unit ``index``.

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
            return  # even if this call had no grad: on another rank it may have had
        if self._grad_pass and not self.in_backward:
            self._end_wait(but=index)
            self.turn.waiting = index
        else:
            self._reshard_then_prefetch(index)

    def weight_read(self, index: int) -> bool:
        """Handle a read of a weight of unit ``index``. Return whether it is in a forward, but outside of the unit's.

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
        """Declare, once, at start, that the backward of unit ``index`` does not read its weights."""
        self._holds[index].forward_only = True

    # Events of backward

    def begin_backward(self, *, bare: bool = False, current: int | None = None) -> None:
        """Begin a backward: count it, begin the reducer's backward, unshard the root.

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

    def pre_backward_root(self, forward: Forward | None = None, line: CallLine | None = None) -> None:
        """Unshard the root: a gradient reached the output of the outermost module, returned in ``forward``.

        line: the calls of that forward. If this backward was not announced, and it is the window's last, its end is
        awaited.
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
        """Queue a callback for the end of the running backward ([Note: Bare backward])."""
        task = torch._C._current_graph_task_id()
        if task < 0 or task == self._awaited_task:
            return
        self._awaited_task = task

        def over() -> None:
            if self._backward is Backward.BARE and self._window.ends:
                self.finalize_backward()

        torch.autograd.Variable._execution_engine.queue_callback(over)

    def pre_backward(self, index: int, call: UnitCall, *, announced: bool) -> None:
        """Handle a gradient that reached the outputs of ``call`` of unit ``index``. announced: ``post_backward`` will
        come."""
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
        """Handle autograd's read of a weight of unit ``index`` that a forward saved.

        If it was not announced, the schedule acts as if a gradient had reached the unit's call. See saved_weights:
        [Note: On demand].
        """
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

    def _hold_for_backward(self, index: int, call: UnitCall, *, announced: bool) -> None:
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

    def post_backward(self, index: int, call: UnitCall) -> None:
        """Handle a gradient of an input of ``call``: its weights are not needed any more."""
        hold = self._holds[index]
        if call in hold.calls:
            self._trace("backward", index, hold)
            self._end_call(call)

    def _end_call(self, call: UnitCall) -> None:
        """End the backward of ``call``: its unit gets no more gradients, unless by other calls."""
        hold = self._holds[call.unit]
        hold.finish({call})
        if call.line is not None:
            hold.depth = 0  # of recomputations that were broken off
            self._calls.over(call)
            if self._calls.is_last(call) and not hold.kept and not self._may_grow(call):
                self.recorded.note(What.CLOSE, call.unit)
                self._reducer.end_unit(call.unit)
        if not self._calls.is_followed(call):
            self._reshard_then_prefetch(call.unit)

    def _may_grow(self, call: UnitCall) -> bool:
        """Whether the backward of an earlier forward, in this run, may still bring gradients of the unit."""
        if not self._calls.waits_for_others(call):
            return False
        unit, fired = self.units[call.unit], self._holds[call.unit].fired
        due = (m.parameter for m in unit.members if m.index in unit.trainable and m.index not in fired)
        return call.replayed or any(_is_due(parameter) for parameter in due)

    def _leave_behind(self, groups: Iterable[Sequence[UnitCall]]) -> None:
        """End the calls that backward has left behind, including those that it skipped on this rank.

        Other ranks may have gathered the units of skipped calls, and wait for this rank's part of the gathers.
        """
        for group in groups:
            for call in reversed(group):
                if not call.reached and not self._holds[call.unit].forward_only:
                    self._request(call.unit)
                if not call.over:
                    self._end_call(call)

    def post_accumulate_grad(self, parameter: int, gradient: Tensor) -> None:
        """Pass on ``gradient`` of a parameter, which autograd has accumulated."""
        self._take(parameter, gradient)
        self._reducer.views.expect_more(parameter)

    def begin_scaled(self) -> None:
        """Record that the loss of the running backward, and so of those inside it (recomputation), was scaled."""

        def over() -> None:
            self._is_scaled = False

        self._is_scaled = True
        torch.autograd.Variable._execution_engine.queue_callback(over)

    def _require_scale(self) -> None:
        """Raise UsageError if gradients are scaled and the loss of the running bare backward was not."""
        if self._reducer.rules.scaled and not self._is_scaled:
            raise UsageError(
                "Loss scaling is required: expected engine.backward(loss) or engine.scale(loss).backward() for each "
                "loss, got a loss.backward() that leaves the loss scale out. To pass on a gradient of a scaled loss: "
                "engine.backward(output, gradient.float() / engine.get_loss_scale())",
                code="backward-without-loss-scale",
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
                f"parameter {unit.name_of(parameter)!r} of unit {unit.name!r} was used outside of the model's forward "
                "while its weights were sharded, so its gradient is NaN: use it inside the forward, or inside "
                "`with engine.full_params():` together with the backward of its loss",
                code="grad-of-sharded-weights",
            )
        self._reducer.on_gradient(parameter, gradient)
        hold = self._holds[unit.index]
        hold.fired.add(parameter)
        complete = not unit.has_frozen and len(hold.fired) == len(unit.trainable)
        if hold.calls and hold.calls <= hold.silent and complete:
            for call in list(hold.calls):
                self._end_call(call)

    def backward_failed(self) -> None:
        """End a backward that raised."""
        self._backward, self._is_scaled = Backward.NONE, False
        self._calls.forget()
        if self._written is not None:
            self._written.end_backward(failed=True)
        self._step_state.backward_failed()

    def finalize_backward(self) -> None:
        """End a backward: reshard every unit, and reduce the remaining gradients."""
        self._backward = Backward.NONE
        if self._stage.moves_weights:
            self._leave_behind(self._calls.finish())
        self._rest(spare_kept=True)
        self.recorded.end_micro_batch(final=self._window.ends)
        self._end_writes()
        self._finish_gradients()

    def _end_writes(self) -> None:
        """Raise UsageError if a weight has changed in this backward."""
        try:
            if self._written is not None:
                self._written.end_backward()
        except UsageError:
            self.backward_failed()
            raise

    def _finish_gradients(self) -> None:
        """Finish the reductions: no more gradients come in this backward."""
        self._reducer.finalize_backward()
        if self._step_state.phase is Phase.REDUCED:
            self.complete_gradients()

    def complete_gradients(self) -> None:
        """Agree with all ranks on the gradients of the accumulation window, which are complete here; run the callback.

        The calls go down and up once: ``Reducer.finish_gradients`` checks that the step may agree,
        ``ShardedOptimizer.finish_gradients`` makes this rank's part of the norm, ``Reducer.agree`` exchanges it with
        the used parameters, and the optimizer then shows the gradients.
        """
        self._reducer.finish_gradients()
        for agreed in self._agreed.values():
            agreed.begin_window()
        self._complete(self._reducer.touched)

    def call_when_complete(self, call: Callable[[Collection[int]], None]) -> None:
        """Call ``call`` with the parameters whose gradients ranks have agreed on, after each agreement."""
        self._complete = call

    def finish_open_backward(self) -> None:
        """End a bare backward ([Note: Bare backward])."""
        self._is_scaled = False  # a run that raises does not announce its end
        if self._backward is Backward.BARE:
            self.finalize_backward()

    def _go_on(self) -> None:
        """Let an open bare backward continue with that of the present forward; end the calls that it left open."""
        if self._backward is Backward.BARE:
            torch.clear_autocast_cache()  # as in ``_rest``
            for call in [call for hold in self._holds for call in hold.calls]:
                self._end_call(call)
            self._calls.pause()

    def reshard_all(self) -> None:
        """Reshard every unit outside of any pass (after a forward that had no backward, or that failed)."""
        self._backward = Backward.NONE
        self._calls.forget()
        self._rest(spare_kept=False)

    def recover(self) -> None:
        """Forget collectives in flight and predictions after a failure; ranks may have recorded different orders."""
        self._backward = Backward.NONE
        for unit in self.units:
            unit.recover()
        self._orders = PrefetchOrders()
        self._agreed = {True: AgreedOrder(), False: AgreedOrder()}
        self._calls.forget()
        self.recorded.drop()

    def begin_serving(self) -> None:
        """Begin to serve, because this rank has run out of data.

        If that happens in the middle of a micro-batch, its units stay as they are.
        """
        self._backward = Backward.NONE
        self._calls.forget()
        self._outermost.clear()

    @property
    def guesses(self) -> bool:
        """Whether ``next_micro_batch`` must guess the order of gathers."""
        return self._stage.moves_weights and self.recorded.is_empty

    def next_micro_batch(self) -> MicroBatch:
        """Return the events of a micro-batch of other ranks, for this rank without data (recorded_window: [Note:
        Serving])."""
        return self.recorded.micro_batch(self._window.micro_batches, MicroBatch(self._expected()))

    def serve(self, events: Sequence[Event]) -> None:
        """Take part with zeros in a micro-batch of other ranks, following ``events``, and end the backward."""
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
            self._unshard_and_load_ahead()
        elif what in (What.RESHARD, What.KEEP) and unit.state is not UnshardState.SHARDED:
            self._wait_for_unshard(unit)
            unit.reshard(keep_inside=what is What.KEEP)
        elif what is What.ADMIT:
            self._reducer.admit(index)
        elif what is What.CLOSE:
            self._reducer.end_unit(index)

    def detach(self) -> None:
        """Retire this schedule, at rest. Backwards of old forwards still reach it, and raise UsageError."""
        self._backward = Backward.RETIRED

    def _require_weights(self) -> None:
        """Raise unless the weights for this backward are still those of its forward."""
        self._step_state.require("any")
        if self._backward is Backward.RETIRED:
            raise UsageError(
                "the forward of this loss ran before parameters were unfrozen or a parameter group was added, which "
                "moved the weights: run it again, after engine.zero_grad()",
                code="backward-of-older-layout",
            )

    def restart(self) -> None:
        """Treat the next forward as an outermost one: the engine is called, or the last forward raised."""
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
        """Unit ``index`` is needed next: record it, and reshard the unit that waited for this."""
        turned = not self._outermost
        self._note(What.AGAIN if turned else What.REQUEST, index)
        self._orders.request(self._grad_pass, index, turned=turned)
        self._end_wait(but=index)
        self._need(index)

    def _need(self, index: int) -> None:
        """Have the weights of unit ``index`` whole: start its gather, if nobody has, and those ahead; wait for it."""
        self._note(What.NEED, index)
        unit = self.units[index]
        if unit.state is UnshardState.SHARDED:
            self._unshard(unit)
        self._unshard_and_load_ahead()
        self._wait_for_unshard(unit)

    def _unshard(self, unit: Unit) -> None:
        """Start the gather of ``unit``, on which all ranks agree ([Note: Agreed gathers] in prefetch_order)."""
        agreed = self._agreed[self._grad_pass]
        if not agreed.gathers_as_expected(unit.index):
            self._ask(unit, agreed)
            agreed.note(unit.index)
        unit.unshard(self._collectives, Purpose.WEIGHTS if self._grad_pass else Purpose.EVALUATION, self.coding)

    def _ask(self, unit: Unit, agreed: AgreedOrder) -> None:
        """Check that every rank gathers ``unit`` now; raise ``MismatchError`` on all of them otherwise.

        See prefetch_order: [Note: Agreed gathers].
        """
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
                f"{EVALUATE}",
                code="ranks-evaluate-and-train",
            )
        if rows[0][0] == rows[other][0]:
            raise MismatchError(
                f"ranks 0 and {other} have gathered the weights of different units before that of "
                f"{self.units[rows[0][0]].name!r} (this is rank {mesh.rank}). {BLOCKS}",
                code="ranks-run-different-modules",
            )
        ours, theirs = (self.units[row[0]].name for row in (rows[0], rows[other]))
        raise MismatchError(
            f"ranks run different modules: rank 0 needs the weights of unit {ours!r} where rank {other} needs those of "
            f"{theirs!r} (this is rank {mesh.rank}). {BLOCKS}",
            code="ranks-run-different-modules",
        )

    def _wait_for_unshard(self, unit: Unit) -> None:
        """Finish the gather of ``unit``; start it if it was not."""
        if unit.state is UnshardState.SHARDED:
            self._unshard(unit)
        if unit.state is UnshardState.UNSHARDING:
            unit.wait_for_unshard()

    def _note(self, what: What, index: int = 0) -> None:
        """Record an event, but only with grad: without, a rank may run other modules than the others."""
        if self._grad_pass:
            self.recorded.note(what, index)

    def _end_wait(self, *, but: int) -> None:
        """Reshard the waiting unit if it is not ``but``, because another unit is needed."""
        waiting = self.turn.take()
        if waiting is not None and waiting != but:
            self._reshard_unless_held(waiting)

    def _reshard_then_prefetch(self, index: int) -> None:
        """Reshard unit ``index`` unless something holds it; then use the room to unshard ahead."""
        if self._reshard_unless_held(index):
            self._note(What.AHEAD)
            self._unshard_and_load_ahead()

    def _reshard_unless_held(self, index: int) -> bool:
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

    def _unshard_and_load_ahead(self) -> None:
        """Unshard units ahead, and load the offloaded shards of the units after those."""
        self._unshard_ahead()
        if not self._fetches:
            return
        for index in self._orders.of[self._grad_pass].ahead(_FETCHED_AHEAD):
            if self.units[index].state is UnshardState.SHARDED:
                self.units[index].load_ahead()

    def _unshard_ahead(self) -> None:
        """Start unsharding the units that are predicted next, up to the budget, at least one of them.

        A prediction that returns to a unit ends there. Otherwise a unit that is needed again after the turn from
        forward to backward would be gathered as soon as it was resharded.
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
    except RuntimeError:  # autograd.grad was called for this parameter
        return False
