"""The only file that calls torch.distributed's data operations. Owns byte and sequence counters.

Must not know: modules, hooks, stages. At one rank everything here is a no-op on the same path.

Every collective passes through ``Collectives._issue``, which counts its bytes, compares it across ranks in debug mode,
and turns a failure into an error that names the operation, the bucket's parameters and the rank.

[Note: Direct reduce-scatter] All-to-all of slices, then a local sum in tree order (kernels: [Note: One arithmetic]).
It sends (N-1)/N of the bucket like a ring, has one order of summation at any bucket size, and sums in fp32 whatever the
wire dtype. ``direct=False`` uses the backend's reduce-scatter (faster on NCCL, its order of summation is its own).

[Note: Gather by broadcasts] On gloo N broadcasts, each rank its own slice in place, are up to three times as fast as
its all-gather and send the same bytes. Beyond ``_MAX_BROADCAST_RANKS`` ranks the latency of N operations wins.
"""

from __future__ import annotations

import enum
import json
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardengine.bucket import BufferPool
from shardengine.errors import CommunicationError, MismatchError
from shardengine.kernels import tree_sum
from shardengine.mesh import Mesh

_MAX_BROADCAST_RANKS = 8
_ANNOUNCEMENT_BYTES = 256

# renamed in torch 2.13; the old names warn there, the new ones are missing before
_all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Purpose(enum.Enum):
    """What bytes are sent for; ``STEP`` are those that a stage's formula counts."""

    GRADIENTS = "gradients: reduce-scatter"
    WHOLE_GRADIENTS = "gradients: all-gather"
    WEIGHTS = "weights: all-gather"
    EVALUATION = "weights without grad: all-gather"
    WHOLE_WEIGHTS = "full_params and state_dict"
    WHOLE_STATE = "full_grads and full_optimizer_state"
    BUFFERS = "buffers"
    START = "start"
    CONTROL = "control"


STEP = (Purpose.GRADIENTS, Purpose.WHOLE_GRADIENTS, Purpose.WEIGHTS)


class Pending:
    """A collective in flight. ``wait`` blocks until its result may be used (on CUDA: makes the stream wait)."""

    def __init__(
        self, works: Sequence[dist.Work], describe: Callable[[], str], finish: Callable[[], None] | None
    ) -> None:
        self._works = works
        self._describe = describe
        self._finish = finish

    def done(self) -> bool:
        """Whether ``wait`` would return at once."""
        return all(work.is_completed() for work in self._works)

    def wait(self) -> None:
        """Wait, then run the local part (the sum of a direct reduce-scatter), once."""
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            raise CommunicationError(f"{self._describe()} failed: {error}") from error
        self._works = ()
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()


class Collectives:
    """Data operations over a mesh. ``sent``: bytes this rank sends, by purpose, at the algorithm's minimum."""

    def __init__(
        self, mesh: Mesh, pool: BufferPool, *, overlap: bool = True, direct: bool = True, debug: bool = False
    ) -> None:
        self.mesh = mesh
        self.sent: Counter[Purpose] = Counter()
        self._pool = pool
        self._overlap = overlap and not debug  # comparing needs the same order of issue on every rank
        self._direct = direct
        self._debug = debug
        self._sequence = 0

    @property
    def may_poll(self) -> bool:
        """Whether what follows a collective may be started as soon as it is found done.

        On NCCL that would interleave two communicators differently on each rank, which can deadlock.
        """
        return self.mesh.backend == "gloo"

    def all_gather(self, full: Tensor, names: Sequence[str], purpose: Purpose) -> Pending:
        """Fill ``full`` (flat, ranks · slice elements) in place; this rank's slice is already in its place."""
        mesh = self.mesh
        if mesh.ranks == 1:
            return Pending((), str, None)
        sent = _sendable(full)
        slices = sent.chunk(mesh.ranks)
        if mesh.backend == "gloo" and mesh.ranks <= _MAX_BROADCAST_RANKS:
            group = mesh.gather

            def call() -> list[dist.Work]:
                return [dist.broadcast(part, src=r, group=group, async_op=True) for r, part in enumerate(slices)]
        else:

            def call() -> list[dist.Work]:
                return [_all_gather_single(sent, slices[mesh.rank], group=mesh.gather, async_op=True)]

        return self._issue("all-gather", call, full.nbytes * (mesh.ranks - 1) // mesh.ranks, names, purpose)

    def reduce_scatter(self, full: Tensor, out: Tensor, names: Sequence[str]) -> Pending:
        """``out`` (a slice, fp32; may be this rank's slice of ``full``) = the sum over ranks of its slice of ``full``.

        ``full`` may be overwritten only after ``wait``.
        """
        mesh = self.mesh
        if mesh.ranks == 1:
            return Pending((), str, lambda: tree_sum([full], out))
        sent = full.nbytes * (mesh.ranks - 1) // mesh.ranks
        received = self._pool.take(full.numel() if self._direct else out.numel(), full.dtype, full.device)

        def call() -> list[dist.Work]:
            if self._direct:
                return [dist.all_to_all_single(received, full, group=mesh.reduce, async_op=True)]
            return [_reduce_scatter_single(received, full, group=mesh.reduce, async_op=True)]

        def finish() -> None:
            tree_sum(received.split(out.numel()), out)
            self._pool.give(received)

        return self._issue("reduce-scatter", call, sent, names, Purpose.GRADIENTS, finish)

    def broadcast(self, tensor: Tensor, names: Sequence[str], purpose: Purpose) -> None:
        """Rank 0's ``tensor`` (contiguous) to all; blocks."""
        if self.mesh.ranks == 1:
            return
        flat = _sendable(tensor.detach().view(-1))

        def call() -> list[dist.Work]:
            return [dist.broadcast(flat, src=0, group=self.mesh.gather, async_op=True)]

        sent = flat.nbytes * (self.mesh.ranks - 1) // self.mesh.ranks
        self._issue("broadcast", call, sent, names, purpose).wait()

    def exchange(self, payload: Tensor, what: str = "control data") -> Tensor:
        """Every rank's ``payload`` (flat uint8 on CPU, equal lengths) → [ranks, length], in rank order; blocks.

        what: named in the error when it fails.
        """
        if self.mesh.ranks == 1:
            return payload.unsqueeze(0)
        self.sent[Purpose.CONTROL] += payload.numel() * (self.mesh.ranks - 1)
        gathered = payload.new_empty(self.mesh.ranks * payload.numel())
        try:
            _all_gather_single(gathered, payload, group=self.mesh.control)
        except RuntimeError as error:
            raise CommunicationError(
                f"the exchange of {what} on rank {self.mesh.rank} failed: {error}. Did every rank make the same call?"
            ) from error
        return gathered.view(self.mesh.ranks, payload.numel())

    def exchange_objects(self, value: Any) -> list[Any]:
        """Every rank's JSON value, in rank order; blocks. For start-up and error paths."""
        text = json.dumps(value).encode()
        sizes = (
            self.exchange(torch.tensor([len(text)], dtype=torch.int64).view(torch.uint8)).contiguous().view(torch.int64)
        )
        padded = torch.zeros(max(1, int(sizes.max())), dtype=torch.uint8)
        padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else padded[:0]
        rows = self.exchange(padded)
        return [json.loads(bytes(row[: int(size)].tolist())) for row, size in zip(rows, sizes.view(-1), strict=True)]

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self.exchange(torch.zeros(1, dtype=torch.uint8))

    def _issue(
        self,
        operation: str,
        call: Callable[[], list[dist.Work]],
        sent: int,
        names: Sequence[str],
        purpose: Purpose,
        finish: Callable[[], None] | None = None,
    ) -> Pending:
        """Count it, compare it across ranks in debug mode, start it; without overlap wait for it here."""
        self._sequence += 1
        number = self._sequence

        def describe() -> str:
            return f"{operation} number {number} on rank {self.mesh.rank} for {_shorten(names)}"

        if self._debug:
            self._compare(f"{number} {operation} {sent} bytes {_shorten(names)}")
        self.sent[purpose] += sent
        try:
            pending = Pending(call(), describe, finish)
            if not self._overlap:
                for work in pending._works:
                    work.wait()
        except RuntimeError as error:
            raise CommunicationError(f"{describe()} failed: {error}") from error
        return pending

    def _compare(self, announcement: str) -> None:
        raw = announcement.encode()[:_ANNOUNCEMENT_BYTES].ljust(_ANNOUNCEMENT_BYTES)
        rows = self.exchange(torch.frombuffer(bytearray(raw), dtype=torch.uint8))
        texts = [bytes(row.tolist()).decode(errors="replace").strip() for row in rows]
        for rank, text in enumerate(texts):
            if text != texts[0]:
                raise MismatchError(
                    f"collectives differ between ranks: rank 0 issues [{texts[0]}], rank {rank} issues [{text}]; "
                    "expected the same order everywhere. Do the ranks take different branches of the model?"
                )


_KNOWN_DTYPES = (torch.float32, torch.float64, torch.float16, torch.int8, torch.uint8, torch.int32, torch.int64)


def _sendable(flat: Tensor) -> Tensor:
    """``flat`` itself, or the same memory as bytes where a backend may not know its dtype; for what is only copied."""
    return flat if flat.dtype in _KNOWN_DTYPES else flat.view(torch.uint8)


def _shorten(names: Sequence[str], limit: int = 4) -> str:
    """The first few names, and how many more there are."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
