"""One file per process for states that do not fit into memory, in extents with asynchronous reads and writes.

Owns: extents and their checksums, the order of requests, the messages of failures. Must not know: the meaning of the
bytes.

[Note: Checksums of extents] A CRC-32 of each block of an extent (``Aio.block_size`` bytes) is kept in memory. It is
computed from the caller's memory before the block is written, and compared with the bytes of a read before the caller
gets them. So a lost write, a block from another place and a flipped bit are all detected. A new extent holds zeros, and
is compared with zeros. Memory that a caller only reads (``look``) was compared when the caller got it, and changes
nothing. Writes to memory that is the file (``edit``) are not observed: the next request computes new checksums from the
bytes in the file, and so does every request as long as that memory lives.

[Note: Order of requests] Requests of one extent follow each other: a new request waits for the one before it, which is
usually long done. Reads and writes have separate threads, so a disk that can do both at once does.

[Note: Room that is used again] A file does not shrink. A freed extent is allocated again once nobody has memory of it
(``look``, ``edit``) any more, after zeros are written to it. Room that zeros cannot be written to is left unused.
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
    """``count`` bytes from byte ``offset`` (a multiple of 4096) of the file that allocated it."""

    offset: int
    count: int


class _Torn(Exception):
    """Raised for an extent whose last write failed."""


@dataclass
class _State:
    """The state of an extent.

    sums: a checksum per block · torn: its last write failed · edited: the mapping of an ``edit`` since the checksums
    were computed (the object may be gone) · looked: the mapping of a ``look``, if no write came since · views: all its
    mappings that somebody has · last: the last request.
    """

    sums: array[int]
    torn: bool = False
    edited: weakref.ref[mmap.mmap] | None = None
    looked: weakref.ref[mmap.mmap] | None = None
    views: weakref.WeakSet[mmap.mmap] = field(default_factory=weakref.WeakSet)
    last: IORequest = field(default_factory=lambda: IORequest(0))

    @property
    def shown(self) -> bool:
        """Whether somebody still has a mapping of it, which was verified when it was made."""
        return any(view is not None and view() is not None for view in (self.edited, self.looked))


class ExtentFile:
    """One file in a sub-directory of ``directory``, removed at ``close``, with the object, and at exit.

    directory: made if it is missing; files that crashed processes left in it are removed · label: who this is in
    errors, such as "rank 3". Raises OffloadError if no file can be made. One thread at a time may use an extent, and
    allocate.
    """

    def __init__(self, directory: Path, label: str, aio: Aio = Aio()) -> None:  # noqa: B008  # it is frozen
        self._label, self._aio = label, aio
        self._lease = Lease(Path(directory), label)
        try:
            self._disk = DiskFile(self._lease.path / DATA)
        except OSError as error:
            self._lease.release()
            text = f"{label}: {self._lease.path / DATA} cannot be made: {error.strerror or error}"
            raise OffloadError(
                f"{text}. Name another directory, on a disk that works and has room", code="nvme-file-not-made"
            ) from error
        self._summing = threading.Semaphore(aio.thread_count)
        self._reads, self._writes = Lane(aio.queue_depth, "offload-read"), Lane(aio.queue_depth, "offload-write")
        self._states: dict[Extent, _State] = {}
        self._free, self._freed = FreeList(), list[tuple[Extent, _State]]()
        self._reserved: dict[int, list[Extent]] = {}
        self._end = weakref.finalize(self, _end, self._lease, self._disk, (self._reads, self._writes))
        _FILES.add(self)

    @property
    def path(self) -> Path:
        """The path of the file."""
        return self._disk.path

    def allocate(self, count: int) -> Extent:
        """Return an extent of ``count`` zeros: a reserved one, or else a new one as ``reserve`` takes it."""
        self._check_held()
        if not self._reserved.get(count):
            self.reserve(count)
        return self._reserved[count].pop()

    def reserve(self, count: int) -> None:
        """Take room on the disk for ``allocate(count)``, which does not fail then.

        Raises OffloadError if there is none.
        """
        self._check_held()
        if count < 0:
            raise UsageError(
                f"{self._label}: ExtentFile.allocate: expected a count of bytes, got {count}",
                code="nvme-allocate-count-invalid",
            )
        try:
            self._disk.check()
            extent = Extent(self._place(whole_pages(count)), count)
        except (OSError, Damage) as error:
            wanted = Extent(self._disk.size, count)
            raise OffloadError(
                _sentence(self._label, "taking room for", self.path, wanted, error), code="nvme-room-refused"
            ) from error
        sums = [_sum_of_zeros(end - start) for start, end in _segments(count, self._aio.block_size)]
        self._states[extent] = _State(array("I", sums))
        self._reserved.setdefault(count, []).append(extent)

    def free_reserved(self) -> None:
        """Free the extents that were reserved and not allocated since."""
        for extent in (extent for extents in self._reserved.values() for extent in extents):
            self.free(extent)
        self._reserved.clear()

    def free(self, extent: Extent) -> None:
        """Free an extent ([Note: Room that is used again])."""
        state = self._states.pop(extent)
        state.last.wait_quietly()
        self._freed.append((extent, state))

    def read(self, extent: Extent, into: Tensor) -> IORequest:
        """Fill ``into``: uint8 [count] on the CPU that begins at a page (``host_memory.staging``).

        The request fails if the system reports an error, if the file was removed, replaced or cut, if the bytes are not
        those that were written, and if the last write failed.
        """
        return self._begin(extent, into, reading=True)

    def write(self, extent: Extent, source: Tensor) -> IORequest:
        """Write ``source``, memory as for ``read``.

        If the request fails, the extent is torn until another write succeeds.
        """
        return self._begin(extent, source, reading=False)

    def look(self, extent: Extent) -> Tensor:
        """Return the extent as memory, for rare reads: uint8 [count], read when touched. Writes to it are lost.

        The contents are verified first, unless somebody still has them from before. Raises OffloadError as ``read``
        does. If the disk fails later, or somebody cuts the file, the process ends (SIGBUS).
        """
        return self._mapped(extent, shared=False)

    def edit(self, extent: Extent) -> Tensor:
        """Return memory as ``look`` does, but writes to it go to the file.

        They are not verified until they are read back.
        """
        return self._mapped(extent, shared=True)

    def close(self) -> None:
        """Wait for all requests and remove the file. Mappings stay valid, as memory of their holders alone."""
        self._end()

    def _place(self, count: int) -> int:
        """Return the offset of ``count`` bytes (whole pages) that hold zeros."""
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
                f"{list(data.shape)} on {data.device}",
                code="nvme-buffer-unsuitable",
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
        """Return a request for ``extent`` that follows the one before it.

        If it cannot be carried out, it has failed already.
        """
        self._check_held()
        state = self._states.get(extent)
        if state is None:
            raise UsageError(
                f"{self._label}: offload: expected an extent of {self.path}, got one of another file",
                code="nvme-extent-of-another-file",
            )
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
        """Flush the writes through mappings to the disk. The system reports a failure once, for the whole file."""
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
                "make an ExtentFile of its own in a child",
                code="nvme-file-closed",
            )


class _Blocks:
    """The blocks of an I/O request.

    It does not refer to the ExtentFile, which may be collected before the last block is done.
    """

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
        """Process block after block until all have been begun, in any number of threads.

        After a failure the rest is skipped.
        """
        for start in self._left:
            if not self.failed:
                try:
                    (self._read if self._reading else self._write)(start)
                except Exception as error:  # whatever it is, somebody waits for this request
                    self.fail(error)
            self.request.count_down(self._last_words)

    @property
    def failed(self) -> bool:
        """Whether a block has failed, so that nothing is left to do."""
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
        """Update the state at the end.

        Memory of an ``edit`` that was gone when this began has not changed since: the sums hold.
        """
        if not self._reading:
            self._state.torn = self.failed
        if self._gone and not self.failed:
            self._state.edited = None


def _sentence(label: str, doing: str, path: Path, extent: Extent, error: Exception) -> str:
    """Return the message of a failure: which operation and place, the cause, and what to do."""
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
    """Return the blocks of ``count`` bytes: [start, end)."""
    return ((start, min(start + size, count)) for start in range(0, count, size))


@lru_cache(maxsize=8)
def _sum_of_zeros(count: int) -> int:
    found = 0
    for start, end in _segments(count, len(_ZEROS)):
        found = crc32(_ZEROS[: end - start], found)
    return found


def _end(lease: Lease, disk: DiskFile, lanes: Sequence[Lane]) -> None:
    """Close and remove the file. Does nothing in a forked child."""
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
        if file._lease.held:  # the descriptors of a closed one may be in use for other files by now
            file._lease.forget()
            file._disk.close()


os.register_at_fork(after_in_child=_leave_to_the_parent)
