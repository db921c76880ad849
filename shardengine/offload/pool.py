"""Transient flat tensors that are used again. Must not know: what is in them."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from shardengine.offload.platform import Platform

_ON_HOST = "shardengine_on_host"
"""Written on the storage of a buffer in host memory, which its device does not tell where that is a CPU, too."""


class BufferPool:
    """Transient flat tensors, reused instead of freed: touching fresh pages costs more than the copies into them.

    platform: of the device on which they are, unless they are asked for in host memory · pins: page-lock the latter.
    """

    def __init__(self, platform: Platform, *, pins: bool = False) -> None:
        self._platform = platform
        self._pins = pins
        self._free: dict[tuple[torch.dtype, int, bool], list[Tensor]] = {}
        self._bytes: Counter[bool] = Counter()

    @property
    def allocated_bytes(self) -> int:
        """Of all buffers, taken and free."""
        return self._bytes.total()

    @property
    def device_bytes(self) -> int:
        """Of those on the device."""
        return self._bytes[False]

    def acquire(self, length: int, dtype: torch.dtype, *, on_host: bool = False) -> Tensor:
        """A flat tensor with undefined contents, on the device, or in host memory where that is another one."""
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
        """Free every buffer, and count no longer those that were taken: their takers are gone."""
        self._free.clear()
        self._bytes.clear()

    def clear(self) -> None:
        """Free every buffer that nobody has taken."""
        for (dtype, length, on_host), free in self._free.items():
            self._bytes[on_host] -= len(free) * length * dtype.itemsize
        self._free.clear()
