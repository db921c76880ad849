"""What travels of one reduce-scatter: the slices themselves, or messages that a coding makes of them.

Must not know: which ranks take part, when it is sent, what coding that is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from shardengine.comm.wire import Group, Wire
from shardengine.offload import BufferPool


class Coding(Protocol):
    """Makes messages of gradients or weights, see ``ddp.comm_hooks``."""

    def bytes_of(self, elements: int) -> int:
        """Bytes of the message for a slice of ``elements``."""

    def encode(self, full: Tensor, receivers: int, out: Tensor) -> None:
        """``full`` (flat) as equal messages (uint8) for ``receivers``, one after the other, into ``out``."""

    def decode(self, message: Tensor, out: Tensor) -> None:
        """The slice that a message holds, into ``out`` (fp32)."""


class Messages(Coding, Protocol):
    """Those of one reduction."""

    @property
    def again(self) -> Coding:
        """For sums of what they have said."""


class Slices:
    """Of ``full`` (flat), one for each of ``ranks``. direct: each rank's come, to be added here; otherwise the backend
    adds them · coding: what travels instead; then they come as fp32 · into: memory as long as ``full``, which may take
    what comes as it is, if each rank's does."""

    def __init__(
        self,
        pool: BufferPool,
        full: Tensor,
        ranks: int,
        coding: Coding | None,
        *,
        direct: bool,
        into: Tensor | None = None,
    ) -> None:
        self._pool, self._full, self._ranks, self._coding, self._direct = pool, full, ranks, coding, direct
        self._taken: list[Tensor] = []
        length = full.numel() // ranks
        if coding is None:
            self._sent = full
            taken = into if direct else None
            self._received = self._take(full.numel() if direct else length, full.dtype) if taken is None else taken
        else:
            size = ranks * coding.bytes_of(length)
            self._sent, self._received = self._take(size, torch.uint8), self._take(size, torch.uint8)

    def _take(self, length: int, dtype: torch.dtype) -> Tensor:
        self._taken.append(self._pool.take(length, dtype))
        return self._taken[-1]

    @property
    def bytes_sent(self) -> int:
        """By each rank."""
        return self._sent.nbytes * (self._ranks - 1) // self._ranks

    def begin(self, wire: Wire, group: Group) -> dist.Work:
        """Send them, as ``full`` is now."""
        if self._coding is not None:
            self._coding.encode(self._full, self._ranks, self._sent)
        if self._direct or self._coding is not None:
            return wire.all_to_all(self._received, self._sent, group)
        return wire.reduce_scatter(self._received, self._full, group)

    def terms(self) -> Sequence[Tensor]:
        """What has come: to be added up, in rank order. Lent until ``give``."""
        if self._coding is None:
            return self._received.chunk(self._ranks) if self._direct else [self._received]
        terms = self._take(self._full.numel(), torch.float32).chunk(self._ranks)
        for message, term in zip(self._received.chunk(self._ranks), terms, strict=True):
            self._coding.decode(message, term)
        return terms

    def give(self) -> None:
        """The memory, but that of ``full``, goes back."""
        for buffer in self._taken:
            self._pool.give(buffer)
