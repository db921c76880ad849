"""Datasets of the Hub as --data, by the package `datasets`, of which only the way to the Hub is replaced."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import pytest

from shardengine.app import hub_data, jsonl, reading, settings
from tests.support.raising import raises

datasets = pytest.importorskip("datasets")

CHAT = [{"role": "user", "content": "hm?"}, {"role": "assistant", "content": "yes"}]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """(name, split) → rows of what is there."""
    there: dict[tuple[str, str], list[dict[str, Any]]] = {}

    def load(name: str, *variant: str, split: str) -> Any:
        name = "/".join([name, *variant])
        if (name, split) not in there:
            raise ValueError(f"Unknown split {split!r}.\nmore")
        return datasets.Dataset.from_list(there[name, split])

    monkeypatch.setattr(datasets, "load_dataset", load)
    return there


def test_names_are_told_from_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert hub_data.is_name("org/some-data") and hub_data.is_name("org/some.data:train[:10%]")
    for file in ("text.txt", "folder/chats.jsonl", "builtin:pydoc", "/tmp/a", "a/b/c/d", "../a", "data/train.txt"):
        assert not hub_data.is_name(file)
    (tmp_path / "org").mkdir()
    (tmp_path / "org" / "data").write_text("words")
    assert not hub_data.is_name("org/data") and not hub_data.is_name("org/dat")


def test_the_form_that_is_learnt_best_is_taken(hub: dict[Any, Any]) -> None:
    hub["a/b", "train"] = [{"prompt": "hm?", "messages": CHAT, "id": 1}, {"prompt": "hm?", "messages": CHAT, "id": 2}]
    assert hub_data.read("a/b") == [jsonl.JsonRow(1, None, "", CHAT, None), jsonl.JsonRow(2, None, "", CHAT, None)]
    hub["a/b", "test"] = [{"prompt": "one", "completion": "two", "text": "three"}]
    assert hub_data.read("a/b:test") == [jsonl.JsonRow(1, "one", "two")]
    hub["a/b/raw", "train"] = [{"text": "words"}]
    assert hub_data.read("a/b/raw") == [jsonl.JsonRow(1, None, "words")]
    hub["a/t", "train"] = [{"text": f"{number} words"} for number in range(40)]
    blocks = reading.load_blocks("a/t", lambda text: list(text.encode()), 4, end=0)
    assert len(blocks.training) > 20
    settings.check_data("a/t")


def test_what_cannot_be_used_is_said(hub: dict[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    hub["a/b", "train"] = [{"question": "hm?", "answer": "yes"}]
    with raises("data-form-unknown", "--data", "a/b", "answer, question", 'expected {"text"'):
        hub_data.read("a/b")
    with raises("data-hub-not-loadable", "a/b:dev", "dev", "ValueError", "Unknown split"):
        hub_data.read("a/b:dev")
    hub["a/c", "train"] = [{"text": "words"}, {"text": " "}]
    with raises("data-nothing-to-learn", "--eval a/c, row 2", "text"):
        hub_data.read("a/c", "--eval")
    own = builtins.__import__
    monkeypatch.setattr(
        builtins, "__import__", lambda name, *rest: own(name if name != "datasets" else "nothing_of_it", *rest)
    )
    with raises("data-hub-not-installed", "--data", "a/b"):
        hub_data.read("a/b")
