"""The validation loss. Owns: which rank runs which rows, the order of the sum, what is left as it was.

Must not know: where rows come from, when it is asked for.

[Note: The validation loss] Rows are cut into batches of a micro-batch each, in their order, whatever the number of
ranks; batch b is run by rank b modulo N. The model says the mean of each over its valid tokens, in fp32. The loss is
the sum of these, each times its number of valid tokens, over the number of all: products in fp64, and their sum rounded
once (math.fsum), so that the order of ranks and batches does not count. So the same weights have the same bits of loss
on any number of ranks, where a forward has: the same kernels, threads and size of a micro-batch.

Training does not see it: no token of the training data is read, nothing is drawn from the random states that dropout
uses, and the model is back in training when it has been in it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from shardengine.app.data import Batch, Rows, valid_tokens
from shardengine.app.rank_sums import RankSums
from shardengine.engine import Engine


def validation_batches(rows: Rows, micro_batch: int, rank: int, ranks: int) -> Iterator[tuple[Batch, int]]:
    """(batch, how many of its predictions count): each row once over all ranks, as many batches on each rank.

    Ranks must run equally many forwards, because at stage 3 a forward is collective: a rank that has nothing left runs
    one row that counts for nothing.
    """
    count = -(-len(rows) // micro_batch)
    for first in range(0, count, ranks):
        start = (first + rank) * micro_batch
        batch = rows.batch(slice(start, start + micro_batch) if start < len(rows) else slice(0, 1))
        yield batch, valid_tokens(batch) if start < len(rows) else 0


@torch.no_grad()
def validate(engine: Engine, rows: Rows, rank_sums: RankSums) -> float:
    """Mean loss per valid token over all rows, whatever the number of ranks; collective."""
    was_training, micro_batch = engine.module.training, engine.train_micro_batch_size_per_gpu()
    losses, counts = [], []
    engine.eval()
    with torch.random.fork_rng(devices=[engine.device] if engine.device.type == "cuda" else []):
        for batch, counted in validation_batches(rows, micro_batch, engine.rank, engine.world_size):
            inputs = {name: tensor.to(engine.device) for name, tensor in batch.items()}
            loss = engine(**inputs, use_cache=False).loss.item() if counted else _nothing(engine, inputs)
            losses.append(loss * counted)
            counts.append(float(counted))
    engine.train(was_training)
    everyone = rank_sums.each([*losses, *counts])
    batches = len(losses)
    total = math.fsum(value for mine in everyone for value in mine[:batches])
    return total / math.fsum(value for mine in everyone for value in mine[batches:])


def _nothing(engine: Engine, inputs: Batch) -> float:
    """A forward of which nothing counts: its mean may be 0 / 0."""
    engine(**inputs, use_cache=False)
    return 0.0
