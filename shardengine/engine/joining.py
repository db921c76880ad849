"""Uneven inputs: a rank that has run out of data takes part in the steps of the others until all have run out.

Owns: the calls that such a rank makes instead of its loop. Must not know: how ranks learn of each other (ddp/joining),
the order of collectives (runtime/recorded_window), the work of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

from shardengine.core import Core
from shardengine.ddp import Join
from shardengine.errors import CommunicationError, EarlyTerminationError, MismatchError, UsageError
from shardengine.optim import ShardedOptimizer

_open: list[Join] = []
"""The open joins of the engines of this process."""


_GUESSED = (
    "Rank {} had no data for a whole step inside engine.join() so far, so it gathered units in the order in which the "
    "model lists its modules, which is perhaps not that in which it runs them: expected a step with data on every rank "
    "before one runs out of it, or stage 0, 1 or 2, where nothing depends on that order"
)


@dataclass(frozen=True)
class Loop:
    """The calls of a training loop on an engine.

    core: returns the current core, which a new layout replaces · buffers: sends buffers as a forward does, if that is
    due · step: as the engine's · drop: drops the accumulation window; its argument: as total of ``StepState.restart`` ·
    is_open: whether the engine is open.
    """

    core: Callable[[], Core]
    buffers: Callable[[], None]
    step: Callable[[], None]
    drop: Callable[[int | None], None]
    is_open: Callable[[], bool]


@contextmanager
def joined(optimizer: ShardedOptimizer, loop: Loop, *, by_active: bool, throws: bool) -> Iterator[None]:
    """See ``Engine.join``.

    by_active: the mean is over the ranks that have data · throws: raise if a rank runs out of data.
    """
    core = loop.core()
    core.schedule.finish_open_backward()
    core.step_state.require("engine.join()")
    if (by_active or throws) and optimizer.steps_early:
        raise UsageError(
            "engine.join: with offload_optimizer.step_in_backward buckets are stepped before it is known which ranks "
            "have data: expected divide_by_initial_world_size=True and throw_on_early_termination=False, or that key "
            "to be false",
            code="join-step-in-backward",
        )
    if by_active and core.reducer.rules.divisor != core.mesh.ranks:
        raise UsageError(
            "engine.join(divide_by_initial_world_size=False) needs gradients that are averaged over the ranks, but "
            "they "
            f"are divided by {core.reducer.rules.divisor:g} ({core.mesh.ranks} ranks): pass True, or remove "
            "gradient_divide_factor and gradient_allreduce_op from the config",
            code="join-with-divide-factor",
        )
    if _open:
        raise UsageError(
            "engine.join() inside another engine's join() would deadlock: a rank without data waits in the inner "
            "engine "
            "while the others wait in the outer one. Use one engine per loop",
            code="join-nested",
        )
    join = core.step_state.join
    join.open(by_active=by_active, throws=throws)
    _open.append(join)
    try:
        yield
        if loop.is_open():
            _serve_until_all_have_run_dry(optimizer, loop)
    except EarlyTerminationError:  # on every rank, before the step
        join.close()
        loop.drop(None)
        raise
    except (CommunicationError, MismatchError):
        raise  # this rank has reported it already
    except BaseException as error:
        failures = loop.core().collectives.failures
        if failures.knows(error):  # a call of the engine has reported it
            raise
        with failures.reports_failure("engine.join()", lambda _: "in its body"):
            raise
    finally:
        join.close()
        _open.remove(join)


def _serve_until_all_have_run_dry(optimizer: ShardedOptimizer, loop: Loop) -> None:
    core = loop.core()
    state, join = core.step_state, core.step_state.join
    core.schedule.finish_open_backward()
    if state.is_agreed:  # the body has ended between a window's last backward and its step
        loop.step()
    loop.core().schedule.begin_serving()
    join.run_dry(state.window.micro_batches)
    over = False
    while not over:
        before, norm = state.window.completed, optimizer.norm
        loop.core().reducer.note_scale(optimizer.loss_scale)
        _serve_window(loop)
        heard = join.heard
        if heard is None or not heard.active:
            loop.drop(before)
            optimizer.take_back(norm)
            return
        over = heard.is_over
        loop.step()
    if join.source:
        loop.buffers()


def _serve_window(loop: Loop) -> None:
    """Run the rest of the accumulation window with zeros, as far as other ranks run it."""
    core = loop.core()
    state, window, schedule = core.step_state, core.window, core.schedule
    guesses = schedule.guesses
    while not state.is_agreed:
        loop.buffers()
        part = schedule.next_micro_batch()
        with nullcontext() if part.synchronises else window.no_sync():
            try:
                schedule.serve(part.events)
            except EarlyTerminationError:
                raise
            except MismatchError as error:
                if not guesses:
                    raise
                raise MismatchError(
                    f"{error}. {_GUESSED.format(state.rank)}", code="join-unit-order-unknown"
                ) from error
        if not state.is_agreed and part.synchronises:
            window.count()
