"""Rows of tokens, and which rank reads which row when. Owns: the form of a row, shuffling.

Must not know: the engine, the model, where rows come from. A row has ``length`` token ids and as many labels: the same
ids (the model shifts them by one), or IGNORED for tokens that are not learnt.

[Note: The order of the data] There is one endless sequence of rows, which does not depend on ranks: epoch 0, epoch 1,
and so on. Each epoch holds all rows in an order of its own, torch.randperm seeded with seed + epoch. Sample number s of
a run is its s-th row. The optimizer step that begins at sample s reads the next ``train_batch_size`` rows, also across
the end of an epoch (no row is left out), at every number of ranks. Within it rank r of N has the rows s + r, s + r + N,
…, in this order: its first micro-batch, its second, and so on. So the position is the number of samples consumed.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

Batch = dict[str, Tensor]
IGNORED = -100
"""The label that torch's cross entropy leaves out, and so every Hugging Face model."""


@dataclass(frozen=True)
class Rows:
    """Rows of tokens: int64 [rows, length] each. ``attention_mask`` is None if no row is padded.

    position_ids: if a row may hold several separate documents (see packing); such rows have no mask.
    """

    input_ids: Tensor
    labels: Tensor
    attention_mask: Tensor | None = None
    position_ids: Tensor | None = None

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def length(self) -> int:
        """Tokens per row, padding included."""
        return self.input_ids.shape[1]

    @property
    def tokens(self) -> int:
        """Tokens of all rows, without padding."""
        return tokens(self.batch(slice(None)))

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors that are not None, under the names of the model's inputs."""
        found = {
            "input_ids": self.input_ids, "labels": self.labels,
            "attention_mask": self.attention_mask, "position_ids": self.position_ids,
        }  # fmt: skip
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def batch(self, chosen: Tensor | slice) -> Batch:
        """Return the model's inputs for some rows."""
        return {name: tensor[chosen] for name, tensor in self.tensors.items()}

    def prompt(self, row: int) -> Tensor:
        """Return a prompt for a sample: that of an example (at least one token), or the first tokens of a block.

        These are half of a block, but at most 16 tokens.
        """
        if self.attention_mask is None and self.position_ids is None:
            return self.input_ids[row, : max(1, min(16, self.length // 2))]
        learnt = self.labels[row] != IGNORED
        return self.input_ids[row, : max(1, int(learnt.int().argmax()))]


@dataclass(frozen=True)
class TokenBlocks:
    """The two parts of the data.

    ``truncated``: examples that lost their end · ``dropped``: examples that were left out.
    """

    training: Rows
    validation: Rows
    truncated: int = 0
    dropped: int = 0

    @property
    def length(self) -> int:
        """Tokens per row."""
        return self.training.length


def valid_tokens(batch: Batch) -> int:
    """Return the number of predictions that count.

    The model shifts labels by one, so nothing predicts a row's first token.
    """
    return int((batch["labels"][:, 1:] != IGNORED).sum())


def tokens(batch: Batch) -> int:
    """Return the number of tokens without padding.

    Packed documents have at least two tokens each, and padding has position 0.
    """
    if "position_ids" in batch:
        positions = batch["position_ids"]
        return int((positions > 0).sum() + (positions == 1).sum())
    return int(batch["attention_mask"].sum()) if "attention_mask" in batch else batch["input_ids"].numel()


def training_batches(rows: Rows, micro_batch: int, rank: int, ranks: int, seed: int, start: int = 0) -> Iterator[Batch]:
    """Yield this rank's micro-batches, without end ([Note: The order of the data]).

    start: the samples that all ranks together have consumed, a whole number of micro-batches per rank.
    """

    @functools.lru_cache(maxsize=2)  # a micro-batch may lie across the end of an epoch
    def order(epoch: int) -> Tensor:
        return torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed + epoch))

    for first in itertools.count(start, micro_batch * ranks):
        places = (divmod(first + rank + ranks * sample, len(rows)) for sample in range(micro_batch))
        yield rows.batch(torch.stack([order(epoch)[place] for epoch, place in places]))
