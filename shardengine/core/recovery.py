"""After a failure: reports it to the other ranks, and brings all ranks back to one step (``engine.reset()``).

Must not know: how ranks exchange reports (comm/failures), which collectives were in flight.

[Note: Back to one step] A failure finds the ranks at different places. They are never further than one update from each
other, because the exchange of the norm lies between two updates. So there are two ways back:

- If no rank has begun the update of a step that another rank has not completed, the accumulation window is dropped on
  all ranks.
- Otherwise some weights have taken the step already. The ranks that have not completed it hold complete gradients and
  know the norm. They finish the update, from the bucket at which they stopped. Then all ranks publish all buckets.

A rank that was interrupted inside a bucket's kernels, or that does not know the norm, can do neither. Then the update
is lost on every rank, and a checkpoint must be loaded before training continues. Collectives in flight on the old
groups are abandoned, together with the memory that they write into. The schedule's predictions and the order of
launches are dropped, because they may differ between ranks.

[Note: A hook out of step] A user's communication hook may start collectives on groups that are not the engine's. There
they may meet collectives that other ranks start later. So training cannot continue if the hook failed on a rank, if one
of its collectives does not end, or if ranks have called it a different number of times
(ddp/comm_hooks/whole_gradients.py). The engine itself is brought back, so that it can be saved.
"""

from __future__ import annotations

import functools
import logging
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ContextDecorator, contextmanager
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import nn

from shardengine.comm import HOOK, Collectives, Failures, Presence, compare, describe, meeting, run_on_all_ranks
from shardengine.core.inspection import Inspection
from shardengine.core.parts import Core
from shardengine.ddp import comm_hooks
from shardengine.errors import CommunicationError, UsageError
from shardengine.optim import ShardedOptimizer
from shardengine.other_engines import explain_arguments
from shardengine.sharding import explain_let_go

_log = logging.getLogger(__name__)
_HOOK_ENDS_S = 3.0
"""The collectives of a hook end within that time if every rank has started them."""
_E = TypeVar("_E", bound=Inspection)
_P = ParamSpec("_P")
_T = TypeVar("_T")


def reports_failure(
    call: str,
) -> Callable[[Callable[Concatenate[_E, _P], _T]], Callable[Concatenate[_E, _P], _T]]:
    """Decorate a method of the engine: when it raises on this rank, it reports that to the other ranks."""

    def decorate(method: Callable[Concatenate[_E, _P], _T]) -> Callable[Concatenate[_E, _P], _T]:
        @functools.wraps(method)
        def reporting(engine: _E, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
            trace = engine._core.collectives.trace
            with _reporting(engine, call):
                try:
                    if not trace.recording:
                        return method(engine, *args, **kwargs)
                    with trace.span(call, step=engine.global_steps + 1):
                        return method(engine, *args, **kwargs)
                except TypeError as error:
                    explain_arguments(error)
                    raise

        return reporting

    return decorate


def _raised_in(error: BaseException, core: Core, model: nn.Module) -> str:
    """The place where ``error`` was raised, for messages: a communication hook of the user, or unit and module.

    The unit is the one that was needed last. The module is the innermost one whose forward (or recomputation) raised.
    Autograd does not reveal whose backward it runs, so in backward and in the step only the unit is known.
    """
    names = {id(module): name for name, module in model.named_modules() if name}
    callers = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    if any(isinstance(caller, comm_hooks.WholeGradients) for caller in callers):
        return f"{HOOK} {core.reducer.hook_label}"
    inside = [names[id(caller)] for caller in callers if id(caller) in names]
    return f"unit {core.schedule.last_requested.name!r}" + (f", module {inside[-1]!r}" if inside else "")


def on_all_ranks(engine: Inspection, what: str, action: Callable[[], _T]) -> _T:
    """Run ``action`` on every rank; if it raises on one, all ranks raise that error. Collective.

    action: has no collectives.
    """
    return run_on_all_ranks(engine._core.collectives, what, action)


@contextmanager
def telling_all(engine: Inspection, what: str) -> Iterator[None]:
    """A ``with`` that every rank enters and leaves together; collective.

    If its body raises on one rank, the other ranks get a report, at any place inside their bodies, and raise as well.
    """
    with _reporting(engine, what):
        yield
        engine._core.collectives.barrier()


def reports_failure_with(
    call: str,
) -> Callable[
    [Callable[Concatenate[_E, _P], AbstractContextManager[_T]]],
    Callable[Concatenate[_E, _P], AbstractContextManager[_T]],
]:
    """As ``reports_failure``, for a method that returns a context manager: covers entering and leaving it."""

    def decorate(
        method: Callable[Concatenate[_E, _P], AbstractContextManager[_T]],
    ) -> Callable[Concatenate[_E, _P], AbstractContextManager[_T]]:
        @functools.wraps(method)
        def reporting(engine: _E, /, *args: _P.args, **kwargs: _P.kwargs) -> AbstractContextManager[_T]:
            return ForWith(call, lambda: _reporting_with(engine, call, method(engine, *args, **kwargs)))

        return reporting

    return decorate


class ForWith(AbstractContextManager[_T], ContextDecorator):
    """The context manager that ``engine.<call>(...)`` returns.

    It warns if nobody enters it, because then it does nothing. make: returns a new context, for each call of a function
    that this object decorates.
    """

    def __init__(self, call: str, make: Callable[[], AbstractContextManager[_T]]) -> None:
        self._call = call
        self._make = make
        self._next: AbstractContextManager[_T] | None = make()
        self._open: list[AbstractContextManager[_T]] = []
        self._entered = False

    def __enter__(self) -> _T:
        self._entered = True
        context, self._next = self._next or self._make(), None  # entered again: a new one
        value = context.__enter__()
        self._open.append(context)
        return value

    def __exit__(self, *error: Any) -> bool | None:
        return self._open.pop().__exit__(*error)

    def _recreate_cm(self) -> ForWith[_T]:
        self._entered = True
        return ForWith(self._call, self._make)

    def __del__(self) -> None:
        if not getattr(self, "_entered", True):
            _log.warning("engine.%s(...) did nothing: expected it in `with engine.%s(...):`", self._call, self._call)


@contextmanager
def _reporting_with(engine: Inspection, call: str, context: AbstractContextManager[_T]) -> Iterator[_T]:
    with _reporting(engine, call):
        value = context.__enter__()
    try:
        yield value
    except BaseException as error:  # the user's own error, or one that a call has reported
        if not context.__exit__(type(error), error, error.__traceback__):
            raise
    else:
        with _reporting(engine, f"leaving {call}"):
            context.__exit__(None, None, None)


@contextmanager
def _reporting(engine: Inspection, call: str) -> Iterator[None]:
    """``Failures.reports_failure`` for a call of the engine.

    A forward without grad is a kind of its own, because one rank may evaluate alone.
    """
    if not engine.is_open:
        yield  # closed: the call raises, and nobody waits for it
        return
    core = engine._core
    core.mesh.breaking_off.check(f"{call} on rank {core.mesh.rank}")
    kind = call if call != "forward" or torch.is_grad_enabled() else "forward without grad"
    where = f"{kind} of step {engine.global_steps + 1}, micro-batch {engine._window.micro_batches + 1}"
    failures = core.collectives.failures
    try:
        with failures.reports_failure(where, lambda error: _raised_in(error, core, engine.module), kind):
            yield
    except RuntimeError as error:
        if core.stage.moves_weights:
            explain_let_go(error)
        raise
    finally:
        failures.set_progress(engine.global_steps, engine._window.micro_batches)


def tell_other_ranks(collectives: Collectives) -> None:
    """Begin to report this rank's position to the other ranks.

    They learn the collective that this rank has reached in the program, and when its engine is gone without having been
    closed. The engine is gone when its collectives are garbage-collected, because the module's hooks use them without
    the engine. Its process groups are abandoned then.
    """
    collectives.failures.begin()
    weakref.finalize(collectives, _let_go, collectives.failures).atexit = False  # the end of a process reports itself


def _let_go(failures: Failures) -> None:
    if failures.is_open and failures.presence is Presence.PRESENT:
        failures.leave("has let go of its engine", wait=False)  # this may run at any place
        failures.mesh.abandon()


@dataclass(frozen=True)
class Return:
    """The result of ``reset``.

    finished: this rank has now finished an update that it had not finished before · problem: the reason why it cannot ·
    hook: the reason why the communication hook cannot be called any more. "" means none.
    """

    finished: bool
    problem: str = ""
    hook: str = ""

    def check(self) -> None:
        """Raise ``UsageError`` if a step was lost."""
        if self.problem:
            raise UsageError(self.problem, code="reset-step-not-finished")

    def check_hook(self) -> None:
        """Raise ``UsageError`` if training cannot continue with the hook."""
        if self.hook:
            raise UsageError(self.hook, code="reset-hook-out-of-step")


def reset(core: Core, optimizer: ShardedOptimizer | None, steps: int) -> Return:
    """Make new process groups, then bring all ranks to the same step ([Note: Back to one step]); collective.

    steps: completed on this rank.
    """
    _renew_groups(core)
    if optimizer is not None:
        optimizer.wait_early()
        optimizer.note_if_spoiled()
    places = core.collectives.exchange_objects(_place(core, optimizer, steps), "where ranks are at engine.reset()")
    newest = max(place["steps"] for place in places)
    begun = any(place["begun"] for place in places)
    target = newest if len({place["steps"] for place in places}) > 1 else newest + begun
    behind = [rank for rank, place in enumerate(places) if place["steps"] < target]
    stuck = [rank for rank in behind if not places[rank]["ready"] or places[rank]["steps"] < target - 1]
    rolls = begun or target > min(place["steps"] for place in places)
    problem = ""
    if stuck:
        problem = (
            f"reset() cannot recover: step {target} was applied to some weights, and ranks {stuck} cannot finish it "
            "(they stopped during the update, or before they knew the norm). Call engine.load_checkpoint() on every "
            "rank"
        )
    hook = _hook_out_of_step([place["hook"] for place in places], core)
    if hook:
        core.step_state.refuse_hook(hook)
    finished = rolls and not stuck and core.mesh.rank in behind
    core.schedule.recover()
    in_flight = core.stage.publishes_after_step and (rolls or core.deferred_gather is not None)
    if core.deferred_gather is not None:
        core.deferred_gather.drop()
    if in_flight:
        for unit in core.units:
            unit.relocate()
    if optimizer is not None and rolls and not stuck:
        _finish(core, optimizer, target, behind)
    for store in (store for unit in core.units for store in unit.stores()):
        store.abandon()
    if optimizer is not None and not finished:
        optimizer.end_window()
        if stuck:
            core.step_state.lose()
        else:
            core.step_state.restart()
    core.reducer.abandon()
    core.pool.forget()
    if in_flight and not stuck:
        core.publish(bucket_grad.bucket for bucket_grad in core.reducer.buckets)
        core.await_weights()
    return Return(finished, problem, hook)


def _hook_out_of_step(calls: list[int | None], core: Core) -> str:
    """The sentence about a hook that cannot be called any more, the same on all ranks; "" if it can.

    calls: of each rank, None for a rank on which the hook failed or did not end. See [Note: A hook out of step].
    """
    failed = [rank for rank, count in enumerate(calls) if count is None]
    if not failed and len(set(calls)) == 1:
        return ""
    why = f"it has failed, or did not end, on ranks {failed}"
    if not failed:
        why = f"ranks have called it {calls} times"
    label = core.reducer.hook_label
    return (
        f"engine.reset() has no way back to training with the communication hook {label}: {why}, so that its own "
        "collectives may be out of step between the ranks, and end a process later. Expected the ranks to be started "
        "again; the engine is at its last completed step, which engine.save_checkpoint() can still save"
    )


def compare_options(core: Core, optimizer: ShardedOptimizer | None) -> None:
    """Raise ``MismatchError`` if ranks have different optimizer options; collective.

    A failure may leave such a difference behind.
    """
    groups = [] if optimizer is None else optimizer.param_groups
    options = [describe({key: value for key, value in group.items() if key != "params"}) for group in groups]
    options += [] if optimizer is None else [describe(optimizer.scaling)]
    compare(core.collectives, {"list of optimizer options after reset()": options})


def _renew_groups(core: Core) -> None:
    collectives = core.collectives
    meeting.meet(collectives.failures, "engine.reset()")
    before = collectives.failures
    try:
        collectives.use(collectives.mesh.renew())
        collectives.barrier()
    except RuntimeError as error:
        raise CommunicationError(
            f"engine.reset() on rank {collectives.mesh.rank}: new process groups could not be built: {error}. Start "
            "the ranks again",
            code="reset-groups-not-rebuilt",
        ) from error
    finally:
        meeting.end(before)
        if before is not collectives.failures:
            before.close()
            tell_other_ranks(collectives)


def _finish(core: Core, optimizer: ShardedOptimizer, step: int, behind: list[int]) -> None:
    """Let the ranks ``behind`` finish their update; collective.

    An error on one rank raises on all ranks, and no state is dropped.
    """

    def finish() -> None:
        if core.mesh.rank in behind:
            with torch.no_grad():
                for _ in optimizer.step_buckets():
                    pass

    try:
        run_on_all_ranks(core.collectives, f"finishing step {step} in reset()", finish)
    except Exception:
        core.step_state.note_unfinished()
        raise


def _place(core: Core, optimizer: ShardedOptimizer | None, steps: int) -> dict[str, Any]:
    state, ready = core.step_state, optimizer is not None and core.step_state.can_be_finished
    hook = core.reducer.hook_calls(_HOOK_ENDS_S)
    return {"steps": steps, "begun": state.has_begun, "ready": ready, "hook": hook}
