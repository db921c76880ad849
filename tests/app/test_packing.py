"""Documents apart in one row: where each goes, which models can do it, and that the loss is that of each one alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shardengine.app import data, loop, packing, reading, settings
from shardengine.app.chat import Chat
from shardengine.errors import UsageError
from tests.app import tiny_chat
from tests.app.test_jsonl import write
from tests.support.raising import raises

transformers = pytest.importorskip("transformers")
# Losses of about 5 in fp32: a document's sums have the same terms in both, beside others that are masked, in matrix
# products of other sizes
CLOSE = 2e-6
SHAPE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 50}


def document(size: int, first: int = 0) -> tuple[list[int], list[int]]:
    """The first half of it is not learnt."""
    ids = list(range(first, first + size))
    return ids, [data.IGNORED] * (size // 2) + ids[size // 2 :]


def test_documents_share_rows_and_count_from_zero():
    rows = packing.into_rows([document(2, 10), document(5, 20), document(1, 90), document(3, 30)], 8, 99)
    assert rows.input_ids.tolist() == [[20, 21, 22, 23, 24, 30, 31, 32], [10, 11, 99, 99, 99, 99, 99, 99]]
    assert rows.position_ids is not None
    assert rows.position_ids.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2], [0, 1, 0, 0, 0, 0, 0, 0]]
    no = data.IGNORED
    assert rows.labels.tolist() == [[no, no, 22, 23, 24, no, 31, 32], [no, 11, no, no, no, no, no, no]]
    assert rows.tokens == 10
    assert rows.batch(slice(0, 1)).keys() == {"input_ids", "labels", "position_ids"}


@given(st.lists(st.integers(1, 12), min_size=1, max_size=40))
def test_every_document_is_once_in_a_row_and_whole(sizes: list[int]):
    rows = packing.into_rows([document(size, 100 * number) for number, size in enumerate(sizes)], 12, -1)
    assert rows.position_ids is not None
    found = []
    for ids, positions in zip(rows.input_ids.tolist(), rows.position_ids.tolist(), strict=True):
        for token, position in zip(ids, positions, strict=True):
            if token >= 0:
                found.append(token)
                assert token % 100 == position
    assert sorted(found) == [100 * n + at for n, size in enumerate(sizes) if size > 1 for at in range(size)]
    assert rows.tokens == len(found)
    used = sum(size for size in sizes if size > 1)
    assert len(rows) <= max(1, 2 * used // 12 + 1)  # no two rows would fit into one


def made(kind: str, **more: Any) -> Any:
    torch.manual_seed(1)
    config = transformers.AutoConfig.for_model(kind, **{**SHAPE, **more})
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen3", "gpt_neox"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_models_that_keep_documents_apart(kind: str, attention: str):
    more = {"num_key_value_heads": 2, "head_dim": 8} if kind == "qwen3" else {}
    model = made(kind, attn_implementation=attention, **more).train()
    assert packing.leaks(model) == ""
    assert model.training


@pytest.mark.parametrize(
    ("kind", "more"), [("bloom", {}), ("mamba", {"state_size": 4}), ("opt", {"word_embed_proj_dim": 16, "ffn_dim": 32})]
)
def test_models_that_do_not(kind: str, more: dict[str, Any]):
    assert packing.leaks(made(kind, **more)) == "its tokens attend to other documents of their row"


class _NoPositions(torch.nn.Module):
    """A model that is told where documents begin, and counts on."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = made("gpt2")

    def get_input_embeddings(self) -> Any:
        return self.inner.get_input_embeddings()

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, use_cache: bool = False) -> Any:
        if position_ids is None:
            raise TypeError("no positions")
        ends = [*torch.nonzero(position_ids[0] == 0).flatten().tolist()[1:], input_ids.shape[1]]
        begin, parts = 0, []
        for end in ends:
            positions = torch.arange(begin, end).unsqueeze(0)
            parts.append(self.inner(input_ids[:, begin:end], position_ids=positions, use_cache=False).logits)
            begin = end
        return transformers.modeling_outputs.CausalLMOutput(logits=torch.cat(parts, dim=1))


class _NoArgument(_NoPositions):
    """One that has no such argument."""

    def forward(self, input_ids: Tensor, use_cache: bool) -> Any:  # type: ignore[override]
        return self.inner(input_ids)


def test_positions_that_count_on_and_such_that_are_not_taken_are_found():
    assert packing.leaks(_NoPositions()) == "it does not count the positions of each document from 0"
    assert packing.leaks(_NoArgument()).startswith("it takes no position_ids (")


def test_a_model_that_cannot_is_refused_in_one_sentence(tmp_path: Path):
    made("bloom").save_pretrained(tmp_path)
    tiny_chat.make_tokenizer(None).save_pretrained(tmp_path)
    asked = settings.Settings(Path("c"), str(tmp_path), "d", 1, Path("o"), Path("m"), packing="apart")
    with raises("tokenizer-beyond-embedding", "260"):
        loop.load_model(asked, 1)
    made("bloom", vocab_size=260).save_pretrained(tmp_path)
    message = "--packing apart: BloomForCausalLM cannot keep the documents of a row apart, because its tokens attend to"
    with pytest.raises(UsageError, match=message):
        loop.load_model(asked, 1)


# The loss


def loss_of(model: Any, rows: data.Rows) -> tuple[float, int]:
    """(sum of the losses of all valid tokens, how many these are), row by row."""
    total, count = 0.0, 0
    for row in range(len(rows)):
        batch = rows.batch(slice(row, row + 1))
        valid = data.valid_tokens(batch)
        if valid:
            total += float(model(**batch, use_cache=False).loss) * valid
            count += valid
    return total, count


@torch.no_grad()
@pytest.mark.parametrize("form", ["messages", "prompt", "text"])
def test_the_loss_of_packed_documents_is_that_of_each_alone(form: str, tmp_path: Path):
    tokenizer, model = tiny_chat.make_tokenizer(tiny_chat.MARKED), tiny_chat.make_model().eval()
    chats = tiny_chat.many(30)
    if form == "messages":
        path = str(tiny_chat.write(tmp_path / "chat.jsonl", *chats))
    elif form == "prompt":
        path = write(tmp_path, *({"prompt": c[0]["content"], "completion": c[1]["content"]} for c in chats))
    else:
        path = write(tmp_path, *({"text": c[0]["content"] * (1 + row % 6)} for row, c in enumerate(chats)))

    def rows(kind: str) -> data.Rows:
        encode = lambda text: tokenizer(text)["input_ids"]  # noqa: E731
        chat = Chat(tokenizer).encode
        return reading.load_blocks(path, encode, 80, 1, [], chat, reading.How(kind)).training

    together, alone = rows("apart"), rows("none")
    assert len(together) < 0.7 * len(alone)
    assert together.tokens == alone.tokens
    (packed, count), (single, expected) = loss_of(model, together), loss_of(model, alone)
    assert count == expected
    assert packed / count == pytest.approx(single / count, rel=CLOSE)
    leaking = data.Rows(together.input_ids, together.labels)  # as without position ids
    assert abs(loss_of(model, leaking)[0] / count - single / count) > 100 * CLOSE * single / count
