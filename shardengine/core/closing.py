"""The end of an engine, also after a failure: gives back the module and frees everything else.

The module is an ordinary one again, or its weights stay sharded for the next engine. Must not know: the use of the
engine before.

[Note: Collective or not] The end has collectives if weights are gathered, if the result of a save is reported on all
ranks, and if the engine made the default process group. Ranks meet through the store before those collectives.
Otherwise a rank that still trains would take the gathers of an end for its own.
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
    """The exception that this rank is handling, or that is passing through; None if it is no failure."""
    error = sys.exception()
    ends_well = isinstance(error, StopIteration | StopAsyncIteration | GeneratorExit) or (
        isinstance(error, SystemExit) and not error.code
    )
    return None if ends_well else error


@contextmanager
def behind_the_first_error() -> Iterator[None]:
    """Keep the first error: if one is being handled already, log an error from this ``with`` instead of raising it."""
    first = _first_error()
    try:
        yield
    except Exception as error:
        if first is None:
            raise
        _log.warning("engine.close() after %s: %s: %s", type(first).__name__, type(error).__name__, error)


def part(core: Core, *, saves: bool) -> str:
    """Report that this rank closes its engine, and wait for the others if necessary ([Note: Collective or not]).

    Returns "" if all that follows may be collective, otherwise the reason why not. saves: there are saves to report.
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

    restore: False leaves sharded weights as they are, for the next engine (sharding/left_shards.py) · ends_groups: also
    end process groups that the mesh owns · alone: the reason why the other ranks are not here. If weights would have to
    be gathered then, it raises ``CommunicationError``.

    A view of the old memory stays valid. Weights in host memory that do not fit onto the device become parameters on
    the host. Parameters whose weights cannot be read or gathered stay without. Everything else is freed before an error
    is raised.
    """
    if core.step_state.replicas.since and core.mesh.rank == 0:
        _log.warning(_APART)
    core.attachments.unhook()
    core.reducer.early_use.wait()
    orderly = left = False
    with ExitStack() as last:  # each of these runs even if others raise, last one first
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
                    raise CommunicationError(
                        f"{alone}. The module's weights stay spread over the ranks", code="close-without-other-ranks"
                    )
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
        core.reducer.discard()  # after a failure a work in flight may end by timeout only
        orderly = True


def _agree(core: Core, restore: bool) -> bool:
    """``restore``, agreed over all ranks: if they differ it is True, so that nothing is lost; collective."""
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
    with suppress(UsageError):  # for parameters that were moved or cast
        core.written.place()
    for unit in core.units:
        # offloaded weights are whole on this rank
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
    """Leave on ``model`` the state that the next engine takes over; whole weights stay with the parameters."""
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
        raise UsageError(left.refusal(), code="close-unrestored-model-used")

    left.attach(model, hooks.attach_barrier(model, refuse) if hides else [])
