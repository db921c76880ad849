"""A ``ConfigError`` that a script does not catch: the sentences and the script's line, once for a machine's processes.

Owns: ``sys.excepthook`` for that one error; any other goes to who had it before. Must not know: configs.
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
"""So long the processes that print nothing wait for the one that does: a launcher ends all when the first has ended."""
_IN_SHORT = "_shardengine_tells_in_short"
_PACKAGE = str(Path(__file__).resolve().parent)


def is_first_of_machine() -> bool:
    """Whether this process is the one of those that a launcher has started on this machine which prints."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


@contextmanager
def told_in_short() -> Iterator[None]:
    """A ``ConfigError`` that leaves the block, and then the program, is told without the frames of this package."""
    try:
        yield
    except ConfigError as error:
        setattr(error, _IN_SHORT, True)
        _install()
        raise


def _install() -> None:
    """Once, and again where somebody has replaced the hook. It knows no error: what an error holds may go before."""
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
    """The last line outside of this package, as a traceback shows it."""
    frames = [frame for frame in traceback.extract_tb(trace) if not frame.filename.startswith(_PACKAGE)]
    return "".join(traceback.format_list(frames[-1:]))
