"""Scripts on ranks that are forked, without a new interpreter that imports everything.

Not as under a launcher: it sets no variables, what is imported already is not imported again, and nothing runs at the
end of a process.
"""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import sys
from pathlib import Path
from typing import Any

from tests.support.forks import Forks
from tests.support.program_runs import free_port, join


class _Said(io.TextIOBase):
    """What is printed is said at once, so that it outlives who printed it."""

    def __init__(self, say: Any) -> None:
        self._say = say

    def write(self, text: str) -> int:
        self._say(text)
        return len(text)


def _script(
    say: Any, rank: int, ranks: int, port: int, where: str, environment: dict[str, str], words: list[str]
) -> None:
    join(rank, ranks, port)
    os.environ.update(environment)
    _run_words(say, where, words)


def _started(say: Any, rank: int, environments: list[dict[str, str]], where: str, words: list[str]) -> None:
    os.environ.clear()
    os.environ.update(environments[rank])
    _run_words(say, where, words)


def _run_words(say: Any, where: str, words: list[str]) -> None:
    sys.argv[:] = words
    with contextlib.chdir(where), contextlib.redirect_stdout(_Said(say)):
        runpy.run_path(words[0], run_name="__main__")
    say(None)


def printed(
    forks: Forks, ranks: int, script: Path, *options: object, where: Path, environment: dict[str, str] | None = None
) -> str:
    """What the ranks printed, one after the other; they have ended well. where: the working directory."""
    said = _run(forks, ranks, [script, *options], where, environment)
    assert all(words and words[-1] is None for words in said), said
    return "".join(word for words in said for word in words[:-1])


def started(forks: Forks, environments: list[dict[str, str]], script: Path, *options: object, where: Path) -> list[str]:
    """What each rank printed. environments: all variables of each, as whatever launcher has set them."""
    words = [str(script), *map(str, options)]
    said = forks.live(_started, environments, str(where), words, ranks=len(environments))
    assert all(each and each[-1] is None for each in said), said
    return ["".join(each[:-1]) for each in said]


def _run(
    forks: Forks, ranks: int, words: list[Any], where: Path, environment: dict[str, str] | None
) -> list[list[Any]]:
    texts = [str(word) for word in words]
    return forks.live(_script, ranks, free_port(), str(where), environment or {}, texts, ranks=ranks)
