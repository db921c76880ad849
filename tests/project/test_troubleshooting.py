"""docs/troubleshooting.md: every sentence that it quotes is in the source, with … for what the source fills in."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.project import troubleshooting

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"
GAP = "\0"


def quoted() -> list[str]:
    """The sentences in fences of the kind ``text`` that have no code, each on one line."""
    page = troubleshooting.ENTRY.sub("", PAGE.read_text(encoding="utf-8"))
    fences = re.findall(r"^```text\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    return [" ".join(fence.split()) for fence in fences]


def text_of(node: ast.expr) -> str | None:
    """What a string expression says, with a gap for each part that is not written in it; None for other expressions."""
    if isinstance(node, ast.Constant):
        return re.sub(r"%[.\d]*[a-z]", GAP, node.value) if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) or GAP for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = text_of(node.left), text_of(node.right)
        return None if left is None and right is None else (left or GAP) + (right or GAP)
    return None


def said(source: str) -> Iterator[str]:
    """The strings of a file, in one line each."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.expr) and (text := text_of(node)):
            yield " ".join(text.split())


def is_in(sentence: str, texts: list[str]) -> bool:
    """Whether one of the texts has it; an ellipsis is at least one gap, and what stands between gaps."""
    between = rf"[^{GAP}]*?{GAP}(?:.*?{GAP})??"
    pattern = re.compile(between.join(re.escape(part) for part in sentence.split("…")).replace(f"[^{GAP}]*?", ""))
    return any(pattern.search(text) for text in texts)


@pytest.fixture(scope="module")
def texts() -> list[str]:
    files = (ROOT / "shardengine").rglob("*.py")
    return sorted({text for path in files for text in said(path.read_text(encoding="utf-8"))})


def test_every_quoted_sentence_is_in_the_source(texts: list[str]) -> None:
    sentences = quoted()
    assert len(sentences) > 20 and len(sentences) == len(set(sentences))
    gone = [sentence for sentence in sentences if not is_in(sentence, texts)]
    assert not gone, "\n".join(["no longer in the source:", *gone])


def test_a_sentence_that_nobody_says_is_found_out() -> None:
    texts = list(said('raise E(f"rank {a} has {b!r}, expected " "one of these" + more)\nlog("step %d of %.1f")'))
    for sentence in ("rank … has …, expected one of these…", "has …, expected one", "step … of …"):
        assert is_in(sentence, texts), sentence
    for sentence in ("rank … had …", "rank 1 has …", "has one of these", "rank … of …", "rank … expected one"):
        assert not is_in(sentence, texts), sentence


def test_messages_are_those_of_their_codes() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert len(troubleshooting.ENTRY.findall(page)) > 40
    assert troubleshooting.written(page) == page, "python -m tests.project.troubleshooting"


def test_a_fence_follows_its_code() -> None:
    known = {"join-nested": ["engine.join() … would deadlock"], "x-y": ["a " * 200]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(troubleshooting, "messages", lambda: known)
        page = "`join-nested`\n\n```text\nold\n```\n\n`x-y`\n\n```text\n```\n"
        found = troubleshooting.written(page)
        assert "engine.join() … would deadlock\n```" in found and "old" not in found and " …\n```" in found
        with pytest.raises(KeyError):
            troubleshooting.written(page.replace("x-y", "of-nobody"))
