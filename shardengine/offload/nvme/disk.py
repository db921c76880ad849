"""One new file and the threads that read and write it. Owns: its size, whether it still exists, jobs in flight.

Must not know: extents, leases, sentences for users. Every failure is an OSError or ``Damage``.

[Note: Threads] A block in flight is a thread that waits in a system call, without the interpreter's lock. io_uring,
tried with the same blocks and as many in flight, moved no more bytes per second and would save a few hundredths of a
core, for a second code path that many containers forbid.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from shardengine.errors import UsageError
from shardengine.offload import direct_io
from shardengine.offload.direct_io import ALIGNMENT

_log = logging.getLogger(__name__)

Job = Callable[[], None]


class Damage(Exception):
    """The file does not hold the bytes that were written: it ends too early, or has other bytes."""


@dataclass(frozen=True)
class Aio:
    """The way a file is read and written.

    block_size: bytes of one system call, a multiple of 4096 · queue_depth: calls in flight, of reads and of writes each
    · thread_count: threads that compute checksums at one time.
    """

    block_size: int = 1 << 20
    queue_depth: int = 8
    thread_count: int = 1

    def __post_init__(self) -> None:
        for name in ("block_size", "queue_depth", "thread_count"):
            value, unit = getattr(self, name), ALIGNMENT if name == "block_size" else 1
            if value < unit or value % unit:
                raise UsageError(
                    f"aio: {name}: expected a positive multiple of {unit}, got {value}", code="nvme-aio-invalid"
                )


class DiskFile:
    """A new file at ``path``, read and written past the page cache if its file system supports that."""

    def __init__(self, path: Path) -> None:
        self.path, self.size = path, 0
        self._file = self._plain = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            self._file = direct_io.open_direct(path, os.O_RDWR)
            page = memoryview(mmap.mmap(-1, ALIGNMENT))
            direct_io.write(self._file, [page], 0)  # some file systems reject O_DIRECT only here
            direct_io.read(self._file, [page], 0, ALIGNMENT)
            os.ftruncate(self._plain, 0)
        except OSError:
            self.close()
            raise
        if not self.direct and os.environ.get("RANK", "0") == "0":
            _log.warning("%s: its file system has no O_DIRECT: transfers go through the page cache", path)

    @property
    def direct(self) -> bool:
        """Whether transfers bypass the page cache."""
        return direct_io.is_direct(self._file)

    def grow(self, count: int) -> int:
        """Append ``count`` bytes of zeros (a multiple of the alignment), reserved if possible.

        Returns the offset of the first.
        """
        start = self.size
        try:
            direct_io.fallocate(self._plain, start, count)
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self._plain, start)
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # it cannot reserve room
                raise
            os.ftruncate(self._plain, start + count)
        self.size = start + count
        return start

    def check(self) -> None:
        """Raise Damage if the file is no longer at its path, or is shorter than it was made."""
        try:
            there = os.stat(self.path)
        except (FileNotFoundError, NotADirectoryError):
            raise Damage("somebody has removed the file") from None
        if not os.path.samestat(there, os.fstat(self._plain)):
            raise Damage("somebody has put another file in its place")
        if there.st_size < self.size:
            raise Damage(f"somebody has cut the file to {there.st_size} bytes, it had {self.size}")

    def read(self, data: memoryview, offset: int, *, cached: bool = False) -> None:
        """Fill ``data`` from ``offset`` on, a multiple of the alignment. cached: through the page cache."""
        whole, page = _parts(data)
        file, total = self._plain if cached else self._file, len(whole) + len(page)
        if direct_io.read(file, [whole, page], offset, total) < total:
            raise Damage(f"the file ends before byte {offset + total}")
        data[len(whole) :] = page[: len(data) - len(whole)]

    def write(self, data: memoryview, offset: int) -> None:
        """Write ``data``. The bytes from its end to the next multiple of the alignment become zero."""
        whole, page = _parts(data)
        page[: len(data) - len(whole)] = data[len(whole) :]
        direct_io.write(self._file, [whole, page], offset)

    def mapped(self, count: int, offset: int, *, shared: bool) -> mmap.mmap:
        """Return a mapping of ``count`` bytes. shared: writes to the mapping go to the file."""
        return mmap.mmap(self._plain, count, access=mmap.ACCESS_WRITE if shared else mmap.ACCESS_COPY, offset=offset)

    def flush(self) -> None:
        """Flush all writes through mappings to the disk."""
        direct_io.fsync(self._plain)

    def close(self) -> None:
        """End reads and writes; mappings stay valid."""
        numbers = {self._file, self._plain}
        self._file = self._plain = -1
        for number in numbers:
            os.close(number)


class Lane:
    """Threads, ``depth`` of them, that run jobs and begin them in the order of ``put``. A job must not raise.

    The threads start with the first job, end with the process, and keep no reference to a job that is done.
    """

    def __init__(self, depth: int, name: str) -> None:
        self._depth, self._name = depth, name
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._starting = threading.Lock()

    def put(self, job: Job, count: int) -> None:
        """Have up to ``count`` threads run ``job``.

        If no thread can be started (the process is ending), the caller runs it, and it is done on return.
        """
        if not self._threads:
            self._start()
        for _ in range(min(count, len(self._threads))):
            self._jobs.put(job)
        if not self._threads:
            job()

    def end(self) -> None:
        """Wait for all jobs, then end the threads."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    @property
    def has_current_thread(self) -> bool:
        """Whether the caller runs in a thread of this lane."""
        return threading.current_thread() in self._threads

    def _start(self) -> None:
        with self._starting, suppress(RuntimeError):
            for _ in range(self._depth - len(self._threads)):
                thread = threading.Thread(target=_serve, args=(self._jobs,), name=self._name, daemon=True)
                thread.start()
                self._threads.append(thread)


def _serve(jobs: SimpleQueue[Job | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job


def _parts(data: memoryview) -> tuple[memoryview, memoryview]:
    """Return the whole pages of ``data``, and one new page for the rest, empty if there is no rest."""
    whole = len(data) - len(data) % ALIGNMENT
    return data[:whole], memoryview(mmap.mmap(-1, ALIGNMENT) if whole < len(data) else bytearray())
