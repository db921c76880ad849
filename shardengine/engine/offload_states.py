"""Freeing the device between two phases of a program: states and weights that rest there move to host memory, and back.

Owns: what can be moved, and when. Must not know: what it is used for.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from shardengine.engine.checkpointing import Checkpointing
from shardengine.engine.core import Core
from shardengine.engine.recovery import reports_failure
from shardengine.errors import UsageError
from shardengine.offload import is_apart
from shardengine.runtime import Weights, hooks

STATES = ("optimizer", "weights")
"""What can leave the device: master weights with optimizer state, and the weights (the shards, where they are)."""


class Phases(Checkpointing):
    """The part of the engine that frees the device for somebody else."""

    @reports_failure("offload_states")
    def offload_states(self, include: Iterable[str] = STATES, *, pin_memory: bool = True) -> None:
        """Move what rests on the device to host memory until ``reload_states``, and free transient buffers. Local.

        include: "optimizer" (master weights and optimizer state), "weights", or both. Between two steps. The engine
        refuses to work meanwhile; so does the module where the weights are away, and its parameters show NaN. What
        rests in another tier stays there; module buffers and frozen parameters that are not sharded stay on the device,
        and so does memory that somebody else holds a view of (``module.state_dict()``). On a GPU what was freed is
        given back to the system. pin_memory: page-locked, so that a GPU copies it fast.
        """
        core = super()._need_core()
        wanted = {include} if isinstance(include, str) else set(include)
        if unknown := wanted - set(STATES):
            raise UsageError(f"offload_states: expected some of {', '.join(STATES)}, came {sorted(map(str, unknown))}")
        core.schedule.settle()
        if core.attachments.shown or not core.window.is_first:
            raise UsageError(
                "offload_states: expected it between two steps, and outside of full_params(), came inside of one (rank "
                f"{core.mesh.rank}); call engine.step() or engine.zero_grad() first"
            )
        if self.optimizer is not None:
            self.optimizer.require_whole()
            self.optimizer.await_reader()
        core.await_weights()
        core.schedule.rest()
        core.adopt_written_weights()
        core.reducer.release()
        with torch.inference_mode(False), torch.no_grad():  # what is made here outlives the caller's mode
            _park(core, self.module, wanted, pinned=pin_memory)
        core.pool.clear()
        if is_apart(core.mesh.device):
            torch.cuda.empty_cache()  # what torch keeps for itself is free for nobody else

    def reload_states(self) -> None:
        """Everything that ``offload_states`` moved is back where it rests. Local; nothing happens where it is there."""
        unpark(super()._need_core())

    def _need_core(self) -> Core:
        core = super()._need_core()
        _require_back(core)
        return core


def _require_back(core: Core) -> None:
    if core.attachments.parked:
        raise UsageError(
            f"the engine's {' and '.join(sorted(core.attachments.parked))} are in host memory since offload_states() "
            f"(rank {core.mesh.rank}): expected engine.reload_states() before anything else"
        )


def _park(core: Core, module: nn.Module, wanted: set[str], *, pinned: bool) -> None:
    flat_buffers = [flat_buffer for unit in core.units for flat_buffer in unit.flat_buffers]
    core.attachments.parked |= wanted
    if "weights" in core.attachments.parked and not core.attachments.barriers:
        core.attachments.barriers.extend(hooks.attach_barrier(module, lambda: _require_back(core)))
    if "optimizer" in wanted:
        for flat_buffer in flat_buffers:
            for bucket in flat_buffer.buckets:
                bucket.shelf.park(pinned=pinned)
    if "weights" in wanted:
        for unit in core.units:
            for member in unit.members:
                member.show(member.flat_buffer.poisons[member.slot])
        for flat_buffer in flat_buffers:
            flat_buffer.park(pinned=pinned)


def unpark(core: Core) -> None:
    """The weights and states of ``core`` are back. After an error the engine still refuses; it may be tried again."""
    with torch.inference_mode(False), torch.no_grad():
        for unit in core.units if core.attachments.parked else ():
            for flat_buffer in unit.flat_buffers:
                flat_buffer.unpark()
                for bucket in flat_buffer.buckets:
                    bucket.shelf.unpark()
            if unit.state is Weights.FULL:
                unit.show()
    core.attachments.parked.clear()
    core.attachments.unbar()
