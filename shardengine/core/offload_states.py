"""Freeing the device between two phases of a program: states and weights that rest there move to host memory, and back.

Owns: what can be moved, and when. Must not know: what it is used for.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from shardengine.core.parts import Core
from shardengine.errors import UsageError
from shardengine.optim import ShardedOptimizer
from shardengine.runtime import UnshardState, hooks
from shardengine.sharding import AWAY

STATES = ("optimizer", "weights")
"""What can leave the device: master weights with optimizer state, and the weights (the shards, where they are)."""


def offload(
    core: Core, optimizer: ShardedOptimizer | None, module: nn.Module, include: Iterable[str], *, pinned: bool
) -> None:
    """Move ``include`` of what rests on the device to host memory. See ``Engine.offload_states``."""
    wanted = {include} if isinstance(include, str) else set(include)
    if unknown := wanted - set(STATES):
        raise UsageError(f"offload_states: expected some of {', '.join(STATES)}, got {sorted(map(str, unknown))}")
    core.step_state.require("offload_states")
    if optimizer is not None:
        optimizer.await_reader()
    core.await_weights()
    core.schedule.reshard_all()
    core.adopt_written_weights()
    core.reducer.discard()
    with torch.inference_mode(False), torch.no_grad():  # what is made here outlives the caller's mode
        _move_to_host(core, module, wanted, pinned=pinned)
    core.pool.clear()
    core.mesh.platform.free_cached()


def _move_to_host(core: Core, module: nn.Module, wanted: set[str], *, pinned: bool) -> None:
    flat_buffers = [flat_buffer for unit in core.units for flat_buffer in unit.flat_buffers]
    core.step_state.note_offloaded(wanted)
    if "weights" in core.step_state.offloaded and not core.attachments.barriers:
        core.attachments.barriers.extend(hooks.attach_barrier(module, lambda: core.step_state.require("any")))
    if "optimizer" in wanted:
        for flat_buffer in flat_buffers:
            for bucket in flat_buffer.buckets:
                bucket.state_store.offload(pinned=pinned)
    if "weights" in wanted:
        for unit in core.units:
            for member in unit.members:
                member.hide(AWAY)
        for flat_buffer in flat_buffers:
            flat_buffer.offload(pinned=pinned)


def reload(core: Core) -> None:
    """The weights and states of ``core`` are back. After an error the engine still refuses; it may be tried again."""
    with torch.inference_mode(False), torch.no_grad():
        for unit in core.units if core.step_state.offloaded else ():
            for flat_buffer in unit.flat_buffers:
                flat_buffer.reload()
                for bucket in flat_buffer.buckets:
                    bucket.state_store.reload()
            if unit.state is UnshardState.UNSHARDED:
                unit.show()
    core.step_state.note_reloaded()
    core.attachments.unbar()
