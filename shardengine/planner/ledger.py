"""Records every storage of tensors, from its creation to its end, from outside of the code that creates it.

Owns: the events, and the moments that follow from them. Must not know: engines, the purpose of a storage (callers name
it).

A dispatch mode sees each tensor that an operation returns; a weak reference reports the end of its storage. A resized
storage (of units that release their weights) counts with its new size. Storages of the meta device do not count. Memory
inside an operation is not seen: workspaces of libraries on a GPU, copies that a kernel makes on a CPU.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass(frozen=True)
class MemoryMoment:
    """The storages that are alive after an event. alive: bytes by kind · unit: the part of the model; "" for none."""

    phase: str
    alive: Mapping[str, int]
    unit: str = ""

    @property
    def bytes(self) -> int:
        """The sum over all kinds."""
        return sum(self.alive.values())


@dataclass
class _Storage:
    """size: its bytes · bytes: those of its allocation."""

    number: int
    ends: weakref.ref[torch.UntypedStorage]
    size: int
    bytes: int


Seen = Callable[[Any, Sequence[Any], Mapping[str, Any], Sequence[Tensor], Any], None]
"""Called with an operation: the function, its positional and keyword arguments, the tensors in these, and its
result."""


class LedgerMode(TorchDispatchMode):
    """A dispatch mode that torch calls as it is."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: the wrapper that torch would put around every operation costs more than this mode."""
        return False


class Watch(LedgerMode):
    """Inside, ``seen`` are called for each operation, which runs as usual."""

    def __init__(self, *seen: Seen) -> None:
        super().__init__()
        self._seen = seen

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """One operation."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        tensors = [*tensors_in(args), *tensors_in(tuple(kwargs.values()))]
        for seen in self._seen:
            seen(func, args, kwargs, tensors, result)
        return result


@dataclass(eq=False)
class MemoryLedger:
    """Counts storages inside of a ``with`` block.

    phase, unit: the present ones · grain: allocations are rounded up to a multiple of so many bytes (512: CUDA's
    allocator).
    """

    grain: int = 1
    phase: str = ""
    unit: str = ""
    _events: list[tuple[str, str, int, int]] = field(default_factory=list)
    _alive: dict[int, _Storage] = field(default_factory=dict)
    _kinds: dict[int, str] = field(default_factory=dict)
    _made: int = 0
    _inside: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> Any:
        """Begin to count."""
        self._inside.enter_context(self.counting())
        self._inside.enter_context(Watch(self.saw))
        return self

    def __exit__(self, *error: Any) -> None:
        """Stop counting."""
        self._inside.close()

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Inside, calls of ``saw`` and resized storages count. For a dispatch mode that calls ``saw`` itself.

        Storages that are alive at the end are not followed any more.
        """
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            self._see(storage)
            return result

        with patch.object(torch.UntypedStorage, "resize_", resized):
            yield
        self._alive.clear()

    def saw(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], tensors: Sequence[Tensor], result: Any
    ) -> None:
        """Count the storages of ``result``; see ``Seen``."""
        for each in (result,) if isinstance(result, Tensor) else tensors_in(result):
            if each.layout is torch.strided:
                storage = each.untyped_storage()
                known = self._alive.get(storage._cdata)
                if known is None or known.ends() is not storage:
                    if _has_bytes(each):
                        self._see(storage)
                elif known.size != storage.nbytes():
                    self._see(storage)

    def begin(self, phase: str, unit: str = "") -> None:
        """Assign later events to ``phase`` and ``unit``."""
        self.phase, self.unit = phase, unit

    def name(self, tensor: Tensor, kind: str) -> Tensor:
        """Set the kind of the storage of ``tensor``, which also holds for earlier moments; return ``tensor``."""
        if _has_bytes(tensor):
            self._kinds[self._see(tensor.untyped_storage())] = kind
        return tensor

    def kind_of(self, tensor: Tensor) -> str:
        """Return the kind of the tensor's storage; "" if it has no name."""
        storage = tensor.untyped_storage()
        known = self._alive.get(storage._cdata)
        return self._kinds.get(known.number, "") if known is not None and known.ends() is storage else ""

    def _see(self, storage: torch.UntypedStorage) -> int:
        """Return the number of a storage, and record its size if the storage is new or was resized."""
        key, whole = storage._cdata, storage.nbytes()
        known = self._alive.get(key)
        if known is None or known.ends() is not storage:
            if known is not None:
                self._end(key, known)
            self._made += 1
            known = self._alive[key] = _Storage(self._made, weakref.ref(storage, self._ending(key)), 0, 0)
        known.size = whole
        if (size := -(-whole // self.grain) * self.grain) != known.bytes:
            self._events.append((self.phase, self.unit, known.number, size - known.bytes))
            known.bytes = size
        return known.number

    def _ending(self, key: int) -> Callable[[Any], None]:
        ledger = weakref.ref(self)

        def ended(which: Any) -> None:
            me = ledger()
            if me is not None and (known := me._alive.get(key)) is not None and known.ends is which:
                me._end(key, known)

        return ended

    def _end(self, key: int, known: _Storage) -> None:
        del self._alive[key]
        if known.bytes:
            self._events.append((self.phase, self.unit, known.number, -known.bytes))

    def moments(
        self, of: Callable[[str], bool], otherwise: Mapping[str, str]
    ) -> tuple[list[MemoryMoment], MemoryMoment]:
        """Return the moment with the most bytes of each stretch of one phase and unit, in order; and the last moment.

        of: whether a kind counts · otherwise: phase → kind of the storages that were made in it without a name.
        """
        found: list[MemoryMoment] = []
        alive: Counter[str] = Counter()
        kinds = dict(self._kinds)
        place, total, most = ("", ""), 0, -1
        for phase, unit, number, size in self._events:
            kind = kinds.setdefault(number, otherwise.get(phase, phase))
            if not of(kind):
                continue
            alive[kind] += size
            total += size
            if (phase, unit) != place:
                place, most = (phase, unit), -1
                found.append(MemoryMoment(phase, {}, unit))
            if total > most:
                most = total
                found[-1] = MemoryMoment(phase, dict(alive), unit)
        return found, MemoryMoment(place[0], dict(alive))


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in the arguments or the result of an operation."""
    if isinstance(value, Tensor):
        return [value]
    found: list[Tensor] = []
    if isinstance(value, (list, tuple)):
        for each in value:
            if isinstance(each, Tensor):
                found.append(each)
            elif isinstance(each, (list, tuple)):
                found += tensors_in(each)
    return found


def _has_bytes(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.device.type != "meta"


def highest(moments: Sequence[MemoryMoment], phases: Sequence[str]) -> MemoryMoment:
    """Return the moment of ``phases`` with the most bytes; a moment without bytes if there is none."""
    return max(
        (each for each in moments if each.phase in phases), key=lambda each: each.bytes, default=MemoryMoment("", {})
    )
