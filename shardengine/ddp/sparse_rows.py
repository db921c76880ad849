"""The messages of buckets that consist of rows, if few rows have a gradient: only rows that are not zero travel.

Must not know: where gradients are kept, when they are reduced, which parameters have such buckets.

[Note: Sparse gradients] A sparse gradient is made dense on arrival (``gradient_bucket.flat_gradient``). So sums over
micro-batches, the norm, the step and the gradient that a parameter shows are, bit for bit, those of the same model with
dense gradients. Only on the way between ranks its bucket is rows again. Each row of the sum over micro-batches that is
not zero goes to its owner rank (sharding, layout: [Note: Rows]), which adds zeros for ranks that have sent none, in the
usual tree. Each row of the complete gradient that is not zero goes from there to all ranks. A row travels as its number
in the slice (int32) and its elements.

The number of rows is not known before, so ranks exchange these numbers first, in a message that the host waits for. A
rank that waits there starts nothing, so everything that was started before must have ended. The reducer waits for all
of it, and also for the rows, before it continues.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardengine.comm import Chunks, Collectives, OnComplete, Purpose, Work
from shardengine.offload import BufferPool
from shardengine.sharding import BucketLayout

_NUMBER = torch.int32


class SparseRows:
    """Reductions and gathers of such buckets (``BucketLayout.row``); each owner rank has one slice."""

    def __init__(self, collectives: Collectives, pool: BufferPool) -> None:
        self._collectives = collectives
        self._pool = pool

    def reduce(self, full: Tensor, what: BucketLayout, on_complete: OnComplete) -> Work:
        """As ``Collectives.move`` of a whole bucket from PARTIAL to SHARDED. Returns when every rank has come."""
        mesh = self._collectives.mesh
        rows = full.view(-1, what.row)
        numbers, of_slice = _not_zero(rows), len(rows) // mesh.ranks
        table = self._counts(torch.bincount(numbers // of_slice, minlength=mesh.ranks), what)  # of whom, for whom
        width = _width(rows)
        to_each = [count * width for count in table[mesh.rank].tolist()]
        from_each = [count * width for count in table[:, mesh.rank].tolist()]
        received = torch.empty(sum(from_each), dtype=torch.uint8, device=full.device)
        of_all = int(table.sum()) * width
        parts = Chunks(_packed(rows, numbers, numbers % of_slice), to_each, received, from_each, of_all)

        def add() -> None:
            summed = self._pool.acquire(full.numel(), full.dtype)
            terms = summed.chunk(mesh.ranks)
            for message, term in zip(parts.received.split(from_each), terms, strict=True):
                _unpack(message, term.view(-1, what.row))
            on_complete(terms)
            self._pool.release(summed)

        work = self._collectives.deliver(parts, what, Purpose.ROWS) if of_all else Work()
        return work.ending_with(add)

    def gather(self, whole: Tensor, what: BucketLayout) -> Work:
        """As ``Collectives.move`` of a bucket from SHARDED to REPLICATED; its other slices may hold anything.

        Returns when every rank has come.
        """
        mesh = self._collectives.mesh
        slices = whole.view(-1, what.row).chunk(mesh.ranks)
        own = slices[mesh.rank]
        numbers, width = _not_zero(own), _width(own)
        counts = self._counts(torch.tensor([len(numbers)], device=whole.device), what).view(-1).tolist()
        lengths = [count * width for count in counts]
        messages = torch.empty(sum(lengths), dtype=torch.uint8, device=whole.device)
        places = messages.split(lengths)
        places[mesh.rank].copy_(_packed(own, numbers, numbers))

        def fill() -> None:
            for rank, (message, rows) in enumerate(zip(places, slices, strict=True)):
                if rank != mesh.rank:
                    _unpack(message, rows)

        work = self._collectives.share(messages, lengths, what, Purpose.ROWS) if len(messages) else Work()
        return work.ending_with(fill)

    def _counts(self, own: Tensor, what: BucketLayout) -> Tensor:
        """Return every rank's ``own`` numbers, [ranks, …]."""
        sent = own.cpu().view(torch.uint8)
        rows = self._collectives.exchange(sent, f"how many rows of {what.label} travel")
        return rows.contiguous().view(torch.int64)


def _not_zero(rows: Tensor) -> Tensor:
    """Return the numbers of the rows with an element that is not zero (NaN is not zero), ascending."""
    return (rows != 0).any(dim=1).nonzero().view(-1)


def _width(rows: Tensor) -> int:
    """Return the bytes of a row in a message."""
    return _NUMBER.itemsize + rows.shape[1] * rows.element_size()


def _packed(rows: Tensor, numbers: Tensor, named: Tensor) -> Tensor:
    """Return the rows with these ``numbers`` as bytes, one after the other, each after its number in ``named``."""
    chosen = rows.index_select(0, numbers).view(torch.uint8)
    return torch.cat([named.to(_NUMBER).view(-1, 1).view(torch.uint8), chosen], dim=1).view(-1)


def _unpack(message: Tensor, rows: Tensor) -> None:
    """Write the rows of a message to ``rows``, and zeros elsewhere."""
    rows.zero_()
    if message.numel():
        names, values = message.view(-1, _width(rows)).tensor_split([_NUMBER.itemsize], dim=1)
        named = names.clone(memory_format=torch.contiguous_format).view(_NUMBER)  # one row is contiguous anywhere
        rows.index_copy_(0, named.view(-1).long(), values.clone(memory_format=torch.contiguous_format).view(rows.dtype))
