"""Packs several separate documents into one row. Owns: the row of each document, and whether a model supports it.

Must not know: files, tokenizers, ranks.

[Note: Separate documents] Each document of a row counts its positions from 0. If transformers' models get no attention
mask, they find the start of each document in the positions (one that is not the one before it plus one), and let no
token attend to another document. Each padding token is a document of its own. The first token of a document is not
learnt, because nothing in the document predicts it. Whether the installed model does this is tested (``leaks``).
"""

from __future__ import annotations

import bisect
import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardengine.app.data import IGNORED, Rows

_CLOSE = 1e-4
"""Tolerance between a document's logits in a row and alone, as a part of the largest. These are the same sums in fp32,
over other numbers of masked terms."""

_FEW_WORDS, _FEW_LAYERS = 64, 2


def into_rows(documents: Sequence[tuple[list[int], list[int]]], length: int, padding: int) -> Rows:
    """Return rows of whole documents (tokens, labels), none longer than ``length``.

    The longest come first, each into the fullest row that has room for it (best fit decreasing); equal ones keep their
    order. Documents of one token are left out, because nothing in them is learnt.
    """
    order = sorted((number for number, (ids, _) in enumerate(documents) if len(ids) > 1),
                   key=lambda number: -len(documents[number][0]))  # fmt: skip
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (free tokens, row), sorted
    for number in order:
        size = len(documents[number][0])
        place = bisect.bisect_left(room, (size, -1))
        left, row = room.pop(place) if place < len(room) else (length, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(number)
        if left - size > 1:
            bisect.insort(room, (left - size, row))
    ids = torch.full((len(rows), length), padding)
    labels = torch.full((len(rows), length), IGNORED)
    positions = torch.zeros((len(rows), length), dtype=torch.int64)
    for row, numbers in enumerate(rows):
        at = 0
        for number in sorted(numbers):
            tokens, learnt = documents[number]
            end = at + len(tokens)
            ids[row, at:end], positions[row, at:end] = torch.tensor(tokens), torch.arange(len(tokens))
            labels[row, at + 1 : end] = torch.tensor(learnt[1:])
            at = end
    return Rows(ids, labels, position_ids=positions)


@torch.no_grad()
def leaks(model: Any) -> str:
    """Return why ``model`` mixes the documents of a row; "" if it keeps them separate.

    Other words in the first document may not change one bit of the second one's logits, and these must be close to the
    model's logits for that document alone. Needs the whole model on this rank; changes nothing.
    """
    was_training, words = model.training, model.get_input_embeddings().weight.shape[0]
    first, second = (torch.arange(start, start + count).unsqueeze(0) % words for start, count in ((1, 5), (3, 6)))
    positions = torch.cat([torch.arange(5), torch.arange(6)]).unsqueeze(0)
    model.eval()
    try:
        together = _logits(model, torch.cat([first, second], dim=1), positions)[:, 5:]
        others = _logits(model, torch.cat([(first + 7) % words, second], dim=1), positions)[:, 5:]
        alone = _logits(model, second, positions[:, 5:])
    except (TypeError, ValueError) as error:
        return f"it takes no position_ids ({error})"
    finally:
        model.train(was_training)
    if not torch.equal(together, others):
        return "its tokens attend to other documents of their row"
    if (together - alone).abs().max() > _CLOSE * alone.abs().max():
        return "it does not count the positions of each document from 0"
    return ""


def small(config: Any) -> Any:
    """Return a model of ``config`` with random weights, few words and few layers, for ``leaks``.

    It has as few layers as contain all kinds of layers of the whole model, so ``leaks`` gives the same result for both.
    torch's random state is restored.
    """
    from transformers import AutoModelForCausalLM

    def cut(layers: int) -> Any:
        found = copy.deepcopy(config)
        found.num_hidden_layers = layers
        if types is not None:
            found.layer_types = types[:layers]
        if getattr(found, "vocab_size", 0) > _FEW_WORDS:
            found.vocab_size = _FEW_WORDS
            for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
                setattr(found, name, None)
        return found

    def kinds(layers: int) -> set[Any]:
        with torch.device("meta"):
            modules = AutoModelForCausalLM.from_config(cut(layers)).modules()
        return {*map(type, modules), *(types[:layers] if types is not None else ())}

    types = getattr(config, "layer_types", None)
    layers, depth = config.num_hidden_layers, _FEW_LAYERS
    while depth < layers and kinds(depth) != kinds(layers):
        depth *= 2
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(cut(min(depth, layers)), dtype=torch.float32)


def _logits(model: Any, ids: Tensor, positions: Tensor) -> Tensor:
    logits: Tensor = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    return logits
