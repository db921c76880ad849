"""Tensors on their way between the device and host memory, oldest first.

Owns: the order of copies, what is done on the host when one has arrived, when a buffer may be used again.
Must not know: what is copied, and why.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shardengine.offload.platform import Done, Platform
from shardengine.offload.pool import BufferPool


class CopyQueue:
    """Copies between a device and the host, in one direction, beside what the device computes."""

    def __init__(self, platform: Platform, pool: BufferPool) -> None:
        self._copies = platform.copy_stream()
        self._pool = pool
        self._under_way: deque[tuple[list[Done], Tensor, Callable[[], None]]] = deque()

    def buffer(self, length: int, dtype: torch.dtype, *, on_host: bool) -> Tensor:
        """Memory of the pool for what will be sent, or for what is given back (``give``)."""
        self.settle(len(self._under_way))
        return self._pool.acquire(length, dtype, on_host=on_host)

    def bring(self, source: Tensor) -> tuple[Tensor, Done]:
        """Begin to copy ``source`` to a buffer in host memory, which is the caller's until ``give``; its end."""
        buffer = self.buffer(source.numel(), source.dtype, on_host=True)
        return buffer, self._copies.copy(source, buffer)

    def give(self, buffer: Tensor) -> None:
        """Back to the pool."""
        self._pool.release(buffer)

    def send(
        self, pairs: Sequence[tuple[Tensor, Tensor]], spent: Tensor, then: Callable[[], None] = lambda: None
    ) -> list[Done]:
        """Begin to copy the first of each pair to the second. Returns the ends of the copies.

        spent: the pool's, goes back to it when they have arrived · then: on the host, afterwards.
        """
        ends = [self._copies.copy(source, target) for source, target in pairs]
        self._under_way.append((ends, spent, then))
        return ends

    def settle(self, leave: int = 0) -> None:
        """Finish what has arrived, and wait for the oldest until ``leave`` are under way."""
        while self._under_way and (len(self._under_way) > leave or all(end.reached for end in self._under_way[0][0])):
            ends, spent, then = self._under_way.popleft()
            for end in ends:
                end.wait_on_host()
            self._pool.release(spent)
            then()

    def drop(self) -> None:
        """After a failure: wait, and do nothing more. The pool forgets its buffers."""
        for ends, _, _ in self._under_way:
            for end in ends:
                end.wait_on_host()
        self._under_way.clear()
