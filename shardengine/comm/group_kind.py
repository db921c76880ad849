"""How the process groups of an engine are made and how they end, with gloo and with NCCL.

Must not know: who uses them, when they end, which device a rank should use (devices).

[Note: Groups of NCCL] Each is bound to the rank's GPU, so that torch makes its communicator at once, and has run a
barrier before ``make`` returns: connections are made by the first collective, which else would be one of the first
forward, after memory was measured. The default group has no communicator as long as nothing is sent over it, so
nothing is: at the end ranks wait for each other over the store. Gathers have streams of high priority: their kernels
start before the rest of a product that fills the GPU, while reductions have until the step.
NCCL_LAUNCH_ORDER_IMPLICIT=1, by which kernels of two communicators start in the order of their calls, stays the
user's to set: it is for GPUs on which the kernels of both do not fit at once, and costs every launch some time.

[Note: Who ends a wait] The engine's own error names the rank that is missing, NCCL's watchdog only ends the process. So
its limit is ``_NCCL_LATER_S`` later than ``timeout_s``, when the watcher has broken off what is in flight.
TORCH_NCCL_DUMP_ON_TIMEOUT=0, because what one rank's watchdog noticed would else end all others 8 minutes later through
a key in the store, also those that trained on with new groups. TORCH_NCCL_ASYNC_ERROR_HANDLING stays as it is (3, under
torchrun 1: the process ends): where the watcher cannot run, because the main thread waits for the GPU and holds
Python's lock, nothing else helps, and with 2 the process would go on with what the broken collective left. The
heartbeat (TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC, 480) watches torch's own thread and not the collectives, so it may be
shorter than they. torch reads these variables when a group is made: a default process group that the caller has made
keeps what was set before.

[Note: Aborting] ``destroy_process_group`` waits for the kernels of a group of NCCL, and one whose peer never came does
not end by itself; everything that the GPU was given behind it waits, too. ``abort`` tells the kernels of one
communicator to end and then may wait for the whole GPU, on which those of the other may still run. So both are aborted
at the same time, each from a thread of its own: both are told before either waits. NCCL's group calls, which torch puts
around the aborts of several groups, hold in the thread that makes them, and torch aborts each group in another one.
A group that was aborted is aborted never again, and ``destroy_process_group`` then only forgets it.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shardengine.comm import nodes
from shardengine.comm.threads import all_at_once
from shardengine.comm.wire import Group
from shardengine.errors import CommunicationError

_NCCL_LATER_S = 120.0
_ABORT_S = 60.0


class GroupName(enum.StrEnum):
    """The process groups of a ``Mesh``. In each, collectives are numbered as they are issued."""

    GATHER = "gather"
    REDUCE = "reduce"
    CONTROL = "control"
    EVALUATE = "evaluate"
    INSIDE = "inside"
    ACROSS = "across"

    @property
    def counts_as(self) -> GroupName:
        """Whose collectives these are compared with: every rank issues both kinds of gathers in one order, and both
        kinds of reductions."""
        return {GroupName.EVALUATE: GroupName.GATHER, GroupName.INSIDE: GroupName.REDUCE}.get(self, self)


class GroupKind:
    """Groups of gloo, on the CPU.

    breaks_off: whether what is in flight after a fault has to be broken off before the groups can end, and a watcher
    has to look after hosts that wait for their device.
    """

    breaks_off = False

    def make(self, timeout_s: float, device: torch.device) -> dict[str, Any]:
        """Those of a ``Mesh``, by field, ready for use; collective."""
        names = (GroupName.GATHER, GroupName.REDUCE, GroupName.CONTROL, GroupName.EVALUATE)
        return {name.value: dist.new_group(**_gloo(timeout_s)) for name in names}

    def make_of_nodes(self, timeout_s: float, device: torch.device, count: int) -> dict[GroupName, Any]:
        """Those inside of this rank's node, and across the ``count`` nodes, ready for use; collective."""
        return _of_nodes(count, lambda: _gloo(timeout_s))

    def end(self, groups: Mapping[GroupName, Group]) -> None:
        """They end; in the order of fields. What is in flight on a group of gloo is broken off by that."""
        for group in groups.values():
            dist.destroy_process_group(group)

    def break_off(self, groups: Mapping[GroupName, Group]) -> None:
        """What is in flight on them ends now, where ``breaks_off``; ``CommunicationError`` where that fails."""


class NcclGroupKind(GroupKind):
    """Groups of NCCL on the rank's GPU, beside one of gloo for decisions ([Note: Groups of NCCL])."""

    breaks_off = True

    def make(self, timeout_s: float, device: torch.device) -> dict[str, Any]:
        """As ``GroupKind.make``; all on ``device`` but that for decisions."""
        kinds = {
            GroupName.GATHER: _nccl(timeout_s, device, high_priority=True),
            GroupName.REDUCE: _nccl(timeout_s, device, high_priority=False),
            GroupName.CONTROL: _gloo(timeout_s),
        }
        groups = {name.value: dist.new_group(**options) for name, options in kinds.items()}  # in this order
        _warm_up((groups[name] for name in groups if name != GroupName.CONTROL), device)
        return groups

    def make_of_nodes(self, timeout_s: float, device: torch.device, count: int) -> dict[GroupName, Any]:
        """As ``GroupKind.make_of_nodes``, on ``device``."""
        groups = _of_nodes(count, lambda: _nccl(timeout_s, device, high_priority=False))
        _warm_up(groups.values(), device)
        return groups

    def break_off(self, groups: Mapping[GroupName, Group]) -> None:
        """Abort the groups of NCCL, all at once ([Note: Aborting])."""
        aborts = [group.abort for name, group in groups.items() if group is not None and name is not GroupName.CONTROL]
        problems = all_at_once(aborts, _ABORT_S)
        if problems:
            raise CommunicationError(
                f"expected NCCL's communicators to end when they are aborted, got {'; '.join(problems)}: this process "
                "cannot use its GPU again. Start the ranks again"
            )


def _of_nodes(count: int, options: Callable[[], dict[str, Any]]) -> dict[GroupName, Any]:
    """options: made for each group, because torch writes into those of NCCL."""
    found: dict[GroupName, Any] = {}
    parts = nodes.members(dist.get_world_size(), count)
    for name, groups in zip((GroupName.INSIDE, GroupName.ACROSS), parts, strict=True):
        for ranks in groups:  # every rank takes part in making each
            group = dist.new_group(ranks, **options())
            if dist.get_rank() in ranks:
                found[name] = group
    return found


def _warm_up(groups: Iterable[Any], device: torch.device) -> None:
    """Each sends once ([Note: Groups of NCCL])."""
    for group in groups:
        dist.barrier(group, device_ids=[device.index])


def kind_of(backend: str) -> GroupKind:
    """The kind of the groups that ``backend`` has."""
    return NcclGroupKind() if backend == "nccl" else GroupKind()


def nccl_defaults() -> None:
    """What torch reads when it makes a group ([Note: Who ends a wait]), where the user has not said it."""
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")


def _gloo(timeout_s: float) -> dict[str, Any]:
    return {"backend": "gloo", "timeout": timedelta(seconds=timeout_s)}


def _nccl(timeout_s: float, device: torch.device, *, high_priority: bool) -> dict[str, Any]:
    timeout = timedelta(seconds=timeout_s + _NCCL_LATER_S)
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=high_priority)
    options._timeout = timeout  # torch warns where it differs from that of the call
    return {"backend": "nccl", "timeout": timeout, "pg_options": options, "device_id": device}
