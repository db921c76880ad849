"""JSON lines: what is refused and how, what becomes of documents and examples, and the command on both."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from shardengine.app import data, jsonl, loop, reading, settings
from shardengine.app.cli import main
from shardengine.errors import UsageError
from tests.app.test_resume import run
from tests.app.test_train import CLOSE, tiny
from tests.support.raising import raises
from tests.support.ranks import RankPool

__all__ = ["tiny"]  # a fixture
ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "data"
END, BEGIN = 300, 301
GOOD = '{"prompt": "a", "completion": "b"}'


def encode(text: str) -> list[int]:
    """A token per byte."""
    return list(text.encode())


def write(folder: Path, *lines: object, name: str = "data.jsonl") -> str:
    """A file of ``lines``, objects as JSON."""
    path = folder / name
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    return str(path)


def example(prompt: int, completion: int) -> dict[str, str]:
    return {"prompt": "p" * prompt, "completion": "c" * completion}


# Reading


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{'text': 'single quotes'}", "is not JSON"),
        ("[", "is not JSON"),
        ('["text"]', "is a list"),
        ("3", "is a number"),
        ("null", "is null"),
        ({}, "has the keys none"),
        ({"content": "x", "id": 3}, 'has the keys "content", "id"'),
        ({"prompt": "x"}, 'has the keys "prompt"'),
        ({"completion": "x"}, 'has the keys "completion"'),
        ({"prompt": "x", "completion": "y", "text": "z"}, 'has the keys "prompt", "completion", "text"'),
        ({"prompt": "x", "completion": ["y"]}, '"completion" is a list, expected a string'),
        ({"prompt": None, "completion": "y"}, '"prompt" is null, expected a string'),
        ({"prompt": "x", "completion": " \n"}, '"completion" is empty'),
        ({"text": "x"}, 'has "text", line 1 has "prompt" and "completion": expected one form in a file'),
        (r'{"prompt": "x", "completion": "\ud800"}', "half of a surrogate pair"),
    ],
)
def test_errors_name_the_file_and_the_line(line: object, message: str, tmp_path: Path):
    path = write(tmp_path, GOOD, "", line)
    with pytest.raises(UsageError) as caught:
        jsonl.read(path)
    assert f"--data {path}, line 3: " in str(caught.value)
    assert message in str(caught.value)


def test_an_empty_file_and_an_empty_text(tmp_path: Path):
    with raises("data-empty", "expected"):
        jsonl.read(write(tmp_path, "", " "))
    with raises("data-nothing-to-learn", "line 1", "text"):
        jsonl.read(write(tmp_path, {"text": ""}))


@pytest.mark.parametrize("form", ["text", "documents", "apart", "examples"])
def test_of_the_data_at_most_128_rows_are_validated_and_of_a_file_of_its_own_all(form: str, tmp_path: Path):
    """The help says so: a large file would be validated for longer than it is trained on."""
    lines = [{"text": "abc"}] * 3000 if form in ("documents", "apart") else [example(1, 2)] * 3000
    path = write(tmp_path, *lines)
    if form == "text":
        path = str(tmp_path / "data.txt")
        Path(path).write_text("0123456789" * 1200, encoding="utf-8")
    kind = {"apart": "apart"}.get(form)
    whole = reading.load_blocks(path, encode, 4, END, how=reading.How(kind))
    assert len(whole.validation) == 128 and len(whole.training) > 2000
    own = reading.load_blocks(path, encode, 4, END, how=reading.How(kind, held_out=path))
    assert len(own.validation) == len(own.training) == 3000


def test_what_is_read(tmp_path: Path):
    path = tmp_path / "data.JSONL"
    text = '\ufeff{"text": "one\\ntwo", "id": 1}\r\n\n{"text": "a\u2028b"}'  # a BOM, Windows' ends, a line separator
    path.write_bytes(text.encode())
    assert jsonl.read(str(path)) == [jsonl.JsonRow(1, None, "one\ntwo"), jsonl.JsonRow(3, None, "a\u2028b")]
    assert jsonl.is_jsonl(str(path))
    assert not jsonl.is_jsonl("builtin:pydoc")
    assert jsonl.read(write(tmp_path, {"prompt": "", "completion": "c"})) == [jsonl.JsonRow(1, "", "c")]


def test_the_command_finds_a_bad_line_before_ranks_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = write(tmp_path, GOOD, "{")
    assert main(["train", "--config", str(ROOT / "configs" / "demo.json"), "--data", path]) == 2
    assert f"{path}, line 2: is not JSON" in capsys.readouterr().err
    (tmp_path / "latin.jsonl").write_bytes(b'{"text": "caf\xe9"}')
    with raises("data-not-utf8", "byte 13"):
        settings.check_data(str(tmp_path / "latin.jsonl"))


# Documents


def test_documents_are_joined_with_the_end_of_text_token_and_packed(tmp_path: Path):
    path = write(tmp_path, *({"text": "abc"} for _ in range(20)))
    blocks = reading.load_blocks(path, encode, 4, END, [BEGIN])
    assert blocks.training.input_ids.tolist() == [[97, 98, 99, END]] * 19
    assert blocks.validation.input_ids.tolist() == [[97, 98, 99, END]]
    assert blocks.training.batch(slice(None)).keys() == {"input_ids", "labels"}
    assert torch.equal(blocks.training.labels, blocks.training.input_ids)
    blocks = reading.load_blocks(path, encode, 3, END)
    assert blocks.training.input_ids.flatten().tolist() == ([97, 98, 99, END] * 19)[:75]
    with raises("data-too-short", "validation part", "one block of 5"):
        reading.load_blocks(path, encode, 5, END)
    with raises("tokenizer-without-end-token"):
        reading.load_blocks(path, encode, 4)


# Examples


def test_a_prompt_is_never_learnt(tmp_path: Path):
    path = write(tmp_path, *(example(1 + row % 5, 1 + row % 7) for row in range(40)))
    blocks = reading.load_blocks(path, encode, 10, END, [BEGIN])
    assert (len(blocks.training), len(blocks.validation)) == (38, 2)
    p, c = ord("p"), ord("c")
    for part, first in ((blocks.training, 0), (blocks.validation, 38)):
        batch = part.batch(slice(None))
        rows = zip(batch["input_ids"], batch["labels"], batch["attention_mask"], strict=True)
        for number, (ids, labels, mask) in enumerate(rows, first):
            prompt, completion = 2 + number % 5, 2 + number % 7  # with the token before or after
            whole = [BEGIN] + [p] * (prompt - 1) + [c] * (completion - 1) + [END]
            size = min(10, len(whole))
            assert ids.tolist()[:size] == whole[:size]
            assert mask.tolist() == [1] * size + [0] * (10 - size)
            assert labels.tolist() == [data.IGNORED] * prompt + whole[prompt:10] + [data.IGNORED] * (10 - size)
    assert blocks.truncated == sum(4 + row % 5 + row % 7 > 10 for row in range(40)) > 0
    assert blocks.training.tokens == sum(min(10, 4 + row % 5 + row % 7) for row in range(38))


def test_a_truncated_completion_does_not_end(tmp_path: Path):
    blocks = reading.load_blocks(write(tmp_path, example(2, 9), example(2, 5)), encode, 8, END)
    assert blocks.truncated == 1
    assert blocks.training.labels.tolist() == [[-100, -100] + [ord("c")] * 6]
    assert blocks.validation.labels.tolist() == [[-100, -100] + [ord("c")] * 5 + [END]]


@pytest.mark.parametrize(("prompt", "begin"), [(8, []), (7, [BEGIN]), (20, [])])
def test_an_example_whose_completion_would_vanish_is_refused(prompt: int, begin: list[int], tmp_path: Path):
    path = write(tmp_path, GOOD, example(prompt, 3))
    with pytest.raises(
        UsageError, match=rf"line 2: nothing of its completion fits: the prompt has {prompt + len(begin)}"
    ):
        reading.load_blocks(path, encode, 8, END, begin)
    path = write(tmp_path, GOOD, example(prompt - 1, 3))
    if prompt < 20:
        assert reading.load_blocks(path, encode, 8, END, begin).validation.labels[0].tolist()[-1] == ord("c")


def test_one_example_is_too_few(tmp_path: Path):
    with raises("data-too-small-to-split"):
        reading.load_blocks(write(tmp_path, GOOD), encode, 8, END)


def test_every_epoch_visits_each_row_once_and_steps_read_the_same_rows_at_any_rank_count(tmp_path: Path):
    path = write(tmp_path, *({"prompt": f"{row:02}", "completion": "c"} for row in range(26)))
    rows = reading.load_blocks(path, encode, 6, END).training
    assert len(rows) == 24

    def steps(ranks: int, micro: int, k: int) -> list[list[tuple[int, ...]]]:
        """The rows of each step of two epochs, as a set."""
        streams = [data.training_batches(rows, micro, rank, ranks, 7) for rank in range(ranks)]
        return [
            sorted(tuple(ids) for s in streams for _ in range(k) for ids in next(s)["input_ids"].tolist())
            for _ in range(48 // (ranks * micro * k))
        ]

    expected = steps(1, 12, 1)
    everything = sorted(tuple(ids) for ids in rows.input_ids.tolist())
    assert sorted(expected[0] + expected[1]) == sorted(expected[2] + expected[3]) == everything
    assert expected[:2] != expected[2:]
    for shape in ((2, 6, 1), (2, 3, 2), (3, 4, 1), (3, 1, 4), (1, 2, 6)):
        assert steps(*shape) == expected


def test_a_sample_starts_from_the_prompt(tmp_path: Path):
    rows = reading.load_blocks(write(tmp_path, GOOD, {"prompt": "", "completion": "b"}), encode, 8, END)
    assert rows.training.prompt(0).tolist() == [ord("a")]
    assert rows.validation.prompt(0).tolist() == [ord("b")]
    text = data.Rows(torch.arange(8).view(1, 8), torch.arange(8).view(1, 8))
    assert text.prompt(0).tolist() == [0, 1, 2, 3]


def test_a_prompt_begins_as_the_tokenizer_begins_a_text():
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    for template, begin in ((["<s>", "$A"], [0]), (["$A", "</s>"], []), (["$A"], [])):
        words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<s>": 0, "</s>": 1, "a": 2}, unk_token="a"))
        words.post_processor = tokenizers.processors.TemplateProcessing(
            single=" ".join(template), special_tokens=[("<s>", 0), ("</s>", 1)]
        )
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="</s>")
        assert loop.begin_tokens(tokenizer) == begin


# The whole command


def train(pool: RankPool, tiny: Path, *options: object) -> str:
    """What the command prints on rank 0, under a launcher."""
    return run(pool, "--config", tiny / "config.json", "--model", tiny / "model", *options)


def test_train_on_examples(pools: Callable[[int], RankPool], tiny: Path, tmp_path: Path):
    """The validation loss of the command is the mean over completions' tokens, by transformers alone."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = str(EXAMPLES / "capitals.jsonl")
    output = tmp_path / "run"
    out = train(pools(2), tiny, "--data", path, "--steps", 4, "--output", output, "--length", 32)
    assert "11 + 1 examples of up to 32" in out
    assert "example(s) longer than 32 tokens lost the end" in out

    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(output / "model")
    model = AutoModelForCausalLM.from_pretrained(output / "model").eval()
    last = jsonl.read(path)[-1]
    prompt, completion = tokenizer(last.prompt)["input_ids"], tokenizer(last.completion)["input_ids"]
    ids = torch.tensor([[*prompt, *completion, tokenizer.eos_token_id][:32]])
    labels = ids.clone()
    labels[:, : len(prompt)] = -100
    with torch.no_grad():
        assert rows[-1]["validation_loss"] == pytest.approx(float(model(ids, labels=labels).loss), abs=CLOSE)
    assert rows[-1]["validation_loss"] < rows[0]["validation_loss"]


def test_train_on_documents(pools: Callable[[int], RankPool], tiny: Path, tmp_path: Path):
    documents = (EXAMPLES / "documents.jsonl").read_text(encoding="utf-8") * 4
    path = tmp_path / "documents.jsonl"
    path.write_text(documents, encoding="utf-8")
    output = tmp_path / "run"
    out = train(pools(1), tiny, "--data", path, "--steps", 2, "--output", output, "--length", 16)
    assert "blocks of 16" in out
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert sum("loss" in row for row in rows) == 2
