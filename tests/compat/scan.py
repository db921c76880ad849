"""Which names of deepspeed a package uses, read from its syntax trees. Nothing is imported."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = "deepspeed"


def names_in(source: str) -> Iterator[tuple[str, int]]:
    """Yield (dotted name below ``deepspeed``, line): what is imported, and attribute chains on what was imported.

    ``from deepspeed import comm as dist`` and then ``dist.get_rank()``: ``comm`` and ``comm.get_rank``. Names are
    followed through the whole file, whichever function they were imported in. Local files that are called deepspeed
    (``from .deepspeed import x``) are none.
    """
    tree = ast.parse(source)
    known: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == ROOT:
                    known[alias.asname or ROOT] = alias.name if alias.asname else ROOT
                    yield alias.name.removeprefix(ROOT).removeprefix("."), node.lineno
        elif isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] == ROOT:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                known[alias.asname or alias.name] = full
                yield full.removeprefix(f"{ROOT}."), node.lineno
    parents = {id(child.value) for child in ast.walk(tree) if isinstance(child, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and id(node) not in parents and (chain := _chain(node)):
            first, *rest = chain
            if first in known:
                yield ".".join([known[first], *rest]).removeprefix(ROOT).removeprefix("."), node.lineno


def _chain(node: ast.expr) -> list[str]:
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute) and (before := _chain(node.value)):
        return [*before, node.attr]
    return []


def names_used(package: Path) -> Iterator[tuple[str, str]]:
    """Yield (dotted name, "file:line") over every file of an installed package."""
    for file in sorted(package.rglob("*.py")):
        text = file.read_text(encoding="utf-8", errors="replace")
        if ROOT in text:
            for name, line in names_in(text):
                yield name, f"{file}:{line}"
