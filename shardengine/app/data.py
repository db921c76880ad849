"""Rows of tokens, and which rank reads which row when. Owns: what a row is, shuffling.

Must not know: the engine, the model, where rows come from. A row has ``length`` token ids and as many labels: the same
ids (the model shifts them by one), or IGNORED where nothing is learnt.

[Note: The order of the data] There is one endless sequence of rows, which knows nothing of ranks: epoch 0, epoch 1, and
so on, each of them all rows in an order of its own, torch.randperm seeded with seed + epoch. Sample number s of a run
is its s-th row. The optimizer step that begins at sample s reads the next ``train_batch_size`` rows, also across the
end of an epoch (no row is left out), at every number of ranks. Within it rank r of N has the rows s + r, s + r + N, …,
in this order: its first micro-batch, its second, and so on. So the position is the number of samples consumed.
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
"""The label that torch's cross entropy, and so every Hugging Face model, leaves out."""


@dataclass(frozen=True)
class Rows:
    """What is learnt from: int64 [rows, length] each. ``attention_mask`` is None where no row is padded.

    position_ids: of rows with several documents apart, which have no mask (packing, [Note: Documents apart]).
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
        """Those that there are, under the names of the model's inputs."""
        found = {
            "input_ids": self.input_ids, "labels": self.labels,
            "attention_mask": self.attention_mask, "position_ids": self.position_ids,
        }  # fmt: skip
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def batch(self, chosen: Tensor | slice) -> Batch:
        """The model's inputs for some rows."""
        return {name: tensor[chosen] for name, tensor in self.tensors.items()}

    def prompt(self, row: int) -> Tensor:
        """What a sample may start from: the prompt of an example (at least one token), or a quarter of a block's."""
        if self.attention_mask is None and self.position_ids is None:
            return self.input_ids[row, : max(1, min(16, self.length // 2))]
        learnt = self.labels[row] != IGNORED
        return self.input_ids[row, : max(1, int(learnt.int().argmax()))]


@dataclass(frozen=True)
class Blocks:
    """The two parts of the data. ``truncated``, ``dropped``: examples that lost their end, or that were left out."""

    training: Rows
    validation: Rows
    truncated: int = 0
    dropped: int = 0

    @property
    def length(self) -> int:
        """Tokens per row."""
        return self.training.length


def valid_tokens(batch: Batch) -> int:
    """Predictions that count: the model shifts labels by one, so that nothing predicts a row's first token."""
    return int((batch["labels"][:, 1:] != IGNORED).sum())


def tokens(batch: Batch) -> int:
    """Tokens without padding; where documents are apart each has at least two, and padding has position 0."""
    if "position_ids" in batch:
        positions = batch["position_ids"]
        return int((positions > 0).sum() + (positions == 1).sum())
    return int(batch["attention_mask"].sum()) if "attention_mask" in batch else batch["input_ids"].numel()


def training_batches(rows: Rows, micro_batch: int, rank: int, ranks: int, seed: int, start: int = 0) -> Iterator[Batch]:
    """This rank's micro-batches, without end ([Note: The order of the data]).

    start: samples that all ranks together have consumed already, a whole number of micro-batches on each of them.
    """

    @functools.lru_cache(maxsize=2)  # a micro-batch may lie across the end of an epoch
    def order(epoch: int) -> Tensor:
        return torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed + epoch))

    for first in itertools.count(start, micro_batch * ranks):
        places = (divmod(first + rank + ranks * sample, len(rows)) for sample in range(micro_batch))
        yield rows.batch(torch.stack([order(epoch)[place] for epoch, place in places]))
