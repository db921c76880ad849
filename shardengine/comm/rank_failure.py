"""Why a rank ended, and which of several failures was first. Owns: that record, its words, the choice.

Must not know: how ranks are started, how the record reaches the process that started them.

[Note: Which failure is reported] When one rank fails, the others fail a moment later because their peer is gone. Every
rank records the time of its own exception, and the earliest one is the cause. A rank that ended without a report
(killed by the system) comes after it, since it may have ended because its peer failed, and before any exception that
only reports a lost peer.
"""

from __future__ import annotations

import signal
import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass

import torch.distributed as dist

from shardengine.errors import CommunicationError, ConfigError, MismatchError, UsageError


@dataclass(frozen=True)
class RankFailure:
    """The failure of one rank; without a ``trace`` it ended without a report, and only ``code`` is known.

    code: its exit code (negative: the signal) · cause: the exception's type and the first line of its message ·
    is_usage: the user has to repair something first, and ``message`` explains it · is_consequence: it only lost its
    peer.
    """

    rank: int
    code: int = 1
    message: str = ""
    cause: str = ""
    trace: str = ""
    is_usage: bool = False
    is_consequence: bool = False
    time_ns: int = 0

    @classmethod
    def of(cls, rank: int, error: BaseException) -> RankFailure:
        """Return the failure of ``rank``, which raises ``error`` now."""
        lines = "".join(traceback.format_exception_only(error)).splitlines()
        is_usage = isinstance(error, ConfigError | UsageError)
        return cls(
            rank,
            message=str(error) if is_usage else "",
            cause=next((line for line in lines if not line.startswith(" ")), ""),  # a SyntaxError begins with its place
            trace="".join(traceback.format_exception(error)),
            is_usage=is_usage,
            is_consequence=_only_lost_its_peer(error),
            time_ns=time.time_ns(),
        )

    @staticmethod
    def first(failures: Iterable[RankFailure]) -> RankFailure | None:
        """Return the failure to report ([Note: Which failure is reported]); None if there are none."""
        return min(
            failures, key=lambda failure: (failure.is_consequence, not failure.trace, failure.time_ns), default=None
        )

    @property
    def line(self) -> str:
        """One line: ``rank 1 was killed by SIGKILL (…)``, ``rank 0 failed: ValueError: …``."""
        return (
            f"rank {self.rank} failed: {self.cause}" if self.trace else f"rank {self.rank} {describe_exit(self.code)}"
        )

    @property
    def text(self) -> str:
        """``line``, or the whole traceback if there is one."""
        return f"rank {self.rank} failed:\n{self.trace.rstrip()}" if self.trace else self.line


def _only_lost_its_peer(error: BaseException | None) -> bool:
    """Return whether ``error``, or one that it was raised from or after, reports a lost peer; gloo's have no type."""
    while error is not None:
        if isinstance(error, MismatchError | CommunicationError | dist.DistError):
            return True
        if isinstance(error, RuntimeError) and "/gloo/" in str(error):
            return True
        error = error.__context__ if error.__cause__ is None and not error.__suppress_context__ else error.__cause__
    return False


def describe_exit(code: int) -> str:
    """Return how a process ended, in words: ``ended with exit code 1``, ``was killed by SIGKILL (…)``."""
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name
    return f"was killed by {name}" + (" (often the system, out of memory)" if name == "SIGKILL" else "")
