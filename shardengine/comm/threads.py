"""Threads that may be inside of torch, and may stay there.

The end of the process waits for them for some time; elsewhere they are abandoned. Must not know: their work.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence

ending_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
"""Threads that will end by themselves, and may be inside of torch until then."""


def await_threads(wait_s: float) -> None:
    """At the end of the process: wait for ``ending_threads``, for at most ``wait_s``.

    A thread that came back from torch during the interpreter's end would abort the process.
    """
    deadline = time.monotonic() + wait_s
    for thread in list(ending_threads):
        thread.join(max(0.0, deadline - time.monotonic()))


def all_at_once(calls: Sequence[Callable[[], None]], wait_s: float) -> list[str]:
    """Make ``calls`` at the same time, each in a thread of its own, and wait for at most ``wait_s``.

    Return the problems: the text of each exception, and how many calls did not return and may still run.
    """
    problems: list[str] = []

    def run(call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            problems.append(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=run, args=(call,), daemon=True) for call in calls]
    for thread in threads:
        ending_threads.add(thread)
        thread.start()
    deadline = time.monotonic() + wait_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    late = sum(thread.is_alive() for thread in threads)
    return [*problems, f"{late} of {len(threads)} did not return within {wait_s:g} s"] if late else problems
