"""docs/troubleshooting.md shows the messages of errors by their codes, from the source: so page and message stay alike.

An entry is a line with the code and a fence with the message:

    `join-nested`

    ```text
    engine.join() inside another engine's join() would deadlock: …
    ```

`python -m tests.project.troubleshooting` writes the fences. Of several messages with one code it is the one
most like the fence before. A fence without a code quotes a warning or another text.
"""

from __future__ import annotations

import ast
import difflib
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

from tests.project.sentences import skeleton

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"
ENTRY = re.compile(r"^`([a-z0-9]+(?:-[a-z0-9]+)+)`\n\n```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHOWN = 200
"""Characters of a message that the page shows, at most; the rest is in the message itself."""


def coded(source: str) -> Iterator[tuple[str, str]]:
    """The code and the message of every error with a code in a file."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and node.args:
            for keyword in node.keywords:
                if keyword.arg == "code" and isinstance(keyword.value, ast.Constant):
                    message = " ".join(skeleton(node.args[0], "…", choices=False).split())
                    if message.strip("…"):  # others are made elsewhere
                        yield str(keyword.value.value), message


def messages() -> dict[str, list[str]]:
    """Code → its messages, in the whole package."""
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "shardengine").rglob("*.py")):
        for code, message in coded(path.read_text(encoding="utf-8")):
            found.setdefault(code, []).append(message)
    return found


def shown(message: str) -> str:
    """``message`` as the page has it: whole words of its first ``SHOWN`` characters, in lines."""
    short = textwrap.shorten(message, SHOWN, placeholder=" …")
    return "\n".join(textwrap.wrap(short, 118)) + "\n"


def written(page: str) -> str:
    """The page with the fences of all codes as the source has them. KeyError for a code that no error has."""
    known = messages()

    def fence(entry: re.Match[str]) -> str:
        code, old = entry.groups()
        texts = [shown(message) for message in known[code]]
        near = max(texts, key=lambda text: difflib.SequenceMatcher(None, old, text[: len(old)]).ratio())
        return f"`{code}`\n\n```text\n{near}```"

    return ENTRY.sub(fence, page)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"written to {PAGE}")
