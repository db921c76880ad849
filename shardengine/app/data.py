"""Data to rows of tokens, and which rank reads which row when. Owns: packing, masking, shuffling, the validation share.

Must not know: the engine, the model. A row has ``length`` token ids and as many labels: the same ids (the model shifts
them by one), or IGNORED where nothing is learnt. Text is packed into full rows; an example is a row of its own.

[Note: The order of the data] There is one endless sequence of rows, which knows nothing of ranks: epoch 0, epoch 1, and
so on, each of them all rows in an order of its own, torch.randperm seeded with seed + epoch. Sample number s of a run
is its s-th row. The optimizer step that begins at sample s reads the next ``train_batch_size`` rows, also across the
end of an epoch (no row is left out), at every number of ranks. Within it rank r of N has the rows s + r, s + r + N, …,
in this order: its first micro-batch, its second, and so on. So the position is the number of samples consumed.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardengine.app import corpus, jsonl
from shardengine.errors import UsageError

Batch = dict[str, Tensor]
MAX_VALIDATION_BLOCKS = 128
IGNORED = -100
"""The label that torch's cross entropy, and so every Hugging Face model, leaves out."""


@dataclass(frozen=True)
class Rows:
    """What is learnt from: int64 [rows, length] each. ``attention_mask`` is None where no row is padded."""

    input_ids: Tensor
    labels: Tensor
    attention_mask: Tensor | None = None

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def length(self) -> int:
        """Tokens per row, padding included."""
        return self.input_ids.shape[1]

    @property
    def tokens(self) -> int:
        """Tokens of all rows, without padding."""
        return self.input_ids.numel() if self.attention_mask is None else int(self.attention_mask.sum())

    def batch(self, chosen: Tensor | slice) -> Batch:
        """The model's inputs for some rows."""
        batch = {"input_ids": self.input_ids[chosen], "labels": self.labels[chosen]}
        if self.attention_mask is not None:
            batch["attention_mask"] = self.attention_mask[chosen]
        return batch

    def prompt(self, row: int) -> Tensor:
        """What a sample may start from: the prompt of an example (at least one token), or a quarter of a block's."""
        if self.attention_mask is None:
            return self.input_ids[row, : max(1, min(16, self.length // 2))]
        learnt = self.labels[row] != IGNORED
        return self.input_ids[row, : max(1, int(learnt.int().argmax()))]


@dataclass(frozen=True)
class Blocks:
    """The two parts of the data. ``truncated``: examples that lost the end of their completion."""

    training: Rows
    validation: Rows
    truncated: int = 0

    @property
    def length(self) -> int:
        """Tokens per row."""
        return self.training.length


def pack(tokens: list[int], length: int) -> Tensor:
    """Cut a stream of tokens into int64 [blocks, length]; what does not fill the last block is left out."""
    count = len(tokens) // length
    return torch.tensor(tokens[: count * length], dtype=torch.int64).view(count, length)


def load_blocks(
    data: str, encode: Callable[[str], list[int]], length: int, end: int | None = None, begin: Sequence[int] = ()
) -> Blocks:
    """Read, split and tokenize ``data``; JSON lines where its suffix says so (see jsonl), else text.

    end: the end-of-text token, after every document and completion · begin: tokens before every prompt.
    UsageError if there is too little for both parts, or an example cannot be used.
    """
    share = f"(the last {corpus.VALIDATION_FRACTION:.0%} are the validation part)"
    if jsonl.is_jsonl(data):
        if end is None:
            raise UsageError(f"--data {data}: expected a tokenizer with an end-of-text token (eos_token), it has none")
        rows = jsonl.read(data)
        cut = int(len(rows) * (1 - corpus.VALIDATION_FRACTION))
        if rows[0].prompt is not None:
            if not cut:
                raise UsageError(f"--data {data}: has one example, expected at least two {share}")
            examples = [_example(data, row, encode, length, end, begin) for row in rows]
            truncated = sum(len(ids) > length for ids, _ in examples)
            padded = [_pad(part, length, end) for part in (examples[:cut], examples[cut:][:MAX_VALIDATION_BLOCKS])]
            return Blocks(padded[0], padded[1], truncated)
        streams = [
            [token for row in part for token in [*encode(row.completion), end]] for part in (rows[:cut], rows[cut:])
        ]
    else:
        streams = [encode(text) for text in corpus.split(corpus.read_text(data))]
    parts = [pack(stream, length) for stream in streams]
    for part, name in zip(parts, ("training", "validation"), strict=True):
        if not len(part):
            raise UsageError(
                f"--data {data}: its {name} part is shorter than one block of {length} tokens; bring more text {share}"
            )
    training, validation = parts[0], parts[1][:MAX_VALIDATION_BLOCKS]
    return Blocks(Rows(training, training), Rows(validation, validation))


def _example(
    data: str, row: jsonl.Row, encode: Callable[[str], list[int]], length: int, end: int, begin: Sequence[int]
) -> tuple[list[int], list[int]]:
    """(tokens, labels) of a prompt and its completion, not yet cut to ``length``; the prompt's labels are IGNORED.

    The two are tokenized apart, so that no token holds a piece of both and generation sees the same prompt.
    """
    prompt = [*begin, *encode(row.prompt or "")]
    completion = [*encode(row.completion), end]
    labels = [IGNORED] * len(prompt) + completion
    if all(label == IGNORED for label in labels[1:length]):  # nothing predicts the first token
        raise UsageError(
            f"--data {data}, line {row.line}: nothing of its completion fits: the prompt has {len(prompt)} tokens, a "
            f"row {length}; expected a shorter prompt (or a larger --length), or leave the line out"
        )
    return prompt + completion, labels


def _pad(examples: Sequence[tuple[list[int], list[int]]], length: int, end: int) -> Rows:
    """Rows of examples, cut at the end or padded there; padding is neither attended to nor learnt."""
    ids = torch.full((len(examples), length), end)
    labels = torch.full((len(examples), length), IGNORED)
    mask = torch.zeros((len(examples), length), dtype=torch.int64)
    for row, (tokens, learnt) in enumerate(examples):
        size = min(len(tokens), length)
        ids[row, :size], labels[row, :size] = torch.tensor(tokens[:size]), torch.tensor(learnt[:size])
        mask[row, :size] = 1
    return Rows(ids, labels, mask)


def valid_tokens(batch: Batch) -> int:
    """PrefetchOrders that count: the model shifts labels by one, so that nothing predicts a row's first token."""
    return int((batch["labels"][:, 1:] != IGNORED).sum())


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


def validation_batches(rows: Rows, micro_batch: int, rank: int, ranks: int) -> Iterator[tuple[Batch, int]]:
    """(micro-batch, how many of its predictions count): each row once over all ranks, the same number on each rank.

    Ranks must run equally many forwards, because at stage 3 a forward is collective: a rank that has nothing left runs
    one row that counts for nothing.
    """
    mine = torch.arange(len(rows))[rank::ranks]
    share = -(-len(rows) // ranks)  # of the rank that has most
    for start in range(0, share, micro_batch):
        chosen = mine[start : start + micro_batch]
        batch = rows.batch(chosen if len(chosen) else slice(0, 1))
        yield batch, valid_tokens(batch) if len(chosen) else 0
