"""Reads files into rows of tokens.

Owns: the validation share, and how texts, documents, examples and conversations become rows. Must not know: the engine,
the model, who reads which row when.

Text is cut into full rows; so are documents, one after another with the end-of-text token between them ("joined").
Examples and conversations take a row each, padded ("none"). Documents, examples and conversations may also share rows
without attending to each other ("apart", see packing). A document longer than a row is then cut into several.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardengine.app import corpus, hub_data, jsonl, packing
from shardengine.app.data import IGNORED, Rows, TokenBlocks
from shardengine.app.settings import APART, DROP, JOINED, NONE, TRUNCATE
from shardengine.errors import UsageError

MAX_VALIDATION_BLOCKS = 128
_SHARE = f"(the last {corpus.VALIDATION_FRACTION:.0%} are the validation part)"
_VALIDATION, _TRAINING = "--eval", "--data"
_DOCUMENTS, _CONVERSATIONS = ("text",), ("messages",)

Example = tuple[list[int], list[int]]
"""(tokens, labels), equally many of each."""
ReadChat = Callable[[jsonl.JsonRow, str], Example]


@dataclass(frozen=True)
class How:
    """The treatment of the data.

    packing: None: by the form of the data · too_long: the treatment of examples longer than a row · held_out: a file of
    its own for validation; None: the last part of the data.
    """

    packing: str | None = None
    too_long: str = TRUNCATE
    held_out: str | None = None


@dataclass(frozen=True)
class _TextPart:
    """The content of a file for one purpose: a text, or lines. whole: nothing of it may be left out."""

    option: str
    path: str
    content: str | list[jsonl.JsonRow]
    name: str = ""
    whole: bool = False
    limit: int | None = None

    @property
    def where(self) -> str:
        return f"{self.option} {self.path}"

    @property
    def form(self) -> tuple[str, ...]:
        return () if isinstance(self.content, str) else self.content[0].form


@dataclass(frozen=True)
class _Made:
    rows: Rows
    truncated: int = 0
    dropped: int = 0


def load_blocks(
    data: str,
    encode: Callable[[str], list[int]],
    length: int,
    end: int | None = None,
    begin: Sequence[int] = (),
    chat: ReadChat | None = None,
    how: How = How(),
) -> TokenBlocks:
    """Read, split and tokenize ``data``: JSON lines if it has their suffix (see jsonl), otherwise text.

    end: the end-of-text token, after every document and completion · begin: tokens before every prompt · chat: encodes
    a conversation. UsageError if there is too little for both parts, or an example cannot be used.
    """
    maker = _Maker(encode, length, end, begin, chat)
    content = _content(data, _TRAINING)
    if how.held_out is None:
        parts = _split(data, content)
    else:
        held_out = _content(how.held_out, _VALIDATION)
        parts = [_TextPart(_TRAINING, data, content), _TextPart(_VALIDATION, how.held_out, held_out, whole=True)]
    asked = [how.packing, how.packing if how.held_out is None or _suits(parts[1], how.packing) else None]
    made = [maker.rows(part, packing, how.too_long) for part, packing in zip(parts, asked, strict=True)]
    training, validation = made
    truncated, dropped = (sum(getattr(each, name) for each in made) for name in ("truncated", "dropped"))
    return TokenBlocks(training.rows, validation.rows, truncated, dropped)


def pack(tokens: list[int], length: int) -> Tensor:
    """Cut a stream of tokens into int64 [blocks, length]; tokens that do not fill the last block are left out."""
    count = len(tokens) // length
    return torch.tensor(tokens[: count * length], dtype=torch.int64).view(count, length)


def _content(path: str, option: str) -> str | list[jsonl.JsonRow]:
    if hub_data.is_name(path):
        return hub_data.read(path, option)
    return jsonl.read(path, option) if jsonl.is_jsonl(path) else corpus.read_text(path)


def _split(data: str, content: str | list[jsonl.JsonRow]) -> list[_TextPart]:
    """Return the training part and the validation part of one file."""
    names = ("training", "validation")
    if isinstance(content, str):
        texts = corpus.split(content)
        return [_TextPart(_TRAINING, data, text, name) for text, name in zip(texts, names, strict=True)]
    cut = int(len(content) * (1 - corpus.VALIDATION_FRACTION))
    if not cut and content[0].form != _DOCUMENTS:
        raise UsageError(
            f"--data {data}: has one example, expected at least two {_SHARE}, or --eval FILE",
            code="data-too-small-to-split",
        )
    if not cut:
        raise UsageError(
            f"--data {data}: its training part is empty, it has one document {_SHARE}; bring more, or --eval FILE",
            code="data-too-small-to-split",
        )
    limits = (None, MAX_VALIDATION_BLOCKS)
    lines = (content[:cut], content[cut:])
    return [
        _TextPart(_TRAINING, data, part, name, limit=limit)
        for part, name, limit in zip(lines, names, limits, strict=True)
    ]


def _suits(part: _TextPart, packing: str | None) -> bool:
    """Whether the packing of the training data is possible with ``part`` as well."""
    if packing == JOINED:
        return part.form in ((), _DOCUMENTS)
    return packing is None or part.form != ()


class _Maker:
    """Makes rows with one tokenizer and length."""

    def __init__(
        self,
        encode: Callable[[str], list[int]],
        length: int,
        end: int | None,
        begin: Sequence[int],
        chat: ReadChat | None,
    ) -> None:
        self._encode, self._length, self._end, self._begin, self._chat = encode, length, end, begin, chat

    def rows(self, part: _TextPart, packing_asked: str | None, too_long: str) -> _Made:
        """Return the rows of a part."""
        documents = part.form in ((), _DOCUMENTS)
        chosen = packing_asked or (JOINED if documents else NONE)
        if not _suits(part, chosen):
            what = 'lines of {"text": …}' if chosen == JOINED else "JSON lines, because a text is one document"
            raise UsageError(
                f"--packing {chosen}: {part.where}: expected {what}; leave --packing out",
                code="packing-with-wrong-data",
            )
        if chosen == JOINED:
            return _Made(self._joined(part))
        examples = [(self._example(part, row), row.line) for row in self._lines(part)]
        truncated = dropped = 0
        if documents:
            size = self._length
            kept = [
                (ids[at : at + size], labels[at : at + size])
                for (ids, labels), _ in examples
                for at in range(0, len(ids), size)
            ]
        else:
            kept, truncated, dropped = self._fit(part, examples, too_long)
        padding = 0 if self._end is None else self._end
        make = packing.into_rows if chosen == APART else _pad
        rows = make(kept[: part.limit], self._length, padding)
        return _Made(rows, truncated, dropped)

    def _lines(self, part: _TextPart) -> list[jsonl.JsonRow]:
        assert not isinstance(part.content, str)
        if self._end is None and part.form != _CONVERSATIONS:
            raise UsageError(
                f"{part.where}: expected a tokenizer with an end-of-text token (eos_token), it has none",
                code="tokenizer-without-end-token",
            )
        return part.content

    def _joined(self, part: _TextPart) -> Rows:
        """Return full rows of text; a file for validation keeps its rest, padded."""
        if isinstance(part.content, str):
            stream = self._encode(part.content)
        else:
            stream = [token for row in self._lines(part) for token in [*self._encode(row.completion), self._end or 0]]
        if part.whole and len(stream) % self._length > 1:
            pieces = [stream[at : at + self._length] for at in range(0, len(stream), self._length)]
            return _pad([(piece, piece) for piece in pieces], self._length, self._end or 0)
        blocks = pack(stream, self._length)[: MAX_VALIDATION_BLOCKS if part.name == "validation" else None]
        if not len(blocks):
            what = f"its {part.name} part" if part.name else "it"
            least = "two tokens" if part.whole else f"one block of {self._length} tokens"
            share = f" {_SHARE}" if part.name else ""
            raise UsageError(
                f"{part.where}: {what} is shorter than {least}; bring more text{share}", code="data-too-short"
            )
        return Rows(blocks, blocks)

    def _example(self, part: _TextPart, row: jsonl.JsonRow) -> Example:
        """Return (tokens, labels) of a line, not yet cut to ``length``.

        Labels of tokens that are not learnt are IGNORED.

        Prompt and completion are tokenized separately, so no token holds a piece of both and generation sees the same
        prompt.
        """
        if row.messages is not None:
            assert self._chat is not None
            return self._chat(row, f"{part.where}, line {row.line}")
        assert self._end is not None
        prompt = [] if row.prompt is None else [*self._begin, *self._encode(row.prompt)]
        completion = [*self._encode(row.completion), self._end]
        return prompt + completion, [IGNORED] * len(prompt) + completion

    def _fit(
        self, part: _TextPart, examples: Sequence[tuple[Example, int]], too_long: str
    ) -> tuple[list[Example], int, int]:
        """Return (examples of at most ``length`` tokens, how many lost their end, how many were left out)."""
        kept, long, length = [], 0, self._length
        for (ids, labels), line in examples:
            long += len(ids) > length
            if len(ids) > length and too_long == DROP:
                continue
            if all(label == IGNORED for label in labels[1:length]):  # nothing predicts the first token
                first = next((place for place, label in enumerate(labels) if place and label != IGNORED), len(ids))
                what = "of its completion" if part.form != _CONVERSATIONS else "that the assistant says"
                raise UsageError(
                    f"{part.where}, line {line}: nothing {what} fits: the prompt has {first} tokens, a row {length}; "
                    "expected a shorter prompt (or a larger --length), or leave the line out (--too-long drop does)",
                    code="data-prompt-too-long",
                )
            kept.append((ids[:length], labels[:length]))
        if not kept:
            which = f"{part.name} part" if part.name else "lines"
            raise UsageError(
                f"{part.where}: all {long} of its {which} are longer than {length} tokens, and --too-long drop leaves "
                "them out; expected a larger --length, or --too-long truncate",
                code="data-all-lines-too-long",
            )
        return (kept, 0, long) if too_long == DROP else (kept, long, 0)


def _pad(examples: Sequence[Example], length: int, padding: int) -> Rows:
    """Return a row for each example, padded at the end. Padding is neither attended to nor learnt."""
    ids = torch.full((len(examples), length), padding)
    labels = torch.full((len(examples), length), IGNORED)
    mask = torch.zeros((len(examples), length), dtype=torch.int64)
    for row, (tokens, learnt) in enumerate(examples):
        size = min(len(tokens), length)
        ids[row, :size], labels[row, :size] = torch.tensor(tokens[:size]), torch.tensor(learnt[:size])
        mask[row, :size] = 1
    return Rows(ids, labels, mask)
