"""Frees the device between two phases of a program: moves states and weights to host memory, and back.

Owns: which state can be moved, and when. Must not know: the use of the freed memory.
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
"""The state that can leave the device: master weights with optimizer state, and weights (shards, if sharded)."""


def offload(
    core: Core, optimizer: ShardedOptimizer | None, module: nn.Module, include: Iterable[str], *, pinned: bool
) -> None:
    """Move the part ``include`` of the state on the device to host memory. See ``Engine.offload_states``."""
    wanted = {include} if isinstance(include, str) else set(include)
    if unknown := wanted - set(STATES):
        raise UsageError(
            f"offload_states: expected some of {', '.join(STATES)}, got {sorted(map(str, unknown))}",
            code="offload-states-unknown-name",
        )
    core.step_state.require("offload_states")
    if optimizer is not None:
        optimizer.await_reader()
    core.await_weights()
    core.schedule.reshard_all()
    core.adopt_written_weights()
    core.reducer.discard()
    with torch.inference_mode(False), torch.no_grad():  # tensors made here outlive the caller's mode
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
    """Move the weights and states of ``core`` back.

    After an error the engine still rejects other calls, and this can be tried again.
    """
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
