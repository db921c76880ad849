"""How the process groups of an engine are made and how they end, with gloo and with NCCL.

Must not know: who uses them, when they end, which device a rank should use (devices).

[Note: Groups of NCCL] Each is bound to the rank's GPU, so torch makes its communicator at once, and has run a barrier
before ``make`` returns. The barrier is the first collective, which makes the connections; otherwise the first forward
would make them, after memory was measured. The default group has no communicator as long as nothing is sent over it. So
nothing is: at the end ranks wait for each other over the store. Gathers have streams of high priority: their kernels
start before the rest of a product that fills the GPU, while reductions have until the step.
NCCL_LAUNCH_ORDER_IMPLICIT=1 makes kernels of two communicators start in the order of their calls. The engine does not
set it: it is for GPUs on which the kernels of both do not fit at once, and costs every launch some time.

[Note: Who ends a wait] The engine's own error names the missing rank; NCCL's watchdog only ends the process. So the
watchdog's limit is ``_NCCL_LATER_S`` later than ``timeout_s``, when the watcher has already broken off the collectives
in flight. TORCH_NCCL_DUMP_ON_TIMEOUT=0, because a timeout that one rank's watchdog noticed would otherwise end all
others 8 minutes later through a key in the store, even those that continued with new groups.
TORCH_NCCL_ASYNC_ERROR_HANDLING stays unchanged (3, under torchrun 1: the process ends). The watcher cannot run if the
main thread waits for the GPU and holds Python's lock, and then nothing else helps. With 2 the process would continue
with the output of the broken collective. The heartbeat (TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC, 480) watches torch's own
thread and not the collectives, so it may be shorter than they. torch reads these variables when a group is made: a
default process group that the caller has made keeps the earlier values.

[Note: Aborting] ``destroy_process_group`` waits for the kernels of a group of NCCL. A kernel whose peer never came does
not end by itself, and all later work of the GPU waits behind it. ``abort`` signals the kernels of one communicator to
end and then may wait for the whole GPU, on which those of the other may still run. So both are aborted at the same
time, each from a thread of its own: both are signalled before either waits. NCCL's group calls, which torch puts around
the aborts of several groups, apply to the thread that makes them, and torch aborts each group in another one. An
aborted group is never aborted again, and ``destroy_process_group`` then only forgets it.
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
        """The group whose collectives these are compared with.

        Every rank issues all kinds of gathers in one order, and all kinds of reductions. This does not hold for
        collectives across groups, because each of them follows another collective.
        """
        return _COUNTS_AS.get(self, self)

    @property
    def is_across(self) -> bool:
        """Whether its ranks have the same place in their node or shard group."""
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
"""The ranks of every group, by name."""


class GroupKind:
    """Groups of gloo, on the CPU.

    of_shard_groups: the groups of a hybrid mesh, each with a part of the ranks · breaks_off: after a fault, collectives
    in flight have to be broken off before the groups can end, and a watcher has to observe hosts that wait for their
    device.
    """

    breaks_off = False
    of_shard_groups: tuple[GroupName, ...] = (
        *(GroupName.GATHER_INSIDE, GroupName.GATHER_ACROSS, *OF_NODES),
        *(GroupName.EVALUATE_INSIDE, GroupName.EVALUATE_ACROSS),
    )

    def make(self, timeout_s: float, device: torch.device, ranks: Sequence[int] = ()) -> dict[str, Any]:
        """Return the groups of a ``Mesh``, by field, ready for use; collective.

        ranks: of the default process group, () for all.
        """
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
        """Return, for each name, the group that this rank is in, ready for use; collective.

        members: the ranks of each group · alone: only ranks of this rank's groups call this.
        """
        return _parts(members, lambda name: _gloo(timeout_s), alone=alone)

    def end(self, groups: Mapping[Any, Group]) -> None:
        """End ``groups``, in the order of fields. This breaks off the collectives in flight on a group of gloo."""
        for group in groups.values():
            dist.destroy_process_group(group)

    def break_off(self, groups: Mapping[Any, Group]) -> None:
        """End the collectives in flight on ``groups`` now, if ``breaks_off``; ``CommunicationError`` if that fails."""


class NcclGroupKind(GroupKind):
    """Groups of NCCL on the rank's GPU, beside one of gloo for decisions ([Note: Groups of NCCL])."""

    breaks_off = True
    of_shard_groups = (GroupName.GATHER_INSIDE, GroupName.GATHER_ACROSS, *OF_NODES)

    def make(self, timeout_s: float, device: torch.device, ranks: Sequence[int] = ()) -> dict[str, Any]:
        """As ``GroupKind.make``; all are on ``device`` but the one for decisions."""
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
                "cannot use its GPU again. Start the ranks again",
                code="nccl-abort-failed",
            )


def _new_group(ranks: Sequence[int], **options: Any) -> Any:
    """Return a group of ``ranks``, which alone call this, or of all ranks for ().

    [Note: Names of groups] The members of a group find each other in the store by its name. If only members take part,
    torch makes the name from their numbers and from how many groups the process knows. That name differs on ranks that
    are in more groups. It may also be the name of a group that has ended, whose addresses are still in the store. So
    each member counts for itself the groups of these ranks that it has made.
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
    """Return the group of this rank for each name.

    options: made for each group, because torch writes into those of NCCL.
    """
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
    """Send once over each group ([Note: Groups of NCCL])."""
    for group in groups:
        dist.barrier(group, device_ids=[device.index])


class NamedGroupKind(GroupKind):
    """Groups of another backend that torch knows by name, beside one of gloo for decisions.

    They end as those of gloo do (devices, [Note: Other backends]).
    """

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
    """Return the kind of groups for ``backend``."""
    if backend == "nccl":
        return NcclGroupKind()
    return GroupKind() if backend in ("gloo", "none") else NamedGroupKind(backend)


def nccl_defaults() -> None:
    """Set the variables that torch reads when it makes a group, unless the user has ([Note: Who ends a wait])."""
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")


def _gloo(timeout_s: float) -> dict[str, Any]:
    return {"backend": "gloo", "timeout": timedelta(seconds=timeout_s)}


def _nccl(timeout_s: float, device: torch.device, *, high_priority: bool) -> dict[str, Any]:
    timeout = timedelta(seconds=timeout_s + _NCCL_LATER_S)
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=high_priority)
    options._timeout = timeout  # torch warns if it differs from that of the call
    return {"backend": "nccl", "timeout": timeout, "pg_options": options, "device_id": device}
