"""Where one bucket's shard of something is kept: flat tensors of one length, by name, in one tier.

Owns: the memory of sharded weights, master weights and optimizer state. Must not know: buckets, what the tensors mean,
when they are needed.

A store is used in two ways. A step, and a gather, check it out: ``prefetch`` ahead of time, then ``check_out``, and
``check_in`` at the end. Everything else (checkpoints, a new layout, the user) comes between two steps and asks for its
``tensors``. A copy that reads or writes what was checked out may still be under way when it is checked in (``after``):
whoever is given the tensors next waits for it, but for a reader who says that it waits by itself.
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

    device: where they are when they are checked out, and are computed on · tier: its name, "device" being with the
    model.
    """

    in_file = False
    """Whether they are read and written as a whole, so that what is checked out is a copy."""
    pending = NOW
    """The end of the copy with which they were checked in last."""

    def __init__(self, device: torch.device, tier: str = "device") -> None:
        self.device = device
        self.tier = tier
        self.away = tier != "device"
        """Whether they are kept in another tier than the device."""
        self.length = 0
        self.sizes: dict[str, int] = {}
        """Bytes of each tensor."""

    @abstractmethod
    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """Keep copies of ``tensors``, too: flat, of one length, new names."""

    def adopt(self, tensors: Mapping[str, Tensor]) -> None:
        """As ``add``, of tensors that nobody else has: their memory may become the store's."""
        self.add(tensors)

    @abstractmethod
    def add_zeros(self, forms: Forms) -> None:
        """Keep zeros, too: new names."""

    @abstractmethod
    def tensors(self, *, writable: bool = False) -> dict[str, Tensor]:
        """What is kept, between two steps. writable: what is written to them is kept; otherwise it may be lost."""

    @abstractmethod
    def prefetch(self) -> None:
        """They will be checked out soon: begin to bring them where they are computed on, if there is room. A hint."""

    @abstractmethod
    def check_out(self, *, blank: bool = False, to_copy: bool = False) -> dict[str, Tensor]:
        """The tensors, to be read and written until ``check_in``. blank: what is in them may be void, all of it will be
        written · to_copy: they will be read and written by copies behind ``pending``, and by nobody else. What is
        checked out already is given again."""

    @abstractmethod
    def check_in(self, *, changed: bool = True, after: Done = NOW) -> None:
        """What was checked out is kept. changed: it was written to · after: the end of a copy that reads or writes
        it."""

    @contextmanager
    def checkout(self) -> Iterator[dict[str, Tensor]]:
        """The tensors inside, to be written to. What raises inside leaves them checked out, until ``abandon``."""
        yield self.check_out()
        self.check_in()

    @abstractmethod
    def abandon(self) -> None:
        """Whoever has checked it out was interrupted: those tensors are void, and what is kept is as it was, if that is
        there.

        Nothing happens where it is not checked out. In memory what was written stays.
        """

    @abstractmethod
    def offload(self, *, pinned: bool) -> None:
        """Move from the device's memory to the host's until ``reload``; meanwhile nothing may be checked out. Nothing
        happens in another tier."""

    @abstractmethod
    def reload(self) -> None:
        """Back to the device."""

    @property
    def tier_now(self) -> str:
        """``tier``, or where ``offload`` has moved it."""
        return self.tier

    @abstractmethod
    def replace_unreadable(self) -> bool:
        """Before all of it is written: have zeros where what is kept cannot be read. Whether there are any."""

    @abstractmethod
    def drop(self) -> None:
        """Let go of the memory: nothing is kept any more."""

    def _count(self, tensors: Mapping[str, Tensor]) -> None:
        self.length = next(iter(tensors.values())).numel() if tensors else self.length
        self.sizes |= {name: tensor.nbytes for name, tensor in tensors.items()}


class MemoryStore(ShardStore):
    """In the memory of the device or, in the tier "cpu", of the host, and computed on there. pinned: page-locked, so
    that the device copies it fast."""

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
        """It is there."""

    def check_out(self, *, blank: bool = False, to_copy: bool = False) -> dict[str, Tensor]:
        """See ``ShardStore``."""
        if not to_copy and self.pending is not NOW:
            self.pending.wait_on_host()
        return self._tensors

    def check_in(self, *, changed: bool = True, after: Done = NOW) -> None:
        """See ``ShardStore``. The tensors are there."""
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
    """A copy of a flat tensor of the device in host memory. pinned: page-locked, to be copied back fast."""
    return platform.host_empty(flat.numel(), flat.dtype, pinned=pinned).copy_(flat)
