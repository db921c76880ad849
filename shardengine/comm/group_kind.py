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
import hashlib
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

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
    GATHER_INSIDE = "gather inside"
    GATHER_ACROSS = "gather across"
    EVALUATE_INSIDE = "evaluate inside"
    EVALUATE_ACROSS = "evaluate across"

    @property
    def counts_as(self) -> GroupName:
        """Whose collectives these are compared with: every rank issues all kinds of gathers in one order, and all kinds
        of reductions. Not so what follows another collective, across."""
        return _COUNTS_AS.get(self, self)

    @property
    def is_across(self) -> bool:
        """Whether its ranks are those that have the same place in their node, or shard group."""
        return self in (GroupName.ACROSS, GroupName.GATHER_ACROSS, GroupName.EVALUATE_ACROSS)


_COUNTS_AS = {
    GroupName.EVALUATE: GroupName.GATHER,
    GroupName.GATHER_INSIDE: GroupName.GATHER,
    GroupName.EVALUATE_INSIDE: GroupName.GATHER,
    GroupName.INSIDE: GroupName.REDUCE,
}
OF_NODES = (GroupName.INSIDE, GroupName.ACROSS)
"""For reductions in two steps."""


Members = Mapping[GroupName, Sequence[Sequence[int]]]
"""Of each name the ranks of every group."""


class GroupKind:
    """Groups of gloo, on the CPU.

    of_shard_groups: the groups of a hybrid mesh, each with a part of the ranks · breaks_off: whether what is in flight
    after a fault has to be broken off before the groups can end, and a watcher has to look after hosts that wait for
    their device.
    """

    breaks_off = False
    of_shard_groups: tuple[GroupName, ...] = (
        *(GroupName.GATHER_INSIDE, GroupName.GATHER_ACROSS, *OF_NODES),
        *(GroupName.EVALUATE_INSIDE, GroupName.EVALUATE_ACROSS),
    )

    def make(self, timeout_s: float, device: torch.device, ranks: Sequence[int] = ()) -> dict[str, Any]:
        """Those of a ``Mesh``, by field, ready for use; collective. ranks: of the default process group, () for all."""
        names = (GroupName.GATHER, GroupName.REDUCE, GroupName.CONTROL, GroupName.EVALUATE)
        return {name.value: _new_group(ranks, **_gloo(timeout_s)) for name in names}

    def make_parts(
        self,
        timeout_s: float,
        device: torch.device,
        members: Mapping[GroupName, Sequence[Sequence[int]]],
        *,
        alone: bool,
    ) -> dict[GroupName, Any]:
        """Of each name the group that this rank is in, ready for use; collective. members: the ranks of each group ·
        alone: only ranks of this rank's groups call this."""
        return _parts(members, lambda name: _gloo(timeout_s), alone=alone)

    def end(self, groups: Mapping[Any, Group]) -> None:
        """They end; in the order of fields. What is in flight on a group of gloo is broken off by that."""
        for group in groups.values():
            dist.destroy_process_group(group)

    def break_off(self, groups: Mapping[Any, Group]) -> None:
        """What is in flight on them ends now, where ``breaks_off``; ``CommunicationError`` where that fails."""


class NcclGroupKind(GroupKind):
    """Groups of NCCL on the rank's GPU, beside one of gloo for decisions ([Note: Groups of NCCL])."""

    breaks_off = True
    of_shard_groups = (GroupName.GATHER_INSIDE, GroupName.GATHER_ACROSS, *OF_NODES)

    def make(self, timeout_s: float, device: torch.device, ranks: Sequence[int] = ()) -> dict[str, Any]:
        """As ``GroupKind.make``; all on ``device`` but that for decisions."""
        kinds = {
            GroupName.GATHER: _nccl(timeout_s, device, high_priority=True),
            GroupName.REDUCE: _nccl(timeout_s, device, high_priority=False),
            GroupName.CONTROL: _gloo(timeout_s),
        }
        groups = {name.value: _new_group(ranks, **options) for name, options in kinds.items()}  # in this order
        _warm_up((groups[name] for name in groups if name != GroupName.CONTROL), device)
        return groups

    def make_parts(
        self,
        timeout_s: float,
        device: torch.device,
        members: Mapping[GroupName, Sequence[Sequence[int]]],
        *,
        alone: bool,
    ) -> dict[GroupName, Any]:
        """As ``GroupKind.make_parts``, on ``device``."""
        groups = _parts(members, lambda name: _nccl(timeout_s, device, high_priority=name not in OF_NODES), alone=alone)
        _warm_up(groups.values(), device)
        return groups

    def break_off(self, groups: Mapping[Any, Group]) -> None:
        """Abort the groups of NCCL, all at once ([Note: Aborting])."""
        aborts = [group.abort for name, group in groups.items() if group is not None and name is not GroupName.CONTROL]
        problems = all_at_once(aborts, _ABORT_S)
        if problems:
            raise CommunicationError(
                f"expected NCCL's communicators to end when they are aborted, got {'; '.join(problems)}: this process "
                "cannot use its GPU again. Start the ranks again"
            )


def _new_group(ranks: Sequence[int], **options: Any) -> Any:
    """Of some ranks, which alone call this, or with () of all.

    [Note: Names of groups] The members of a group find each other in the store by its name. Torch makes that of their
    numbers and of how many groups the process knows, if only they take part: it is another one on ranks that are in
    more groups, and one that was used already where groups have ended since, whose addresses are still there. So they
    count, each for itself, the groups of these ranks that they have made.
    """
    if not ranks:
        return dist.new_group(**options)
    members = hashlib.sha1("-".join(map(str, ranks)).encode(), usedforsecurity=False).hexdigest()
    shared: Any = dist.distributed_c10d._get_default_store()
    name = f"shardengine/{members}/{shared.add(f'shardengine/groups/{members}/{dist.get_rank()}', 1)}"
    with _naming, patch.object(dist.distributed_c10d, "_hash_ranks_to_str", lambda ranks: name):
        return dist.new_group([*ranks], use_local_synchronization=True, **options)


_naming = threading.Lock()


def _parts(
    members: Members,
    options: Callable[[GroupName], dict[str, Any]],
    *,
    alone: bool,
) -> dict[GroupName, Any]:
    """options: made for each group, because torch writes into those of NCCL."""
    found: dict[GroupName, Any] = {}
    for name, groups in members.items():
        for ranks in groups:
            mine = dist.get_rank() in ranks
            if alone and mine:
                found[name] = _new_group(ranks, **options(name))
            elif not alone:  # every rank takes part in making each
                group = dist.new_group([*ranks], **options(name))
                found |= {name: group} if mine else {}
    return found


def _warm_up(groups: Iterable[Any], device: torch.device) -> None:
    """Each sends once ([Note: Groups of NCCL])."""
    for group in groups:
        dist.barrier(group, device_ids=[device.index])


class NamedGroupKind(GroupKind):
    """Groups of another backend that torch knows by name, beside one of gloo for decisions (devices, [Note: Other
    backends]). They end as those of gloo do."""

    of_shard_groups = (GroupName.GATHER_INSIDE, GroupName.GATHER_ACROSS, *OF_NODES)

    def __init__(self, backend: str) -> None:
        self._backend = backend

    def make(self, timeout_s: float, device: torch.device, ranks: Sequence[int] = ()) -> dict[str, Any]:
        """As ``GroupKind.make``."""
        own = {"backend": self._backend, "timeout": timedelta(seconds=timeout_s)}
        kinds = {GroupName.GATHER: own, GroupName.REDUCE: own, GroupName.CONTROL: _gloo(timeout_s)}
        return {name.value: _new_group(ranks, **options) for name, options in kinds.items()}

    def make_parts(
        self,
        timeout_s: float,
        device: torch.device,
        members: Mapping[GroupName, Sequence[Sequence[int]]],
        *,
        alone: bool,
    ) -> dict[GroupName, Any]:
        """As ``GroupKind.make_parts``."""
        own = {"backend": self._backend, "timeout": timedelta(seconds=timeout_s)}
        return _parts(members, lambda name: own, alone=alone)


def kind_of(backend: str) -> GroupKind:
    """The kind of the groups that ``backend`` has."""
    if backend == "nccl":
        return NcclGroupKind()
    return GroupKind() if backend in ("gloo", "none") else NamedGroupKind(backend)


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
