"""Saved tensors of checkpointed blocks in host memory between forward and backward. Owns: the copies, the buffers.

Must not know: blocks, checkpointing, units.

[Note: There and back] Tensors that autograd saves inside ``saving`` are copied to host memory at once, in parallel with
computation. When the block's forward has been issued, the current stream waits for the copies and the tensors are
released: from then on their memory can be used again. In backward, a request for a tensor of a block starts its copy
back, unless it is back already, and also the copies of the tensors that the block before it saved: one block ahead. A
tensor stays on the device until its graph is freed.

[Note: Stretches] The unit of a copy is the stretch of the storage that contains a tensor's elements. Afterwards a view
with the same shape and strides is made over it. So transposed, sliced and expanded tensors come back as they were, and
need no more memory. A stretch begins at an address that has the device's alignment, so the copy back has the same
alignment. Tensors over the same stretch (a mask that all blocks get) share one copy while their storage lives and is
not written to.

Not copied: weights and module buffers, which stay on the device anyway, tensors that are not on the device, and tensors
that are not plain strided ones. Weights and buffers are recognised by a mark on their storage
(``bucket.mark_weights``), so the cost per block does not depend on the size of the model. A buffer that the user has
replaced since initialize has no mark and is copied.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from shardengine.errors import UsageError
from shardengine.offload import Platform
from shardengine.sharding import inner

_FEW = 64


class HostBuffers:
    """A pool of host memory: uint8 buffers, page-locked for a GPU.

    Before a new buffer is allocated, idle ones are freed until they add up to its size. So the pool never holds more
    than twice the peak size in use, whatever the sizes.
    """

    def __init__(self, platform: Platform) -> None:
        self.allocated_bytes = 0
        self._platform = platform
        self._idle: dict[int, list[Tensor]] = {}  # by size: blocks are alike, so there are few
        self._returned: deque[Tensor] = deque()  # by finalizers, which may run anywhere

    def acquire(self, count: int) -> Tensor:
        """Return at least ``count`` bytes with undefined contents."""
        while self._returned:
            returned = self._returned.popleft()
            self._idle.setdefault(returned.numel(), []).append(returned)
        fitting = [size for size in self._idle if count <= size <= 2 * count]
        if fitting:
            return self._take_idle(min(fitting))
        spared = 0
        while self._idle and spared < count:
            spared += self._take_idle(next(iter(self._idle))).numel()
        with torch.inference_mode(False):  # it is reused outside of the caller's inference mode
            buffer = self._platform.host_empty(count, torch.uint8, pinned=True)
        self.allocated_bytes += count - spared
        return buffer

    def _take_idle(self, size: int) -> Tensor:
        buffer = self._idle[size].pop()
        if not self._idle[size]:
            del self._idle[size]
        return buffer

    def release(self, buffer: Tensor) -> None:
        """Return a buffer of ``acquire`` to the pool; from any thread, also during ``acquire``."""
        self._returned.append(buffer)

    @property
    def idle_bytes(self) -> int:
        """Bytes of the buffers that are not in use."""
        idle = sum(size * len(buffers) for size, buffers in self._idle.items())
        return idle + sum(buffer.numel() for buffer in tuple(self._returned))


class ActivationStore:
    """Host memory for the saved tensors of blocks. stays: whether a storage stays on the device; called per saved
    tensor."""

    def __init__(self, platform: Platform, stays: Callable[[torch.UntypedStorage], bool]) -> None:
        self.buffers = HostBuffers(platform)
        self.stream = platform.copy_stream()
        self._device = platform.device
        self.alignment = platform.alignment
        self.stays = stays
        self._known: dict[_Key, tuple[weakref.ref[torch.UntypedStorage], weakref.ref[_Stretch]]] = {}
        self._kept = _FEW
        self._latest: list[weakref.ref[_Stretch]] = []

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Move tensors that autograd saves inside to host memory; for one forward of one block."""
        call = _OffloadedCall(self, self._latest)
        try:
            with torch.autograd.graph.saved_tensors_hooks(call.pack, _unpack):
                yield
        finally:
            call.give_up_sources()
            self._latest = call.stretches

    def moves(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is of a kind that can be copied and laid out again."""
        plain = inner.class_of(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_quantized
        return (
            plain and tensor.device == self._device and tensor.numel() > 0 and not (tensor.is_conj() or tensor.is_neg())
        )

    def stretch_of(self, source: Tensor, before: list[weakref.ref[_Stretch]]) -> tuple[_Stretch, bool]:
        """Return the copy of ``source`` (1-D, a whole stretch), and whether it was made now."""
        storage = source.untyped_storage()
        key = (id(storage), int(source.storage_offset()), source.numel(), source.dtype, source._version)
        if key in self._known:
            alive, known = self._known[key]
            stretch = known()
            if stretch is not None and alive() is storage:
                return stretch, False
        stretch = _Stretch(self, source, before)
        self._known[key] = weakref.ref(storage), weakref.ref(stretch)
        if len(self._known) > 2 * self._kept:  # so that each entry is looked at about once
            self._known = {at: pair for at, pair in self._known.items() if pair[1]() is not None}
            self._kept = max(len(self._known), _FEW)
        return stretch, True


_Key = tuple[int, int, int, torch.dtype, int]


class _OffloadedCall:
    """One forward of one block: the stretches that it saves, and ``before``: those of the call before it."""

    def __init__(self, store: ActivationStore, before: list[weakref.ref[_Stretch]]) -> None:
        self.stretches: list[weakref.ref[_Stretch]] = []
        self._store = store
        self._before = before
        self._sources: list[tuple[Tensor, int, _Stretch]] = []

    def pack(self, tensor: Tensor) -> _Packed:
        """Return the object that autograd holds in place of ``tensor`` until backward."""
        version = tensor._version
        if not self._store.moves(tensor) or self._store.stays(tensor.untyped_storage()):
            return _Packed(tensor, None, (), (), 0, version)
        offset, strides = int(tensor.storage_offset()), tensor.stride()
        last = offset + sum((size - 1) * stride for size, stride in zip(tensor.shape, strides, strict=True))
        first = offset - offset % (self._store.alignment // tensor.itemsize)
        source = tensor.detach().as_strided((last + 1 - first,), (1,), first)
        stretch, new = self._store.stretch_of(source, self._before)
        if new:
            self._sources.append((source, version, stretch))
            self.stretches.append(weakref.ref(stretch))
        return _Packed(None, stretch, tuple(tensor.shape), strides, offset - first, version)

    def give_up_sources(self) -> None:
        """Release the sources: the forward has been issued, and the next user of their memory waits for the copies."""
        for source, version, stretch in self._sources:
            stretch.done.wait()
            stretch.written_meanwhile = source._version != version
        self._sources.clear()


@dataclass(frozen=True)
class _Packed:
    """The object that autograd holds instead of a tensor: its place in a stretch, or ``tensor`` itself if it stays."""

    tensor: Tensor | None
    stretch: _Stretch | None
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    version: int


class _Stretch:
    """A stretch of one storage, in host memory or back on the device ([Note: There and back])."""

    def __init__(self, store: ActivationStore, source: Tensor, before: list[weakref.ref[_Stretch]]) -> None:
        self.written_meanwhile = False
        self.before = before
        self._store = store
        self._length, self._dtype, self._device = source.numel(), source.dtype, source.device
        self._back: Tensor | None = None
        self._host: Tensor | None = None
        self._host = store.buffers.acquire(source.nbytes)
        self.done = store.stream.copy(source, self._on_host(self._host))

    def fetch(self) -> Tensor:
        """Start the copy back, once, and return its target. The host buffer is free at once: copies run in order on one
        stream."""
        if self._back is None:
            host, self._host = self._host, None
            self._back = torch.empty(self._length, dtype=self._dtype, device=self._device)
            if host is not None:
                self.done = self._store.stream.copy(self._on_host(host), self._back)
                self._store.buffers.release(host)
        return self._back

    def _on_host(self, buffer: Tensor) -> Tensor:
        return buffer[: self._length * self._dtype.itemsize].view(self._dtype)

    def __del__(self) -> None:
        """Release the memory when the graph is gone; the next use of device memory comes after a copy in flight."""
        host, self._host = self._host, None
        if host is not None:
            self._store.buffers.release(host)
        if self._back is not None:
            self.done.wait()


def _unpack(packed: _Packed) -> Tensor:
    stretch = packed.stretch
    if stretch is None:
        written = packed.tensor is None or packed.tensor._version != packed.version
    else:
        written = stretch.written_meanwhile
    if written:
        raise UsageError(
            "an input of a checkpointed block was modified in place after its forward, so the block cannot be "
            "recomputed: neither the block nor later code may modify its inputs",
            code="activation-checkpointing-input-changed",
        )
    if stretch is None:
        return packed.tensor  # type: ignore[return-value]
    flat = stretch.fetch()
    stretch.done.wait()
    for reference in stretch.before:
        if (earlier := reference()) is not None:
            earlier.fetch()
    return flat.as_strided(packed.shape, packed.strides, packed.offset)
