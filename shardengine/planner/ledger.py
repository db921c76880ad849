"""What is alive when: every storage of tensors, from its making to its end, counted from outside of whoever makes it.

Owns: the events and what follows from them. Must not know: engines, what a storage is for (it is told).

A dispatch mode sees each tensor that an operation returns; the end of its storage is a weak reference's. A storage that
is resized (units whose weights are let go of) counts with its new size, and one of the meta device not at all. What an
operation needs inside of itself is not seen: on a GPU workspaces of libraries, on a CPU copies that a kernel makes.
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
class Moment:
    """After an event. phase: what went on · alive: bytes by kind · unit: in which part of the model, "" for none."""

    phase: str
    alive: Mapping[str, int]
    unit: str = ""

    @property
    def bytes(self) -> int:
        """All of them."""
        return sum(self.alive.values())


@dataclass
class _Storage:
    """size: its bytes · bytes: those of its allocation."""

    number: int
    ends: weakref.ref[torch.UntypedStorage]
    size: int
    bytes: int


Seen = Callable[[Any, Sequence[Any], Mapping[str, Any], Sequence[Tensor], Any], None]
"""Hears of an operation what it was given, by place and by name, the tensors in that, and what it returned."""


class Mode(TorchDispatchMode):
    """A dispatch mode that torch calls as it is."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: what torch wraps around every operation costs more than what is done here."""
        return False


class Watch(Mode):
    """Inside, ``seen`` hear of each operation, which is carried out as ever."""

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
class Ledger:
    """Counts, inside. phase, unit: what goes on, and where · grain: bytes of which an allocation is a whole number, as
    an allocator rounds (512: CUDA's)."""

    grain: int = 1
    phase: str = ""
    unit: str = ""
    _events: list[tuple[str, str, int, int]] = field(default_factory=list)
    _alive: dict[int, _Storage] = field(default_factory=dict)
    _kinds: dict[int, str] = field(default_factory=dict)
    _made: int = 0
    _inside: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> Any:
        """Count."""
        self._inside.enter_context(self.counting())
        self._inside.enter_context(Watch(self.saw))
        return self

    def __exit__(self, *error: Any) -> None:
        """Count no longer."""
        self._inside.close()

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Inside, what ``saw`` is told counts, and storages that are resized; after it, what is alive is not heard of
        any more. For a mode that tells it, in the place of a mode of its own."""
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
        """As ``Seen``."""
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
        """What is made or ends from now on does so in ``phase``, in ``unit``."""
        self.phase, self.unit = phase, unit

    def name(self, tensor: Tensor, kind: str) -> Tensor:
        """Say what the storage of ``tensor`` is for, now or ever since; ``tensor``."""
        if _has_bytes(tensor):
            self._kinds[self._see(tensor.untyped_storage())] = kind
        return tensor

    def kind_of(self, tensor: Tensor) -> str:
        """What it was said to be for; "": nothing was said."""
        storage = tensor.untyped_storage()
        known = self._alive.get(storage._cdata)
        return self._kinds.get(known.number, "") if known is not None and known.ends() is storage else ""

    def _see(self, storage: torch.UntypedStorage) -> int:
        """The number of a storage, which is new, or has another size than before, or is known."""
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

    def moments(self, of: Callable[[str], bool], otherwise: Mapping[str, str]) -> tuple[list[Moment], Moment]:
        """Of each stretch of one phase and unit the moment at which most is alive, in order; and the last moment. What
        counts are the kinds for which ``of`` holds. otherwise: the phase in which a storage was made → the kind of what
        nobody has named."""
        found: list[Moment] = []
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
                found.append(Moment(phase, {}, unit))
            if total > most:
                most = total
                found[-1] = Moment(phase, dict(alive), unit)
        return found, Moment(place[0], dict(alive))


def tensors_in(value: Any) -> list[Tensor]:
    """Those in what an operation is given, or returns."""
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


def highest(moments: Sequence[Moment], phases: Sequence[str]) -> Moment:
    """Of ``phases`` the moment at which most is alive; a moment without bytes where nothing happened in them."""
    return max((each for each in moments if each.phase in phases), key=lambda each: each.bytes, default=Moment("", {}))
