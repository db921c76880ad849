"""Tensors on their way between the device and host memory, oldest first.

Owns: the order of copies, the host work that follows a copy, the moment when a buffer is free again. Must not know:
which tensors are copied, and why.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shardengine.offload.platform import Done, Platform
from shardengine.offload.pool import BufferPool


class CopyQueue:
    """Copies between a device and the host, in one direction, concurrent with the computation on the device."""

    def __init__(self, platform: Platform, pool: BufferPool) -> None:
        self._copies = platform.copy_stream()
        self._pool = pool
        self._under_way: deque[tuple[list[Done], Tensor, Callable[[], None]]] = deque()

    def buffer(self, length: int, dtype: torch.dtype, *, on_host: bool) -> Tensor:
        """Take a buffer from the pool: it will be sent (``send``) or given back (``give``)."""
        self.settle(len(self._under_way))
        return self._pool.acquire(length, dtype, on_host=on_host)

    def bring(self, source: Tensor) -> tuple[Tensor, Done]:
        """Begin to copy ``source`` to host memory.

        Returns the buffer, which is the caller's until ``give``, and the end of the copy.
        """
        buffer = self.buffer(source.numel(), source.dtype, on_host=True)
        return buffer, self._copies.copy(source, buffer)

    def give(self, buffer: Tensor) -> None:
        """Return a buffer to the pool."""
        self._pool.release(buffer)

    def send(
        self, pairs: Sequence[tuple[Tensor, Tensor]], spent: Tensor, then: Callable[[], None] = lambda: None
    ) -> list[Done]:
        """Begin to copy the first tensor of each pair to the second. Return the ends of the copies.

        spent: a buffer of the pool, which goes back to it when the copies are over · then: called on the host
        afterwards.
        """
        ends = [self._copies.copy(source, target) for source, target in pairs]
        self._under_way.append((ends, spent, then))
        return ends

    def settle(self, leave: int = 0) -> None:
        """Finish the copies that are over, and wait for the oldest until at most ``leave`` are in flight."""
        while self._under_way and (len(self._under_way) > leave or all(end.reached for end in self._under_way[0][0])):
            ends, spent, then = self._under_way.popleft()
            for end in ends:
                end.wait_on_host()
            self._pool.release(spent)
            then()

    def drop(self) -> None:
        """After a failure: wait for all copies and discard them.

        Their buffers do not go back to the pool, nor is ``then`` called.
        """
        for ends, _, _ in self._under_way:
            for end in ends:
                end.wait_on_host()
        self._under_way.clear()
