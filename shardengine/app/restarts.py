"""The command's own parent restarts ranks that died. Owns: how often, and the line to print.

Must not know: how ranks are started, the loop. torchrun's own --max-restarts would also repeat a wrong config, or a
failure that recurs each time. So every attempt is a torchrun of its own, and the next one depends on how it ended.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shardengine.app import resume, stopping
from shardengine.comm import RankFailure

_USAGE_CODE = 2
"""The exit code of a rank that found an error in the user's input before it could report it."""


def death(control: Path, codes: Mapping[int, int]) -> RankFailure:
    """Return the first death. codes: the exit codes of the ranks that did not end with 0."""
    said = stopping.failures(control)
    killed = [
        RankFailure(rank, code) for rank, code in codes.items() if code < 0 and code != -signal.SIGTERM
    ]  # SIGTERM is torchrun's own
    first = RankFailure.first([*said, *killed])
    if first is not None:
        return first
    rank, code = next(iter(codes.items()))
    return RankFailure(rank, code, is_usage=code == _USAGE_CODE)


@dataclass(frozen=True)
class Decision:
    """Whether the ranks are restarted, and the line to print about it ("" for none)."""

    again: bool
    line: str = ""


class Restarts:
    """Decides after each death whether the ranks are restarted."""

    def __init__(self, allowed: int, output: Path) -> None:
        """allowed: restarts at most."""
        self._allowed, self._output = allowed, output
        self._made = 0
        self._found: tuple[str, int] | None = None  # the last checkpoint at the last restart

    def again(self, dead: RankFailure) -> Decision:
        """Decide whether there is another attempt, and count it if so.

        There is none after wrong input, or if ranks die for the second time in a row without a new checkpoint in
        between.
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
