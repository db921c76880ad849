"""What rests of one bucket, in one tier: flat tensors of one length, by name.

Owns: the memory of master weights and optimizer state. Must not know: buckets, what the tensors mean, when they are
needed.

A shelf is used in two ways. Whoever steps it says ``fetch`` ahead of time, ``take``, and ``put`` when it has written;
everything else (checkpoints, a new layout, the user) comes between two steps: ``look`` is to read what rests, ``edit``
to write to it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from shardengine.offload.copy_stream import is_apart

HOST = torch.device("cpu")
Forms = Mapping[str, tuple[int, torch.dtype]]
"""Name → (elements, dtype) of tensors that are added to a shelf together."""


class Shelf(ABC):
    """Named flat tensors that rest in a tier.

    device: where they are when they are taken, and are computed on · place: where they rest, "device" being with the
    weights.
    """

    def __init__(self, device: torch.device, place: str = "device") -> None:
        self.device = device
        self.place = place
        self.length = 0
        self.sizes: dict[str, int] = {}
        """Bytes of each tensor."""

    @property
    def away(self) -> bool:
        """Whether they rest elsewhere than the weights."""
        return self.place != "device"

    @abstractmethod
    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """Let copies of ``tensors`` rest here, too: flat, of one length, new names."""

    @abstractmethod
    def add_zeros(self, names: Sequence[str], length: int) -> None:
        """Let fp32 zeros rest here, too."""

    @abstractmethod
    def look(self) -> dict[str, Tensor]:
        """What rests, to be read by anything but a step. What is written to it may be lost."""

    @abstractmethod
    def edit(self) -> dict[str, Tensor]:
        """As ``look``, to be written to: what is in it is what rests."""

    @abstractmethod
    def fetch(self) -> None:
        """They will be taken soon: begin to bring them where they are computed on, if there is room. A hint."""

    @abstractmethod
    def take(self) -> dict[str, Tensor]:
        """The tensors, to be read and written until ``put``."""

    @abstractmethod
    def put(self) -> None:
        """What was taken has been written: it goes back to rest."""

    @abstractmethod
    def leave(self) -> None:
        """What was taken has only been read."""

    @abstractmethod
    def abandon(self) -> None:
        """Whoever has taken it was interrupted: what was taken is void, and what rests is as it was, if that is there.

        Nothing happens where it is not taken. In memory what was written to it stays.
        """

    @abstractmethod
    def overwrite(self) -> dict[str, Tensor]:
        """As ``take``, but what is in the tensors is void: all of it will be written."""

    @abstractmethod
    def park(self, *, pinned: bool) -> None:
        """Leave the device's memory until ``unpark``; nothing may be taken meanwhile. Elsewhere: nothing happens."""

    @abstractmethod
    def unpark(self) -> None:
        """Back to where it rests."""

    @property
    def rests_in(self) -> str:
        """``place``, or where it is parked."""
        return self.place

    @abstractmethod
    def replace_unreadable(self) -> bool:
        """Before all of it is written: have zeros where what rests cannot be read. Whether there are any."""

    @abstractmethod
    def drop(self) -> None:
        """Let go of the memory: nothing rests here any more."""

    def _count(self, tensors: Mapping[str, Tensor]) -> None:
        self.length = next(iter(tensors.values())).numel() if tensors else self.length
        self.sizes |= {name: tensor.nbytes for name, tensor in tensors.items()}


class MemoryShelf(Shelf):
    """Rests in the memory of ``device``, where it is computed on. pinned: page-locked, so that a GPU copies it fast."""

    def __init__(self, device: torch.device, place: str = "device", *, pinned: bool = False) -> None:
        super().__init__(device, place)
        self._pinned = pinned
        self._parked = False
        self._tensors: dict[str, Tensor] = {}

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """See ``Shelf``."""
        for name, tensor in tensors.items():
            own = torch.empty_like(tensor, device=self.device, pin_memory=self._pinned)
            self._tensors[name] = own.copy_(tensor)
        self._count(tensors)

    def add_zeros(self, names: Sequence[str], length: int) -> None:
        """See ``Shelf``."""
        zeros = {name: torch.zeros(length, device=self.device, pin_memory=self._pinned) for name in names}
        self._tensors |= zeros
        self._count(zeros)

    def look(self) -> dict[str, Tensor]:
        """See ``Shelf``."""
        return self._tensors

    def edit(self) -> dict[str, Tensor]:
        """See ``Shelf``."""
        return self._tensors

    def fetch(self) -> None:
        """It is there."""

    def take(self) -> dict[str, Tensor]:
        """See ``Shelf``."""
        return self._tensors

    def put(self) -> None:
        """It is there."""

    def leave(self) -> None:
        """It is there."""

    def abandon(self) -> None:
        """See ``Shelf``."""

    def overwrite(self) -> dict[str, Tensor]:
        """See ``Shelf``."""
        return self._tensors

    def park(self, *, pinned: bool) -> None:
        """See ``Shelf``."""
        if not (self.away or self._parked):
            self._tensors = {name: host_copy(tensor, pinned=pinned) for name, tensor in self._tensors.items()}
            self._parked = True

    def unpark(self) -> None:
        """See ``Shelf``."""
        if self._parked:
            self._tensors = {name: tensor.to(self.device, copy=True) for name, tensor in self._tensors.items()}
            self._parked = False

    @property
    def rests_in(self) -> str:
        """See ``Shelf``."""
        return HOST.type if self._parked else self.place

    def replace_unreadable(self) -> bool:
        """See ``Shelf``."""
        return False

    def drop(self) -> None:
        """See ``Shelf``."""
        self._tensors = {}
        self.sizes = {}


def host_copy(tensor: Tensor, *, pinned: bool) -> Tensor:
    """A copy in host memory; ``pinned``: page-locked, if it has to be copied back to another one."""
    copy = torch.empty_like(tensor, device=HOST, pin_memory=pinned and is_apart(tensor.device))
    return copy.copy_(tensor)
