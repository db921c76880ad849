"""Datasets of the Hub as rows of --data, read by the package `datasets`. Owns: the accepted names and columns.

Must not know: torch, tokenizers. A name is ``ORGANISATION/NAME``, or ``ORGANISATION/NAME/CONFIGURATION`` if the dataset
has several configurations, followed by ``:SPLIT`` for another split than train. If a dataset has several forms,
conversations come before examples, and these before documents.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from shardengine.app import jsonl
from shardengine.errors import UsageError

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(/[\w.-]+)?(:[\w.\[\]%:+-]+)?")
_FILES = (".txt", ".md", ".csv", ".parquet", ".text", ".tsv", ".gz", ".zst", ".zip")
_LONGEST_REASON = 400


def is_name(data: str) -> bool:
    """Whether ``data`` can only be the name of a dataset: it has the form of one, and no such file exists."""
    path = Path(data)
    if path.exists() or jsonl.is_jsonl(data) or path.suffix.lower() in _FILES or _NAME.fullmatch(data) is None:
        return False
    return not Path(path.parts[0]).exists()


def read(data: str, option: str = "--data") -> list[jsonl.JsonRow]:
    """Return all rows. UsageError if `datasets` is missing, finds nothing, or finds no column that can be learnt."""
    try:
        import datasets
    except ImportError:
        raise UsageError(
            f"{option} {data}: no such file is there; to read a dataset of the Hub, install its package: "
            "pip install datasets",
            code="data-hub-not-installed",
        ) from None
    path, _, split = data.partition(":")
    organisation, name, *variant = path.split("/")
    try:
        found = datasets.load_dataset(f"{organisation}/{name}", *variant, split=split or "train")
    except Exception as error:  # errors of `datasets`, the network or files: all are reported
        raise UsageError(
            f"{option} {data}: expected a file, or a dataset of the Hub with the split {split or 'train'}: "
            f"{type(error).__name__}: {' '.join(str(error).split())[:_LONGEST_REASON]}",
            code="data-hub-not-loadable",
        ) from None
    columns = set(found.column_names)
    form = next((form for form in reversed(jsonl.FORMS) if columns.issuperset(form)), None)
    if form is None:
        raise UsageError(
            f"{option} {data}: has the columns {', '.join(sorted(columns))}; {jsonl.EXPECTED}", code="data-form-unknown"
        )
    kept = (*form, "tools") if form == ("messages",) and "tools" in columns else form
    rows = [
        jsonl.row_of({key: _plain(row[key]) for key in kept}, number, f"{option} {data}, row {number}")
        for number, row in enumerate(found, 1)
    ]
    if not rows:
        raise UsageError(f"{option} {data}: is empty; {jsonl.EXPECTED}", code="data-empty")
    return rows


def _plain(value: Any) -> Any:
    """Drop the keys that `datasets` fills with None because only other rows have them."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items() if each is not None}
    return [_plain(each) for each in value] if isinstance(value, list) else value
