"""Between the parent and its ranks. Owns: the request to stop, and the failing rank's traceback. Knows no training.

The parent makes a directory and hands its path down in an environment variable. A file ``stop`` in it asks every rank
to end after the current step (the ranks agree on which one, see loop). A rank that fails leaves ``failure-<rank>.json``
there; the earliest one is the cause, the others only lost their peer.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

from shardengine.errors import CommunicationError, ConfigError, MismatchError, UsageError

CONTROL = "SHARDENGINE_CONTROL_DIR"


class StopRequest:
    """Whether this rank was asked to stop: by a signal, by the parent's file, or because the parent is gone.

    ``signalled``: whether it was a signal.
    """

    def __init__(self) -> None:
        """Take over SIGINT and SIGTERM. A second request by signal ends the process at once."""
        folder = os.environ.get(CONTROL)
        self._file = Path(folder) / "stop" if folder else None
        self._parent = os.getppid()
        self.signalled = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._note)

    def __bool__(self) -> bool:
        by_file = self._file is not None and self._file.exists()
        return self.signalled or by_file or os.getppid() != self._parent

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signalled:  # before: somebody does not want to wait
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.signalled = True


@dataclass(frozen=True)
class Failure:
    """Why a rank ended. ``text`` is its traceback, or only the message where the user's input was wrong.

    line: the exception's type and the first line of its message.
    """

    time_ns: int
    rank: int
    is_usage: bool
    is_consequence: bool
    line: str
    text: str


def report_failure(error: BaseException) -> None:
    """Tell the parent why this rank failed; without a parent of ours, print it."""
    trace = "".join(traceback.format_exception(error))
    folder = os.environ.get(CONTROL)
    rank = int(os.environ.get("RANK", "0"))
    if folder is None:
        print(f"rank {rank} failed:\n{trace}", file=sys.stderr, flush=True)
        return
    is_usage = isinstance(error, ConfigError | UsageError)
    failure = Failure(
        time_ns=time.time_ns(),
        rank=rank,
        is_usage=is_usage,
        is_consequence=isinstance(error, MismatchError | CommunicationError),
        line=_first_line(error),
        text=str(error) if is_usage else trace,
    )
    target = Path(folder) / f"failure-{rank}.json"
    partial = target.with_suffix(".partial")
    partial.write_text(json.dumps(asdict(failure)), encoding="utf-8")
    partial.rename(target)


def _first_line(error: BaseException) -> str:
    lines = "".join(traceback.format_exception_only(error)).splitlines()
    return next((line for line in lines if not line.startswith(" ")), "")  # a SyntaxError begins with its place


def forget_failures(folder: Path) -> None:
    """Before ranks are started again."""
    for path in folder.glob("failure-*.json"):
        path.unlink()


def first_failure(folder: Path) -> Failure | None:
    """The failure of the rank that failed first by itself, not because of another; None if no rank said why."""
    found = [Failure(**json.loads(path.read_text(encoding="utf-8"))) for path in folder.glob("failure-*.json")]
    return min(found, key=lambda failure: (failure.is_consequence, failure.time_ns), default=None)
