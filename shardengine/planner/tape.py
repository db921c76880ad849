"""All of a step that takes time, in the order of the program: the tape of a dry run.

Owns: the events, and who writes them down. Must not know: how fast anything is (rates), when it happens (replay).

The engine that runs dry issues, marks and waits as it does in training, so the tape has its schedule and no second one.
Operations are counted where torch dispatches them, kernels of the engine, which dispatch nothing on tensors without
values, report themselves (``kernels.without_values``), collectives are the wire's, copies and marks the platform's,
transfers the file's. What is over is found out by waiting alone, never by asking: the latest that a run may be.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shardengine.planner import costs
from shardengine.planner.ledger import tensors_in

_READ = torch.ops.aten._local_scalar_dense.default


@dataclass(frozen=True)
class Call:
    """An operation with shapes. form: what tells it from others of its name · dtype: of its first floating-point
    tensor, "" for none · bytes: read and written · kernel: the engine's own · example: how to call it: the operation
    and its arguments, with a ``Shape`` in the place of each tensor."""

    name: str
    form: tuple[Any, ...]
    dtype: str
    flops: int
    bytes: int
    kernel: bool = False
    example: Any = field(default=None, compare=False, repr=False)


class Shape(NamedTuple):
    """Of a tensor."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class Compute(NamedTuple):
    """An operation: its number among ``Tape.calls``. on_host: the host computes, where the device is apart · before:
    dispatched since the last one, but no work: views and the like, which cost the host something."""

    call: int
    on_host: bool
    before: int = 0


class Begin(NamedTuple):
    """A collective is issued. number: to wait for it · bytes: as ``Issued``'s."""

    number: int
    operation: str
    group: str
    bytes: int


class Copy(NamedTuple):
    """A copy between device and host is issued. stream: its number, None: the one that is current · after: behind these
    instead of what the current stream was given."""

    number: int
    stream: int | None
    to_host: bool
    bytes: int
    after: tuple[int, ...] | None


class Transfer(NamedTuple):
    """Of a disk."""

    number: int
    bytes: int
    write: bool


class Mark(NamedTuple):
    """The end of what the current stream was given so far."""

    number: int


class Wait(NamedTuple):
    """For a collective, copy, transfer or mark. on_host: the host stands still; else the current stream does later."""

    number: int
    on_host: bool


class Current(NamedTuple):
    """Another stream is the current one from now on; None: that of the computation."""

    stream: int | None


class Phase(NamedTuple):
    """What goes on from now on."""

    name: str


Event = Compute | Begin | Copy | Transfer | Mark | Wait | Current | Phase


@dataclass
class Tape:
    """Of one step. apart: the device is a GPU, and the host does something else beside it · unknown: operations whose
    FLOPs nobody knows, by name, and how many · members: group → the ranks in it."""

    apart: bool
    events: list[Event] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    unknown: Counter[str] = field(default_factory=Counter)
    members: Mapping[str, Sequence[int]] = field(default_factory=dict)

    def computed(self, *, on_host: bool | None = None) -> Iterator[Call]:
        """The call of each operation, in order; on_host: of those of one side."""
        for event in self.events:
            if isinstance(event, Compute) and on_host in (None, event.on_host):
                yield self.calls[event.call]

    def flops(self) -> Counter[str]:
        """By dtype."""
        found: Counter[str] = Counter()
        for call in self.computed():
            if call.flops:
                found[call.dtype] += call.flops
        return found

    def first_micro_batch(self) -> Tape:
        """What comes before a phase begins again that was the first."""
        phases = [(place, event.name) for place, event in enumerate(self.events) if isinstance(event, Phase)]
        again = next((place for place, name in phases[1:] if name == phases[0][1]), len(self.events))
        found = replace(self, events=self.events[:again], unknown=Counter())
        found.unknown.update(call.name for call in found.computed() if call.name in self.unknown)
        return found

    def begun(self) -> Iterator[Begin]:
        """The collectives, in order."""
        return (event for event in self.events if isinstance(event, Begin))


class Recorder:
    """Writes a tape between ``start`` and ``stop``.

    is_host: whether the memory of a tensor is the host's, where the device is apart · phase: what goes on.
    """

    def __init__(self, apart: bool, is_host: Callable[[Tensor], bool], phase: Callable[[], str]) -> None:
        from torch._subclasses.fake_tensor import FakeTensor

        self._fake = FakeTensor
        self._apart, self._is_host, self._phase = apart, is_host, phase
        self._made = 0
        self._idle_of: dict[int, int] = {}
        """Of operations that are no work, what they add to ``Compute.before``; -1: it is work."""
        self.start()
        self._on = False

    def start(self) -> None:
        """An empty tape."""
        self.tape = Tape(self._apart)
        self._idle = 0
        self._known: dict[Any, int] = {}
        self._of_phase = ""
        self._on = True

    def stop(self, members: Callable[[str], Sequence[int]]) -> Tape:
        """The tape is whole. members: of a group."""
        self._on = False
        self.tape.members = {each.group: members(each.group) for each in self.tape.begun()}
        return self.tape

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """What is dispatched inside is written down otherwise."""
        before, self._on = self._on, False
        try:
            yield
        finally:
            self._on = before

    def number(self) -> int:
        """A new one, for something to wait for."""
        self._made += 1
        return self._made

    def note(self, event: Event) -> None:
        """It happens now."""
        if not self._on:
            return
        if (phase := self._phase()) != self._of_phase:
            self._of_phase = phase
            self.tape.events.append(Phase(phase))
        self.tape.events.append(event)

    def saw(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], tensors: Sequence[Tensor], result: Any
    ) -> None:
        """As ``Seen``."""
        if not self._on:
            return
        if (idle := self._idle_of.get(id(func))) is None:  # torch's own hash of an operation is a call
            idle = self._idle_of[id(func)] = -1 if costs.is_work(func) else int(func.namespace != "prim")
        if func is _READ and isinstance(args[0], self._fake):
            self._read(args[0])
        elif idle >= 0:
            self._idle += idle
        else:
            all_ = [*tensors, *tensors_in(result)]
            if any(isinstance(each, self._fake) for each in all_):
                self._operation(func, args, kwargs, result, all_)

    def _read(self, value: Tensor) -> None:
        """The host asks for a number, and waits for what it comes from."""
        if self._apart and not self._is_host(value):
            number = self.number()
            self.note(Mark(number))
            self.note(Wait(number, True))

    def _operation(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any, tensors: Sequence[Tensor]
    ) -> None:
        sides = {self._is_host(each) for each in tensors if isinstance(each, self._fake)} if self._apart else {False}
        if len(sides) > 1 and costs.name_of(func) == "copy_":
            number = self.number()  # it blocks
            self.note(Copy(number, None, self._is_host(args[0]), args[0].nbytes, None))
            self.note(Wait(number, True))
            return
        form = (func, *_form((args, kwargs)))
        if (known := self._known.get(form)) is None:
            flops = costs.flops(func, args, kwargs, result)
            made = Call(
                costs.name_of(func), form[1:], _dtype(tensors), flops or 0,
                costs.bytes_moved(func, args, kwargs, result), example=(func, _shapes((args, dict(kwargs)))),
            )  # fmt: skip
            known = self._known[form] = self._add(made)
            if flops is None:
                self.tape.unknown[made.name] = 0
        if (name := self.tape.calls[known].name) in self.tape.unknown:
            self.tape.unknown[name] += 1
        self.note(Compute(known, True in sides, self._idle))
        self._idle = 0

    def kernel(self, name: str, given: Mapping[str, Any], result: Any) -> None:
        """As ``kernels.Report``."""
        if not self._on:
            return
        tensors = [*tensors_in(tuple(given.values())), *tensors_in(tuple(given.get("flats", {}).values()))]
        bytes_ = costs.bytes_of_kernel(name, given, result)
        form = (name, bytes_, *_form(dict(given)))
        if (known := self._known.get(form)) is None:
            made = Call(name, form[1:], _dtype(tensors), 0, bytes_, True, (name, _shapes(dict(given))))
            known = self._known[form] = self._add(made)
        self.note(Compute(known, self._apart and any(map(self._is_host, tensors))))

    def _add(self, made: Call) -> int:
        self.tape.calls.append(made)
        return len(self.tape.calls) - 1


def _form(given: Any) -> tuple[Any, ...]:
    """What is given to an operation, in values that can be compared; numbers but no tensors count."""
    found: list[Any] = []
    _add_form(given, found)
    return tuple(found)


def _add_form(given: Any, found: list[Any]) -> None:
    for each in given.values() if type(given) is dict else given:
        if isinstance(each, Tensor):
            found.append((each.shape, each.stride(), each.dtype))
        elif isinstance(each, _VALUES):
            found.append(each)
        elif type(each) in (list, tuple, dict):
            _add_form(each, found)
        elif each is None or not (leaves := pytree.tree_leaves(each)) or leaves[0] is each:
            found.append(type(each))
        else:
            _add_form(leaves, found)


_VALUES = (int, float, bool, str, torch.dtype)


def _shapes(given: Any) -> Any:
    def shape(each: Any) -> Any:
        return Shape(tuple(each.shape), each.stride(), each.dtype) if isinstance(each, Tensor) else each

    return pytree.tree_map(shape, given)


def _dtype(tensors: Sequence[Tensor]) -> str:
    return next((costs.DTYPES[each.dtype] for each in tensors if each.dtype in costs.DTYPES), "")
