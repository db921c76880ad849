"""Transient flat tensors that are used again. Must not know: what is in them."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from shardengine.offload.platform import HOST, Platform


class BufferPool:
    """Transient flat tensors, reused instead of freed: touching fresh pages costs more than the copies into them.

    platform: of the device that buffers in host memory are copied from and to · pins: page-lock those.
    """

    def __init__(self, platform: Platform, *, pins: bool = False) -> None:
        self._platform = platform
        self._pins = pins
        self._free: dict[tuple[torch.dtype, int, torch.device], list[Tensor]] = {}
        self._bytes: Counter[str] = Counter()

    @property
    def allocated_bytes(self) -> int:
        """Of all buffers, taken and free."""
        return self._bytes.total()

    def bytes_on(self, device: torch.device) -> int:
        """Of those in the memory of ``device``."""
        return self._bytes[device.type]

    def take(self, length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A flat tensor with undefined contents."""
        free = self._free.get((dtype, length, device))
        if free:
            return free.pop()
        with torch.inference_mode(False):  # it is used again outside of the caller's
            if device == HOST:
                buffer = self._platform.host_empty(length, dtype, pinned=self._pins)
            else:
                buffer = torch.empty(length, dtype=dtype, device=device)
        self._bytes[device.type] += buffer.nbytes
        return buffer

    def give(self, buffer: Tensor) -> None:
        """Hand a buffer of ``take`` back. On CUDA its users are ordered by the stream that both calls run on."""
        self._free.setdefault((buffer.dtype, buffer.numel(), buffer.device), []).append(buffer)

    def forget(self) -> None:
        """Free every buffer, and count no longer those that were taken: their takers are gone."""
        self._free.clear()
        self._bytes.clear()

    def clear(self) -> None:
        """Free every buffer that nobody has taken."""
        for (dtype, length, device), free in self._free.items():
            self._bytes[device.type] -= len(free) * length * dtype.itemsize
        self._free.clear()
