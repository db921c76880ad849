"""docs/glossary.md: each word once, and each file that it names is there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("| ")
][1:]


def test_every_word_has_one_meaning() -> None:
    words = [word.strip() for row in ROWS for word in row[0].split(",")]
    assert len(words) > 30 and len(words) == len(set(words))


def test_every_file_that_is_named_is_there() -> None:
    for row in ROWS:
        files = re.findall(r"`([a-z_/]+(?:\.py|/))`", row[-1])
        assert files, row
        for name in files:
            assert (ROOT / "shardengine" / name).exists() or (ROOT / name).exists(), f"{row[0]}: {name}"
