"""The codes and sentences of all errors that the package raises; ``{}`` stands for each value in a sentence.

`test_sentences.py` beside it compares them with `tests/data/sentences.json`, so that a change of the code changes no
sentence unnoticed. After a change that is meant, `python -m tests.project.sentences` writes the file.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path

from shardengine import errors

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "tests" / "data" / "sentences.json"
CLASSES = frozenset(name for name, of in vars(errors).items() if isinstance(of, type) and issubclass(of, Exception))
WITHOUT_CODE = frozenset({"ShardEngineError", "ConfigError", "InternalError"})
"""A config's problems have keys; an internal error is a bug, which nobody looks up."""


def skeleton(node: ast.expr, value: str = "{}", *, choices: bool = True) -> str:
    """The text of ``node``, with ``value`` for each part that is known at run time only. choices: show both texts of a
    condition."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(skeleton(part, value, choices=choices) for part in parts)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return skeleton(left, value, choices=choices) + skeleton(right, value, choices=choices)
        case ast.IfExp(body=first, orelse=second) if choices:
            return f"[{skeleton(first, value)}|{skeleton(second, value)}]"
    return value


def raised(source: str) -> Iterator[tuple[str, str, str, int]]:
    """Of every call of one of the classes of errors.py: the class, the code, the first argument, the line."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and node.args:
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            if name in CLASSES:
                codes = [ast.literal_eval(each.value) for each in node.keywords if each.arg == "code"]
                yield name, "".join(codes), skeleton(node.args[0]), node.lineno


def of_source(source: str) -> Iterator[str]:
    """The class, the code and the sentence of every error whose sentence is in ``source``."""
    for name, code, text, _ in raised(source):
        if text != "{}":
            yield f"{name} {code}: {text}" if code else f"{name}: {text}"


def sentences() -> list[str]:
    """All of the package, sorted, without the files, between which code may move."""
    sources = sorted((ROOT / "shardengine").rglob("*.py"))
    return sorted(text for path in sources for text in of_source(path.read_text(encoding="utf-8")))


if __name__ == "__main__":
    FILE.write_text(json.dumps(sentences(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"written to {FILE}")
