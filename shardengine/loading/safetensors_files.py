"""The tensors of a folder of safetensors files, read by name and interval. Owns: finding the files, their heads.

Must not know: models, the meaning of a name, the owner of an interval.

Only the requested bytes are read, and the pages at their ends: cached bytes from the page cache, the rest past it, in
several reads at once, since no other rank reads the same bytes.

If a folder has ``model.safetensors.index.json``, its files are those that this index names; otherwise all its
safetensors files belong together.
"""

from __future__ import annotations

import json
import math
import os
import threading
import zlib
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardengine.errors import UsageError
from shardengine.offload import direct_io, staging

_INDEX = "model.safetensors.index.json"
_LARGEST_HEAD = 100 << 20
"""Bytes: the limit of safetensors itself."""
_BLOCK = 2 << 20
_THREADS = 4
_MAX_OPEN = 64
"""The most files that are held open."""
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64,
}  # fmt: skip


_SAMPLES, _SAMPLE = 16, 512
"""The number of blocks of a file that are compared with another rank's, and the bytes of each."""


@dataclass(frozen=True)
class Entry:
    """One tensor: its bytes begin at ``start`` of ``path``."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int


class _Reading(NamedTuple):
    """A read of tensor ``name`` in flight.

    The result of each block is the number of missing bytes, as a negative number.
    """

    path: Path
    name: str
    blocks: list[Future[int]]


class SafetensorsFiles:
    """The tensors of ``files``. Raises UsageError, which names the file and the problem."""

    def __init__(self, files: Iterable[Path]) -> None:
        self.tensors: dict[str, Entry] = {}
        self._opened: dict[tuple[Path, bool], int] = {}
        self._local = threading.local()
        self._threads: ThreadPoolExecutor | None = None
        self._under_way: list[_Reading] = []
        self._paths = list(files)
        for path in self._paths:
            head = _head(path)
            if twice := sorted(head.keys() & self.tensors.keys()):
                raise UsageError(
                    f"{path}: it has {twice[0]!r}, and so has {self.tensors[twice[0]].path.name}: expected each tensor "
                    "in one file; put other weights into folders of their own",
                    code="weights-tensor-in-two-files",
                )
            self.tensors.update(head)

    @classmethod
    def of(cls, place: Path) -> SafetensorsFiles:
        """Return the tensors at ``place``: a folder or one file."""
        return cls(_files_of(place))

    def read(self, name: str, first: int, target: Tensor) -> None:
        """Fill ``target`` (1-D, contiguous, on the CPU, of the tensor's own dtype) with elements from ``first`` on."""
        self._end(self._begin(name, first, target))

    def begin_read(self, name: str, first: int, target: Tensor) -> None:
        """Begin a ``read``: ``target`` is filled when ``finish`` returns."""
        self._under_way.append(self._begin(name, first, target))

    def finish(self) -> None:
        """Wait for all reads of ``begin_read``."""
        begun, self._under_way = self._under_way, []
        wait(block for each in begun for block in each.blocks)
        for each in begun:
            self._end(each)

    def _begin(self, name: str, first: int, target: Tensor) -> _Reading:
        entry = self.tensors[name]
        data = target.view(torch.uint8) if target.dtype is not torch.uint8 else target
        start, total = entry.start + first * entry.dtype.itemsize, data.numel()
        blocks = [(at, min(at + _BLOCK, total)) for at in range(0, total, _BLOCK)]
        try:
            files = self._open(entry.path, direct=False), self._open(entry.path, direct=True)
        except OSError as error:
            raise _cannot_be_read(entry.path, name, error) from error

        def fill(at: int, end: int) -> int:
            part = direct_io.memory_of(data[at:end])
            count = direct_io.read_cached(files[0], part, start + at)
            return count + self._read_past(files[1], part[count:], start + at + count) - (end - at)

        if self._threads is None:
            self._threads = ThreadPoolExecutor(_THREADS, "weights-reader")
        return _Reading(entry.path, name, [self._threads.submit(fill, *block) for block in blocks])

    def _end(self, reading: _Reading) -> None:
        try:
            short = min((block.result() for block in reading.blocks), default=0)
        except OSError as error:
            raise _cannot_be_read(reading.path, reading.name, error) from error
        if short:
            raise UsageError(
                f"{reading.path}: it ends inside of {reading.name!r}; copy or download the file again",
                code="weights-file-cut-off",
            )

    def facts(self) -> list[str]:
        """Return a line per file that identifies it: name, size, and a checksum of some blocks."""
        return [f"{path.name}: {_digest(path)}" for path in self._paths]

    def close(self) -> None:
        """Close the files and end the threads."""
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None
        for number in self._opened.values():
            os.close(number)
        self._opened.clear()

    def _read_past(self, file: int, part: memoryview, offset: int) -> int:
        """Fill ``part`` past the page cache, through this thread's own pages. Return how many bytes were read."""
        if not len(part):
            return 0
        if not hasattr(self._local, "pages"):
            self._local.pages = direct_io.bytes_of(staging(_BLOCK + 2 * direct_io.ALIGNMENT))
        before = offset % direct_io.ALIGNMENT
        pages = self._local.pages[: direct_io.whole_pages(before + len(part))]
        count = direct_io.read(file, [pages], offset - before, before + len(part)) - before
        count = min(max(count, 0), len(part))
        part[:count] = pages[before : before + count]
        return count

    def _open(self, path: Path, *, direct: bool) -> int:
        number = self._opened.pop((path, direct), None)
        if number is None:
            if len(self._opened) >= _MAX_OPEN:
                wait(block for each in self._under_way for block in each.blocks)  # they may read from it
                os.close(self._opened.pop(next(iter(self._opened))))
            number = direct_io.open_direct(path, os.O_RDONLY) if direct else os.open(path, os.O_RDONLY)
        self._opened[path, direct] = number
        return number


def _cannot_be_read(path: Path, name: str, error: OSError) -> UsageError:
    return UsageError(f"{path}: {name!r} cannot be read: {error.strerror or error}", code="weights-file-unreadable")


def _digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            size, found = os.fstat(file.fileno()).st_size, 0
            for number in range(_SAMPLES):
                file.seek(max(size - _SAMPLE, 0) * number // (_SAMPLES - 1))
                found = zlib.crc32(file.read(_SAMPLE), found)
    except OSError as error:
        raise UsageError(
            f"{path}: it cannot be read: {error.strerror or error}", code="weights-file-unreadable"
        ) from error
    return f"{size} bytes, {found:08x}"


def _files_of(place: Path) -> list[Path]:
    expected = "expected a folder with safetensors files, or one such file"
    if place.is_file():
        if place.suffix != ".safetensors":
            raise UsageError(f"weights={str(place)!r}: {expected}, got another file", code="weights-not-safetensors")
        return [place]
    try:
        names = sorted(os.listdir(place))
    except OSError as error:
        raise UsageError(
            f"weights={str(place)!r}: {expected}: {error.strerror}", code="weights-folder-unreadable"
        ) from None
    if _INDEX in names:
        return [place / name for name in _named_by_index(place / _INDEX)]
    found = [place / name for name in names if name.endswith(".safetensors")]
    if not found:
        pickles = [name for name in names if name.endswith((".bin", ".pt", ".pth"))]
        has = f"{pickles[0]}, a pickle, which cannot be read in slices" if pickles else "none"
        cure = "; load it once with from_pretrained and save_pretrained it" if pickles else ""
        raise UsageError(f"weights={str(place)!r}: {expected}, found {has}{cure}", code="weights-not-safetensors")
    return found


def _named_by_index(path: Path) -> list[str]:
    try:
        table = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        return sorted(set(table.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{path}: expected an index with 'weight_map': {type(error).__name__}: {error}",
            code="weights-index-damaged",
        ) from None


def _head(path: Path) -> Mapping[str, Entry]:
    """Return the tensors that a file's head lists. Raises UsageError if the head cannot be true."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(_LARGEST_HEAD, size - 8):
                raise UsageError(
                    f"{path}: expected a safetensors file, its first 8 bytes are no length of a head",
                    code="weights-file-damaged",
                )
            head = json.loads(file.read(length))
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror or error}", code="weights-file-unreadable") from None
    except ValueError as error:
        raise UsageError(
            f"{path}: expected a safetensors file, its head is no JSON: {error}", code="weights-file-damaged"
        ) from None
    found = {name: _entry(path, name, row, 8 + length, size) for name, row in head.items() if name != "__metadata__"}
    return found


def _entry(path: Path, name: str, row: Any, start: int, size: int) -> Entry:
    try:
        dtype, shape = _DTYPES[row["dtype"]], tuple(int(count) for count in row["shape"])
        first, end = row["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(
            f"{path}: the head says nothing usable of {name!r}: {type(error).__name__}: {error}",
            code="weights-file-damaged",
        ) from None
    if end - first != math.prod(shape) * dtype.itemsize or first < 0:
        raise UsageError(
            f"{path}: {name!r} of shape {shape} has {end - first} bytes, which is not its size",
            code="weights-file-damaged",
        )
    if start + end > size:
        raise UsageError(
            f"{path}: {name!r} ends at byte {start + end}, the file has {size}: it was cut off; copy or download "
            "it again",
            code="weights-file-cut-off",
        )
    return Entry(path, dtype, shape, start + first)
