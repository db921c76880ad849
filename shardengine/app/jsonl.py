"""Files of JSON lines. Owns: reading them, and errors that name the file and the line.

Must not know: torch, tokenizers. One JSON object per line, all of one form: ``{"text": …}`` is a document to be packed,
``{"prompt": …, "completion": …}`` an example whose completion is learnt. Other keys are ignored, blank lines skipped.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardengine.errors import UsageError

SUFFIXES = (".jsonl", ".json")
_EXPECTED = 'expected {"text": "…"} or {"prompt": "…", "completion": "…"} on every line'
_FORMS = (("text",), ("prompt", "completion"))


@dataclass(frozen=True)
class Row:
    """One line. ``prompt`` is None for a document, whose text is the ``completion``: what is to be learnt."""

    line: int
    prompt: str | None
    completion: str


def is_jsonl(data: str) -> bool:
    """Whether ``--data`` is to be read as JSON lines, by its suffix."""
    return Path(data).suffix.lower() in SUFFIXES


def read(path: str) -> list[Row]:
    """All rows of the UTF-8 file; UsageError, with file and line, for the first one that cannot be used."""
    rows: list[Row] = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8-sig").split("\n"), 1):
        if not line.strip():
            continue
        where = f"--data {path}, line {number}"
        row = _row(where, number, line)
        if rows and (rows[0].prompt is None) != (row.prompt is None):
            raise UsageError(
                f"{where}: has {_form(row)}, line {rows[0].line} has {_form(rows[0])}: expected one form in a file"
            )
        rows.append(row)
    if not rows:
        raise UsageError(f"--data {path}: is empty; {_EXPECTED}")
    return rows


def _row(where: str, number: int, line: str) -> Row:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise UsageError(f"{where}: is not JSON ({error}); {_EXPECTED}") from None
    if not isinstance(value, dict):
        raise UsageError(f"{where}: is {_kind(value)}; {_EXPECTED}")
    forms = [form for form in _FORMS if any(key in value for key in form)]
    if len(forms) != 1 or any(key not in value for key in forms[0]):
        keys = ", ".join(map(json.dumps, value)) or "none"
        raise UsageError(f"{where}: has the keys {keys}; {_EXPECTED}")
    for key in forms[0]:
        if not isinstance(value[key], str):
            raise UsageError(f'{where}: "{key}" is {_kind(value[key])}, expected a string')
        if any("\ud800" <= character <= "\udfff" for character in value[key]):
            raise UsageError(f'{where}: "{key}" holds half of a surrogate pair, which is no character')
    learnt = forms[0][-1]
    if not value[learnt].strip():
        raise UsageError(f'{where}: "{learnt}" is empty: there is nothing to learn; leave the line out')
    return Row(number, value.get("prompt"), value[learnt])


def _form(row: Row) -> str:
    return '"text"' if row.prompt is None else '"prompt" and "completion"'


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
