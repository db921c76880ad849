"""One file per process for what does not fit into memory, cut into extents that are read and written asynchronously.

Owns: extents and their checksums, the order of requests, what is said when something fails. Must not know: what the
bytes mean.

[Note: Checksums of extents] For each block of an extent (``Aio.block_size`` bytes) a CRC-32 is kept in memory: taken
from the caller's memory before it is written, compared with what was read before the caller gets it. A lost write, a
block from another place and a flipped bit are seen alike. A new extent holds zeros, and is compared with zeros. Memory
that a caller only looks at (``look``) was compared when he got it, and changes nothing. What he writes to memory that
is the file (``edit``) nobody sees: the next request takes the sums anew from what it finds, and so does every one as
long as that memory lives.

[Note: Order of requests] Requests of one extent follow each other: asking for one waits for the one before it, which
is usually long done. Reads have threads of their own, and so have writes: a disk that can do both at once does.

[Note: Room that is used again] A file does not shrink. What is freed is used again for what is allocated later, once
nobody has memory of it (``look``, ``edit``) any more, and then zeros are written to it first. Room that these cannot be
written to is left alone.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from shardengine.errors import OffloadError, UsageError
from shardengine.kernels import crc32
from shardengine.offload.direct_io import ALIGNMENT, FULL, bytes_of, whole_pages
from shardengine.offload.host_memory import staging
from shardengine.offload.nvme.disk import Aio, Damage, DiskFile, Lane
from shardengine.offload.nvme.free_list import FreeList
from shardengine.offload.nvme.io_request import IORequest
from shardengine.offload.nvme.lease import DATA, Lease

__all__ = ["Aio", "Extent", "ExtentFile", "IORequest"]

_ZEROS = memoryview(bytearray(1 << 16))


@dataclass(frozen=True, eq=False)
class Extent:
    """``count`` bytes from byte ``offset`` (a multiple of 4096) of the file that gave it."""

    offset: int
    count: int


class _Torn(Exception):
    """An extent whose last write failed."""


@dataclass
class _State:
    """Of an extent. sums: a checksum per block · torn: a write of it failed, and none came after · edited: given out
    to be written to since the sums were taken (the object may be gone) · looked: given out to be read, and not written
    over since · views: all memory of it that somebody has · last: the request that came last."""

    sums: array[int]
    torn: bool = False
    edited: weakref.ref[mmap.mmap] | None = None
    looked: weakref.ref[mmap.mmap] | None = None
    views: weakref.WeakSet[mmap.mmap] = field(default_factory=weakref.WeakSet)
    last: IORequest = field(default_factory=lambda: IORequest(0))

    @property
    def shown(self) -> bool:
        """Whether somebody still has memory of it, which was verified then."""
        return any(view is not None and view() is not None for view in (self.edited, self.looked))


class ExtentFile:
    """One file in a sub-directory of ``directory``, removed at ``close``, with the object, and at exit.

    directory: made where it is missing; what crashed processes left in it is removed · label: who this is in errors,
    such as "rank 3". OffloadError where no file can be made. One thread at a time may use an extent, and allocate.
    """

    def __init__(self, directory: Path, label: str, aio: Aio = Aio()) -> None:  # noqa: B008  # it is frozen
        self._label, self._aio = label, aio
        self._lease = Lease(Path(directory), label)
        try:
            self._disk = DiskFile(self._lease.path / DATA)
        except OSError as error:
            self._lease.release()
            text = f"{label}: {self._lease.path / DATA} cannot be made: {error.strerror or error}"
            raise OffloadError(f"{text}. Name another directory, on a disk that works and has room") from error
        self._summing = threading.Semaphore(aio.thread_count)
        self._reads, self._writes = Lane(aio.queue_depth, "offload-read"), Lane(aio.queue_depth, "offload-write")
        self._states: dict[Extent, _State] = {}
        self._free, self._freed = FreeList(), list[tuple[Extent, _State]]()
        self._reserved: dict[int, list[Extent]] = {}
        self._end = weakref.finalize(self, _end, self._lease, self._disk, (self._reads, self._writes))
        _FILES.add(self)

    @property
    def path(self) -> Path:
        """The file."""
        return self._disk.path

    def allocate(self, count: int) -> Extent:
        """``count`` bytes more, zeros: what was reserved for them, or else new ones, as ``reserve`` takes them."""
        self._check_held()
        if not self._reserved.get(count):
            self.reserve(count)
        return self._reserved[count].pop()

    def reserve(self, count: int) -> None:
        """Take room on the disk now for ``allocate(count)``, which does not fail then. OffloadError: there is none."""
        self._check_held()
        if count < 0:
            raise UsageError(f"{self._label}: ExtentFile.allocate: expected a count of bytes, got {count}")
        try:
            self._disk.check()
            extent = Extent(self._place(whole_pages(count)), count)
        except (OSError, Damage) as error:
            wanted = Extent(self._disk.size, count)
            raise OffloadError(_sentence(self._label, "taking room for", self.path, wanted, error)) from error
        sums = [_sum_of_zeros(end - start) for start, end in _segments(count, self._aio.block_size)]
        self._states[extent] = _State(array("I", sums))
        self._reserved.setdefault(count, []).append(extent)

    def free_reserved(self) -> None:
        """What was reserved, and not allocated since, is not needed."""
        for extent in (extent for extents in self._reserved.values() for extent in extents):
            self.free(extent)
        self._reserved.clear()

    def free(self, extent: Extent) -> None:
        """Nobody needs it any more ([Note: Room that is used again])."""
        state = self._states.pop(extent)
        state.last.wait_quietly()
        self._freed.append((extent, state))

    def read(self, extent: Extent, into: Tensor) -> IORequest:
        """Fill ``into``: uint8 [count] on the CPU from a page on (``host_memory.staging``).

        It fails where the system says so, where the file was removed, replaced or cut, where other bytes come than
        were written, and where the last write failed.
        """
        return self._begin(extent, into, reading=True)

    def write(self, extent: Extent, source: Tensor) -> IORequest:
        """Write ``source``, memory as ``read`` wants it. The extent is torn where it fails, until another succeeds."""
        return self._begin(extent, source, reading=False)

    def look(self, extent: Extent) -> Tensor:
        """The extent as memory, for cold reading: uint8 [count], read when touched. What is written to it is lost.

        What is there now is verified first, unless somebody still has it from before. OffloadError as for ``read``. A
        disk that fails later, or a file that somebody cuts, ends the process (SIGBUS).
        """
        return self._mapped(extent, shared=False)

    def edit(self, extent: Extent) -> Tensor:
        """As ``look``, but what is written to it becomes part of the file, verified by nobody until it is read back."""
        return self._mapped(extent, shared=True)

    def close(self) -> None:
        """Wait for all requests and remove the file. A mapping stays, as memory that is nobody else's."""
        self._end()

    def _place(self, count: int) -> int:
        """Where ``count`` bytes, whole pages, hold zeros from now on."""
        freed, self._freed = self._freed, []
        for extent, state in freed:
            if state.views:
                self._freed.append((extent, state))
            else:
                self._free.give(extent.offset, whole_pages(extent.count))
        while (start := self._free.take(count)) is not None:
            try:
                zeros = bytes_of(staging(min(count, self._aio.block_size)))
                for first, end in _segments(count, self._aio.block_size):
                    self._disk.write(zeros[: end - first], start + first)
                return start
            except OSError as error:
                if error.errno in FULL:
                    self._free.give(start, count)
                    raise
        return self._disk.grow(count) if count else self._disk.size

    def _begin(self, extent: Extent, data: Tensor, *, reading: bool) -> IORequest:
        aligned = data.is_cpu and data.is_contiguous() and data.data_ptr() % ALIGNMENT == 0
        if data.dtype is not torch.uint8 or data.shape != (extent.count,) or (extent.count and not aligned):
            raise UsageError(
                f"{self._label}: ExtentFile.{'read' if reading else 'write'}: expected uint8 [{extent.count}] on the "
                f"CPU, contiguous, at a multiple of {ALIGNMENT} in memory (host_memory.staging), got {data.dtype} "
                f"{list(data.shape)} on {data.device}"
            )
        blocks = self._blocks(extent, bytes_of(data), reading=reading)
        state = self._states[extent]
        state.last = blocks.request
        if not reading:
            state.looked = None
        (self._reads if reading else self._writes).put(blocks.carry_out, len(state.sums))
        return blocks.request

    def _mapped(self, extent: Extent, *, shared: bool) -> Tensor:
        scratch = staging(min(extent.count, self._aio.block_size))
        blocks = self._blocks(extent, bytes_of(scratch), reading=True, cached=True)
        state = self._states[extent]
        if blocks.failed or not state.shown:
            blocks.carry_out()
            blocks.request.wait()
        if not extent.count:
            return scratch
        area = state.edited() if shared and state.edited is not None else None
        if area is None:
            area = self._disk.mapped(extent.count, extent.offset, shared=shared)
        state.views.add(area)
        if shared:
            state.edited = weakref.ref(area)
        else:
            state.looked = weakref.ref(area)
        return torch.frombuffer(area, dtype=torch.uint8)

    def _blocks(self, extent: Extent, data: memoryview, *, reading: bool, cached: bool = False) -> _Blocks:
        """A request of ``extent`` that follows the one before it; what it cannot overcome has failed already."""
        self._check_held()
        state = self._states.get(extent)
        if state is None:
            raise UsageError(f"{self._label}: offload: expected an extent of {self.path}, got one of another file")
        state.last.wait_quietly()
        blocks = _Blocks(self, extent, state, data, reading=reading, cached=cached)
        try:
            self._disk.check()
            if reading and state.torn:
                raise _Torn("the last write of it failed, and what is there is neither the old nor the new")
            if state.edited is not None:
                self._flush()
        except (OSError, Damage, _Torn) as error:
            blocks.fail(error)
        return blocks

    def _flush(self) -> None:
        """What was written through mappings is on the disk. The system tells a failure once, for the whole file."""
        try:
            self._disk.flush()
        except OSError:
            for state in self._states.values():
                state.torn |= state.edited is not None
            raise

    def _check_held(self) -> None:
        if not self._lease.held:
            raise UsageError(
                f"{self._label}: offload: {self.path} is closed, or belongs to the parent of this forked process: "
                "make an ExtentFile of its own in a child"
            )


class _Blocks:
    """The blocks of an I/O request. It knows no ExtentFile, which may be collected before the last block is done."""

    def __init__(
        self, file: ExtentFile, extent: Extent, state: _State, data: memoryview, *, reading: bool, cached: bool
    ) -> None:
        """cached: through the page cache, all blocks to the same memory, the first bytes of ``data``."""
        self._disk, self._label, self._summing = file._disk, file._label, file._summing
        self._extent, self._state, self._data = extent, state, data
        self._reading, self._cached = reading, cached
        self._size = file._aio.block_size
        self._left = iter(range(0, extent.count, self._size))
        self._gone = state.edited is not None and state.edited() is None
        self.request = IORequest(len(state.sums))

    def carry_out(self) -> None:
        """Block after block, until all have been begun: by any number of threads. None after one has failed."""
        for start in self._left:
            if not self.failed:
                try:
                    (self._read if self._reading else self._write)(start)
                except Exception as error:  # whatever it is, somebody waits for this request
                    self.fail(error)
            self.request.count_down(self._last_words)

    @property
    def failed(self) -> bool:
        """Whether there is nothing more to carry out."""
        return self.request.failed

    def fail(self, error: Exception) -> None:
        """Keep the first error, for ``IORequest.wait``."""
        doing = "reading" if self._reading else "writing"
        self.request.fail(_sentence(self._label, doing, self._disk.path, self._extent, error), error)

    def _read(self, start: int) -> None:
        end, sums = min(start + self._size, self._extent.count), self._state.sums
        data = self._data[: end - start] if self._cached else self._data[start:end]
        self._disk.read(data, self._extent.offset + start, cached=self._cached)
        with self._summing:
            found = crc32(data)
        if self._state.edited is not None:
            sums[start // self._size] = found
        elif found != sums[start // self._size]:
            first = self._extent.offset + start
            raise Damage(f"bytes {first} to {first + len(data)} are not those that were written (a checksum differs)")

    def _write(self, start: int) -> None:
        data = self._data[start : start + self._size]
        with self._summing:
            self._state.sums[start // self._size] = crc32(data)
        self._disk.write(data, self._extent.offset + start)

    def _last_words(self) -> None:
        """What was edited, and was let go of when this began, has not changed since: the sums hold."""
        if not self._reading:
            self._state.torn = self.failed
        if self._gone and not self.failed:
            self._state.edited = None


def _sentence(label: str, doing: str, path: Path, extent: Extent, error: Exception) -> str:
    """What failed, where, why, and what to do."""
    cause = (error.strerror if isinstance(error, OSError) else None) or str(error) or repr(error)
    if isinstance(error, _Torn):
        advice = "write it again before it is read"
    elif isinstance(error, Damage):
        advice = (
            f"let nothing else change files below {path.parent.parent}, see the system's log for its disk, and start "
            "again from the last checkpoint"
        )
    else:
        full = isinstance(error, OSError) and error.errno in FULL
        advice = (
            "make room there, or name a directory on a larger disk" if full else "see the system's log for its disk"
        )
        after = {
            "reading": "; start again from the last checkpoint",
            "writing": "; the bytes are still in memory and may be written again",
        }
        advice += after.get(doing, "")
    what = f"{doing} {extent.count} bytes at offset {extent.offset} of {path}"
    return f"{label}: {what} failed: {cause}. What to do: {advice}"


def _segments(count: int, size: int) -> Iterator[tuple[int, int]]:
    """The blocks of ``count`` bytes: [start, end)."""
    return ((start, min(start + size, count)) for start in range(0, count, size))


@lru_cache(maxsize=8)
def _sum_of_zeros(count: int) -> int:
    found = 0
    for start, end in _segments(count, len(_ZEROS)):
        found = crc32(_ZEROS[: end - start], found)
    return found


def _end(lease: Lease, disk: DiskFile, lanes: Sequence[Lane]) -> None:
    """Close and remove. Nothing in a forked child."""
    if not lease.held:
        return
    if any(lane.has_current_thread for lane in lanes):  # the garbage collector came by in a job
        threading.Thread(target=_end, args=(lease, disk, lanes), name="offload-end").start()
        return
    for lane in lanes:
        lane.end()
    disk.close()
    lease.release()


_FILES: weakref.WeakSet[ExtentFile] = weakref.WeakSet()


def _leave_to_the_parent() -> None:
    for file in list(_FILES):
        if file._lease.held:  # of a closed one the numbers of its files are others' by now
            file._lease.forget()
            file._disk.close()


os.register_at_fork(after_in_child=_leave_to_the_parent)
