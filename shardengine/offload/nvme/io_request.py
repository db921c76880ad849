"""A requested read or write of an extent. Owns: when it is done, the error that it ends with.

Must not know: who carries it out, the bytes that are moved.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from shardengine.errors import OffloadError, UsageError


class IORequest:
    """A read or a write in flight. Until it is done, its memory belongs to it."""

    def __init__(self, blocks: int) -> None:
        self._left = blocks
        self._failure: tuple[str, BaseException] | None = None
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._process = os.getpid()
        if not blocks:
            self._ended.set()

    def done(self) -> bool:
        """Return whether ``wait`` returns, or raises, at once."""
        return self._ended.is_set()

    @property
    def failed(self) -> bool:
        """Whether ``wait`` raises, once it is done."""
        return self._failure is not None

    def wait(self) -> None:
        """Block until it is done.

        If it failed, each call raises OffloadError, and the memory of a read is undefined.
        """
        self.wait_quietly()
        if self._failure is not None:
            text, cause = self._failure
            raise OffloadError(text, code="nvme-transfer-failed") from cause

    def wait_quietly(self) -> None:
        """Block as ``wait`` does, without the error."""
        if not self._ended.is_set() and os.getpid() != self._process:
            raise UsageError(
                "offload: this transfer was under way at a fork: only the parent can wait for it",
                code="nvme-transfer-across-fork",
            )
        self._ended.wait()

    def fail(self, text: str, cause: BaseException) -> None:
        """Record a failure; the first one is kept. The request is done when all blocks have ended."""
        with self._lock:
            self._failure = self._failure or (text, cause)

    def count_down(self, last_words: Callable[[], None]) -> None:
        """Record the end of one block. After the last one ``last_words`` is called, then the request is done."""
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last:
            last_words()
            self._ended.set()
