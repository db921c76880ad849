"""docs/config.md lists every key as the table of keys has it; ``python -m tests.config.test_page`` writes the lists."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from shardengine.config.foreign import ALIASES, FILLED_FROM, ONLY_CALLER
from shardengine.config.kinds import plain
from shardengine.config.schema import KEYS, Key, Status

PAGE = Path(__file__).parents[2] / "docs" / "config.md"
BEGIN, END = "<!-- begin -->\n", "<!-- end -->\n"


def lists() -> str:
    """The generated part of the page."""
    rows = [
        "### Used", "", "| key | default | meaning |", "|---|---|---|",
        *(
            f"| `{key.name}` | `{json.dumps(plain(key.default))}` | {key.note} |"
            for key in of(Status.ACTIVE)
        ),
        "", "### Other names", "", "| written | read as |", "|---|---|",
        *(f"| `{old}` | `{new}` |" for old, new in sorted(ALIASES.items())),
        "", "### Not available yet", "", "Accepted while they are off: "
        + ", ".join(f"`{key.name}`" for key in of(Status.LATER)) + ".",
        "", "### Refused", "", "Accepted while they are off.", "", "| key | because |", "|---|---|",
        *(f"| `{key.name}` | {key.note} |" for key in of(Status.REFUSED)),
        "", "### Without effect", "", "| key | because |", "|---|---|",
        *(f"| `{key.name}` | {key.note} |" for key in of(Status.NO_EFFECT)), "",
    ]  # fmt: skip
    return "\n".join(rows)


def of(status: Status) -> Iterator[Key]:
    """The keys of one status, in the table's order."""
    return (key for key in KEYS.values() if key.status is status)


def test_the_page_lists_the_table() -> None:
    text = PAGE.read_text(encoding="utf-8")
    found = text[text.index(BEGIN) + len(BEGIN) : text.index(END)]
    assert found == lists(), "run `python -m tests.config.test_page` and commit the page"


def test_the_page_names_what_only_the_caller_knows() -> None:
    text = PAGE.read_text(encoding="utf-8")
    head = text[: text.index(BEGIN)]
    assert {name for name in ONLY_CALLER if f"`{name}`" in head} == ONLY_CALLER
    given = re.search(r"auto=\{([^}]*)\}", head)
    example = set(re.findall(r'"([a-z0-9_.]+)": ', given[1] if given else ""))
    assert example <= {*FILLED_FROM, *ONLY_CALLER} and "optimizer.params.lr" in example


if __name__ == "__main__":
    page = PAGE.read_text(encoding="utf-8")
    start, end = page.index(BEGIN) + len(BEGIN), page.index(END)
    PAGE.write_text(page[:start] + lists() + page[end:], encoding="utf-8")
