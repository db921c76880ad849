"""Collectives of buckets, compiled once per layout: ranks, groups, sizes and names are fixed, a start only sends.

``compile_transfer`` makes a ``Transfer`` for one bucket and one pair of placements. ``Collectives`` keeps them until
the mesh or the layout changes. Must not know: who asks for a transfer, modules, stages by name.

[Note: Direct reduce-scatter] All-to-all of slices, then a local sum in tree order (kernels: [Note: One arithmetic]),
which is the caller's ``on_complete``. It sends (N-1)/N of the bucket like a ring, has one order of summation at any
bucket size, and sums in fp32 whatever the wire dtype. ``direct=False`` uses the backend's reduce-scatter for fp32
(faster on NCCL, its order of summation is its own). Other dtypes always go the direct way, because a backend would sum
them in themselves; so does everything if sums are rounded to another ``reduce_dtype``. Over several nodes the
reduce-scatter may be cut in two (nodes: [Note: Two steps]); groups of nodes, buffers, the formula of traffic and the
kernels that are tried follow ``Fabric.nodes``. On NCCL both steps are issued at once, with the sum between them on a
stream of its own, so the computation waits only for the end of the second. On gloo the second is issued when the first
is found done or waited for. Either way every rank issues each kind in the order of its buckets.

[Note: Gather by broadcasts] On gloo N broadcasts, each rank its own slice in place, are up to three times as fast as
its all-gather and send the same bytes. Beyond ``MAX_BROADCAST_RANKS`` ranks the latency of N operations wins.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from shardengine.comm.flight_recorder import Collective, Purpose
from shardengine.comm.group_kind import GroupName
from shardengine.comm.mesh import AxisGroup, Mesh
from shardengine.comm.work import CollectiveLedger, Work
from shardengine.errors import InternalError
from shardengine.kernels import ordered_sum
from shardengine.offload import BufferPool, CopyStream
from shardengine.stages import Axis, Operation, Placement, axes, operation

MAX_BROADCAST_RANKS = 8

OnComplete = Callable[[Sequence[Tensor]], None]
"""Called with the terms of a reduce-scatter, once they are there."""


class CollectiveLabel(Protocol):
    """The subject of a collective, for records and errors: a bucket's layout, or ``Named``."""

    @property
    def label(self) -> str:
        """Its name."""

    @property
    def names(self) -> Sequence[str]:
        """The parameters in it."""


class Coding(Protocol):
    """Makes messages of gradients or weights, see ``ddp.comm_hooks``."""

    def bytes_of(self, elements: int) -> int:
        """Bytes of the message for a slice of ``elements``."""

    def encode(self, full: Tensor, receivers: int, out: Tensor) -> None:
        """Write ``full`` (flat) as equal messages (uint8) for ``receivers``, one after the other, into ``out``."""

    def decode(self, message: Tensor, out: Tensor) -> None:
        """Write the slice that a message holds into ``out`` (fp32)."""


class Messages(Coding, Protocol):
    """The coding of one reduction."""

    @property
    def again(self) -> Coding:
        """The coding for sums of the terms that these messages carried."""


class TransferOptions(NamedTuple):
    """Options of one transfer.

    coding: makes the messages that travel: ``Messages`` of a reduce-scatter, whose tensor is fp32 then and may be
    changed; ``Coding`` of a gather · earlier: from PARTIAL to SHARDED on a hybrid mesh, the group's sum of earlier
    micro-batches (PARTIAL_ACROSS), which is added before sums go across. The transfer takes over this buffer of the
    pool.
    """

    coding: Any = None
    earlier: Tensor | None = None


@dataclass(frozen=True)
class Fabric:
    """The mesh with everything that all transfers over it share.

    direct: fp32 is summed here as well · reduce_dtype: to which each sum over ranks is rounded · hierarchical: reduce
    in two steps if the ranks share nodes, the sums are made here, and messages are not coded · overlap: collectives
    run beside the computation.
    """

    mesh: Mesh
    ledger: CollectiveLedger
    pool: BufferPool
    direct: bool
    reduce_dtype: torch.dtype
    hierarchical: bool
    overlap: bool

    def is_direct(self, dtype: torch.dtype) -> bool:
        """Return whether gradients that travel in ``dtype`` are summed here and not by the backend."""
        return self.direct or dtype is not torch.float32

    def nodes(self, dtype: torch.dtype) -> int:
        """Return how many nodes, or shard groups, first reduce such gradients inside; 1: one step."""
        if self.mesh.replicas > 1:
            return self.mesh.replicas
        return self.mesh.nodes.number if self.hierarchical and self.is_direct(dtype) else 1

    @functools.cached_property
    def may_poll(self) -> bool:
        """Whether the successor of a collective may be started as soon as the collective is found done.

        On NCCL that would interleave two communicators differently on each rank, which can deadlock.
        """
        return self.mesh.backend == "gloo"

    @functools.cached_property
    def between_steps(self) -> CopyStream:
        """The stream of the sums between two steps."""
        return self.mesh.platform.copy_stream()

    def in_two_steps(self, first: Work, second: Callable[[], Work]) -> Work:
        """Start ``second``, which itself waits for the data of ``first``: now, or when that data is found there."""
        if self.may_poll and self.overlap:
            return first.followed_by(second)
        if not self.overlap:
            first.wait_data()  # the computation has stood still for it
        return second()


class Transfer:
    """Moves one bucket from one placement to another."""

    def __init__(self, what: CollectiveLabel) -> None:
        self._what = what  # kept: its identity is the key by which ``Collectives`` finds the transfer

    def start(
        self,
        full: Tensor,
        on_complete: OnComplete | None = None,
        options: TransferOptions = TransferOptions(),  # noqa: B008  (frozen)
    ) -> Work:
        """Begin; as ``Collectives.move``."""
        raise NotImplementedError


class NothingToSend(Transfer):
    """Each rank has its part already."""

    def start(
        self,
        full: Tensor,
        on_complete: OnComplete | None = None,
        options: TransferOptions = TransferOptions(),  # noqa: B008  (frozen)
    ) -> Work:
        """See ``Transfer``."""
        _require_no_terms(self._what, on_complete)
        return Work()


def _require_no_terms(what: CollectiveLabel, on_complete: OnComplete | None) -> None:
    if on_complete is not None:
        raise InternalError(f"{what.label}: only a reduce-scatter has terms, got a function that takes them")


def compile_transfer(
    fabric: Fabric, what: CollectiveLabel, source: Placement, target: Placement, purpose: Purpose, like: Tensor
) -> Transfer:
    """Return the transfer of tensors with the dtype and length of ``like``.

    ``InternalError`` if no single transfer does it.
    """
    needed, along = operation(source, target), axes(source, target)
    if needed in (Operation.NOTHING, Operation.LOCAL_SLICE):
        return NothingToSend(what)
    if needed is Operation.ALL_GATHER:
        return AllGather(fabric, what, _present(fabric.mesh, along), purpose, like)
    if needed is Operation.REDUCE_SCATTER:
        return ReduceScatter(fabric, what, along, purpose, like)
    raise InternalError(f"{what.label}: {needed.value} from {source.name} to {target.name} is no single move")


def _present(mesh: Mesh, along: Sequence[Axis]) -> Sequence[Axis]:
    """Return the axes with other ranks."""
    return [axis for axis in along if mesh.place_on(axis)[1] > 1]


class _GatherStep:
    """An all-gather along one axis of tensors with the dtype and ``nbytes`` of those compiled for."""

    def __init__(
        self, fabric: Fabric, what: CollectiveLabel, axis: Axis, purpose: Purpose, dtype: torch.dtype, nbytes: int
    ) -> None:
        self._mesh = mesh = fabric.mesh
        wanted = GroupName.EVALUATE if purpose is Purpose.EVALUATION else GroupName.GATHER
        self._line = line = mesh.line(axis, wanted)
        self._as_bytes = not is_known(dtype)
        self._by_broadcasts = mesh.backend == "gloo" and line.ranks <= MAX_BROADCAST_RANKS
        self.collective = Collective(
            line.name,
            named_along("all-gather", line.name),
            what.label,
            tuple(what.names),
            nbytes * (line.ranks - 1) // line.ranks,
            purpose,
            members=tuple(mesh.members(line.name)),
        )

    def begin(self, full: Tensor) -> list[dist.Work]:
        """Send it ([Note: Gather by broadcasts])."""
        wire, line = self._mesh.wire, self._line
        parts = (full.view(torch.uint8) if self._as_bytes else full).chunk(line.ranks)
        if self._by_broadcasts:
            return [wire.broadcast(part, rank, line.group) for rank, part in enumerate(parts)]
        whole = full.view(torch.uint8) if self._as_bytes else full
        return [wire.all_gather(whole, parts[line.rank], line.group)]


class AllGather(Transfer):
    """Fills ``full`` in place; this rank's part is already in its place.

    Along two axes the second step runs on a stream that waits for the first, if there are streams. On gloo it is issued
    when the first is found done or waited for.
    """

    def __init__(
        self, fabric: Fabric, what: CollectiveLabel, along: Sequence[Axis], purpose: Purpose, like: Tensor
    ) -> None:
        super().__init__(what)
        self._fabric, self._along, self._purpose = fabric, along, purpose
        self._coded: dict[int, AllGather] = {}
        self._part, self._parts = fabric.mesh.place_on(Axis.INSIDE)
        self._slice, self._slices = 0, 1
        for axis in (Axis.INSIDE, Axis.ACROSS):  # slices lie in this order
            if axis in along:
                rank, ranks = fabric.mesh.place_on(axis)
                self._slice, self._slices = self._slice * ranks + rank, self._slices * ranks
        sizes = [like.nbytes] * len(along)
        if len(along) > 1:  # the first of two steps gathers one part
            sizes[0] //= self._parts
        self._steps = [
            _GatherStep(fabric, what, axis, purpose, like.dtype, size) for axis, size in zip(along, sizes, strict=True)
        ]

    def start(
        self,
        full: Tensor,
        on_complete: OnComplete | None = None,
        options: TransferOptions = TransferOptions(),  # noqa: B008  (frozen)
    ) -> Work:
        """See ``Transfer``."""
        _require_no_terms(self._what, on_complete)
        if not self._steps:
            return Work()
        if options.coding is not None:
            return self._start_messages(full, options.coding)
        step = self._steps[0]
        if len(self._steps) == 1:
            return self._fabric.ledger.start(step.collective, functools.partial(step.begin, full))
        return self._start_two_steps(full, *self._steps)

    def _start_two_steps(self, full: Tensor, first: _GatherStep, second: _GatherStep) -> Work:
        fabric, part = self._fabric, full.chunk(self._parts)[self._part]
        across = fabric.ledger.start(first.collective, functools.partial(first.begin, part))

        def behind() -> list[dist.Work]:
            with fabric.between_steps.is_current():
                across.wait_here()  # on this stream, which nobody else waits for
                return second.begin(full)

        return fabric.in_two_steps(across, lambda: fabric.ledger.start(second.collective, behind))

    def _start_messages(self, full: Tensor, coding: Coding) -> Work:
        """Gather the messages that ``coding`` makes of each slice, this rank's own included."""
        pool, number, count = self._fabric.pool, self._slice, self._slices
        parts = full.chunk(count)
        messages = pool.acquire(count * coding.bytes_of(parts[0].numel()), torch.uint8)
        coding.encode(parts[number], 1, messages.chunk(count)[number])

        def decode() -> None:
            for message, part in zip(messages.chunk(count), parts, strict=True):
                coding.decode(message, part)
            pool.release(messages)

        size = messages.numel()
        if size not in self._coded:
            self._coded[size] = AllGather(self._fabric, self._what, self._along, self._purpose, messages)
        return self._coded[size].start(messages).ending_with(decode)


class Slices:
    """The slices of ``full`` (flat), one for each of ``ranks``, in flight.

    direct: each rank's slices arrive, to be added here; otherwise the backend adds them · coding: messages travel
    instead, and arrive as fp32 · into: memory as long as ``full`` that may receive the slices, if they have its dtype.
    """

    def __init__(
        self,
        pool: BufferPool,
        full: Tensor,
        ranks: int,
        coding: Coding | None,
        *,
        direct: bool,
        into: Tensor | None = None,
    ) -> None:
        self._pool, self._full, self._ranks, self._coding, self._direct = pool, full, ranks, coding, direct
        self._taken: list[Tensor] = []
        length = full.numel() // ranks
        if coding is None:
            self._sent = full
            taken = into if direct else None
            self._received = self._acquire(full.numel() if direct else length, full.dtype) if taken is None else taken
        else:
            size = ranks * coding.bytes_of(length)
            self._sent, self._received = self._acquire(size, torch.uint8), self._acquire(size, torch.uint8)
        self.bytes_sent = self._sent.nbytes * (ranks - 1) // ranks
        """By each rank."""

    def _acquire(self, length: int, dtype: torch.dtype) -> Tensor:
        self._taken.append(self._pool.acquire(length, dtype))
        return self._taken[-1]

    def begin(self, mesh: Mesh, group: dist.ProcessGroup | None) -> list[dist.Work]:
        """Send them, as ``full`` is now."""
        if self._coding is not None:
            self._coding.encode(self._full, self._ranks, self._sent)
        if self._direct or self._coding is not None:
            return [mesh.wire.all_to_all(self._received, self._sent, group)]
        return [mesh.wire.reduce_scatter(self._received, self._full, group)]

    def terms(self) -> Sequence[Tensor]:
        """Return the terms to be added up, in rank order. They are lent until ``release``."""
        if self._coding is None:
            return self._received.chunk(self._ranks) if self._direct else [self._received]
        terms = self._acquire(self._full.numel(), torch.float32).chunk(self._ranks)
        for message, term in zip(self._received.chunk(self._ranks), terms, strict=True):
            self._coding.decode(message, term)
        return terms

    def release(self) -> None:
        """Release the memory to the pool, but not that of ``full``."""
        for buffer in self._taken:
            self._pool.release(buffer)


class ReduceScatter(Transfer):
    """``wait`` hands ``on_complete`` the terms, in rank order; their sum is this rank's slice of the sum of ``full``.

    The terms are only lent to it. It may write into ``full``, which nobody else may touch before it is called.
    """

    def __init__(
        self, fabric: Fabric, what: CollectiveLabel, along: Sequence[Axis], purpose: Purpose, like: Tensor
    ) -> None:
        super().__init__(what)
        mesh = fabric.mesh
        self._fabric, self._purpose = fabric, purpose
        self._direct = fabric.is_direct(like.dtype)
        self._groups = mesh.replicas if len(along) > 1 and mesh.replicas > 1 else 0
        """The number of shard groups that reduce inside first; 0: one step, or two steps by nodes."""
        present = _present(mesh, along)
        self._nodes = mesh.nodes.number if present and mesh.replicas == 1 and fabric.nodes(like.dtype) > 1 else 0
        self._line: AxisGroup | None = mesh.line(present[0], GroupName.REDUCE) if present and not self._groups else None
        self._collectives: dict[tuple[GroupName, int], Collective] = {}

    def start(
        self,
        full: Tensor,
        on_complete: OnComplete | None = None,
        options: TransferOptions = TransferOptions(),  # noqa: B008  (frozen)
    ) -> Work:
        """See ``Transfer``."""
        if on_complete is None:
            raise InternalError(f"{self._what.label}: a reduce-scatter needs a function that takes its terms, got None")
        if self._groups:
            return self._start_two_steps(full, on_complete, options, self._groups)
        if options.earlier is not None and (self._line is None or not self._nodes or options.coding is not None):
            raise InternalError(f"{self._what.label}: earlier micro-batches can only join a reduction in two steps")
        if self._line is None:
            return Work(on_complete=lambda: on_complete([full]))
        if self._nodes and options.coding is None:
            return self._start_two_steps(full, on_complete, options, self._nodes)
        fabric, line = self._fabric, self._line
        slices = Slices(fabric.pool, full, line.ranks, options.coding, direct=self._direct)

        def sum_terms() -> None:
            on_complete(slices.terms())
            slices.release()

        begin = functools.partial(slices.begin, fabric.mesh, line.group)
        return fabric.ledger.start(self._collective(line.name, slices.bytes_sent), begin, sum_terms)

    def _collective(self, group: GroupName, sent: int) -> Collective:
        """Return the record of a collective of ``sent`` bytes in ``group``; coded messages may have several sizes."""
        key = group, sent
        if key not in self._collectives:
            name, what = named_along("reduce-scatter", group), self._what
            members = tuple(self._fabric.mesh.members(group))
            facts = group, name, what.label, tuple(what.names), sent, self._purpose
            self._collectives[key] = Collective(*facts, members=members)
        return self._collectives[key]

    def _start_two_steps(self, full: Tensor, on_complete: OnComplete, options: TransferOptions, groups: int) -> Work:
        """Reduce inside each of ``groups`` and then across them, in ``reduce_dtype``.

        The terms are the sums of the groups ([Note: Direct reduce-scatter]).
        """
        fabric, mesh, pool = self._fabric, self._fabric.mesh, self._fabric.pool
        of_ranks = mesh.shard_groups[groups] if mesh.replicas > 1 else mesh.node_groups
        size, length = mesh.ranks // groups, full.numel() // mesh.ranks
        packed = full if mesh.replicas > 1 else pool.acquire(full.numel(), full.dtype)  # by place, then by group
        summed, coding = pool.acquire(groups * length, fabric.reduce_dtype), options.coding
        spent = None if packed is full else full  # it was packed
        near = Slices(pool, packed, size, coding, direct=self._direct, into=spent) if size > 1 else None
        again = coding if coding is None or near is None else coding.again
        far = Slices(pool, summed, groups, again, direct=self._direct)
        started = mesh.platform.mark()

        def inside() -> list[dist.Work]:
            with fabric.between_steps.is_current():
                started.wait()
                if packed is not full:
                    packed.view(size, groups, length).copy_(full.view(groups, size, length).transpose(0, 1))
                return near.begin(mesh, of_ranks[GroupName.INSIDE]) if near is not None else []

        def across() -> list[dist.Work]:
            with fabric.between_steps.is_current():
                started.wait()
                if first is not None:
                    first.wait_here()  # on this stream, which nobody else waits for
                terms = [full] if near is None else near.terms()
                ordered_sum(terms, summed, total=options.earlier, reduce_dtype=fabric.reduce_dtype)
                return far.begin(mesh, of_ranks[GroupName.ACROSS])

        def sum_terms() -> None:
            on_complete(far.terms())
            for slices in (near, far) if near is not None else (far,):
                slices.release()
            for buffer in (summed, options.earlier, packed if packed is not full else None):
                if buffer is not None:
                    pool.release(buffer)

        def second() -> Work:
            return fabric.ledger.start(self._collective(GroupName.ACROSS, far.bytes_sent), across, sum_terms)

        first: Work | None = None
        if near is None:
            return second()
        first = fabric.ledger.start(self._collective(GroupName.INSIDE, near.bytes_sent), inside)
        return fabric.in_two_steps(first, second)


_INSIDE = (GroupName.INSIDE, GroupName.GATHER_INSIDE, GroupName.EVALUATE_INSIDE)
_KNOWN_DTYPES = (torch.float32, torch.float64, torch.float16, torch.int8, torch.uint8, torch.int32, torch.int64)


def named_along(operation: str, group: GroupName) -> str:
    """The name of a collective of ``group``."""
    return f"{operation} across" if group.is_across else f"{operation} inside" if group in _INSIDE else operation


def is_known(dtype: torch.dtype) -> bool:
    """Return whether every backend knows ``dtype``; tensors of others travel as bytes if they are only copied."""
    return dtype in _KNOWN_DTYPES


def sendable(flat: Tensor) -> Tensor:
    """Return ``flat``, or the same memory as bytes if a backend may not know its dtype.

    Only for data that is copied and not summed.
    """
    return flat if is_known(flat.dtype) else flat.view(torch.uint8)
