"""Data operations between ranks, by their effect.

Buckets move by compiled transfers (``transfer``), which are kept here until the mesh or the layout changes. Everything
else (parts of any length, broadcasts, control data) is sent directly. At one rank everything here is a no-op on the
same path. Must not know: modules, hooks, stages.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shardengine.comm.flight_recorder import HOOK, Collective, Purpose, first_difference
from shardengine.comm.frames import ROOM, first_frame, lengths, table
from shardengine.comm.group_kind import GroupName
from shardengine.comm.mesh import Mesh
from shardengine.comm.transfer import (
    MAX_BROADCAST_RANKS,
    CollectiveLabel,
    Fabric,
    OnComplete,
    Transfer,
    TransferOptions,
    compile_transfer,
    sendable,
)
from shardengine.comm.work import CollectiveLedger, Work, explain
from shardengine.errors import MismatchError
from shardengine.offload import BufferPool
from shardengine.stages import Axis, Placement
from shardengine.trace import Trace

_DEBUG_TEXT_BYTES = 256


class Named(NamedTuple):
    """The label of a collective that moves no bucket."""

    names: Sequence[str]
    label: str = ""


class Chunks(NamedTuple):
    """The tensors of ``deliver``.

    full: flat, ``to_each`` rank's elements in rank order · received: takes ``from_each`` rank's elements · of_all: the
    bytes of all ranks together.
    """

    full: Tensor
    to_each: Sequence[int]
    received: Tensor
    from_each: Sequence[int]
    of_all: int


class Collectives:
    """Data operations over a mesh. ``sent``: bytes this rank sends, by purpose, at the algorithm's minimum.

    direct: fp32 gradients are also summed here and not by the backend · reduce_dtype: each sum over ranks is rounded to
    it · hierarchical: reduce in two steps if the ranks share nodes, the sums are made here, and messages are not coded.
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
        """Continue over ``mesh``: the same ranks with new groups (``Mesh.renew``)."""
        before: CollectiveLedger | None = getattr(self, "_ledger", None)
        self.mesh = mesh
        self._ledger = CollectiveLedger(
            mesh,
            self.trace,
            self.sent,
            overlap=self._overlap,
            before=before,
            compare=self._compare if self._debug else None,
        )
        self.failures, self.flight_recorder = self._ledger.failures, self._ledger.flight_recorder
        self._fabric = Fabric(
            mesh,
            self._ledger,
            self._pool,
            direct=self._direct,
            reduce_dtype=self.reduce_dtype,
            hierarchical=self._hierarchical,
            overlap=self._overlap,
        )
        self.may_poll = self._fabric.may_poll
        """As ``Fabric.may_poll``."""
        self._members: dict[GroupName, tuple[int, ...]] = {}
        self._transfers: dict[_Key, Transfer] = {}

    def is_direct(self, dtype: torch.dtype) -> bool:
        """As ``Fabric.is_direct``."""
        return self._fabric.is_direct(dtype)

    def nodes(self, dtype: torch.dtype) -> int:
        """As ``Fabric.nodes``."""
        return self._fabric.nodes(dtype)

    def prepare(self, dtypes: Iterable[torch.dtype]) -> None:
        """Make the groups that reductions of a new layout need; collective.

        dtypes: the dtypes that its gradients travel in.
        """
        if self.mesh.replicas == 1 and any(self.nodes(dtype) > 1 for dtype in dtypes):
            self.mesh.make_node_groups()

    def forget_transfers(self) -> None:
        """Drop the compiled transfers: those of a layout that is gone keep it alive."""
        self._transfers.clear()

    def move(
        self,
        full: Tensor,
        source: Placement,
        target: Placement,
        what: CollectiveLabel,
        purpose: Purpose,
        on_complete: OnComplete | None = None,
        options: TransferOptions = TransferOptions(),  # noqa: B008  (frozen)
    ) -> Work:
        """Bring a bucket from one placement to another on all ranks.

        full: flat, as much of the bucket as a rank has in the larger of the two placements.

        A gather fills ``full`` in place; this rank's part is already in its place. After a reduce-scatter ``wait``
        passes ``on_complete`` the terms, in rank order, whose sum is this rank's slice of the sum of ``full``. The
        terms are only lent to ``on_complete``. It may write into ``full``, which nobody else may touch before it is
        called. PARTIAL → REPLICATED takes both moves, since the sum is divided in between. If nothing has to be sent,
        nothing is.
        """
        key = id(what), source, target, purpose, full.dtype, full.numel()
        transfer = self._transfers.get(key)
        if transfer is None:
            transfer = compile_transfer(self._fabric, what, source, target, purpose, full)
            if not isinstance(what, Named):  # a layout, which its transfer keeps alive, so that its id stays its own
                self._transfers[key] = transfer
        return transfer.start(full, on_complete, options)

    def deliver(self, parts: Chunks, what: CollectiveLabel, purpose: Purpose, axis: Axis = Axis.ALL) -> Work:
        """Begin to bring each rank along ``axis`` its part of every rank's tensor; parts may have any length.

        ``parts`` must not change before the end. At one rank nothing is sent, and its part is copied.
        """
        line = self.mesh.line(axis, GroupName.REDUCE)
        if line.ranks == 1:
            parts.received.copy_(parts.full)
            return Work()
        full, received = sendable(parts.full), sendable(parts.received)
        width = parts.full.element_size() // full.element_size()

        def call() -> list[dist.Work]:
            lengths = [[count * width for count in counts] for counts in (parts.from_each, parts.to_each)]
            return [self.mesh.wire.all_to_all_of(received, lengths[0], full, lengths[1], line.group)]

        sent = (parts.full.numel() - parts.to_each[line.rank]) * parts.full.element_size()
        return self._start(call, (line.name, "all-to-all", what, sent, purpose), agreed=parts.of_all)

    def share(
        self, full: Tensor, lengths: Sequence[int], what: CollectiveLabel, purpose: Purpose, axis: Axis = Axis.ALL
    ) -> Work:
        """Begin to bring every rank's part of ``full`` to all ranks along ``axis``.

        full: flat; its parts have these ``lengths``, in rank order, and this rank's part is already there.
        """
        line = self.mesh.line(axis, GroupName.REDUCE)
        if line.ranks == 1:
            return Work()

        def call() -> list[dist.Work]:
            if len({*lengths}) == 1 and not (self.mesh.backend == "gloo" and line.ranks <= MAX_BROADCAST_RANKS):
                own = full.chunk(line.ranks)[line.rank]
                return [self.mesh.wire.all_gather(sendable(full), sendable(own), line.group)]
            parts = enumerate(full.split(list(lengths)))
            return [self.mesh.wire.broadcast(sendable(p), r, line.group) for r, p in parts if p.numel()]

        sent = lengths[line.rank] * full.element_size() * (line.ranks - 1)
        return self._start(call, (line.name, "all-gather of parts", what, sent, purpose), agreed=full.nbytes)

    def follow(self, work: Any, what: CollectiveLabel, purpose: Purpose, on_complete: Callable[[], None]) -> Work:
        """Return the wait for a collective that somebody else has begun on every rank; its bytes are not known.

        work: has torch's ``wait``, ``is_completed`` and ``get_future``, and ``error``, its failure. For a failure of a
        connection an error that names the missing rank is raised; any other is left to ``on_complete`` to raise.
        """
        of = Collective(GroupName.REDUCE, HOOK, what.label, tuple(what.names), 0, purpose, begun_here=False)
        record = self._ledger.record(of)

        def complete() -> None:
            if (error := work.error) is not None:
                explain(error, record, self.failures)
            on_complete()

        return self._ledger.issue(record, lambda: [work], complete)

    def broadcast(self, tensor: Tensor, what: CollectiveLabel, purpose: Purpose, source: int = 0) -> None:
        """Bring ``tensor`` (contiguous) of rank ``source`` to all ranks; blocks."""
        if self.mesh.ranks == 1:
            return
        flat = sendable(tensor.detach().view(-1))

        def call() -> list[dist.Work]:
            return [self.mesh.wire.broadcast(flat, source, self.mesh.gather)]

        sent = flat.nbytes * (self.mesh.ranks - 1) // self.mesh.ranks
        self._start(call, (GroupName.GATHER, "broadcast", what, sent, purpose)).wait()

    def exchange(
        self, payload: Tensor, what: str = "control data", meanwhile: Callable[[], None] | None = None
    ) -> Tensor:
        """Return every rank's ``payload`` (flat uint8 on CPU, equal lengths) as [ranks, length], in rank order; blocks.

        what: named in the error if the exchange fails, or if other ranks exchange something else ([Note: Frames]); its
        first word is the same on every rank · meanwhile: called again and again while this rank waits for the others.
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
        facts = GroupName.CONTROL, "exchange", Named((), what), sent, Purpose.CONTROL
        self._start(call, facts, meanwhile=meanwhile).wait()
        return gathered.view(self.mesh.ranks, payload.numel())

    def hear(self, payload: Tensor, what: str) -> Tensor:
        """Return rank 0's ``payload`` (flat uint8 on CPU, equal lengths) on every rank; blocks.

        what: as for ``exchange``.
        """
        return self.exchange(payload, what)[0].contiguous()

    def exchange_values(self, values: Tensor, payload: Tensor, what: str) -> tuple[Tensor, Tensor]:
        """As ``exchange``, with fp64 ``values`` (1-D) that stay on the mesh's device: [ranks, n] and the payloads.

        On the CPU it is one message. On a GPU the values travel separately, and the host does not wait for them.
        """
        if not self.mesh.platform.has_own_memory:
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
        self._start(call, (GroupName.GATHER, "all-gather", Named((), what), sent, Purpose.CONTROL)).wait()
        return gathered.view(self.mesh.ranks, -1), rows

    def exchange_objects(self, value: Any, what: str = "control data") -> list[Any]:
        """Return every rank's JSON value, in rank order; blocks. For start-up and error paths.

        what: as for ``exchange``.
        """
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
        """Raise ``MismatchError``, naming a rank, on every rank unless all ``flight_recorder.digest()`` are equal."""
        if bool((digests == digests[0]).all()):
            return
        found = first_difference(self.exchange_objects(self.flight_recorder.texts(), "collectives of this window"))
        where = "" if found is None else f": rank 0 issued [{found[1]}] where rank {found[0]} issued [{found[2]}]"
        raise MismatchError(
            f"ranks took part in different collectives{where}, so the gradients of this window are wrong. Expected the "
            "same blocks in the same order on every rank (a branch inside of a block may differ: list the class of the "
            "module around the branch in zero_optimization.units); then engine.reset() on every rank",
            code="collectives-differ-between-ranks",
        )

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self.exchange(torch.zeros(1, dtype=torch.uint8), "a barrier")

    def _start(
        self,
        call: Callable[[], list[dist.Work]],
        facts: tuple[GroupName, str, CollectiveLabel, int, Purpose],
        on_complete: Callable[[], None] | None = None,
        meanwhile: Callable[[], None] | None = None,
        **more: Any,
    ) -> Work:
        """Start a collective that is sent once. facts: group, operation, label, bytes sent, purpose."""
        group, operation, what, sent, purpose = facts
        if group not in self._members:
            self._members[group] = tuple(self.mesh.members(group))
        members = self._members[group]
        of = Collective(group, operation, what.label, tuple(what.names), sent, purpose, members=members, **more)
        return self._ledger.start(of, call, on_complete, meanwhile)

    def _compare(self, debug_text: str) -> None:
        raw = debug_text.encode()[:_DEBUG_TEXT_BYTES].ljust(_DEBUG_TEXT_BYTES)
        rows = self.exchange(torch.frombuffer(bytearray(raw), dtype=torch.uint8), "what is issued next (debug)")
        texts = [bytes(row.tolist()).decode(errors="replace").strip() for row in rows]
        for rank, text in enumerate(texts):
            if text != texts[0]:
                raise MismatchError(
                    f"collectives differ between ranks: rank 0 issues [{texts[0]}], rank {rank} issues [{text}]; "
                    "expected the same order everywhere. Do the ranks take different branches of the model?",
                    code="collectives-differ-between-ranks",
                )


_Key = tuple[int, Placement, Placement, Purpose, torch.dtype, int]
"""The key of a transfer: its label's identity, placements, purpose, and the dtype and length of the tensor."""
