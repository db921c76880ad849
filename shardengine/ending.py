"""The end of an engine: the module is an ordinary one again, and everything else is let go of, also after a fault.

Must not know: what the engine was used for.
"""

from __future__ import annotations

from contextlib import ExitStack

from shardengine.core import Core


def dissolve(core: Core, *, owned: bool = False) -> None:
    """Take the hooks off and give every parameter whole weights in memory of its own; collective.

    Who holds a view of the old memory keeps it. Weights that are parked, for which there was no room, become the
    parameters' on the host. Where weights cannot be read or gathered, those parameters stay without. Everything else is
    let go of before the error is raised. owned: the process groups end, too.
    """
    core.guard.unhook()
    core.reducer.early.finish()
    orderly = False
    with ExitStack() as last:  # each of these is done whatever the others raise, from the last one up
        if owned:
            last.callback(lambda: core.mesh.destroy(orderly=orderly))
        last.callback(core.guard.unmark)
        last.callback(core.collectives.faults.close)
        last.callback(core.pool.forget)
        last.callback(core.reducer.drop)
        try:
            with core.collectives.faults.announced("close", lambda error: "gathering the weights"):
                _leave_weights(core)
        finally:
            core.tiers.close()
        core.reducer.release()  # what is in flight after a fault may have no end but the timeout
        orderly = True


def _leave_weights(core: Core) -> None:
    core.await_weights()
    core.schedule.rest()
    for unit in core.units:
        parked = any(arena.parked is not None for arena in unit.arenas)  # then all of it rests with this rank
        if core.stage.moves_weights and not parked:
            unit.gather(core.collectives)
            unit.await_full()
        views = {arena: arena.resting_views() for arena in unit.arenas}
        for member in unit.members:
            member.show(views[member.arena][member.slot].clone())
        for arena in unit.arenas:
            arena.forsake()
