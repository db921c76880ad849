"""The validation loss. Owns: which rank runs which rows, the order of the sum, restoring the state of training.

Must not know: where rows come from, when a validation is due.

[Note: The validation loss] Rows are cut into batches of a micro-batch each, in their order, whatever the number of
ranks; batch b is run by rank b modulo N. The model returns the mean of each batch over its valid tokens, in fp32. The
loss is the sum of these means, each times its number of valid tokens, divided by the number of all valid tokens.
Products are in fp64, and their sum is rounded once (math.fsum), so the order of ranks and batches does not matter. So
the same weights give the same bits of loss on any number of ranks, if a forward does: the same kernels, threads and
size of a micro-batch.

Validation does not affect training: it reads no training data, draws nothing from the random states that dropout uses,
and restores training mode.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from shardengine.app.data import Batch, Rows, valid_tokens
from shardengine.app.rank_sums import RankSums
from shardengine.engine import Engine


def validation_batches(rows: Rows, micro_batch: int, rank: int, ranks: int) -> Iterator[tuple[Batch, int]]:
    """Yield (batch, its number of predictions that count): each row once over all ranks, equally many batches per rank.

    Ranks must run equally many forwards, because at stage 3 a forward is collective. A rank without remaining rows runs
    one row that counts for nothing.
    """
    count = -(-len(rows) // micro_batch)
    for first in range(0, count, ranks):
        start = (first + rank) * micro_batch
        batch = rows.batch(slice(start, start + micro_batch) if start < len(rows) else slice(0, 1))
        yield batch, valid_tokens(batch) if start < len(rows) else 0


@torch.no_grad()
def validate(engine: Engine, rows: Rows, rank_sums: RankSums) -> float:
    """Return the mean loss per valid token over all rows, whatever the number of ranks; collective."""
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
    """Run a forward whose loss is ignored: it may be 0 / 0."""
    engine(**inputs, use_cache=False)
    return 0.0
