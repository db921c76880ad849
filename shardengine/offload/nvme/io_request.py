"""A read or a write of an extent that was asked for. Owns: when it is done, the error that it ends with.

Must not know: who carries it out, what is moved.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from shardengine.errors import OffloadError, UsageError


class IORequest:
    """A read or a write under way. Until it is done its memory belongs to it."""

    def __init__(self, blocks: int) -> None:
        self._left = blocks
        self._failure: tuple[str, BaseException] | None = None
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._process = os.getpid()
        if not blocks:
            self._ended.set()

    def done(self) -> bool:
        """Whether ``wait`` returns, or raises, at once."""
        return self._ended.is_set()

    @property
    def failed(self) -> bool:
        """Whether ``wait`` raises, once it is done."""
        return self._failure is not None

    def wait(self) -> None:
        """Return when it is done. OffloadError where it failed, each time; what a read has filled by then is void."""
        self.wait_quietly()
        if self._failure is not None:
            text, cause = self._failure
            raise OffloadError(text) from cause

    def wait_quietly(self) -> None:
        """``wait`` without the error."""
        if not self._ended.is_set() and os.getpid() != self._process:
            raise UsageError("offload: this transfer was under way at a fork: only the parent can wait for it")
        self._ended.wait()

    def fail(self, text: str, cause: BaseException) -> None:
        """Keep the first failure. It is done when all blocks are at their end."""
        with self._lock:
            self._failure = self._failure or (text, cause)

    def count_down(self, last_words: Callable[[], None]) -> None:
        """One block less; after the last one come ``last_words``, then it is done."""
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last:
            last_words()
            self._ended.set()
