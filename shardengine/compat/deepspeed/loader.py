"""The data loader that ``initialize`` makes of ``training_data``: each rank's share. Must not know: engines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler

from shardengine.errors import UsageError


def make(
    data: Any,
    *,
    rank: int,
    ranks: int,
    rows: int,
    collate_fn: Callable[[list[Any]], Any] | None,
    drop_last: bool,
) -> DataLoader[Any]:
    """Micro-batches of ``rows`` of the map-style data set ``data``, shuffled, of which each rank sees its part.

    Its ``sampler.set_epoch(n)`` shuffles anew. UsageError for data without a length or without items by index.
    """
    if not (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
        raise UsageError(
            "deepspeed.initialize: training_data: expected a data set with a length and items by index, got "
            f"{type(data).__name__}; make a DataLoader over it yourself, of this rank's part"
        )
    sampler: DistributedSampler[Any] = DistributedSampler(data, num_replicas=ranks, rank=rank)
    return DataLoader(
        data,
        batch_size=rows,
        sampler=sampler,
        collate_fn=collate_fn,
        drop_last=drop_last,
        pin_memory=torch.cuda.is_available(),
    )
