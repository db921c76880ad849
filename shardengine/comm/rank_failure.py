"""Why a rank ended, and which of several was first. Owns: that record, its words, the choice.

Must not know: how ranks are started, how the record comes to whoever started them.

[Note: Which failure is reported] When one rank fails, the others fail a moment later because their peer is gone. Every
rank notes the time at which its own exception reached it, and the earliest one is the cause. A rank that ended without
a word (killed by the system) comes after it, since it may have ended because its peer failed, and before any exception
that only says that a peer was lost.
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
    """What a rank said when an exception ended it; without a ``trace`` it said nothing, and ``code`` is known alone.

    code: its exit code (negative: the signal) · cause: the exception's type and the first line of its message ·
    is_usage: the user has to repair something first, ``message`` says what · is_consequence: it only lost its peer.
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
        """``error`` has reached ``rank`` now."""
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
        """The one that is reported ([Note: Which failure is reported]); None of none."""
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
        """The same with the whole traceback."""
        return f"rank {self.rank} failed:\n{self.trace.rstrip()}" if self.trace else self.line


def _only_lost_its_peer(error: BaseException | None) -> bool:
    """Whether ``error``, or one that it was raised from or after, says that a peer was lost; gloo's have no type."""
    while error is not None:
        if isinstance(error, MismatchError | CommunicationError | dist.DistError):
            return True
        if isinstance(error, RuntimeError) and "/gloo/" in str(error):
            return True
        error = error.__context__ if error.__cause__ is None and not error.__suppress_context__ else error.__cause__
    return False


def describe_exit(code: int) -> str:
    """How a process ended, in words: ``ended with exit code 1``, ``was killed by SIGKILL (…)``."""
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name
    return f"was killed by {name}" + (" (often the system, out of memory)" if name == "SIGKILL" else "")
