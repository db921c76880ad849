"""The storage of one bucket's shard: flat tensors of one length, by name, in one tier.

Owns: the memory of sharded weights, master weights and optimizer state. Must not know: buckets, the meaning of the
tensors, when they are needed.

A store is used in two ways. A step or a gather checks it out: ``prefetch`` ahead of time, then ``check_out``, and
``check_in`` at the end. All other users (checkpoints, a new layout, user code) come between two steps and call
``tensors``. A copy that reads or writes the tensors may still be in flight at ``check_in`` (``after``). The next call
that returns the tensors waits for that copy, except for a reader who waits by itself (``to_copy``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from shardengine.offload.platform import HOST, NOW, Done, Platform

Forms = Mapping[str, tuple[int, torch.dtype]]
"""Name → (elements, dtype) of tensors that are added to a store together."""


class ShardStore(ABC):
    """Named flat tensors that are kept in a tier.

    device: the device they are on while checked out, which computes on them · tier: its name; "device" is the model's
    device.
    """

    in_file = False
    """Whether the tensors are read and written as a whole, so that a check-out returns a copy."""
    pending = NOW
    """The end of the copy that the last ``check_in`` passed as ``after``."""

    def __init__(self, device: torch.device, tier: str = "device") -> None:
        self.device = device
        self.tier = tier
        self.away = tier != "device"
        """Whether the tensors are offloaded: kept in another tier than the device."""
        self.length = 0
        self.sizes: dict[str, int] = {}
        """Bytes of each tensor."""

    @abstractmethod
    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """Add copies of ``tensors``: flat, of one length, under new names."""

    def adopt(self, tensors: Mapping[str, Tensor]) -> None:
        """Add ``tensors`` as ``add`` does; nobody else has them, so their memory may become the store's."""
        self.add(tensors)

    @abstractmethod
    def add_zeros(self, forms: Forms) -> None:
        """Add zeros under new names."""

    @abstractmethod
    def tensors(self, *, writable: bool = False) -> dict[str, Tensor]:
        """Return all tensors, between two steps. writable: writes to them are kept; otherwise they may be lost."""

    @abstractmethod
    def prefetch(self) -> None:
        """Begin to bring the tensors to ``device``, if there is room, because they will be checked out soon. A hint."""

    @abstractmethod
    def check_out(self, *, blank: bool = False, to_copy: bool = False) -> dict[str, Tensor]:
        """Return the tensors, to be read and written until ``check_in``. A second call returns them again.

        blank: their contents may be undefined, since all of it will be written · to_copy: only copies that start after
        ``pending`` will read and write them.
        """

    @abstractmethod
    def check_in(self, *, changed: bool = True, after: Done = NOW) -> None:
        """Keep the tensors that were checked out.

        changed: they were written to · after: the end of a copy that uses them.
        """

    @contextmanager
    def checkout(self) -> Iterator[dict[str, Tensor]]:
        """Check the tensors out to be written to. If the block raises, they stay checked out until ``abandon``."""
        yield self.check_out()
        self.check_in()

    @abstractmethod
    def abandon(self) -> None:
        """Void a check-out that was interrupted: the store keeps its earlier contents, if they are still there.

        Does nothing if it is not checked out. A store in memory keeps the writes.
        """

    @abstractmethod
    def offload(self, *, pinned: bool) -> None:
        """Move the tensors from the device's memory to the host's, until ``reload``.

        They may not be checked out meanwhile. Does nothing in another tier.
        """

    @abstractmethod
    def reload(self) -> None:
        """Move the tensors back to the device."""

    @property
    def tier_now(self) -> str:
        """``tier``, or the place that ``offload`` has moved the tensors to."""
        return self.tier

    @abstractmethod
    def replace_unreadable(self) -> bool:
        """Replace contents that cannot be read by zeros, before all of it is written.

        Returns whether that was necessary.
        """

    @abstractmethod
    def drop(self) -> None:
        """Free the memory. The store keeps nothing any more."""

    def _count(self, tensors: Mapping[str, Tensor]) -> None:
        self.length = next(iter(tensors.values())).numel() if tensors else self.length
        self.sizes |= {name: tensor.nbytes for name, tensor in tensors.items()}


class MemoryStore(ShardStore):
    """Tensors in the memory of the device or, in the tier "cpu", of the host, which also computes on them.

    pinned: page-locked, so that the device copies them fast.
    """

    def __init__(self, platform: Platform, tier: str = "device", *, pinned: bool = False) -> None:
        super().__init__(platform.device if tier == "device" else HOST, tier)
        self._platform = platform
        self._pinned = pinned
        self._offloaded = False
        self._tensors: dict[str, Tensor] = {}

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """See ``ShardStore``."""
        for name, tensor in tensors.items():
            self._tensors[name] = self._new(tensor.numel(), tensor.dtype).copy_(tensor)
        self._count(tensors)

    def adopt(self, tensors: Mapping[str, Tensor]) -> None:
        """See ``ShardStore``."""
        if self.away:
            self.add(tensors)
            return
        self._tensors |= tensors
        self._count(tensors)

    def add_zeros(self, forms: Forms) -> None:
        """See ``ShardStore``."""
        zeros = {name: self._new(length, dtype).zero_() for name, (length, dtype) in forms.items()}
        self._tensors |= zeros
        self._count(zeros)

    def _new(self, length: int, dtype: torch.dtype) -> Tensor:
        if self.away:
            return self._platform.host_empty(length, dtype, pinned=self._pinned)
        return torch.empty(length, dtype=dtype, device=self.device)

    def tensors(self, *, writable: bool = False) -> dict[str, Tensor]:
        """See ``ShardStore``."""
        self.pending.wait_on_host()
        return self._tensors

    def prefetch(self) -> None:
        """See ``ShardStore``: the tensors are in place."""

    def check_out(self, *, blank: bool = False, to_copy: bool = False) -> dict[str, Tensor]:
        """See ``ShardStore``."""
        if not to_copy and self.pending is not NOW:
            self.pending.wait_on_host()
        return self._tensors

    def check_in(self, *, changed: bool = True, after: Done = NOW) -> None:
        """See ``ShardStore``: the tensors are in place."""
        self.pending = after

    def abandon(self) -> None:
        """See ``ShardStore``."""

    def offload(self, *, pinned: bool) -> None:
        """See ``ShardStore``."""
        if not (self.away or self._offloaded):
            self._tensors = {
                name: host_copy(tensor, self._platform, pinned=pinned) for name, tensor in self._tensors.items()
            }
            self._offloaded = True

    def reload(self) -> None:
        """See ``ShardStore``."""
        if self._offloaded:
            self._tensors = {name: tensor.to(self.device, copy=True) for name, tensor in self._tensors.items()}
            self._offloaded = False

    @property
    def tier_now(self) -> str:
        """See ``ShardStore``."""
        return HOST.type if self._offloaded else self.tier

    def replace_unreadable(self) -> bool:
        """See ``ShardStore``."""
        return False

    def drop(self) -> None:
        """See ``ShardStore``."""
        self.pending.wait_on_host()
        self._tensors = {}
        self.sizes = {}


def host_copy(flat: Tensor, platform: Platform, *, pinned: bool) -> Tensor:
    """Return a copy, in host memory, of a flat tensor of the device. pinned: page-locked, to be copied back fast."""
    return platform.host_empty(flat.numel(), flat.dtype, pinned=pinned).copy_(flat)
