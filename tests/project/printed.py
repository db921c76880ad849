"""What pages show of a command is what it prints. `python -m tests.project.printed` writes it anew into the pages.

A page says ``<!-- printed by the command above -->`` between the fence of a command and the fence of its output. A line
``...`` stands for any lines. Seconds that something took are left out of the comparison, and models of the Hub are
replaced by folders with the same config.json.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from shardengine.app import cli
from tests.support import hub_models

ROOT = Path(__file__).resolve().parents[2]
_PAIR = re.compile(
    r"^```bash\n(?P<command>[^`]*?)^```\n\n<!-- printed by the command above -->\n\n```text\n(?P<output>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_SECONDS = re.compile(r"\bin \d+\.\d+ s")
GAP = "..."


class Printed(NamedTuple):
    """A command of a page, in one line, and what the page shows of its output."""

    page: str
    command: str
    output: str


def found() -> Iterator[Printed]:
    """All of README and docs."""
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        for pair in _PAIR.finditer(path.read_text(encoding="utf-8")):
            command = pair["command"].replace("\\\n", " ")
            yield Printed(str(path.relative_to(ROOT)), " ".join(command.split()), pair["output"])


def run(command: str, folder: Path) -> str:
    """What ``shardengine ...`` prints to stdout, in ``folder``."""
    words = shlex.split(command, comments=True)
    assert words[0] == "shardengine", command
    words = [hub_models.folder_of(word, folder) if word in hub_models.MODELS else word for word in words]
    with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()) as said:
        cli.main(words[1:])
    return said.getvalue()


def differs(shown: str, said: str) -> str:
    """The first part of ``shown``, between gaps, that is not in ``said`` after the one before; "" where all are."""
    rest = _comparable(said)
    for part in _comparable(shown).split(f"{GAP}\n"):
        place = rest.find(part.strip("\n"))
        if place < 0:
            return part
        rest = rest[place + len(part.strip("\n")) :]
    return ""


def _comparable(text: str) -> str:
    return "\n".join(line.rstrip() for line in _SECONDS.sub("in … s", f"{text.rstrip()}\n").splitlines()) + "\n"


def main() -> None:
    """Outputs with a gap are left as they are, and named."""
    for each in found():
        with tempfile.TemporaryDirectory() as folder:
            said = run(each.command, Path(folder))
        if not differs(each.output, said):
            continue
        path = ROOT / each.page
        if f"\n{GAP}\n" in each.output:
            print(f"{path}: change by hand what {each.command} prints:\n{said}")
        else:
            text = path.read_text(encoding="utf-8")
            path.write_text(text.replace(each.output, said), encoding="utf-8")
            print(f"{path}: {each.command}")


if __name__ == "__main__":
    main()
