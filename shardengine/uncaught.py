"""A ``ConfigError`` that a script does not catch: its message and the script's line are printed, once per machine.

Owns: ``sys.excepthook`` for that one error; any other goes to the previous hook. Must not know: configs.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from shardengine.errors import ConfigError

OTHERS_WAIT_S = 3.0
"""Seconds that the other processes wait for the one that prints: a launcher ends all when the first has ended."""
_IN_SHORT = "_shardengine_tells_in_short"
_PACKAGE = str(Path(__file__).resolve().parent)


def is_first_of_machine() -> bool:
    """Return whether this is the one process on this machine that prints, of those that a launcher has started."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


@contextmanager
def told_in_short() -> Iterator[None]:
    """Print a ``ConfigError`` that leaves the block, and then the program, without the frames of this package."""
    try:
        yield
    except ConfigError as error:
        setattr(error, _IN_SHORT, True)
        _install()
        raise


def _install() -> None:
    """Install the hook: once, and again if somebody has replaced it.

    It refers to no error, so that errors can be freed.
    """
    before = sys.excepthook
    if getattr(before, _IN_SHORT, False):
        return

    def hook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        if not getattr(value, _IN_SHORT, False):
            before(kind, value, trace)
        elif is_first_of_machine():
            print(f"{_line_of_script(trace)}{kind.__module__}.{kind.__qualname__}: {value}", file=sys.stderr)
        else:
            time.sleep(OTHERS_WAIT_S)

    setattr(hook, _IN_SHORT, True)
    sys.excepthook = hook


def _line_of_script(trace: TracebackType | None) -> str:
    """Return the last line outside of this package, as a traceback shows it."""
    frames = [frame for frame in traceback.extract_tb(trace) if not frame.filename.startswith(_PACKAGE)]
    return "".join(traceback.format_list(frames[-1:]))
