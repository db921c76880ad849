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
from pathlib import Path
from types import FrameType

CONTROL = "SHARDENGINE_CONTROL_DIR"


class StopRequest:
    """Whether this rank was asked to stop: by a signal, by the parent's file, or because the parent is gone."""

    def __init__(self) -> None:
        """Take over SIGINT and SIGTERM. A second request by signal ends the process at once."""
        folder = os.environ.get(CONTROL)
        self._file = Path(folder) / "stop" if folder else None
        self._parent = os.getppid()
        self._signalled = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._note)

    def __bool__(self) -> bool:
        by_file = self._file is not None and self._file.exists()
        return self._signalled or by_file or os.getppid() != self._parent

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self:  # asked before: somebody does not want to wait
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self._signalled = True


def report_failure(error: BaseException) -> None:
    """Tell the parent why this rank failed; without a parent of ours, print it."""
    trace = "".join(traceback.format_exception(error))
    folder = os.environ.get(CONTROL)
    rank = os.environ.get("RANK", "0")
    if folder is None:
        print(f"rank {rank} failed:\n{trace}", file=sys.stderr, flush=True)
        return
    target = Path(folder) / f"failure-{rank}.json"
    partial = target.with_suffix(".partial")
    partial.write_text(json.dumps({"time_ns": time.time_ns(), "rank": int(rank), "trace": trace}), encoding="utf-8")
    partial.rename(target)


def first_failure(folder: Path) -> tuple[int, str] | None:
    """(rank, traceback) of the rank that failed first; None if no rank said why."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("failure-*.json")]
    if not found:
        return None
    first = min(found, key=lambda failure: failure["time_ns"])
    return first["rank"], first["trace"]
