"""Process groups, per axis and purpose, built by one function and passed in.

Must not know: buckets, modules, the data sent over the groups, which device a rank should use (devices), how the groups
of a backend are made (group_kind).

Traffic runs over two groups, because a group executes its collectives in the order of issue: gathers must not queue
behind reductions. Decisions between ranks (norms, flags, handshakes) use a third group on CPU. gloo ends the process
when ranks give a collective different sizes, which happens if one rank evaluates alone while the others train. So with
gloo the gathers of forwards without grad have a fourth group: then the ranks wait for each other, which is detected and
reported. When an engine adds gradients node by node first (nodes: [Note: Two steps]), each node gets a group, and each
place in a node.

A hybrid mesh has two axes. ``Axis.INSIDE`` are the consecutive ranks of a shard group. ``Axis.ACROSS`` are the ranks
that have the same place in their groups. Each axis has groups of its own for gathers, reductions and evaluation. Common
decisions, and data that is sent once, use the groups of all ranks.

The default process group is torch's, and the only state that all meshes of a process share. If ``build`` made it, it
ends with the process and not with an engine. Another engine may run over it, and torch cannot join a second time under
torchrun with gloo: the new group meets the addresses of the old one in the launcher's store, and hangs.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import json
import logging
import os
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardengine.comm import devices, nodes, rendezvous
from shardengine.comm.breaking_off import TOGETHER_S, BreakingOff, come_together
from shardengine.comm.group_kind import (
    OF_NODES,
    GroupKind,
    GroupName,
    kind_of,
    nccl_defaults,
)
from shardengine.comm.nodes import Nodes
from shardengine.comm.threads import all_at_once, ending_threads
from shardengine.comm.wire import Group, Wire
from shardengine.errors import CommunicationError, UsageError
from shardengine.offload import Platform
from shardengine.stages import Axis

_log = logging.getLogger(__name__)
_NAMED = 8
"""An error names at most this many ranks."""
_WARN_AFTER_S = 10.0
"""A rank that waits longer for others to join logs it; torch waits silently."""


class Store(Protocol):
    """The part of torch's store that is used."""

    def set(self, key: str, value: str) -> None:
        """Put a text."""

    def get(self, key: str) -> bytes:
        """Return the text of a key; waits until it is there."""

    def check(self, keys: list[str]) -> bool:
        """Whether all of ``keys`` are there."""

    def add(self, key: str, amount: int) -> int:
        """Add to a number that begins at 0; return the new one."""

    def delete_key(self, key: str) -> bool:
        """Forget a key."""


class AxisGroup(NamedTuple):
    """The ranks of one collective. rank: this one's number among them · name, group: the process group that runs it."""

    rank: int
    ranks: int
    name: GroupName
    group: Group


@dataclass(frozen=True)
class Mesh:
    """The ranks that take part, and their process groups. Groups are None at world size 1, which sends nothing.

    channels: numbers, one for each engine over these groups; every rank takes them in the same order · evaluate: for
    gathers of forwards without grad; None: they use ``gather`` · owned: the groups end with the engine that uses them ·
    wire: carries out data operations · platform_of: makes ``platform`` for the device · nodes: which ranks share one ·
    node_groups: inside: this rank's node; across: its place in each node; empty before ``make_node_groups`` · replicas:
    the number of shard groups, of consecutive ranks; 1: the mesh is not hybrid · shard_groups: their process groups, by
    ``replicas``, of all meshes over these groups · global_ranks: the numbers of the ranks in the default process group,
    if the mesh does not have all of its ranks · beside: the other dimensions of the DeviceMesh that it is a part of, in
    words; "" for none · kind: makes and ends the groups · breaking_off: whether they were broken off, of all meshes
    over these groups.
    """

    rank: int
    ranks: int
    device: torch.device
    gather: Group = None
    reduce: Group = None
    control: Group = None
    backend: str = "none"
    made_default_group: bool = False
    timeout_s: float = 600.0
    channels: Iterator[int] = field(default_factory=itertools.count, compare=False, repr=False)
    evaluate: Group = None
    owned: bool = False
    wire: Wire = field(default_factory=Wire, compare=False, repr=False)
    platform_of: Callable[[torch.device], Platform] = field(default=Platform, compare=False, repr=False)
    nodes: Nodes = field(default_factory=Nodes)
    node_groups: dict[GroupName, Any] = field(default_factory=dict, compare=False, repr=False)
    replicas: int = 1
    shard_groups: dict[int, dict[GroupName, Any]] = field(default_factory=dict, compare=False, repr=False)
    global_ranks: tuple[int, ...] = ()
    beside: str = ""
    kind: GroupKind = field(default_factory=GroupKind, compare=False, repr=False)
    breaking_off: BreakingOff = field(default_factory=BreakingOff, compare=False, repr=False)

    @functools.cached_property
    def platform(self) -> Platform:
        """The device's streams and memory."""
        return self.platform_of(self.device)

    def make_node_groups(self) -> None:
        """Make ``node_groups``, unless an engine over these groups has; collective. Only if there are several nodes."""
        if not self.node_groups:
            self.node_groups.update(self._make_parts(OF_NODES, self.nodes.number))

    def _make_parts(self, names: Sequence[GroupName], parts: int) -> dict[GroupName, Any]:
        inside, across = nodes.members(self.ranks, parts)
        members = {
            name: [self._everywhere(ranks) for ranks in (across if name.is_across else inside)] for name in names
        }
        return self.kind.make_parts(self.timeout_s, self.device, members, alone=bool(self.global_ranks))

    def _everywhere(self, ranks: Sequence[int]) -> Sequence[int]:
        """Return the numbers of these ranks of the mesh in the default process group."""
        return [self.global_ranks[rank] for rank in ranks] if self.global_ranks else ranks

    def in_shard_groups_of(self, size: int) -> Mesh:
        """Return the mesh in shard groups of ``size`` ranks each, which must divide its ranks; collective."""
        replicas = self.ranks // size
        if replicas > 1 and replicas not in self.shard_groups:
            self.shard_groups[replicas] = self._make_parts(self.kind.of_shard_groups, replicas)
        return replace(self, replicas=replicas)

    def place_on(self, axis: Axis) -> tuple[int, int]:
        """Return this rank's number among the ranks that differ only along ``axis``, and their number."""
        group, place = divmod(self.rank, size := self.ranks // self.replicas)
        return {Axis.ALL: (self.rank, self.ranks), Axis.INSIDE: (place, size), Axis.ACROSS: (group, self.replicas)}[
            axis
        ]

    def line(self, axis: Axis, name: GroupName) -> AxisGroup:
        """Return the ranks along ``axis``, with their group for gathers, reductions or evaluation."""
        if axis is Axis.ALL or self.replicas == 1:
            if name is GroupName.EVALUATE and self.evaluate is None:
                name = GroupName.GATHER
            return AxisGroup(*self.place_on(axis), name, getattr(self, name))
        made, part = self.shard_groups[self.replicas], _PARTS[name, axis]
        if part not in made:
            part = _PARTS[GroupName.GATHER, axis]
        return AxisGroup(*self.place_on(axis), part, made[part])

    def members(self, name: GroupName) -> list[int]:
        """Return the ranks of the group ``name`` that contains this rank; [] for all."""
        if name in _FIELDS:
            return []
        inside, across = nodes.members(self.ranks, self.replicas if self.replicas > 1 else self.nodes.number)
        return next(ranks for ranks in (across if name.is_across else inside) if self.rank in ranks)

    def destroy(self, *, orderly: bool = True) -> None:
        """Destroy the groups; the default process group stays, until the process ends if ``build`` made it.

        orderly: wait for the other ranks first, without which a finished gloo program sometimes aborts.
        """
        if not dist.is_initialized():
            return
        if not orderly or self.breaking_off.reason:
            orderly = False
            self._hold_until_timeout()
            self.break_off("an engine of these groups has ended after a failure")
        if orderly and self.made_default_group:
            await_the_others(self)
            _orderly.set()  # not after a failure: a group in the middle of a collective may never come back
        self.kind.end(self._groups())

    def break_off(self, reason: str) -> None:
        """End the collectives in flight on groups of NCCL on all ranks, once.

        Every engine over these groups then raises ``reason`` at its next call (breaking_off,
        [Note: All ranks at once]). Groups of gloo need none of this. ``CommunicationError`` if the collectives cannot
        be ended.
        """
        if self.ranks == 1 or not self.kind.breaks_off:
            return
        with self.breaking_off.once(reason) as has_to:
            if has_to:
                all_at_once([lambda: come_together(self.store(), self.rank, self.ranks, reason)], 2 * TOGETHER_S)
                self.kind.break_off(self._groups())

    def abandon(self) -> None:
        """Leave the groups to the next ``build`` to destroy: nobody uses them any more, and they had no orderly end."""
        if self.owned:
            groups = {name: weakref.ref(group) for name, group in self._groups().items()}
            _abandoned.append(_Abandoned(self._over({}), groups))

    def renew(self) -> Mesh:
        """Return the same ranks over new, owned groups of the same default process group; collective.

        No other engine uses the old groups if they are owned, so they end, which breaks off the collectives in flight
        on them. Others stay. The collectives in flight on groups of NCCL are broken off in either case, because the
        device could do nothing else before they end. The default process group stays the caller's.
        ``CommunicationError`` if the old groups cannot be ended.
        """
        platform = self.platform  # its streams order the earlier work
        if self.ranks == 1:
            return replace(self, owned=True, platform_of=lambda device: platform)
        self.break_off("engine.reset() has made new groups")
        if self.kind.breaks_off:
            self.platform.synchronize()
        if self.owned:
            self._hold_until_timeout()
            self.kind.end(self._groups())
        new = replace(
            self,
            **self.kind.make(self.timeout_s, self.device, self.global_ranks),
            node_groups={},
            shard_groups={},
            channels=itertools.count(),
            owned=True,
            breaking_off=BreakingOff(),
            platform_of=lambda device: platform,
        )
        if self.node_groups:
            new.make_node_groups()
        return new.in_shard_groups_of(self.ranks // self.replicas)

    def store(self) -> Store | None:
        """Return a new connection to the process group's store, under a name that belongs only to these groups.

        None if nothing is sent. Connecting blocks while the process that hosts the store does not answer.
        """
        if self.control is None or not dist.is_initialized():
            return None
        shared = dist.distributed_c10d._get_default_store()
        store: Store = dist.PrefixStore(f"shardengine/{self.control.group_name}", shared.clone())  # type: ignore[attr-defined]
        return store

    def store_host(self) -> int | None:
        """Return the rank whose process hosts the process group's store; None if no rank does, or nobody (a file)."""
        if not dist.is_initialized() or rendezvous.hosts_store():
            return None
        shared = dist.distributed_c10d._get_default_store()
        while isinstance(shared, dist.PrefixStore):  # type: ignore[attr-defined]
            shared = shared.underlying_store
        if not isinstance(shared, dist.TCPStore):  # type: ignore[attr-defined]
            return None
        return self.global_ranks.index(0) if 0 in self.global_ranks else None if self.global_ranks else 0

    def _hold_until_timeout(self) -> None:
        """Hold the groups, which end with something in flight, for ``timeout_s``.

        Dropping a gloo group waits for the collectives in flight on it, and other ranks may never take part in them.
        """
        if self.control is not None:
            keeper = threading.Timer(self.timeout_s, id, (self,))
            keeper.daemon = True  # the end of the process does not wait
            keeper.start()

    def _groups(self) -> dict[str, dist.ProcessGroup]:
        fields = {name: getattr(self, name) for name in _FIELDS}
        whole = {name: group for name, group in fields.items() if group is not None}
        parts = {f"{name} of {count}": group for count, of in self.shard_groups.items() for name, group in of.items()}
        return whole | self.node_groups | parts

    def _over(self, groups: Mapping[str, dist.ProcessGroup]) -> Mesh:
        """Return the same mesh over ``groups`` alone."""
        fields: dict[str, Any] = {name.value: groups.get(name) for name in _FIELDS}
        parts: Any = {name: group for name, group in groups.items() if name not in _FIELDS}
        return replace(self, **fields, node_groups=parts, shard_groups={})


_FIELDS = (GroupName.GATHER, GroupName.REDUCE, GroupName.CONTROL, GroupName.EVALUATE)
"""The groups that every mesh of several ranks has."""
_PARTS = {
    (GroupName.GATHER, Axis.INSIDE): GroupName.GATHER_INSIDE,
    (GroupName.GATHER, Axis.ACROSS): GroupName.GATHER_ACROSS,
    (GroupName.REDUCE, Axis.INSIDE): GroupName.INSIDE,
    (GroupName.REDUCE, Axis.ACROSS): GroupName.ACROSS,
    (GroupName.EVALUATE, Axis.INSIDE): GroupName.EVALUATE_INSIDE,
    (GroupName.EVALUATE, Axis.ACROSS): GroupName.EVALUATE_ACROSS,
}
"""The corresponding group in a hybrid mesh, for a part of the ranks."""


def await_the_others(mesh: Mesh) -> None:
    """Wait, over the default process group, until every rank is at its end.

    With NCCL see group_kind, [Note: Groups of NCCL].
    """
    if mesh.backend == "gloo":
        dist.barrier()
    elif mesh.backend == "nccl":
        await_all(mesh.store(), mesh.rank, mesh.ranks, mesh.timeout_s)


def await_all(store: Any, rank: int, ranks: int, timeout_s: float) -> None:
    """Wait until every rank calls this; rank 0, whose process may host the store, waits until all know."""
    for what in ("here", "seen"):
        if store.add(what, 1) == ranks:
            store.set(f"all {what}", "")
        if what == "here" or rank == 0:
            store.wait([f"all {what}"], timedelta(seconds=timeout_s))


@dataclass(frozen=True)
class _Abandoned:
    """Groups of an engine that was garbage-collected, at any point, or never came to be. Torch holds the groups.

    mesh: without the groups.
    """

    mesh: Mesh
    groups: dict[str, weakref.ref[dist.ProcessGroup]]

    def living(self) -> Mesh | None:
        """Return the mesh over the groups that nobody has ended meanwhile; None if none is left."""
        found = {name: group for name, ref in self.groups.items() if (group := ref()) is not None and _lives(group)}
        return self.mesh._over(found) if found else None


_abandoned: list[_Abandoned] = []
_DESTROYING_S = 2.0
_BREAKING_OFF_S = 120.0


def _destroy_abandoned() -> None:
    """End the abandoned groups; ranks may have abandoned different ones.

    All are broken off at once: the abort of one may wait for the GPU, which may still run the kernels of another
    (group_kind: [Note: Aborting]).
    """
    left = list(_abandoned)
    meshes = [mesh for each in left if (mesh := each.living()) is not None]
    _abandoned.clear()
    calls = [functools.partial(mesh.break_off, "nobody uses these groups any more") for mesh in meshes]
    if problems := all_at_once(calls, _BREAKING_OFF_S):
        _abandoned.extend(left)  # the next call ends those that can be ended
        raise CommunicationError("; ".join(problems), code="nccl-abort-failed")
    held: list[dist.ProcessGroup] = []
    for mesh in meshes:
        mesh.kind.end(mesh._groups())
        held += mesh._groups().values()
    del meshes, calls
    if held:
        last = threading.Thread(
            target=held.clear, daemon=True
        )  # who lets go of one may have to wait: see ``_hold_until_timeout``
        ending_threads.add(last)
        last.start()
        last.join(_DESTROYING_S)


def _lives(group: dist.ProcessGroup) -> bool:
    """Return whether nobody has ended the group meanwhile."""
    try:
        dist.get_backend(group)
    except ValueError:
        return False
    return True


def build(
    device: torch.device | None = None,
    timeout_s: float = 600.0,
    *,
    owned: bool = False,
    meet: Callable[[float], None] = lambda timeout_s: None,
) -> Mesh:
    """Return the mesh of all ranks of the default process group.

    If there is no default process group, it is made from the launcher's environment. If there is no launcher either
    (see rendezvous), the mesh has one rank and no groups. An existing process group is used unchanged: with gloo the
    ranks compute on the CPU.

    device: this rank's; None: see devices, [Note: Which GPU a rank uses] · meet: called with ``timeout_s`` before the
    groups are made, because torch waits silently for them. UsageError, the same on every rank, if two ranks would share
    a GPU, or one has none.
    """
    made = not dist.is_initialized()
    if made:
        if not rendezvous.join():
            alone = devices.choose([devices.facts(device)], 0)
            if device is None and alone.device.type == "cuda":
                alone = replace(alone, unused=devices.only_one(devices.count()))
            return Mesh(0, 1, _use(alone, 0).device, owned=owned)
        if "MASTER_ADDR" not in os.environ:
            raise UsageError(
                "RANK and WORLD_SIZE are set but MASTER_ADDR is not: expected the environment of a launcher; start the "
                "program with torchrun or `shardengine train`, or call torch.distributed.init_process_group first",
                code="launcher-without-master-addr",
            )
        choice, everyone = _join(device, timedelta(seconds=timeout_s))
        atexit.register(_leave)  # before that of failures, which needs the store and so comes first at the end
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if ranks > 1:
        meet(timeout_s)
    if not made:
        choice, everyone = _settle(device)
    if ranks == 1:
        return Mesh(0, 1, choice.device, made_default_group=made, owned=owned)
    _destroy_abandoned()
    kind = kind_of(choice.backend)
    groups = kind.make(timeout_s, choice.device)
    options: dict[str, Any] = {"backend": choice.backend, "made_default_group": made, "timeout_s": timeout_s}
    return Mesh(rank, ranks, choice.device, owned=owned, kind=kind, nodes=nodes.find(everyone), **options, **groups)


def of_ranks(
    given: DeviceMesh | dist.ProcessGroup,
    timeout_s: float = 600.0,
    *,
    owned: bool = False,
    meet: Callable[[float], None] = lambda timeout_s: None,
) -> Mesh:
    """Return the mesh of the ranks of a process group, or of torch's DeviceMesh; collective over these ranks.

    The ranks of one dimension are the data-parallel ranks. Of two dimensions the first has the replicas and the second
    the ranks of a shard group, as in FSDP2. The mesh makes its own groups, so engines do not share any. ``UsageError``
    for other dimensions.
    """
    ranks, size, device = _ranks_of(given)
    if len(ranks) == dist.get_world_size():
        whole = build(device, timeout_s, owned=owned, meet=meet)
    else:
        whole = _build_part(ranks, device, timeout_s, owned=owned)
    return replace(whole, replicas=len(ranks) // size, beside=_beside(given))


def _beside(given: DeviceMesh | dist.ProcessGroup) -> str:
    """Return ``Mesh.beside``: torch keeps, for a part of a DeviceMesh, the mesh that it is a part of."""
    if isinstance(given, dist.ProcessGroup) or not hasattr(given, "_get_root_mesh"):
        return ""
    root = given._get_root_mesh()
    inside, others = set(given.mesh.flatten().tolist()), []
    place = (root.mesh == dist.get_rank()).nonzero()
    for number, (name, size) in enumerate(zip(root.mesh_dim_names or (), root.mesh.shape, strict=False)):
        row = root.mesh.movedim(number, -1)[tuple(at for d, at in enumerate(place[0].tolist()) if d != number)]
        if not inside.issuperset(row.tolist()):
            others.append(f"{name!r} of {size} ranks")
    return " and ".join(others)


def _ranks_of(given: DeviceMesh | dist.ProcessGroup) -> tuple[list[int], int, torch.device | None]:
    """Return the ranks, the size of a shard group, and the device if a DeviceMesh of type cpu requests the CPU."""
    if isinstance(given, dist.ProcessGroup):
        ranks = dist.get_process_group_ranks(given)
        return ranks, len(ranks), None
    names, shape = given.mesh_dim_names or (), tuple(given.mesh.shape)
    shown = f"the dimensions {dict(zip(names, shape, strict=True)) if names else shape}"
    if len(shape) > 2 or _OTHERS & set(names):
        raise UsageError(
            'mesh: expected a DeviceMesh with one dimension, the data-parallel ranks, or two, ("replicate", "shard"), '
            f"got {shown}; give the part that is data-parallel, mesh[name] or mesh[name, name]",
            code="mesh-wrong-dimensions",
        )
    if given.get_coordinate() is None:
        raise UsageError(
            f"mesh: expected a DeviceMesh with this rank ({dist.get_rank()}) in it, got {shown}",
            code="mesh-without-this-rank",
        )
    ranks = [int(rank) for rank in given.mesh.flatten().tolist()]
    if ranks != sorted(ranks):
        raise UsageError(
            f"mesh: expected a DeviceMesh whose ranks ascend, got {given.mesh.tolist()}",
            code="mesh-ranks-not-ascending",
        )
    asks = given.device_type == "cpu" and torch.cuda.is_available()  # else it is the CPU anyway
    return ranks, shape[-1], torch.device("cpu") if asks else None


_OTHERS = {"tp", "pp", "cp", "ep", "sp", "tensor", "pipeline", "context", "expert"}
"""Names of dimensions that are not data-parallel."""


def _build_part(ranks: Sequence[int], device: torch.device | None, timeout_s: float, *, owned: bool) -> Mesh:
    """Return the mesh of ``ranks`` of the default process group, which alone call this."""
    rank, count = ranks.index(dist.get_rank()), len(ranks)
    shared: Any = dist.distributed_c10d._get_default_store()
    key = "-".join(map(str, ranks))
    key += f"/{shared.add(f'shardengine/devices/of/{key}/{rank}', 1)}"
    everyone = _exchange(key, devices.facts(device, dist.group.WORLD), rank, count, shared)
    choice = _use(_choose(everyone, rank), rank)
    if count == 1:
        return Mesh(0, 1, choice.device, owned=owned)
    _destroy_abandoned()
    kind = kind_of(choice.backend)
    groups = kind.make(timeout_s, choice.device, ranks)
    options: dict[str, Any] = {"backend": choice.backend, "timeout_s": timeout_s, "global_ranks": tuple(ranks)}
    return Mesh(rank, count, choice.device, owned=owned, kind=kind, nodes=nodes.find(everyone), **options, **groups)


_Chosen = tuple[devices.DeviceChoice, list[devices.RankFacts]]


def _join(device: torch.device | None, timeout: timedelta) -> _Chosen:
    """Make the default process group from the launcher's environment; return its choice and the facts of all ranks."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    missing = set(range(ranks)) - {rank}
    with _warning(rank, missing, timeout):
        store = _store(rank, ranks, timeout, missing)
        everyone = _exchange("joining", devices.facts(device), rank, ranks, store)
    choice = _use(devices.choose(everyone, rank), rank)
    dist.init_process_group(choice.backend, store=store, rank=rank, world_size=ranks, timeout=timeout)
    return choice, everyone


def _store(rank: int, ranks: int, timeout: timedelta, missing: set[int]) -> Any:
    """Return the launcher's store, without keys of earlier ranks; collective. missing: as in ``_fresh``."""
    try:
        if rendezvous.agent_store() and ranks > 1:
            address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            shared = dist.TCPStore(address, port, is_master=False, timeout=timeout)  # type: ignore[attr-defined]
            return _fresh(shared, rank, ranks, timeout, missing)
        store, _, _ = next(dist.rendezvous("env://", rank, ranks, timeout=timeout))  # type: ignore[attr-defined]
    except dist.DistError as error:
        place = f"{os.environ['MASTER_ADDR']}:{os.environ.get('MASTER_PORT', '')}"
        raise CommunicationError(
            f"initialize on rank {rank}: {ranks} ranks did not meet at {place} within {timeout.total_seconds():g} s: "
            f"{str(error).splitlines()[0]}. Expected that the launcher starts all of them, that each calls initialize, "
            "and that rank 0 has that address",
            code="initialize-ranks-missing",
        ) from error
    return store


@contextmanager
def _warning(rank: int, missing: set[int], timeout: timedelta) -> Iterator[None]:
    """Log once if the block takes long. missing: the ranks that, as far as this rank knows, have not come."""

    def warn() -> None:
        named = ", ".join(map(str, sorted(missing)[:_NAMED])) + (" and others" if len(missing) > _NAMED else "")
        _log.warning(
            "initialize on rank %d waits for other ranks, not all of which have called it within %g s (of ranks %s, as "
            "far as this rank knows); gives up after %g s",
            *(rank, _WARN_AFTER_S, named, timeout.total_seconds()),
        )

    timer = threading.Timer(_WARN_AFTER_S, warn)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _choose(everyone: list[devices.RankFacts], rank: int) -> devices.DeviceChoice:
    """Return the choice for an existing default process group.

    torch reports which backend of the group serves which type of device.
    """
    backends = dist.get_backend_config()
    return devices.choose(everyone, rank, devices.has_nccl(backends), backends)


def _settle(device: torch.device | None) -> _Chosen:
    """Return the choice, and the facts of all ranks, if the default process group exists already; collective."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    shared: Any = dist.distributed_c10d._get_default_store() if ranks > 1 else None
    try:
        key = str(shared.add(f"shardengine/devices/of/{rank}", 1)) if ranks > 1 else ""
    except RuntimeError as error:
        if "pure virtual" not in str(error):
            raise
        raise UsageError(
            f"the default process group ({dist.get_backend_config()}) has no store, over which ranks agree and gloo "
            "connects them: expected one that init_process_group makes with a store, as it does for every backend but "
            'mpi ("cpu:gloo,cuda:nccl", or none named)',
            code="mesh-group-without-store",
        ) from error
    everyone = _exchange(key, devices.facts(device, dist.group.WORLD), rank, ranks, shared)
    choice = _use(_choose(everyone, rank), rank)
    if choice.backend == "nccl":  # with gloo the caller's group works already
        rendezvous.settle_gloo_interface(_store_address())
    return choice, everyone


def _exchange(key: str, mine: devices.RankFacts, rank: int, ranks: int, shared: Any) -> list[devices.RankFacts]:
    """Return the facts of every rank, over the store: there may be no group yet."""
    if ranks == 1:
        return [mine]
    return [devices.RankFacts.from_text(text) for text in _texts(key, mine.to_text(), rank, ranks, shared)]


def _texts(key: str, mine: str, rank: int, ranks: int, shared: Any) -> list[str]:
    """Return the text of every rank, over the store. Each rank reads one key, whatever ``ranks``."""
    store = dist.PrefixStore(f"shardengine/devices/{key}", shared)  # type: ignore[attr-defined]
    try:
        store.set(str(rank), mine)
        if rank == 0:
            store.set("all", json.dumps([store.get(str(each)).decode() for each in range(ranks)]))
        texts: list[str] = json.loads(store.get("all"))
        if rank and store.add("read", 1) == ranks - 1:
            store.set("all have read", "")
        if rank == 0:
            store.wait(["all have read"])  # its process may host the store, and the result may end that process
    except RuntimeError as error:
        raise CommunicationError(
            f"initialize on rank {rank}: {_missing(store, ranks)} where ranks say which GPUs they see: "
            f"{str(error).splitlines()[0]}. Call it on every rank, or start the ranks again",
            code="initialize-ranks-missing",
        ) from error
    return texts


def _missing(store: Any, ranks: int) -> str:
    """Return a text about the ranks that do not answer in ``_exchange``."""
    try:
        silent = [each for each in range(ranks) if not store.check([str(each)])]
        if not silent and not store.check(["all"]):
            silent = [0]  # it would have put that there
    except RuntimeError:
        return "the store over which ranks meet does not answer"
    if not silent:  # each one counts when it has read, without a name
        return "a rank does not answer, it is not known which,"
    named = ", ".join(map(str, silent[:_NAMED])) + (" and others" if len(silent) > _NAMED else "")
    return f"rank {named} does not answer" if len(silent) == 1 else f"ranks {named} do not answer"


def _store_address() -> str:
    """Return the host of the default process group's store, "" if it is not known."""
    shared = dist.distributed_c10d._get_default_store()
    while isinstance(shared, dist.PrefixStore):  # type: ignore[attr-defined]
        shared = shared.underlying_store
    return str(getattr(shared, "host", "")) or os.environ.get("MASTER_ADDR", "")


def _fresh(shared: Any, rank: int, ranks: int, timeout: timedelta, missing: set[int]) -> Any:
    """Return a part of ``shared`` without keys of earlier ranks of this launch; collective.

    missing: the other ranks; rank 0 removes those that have come.

    [Note: A store that outlives its ranks] torchrun's agent keeps one store for all ranks that it starts, also for
    those that replace ranks that died. gloo would read the addresses of the dead ones in it and hang. No variable of
    the environment distinguishes the generations (a node that joins or leaves does not raise the count of restarts), so
    the ranks agree. Each asks under a name that is used once, and rank 0 answers with the name of a new part, until
    every rank has appeared there. Requests of dead ranks are answered as well, and nobody reads the answers.
    """
    mine = uuid.uuid4().hex
    if rank:
        shared.set(f"shardengine/asks/{rank}", mine)
        part = dist.PrefixStore(shared.get(f"shardengine/answer/{mine}").decode(), shared)  # type: ignore[attr-defined]
        part.set(f"here/{rank}", "")
        return part
    name = f"shardengine/ranks/{mine}"
    deadline = time.monotonic() + timeout.total_seconds()
    part = dist.PrefixStore(name, shared)  # type: ignore[attr-defined]
    answered: set[bytes] = set()
    while missing:
        for other in sorted(missing):
            if shared.check([f"shardengine/asks/{other}"]):
                asks = shared.get(f"shardengine/asks/{other}")
                if asks not in answered:
                    shared.set(f"shardengine/answer/{asks.decode()}", name)
                    answered.add(asks)
            if part.check([f"here/{other}"]):
                missing.discard(other)
        if time.monotonic() > deadline:
            raise CommunicationError(
                f"ranks {sorted(missing)} of {ranks} did not come within {timeout.total_seconds():g} s of the start; "
                "expected that the launcher starts all of them",
                code="initialize-ranks-missing",
            )
        time.sleep(0.01)
    return part


_orderly = threading.Event()
"""Set when the last engine of a process group that ``build`` made has ended in good order."""


def _leave() -> None:
    if _orderly.is_set() and dist.is_initialized():
        dist.destroy_process_group()


def _use(choice: devices.DeviceChoice, rank: int) -> devices.DeviceChoice:
    """Make the chosen device current, and prepare NCCL for its first group; rank 0 logs which GPUs are not used."""
    if choice.unused and rank == 0:
        _log.warning(choice.unused)
    if choice.device.type == "cuda":
        torch.cuda.set_device(choice.device)
    if choice.backend == "nccl":
        nccl_defaults()
    return choice
