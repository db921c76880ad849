"""Text to blocks of tokens, and which rank reads which block when. Owns: packing, shuffling, the validation share.

Must not know: the engine, the model. A block is a row of ``length`` token ids; labels are the same ids (the model
shifts them by one).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import DistributedSampler

from shardengine.app import corpus
from shardengine.errors import UsageError

Batch = dict[str, Tensor]
MAX_VALIDATION_BLOCKS = 128


@dataclass(frozen=True)
class Blocks:
    """Packed tokens: ``training`` and ``validation`` are int64 [blocks, length]."""

    training: Tensor
    validation: Tensor

    @property
    def length(self) -> int:
        """Tokens per block."""
        return self.training.shape[1]


def pack(tokens: list[int], length: int) -> Tensor:
    """Cut a stream of tokens into int64 [blocks, length]; what does not fill the last block is left out."""
    count = len(tokens) // length
    return torch.tensor(tokens[: count * length], dtype=torch.int64).view(count, length)


def load_blocks(data: str, encode: Callable[[str], list[int]], length: int) -> Blocks:
    """Read, split, tokenize and pack the corpus; UsageError if it is too short for one block in each part."""
    parts = [pack(encode(text), length) for text in corpus.split(corpus.read_text(data))]
    for part, name in zip(parts, ("training", "validation"), strict=True):
        if not len(part):
            raise UsageError(
                f"--data {data}: its {name} part is shorter than one block of {length} tokens; bring more text "
                f"(the last {corpus.VALIDATION_FRACTION:.0%} are the validation part)"
            )
    return Blocks(parts[0], parts[1][:MAX_VALIDATION_BLOCKS])


def training_batches(
    blocks: Tensor, micro_batch: int, rank: int, ranks: int, seed: int, start: int = 0
) -> Iterator[Batch]:
    """This rank's micro-batches, without end: every epoch is shuffled anew and cut over the ranks without overlap.

    start: micro-batches that this rank has consumed already; they are skipped without being made.
    """
    need = micro_batch * ranks
    if len(blocks) < need:  # a short corpus: repeat it until one micro-batch per rank is full
        blocks = blocks.repeat(-(-need // len(blocks)), 1)
    sampler: DistributedSampler[int] = DistributedSampler(
        range(len(blocks)),  # type: ignore[arg-type]  # only its length is used
        num_replicas=ranks,
        rank=rank,
        seed=seed,
        drop_last=True,
    )
    per_epoch = len(sampler) // micro_batch
    epoch, done = divmod(start, per_epoch)
    while True:
        sampler.set_epoch(epoch)
        rows = torch.tensor(list(sampler))
        for chosen in rows[: per_epoch * micro_batch].split(micro_batch)[done:]:
            yield {"input_ids": blocks[chosen], "labels": blocks[chosen]}
        epoch, done = epoch + 1, 0


def validation_batches(blocks: Tensor, micro_batch: int, rank: int, ranks: int) -> Iterator[tuple[Batch, int]]:
    """(micro-batch, how many of its predictions count): each block once over all ranks, the same number on each rank.

    Ranks must run equally many forwards, because at stage 3 a forward is collective: a rank that has nothing left runs
    one block that counts for nothing.
    """
    mine = blocks[rank::ranks]
    share = -(-len(blocks) // ranks)  # of the rank that has most
    for start in range(0, share, micro_batch):
        rows = mine[start : start + micro_batch]
        counted = rows.shape[0] * (blocks.shape[1] - 1)
        rows = rows if len(rows) else blocks[:1]
        yield {"input_ids": rows, "labels": rows}, counted
