"""Ranks that died are started again by the command's own parent. Owns: how often, and what is said.

Must not know: how ranks are started, the loop. torchrun's own --max-restarts repeats a wrong config, and a failure that
comes again and again, as well. So every attempt is a torchrun of its own, and how it ended is looked at first.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shardengine.app import resume, stopping
from shardengine.comm import RankFailure

_USAGE_CODE = 2
"""What a rank ends with that found the user's input wrong before it could say so."""


def death(control: Path, codes: Mapping[int, int]) -> RankFailure:
    """Who died first. codes: the exit codes of the ranks that did not end with 0."""
    said = stopping.failures(control)
    killed = [
        RankFailure(rank, code) for rank, code in codes.items() if code < 0 and code != -signal.SIGTERM
    ]  # by SIGTERM: torchrun has ended it
    first = RankFailure.first([*said, *killed])
    if first is not None:
        return first
    rank, code = next(iter(codes.items()))
    return RankFailure(rank, code, is_usage=code == _USAGE_CODE)


@dataclass(frozen=True)
class Decision:
    """Whether the ranks are started again, and the line to print of it ("" for none)."""

    again: bool
    line: str = ""


class Restarts:
    """Decides after each death whether the ranks are started again."""

    def __init__(self, allowed: int, output: Path) -> None:
        """allowed: how often at most."""
        self._allowed, self._output = allowed, output
        self._made = 0
        self._found: tuple[str, int] | None = None  # the last checkpoint at the last restart

    def again(self, dead: RankFailure) -> Decision:
        """Whether there is another attempt, which is then counted.

        Never after wrong input; not when ranks die for the second time in a row without a new checkpoint in between.
        """
        if dead.is_usage or not self._allowed:
            return Decision(False)
        found, used = resume.newest(self._output), f"restarts: {self._made} of {self._allowed} used"
        if self._made >= self._allowed:
            return Decision(False, f"not started again, {used}")
        if self._made and found == self._found:
            return Decision(False, f"not started again, ranks died twice without a new checkpoint in between; {used}")
        self._made, self._found = self._made + 1, found
        place = f"resumes from step {resume.step_of(found[0])}" if found else "begins again, there is no checkpoint yet"
        return Decision(True, f"{dead.line}; restart {self._made} of {self._allowed}: {place}")
