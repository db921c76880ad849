"""The end of an engine: the module is an ordinary one again, or one whose weights stay sharded for the next engine; and
everything else is let go of, also after a failure.

Must not know: what the engine was used for.

[Note: Collective or not] The end has collectives where weights are gathered, where a save has to be told of on all
ranks, and where the default process group is ours. Ranks meet before those, through the store: a rank that still trains
would take the gathers of an end for its own.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import torch
from torch import nn

from shardengine.comm import Presence, meeting
from shardengine.core.parts import Core
from shardengine.errors import CommunicationError, UsageError
from shardengine.runtime import hooks
from shardengine.sharding import Elsewhere, LeftShards, inner

_log = logging.getLogger(__name__)
_APART = (
    "engine.close(): shard groups have stepped apart since they were averaged, so that the module has other weights on "
    "the ranks of another group; engine.average_replicas() before it makes them the same"
)


def _first_error() -> BaseException | None:
    """What is on its way, or being handled, on this rank; None where that is no failure."""
    error = sys.exception()
    ends_well = isinstance(error, StopIteration | StopAsyncIteration | GeneratorExit) or (
        isinstance(error, SystemExit) and not error.code
    )
    return None if ends_well else error


@contextmanager
def behind_the_first_error() -> Iterator[None]:
    """In a ``finally`` or an ``except`` the error that is there already stays the one that is seen: one that is raised
    inside of this is logged."""
    first = _first_error()
    try:
        yield
    except Exception as error:
        if first is None:
            raise
        _log.warning("engine.close() after %s: %s: %s", type(first).__name__, type(error).__name__, error)


def part(core: Core, *, saves: bool) -> str:
    """Say that this rank closes its engine, and wait for the others where that is needed ([Note: Collective or not]).

    "" where all that follows may be collective; otherwise why not. saves: some are to tell.
    """
    failures = core.collectives.failures
    failures.leave("has closed its engine", Presence.CLOSING, error=_first_error())
    collective = core.stage.moves_weights or saves or (core.mesh.owned and core.mesh.made_default_group)
    if not collective and not failures.gave_up:
        return ""
    said = f"this one gave up: {failures.gave_up}" if failures.gave_up else meeting.meet_to_close(failures)
    return said and f"engine.close() on rank {core.mesh.rank}: expected every rank to close its engine, but {said}"


def dissolve(core: Core, model: nn.Module, *, restore: bool = True, ends_groups: bool = True, alone: str = "") -> None:
    """Take the hooks off and give every parameter of ``model`` whole weights in memory of its own; collective.

    restore: False leaves weights that are sharded as they are, for the next engine (sharding/left_shards.py).

    Who holds a view of the old memory keeps it. Weights in host memory, for which there was no room, become the
    parameters' on the host. Where weights cannot be read or gathered, those parameters stay without. Everything else is
    let go of before the error is raised. ends_groups: owned process groups end, too. alone: why the other ranks are not
    here; ``CommunicationError`` where weights would have to be gathered.
    """
    if core.step_state.replicas.since and core.mesh.rank == 0:
        _log.warning(_APART)
    core.attachments.unhook()
    core.reducer.early_use.wait()
    orderly = left = False
    with ExitStack() as last:  # each of these is done whatever the others raise, from the last one up
        if ends_groups and core.mesh.owned:
            last.callback(lambda: core.mesh.destroy(orderly=orderly))
        last.callback(core.attachments.unmark)
        last.callback(core.collectives.failures.close)
        last.callback(core.pool.forget)
        last.callback(core.reducer.abandon)
        try:
            if alone and ends_groups and core.mesh.owned:
                core.mesh.break_off(alone)  # before anything here waits for the device
            with core.collectives.failures.reports_failure("close", lambda error: "gathering the weights"):
                if alone and core.stage.moves_weights:
                    raise CommunicationError(f"{alone}. The module's weights stay spread over the ranks")
                if core.stage.moves_weights:
                    restore = _agree(core, restore)
                if restore:
                    _leave_weights(core, model)
                else:
                    _leave_shards(core, model)
                    left = True
        finally:
            if not left:
                core.tiers.close()
        if alone:
            _log.warning("%s", alone)
            return
        core.reducer.discard()  # what is in flight after a failure may have no end but the timeout
        orderly = True


def _agree(core: Core, restore: bool) -> bool:
    """What ``restore`` is on every rank: where they differ nothing shall be lost; collective."""
    given = core.collectives.exchange_objects(restore, "engine.close()")
    if len(set(given)) > 1:
        _log.warning(
            "engine.close(): expected the same restore on every rank, got False on ranks %s and True on the others; "
            "the weights are gathered",
            [rank for rank, each in enumerate(given) if not each],
        )
    return any(given)


def _leave_weights(core: Core, model: nn.Module) -> None:
    core.await_weights()
    core.schedule.reshard_all()
    with suppress(UsageError):  # of what was moved or cast
        core.written.place()
    for unit in core.units:
        # what was moved to host memory is on this rank, all of it
        offloaded = any(flat_buffer.offloaded is not None for flat_buffer in unit.flat_buffers)
        if core.stage.moves_weights and not offloaded:
            unit.unshard(core.collectives)
            unit.wait_for_unshard()
        views = {flat_buffer: flat_buffer.views_now() for flat_buffer in unit.flat_buffers}
        for member in unit.members:
            member.show(views[member.flat_buffer][member.slot].clone())
        for flat_buffer in unit.flat_buffers:
            flat_buffer.forsake()
    inner.join(model)


def _leave_shards(core: Core, model: nn.Module) -> None:
    """What the next engine takes over stays on ``model``; where weights rest whole these are the parameters', too."""
    core.await_weights()
    core.schedule.reshard_all()
    core.adopt_written_weights()
    hides = core.stage.moves_weights
    left = LeftShards(core.layout, core.partition.inside, core.mesh.rank, core.tiers, hides=hides)
    elsewhere = Elsewhere("its weights belong to no engine", left.refusal())
    with torch.inference_mode(False), torch.no_grad():
        for unit in core.units:
            for member in unit.members:
                if hides:
                    member.hide(elsewhere)
                else:
                    member.show(member.view.clone())
            for bucket in unit.buckets():
                left.keep(bucket)
            for flat_buffer in unit.flat_buffers:
                flat_buffer.forsake()

    def refuse() -> None:
        raise UsageError(left.refusal())

    left.attach(model, hooks.attach_barrier(model, refuse) if hides else [])
