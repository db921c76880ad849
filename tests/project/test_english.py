"""Plain technical English: constructions that a reader has to read twice are counted, and the counts may only fall.

The rules are in CONTRIBUTING.md. A count that has fallen is written down here, so that it does not rise again.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CONSTRUCTIONS = {
    "what ... as a noun": r"\bwhat (?:is|are|was|were|has|have|had|does|did|it|they|that|the|an?|each|one|no|nobody)\b",
    "where ... as an if": r"\bwhere (?:its?|they|there|that|this|these|no|nobody|nothing|one|each|some|all|not)\b",
    "tell, told, said": r"\b(?:tells?|told|telling|said|says of)\b",
    "of which": r"\b(?:of|by|in|for|with) which\b",
    "..., too": r", too\b",
    "anew, apart, in all": r"\b(?:anew|apart|in all)\b",
}
_ANY = re.compile("|".join(CONSTRUCTIONS.values()), re.IGNORECASE)
_CODE = re.compile(r"^```.*?^```|^<!--.*?-->|`[^`\n]*`", re.MULTILINE | re.DOTALL)

DOCSTRINGS = 4
"""Docstrings of the package with at least one of them, at most."""
PAGES = 20
"""Places in README and docs, at most."""


def docstrings() -> Iterator[tuple[str, str]]:
    """Of every module, class and function of the package: the place, the text."""
    for path in sorted((ROOT / "shardengine").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            if text := ast.get_docstring(node):
                yield f"{path.relative_to(ROOT)}: {getattr(node, 'name', 'the file')}", text


def pages() -> Iterator[tuple[str, str]]:
    """README and docs without their code: the page, the prose."""
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        yield str(path.relative_to(ROOT)), _CODE.sub(" ", path.read_text(encoding="utf-8"))


def test_docstrings_have_fewer_and_fewer() -> None:
    found = [f"{place}: {each[0]}" for place, text in docstrings() if (each := _ANY.search(text))]
    assert len(found) <= DOCSTRINGS, (
        f"{len(found)} docstrings, at most {DOCSTRINGS}: write a new one without " + ", ".join(CONSTRUCTIONS)
    )
    assert len(found) > DOCSTRINGS - 25, f"{len(found)} are left: lower DOCSTRINGS to it"


def test_pages_have_fewer_and_fewer() -> None:
    found = {page: len(_ANY.findall(text)) for page, text in pages()}
    total = sum(found.values())
    assert total <= PAGES, f"{total} places, at most {PAGES}: {found}"
    assert total > PAGES - 25, f"{total} are left: lower PAGES to it"


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("What is given to it is kept.", 1),
        ("It stays where there is none.", 1),
        ("The rows, of which some are empty, are told.", 2),
        ("If the rank has no batch, it raises UsageError.", 0),
        ("Where the file is: a path.", 0),
    ],
)
def test_each_is_found(text: str, counts: int) -> None:
    assert len(_ANY.findall(text)) == counts


def test_code_is_no_prose() -> None:
    assert not _ANY.search(_CODE.sub(" ", "A\n```\nwhat is it\n```\nB `where it is`"))
