"""The disk as a tier: stores whose tensors are in one file, and pass through a few host buffers to be stepped.

Owns: the store in each buffer, and the state of a store after a failed write. Must not know: how a file is read
and written (extent_file), the meaning of the tensors.

[Note: A store in a file]

    from          by                                               to
    IN_FILE       prefetch, check_out                              READING
    IN_FILE       check_out(blank)                                 CHECKED_OUT
    READING       check_out                                        CHECKED_OUT
    READING       tensors, check_out(blank), buffer is needed      IN_FILE
    READING       the disk refuses                                 IN_FILE
    CHECKED_OUT   check_in(changed)                                WRITING
    CHECKED_OUT   check_in(not changed)                            IN_FILE, or WRITING if it was UNWRITTEN
    CHECKED_OUT   abandon                                          IN_FILE, or UNWRITTEN as before
    WRITING       the disk is done                                 IN_FILE, or UNWRITTEN after an error
    UNWRITTEN     check_out                                        CHECKED_OUT
    UNWRITTEN     tensors, check_out(blank), buffer is needed      WRITING

Tensors that are checked out may be half written, so ``tensors`` raises meanwhile. There are ``buffer_count`` buffers,
each as large as the largest store: while one store is stepped, the next ones are read and the last ones written. If a
write fails, the buffer keeps the stepped state, and nothing is lost. The error is raised once, to whoever waits for
that store or for a buffer (``prefetch``, a hint, waits for nothing). The next check-out takes the state from the buffer
and writes it again. A caller who needs a buffer when no other is left writes it again as well: there may be room on the
disk by then.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shardengine.errors import InternalError, OffloadError
from shardengine.offload.direct_io import whole_pages
from shardengine.offload.host_memory import HUGE_PAGE, staging
from shardengine.offload.nvme.extent_file import Extent, ExtentFile
from shardengine.offload.nvme.io_request import IORequest
from shardengine.offload.platform import HOST, Done, Platform
from shardengine.offload.shard_store import Forms, ShardStore

_ALIGNMENT = 64


class _Status(enum.Enum):
    IN_FILE = "in the file"
    READING = "on its way into a buffer"
    CHECKED_OUT = "in a buffer, to be written to"
    WRITING = "on its way back"
    UNWRITTEN = "in a buffer, because its write failed"


@dataclass(frozen=True)
class _Part:
    """Tensors that were added together.

    tensors: name → (first byte, elements, dtype), in ``extent`` · start: the place in a buffer.
    """

    extent: Extent
    start: int
    tensors: dict[str, tuple[int, int, torch.dtype]]

    def views(self, memory: Tensor) -> dict[str, Tensor]:
        """Return the tensors in ``memory``, the bytes of the extent."""
        return {
            name: memory[first : first + count * dtype.itemsize].view(dtype)
            for name, (first, count, dtype) in self.tensors.items()
        }


class FileTier:
    """A tier in ``file``, with ``buffer_count`` (at least 2) host buffers; pinned: page-locked ones."""

    name = "nvme"

    def __init__(self, file: ExtentFile, buffer_count: int, platform: Platform, *, pinned: bool = False) -> None:
        self.file = file
        self._platform = platform
        self._pinned = pinned
        self._count = buffer_count
        self._size = 0
        self._free: list[Tensor] = []
        self._made = 0
        self._lent: deque[tuple[Done, Tensor]] = deque()
        self._writing: deque[FileStore] = deque()
        self._fetched: list[FileStore] = []
        self._unwritten: list[FileStore] = []

    @property
    def buffer_bytes(self) -> int:
        """Bytes of host memory that all buffers take, once each has been needed."""
        return self._count * self._size

    def store(self) -> ShardStore:
        """See ``tiers.Tier``."""
        return FileStore(self)

    def reserve(self, forms: Forms) -> None:
        """See ``tiers.Tier``."""
        self.file.reserve(_places(forms)[1])

    def hold(self, size: int) -> None:
        """Make buffers of at least ``size`` bytes from now on."""
        if size > self._size:
            self._made -= len(self._free)
            self._free.clear()
            self._size = -(-size // HUGE_PAGE) * HUGE_PAGE

    def take_buffer(self, *, wait: bool) -> Tensor | None:
        """Return a free buffer. wait: if there is none, wait for the oldest write; otherwise return None.

        Raises OffloadError if that write fails, or has failed before and fails again.
        """
        while self._lent and (self._lent[0][0].reached or (wait and not self._has_buffer)):
            end, buffer = self._lent.popleft()
            end.wait_on_host()
            self._take_back(buffer)
        while self._writing:
            oldest = self._writing[0]
            over = oldest.written  # read before ``failed``, which may change in between
            if (oldest.failed and not wait) or not (over or (wait and not self._has_buffer)):
                break
            self._writing.popleft().land()
        if wait and not self._has_buffer:
            if self._fetched:
                self._fetched[-1].give_up()  # it was fetched on a prediction that failed
            elif self._unwritten:
                self._unwritten[0].write_again()
        if self._free:
            return self._free.pop()
        if self._made < self._count:
            buffer = self._platform.host_buffer(self._size, pinned=self._pinned)
            self._made += 1
            return buffer
        if wait:
            raise InternalError(f"all {self._count} buffers for {self.file.path} are taken at the same time")
        return None

    @property
    def _has_buffer(self) -> bool:
        return bool(self._free) or self._made < self._count

    def give_buffer(self, buffer: Tensor, after: Done) -> None:
        """Take a buffer back from its store. after: the end of a copy that reads it."""
        if after.reached:
            self._take_back(buffer)
        else:
            self._lent.append((after, buffer))

    def take_back_lent(self) -> None:
        """Wait for the copies that still read buffers."""
        while self._lent:
            end, buffer = self._lent.popleft()
            end.wait_on_host()
            self._take_back(buffer)

    def _take_back(self, buffer: Tensor) -> None:
        if buffer.numel() == self._size:
            self._free.append(buffer)
        else:
            self._made -= 1

    def follow(self, store: FileStore, *, writing: bool) -> None:
        """Note that ``store`` is being written, or was prefetched."""
        (self._writing if writing else self._fetched).append(store)

    def keep(self, store: FileStore) -> None:
        """Note that the write of ``store`` failed: only its buffer has the current bytes."""
        self._unwritten.append(store)

    def forget(self, store: FileStore) -> None:
        """Remove ``store`` from all lists: its transfer is over, or it is checked out."""
        for known in (self._writing, self._fetched, self._unwritten):
            if store in known:
                known.remove(store)


class FileStore(ShardStore):
    """A store in a file ([Note: A store in a file])."""

    in_file = True

    def __init__(self, tier: FileTier) -> None:
        super().__init__(HOST, tier.name)
        self._tier = tier
        self._parts: list[_Part] = []
        self._state = _Status.IN_FILE
        self._buffer: Tensor | None = None
        self._requests: list[IORequest] = []
        self._unwritten = False
        self._verified: dict[str, Tensor] = {}
        """The tensors that ``replace_unreadable`` has verified: as long as they are kept, nothing is verified twice."""

    @property
    def written(self) -> bool:
        """Whether ``land`` returns, or raises, at once."""
        return all(request.done() for request in self._requests)

    @property
    def failed(self) -> bool:
        """Whether ``land`` raises."""
        return any(request.failed for request in self._requests)

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """See ``ShardStore``."""
        part = self._new_part({name: (tensor.numel(), tensor.dtype) for name, tensor in tensors.items()})
        memory = staging(part.extent.count)
        for name, view in part.views(memory).items():
            view.copy_(tensors[name])
        self._tier.file.write(part.extent, memory).wait()
        self._count(tensors)

    def add_zeros(self, forms: Forms) -> None:
        """See ``ShardStore``. A new extent holds zeros."""
        self._new_part(forms)
        self._count({name: torch.empty(length, dtype=dtype, device="meta") for name, (length, dtype) in forms.items()})

    def tensors(self, *, writable: bool = False) -> dict[str, Tensor]:
        """See ``ShardStore``. Returns the file as memory, after it is verified."""
        self._settle()
        show = self._tier.file.edit if writable else self._tier.file.look
        return self._views([show(part.extent) for part in self._parts])

    def prefetch(self) -> None:
        """See ``ShardStore``."""
        if self._state is _Status.IN_FILE and (buffer := self._tier.take_buffer(wait=False)) is not None:
            self._read(buffer)

    def check_out(self, *, blank: bool = False, to_copy: bool = False) -> dict[str, Tensor]:
        """See ``ShardStore``.

        Raises OffloadError if the store cannot be read, or its bytes are not those that were written.
        """
        if blank and self._state is not _Status.CHECKED_OUT:
            self._settle()
            self._buffer = self._tier.take_buffer(wait=True)
            self._state = _Status.CHECKED_OUT
        if self._state is _Status.WRITING:
            self._settle()
        if self._state is _Status.IN_FILE:
            buffer = self._tier.take_buffer(wait=True)
            assert buffer is not None
            self._read(buffer)
        if self._state is _Status.UNWRITTEN:
            self._tier.forget(self)
            self._unwritten = True
        if self._state is _Status.READING:
            self._tier.forget(self)
            try:
                for request in self._requests:
                    request.wait()
            except BaseException:
                for request in self._requests:
                    request.wait_quietly()  # into the buffer that somebody else gets now
                self._release()
                raise
        self._state = _Status.CHECKED_OUT
        return self._views(self._in_buffer())

    def check_in(self, *, changed: bool = True, after: Done = Done()) -> None:  # noqa: B008  (it has no state)
        """See ``ShardStore``. If the last write failed, the store is written even if it is unchanged."""
        if self._state is not _Status.CHECKED_OUT:
            raise InternalError(f"a store in {self._tier.file.path} is checked in, but it is {self._state.value}")
        if changed or self._unwritten:
            after.wait_on_host()
            self._write()
        else:
            self._release(after)

    def _write(self) -> None:
        memories = zip(self._parts, self._in_buffer(), strict=True)
        self._requests = [self._tier.file.write(part.extent, memory) for part, memory in memories]
        self._state, self._unwritten = _Status.WRITING, False
        self._tier.follow(self, writing=True)

    def abandon(self) -> None:
        """See ``ShardStore``."""
        if self._state is _Status.CHECKED_OUT and self._unwritten:
            self._state, self._unwritten = _Status.UNWRITTEN, False
            self._tier.keep(self)
        elif self._state is _Status.CHECKED_OUT:
            self._release()

    def offload(self, *, pinned: bool) -> None:
        """See ``ShardStore``: it is not on the device."""

    def reload(self) -> None:
        """See ``ShardStore``: it is not on the device."""

    def replace_unreadable(self) -> bool:
        """See ``ShardStore``. Raises OffloadError if a buffer that is still unwritten, or zeros, cannot be written."""
        self._settle()
        try:
            self._verified = self.tensors()
        except OffloadError:
            self._parts = [self._cleared(part) for part in self._parts]
            return True
        return False

    def _cleared(self, part: _Part) -> _Part:
        """Return ``part`` with zeros, at another place in the file if they cannot be written to its own."""
        try:
            self._tier.file.write(part.extent, staging(part.extent.count)).wait()
        except OffloadError:
            elsewhere = self._tier.file.allocate(part.extent.count)
            self._tier.file.free(part.extent)
            return replace(part, extent=elsewhere)
        return part

    def give_up(self) -> None:
        """Release the buffer of a store that was prefetched and not checked out, because the buffer is needed."""
        for request in self._requests:
            request.wait_quietly()
        self._tier.forget(self)
        self._release()

    def land(self) -> None:
        """Finish a write. If it failed, raise OffloadError, once; the buffer keeps the bytes."""
        try:
            for request in self._requests:
                request.wait()
        except BaseException:
            self._state = _Status.UNWRITTEN
            self._tier.keep(self)
            raise
        self._release()

    def write_again(self) -> None:
        """Repeat a failed write, because its buffer is needed.

        Raises OffloadError if it fails again; nothing has changed then.
        """
        self._settle()

    def drop(self) -> None:
        """See ``ShardStore``. Its room in the file is used again."""
        for request in self._requests:
            request.wait_quietly()
        self._tier.forget(self)
        if self._buffer is not None:
            self._release()
        for part in self._parts:
            self._tier.file.free(part.extent)
        self._parts, self.sizes, self._verified = [], {}, {}

    def _settle(self) -> None:
        """Bring the store back to the file: finish its transfer, and repeat a failed write."""
        if self._state is _Status.CHECKED_OUT:
            raise InternalError(
                f"what is kept in {self._tier.file.path} is being stepped, or its step was interrupted: expected "
                "engine.reset() or engine.load_checkpoint() on every rank before anything else"
            )
        if self._state is _Status.UNWRITTEN:
            self._tier.forget(self)
            self._write()
        if self._state is _Status.WRITING:
            self._tier.forget(self)
            self.land()
        elif self._state is _Status.READING:
            self.give_up()

    def _views(self, memories: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return the tensors in ``memories``, the bytes of each part."""
        found = [part.views(memory) for part, memory in zip(self._parts, memories, strict=True)]
        return {name: view for views in found for name, view in views.items()}

    def _in_buffer(self) -> list[Tensor]:
        """Return the bytes of each part in the store's buffer."""
        memory = self._own_buffer()
        return [memory[part.start : part.start + part.extent.count] for part in self._parts]

    def _new_part(self, forms: Forms) -> _Part:
        """Allocate room in the file, and in the buffers, for tensors of these (elements, dtype)."""
        self._settle()
        places, end = _places(forms)
        last = self._parts[-1] if self._parts else None
        start = 0 if last is None else last.start + whole_pages(last.extent.count)
        part = _Part(self._tier.file.allocate(end), start, places)
        self._parts.append(part)
        self._tier.hold(start + whole_pages(end))
        return part

    def _read(self, buffer: Tensor) -> None:
        self._buffer, self._state, self._verified = buffer, _Status.READING, {}
        self._tier.follow(self, writing=False)
        memories = zip(self._parts, self._in_buffer(), strict=True)
        self._requests = [self._tier.file.read(part.extent, memory) for part, memory in memories]

    def _own_buffer(self) -> Tensor:
        assert self._buffer is not None, self._state
        return self._buffer

    def _release(self, after: Done = Done()) -> None:  # noqa: B008  (it has no state)
        buffer, self._buffer = self._own_buffer(), None
        self._state, self._requests = _Status.IN_FILE, []
        self._tier.give_buffer(buffer, after)


def _places(forms: Forms) -> tuple[dict[str, tuple[int, int, torch.dtype]], int]:
    """Return where tensors lie that are added together: name → (first byte, elements, dtype), and the bytes of all."""
    places, end = {}, 0
    for name, (count, dtype) in forms.items():
        places[name] = (end, count, dtype)
        end += -(-count * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
    return places, end
