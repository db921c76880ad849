"""Messages between the parent and its ranks. Owns: the request to stop, and the report of a failure.

It does not depend on training. The parent makes a directory and passes its path in an environment variable. A file
``stop`` in it asks every rank to end after the current step (the ranks agree on which one, see loop). A rank that fails
leaves ``failure-<rank>.json`` there (comm/rank_failure.py finds the one that is the cause).
"""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from types import FrameType

from shardengine.comm import RankFailure

CONTROL = "SHARDENGINE_CONTROL_DIR"


class StopRequest:
    """Whether this rank was asked to stop: by a signal, by the parent's file, or because the parent is gone.

    ``signalled``: whether it was a signal.
    """

    def __init__(self) -> None:
        """Handle SIGINT and SIGTERM from now on. A second signal ends the process at once."""
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
        if self.signalled:  # a second signal: end at once
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.signalled = True


def report_failure(error: BaseException) -> None:
    """Report to the parent why this rank failed; print it if there is no parent of this command."""
    folder = os.environ.get(CONTROL)
    failure = RankFailure.of(int(os.environ.get("RANK", "0")), error)
    if folder is None:
        print(f"rank {failure.rank} failed:\n{failure.trace}", file=sys.stderr, flush=True)
        return
    target = Path(folder) / f"failure-{failure.rank}.json"
    partial = target.with_suffix(".partial")
    partial.write_text(json.dumps(asdict(failure)), encoding="utf-8")
    partial.rename(target)


def forget_failures(folder: Path) -> None:
    """Delete the reports, before ranks are restarted."""
    for path in folder.glob("failure-*.json"):
        path.unlink()


def failures(folder: Path) -> list[RankFailure]:
    """Return the failures that ranks have reported."""
    texts = [path.read_text(encoding="utf-8") for path in folder.glob("failure-*.json")]
    return [RankFailure(**json.loads(text)) for text in texts]
