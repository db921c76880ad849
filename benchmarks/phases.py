"""Where the time of a step goes: forward, backward, optimizer, and what of it was spent blocked on other ranks.

[Note: Exposed communication] Two measures, from outside of every competitor. *Blocked*: the time inside of
``torch.distributed.Work.wait`` as called from Python, by every blocking collective too; it is taken off the phase that
it fell into, so that the four parts add up to the step. It contains waiting for a slower rank. DDP waits in C++ inside
of backward, where no wrapper sees it; there the part is a difference: what its backward took longer than the compute
limit's in the same round (its copies included). Not seen: the 4-byte reduction of FSDP2's norm. The other measure, in
the main table, is the whole step less the compute limit's step: it holds for everyone, but contains bookkeeping and
copies, and a sharded optimizer makes it smaller.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

PHASES = ("forward", "backward", "optimizer")
PARTS = ("forward", "backward", "exposed communication", "optimizer")


class BlockedClock:
    """Seconds that this process has spent in ``Work.wait`` so far."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count every wait from Python until the end of the block."""
        original = dist.Work.wait

        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return original(work, *args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - start

        setattr(dist.Work, "wait", wait)  # noqa: B010 (a type checker refuses to assign a method)
        try:
            yield
        finally:
            setattr(dist.Work, "wait", original)  # noqa: B010


@dataclass(frozen=True)
class StepTimes:
    """Seconds of one step on one rank, per phase: ``spent`` in all, ``blocked`` of it in waits that Python saw."""

    spent: tuple[float, float, float]
    blocked: tuple[float, float, float]

    @property
    def total(self) -> float:
        """The whole step."""
        return sum(self.spent)

    def parts(self, hidden: float = 0.0) -> dict[str, float]:
        """The step by ``PARTS``. hidden: seconds of backward that were waits which Python did not see."""
        forward, backward, optimizer = (
            spent - blocked for spent, blocked in zip(self.spent, self.blocked, strict=True)
        )
        return dict(zip(PARTS, (forward, backward - hidden, sum(self.blocked) + hidden, optimizer), strict=True))


def slowest(ranks: Sequence[Sequence[StepTimes]]) -> list[StepTimes]:
    """Per round the times of the rank that took longest: a round lasts as long as that one."""
    return [max(round_, key=lambda times: times.total) for round_ in zip(*ranks, strict=True)]


def breakdown(rounds: Sequence[StepTimes], limit: Sequence[StepTimes] | None) -> dict[str, float]:
    """The median over rounds of each part, in milliseconds.

    limit: the compute limit's rounds where backward hides its waits in C++ (their difference is what it waited), else
    None.
    """
    hidden = [0.0] * len(rounds)
    if limit is not None:
        hidden = [max(0.0, mine.spent[1] - free.spent[1]) for mine, free in zip(rounds, limit, strict=True)]
    parts: list[Mapping[str, float]] = [times.parts(wait) for times, wait in zip(rounds, hidden, strict=True)]
    return {part: statistics.median(row[part] for row in parts) * 1e3 for part in PARTS}
