"""Read the files of a checkpoint and verify the checksums of all bytes that are used. Owns: reading ahead, damage.

Must not know: engines, parameters, the format of a file.

[Note: Reading ahead] Threads read a few blocks ahead while the chunks of the first block are verified and copied to
their targets. Bytes that no other rank on this machine reads bypass the page cache (``direct``), with several reads at
once. Other bytes go through the page cache, one read after the other, so that the system reads ahead as well and the
next rank finds them in the cache.
"""

from __future__ import annotations

import errno
import os
import stat
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardengine.errors import CheckpointError, InternalError
from shardengine.kernels import crc32
from shardengine.offload import direct_io, staging

_BLOCK_BYTES = 4 << 20
_AHEAD = 4
"""Number of blocks that are read ahead while one is verified."""
_MAX_OPEN = 64
"""Limit of files that a reader keeps open: a checkpoint may have more files than a process may open."""
Ranges = Iterable[tuple[int, int]]
"""Bytes [start, end) of a file."""


@dataclass(frozen=True)
class FileDamage:
    """Bytes [start, end) of ``file`` differ from those that were written; ``what`` describes the damage."""

    file: str
    start: int
    end: int
    what: str


class DamageError(CheckpointError):
    """A file, or bytes of it, are damaged or missing."""

    def __init__(self, damage: FileDamage) -> None:
        super().__init__(f"{damage.file} {damage.what}")
        self.damage = damage


@dataclass(frozen=True)
class Wanted:
    """A request: fill ``target`` (1-D, on any device) with elements of ``dtype`` from byte ``offset`` of a file on."""

    offset: int
    target: Tensor
    dtype: torch.dtype

    @property
    def end(self) -> int:
        """One past the last byte."""
        return self.offset + self.target.numel() * self.dtype.itemsize


@dataclass(frozen=True)
class _ReadBlock:
    """Bytes [start, end) of a file: whole chunks (the last chunk of a file may be shorter)."""

    file: str
    start: int
    end: int


class BlockReader:
    """Reads ranges of the files in one directory. files: name → "bytes" and "chunks", a CRC-32 per ``chunk_bytes``.

    direct: bypass the page cache if the file system supports it ([Note: Reading ahead]).
    """

    def __init__(
        self, directory: Path, files: Mapping[str, Mapping[str, Any]], chunk_bytes: int, *, direct: bool = False
    ) -> None:
        self._directory, self._files, self._chunk = directory, files, chunk_bytes
        self._direct = direct and chunk_bytes % direct_io.ALIGNMENT == 0
        self._opened: dict[tuple[str, bool], int] = {}
        self._block_bytes = max(1, _BLOCK_BYTES // chunk_bytes) * chunk_bytes
        self._memory: list[Tensor] = []
        self._reading = False
        self._threads: ThreadPoolExecutor | None = None

    def __enter__(self) -> BlockReader:
        return self

    def __exit__(self, *_: object) -> None:
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None
        for number in self._opened.values():
            os.close(number)
        self._opened.clear()

    def fill(self, wanted: Mapping[str, Sequence[Wanted]]) -> None:
        """Fill every target. wanted: requests by file. Raises ``DamageError``; some targets may be filled by then."""
        todo = {file: sorted(rows, key=lambda row: row.offset) for file, rows in wanted.items()}
        done = dict.fromkeys(todo, 0)
        for file, at, data in self.verified({f: [(row.offset, row.end) for row in rows] for f, rows in todo.items()}):
            rows, end = todo[file], at + data.numel()
            while done[file] < len(rows) and rows[done[file]].end <= at:
                done[file] += 1
            for row in rows[done[file] :]:
                if row.offset >= end:
                    break
                first, last = max(row.offset, at), min(row.end, end)
                if first < last:
                    size = row.dtype.itemsize
                    part = row.target[(first - row.offset) // size : (last - row.offset) // size]
                    part.copy_(data[first - at : last - at].view(row.dtype))

    def damage(self, file: str, ranges: Ranges) -> FileDamage | None:
        """Return the damage of ``file`` or of the first bad chunk with bytes of ``ranges``; None if there is none."""
        try:
            for _ in self.verified({file: ranges}):
                pass
        except DamageError as error:
            return error.damage
        return None

    def verified(self, ranges: Mapping[str, Ranges]) -> Iterator[tuple[str, int, Tensor]]:
        """Yield (file, first byte, data) of every chunk with bytes of ``ranges``, file by file from the start on.

        data: uint8, valid until the next chunk is requested. Raises ``DamageError`` at the first damage; a file that is
        missing or has the wrong size is noticed a few blocks early. Only one such iteration may run at a time, because
        it uses the reader's memory.
        """
        if self._reading:
            raise InternalError("Reader.verified: expected the last one to be at its end, it is still going on")
        self._reading = True
        blocks, free = self._blocks(ranges), list(self._memory)
        under_way: deque[tuple[_ReadBlock, Tensor, Future[int]]] = deque()
        try:
            while True:
                while len(under_way) <= _AHEAD and (block := next(blocks, None)) is not None:
                    data = free.pop() if free else self._more_memory()
                    under_way.append((block, data, self._submit(block, data)))
                if not under_way:
                    return
                yield from self._whole(*under_way[0])
                free.append(under_way.popleft()[1])
        finally:
            wait([future for _, _, future in under_way])  # until then they write to the memory
            self._reading = False

    def read(self, file: str, offset: int, target: Tensor) -> None:
        """Fill ``target`` (1-D, contiguous, on the CPU) with the bytes from ``offset`` on, without verifying them."""
        data = target.view(torch.uint8)
        try:
            count = direct_io.read(self._open(file, direct=False), [direct_io.bytes_of(data)], offset, data.numel())
        except OSError as error:
            raise CheckpointError(
                f"{self._directory / file} cannot be read: {error.strerror or error}", code="checkpoint-file-unreadable"
            ) from error
        if count < data.numel():
            raise CheckpointError(
                f"{self._directory / file}: expected bytes from {offset + count} on, it ends there",
                code="checkpoint-damaged",
            )

    def _blocks(self, ranges: Mapping[str, Ranges]) -> Iterator[_ReadBlock]:
        for file, wanted in ranges.items():
            size = self._size(file)
            for first, last in _runs(wanted, self._chunk):
                end = min(last * self._chunk, size)
                for start in range(first * self._chunk, end, self._block_bytes):
                    yield _ReadBlock(file, start, min(start + self._block_bytes, end))

    def _size(self, file: str) -> int:
        """Return the size of ``file``; raise ``DamageError`` unless it is a regular file of the expected size."""
        size = self._files[file]["bytes"]
        try:
            facts = (self._directory / file).stat()
        except OSError as error:
            raise DamageError(self._unreadable(file, error)) from None
        found = facts.st_size
        if not stat.S_ISREG(facts.st_mode):
            raise DamageError(FileDamage(file, 0, size, "is no regular file"))
        if found != size:
            text = f"has {found} bytes, expected {size}"
            raise DamageError(FileDamage(file, found if found < size else 0, size, text))
        return size

    def _unreadable(self, file: str, error: OSError) -> FileDamage:
        if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
            raise error  # a limit of this process, no damage of the file
        missing = isinstance(error, FileNotFoundError)
        text = "is missing" if missing else f"cannot be read ({error.strerror})"
        return FileDamage(file, 0, self._files[file]["bytes"], text)

    def _more_memory(self) -> Tensor:
        self._memory.append(staging(self._block_bytes))
        return self._memory[-1]

    def _submit(self, block: _ReadBlock, data: Tensor) -> Future[int]:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_AHEAD if self._direct else 1, "checkpoint-reader")
        try:
            number = self._open(block.file, direct=self._direct)
        except OSError as error:
            raise DamageError(self._unreadable(block.file, error)) from None
        count = block.end - block.start
        padded = direct_io.whole_pages(count) if self._direct else count
        return self._threads.submit(direct_io.read, number, [direct_io.bytes_of(data[:padded])], block.start, count)

    def _whole(self, block: _ReadBlock, data: Tensor, future: Future[int]) -> Iterator[tuple[str, int, Tensor]]:
        """Yield the chunks of a block that was submitted, each after it is verified."""
        try:
            count = future.result()
        except OSError as error:
            raise DamageError(self._unreadable(block.file, error)) from None
        view, sums = direct_io.bytes_of(data), self._files[block.file]["chunks"]
        for start in range(block.start, block.end, self._chunk):
            end = min(start + self._chunk, block.end)
            at = start - block.start
            if end - block.start > count or crc32(view[at : end - block.start]) != sums[start // self._chunk]:
                raise DamageError(FileDamage(block.file, start, end, "is damaged (a checksum differs)"))
            yield block.file, start, data[at : end - block.start]

    def _open(self, file: str, *, direct: bool) -> int:
        """Return the descriptor of a file. Closes the least recently used one if too many are open."""
        key = (file, direct)
        number = self._opened.pop(key, None)
        if number is None:
            if len(self._opened) >= _MAX_OPEN:
                os.close(self._opened.pop(next(iter(self._opened))))
            path = self._directory / file
            number = direct_io.open_direct(path, os.O_RDONLY) if direct else os.open(path, os.O_RDONLY)
            if not direct:
                os.posix_fadvise(number, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        self._opened[key] = number
        return number


def _runs(ranges: Ranges, chunk: int) -> list[tuple[int, int]]:
    """Return the chunks with bytes of ``ranges``, as intervals [first, last) of chunk numbers that do not touch."""
    runs: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        first, last = start // chunk, -(-end // chunk)
        if runs and first <= runs[-1][1]:
            runs[-1] = (runs[-1][0], max(last, runs[-1][1]))
        else:
            runs.append((first, last))
    return runs
