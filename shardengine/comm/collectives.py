"""Data operations between ranks, by what they bring where. Owns byte and sequence counters.

Must not know: modules, hooks, stages. At one rank everything here is a no-op on the same path.

Every collective passes through ``Collectives._issue`` with a ``CollectiveRecord`` of what it is. There its bytes are
counted and debug mode compares it across ranks; a failure becomes an error that names operation, bucket, parameters and
ranks.

[Note: Direct reduce-scatter] All-to-all of slices, then a local sum in tree order (kernels: [Note: One arithmetic]),
which is the caller's ``on_complete``. It sends (N-1)/N of the bucket like a ring, has one order of summation at any
bucket size, and sums in fp32 whatever the wire dtype. ``direct=False`` uses the backend's reduce-scatter for fp32
(faster on NCCL, its order of summation is its own); it would sum other dtypes in themselves, so those always go the
direct way, and so does all where sums are rounded to another ``reduce_dtype``. Over several nodes it may be cut in two
(nodes: [Note: Two steps]); groups of nodes, buffers, the formula of traffic and the kernels that are tried follow
``Collectives.nodes``. On NCCL both steps are issued at once,
with the sum between them on a stream of its own, so that the computation waits for the end of the second alone. On gloo
the second is issued when the first is found done or waited for. Either way every rank issues each kind in the order of
its buckets.

[Note: Gather by broadcasts] On gloo N broadcasts, each rank its own slice in place, are up to three times as fast as
its all-gather and send the same bytes. Beyond ``_MAX_BROADCAST_RANKS`` ranks the latency of N operations wins.
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from shardengine.comm.failures import Failures
from shardengine.comm.flight_recorder import HOOK, CollectiveRecord, FlightRecorder, Purpose, first_difference
from shardengine.comm.frames import ROOM, first_frame, lengths, table
from shardengine.comm.group_kind import GroupName
from shardengine.comm.mesh import Mesh
from shardengine.comm.slices import Coding, Messages, Slices
from shardengine.comm.watcher import Watcher
from shardengine.comm.work import Work, ends_on_stream, explain, wait_for
from shardengine.errors import CommunicationError, InternalError, MismatchError
from shardengine.kernels import ordered_sum
from shardengine.offload import BufferPool, CopyStream
from shardengine.stages import Axis, Operation, Placement, axes, operation
from shardengine.trace import COMMUNICATION, HostMoment, Moment, Trace

_MAX_BROADCAST_RANKS = 8
_DEBUG_TEXT_BYTES = 256


class Subject(Protocol):
    """What a collective moves, for records and errors: a bucket's layout, or ``Named``."""

    @property
    def label(self) -> str:
        """What it is called."""

    @property
    def names(self) -> Sequence[str]:
        """The parameters in it."""


class Named(NamedTuple):
    """What is no bucket."""

    names: Sequence[str]
    label: str = ""


class Parts(NamedTuple):
    """What ``deliver`` moves: ``full`` (flat, ``to_each`` rank so many elements, in rank order) and what ``received``
    (``from_each`` so many) takes. of_all: bytes that all ranks have together."""

    full: Tensor
    to_each: Sequence[int]
    received: Tensor
    from_each: Sequence[int]
    of_all: int


OnComplete = Callable[[Sequence[Tensor]], None]
"""Called with the terms of a reduce-scatter, once they are there."""


class Way(NamedTuple):
    """How a bucket is moved. coding: makes what travels, ``Messages`` of a reduce-scatter, whose tensor is fp32 then,
    and may be changed; ``Coding`` of what is gathered · earlier: from PARTIAL to SHARDED on a hybrid mesh, the group's
    sum of earlier micro-batches (PARTIAL_ACROSS), a buffer of the pool, which is the caller's no longer: it joins
    before sums go across."""

    coding: Any = None
    earlier: Tensor | None = None


class _Reduction(NamedTuple):
    """What a reduce-scatter is of, what takes the terms; earlier, coding: as in ``Way``."""

    what: Subject
    purpose: Purpose
    on_complete: OnComplete
    earlier: Tensor | None
    coding: Messages | None


class _HeldUp(NamedTuple):
    """Who waited for a collective (None: the host), and from when to when."""

    stream: Any
    start: Moment
    end: Moment


class Collectives:
    """Data operations over a mesh. ``sent``: bytes this rank sends, by purpose, at the algorithm's minimum.

    direct: fp32 is summed here, too · reduce_dtype: to which each sum over ranks is rounded · hierarchical: reduce in
    two steps where the ranks share nodes, the sums are made here, and what travels is not coded.
    """

    def __init__(
        self,
        mesh: Mesh,
        pool: BufferPool,
        *,
        overlap: bool = True,
        direct: bool = True,
        debug: bool = False,
        reduce_dtype: torch.dtype = torch.float32,
        hierarchical: bool = False,
    ) -> None:
        self.sent: Counter[Purpose] = Counter()
        self.trace = Trace(mesh.platform.moment)
        self._pool = pool
        self._overlap = overlap and not debug  # comparing needs the same order of issue on every rank
        self._direct = direct or reduce_dtype is not torch.float32  # the backend would round no sum
        self._debug = debug
        self.reduce_dtype = reduce_dtype
        self._hierarchical = hierarchical
        self.use(mesh)

    def use(self, mesh: Mesh) -> None:
        """From now on over ``mesh``: the same ranks, new groups (``Mesh.renew``)."""
        before: Failures | None = getattr(self, "failures", None)
        self.mesh = mesh
        self._members_of: dict[GroupName, tuple[int, ...]] = {}
        self.failures = Failures(mesh)
        self._watcher = Watcher(self.failures) if mesh.kind.breaks_off and mesh.ranks > 1 else None
        if before is not None:
            self.failures.take_over_progress(before)
        self._sequence = 0
        self.flight_recorder = FlightRecorder((GroupName.GATHER, GroupName.REDUCE))

    def is_direct(self, dtype: torch.dtype) -> bool:
        """Whether gradients that travel in ``dtype`` are summed here and not by the backend."""
        return self._direct or dtype is not torch.float32

    def nodes(self, dtype: torch.dtype) -> int:
        """Of how many nodes, or shard groups, such gradients are reduced inside first; 1: it is done in one step."""
        if self.mesh.replicas > 1:
            return self.mesh.replicas
        return self.mesh.nodes.number if self._hierarchical and self.is_direct(dtype) else 1

    def prepare(self, dtypes: Iterable[torch.dtype]) -> None:
        """Gradients will travel in ``dtypes``: make the groups that their reductions need; collective."""
        if self.mesh.replicas == 1 and any(self.nodes(dtype) > 1 for dtype in dtypes):
            self.mesh.make_node_groups()

    @property
    def may_poll(self) -> bool:
        """Whether what follows a collective may be started as soon as it is found done.

        On NCCL that would interleave two communicators differently on each rank, which can deadlock.
        """
        return self.mesh.backend == "gloo"

    def move(
        self,
        full: Tensor,
        source: Placement,
        target: Placement,
        what: Subject,
        purpose: Purpose,
        on_complete: OnComplete | None = None,
        way: Way = Way(),  # noqa: B008  (frozen)
    ) -> Work:
        """Bring a bucket from one placement to another on all ranks. full: as much of it (flat) as a rank has in the
        larger of the two.

        A gather fills ``full`` in place; what this rank has is already in its place. Of a reduce-scatter ``wait`` hands
        ``on_complete`` the terms, in rank order, whose sum is this rank's slice of the sum of ``full``. They are only
        lent to it; it may write into ``full``, which nobody else may touch before it is called. PARTIAL → REPLICATED
        takes both moves, since the sum is divided in between. Where nothing has to be sent, nothing is.

        way: what else is said of it.
        """
        needed = operation(source, target)
        if (needed is Operation.REDUCE_SCATTER) != (on_complete is not None):
            raise InternalError(f"{what.label}: expected terms to be taken from a reduce-scatter, got {needed.value}")
        if needed in (Operation.NOTHING, Operation.LOCAL_SLICE):
            return Work()
        along = axes(source, target)
        if needed is Operation.REDUCE_SCATTER and on_complete is not None:
            return self._reduce_scatter(full, along, _Reduction(what, purpose, on_complete, way.earlier, way.coding))
        if needed is Operation.ALL_GATHER:
            along = self._present(along)
            if way.coding is not None and along:
                return self._gather_messages(full, along, way.coding, what, purpose)
            return self._all_gather(full, along, what, purpose)
        raise InternalError(f"{what.label}: {needed.value} from {source.name} to {target.name} is no single move")

    def _present(self, along: Sequence[Axis]) -> Sequence[Axis]:
        """Those along which there are other ranks."""
        return [axis for axis in along if self.mesh.place_on(axis)[1] > 1]

    def _all_gather(self, full: Tensor, along: Sequence[Axis], what: Subject, purpose: Purpose) -> Work:
        """Along one axis after the other; the second on a stream that waits for the first, where there are streams. On
        gloo it is issued when the first is found done or waited for."""
        if not along:
            return Work()
        if len(along) == 1:
            return self._issue(*self._gather_along(full, along[0], what, purpose))
        place, size = self.mesh.place_on(Axis.INSIDE)
        record, begin = self._gather_along(full.chunk(size)[place], along[0], what, purpose)
        begun: list[dist.Work] = []

        def across() -> list[dist.Work]:
            begun.extend(begin())
            return begun

        def second() -> Work:
            later, inside = self._gather_along(full, along[1], what, purpose)

            def behind() -> list[dist.Work]:
                with self._between_steps.is_current():
                    for work in begun:
                        wait_for(work, record, self.failures)  # on this stream, which nobody else waits for
                    return inside()

            return self._issue(later, behind)

        return self._in_two_steps(self._issue(record, across), second)

    def _in_two_steps(self, first: Work, second: Callable[[], Work]) -> Work:
        """``second``, which itself waits for the data of ``first``: at once, or when that is found to be there."""
        if self.may_poll and self._overlap:
            return first.followed_by(second)
        if not self._overlap:
            first.wait_data()  # the computation has stood still for it
        return second()

    def _gather_messages(
        self, full: Tensor, along: Sequence[Axis], coding: Coding, what: Subject, purpose: Purpose
    ) -> Work:
        """As ``_all_gather``, of what ``coding`` makes of each slice, this rank's own included."""
        number, count = 0, 1
        for axis in (Axis.INSIDE, Axis.ACROSS):  # slices lie in this order
            if axis in along:
                rank, ranks = self.mesh.place_on(axis)
                number, count = number * ranks + rank, count * ranks
        parts = full.chunk(count)
        messages = self._pool.take(count * coding.bytes_of(parts[0].numel()), torch.uint8)
        coding.encode(parts[number], 1, messages.chunk(count)[number])

        def decode() -> None:
            for message, part in zip(messages.chunk(count), parts, strict=True):
                coding.decode(message, part)
            self._pool.give(messages)

        return self._all_gather(messages, along, what, purpose).ending_with(decode)

    def _gather_along(
        self, full: Tensor, axis: Axis, what: Subject, purpose: Purpose
    ) -> tuple[CollectiveRecord, Callable[[], list[dist.Work]]]:
        """What ``_issue`` needs of a gather of ``full`` along ``axis``."""
        mesh = self.mesh
        sent = _sendable(full)
        line = mesh.line(axis, GroupName.EVALUATE if purpose is Purpose.EVALUATION else GroupName.GATHER)
        if mesh.backend == "gloo" and line.ranks <= _MAX_BROADCAST_RANKS:

            def call() -> list[dist.Work]:
                slices = sent.chunk(line.ranks)
                return [mesh.wire.broadcast(part, r, line.group) for r, part in enumerate(slices)]
        else:

            def call() -> list[dist.Work]:
                length = sent.numel() // line.ranks
                own = sent[line.rank * length : (line.rank + 1) * length]
                return [mesh.wire.all_gather(sent, own, line.group)]

        size = full.nbytes * (line.ranks - 1) // line.ranks
        return self._record(line.name, _named_along("all-gather", line.name), what, size, purpose), call

    def _reduce_scatter(self, full: Tensor, along: Sequence[Axis], reduction: _Reduction) -> Work:
        """See ``move``. Sums that travel across have ``reduce_dtype``."""
        if len(along) > 1 and self.mesh.replicas > 1:
            return self._reduce_in_two_steps(full, reduction, self.mesh.replicas)
        if not (along := self._present(along)):
            return Work(on_complete=lambda: reduction.on_complete([full]))
        if self.mesh.replicas == 1 and self.nodes(full.dtype) > 1 and reduction.coding is None:
            return self._reduce_in_two_steps(full, reduction, self.mesh.nodes.number)
        mesh, line = self.mesh, self.mesh.line(along[0], GroupName.REDUCE)
        slices = Slices(self._pool, full, line.ranks, reduction.coding, direct=self.is_direct(full.dtype))

        def sum_terms() -> None:
            reduction.on_complete(slices.terms())
            slices.give()

        name = _named_along("reduce-scatter", line.name)
        record = self._record(line.name, name, reduction.what, slices.bytes_sent, reduction.purpose)
        return self._issue(record, lambda: [slices.begin(mesh.wire, line.group)], sum_terms)

    def _reduce_in_two_steps(self, full: Tensor, reduction: _Reduction, groups: int) -> Work:
        """As ``_reduce_scatter``, inside of each of ``groups`` and then across them; the terms are the sums of those
        ([Note: Direct reduce-scatter])."""
        mesh, what, purpose, between = self.mesh, reduction.what, reduction.purpose, self._between_steps
        of_ranks = mesh.shard_groups[groups] if mesh.replicas > 1 else mesh.node_groups
        size, length, direct = mesh.ranks // groups, full.numel() // mesh.ranks, self.is_direct(full.dtype)
        packed = full if mesh.replicas > 1 else self._pool.take(full.numel(), full.dtype)  # by place, then by group
        summed, coding = self._pool.take(groups * length, self.reduce_dtype), reduction.coding
        spent = None if packed is full else full  # it was packed
        near = Slices(self._pool, packed, size, coding, direct=direct, into=spent) if size > 1 else None
        again = coding if coding is None or near is None else coding.again
        far = Slices(self._pool, summed, groups, again, direct=direct)
        started = mesh.platform.mark()

        begun: list[dist.Work] = []

        def inside() -> list[dist.Work]:
            with between.is_current():
                started.wait()
                if packed is not full:
                    packed.view(size, groups, length).copy_(full.view(groups, size, length).transpose(0, 1))
                if near is not None:
                    begun.append(near.begin(mesh.wire, of_ranks[GroupName.INSIDE]))
            return begun

        def across() -> list[dist.Work]:
            with between.is_current():
                started.wait()
                for work in begun:
                    wait_for(work, record, self.failures)  # on this stream, which nobody else waits for
                terms = [full] if near is None else near.terms()
                ordered_sum(terms, summed, total=reduction.earlier, reduce_dtype=self.reduce_dtype)
                return [far.begin(mesh.wire, of_ranks[GroupName.ACROSS])]

        def sum_terms() -> None:
            reduction.on_complete(far.terms())
            for slices in (near, far) if near is not None else (far,):
                slices.give()
            for buffer in (summed, reduction.earlier, packed if packed is not full else None):
                if buffer is not None:
                    self._pool.give(buffer)

        def second() -> Work:
            later = self._record(GroupName.ACROSS, "reduce-scatter across", what, far.bytes_sent, purpose)
            return self._issue(later, across, sum_terms)

        if near is None:
            return second()
        record = self._record(GroupName.INSIDE, "reduce-scatter inside", what, near.bytes_sent, purpose)
        return self._in_two_steps(self._issue(record, inside), second)

    def deliver(self, parts: Parts, what: Subject, purpose: Purpose, axis: Axis = Axis.ALL) -> Work:
        """Begin to bring each rank along ``axis`` its part of every rank's tensor, of any length; ``parts`` must not
        change before the end. Nothing is sent at one rank, whose part is copied."""
        line = self.mesh.line(axis, GroupName.REDUCE)
        if line.ranks == 1:
            parts.received.copy_(parts.full)
            return Work()
        full, received = _sendable(parts.full), _sendable(parts.received)
        width = parts.full.element_size() // full.element_size()

        def call() -> list[dist.Work]:
            lengths = [[count * width for count in counts] for counts in (parts.from_each, parts.to_each)]
            return [self.mesh.wire.all_to_all_of(received, lengths[0], full, lengths[1], line.group)]

        sent = (parts.full.numel() - parts.to_each[line.rank]) * parts.full.element_size()
        record = self._record(line.name, "all-to-all", what, sent, purpose, agreed=parts.of_all)
        return self._issue(record, call)

    def share(
        self, full: Tensor, lengths: Sequence[int], what: Subject, purpose: Purpose, axis: Axis = Axis.ALL
    ) -> Work:
        """Begin to bring every rank's part of ``full`` (flat, parts of these ``lengths`` in rank order, this rank's is
        there) to all along ``axis``."""
        line = self.mesh.line(axis, GroupName.REDUCE)
        if line.ranks == 1:
            return Work()

        def call() -> list[dist.Work]:
            if len({*lengths}) == 1 and not (self.mesh.backend == "gloo" and line.ranks <= _MAX_BROADCAST_RANKS):
                own = full.chunk(line.ranks)[line.rank]
                return [self.mesh.wire.all_gather(_sendable(full), _sendable(own), line.group)]
            parts = enumerate(full.split(list(lengths)))
            return [self.mesh.wire.broadcast(_sendable(p), r, line.group) for r, p in parts if p.numel()]

        sent = lengths[line.rank] * full.element_size() * (line.ranks - 1)
        record = self._record(line.name, "all-gather of parts", what, sent, purpose, agreed=full.nbytes)
        return self._issue(record, call)

    def follow(self, work: Any, what: Subject, purpose: Purpose, on_complete: Callable[[], None]) -> Work:
        """What somebody else has begun on every rank, waited for as what is begun here. Its bytes are not known.

        work: has torch's ``wait``, ``is_completed`` and ``get_future``, and what has failed, ``error``: of a connection
        it names who is missing, else it is for ``on_complete`` to raise.
        """
        record = self._record(GroupName.REDUCE, HOOK, what, 0, purpose, begun_here=False)

        def complete() -> None:
            if (error := work.error) is not None:
                explain(error, record, self.failures)
            on_complete()

        return self._issue(record, lambda: [work], complete)

    def broadcast(self, tensor: Tensor, what: Subject, purpose: Purpose, source: int = 0) -> None:
        """``tensor`` (contiguous) of rank ``source`` to all; blocks."""
        if self.mesh.ranks == 1:
            return
        flat = _sendable(tensor.detach().view(-1))

        def call() -> list[dist.Work]:
            return [self.mesh.wire.broadcast(flat, source, self.mesh.gather)]

        sent = flat.nbytes * (self.mesh.ranks - 1) // self.mesh.ranks
        self._issue(self._record(GroupName.GATHER, "broadcast", what, sent, purpose), call).wait()

    def exchange(
        self, payload: Tensor, what: str = "control data", meanwhile: Callable[[], None] | None = None
    ) -> Tensor:
        """Every rank's ``payload`` (flat uint8 on CPU, equal lengths) → [ranks, length], in rank order; blocks.

        what: named in the error when it fails, or when other ranks exchange something else ([Note: Frames]); its first
        word is the same on every rank · meanwhile: called again and again while this rank waits for the others.
        """
        if self.mesh.ranks == 1:
            return payload.unsqueeze(0)
        frames = self._exchanged(first_frame(payload, what, varies=False), what, meanwhile)
        lengths(frames, self.mesh.rank)
        rest = payload[ROOM:]
        return table(frames, self._exchanged(rest, what, meanwhile) if rest.numel() else None, payload.numel())

    def _exchanged(self, payload: Tensor, what: str, meanwhile: Callable[[], None] | None = None) -> Tensor:
        gathered = payload.new_empty(self.mesh.ranks * payload.numel())

        def call() -> list[dist.Work]:
            return [self.mesh.wire.all_gather(gathered, payload, self.mesh.control)]

        sent = payload.numel() * (self.mesh.ranks - 1)
        record = self._record(GroupName.CONTROL, "exchange", Named((), what), sent, Purpose.CONTROL)
        self._issue(record, call, meanwhile=meanwhile).wait()
        return gathered.view(self.mesh.ranks, payload.numel())

    def hear(self, payload: Tensor, what: str) -> Tensor:
        """Rank 0's ``payload`` (flat uint8 on CPU, equal lengths), whatever this rank's is; blocks. what: as above."""
        return self.exchange(payload, what)[0].contiguous()

    def exchange_values(self, values: Tensor, payload: Tensor, what: str) -> tuple[Tensor, Tensor]:
        """As ``exchange``, with fp64 ``values`` (1-D) that stay on the mesh's device: [ranks, n] and the payloads.

        One message on the CPU. On a GPU the values travel on their own, and the host does not wait for them.
        """
        if not self.mesh.platform.is_apart:
            rows = self.exchange(torch.cat([values.view(torch.uint8), payload]), what)
            head, tail = rows.split([values.nbytes, payload.numel()], dim=1)
            return head.reshape(-1).clone().view(torch.float64).view(self.mesh.ranks, values.numel()), tail
        rows = self.exchange(payload, what)
        if self.mesh.ranks == 1 or not values.numel():
            return values.expand(self.mesh.ranks, -1), rows
        gathered = values.new_empty(self.mesh.ranks * values.numel())

        def call() -> list[dist.Work]:
            return [self.mesh.wire.all_gather(gathered, values, self.mesh.gather)]

        sent = values.nbytes * (self.mesh.ranks - 1)
        self._issue(self._record(GroupName.GATHER, "all-gather", Named((), what), sent, Purpose.CONTROL), call).wait()
        return gathered.view(self.mesh.ranks, -1), rows

    def exchange_objects(self, value: Any, what: str = "control data") -> list[Any]:
        """Every rank's JSON value, in rank order; blocks. For start-up and error paths. what: as for ``exchange``."""
        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        if self.mesh.ranks == 1:
            return [json.loads(text.numpy().tobytes())]
        frames = self._exchanged(first_frame(text, what, varies=True), what)
        counts = lengths(frames, self.mesh.rank)
        longest = int(counts.max())
        rest = text.new_zeros(max(0, longest - ROOM))
        own = text[ROOM:]
        rest[: len(own)] = own
        rows = table(frames, self._exchanged(rest, what) if rest.numel() else None, longest)
        return [json.loads(row[:n].numpy().tobytes()) for row, n in zip(rows, counts.tolist(), strict=True)]

    def require_same(self, digests: Tensor) -> None:
        """``MismatchError`` on every rank unless all ranks' ``flight_recorder.digest()`` are equal; names one."""
        if bool((digests == digests[0]).all()):
            return
        found = first_difference(self.exchange_objects(self.flight_recorder.texts(), "collectives of this window"))
        where = "" if found is None else f": rank 0 issued [{found[1]}] where rank {found[0]} issued [{found[2]}]"
        raise MismatchError(
            f"ranks took part in different collectives{where}, so the gradients of this window are wrong. Expected the "
            "same blocks in the same order on every rank (a branch inside of a block may differ: list the class of the "
            "module around the branch in zero_optimization.units); then engine.reset() on every rank"
        )

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self.exchange(torch.zeros(1, dtype=torch.uint8), "a barrier")

    def _record(
        self,
        group: GroupName,
        operation: str,
        what: Subject,
        sent: int,
        purpose: Purpose,
        *,
        agreed: int | None = None,
        begun_here: bool = True,
    ) -> CollectiveRecord:
        if purpose is not Purpose.CONTROL:
            self._sequence += 1
        issued = self.failures.issued
        issued[group] += 1
        record = CollectiveRecord(
            *(self._sequence, issued[group], group, operation, what.label, tuple(what.names), sent, purpose, agreed),
            members=self._members(group),
            begun_here=begun_here,
        )
        self.flight_recorder.note(group.counts_as, record.summary)
        return record

    def _members(self, group: GroupName) -> tuple[int, ...]:
        if group not in self._members_of:
            self._members_of[group] = tuple(self.mesh.members(group))
        return self._members_of[group]

    def _issue(
        self,
        record: CollectiveRecord,
        call: Callable[[], list[dist.Work]],
        on_complete: Callable[[], None] | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> Work:
        """Count it, compare it across ranks in debug mode, start it; without overlap wait for it here. meanwhile: see
        ``exchange``."""
        is_data = record.purpose is not Purpose.CONTROL
        if self.mesh.breaking_off.reason:
            self.mesh.breaking_off.check(record.describe(self.mesh.rank))
        if self._debug and is_data:
            self._compare(record.debug_text)
        self.sent[record.purpose] += record.sent
        start = self._moment(record) if self.trace.recording else None
        try:
            works = call()
        except RuntimeError as error:
            raise CommunicationError(f"{record.describe(self.mesh.rank)} failed: {error}") from error
        if self._watcher is not None and record.begun_here and record.group is not GroupName.CONTROL:
            self._watcher.issued(record, works[-1])
        if start is not None:
            self._trace_end(works, record, start)
        before = None
        if not self._overlap and is_data:  # and once more where it is used, maybe on another stream
            before = self._held_up(record, self.failures, works)
        return Work(works, functools.partial(self._wait, record, self.failures, before, meanwhile), on_complete)

    def _wait(
        self,
        record: CollectiveRecord,
        failures: Failures,
        before: _HeldUp | None,
        meanwhile: Callable[[], None] | None,
        works: Sequence[dist.Work],
    ) -> None:
        """Until the data of ``works`` may be used. failures: of the time at which they were issued · before: when they
        were waited for already, which is what counts if it was the same stream · meanwhile: see ``exchange``."""
        now = self._held_up(record, failures, works, meanwhile)
        exposed = before if before is not None and before.stream == now.stream else now
        self.trace.waited(record.title, exposed.start, exposed.end)

    def _held_up(
        self,
        record: CollectiveRecord,
        failures: Failures,
        works: Sequence[dist.Work],
        meanwhile: Callable[[], None] | None = None,
    ) -> _HeldUp:
        """Wait on the current stream, or on the host; for how long."""
        start = self._moment(record)
        for work in works:
            wait_for(work, record, failures, meanwhile)
        return _HeldUp(self.mesh.platform.here(), start, self._moment(record))

    def _moment(self, record: CollectiveRecord) -> Moment:
        """The present one of whoever waits for the collective: the current stream, or the host."""
        return self.trace.moment() if ends_on_stream(record, self.mesh) else HostMoment()

    def _trace_end(self, works: Sequence[dist.Work], record: CollectiveRecord, start: Moment) -> None:
        """Write down when ``works`` are done: from the thread that finds it, or on a stream that waits for that."""
        details = {"purpose": record.purpose.value, "bytes sent": record.sent, "what": record.subject}

        def ended(_: Any = None) -> None:
            self.trace.add(COMMUNICATION, record.title, start, self._moment(record), details)

        if not ends_on_stream(record, self.mesh):
            works[-1].get_future().add_done_callback(ended)
            return
        with self._ends.is_current():
            for work in works:
                work.wait()
            ended()

    @functools.cached_property
    def _between_steps(self) -> CopyStream:
        """Where the sums of nodes are made."""
        return self.mesh.platform.copy_stream()

    @functools.cached_property
    def _ends(self) -> CopyStream:
        """Where the ends of traced collectives are waited for."""
        return self.mesh.platform.copy_stream()

    def _compare(self, debug_text: str) -> None:
        raw = debug_text.encode()[:_DEBUG_TEXT_BYTES].ljust(_DEBUG_TEXT_BYTES)
        rows = self.exchange(torch.frombuffer(bytearray(raw), dtype=torch.uint8), "what is issued next (debug)")
        texts = [bytes(row.tolist()).decode(errors="replace").strip() for row in rows]
        for rank, text in enumerate(texts):
            if text != texts[0]:
                raise MismatchError(
                    f"collectives differ between ranks: rank 0 issues [{texts[0]}], rank {rank} issues [{text}]; "
                    "expected the same order everywhere. Do the ranks take different branches of the model?"
                )


def _named_along(operation: str, group: GroupName) -> str:
    """What a collective of ``group`` is called."""
    return f"{operation} across" if group.is_across else f"{operation} inside" if group in _INSIDE else operation


_INSIDE = (GroupName.INSIDE, GroupName.GATHER_INSIDE, GroupName.EVALUATE_INSIDE)
_KNOWN_DTYPES = (torch.float32, torch.float64, torch.float16, torch.int8, torch.uint8, torch.int32, torch.int64)


def _sendable(flat: Tensor) -> Tensor:
    """``flat`` itself, or the same memory as bytes where a backend may not know its dtype; for what is only copied."""
    return flat if flat.dtype in _KNOWN_DTYPES else flat.view(torch.uint8)
