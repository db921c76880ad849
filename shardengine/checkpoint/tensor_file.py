"""One file of tensors: written as a stream, checked chunk by chunk, read in ranges. The form is safetensors.

Must not know: engines, parameters, what the tensors mean.

[Note: Checksums] Every file is cut into chunks of ``CHUNK_BYTES``, and the index keeps a CRC-32 of each. So a rank that
needs a part of a file verifies that part, and no more. A checksum finds damage; it is no signature.

[Note: Streaming] A few blocks: while some are on their way to the disk, past the page cache where the file system can
do that (O_DIRECT), the next is filled and its checksums are taken. What is verified is asked for ahead of the checksums
in the same way. So the disk does not wait for the processor, unless its checksums are the slower of the two.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import math
import os
import stat
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardengine.errors import CheckpointError, UsageError
from shardengine.host_memory import staging

try:
    from isal.isal_zlib import crc32  # the same sums, faster; an extra of this package
except ImportError:
    from zlib import crc32

CHUNK_BYTES = 1 << 20
_BLOCK_CHUNKS = 4
_BLOCKS = 6
"""Of a writer: one is filled, the others are being written."""
_AHEAD = 4
"""Blocks that a reader asks the disk for."""
_ALIGNMENT = 4096
_MAX_OPEN = 64
"""Files that a reader holds open: a checkpoint may have more of them than a process may open."""
_CODES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64",
}  # fmt: skip
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in _CODES}
"""The dtypes that can be written, by the names that an index uses."""


@dataclass(frozen=True)
class Written:
    """A finished file: its size, a CRC-32 per chunk, where each tensor begins (bytes from the start of the file)."""

    bytes: int
    chunks: list[int]
    offsets: dict[str, int]


def header_of(
    tensors: Sequence[tuple[str, torch.dtype, Sequence[int]]], metadata: dict[str, str] | None = None
) -> tuple[bytes, dict[str, int], int]:
    """The head of a safetensors file: (its bytes, where each tensor begins, size of the whole file).

    Tensors lie in the given order without gaps; the head is padded, so that the first one starts at a page.
    """
    header: dict[str, Any] = {}
    offset = 0
    for key, dtype, shape in tensors:
        if dtype not in _CODES:
            raise UsageError(f"{key}: tensors of {dtype} cannot be written as safetensors")
        end = offset + math.prod(shape) * dtype.itemsize
        header[key] = {"dtype": _CODES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header if metadata is None else {"__metadata__": metadata, **header}).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    start = 8 + len(text)
    offsets = {key: start + row["data_offsets"][0] for key, row in header.items()}
    return len(text).to_bytes(8, "little") + text, offsets, start + offset


def write(path: Path, tensors: Sequence[tuple[str, Tensor]]) -> Written:
    """Write a new safetensors file and fsync it. The tensors may be views of anything and lie on any device."""
    ordered = sorted(tensors, key=lambda item: -item[1].element_size())  # every tensor then starts aligned
    head, offsets, total = header_of([(key, tensor.dtype, tensor.shape) for key, tensor in ordered])
    with Stream(path, total) as stream:
        stream.put(torch.frombuffer(bytearray(head), dtype=torch.uint8))
        for _, tensor in ordered:
            stream.put(tensor.detach().reshape(-1).view(torch.uint8))
    return Written(total, stream.chunks, offsets)


class Stream:
    """A new file that bytes are appended to ([Note: Streaming]); whole and durable when its ``with`` ends."""

    def __init__(self, path: Path, size: int = 0) -> None:
        """size: bytes that will be appended, where that is known: their room on the disk is taken at once."""
        self.chunks: list[int] = []
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        try:
            self._file = os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o644)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._file = os.open(path, flags, 0o644)
        try:
            _take_room(self._file, size)
        except OSError:
            os.close(self._file)
            raise
        self._blocks = list(staging(_BLOCKS * _BLOCK_CHUNKS * CHUNK_BYTES).chunk(_BLOCKS))
        self._filled = 0
        self._written = 0
        self._threads = ThreadPoolExecutor(_BLOCKS - 1)
        self._under_way: list[Future[None]] = []

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        try:
            if kind is None:
                if self._filled % CHUNK_BYTES:
                    self._sum(self._filled - self._filled % CHUNK_BYTES)
                self._flush()
                self._finish(0)
                os.ftruncate(self._file, self._written)
                os.fsync(self._file)
        finally:
            self._threads.shutdown()
            os.close(self._file)

    def put(self, data: Tensor) -> None:
        """Append ``data``: uint8 [bytes], on any device."""
        start = 0
        while start < data.numel():
            block = self._blocks[0]
            count = min(data.numel() - start, CHUNK_BYTES - self._filled % CHUNK_BYTES)
            block[self._filled : self._filled + count].copy_(data[start : start + count])
            start, self._filled = start + count, self._filled + count
            if self._filled % CHUNK_BYTES == 0:
                self._sum(self._filled - CHUNK_BYTES)
            if self._filled == block.numel():
                self._flush()

    def _sum(self, start: int) -> None:
        """Take the checksum of the chunk that was filled last, while it is still in the processor's cache."""
        self.chunks.append(crc32(_bytes_of(self._blocks[0][start : self._filled])))

    def _flush(self) -> None:
        count, block = self._filled, _bytes_of(self._blocks[0])
        self._finish(_BLOCKS - 2)
        padded = -(-count // _ALIGNMENT) * _ALIGNMENT
        try:
            self._under_way.append(self._threads.submit(self._write, block[:padded], self._written))
        except RuntimeError:  # the process is ending: it waits for threads that are there and lets nobody start one
            self._write(block[:padded], self._written)
        self._written, self._filled = self._written + count, 0
        self._blocks.append(self._blocks.pop(0))

    def _finish(self, left: int) -> None:
        """Wait until only ``left`` blocks are being written."""
        while len(self._under_way) > left:
            self._under_way.pop(0).result()

    def _write(self, block: memoryview, offset: int) -> None:
        while block:
            try:
                count = os.pwrite(self._file, block, offset)
            except OSError as error:
                flags = fcntl.fcntl(self._file, fcntl.F_GETFL)
                direct = getattr(os, "O_DIRECT", 0)
                if error.errno != errno.EINVAL or not flags & direct:
                    raise
                fcntl.fcntl(self._file, fcntl.F_SETFL, flags & ~direct)  # it takes O_DIRECT at opening only
                continue
            block, offset = block[count:], offset + count


def _bytes_of(data: Tensor) -> memoryview:
    return memoryview(data.numpy())  # type: ignore[arg-type]  # its stubs do not say so


def _take_room(file: int, size: int) -> None:
    """Have the file system reserve ``size`` bytes, where it can: a full disk is known now, and writes are faster."""
    reserve = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)  # posix_fallocate writes where it cannot
    if size and reserve is not None and reserve(file, 0, ctypes.c_int64(0), ctypes.c_int64(size)):
        code = ctypes.get_errno()
        if code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise OSError(code, os.strerror(code))


@dataclass(frozen=True)
class Damage:
    """Bytes [start, end) of ``file`` are not what was written; ``what`` says how."""

    file: str
    start: int
    end: int
    what: str


class Reader:
    """Ranges of the files in one directory. files: name → (bytes, CRC-32 of each chunk of ``chunk_bytes``)."""

    def __init__(self, directory: Path, files: dict[str, tuple[int, list[int]]], chunk_bytes: int) -> None:
        self._directory, self._files, self._chunk = directory, files, chunk_bytes
        self._opened: dict[str, int] = {}
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        for number in self._opened.values():
            os.close(number)
        self._opened.clear()

    def damage(self, file: str, ranges: Iterable[tuple[int, int]]) -> Damage | None:
        """The first thing that is wrong with ``file`` in the chunks that hold the bytes of ``ranges``."""
        size, sums = self._files[file]
        try:
            facts = (self._directory / file).stat()
            found = facts.st_size
            if not stat.S_ISREG(facts.st_mode):
                return Damage(file, 0, size, "is no regular file")
            if found != size:
                return Damage(file, found if found < size else 0, size, f"has {found} bytes, expected {size}")
            for first, last in _runs(ranges, self._chunk):
                asked = first
                for chunk in range(first, last, _BLOCK_CHUNKS):
                    ahead = min(chunk + _AHEAD * _BLOCK_CHUNKS, last)
                    self._ask_for(file, asked, ahead)
                    asked = ahead
                    at, end = chunk * self._chunk, min(min(chunk + _BLOCK_CHUNKS, last) * self._chunk, size)
                    data = self._staging(end - at)
                    self._pread(file, data, at)
                    view = _bytes_of(data)
                    for number, start in enumerate(range(0, end - at, self._chunk), chunk):
                        if crc32(view[start : start + self._chunk]) != sums[number]:
                            bad = number * self._chunk
                            text = "is damaged (a checksum differs)"
                            return Damage(file, bad, min(bad + self._chunk, size), text)
        except OSError as error:
            missing = isinstance(error, FileNotFoundError)
            return Damage(file, 0, size, "is missing" if missing else f"cannot be read ({error.strerror})")
        return None

    def read(self, file: str, offset: int, target: Tensor, dtype: torch.dtype) -> None:
        """Fill ``target`` (1-D, contiguous, on any device) with elements of ``dtype`` from byte ``offset`` on."""
        try:
            self._read(file, offset, target, dtype)
        except OSError as error:
            raise CheckpointError(f"{self._directory / file} cannot be read: {error.strerror or error}") from error

    def _read(self, file: str, offset: int, target: Tensor, dtype: torch.dtype) -> None:
        if target.device.type == "cpu" and target.dtype == dtype:
            return self._pread(file, target.view(torch.uint8), offset)
        step = _BLOCK_CHUNKS * CHUNK_BYTES // dtype.itemsize
        for start in range(0, target.numel(), step):
            part = target[start : start + step]
            data = self._staging(part.numel() * dtype.itemsize)
            self._pread(file, data, offset + start * dtype.itemsize)
            part.copy_(data.view(dtype))
        return None

    def _ask_for(self, file: str, first: int, last: int) -> None:
        """Have the disk read chunks [first, last) while others are looked at."""
        if hasattr(os, "posix_fadvise") and last > first:  # to the system a length of 0 is the whole file
            place, count = first * self._chunk, (last - first) * self._chunk
            os.posix_fadvise(self._open(file), place, count, os.POSIX_FADV_WILLNEED)

    def _staging(self, count: int) -> Tensor:
        if self._buffer.numel() < count:
            self._buffer = staging(max(count, min(2 * count, _BLOCK_CHUNKS * CHUNK_BYTES)))
        return self._buffer[:count]

    def _pread(self, file: str, target: Tensor, offset: int) -> None:
        """Exactly ``target`` (uint8 on the CPU) from ``offset``; OSError, or CheckpointError where the file ends."""
        number = self._open(file)
        view = _bytes_of(target)
        while view:
            count = os.preadv(number, [view], offset)
            if not count:
                raise CheckpointError(f"{self._directory / file}: expected bytes from {offset} on, the file ends there")
            view, offset = view[count:], offset + count

    def _open(self, file: str) -> int:
        if file not in self._opened:
            if len(self._opened) >= _MAX_OPEN:
                os.close(self._opened.pop(next(iter(self._opened))))
            self._opened[file] = os.open(self._directory / file, os.O_RDONLY)
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(self._opened[file], 0, 0, os.POSIX_FADV_SEQUENTIAL)
        return self._opened[file]


def _runs(ranges: Iterable[tuple[int, int]], chunk: int) -> list[tuple[int, int]]:
    """The chunks that hold the bytes of ``ranges``, as intervals [first, last) of chunk numbers that do not touch."""
    runs: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        first, last = start // chunk, -(-end // chunk)
        if runs and first <= runs[-1][1]:
            runs[-1] = (runs[-1][0], max(last, runs[-1][1]))
        else:
            runs.append((first, last))
    return runs
