"""The disk itself, for ``checkpoint.py``: bytes written and read in plain ways, durability, and a cold page cache.

Owns: system calls on files. Must not know: tensors' meaning, libraries, ranks' process groups.

[Note: Plain ways] Buffered writes and reads, and ``O_DIRECT`` with aligned blocks of 8 MiB from one or four threads;
each by one process or by all ranks, every one with a file of its own and its share of the bytes. Memory is warm and
aligned, in huge pages and (four threads with O_DIRECT) in pages of 4 KiB as well, files are new, written blocks are
random, and a write ends with fsync of file and directory.

[Note: What was removed] Where the disk is another computer's file, writes were seen to be much slower when the files
that were written last had just been removed (why is not known for certain). So nothing is removed before
``KEPT_STATES`` times its size was written after it, neither a plain file nor a saver's.

[Note: Cold reads] Before every load the pages of its files are dropped (``posix_fadvise(DONTNEED)``, which clean pages
obey: everything was fsynced). ``resident`` tells afterwards whether they have gone.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from shardengine.offload.host_memory import staging

BLOCK_BYTES = 8 << 20
KEPT_STATES = 6
ALIGNMENT = 4096


@dataclass(frozen=True)
class Way:
    """How to move bytes: through the page cache or around it, from how many threads of how many processes.

    huge: from memory in huge pages, where the system has them.
    """

    direct: bool
    threads: int
    huge: bool
    processes: int

    def __str__(self) -> str:
        kind = f"O_DIRECT, {self.threads} thread{'s' * (self.threads > 1)}" if self.direct else "buffered"
        return f"{kind}, {self.processes} process{'es' * (self.processes > 1)}{'' if self.huge else ', small pages'}"


def ways(folder: Path, processes: int) -> list[Way]:
    """The plain ways that ``folder``'s file system offers, with one process and with ``processes``."""
    direct = [(True, 1, True), (True, 4, True), (True, 4, False)]
    kinds = [(False, 1, True), *(direct if takes_direct(folder) else [])]
    return [Way(*kind, count) for count in sorted({1, processes}) for kind in kinds]


def takes_direct(folder: Path) -> bool:
    """Whether files in ``folder`` can be opened with ``O_DIRECT`` (tmpfs refused it for long)."""
    probe = folder / ".direct"
    try:
        os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600))
    except OSError:
        return False
    finally:
        probe.unlink(missing_ok=True)
    return True


class PlainFile:
    """One process's file of ``total`` bytes in all: memory to write it from and to read it into."""

    def __init__(self, folder: Path, total: int, number: int) -> None:
        self.folder, self.total, self.number = folder, total, number
        size = self.share(min(number, 1) + 1)
        self.memory: dict[bool, Any] = {
            True: memoryview(cast(Any, staging(size).numpy())),
            False: memoryview(mmap.mmap(-1, size)),
        }
        for start in range(0, size, BLOCK_BYTES):
            part = random.randbytes(min(BLOCK_BYTES, size - start))
            for memory in self.memory.values():
                memory[start : start + len(part)] = part

    def share(self, processes: int) -> int:
        """Bytes of one of ``processes`` files, a multiple of the alignment."""
        return -(-self.total // processes // ALIGNMENT) * ALIGNMENT

    def write(self, way: Way) -> None:
        """Write this process's share into a new file, durable on return; nothing where ``way`` has fewer processes."""
        self._move(way, os.O_WRONLY | os.O_CREAT | os.O_EXCL)

    def read(self, way: Way) -> None:
        """Read what ``write`` wrote in the same way."""
        self._move(way, os.O_RDONLY)

    def path(self, way: Way) -> Path:
        """The file of ``way``."""
        return self.folder / f"{str(way).replace(', ', '-').replace(' ', '')}.{self.number}"

    def _move(self, way: Way, flags: int) -> None:
        if self.number >= way.processes:
            return
        size, reading = self.share(way.processes), flags == os.O_RDONLY
        file = os.open(self.path(way), flags | (os.O_DIRECT if way.direct else 0), 0o600)
        window = self.memory[way.huge]

        def move(start: int) -> None:
            block = window[start : min(start + BLOCK_BYTES, size)]
            moved = os.preadv(file, [block], start) if reading else os.pwrite(file, block, start)
            if moved != len(block):
                raise OSError(f"{self.path(way)}: {moved} of {len(block)} bytes moved at {start}")

        try:
            if way.direct and not reading:
                os.posix_fallocate(file, 0, size)
            if way.threads == 1:
                for start in range(0, size, BLOCK_BYTES):
                    move(start)
            else:
                with ThreadPoolExecutor(way.threads) as pool:
                    list(pool.map(move, range(0, size, BLOCK_BYTES)))
            if not reading:
                os.fsync(file)
        finally:
            os.close(file)
        if not reading:
            sync(self.folder)


def files_in(folder: Path) -> Iterator[Path]:
    """Every file below ``folder``, in order."""
    yield from (path for path in sorted(folder.rglob("*")) if path.is_file())


def bytes_in(folder: Path) -> int:
    """Size of all files below ``folder``."""
    return sum(path.stat().st_size for path in files_in(folder))


def sync(path: Path) -> None:
    """fsync a file or a directory."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def make_durable(folder: Path, rank: int, ranks: int) -> None:
    """fsync what lies below ``folder``, the files shared among ``ranks`` processes; rank 0 adds the directories."""
    for path in list(files_in(folder))[rank::ranks]:
        sync(path)
    if rank == 0:
        for path in [folder, *(path for path in folder.rglob("*") if path.is_dir())]:
            sync(path)


def drop_cache(folder: Path) -> None:
    """Make the next read of every file below ``folder`` come from the disk ([Note: Cold reads])."""
    for path in files_in(folder):
        number = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(number)


def resident(folder: Path) -> float:
    """The fraction of the pages below ``folder`` that lie in the page cache (``mincore``, which reads nothing in)."""
    library = ctypes.CDLL(None, use_errno=True)
    pages = found = 0
    for path in files_in(folder):
        size, number = path.stat().st_size, os.open(path, os.O_RDONLY)
        try:
            if size == 0:
                continue
            states = np.zeros(-(-size // mmap.PAGESIZE), dtype=np.uint8)
            with mmap.mmap(number, size, access=mmap.ACCESS_READ) as window:
                view = np.frombuffer(window, dtype=np.uint8)
                failed = library.mincore(
                    ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(size), ctypes.c_void_p(states.ctypes.data)
                )
                del view
            if failed:
                raise OSError(ctypes.get_errno(), f"mincore of {path}")
            pages += len(states)
            found += int((states & 1).sum())
        finally:
            os.close(number)
    return found / pages if pages else 0.0
