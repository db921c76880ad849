"""Bytes between aligned memory and one open file. Owns: O_DIRECT, short transfers, threads.

Must not know: extents, claims, sentences for users. Whatever goes wrong is an OSError or ``Damage``.

[Note: Threads] A request in flight is a thread that waits in a system call, without the interpreter's lock. io_uring,
tried with the same blocks and as many in flight, moved no more bytes per second and would save a few hundredths of a
core, for a second path that many containers forbid.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from torch import Tensor

from shardengine.errors import UsageError

ALIGNMENT = 4096
"""Of places in the file and in memory: what O_DIRECT needs on every disk that is known."""
preadv, pwritev, fallocate, fsync = os.preadv, os.pwritev, os.posix_fallocate, os.fdatasync
_DIRECT = getattr(os, "O_DIRECT", 0)
_log = logging.getLogger(__name__)

Job = Callable[[], None]


class Damage(Exception):
    """The file is not what was written: it ends too early, or other bytes are in it."""


@dataclass(frozen=True)
class Aio:
    """How a file is read and written.

    block_size: bytes of one request, a multiple of 4096 · queue_depth: requests in flight, of reads and of writes
    each · thread_count: threads that take checksums at one time.
    """

    block_size: int = 1 << 20
    queue_depth: int = 8
    thread_count: int = 1

    def __post_init__(self) -> None:
        for name in ("block_size", "queue_depth", "thread_count"):
            value, unit = getattr(self, name), ALIGNMENT if name == "block_size" else 1
            if value < unit or value % unit:
                raise UsageError(f"aio: {name}: expected a positive multiple of {unit}, came {value}")


class DiskFile:
    """A new file at ``path``, read and written past the page cache where its file system can do that."""

    def __init__(self, path: Path) -> None:
        self.path, self.size = path, 0
        self._plain = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            direct = _open_direct(path)
        except OSError:
            os.close(self._plain)
            raise
        self._file = self._plain if direct is None else direct
        if direct is None and os.environ.get("RANK", "0") == "0":
            _log.warning("%s: its file system has no O_DIRECT: transfers go through the page cache", path)

    @property
    def direct(self) -> bool:
        """Whether the page cache is passed by."""
        return self._file != self._plain

    def grow(self, count: int) -> int:
        """Take room for ``count`` bytes (a multiple of the alignment) at the end, zeros; where they begin."""
        start = self.size
        try:
            fallocate(self._plain, start, count)
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
        self._move(True, self._plain if cached else self._file, [whole, page], offset)
        data[len(whole) :] = page[: len(data) - len(whole)]

    def write(self, data: memoryview, offset: int) -> None:
        """Write ``data``; what lies between its end and the next multiple of the alignment becomes zero."""
        whole, page = _parts(data)
        page[: len(data) - len(whole)] = data[len(whole) :]
        self._move(False, self._file, [whole, page], offset)

    def mapped(self, count: int, offset: int, *, shared: bool) -> mmap.mmap:
        """A mapping of ``count`` bytes. shared: what is written to it is written to the file."""
        return mmap.mmap(self._plain, count, access=mmap.ACCESS_WRITE if shared else mmap.ACCESS_COPY, offset=offset)

    def flush(self) -> None:
        """Whatever was written through mappings is on the disk."""
        fsync(self._plain)

    def close(self) -> None:
        """No more reads and writes; mappings stay."""
        numbers = {self._file, self._plain}
        self._file = self._plain = -1
        for number in numbers:
            os.close(number)

    def _move(self, reading: bool, file: int, parts: list[memoryview], offset: int) -> None:
        """All of ``parts``, in as many calls as the system wants."""
        done, total = 0, sum(len(part) for part in parts)
        while done < total:
            left = _after(parts, done)
            count = preadv(file, left, offset + done) if reading else pwritev(file, left, offset + done)
            count -= count % ALIGNMENT  # O_DIRECT goes on at no other place; a file that ends within a page is cut
            if count <= 0 and reading:
                raise Damage(f"the file ends before byte {offset + total}")
            if count <= 0:
                raise OSError(errno.EIO, "the system wrote nothing and named no reason")
            done += count


class Lane:
    """Jobs carried out in ``depth`` threads, begun in the order in which they come. A job must not raise.

    The threads start with the first job, end with the process, and hold nothing of a job that is done.
    """

    def __init__(self, depth: int, name: str) -> None:
        self._depth, self._name = depth, name
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._starting = threading.Lock()

    def put(self, job: Job, count: int) -> None:
        """Have ``job`` done by up to ``count`` threads. Where none can be started (the process is ending) it is done on
        return."""
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
        """Whether a job of this lane is what runs here."""
        return threading.current_thread() in self._threads

    def _start(self) -> None:
        with self._starting, suppress(RuntimeError):
            for _ in range(self._depth - len(self._threads)):
                thread = threading.Thread(target=_serve, args=(self._jobs,), name=self._name, daemon=True)
                thread.start()
                self._threads.append(thread)


def bytes_of(data: Tensor) -> memoryview:
    """The memory of ``data``, which is uint8 on the CPU."""
    return memoryview(data.numpy())  # type: ignore[arg-type]  # its stubs do not say so


def _serve(jobs: SimpleQueue[Job | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job


def _parts(data: memoryview) -> tuple[memoryview, memoryview]:
    """The whole pages of ``data``, and one page for the rest of it, empty where there is none."""
    whole = len(data) - len(data) % ALIGNMENT
    return data[:whole], memoryview(mmap.mmap(-1, ALIGNMENT) if whole < len(data) else bytearray())


def _after(parts: Sequence[memoryview], done: int) -> list[memoryview]:
    """What follows the first ``done`` bytes of ``parts``."""
    left = []
    for part in parts:
        if done < len(part):
            left.append(part[done:])
        done = max(0, done - len(part))
    return left


def _open_direct(path: Path) -> int | None:
    """``path`` opened with O_DIRECT, if a page can be written and read so; it is empty again then."""
    if not _DIRECT:
        return None
    try:
        number = os.open(path, os.O_RDWR | os.O_CLOEXEC | _DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return None
    page, works = memoryview(mmap.mmap(-1, ALIGNMENT)), False
    try:
        works = pwritev(number, [page], 0) == preadv(number, [page], 0) == ALIGNMENT
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
    finally:
        os.ftruncate(number, 0)
        if not works:
            os.close(number)
    return number if works else None
