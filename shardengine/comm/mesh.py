"""Process groups, per axis and purpose, built by one function and passed in.

Must not know: buckets, modules, what is sent over the groups.

One axis exists today (shard: all ranks). Its traffic runs over two groups, because a group executes its collectives in
the order in which they were issued: gathers must not queue behind reductions. Decisions between ranks (norms, flags,
handshakes) use a third group on CPU. gloo ends the process when ranks give a collective different sizes, which happens
where one rank evaluates alone while the others train. So with gloo the gathers of forwards without grad have a fourth
group: then the ranks wait for each other, and that is found and told.

The default process group is torch's, and the only state that all meshes of a process share. Where ``build`` made it, it
ends with the process and not with an engine: another engine may run over it, and torch cannot join a second time under
torchrun with gloo (the new group meets the addresses of the old one in the launcher's store, and hangs).
"""

from __future__ import annotations

import atexit
import enum
import functools
import itertools
import os
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from shardengine.comm import rendezvous
from shardengine.comm.wire import Group, Wire
from shardengine.errors import CommunicationError, UsageError
from shardengine.offload import Platform


class GroupName(enum.StrEnum):
    """The fields of ``Mesh`` that are process groups. In each, collectives are numbered as they are issued."""

    GATHER = "gather"
    REDUCE = "reduce"
    CONTROL = "control"
    EVALUATE = "evaluate"

    @property
    def counts_as(self) -> GroupName:
        """Whose collectives these are compared with: every rank issues both kinds of gathers in one order."""
        return GroupName.GATHER if self is GroupName.EVALUATE else self


class Store(Protocol):
    """What is used of torch's store."""

    def set(self, key: str, value: str) -> None:
        """Put a text."""

    def get(self, key: str) -> bytes:
        """The text of a key; waits for one that is not there."""

    def check(self, keys: list[str]) -> bool:
        """Whether all of ``keys`` are there."""

    def add(self, key: str, amount: int) -> int:
        """Add to a number that begins at 0; the new one."""

    def delete_key(self, key: str) -> bool:
        """Forget a key."""


@dataclass(frozen=True)
class Mesh:
    """Who takes part. Groups are None at world size 1, where nothing is sent.

    channels: numbers, one for each engine over these groups; every rank takes them in the same order · evaluate: for
    gathers of forwards without grad; None: they use ``gather`` · owned: the groups end with the engine that uses them ·
    wire: what carries out data operations · platform_of: what makes ``platform`` for the device.
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

    @functools.cached_property
    def platform(self) -> Platform:
        """The device's streams and memory."""
        return self.platform_of(self.device)

    def destroy(self, *, orderly: bool = True) -> None:
        """Destroy the groups; the default process group stays, until the process ends if ``build`` made it.

        orderly: wait for the other ranks first, without which a finished gloo program sometimes aborts.
        """
        if not dist.is_initialized():
            return
        if not orderly:
            self._hold_until_timeout()
        if orderly and self.made_default_group:
            dist.barrier()
            _orderly.set()  # not after a failure: a group in the middle of a collective may never come back
        self._destroy_groups()

    def abandon(self) -> None:
        """Nobody uses the groups any more, nor was there an orderly end: the next ``build`` destroys them."""
        if self.owned:
            _abandoned.extend(weakref.ref(group) for group in self._groups())

    def renew(self) -> Mesh:
        """The same ranks over new groups of the same default process group, which are owned; collective.

        Owned old groups are nobody else's, so they end, which breaks off what is in flight on them. Others are left
        alone, and the default process group stays the caller's.
        """
        if self.ranks == 1:
            return replace(self, owned=True)
        if self.owned:
            self._hold_until_timeout()
            self._destroy_groups()
        return replace(self, **_new_groups(self.backend, self.timeout_s), channels=itertools.count(), owned=True)

    def store(self) -> Store | None:
        """A connection of its own to the process group's store, under a name that belongs to these groups alone.

        None where nothing is sent. Connecting blocks while the process that hosts the store does not answer.
        """
        if self.control is None or not dist.is_initialized():
            return None
        shared = dist.distributed_c10d._get_default_store()
        store: Store = dist.PrefixStore(f"shardengine/{self.control.group_name}", shared.clone())  # type: ignore[attr-defined]
        return store

    def store_host(self) -> int | None:
        """The rank whose process hosts the process group's store; None where that is no rank, or nobody (a file)."""
        if not dist.is_initialized() or rendezvous.hosts_store():
            return None
        shared = dist.distributed_c10d._get_default_store()
        while isinstance(shared, dist.PrefixStore):  # type: ignore[attr-defined]
            shared = shared.underlying_store
        return 0 if isinstance(shared, dist.TCPStore) else None  # type: ignore[attr-defined]

    def _hold_until_timeout(self) -> None:
        """Hold the groups, which end with something in flight, for ``timeout_s``.

        Who lets go of a gloo group waits for what is in flight on it, and other ranks may never take part in that.
        """
        if self.control is not None:
            keeper = threading.Timer(self.timeout_s, id, (self,))
            keeper.daemon = True  # the end of the process does not wait
            keeper.start()

    def _destroy_groups(self) -> None:
        for group in self._groups():
            dist.destroy_process_group(group)

    def _groups(self) -> list[dist.ProcessGroup]:
        return [group for group in (self.gather, self.reduce, self.control, self.evaluate) if group is not None]


_abandoned: list[weakref.ref[dist.ProcessGroup]] = []
"""Groups of engines that were garbage-collected, in the midst of anything, or never came to be. torch holds them."""
_DESTROYING_S = 2.0


def _destroy_abandoned() -> None:
    """The groups that were abandoned end."""
    held = [group for left in _abandoned if (group := left()) is not None]
    _abandoned.clear()
    for group in held:
        with suppress(ValueError):  # it has ended meanwhile
            dist.destroy_process_group(group)
    if held:
        del group
        last = threading.Thread(
            target=held.clear, daemon=True
        )  # who lets go of one may have to wait: see ``_hold_until_timeout``
        ending_threads.add(last)
        last.start()
        last.join(_DESTROYING_S)


ending_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
"""Those that will end by themselves, and may be inside of torch until then."""


def await_threads(wait_s: float) -> None:
    """The process ends: wait for ``ending_threads``, for ``wait_s`` at most.

    One that came back from torch during the interpreter's end would abort the process.
    """
    deadline = time.monotonic() + wait_s
    for thread in list(ending_threads):
        thread.join(max(0.0, deadline - time.monotonic()))


def build(
    device: torch.device | None = None,
    timeout_s: float = 600.0,
    *,
    owned: bool = False,
    meet: Callable[[float], None] = lambda timeout_s: None,
) -> Mesh:
    """The mesh of all ranks of the default process group; initialises that one from the launcher's environment.

    Without a process group and without a launcher (see rendezvous) the mesh has one rank and no groups.
    A process group that is there is used as it is: with gloo the ranks compute on the CPU.
    meet: called with ``timeout_s`` before the groups are made, for which torch waits without a word.
    """
    made = False
    if not dist.is_initialized():
        if not rendezvous.join():
            return Mesh(0, 1, _use(device or default_device()), owned=owned)
        if "MASTER_ADDR" not in os.environ:
            raise UsageError(
                "RANK and WORLD_SIZE are set but MASTER_ADDR is not: expected the environment of a launcher; start the "
                "program with torchrun or `shardengine train`, or call torch.distributed.init_process_group first"
            )
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
        nccl = dist.is_nccl_available() and 0 < local_ranks <= torch.cuda.device_count()
        _join("nccl" if nccl else "gloo", timedelta(seconds=timeout_s))
        atexit.register(_leave)  # before that of failures, which needs the store and so comes first at the end
        made = True
    backend = "nccl" if torch.cuda.is_available() and dist.get_backend() != "gloo" else "gloo"
    device = _use(device or (torch.device("cpu") if backend == "gloo" else default_device()))
    ranks = dist.get_world_size()
    if ranks == 1:
        return Mesh(0, 1, device, made_default_group=made, owned=owned)
    meet(timeout_s)
    _destroy_abandoned()
    groups = _new_groups(backend, timeout_s)
    options: dict[str, Any] = {"backend": backend, "made_default_group": made, "timeout_s": timeout_s, "owned": owned}
    return Mesh(dist.get_rank(), ranks, device, **options, **groups)


def _join(backend: str, timeout: timedelta) -> None:
    """The default process group, from the launcher's environment."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if not rendezvous.agent_store() or ranks == 1:
        dist.init_process_group(backend, timeout=timeout)
        return
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    shared = dist.TCPStore(address, port, is_master=False, timeout=timeout)  # type: ignore[attr-defined]
    store = _fresh(shared, rank, ranks, timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timeout)


def _fresh(shared: Any, rank: int, ranks: int, timeout: timedelta) -> Any:
    """A part of ``shared`` in which no earlier ranks of this launch have written; collective.

    [Note: A store that outlives its ranks] torchrun's agent keeps one store for all ranks that it starts, also for
    those that take the place of ranks that died. gloo would read the addresses of the dead ones in it and hang. No
    variable of the environment tells the generations apart (a node that joins or leaves does not raise the count of
    restarts), so the ranks agree: each asks under a name that is used once, rank 0 answers with the name of a new part,
    until every rank has been seen in there. What dead ranks have asked is answered too, and read by nobody.
    """
    mine = uuid.uuid4().hex
    if rank:
        shared.set(f"shardengine/asks/{rank}", mine)
        part = dist.PrefixStore(shared.get(f"shardengine/answer/{mine}").decode(), shared)  # type: ignore[attr-defined]
        part.set(f"here/{rank}", "")
        return part
    name, missing = f"shardengine/ranks/{mine}", set(range(1, ranks))
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
                "expected that the launcher starts all of them"
            )
        time.sleep(0.01)
    return part


_orderly = threading.Event()
"""Whether the last engine of a process group that ``build`` made has ended in good order."""


def _leave() -> None:
    if _orderly.is_set() and dist.is_initialized():
        dist.destroy_process_group()


def _new_groups(backend: str, timeout_s: float) -> dict[str, Any]:
    """Those of ``Mesh``, by field; collective."""
    kinds = {GroupName.GATHER: backend, GroupName.REDUCE: backend, GroupName.CONTROL: "gloo"}
    if backend == "gloo":
        kinds[GroupName.EVALUATE] = backend
    timeout = timedelta(seconds=timeout_s)
    return {name.value: dist.new_group(backend=kind, timeout=timeout) for name, kind in kinds.items()}  # in this order


def _use(device: torch.device) -> torch.device:
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def default_device() -> torch.device:
    """This rank's GPU (LOCAL_RANK modulo the number of GPUs), else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    return torch.device("cpu")
