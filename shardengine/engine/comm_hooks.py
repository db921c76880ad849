"""A communication hook of the user's joins an engine. Must not know: what a hook does."""

from __future__ import annotations

from typing import Any

from shardengine.comm import compare, run_on_all_ranks
from shardengine.ddp import comm_hooks
from shardengine.engine.core import Core
from shardengine.errors import UsageError


def register(core: Core, hook: Any, state: Any) -> None:
    """See ``Engine.register_comm_hook``. ``UsageError`` where it cannot be served."""
    core.schedule.finish_open_backward()
    run_on_all_ranks(core.collectives, "register_comm_hook", lambda: _check(core, hook, state))
    name = getattr(hook, "__qualname__", type(hook).__qualname__)
    compare(core.collectives, {"function that engine.register_comm_hook is given": [name]})
    core.reducer.register(comm_hooks.WholeGradients(state, hook))


def _check(core: Core, hook: Any, state: Any) -> None:
    where = f"engine.register_comm_hook (rank {core.mesh.rank})"
    core.step_state.require("another setting", "register_comm_hook()")
    if not callable(hook):
        order = ": the state comes first" if callable(state) else ""
        raise UsageError(f"{where}: expected hook as a function of (state, bucket), got {type(hook).__name__}{order}")
    registered = isinstance(core.reducer.hook, comm_hooks.WholeGradients)
    if core.reducer.hook is not None and not registered:
        raise UsageError(f"{where}: expected no other hook, got one beside {core.reducer.hook.name}")
    if core.mesh.replicas > 1:
        raise UsageError(
            f"{where}: expected one shard group, got {core.mesh.replicas}: the hook brings the mean over all ranks, "
            "and here they are added up inside of the groups first; take a comm_hook of the config, or no shard groups"
        )
    if core.reducer.rules.divisor != core.mesh.ranks and not registered:
        raise UsageError(
            f"{where}: expected gradients that are divided by the number of ranks, {core.mesh.ranks}, got a divisor of "
            f"{core.reducer.rules.divisor:g}: the hook brings a mean, which is not divided any more; let it divide by "
            "that, and leave out gradient_divide_factor and gradient_allreduce_op"
        )
