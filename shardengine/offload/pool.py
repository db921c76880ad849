"""Transient flat tensors that are used again. Must not know: their contents."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from shardengine.offload.platform import Platform

_ON_HOST = "shardengine_on_host"
"""Attribute on the storage of a buffer in host memory: if the device is a CPU, ``device`` does not show the
difference."""


class BufferPool:
    """Transient flat tensors, reused instead of freed: touching fresh pages costs more than the copies into them.

    platform: the device that buffers are on, unless host memory is requested · pins: page-lock buffers in host memory.
    """

    def __init__(self, platform: Platform, *, pins: bool = False) -> None:
        self._platform = platform
        self._pins = pins
        self._free: dict[tuple[torch.dtype, int, bool], list[Tensor]] = {}
        self._bytes: Counter[bool] = Counter()

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all buffers, taken and free."""
        return self._bytes.total()

    @property
    def device_bytes(self) -> int:
        """Bytes of the buffers on the device."""
        return self._bytes[False]

    def acquire(self, length: int, dtype: torch.dtype, *, on_host: bool = False) -> Tensor:
        """Return a flat tensor with undefined contents, on the device or, with ``on_host``, in host memory.

        On a device without memory of its own ``on_host`` makes no difference.
        """
        on_host = on_host and self._platform.has_own_memory
        free = self._free.get((dtype, length, on_host))
        if free:
            return free.pop()
        with torch.inference_mode(False):  # it is used again outside of the caller's
            if on_host:
                buffer = self._platform.host_empty(length, dtype, pinned=self._pins)
                setattr(buffer.untyped_storage(), _ON_HOST, True)
            else:
                buffer = self._platform.empty(length, dtype)
        self._bytes[on_host] += buffer.nbytes
        return buffer

    def release(self, buffer: Tensor) -> None:
        """Hand a buffer of ``acquire`` back. On CUDA its users are ordered by the stream that both calls run on."""
        on_host = getattr(buffer.untyped_storage(), _ON_HOST, False)
        self._free.setdefault((buffer.dtype, buffer.numel(), on_host), []).append(buffer)

    def forget(self) -> None:
        """Free every buffer, and stop counting those that were taken: their users are gone."""
        self._free.clear()
        self._bytes.clear()

    def clear(self) -> None:
        """Free every buffer that is not taken."""
        for (dtype, length, on_host), free in self._free.items():
            self._bytes[on_host] -= len(free) * length * dtype.itemsize
        self._free.clear()
