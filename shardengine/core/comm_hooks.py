"""Registers a user's communication hook with an engine. Must not know: the work of a hook."""

from __future__ import annotations

import functools
from typing import Any

from shardengine.comm import run_on_all_ranks
from shardengine.core.parts import Core
from shardengine.ddp import comm_hooks
from shardengine.errors import MismatchError, UsageError


def register(core: Core, hook: Any, state: Any) -> None:
    """See ``Engine.register_comm_hook``. ``UsageError`` if this engine cannot use the hook."""
    core.schedule.finish_open_backward()
    run_on_all_ranks(core.collectives, "register_comm_hook", lambda: _check(core, hook, state))
    _compare(core, f"{_name(hook)} with {'no state' if state is None else f'a state of type {_name(type(state))}'}")
    core.reducer.register(comm_hooks.WholeGradients(state, hook))


def _compare(core: Core, given: str) -> None:
    """Raise ``MismatchError`` on every rank if ranks pass different functions or different types of state."""
    said = core.collectives.exchange_objects(given, "register_comm_hook is given the same everywhere")
    ranks = {text: [rank for rank, other in enumerate(said) if other == text] for text in dict.fromkeys(said)}
    if len(ranks) > 1:
        got = ", ".join(f"{text} on ranks {those}" for text, those in ranks.items())
        raise MismatchError(
            f"engine.register_comm_hook: expected the same function and the same kind of state on every rank, got "
            f"{got} (this is rank {core.mesh.rank})",
            code="hook-differs-between-ranks",
        )


def _name(given: Any) -> str:
    while isinstance(given, functools.partial):
        given = given.func
    named = given if hasattr(given, "__qualname__") else type(given)
    return f"{named.__module__}.{named.__qualname__}".removeprefix("builtins.")


def _check(core: Core, hook: Any, state: Any) -> None:
    where = f"engine.register_comm_hook (rank {core.mesh.rank})"
    core.step_state.require("another setting", "register_comm_hook()")
    if not callable(hook):
        order = ": the state comes first" if callable(state) else ""
        raise UsageError(
            f"{where}: expected hook as a function of (state, bucket), got {type(hook).__name__}{order}",
            code="hook-not-a-function",
        )
    registered = isinstance(core.reducer.hook, comm_hooks.WholeGradients)
    if core.reducer.hook is not None and not registered:
        raise UsageError(
            f"{where}: expected no other hook, got one beside {core.reducer.hook.name}", code="hook-beside-another"
        )
    if core.mesh.replicas > 1:
        raise UsageError(
            f"{where}: expected one shard group, got {core.mesh.replicas}: the hook brings the mean over all ranks, "
            "and here they are added up inside of the groups first; take a comm_hook of the config, or no shard groups",
            code="hook-with-shard-groups",
        )
    if core.reducer.rules.divisor != core.mesh.ranks and not registered:
        raise UsageError(
            f"{where}: expected gradients that are divided by the number of ranks, {core.mesh.ranks}, got a divisor of "
            f"{core.reducer.rules.divisor:g}: the hook brings a mean, which is not divided any more; let it divide by "
            "that, and leave out gradient_divide_factor and gradient_allreduce_op",
            code="hook-with-divide-factor",
        )
