"""Makes the tensors of one bucket whole on every rank while a ``with`` is open.

Must not know: the purpose of the gather.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain

import torch
from torch import Tensor

from shardengine.comm import Purpose
from shardengine.core.parts import Core
from shardengine.sharding import Bucket, FlatSlice, slices_of
from shardengine.stages import Placement


@contextmanager
def gathered(
    core: Core, bucket: Bucket, tensors: dict[str, Tensor], placement: Placement, purpose: Purpose, dtype: torch.dtype
) -> Iterator[Iterator[FlatSlice]]:
    """Yield all elements of ``bucket``'s ``tensors``, by key, in ``dtype``; they are valid inside the ``with``.

    tensors: this rank's parts by key, all placed as ``placement`` and of one length. Collective: one all-gather for all
    of them, none if this rank has all elements.
    """
    plan, layout = core.layout, bucket.layout
    if layout.sizes[placement] == layout.length:
        found = slices_of(plan, layout, layout.interval_of_rank(placement, bucket.rank), tensors)
        yield (part._replace(values=part.values.to(dtype)) for part in found)
        return
    count = next(iter(tensors.values())).numel()
    holders = placement.slices(layout.ranks, layout.replicas)
    length = count * holders * len(tensors)
    lent = (
        length == layout.length
    )  # as long as the step's buffers; one of another length would stay in the pool forever
    full = core.pool.acquire(length, dtype) if lent else bucket.full.new_empty(length, dtype=dtype)
    slices = full.view(holders, len(tensors), count)
    for own, tensor in zip(slices[layout.slice_number_of_rank(placement, bucket.rank)], tensors.values(), strict=True):
        own.copy_(tensor)
    core.collectives.move(full, placement, Placement.REPLICATED, layout, purpose).wait()
    try:
        yield chain.from_iterable(
            slices_of(plan, layout, layout.slice_at(placement, number), dict(zip(tensors, held, strict=True)))
            for number, held in enumerate(slices)
        )
    finally:
        if lent:
            core.pool.release(full)
