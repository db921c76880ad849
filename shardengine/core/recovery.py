"""After a failure: the report to the other ranks, and the way back to one step on all of them (``engine.reset()``).

Must not know: how ranks tell each other (comm/failures), which collectives were under way.

[Note: Back to one step] A failure finds the ranks at different places, but never further apart than one update, because
the norm's exchange lies between two updates. So there are two ways back:

- no rank has begun the update of a step that another rank has not completed: the window is dropped everywhere
- otherwise some weights have taken the step already. The ranks that have not completed it hold complete gradients and
  know the norm; they finish the update with the bucket at which they stopped. Then all ranks publish all buckets

A rank that was interrupted inside of a bucket's kernels can do neither, nor one that does not know the norm: then the
update is lost on every rank, and a checkpoint must be loaded before anything goes on. What is in flight on the old
groups is abandoned together with the memory that it writes into; the schedule's predictions and the order of launches
are forgotten, since they may differ between ranks.

[Note: A hook out of step] What a communication hook of the user's has begun itself lies on groups that are not the
engine's, where it may meet what ranks begin later. So training cannot go on where it failed on a rank, where something
of it does not end, or where ranks have called it different numbers of times (ddp/comm_hooks: [Note: What a hook has
begun]). The engine itself is brought back all the same, so that it can be saved.
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
"""What a hook has begun on every rank ends within that."""
_E = TypeVar("_E", bound=Inspection)
_P = ParamSpec("_P")
_T = TypeVar("_T")


def reports_failure(
    call: str,
) -> Callable[[Callable[Concatenate[_E, _P], _T]], Callable[Concatenate[_E, _P], _T]]:
    """A method of the engine that reports to the other ranks when it raises on this one."""

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
    """The unit that was needed last, and the innermost module in whose forward (or recomputation) ``error`` was raised;
    or that it was in a communication hook of the user's.

    Autograd does not say whose backward it runs: there, and in the step, only the unit is known.
    """
    names = {id(module): name for name, module in model.named_modules() if name}
    callers = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    if any(isinstance(caller, comm_hooks.WholeGradients) for caller in callers):
        return f"{HOOK} {core.reducer.hook_label}"
    inside = [names[id(caller)] for caller in callers if id(caller) in names]
    return f"unit {core.schedule.last_requested.name!r}" + (f", module {inside[-1]!r}" if inside else "")


def on_all_ranks(engine: Inspection, what: str, action: Callable[[], _T]) -> _T:
    """Run ``action``, which has no collectives, on every rank: where it raises on one, all raise and say that error.
    Collective."""
    return run_on_all_ranks(engine._core.collectives, what, action)


@contextmanager
def telling_all(engine: Inspection, what: str) -> Iterator[None]:
    """Every rank enters this and leaves it together: where it raises on one, the others are told, wherever inside of it
    they are, and raise as well. Collective."""
    with _reporting(engine, what):
        yield
        engine._core.collectives.barrier()


def reports_failure_with(
    call: str,
) -> Callable[
    [Callable[Concatenate[_E, _P], AbstractContextManager[_T]]],
    Callable[Concatenate[_E, _P], AbstractContextManager[_T]],
]:
    """As ``reports_failure``, for a method that returns a context manager: what entering or leaving it raises."""

    def decorate(
        method: Callable[Concatenate[_E, _P], AbstractContextManager[_T]],
    ) -> Callable[Concatenate[_E, _P], AbstractContextManager[_T]]:
        @functools.wraps(method)
        def reporting(engine: _E, /, *args: _P.args, **kwargs: _P.kwargs) -> AbstractContextManager[_T]:
            return ForWith(call, lambda: _reporting_with(engine, call, method(engine, *args, **kwargs)))

        return reporting

    return decorate


class ForWith(AbstractContextManager[_T], ContextDecorator):
    """What ``engine.<call>(...)`` returns for a ``with``: says so where nobody enters it, which does nothing.

    make: the context, anew for each call of what it decorates.
    """

    def __init__(self, call: str, make: Callable[[], AbstractContextManager[_T]]) -> None:
        self._call = call
        self._make = make
        self._next: AbstractContextManager[_T] | None = make()
        self._open: list[AbstractContextManager[_T]] = []
        self._entered = False

    def __enter__(self) -> _T:
        self._entered = True
        context, self._next = self._next or self._make(), None  # entered again: anew
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
    except BaseException as error:  # the user's own, or of a call that has reported it
        if not context.__exit__(type(error), error, error.__traceback__):
            raise
    else:
        with _reporting(engine, f"leaving {call}"):
            context.__exit__(None, None, None)


@contextmanager
def _reporting(engine: Inspection, call: str) -> Iterator[None]:
    """``Failures.reports_failure`` in a call of the engine. One rank may evaluate alone, so that is counted apart."""
    if not engine.is_open:
        yield  # closed: the call says so, and nobody waits for it
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
    """Tell the other ranks, from now on, in which collective of the program this one stands, and when nobody has an
    engine any more that was not closed. Its groups are abandoned then.

    The module's hooks use its collectives without the engine, so these are what has to be gone.
    """
    collectives.failures.begin()
    weakref.finalize(collectives, _let_go, collectives.failures).atexit = False  # the end of a process says so itself


def _let_go(failures: Failures) -> None:
    if failures.is_open and failures.presence is Presence.PRESENT:
        failures.leave("has let go of its engine", wait=False)  # in the midst of anything
        failures.mesh.abandon()


@dataclass(frozen=True)
class Return:
    """What ``reset`` found. finished: this rank has now finished an update that it had not · problem: why it cannot ·
    hook: why the communication hook cannot be called any more."""

    finished: bool
    problem: str = ""
    hook: str = ""

    def check(self) -> None:
        """``UsageError`` where a step was lost."""
        if self.problem:
            raise UsageError(self.problem, code="reset-step-not-finished")

    def check_hook(self) -> None:
        """``UsageError`` where training cannot go on with the hook."""
        if self.hook:
            raise UsageError(self.hook, code="reset-hook-out-of-step")


def reset(core: Core, optimizer: ShardedOptimizer | None, steps: int) -> Return:
    """New groups; then all ranks are at the same step ([Note: Back to one step]); collective.

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
            f"reset() cannot bring all ranks to one step: some weights have taken step {target}, but ranks {stuck} "
            "cannot finish it (stopped inside of an update, or before they knew the norm). Call "
            "engine.load_checkpoint() on every rank"
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
    """[Note: A hook out of step]. calls: of each rank; the sentence is the same on all."""
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
    """``MismatchError`` where ranks have other optimizer options, which a failure may have left behind; collective."""
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
    """Ranks ``behind`` finish their update; an error of one is one on all, and nothing is forgotten; collective."""

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
