"""The tape of a dry run: all events of a step that take time, in program order.

Owns: the events, and their recording. Must not know: speeds (rates), when events happen (replay).

The engine that runs dry issues, marks and waits as in training, so the tape has the engine's own schedule. Operations
are recorded as torch dispatches them. The engine's kernels dispatch nothing on tensors without values, and report
themselves (``kernels.without_values``). The wire records collectives, the platform copies and marks, and the file
transfers. An event is known to be complete only after a wait, never by a query: the latest time that a run may have.
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
class TapedCall:
    """An operation with its shapes.

    form: distinguishes it from others of its name · dtype: of its first floating-point tensor; "" for none · bytes:
    read and written · kernel: it is one of the engine's own · example: the operation and its arguments, with a
    ``Shape`` in place of each tensor.
    """

    name: str
    form: tuple[Any, ...]
    dtype: str
    flops: int
    bytes: int
    kernel: bool = False
    example: Any = field(default=None, compare=False, repr=False)


class Shape(NamedTuple):
    """The shape of a tensor."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class Compute(NamedTuple):
    """An operation: its number in ``Tape.calls``.

    on_host: the host computes it, and the device is a GPU · before: operations without work since the last one, such as
    views, which cost the host some time.
    """

    call: int
    on_host: bool
    before: int = 0


class TapeBegin(NamedTuple):
    """The start of a collective. number: to wait for it · bytes: as in ``Issued``."""

    number: int
    operation: str
    group: str
    bytes: int


class Copy(NamedTuple):
    """The start of a copy between device and host.

    stream: its number; None: the current one · after: events that it follows; None: it follows the earlier work of the
    current stream.
    """

    number: int
    stream: int | None
    to_host: bool
    bytes: int
    after: tuple[int, ...] | None


class TapedCopy(NamedTuple):
    """The start of a disk transfer."""

    number: int
    bytes: int
    write: bool


class Mark(NamedTuple):
    """A mark after the earlier work of the current stream."""

    number: int


class Wait(NamedTuple):
    """A wait for a collective, copy, transfer or mark. on_host: the host blocks; otherwise the current stream waits."""

    number: int
    on_host: bool


class Current(NamedTuple):
    """The current stream changes. None: the computation's."""

    stream: int | None


class TapePhase(NamedTuple):
    """A phase begins."""

    name: str


Event = Compute | TapeBegin | Copy | TapedCopy | Mark | Wait | Current | TapePhase


@dataclass
class Tape:
    """The events of one step.

    unknown: operations without a FLOP formula, by name, with their number · members: group → its ranks.
    """

    apart: bool
    """The device is a GPU, and the host runs beside it."""
    events: list[Event] = field(default_factory=list)
    calls: list[TapedCall] = field(default_factory=list)
    unknown: Counter[str] = field(default_factory=Counter)
    members: Mapping[str, Sequence[int]] = field(default_factory=dict)

    def computed(self, *, on_host: bool | None = None) -> Iterator[TapedCall]:
        """Yield the call of each operation, in order. on_host: only those of one side."""
        for event in self.events:
            if isinstance(event, Compute) and on_host in (None, event.on_host):
                yield self.calls[event.call]

    def flops(self) -> Counter[str]:
        """Return the FLOPs by dtype."""
        found: Counter[str] = Counter()
        for call in self.computed():
            if call.flops:
                found[call.dtype] += call.flops
        return found

    def first_micro_batch(self) -> Tape:
        """Return the events before the first phase begins again."""
        phases = [(place, event.name) for place, event in enumerate(self.events) if isinstance(event, TapePhase)]
        again = next((place for place, name in phases[1:] if name == phases[0][1]), len(self.events))
        found = replace(self, events=self.events[:again], unknown=Counter())
        found.unknown.update(call.name for call in found.computed() if call.name in self.unknown)
        return found

    def begun(self) -> Iterator[TapeBegin]:
        """Return the starts of collectives, in order."""
        return (event for event in self.events if isinstance(event, TapeBegin))


class TapeRecorder:
    """Records a tape between ``start`` and ``stop``.

    is_host: whether a tensor is in host memory, if the device is a GPU · phase: returns the present phase.
    """

    def __init__(self, apart: bool, is_host: Callable[[Tensor], bool], phase: Callable[[], str]) -> None:
        from torch._subclasses.fake_tensor import FakeTensor

        self._fake = FakeTensor
        self._apart, self._is_host, self._phase = apart, is_host, phase
        self._made = 0
        self._idle_of: dict[int, int] = {}
        """By operation: its addition to ``Compute.before`` if it is no work; -1 if it is."""
        self.start()
        self._on = False

    def start(self) -> None:
        """Begin an empty tape."""
        self.tape = Tape(self._apart)
        self._idle = 0
        self._known: dict[Any, int] = {}
        self._of_phase = ""
        self._on = True

    def stop(self, members: Callable[[str], Sequence[int]]) -> Tape:
        """Return the complete tape. members: returns the ranks of a group."""
        self._on = False
        self.tape.members = {each.group: members(each.group) for each in self.tape.begun()}
        return self.tape

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Record no operations inside: the caller records the work itself."""
        before, self._on = self._on, False
        try:
            yield
        finally:
            self._on = before

    def number(self) -> int:
        """Return a new number, for an event that can be waited for."""
        self._made += 1
        return self._made

    def note(self, event: Event) -> None:
        """Record an event."""
        if not self._on:
            return
        if (phase := self._phase()) != self._of_phase:
            self._of_phase = phase
            self.tape.events.append(TapePhase(phase))
        self.tape.events.append(event)

    def saw(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], tensors: Sequence[Tensor], result: Any
    ) -> None:
        """Record an operation; see ``Seen``."""
        if not self._on:
            return
        if (idle := self._idle_of.get(id(func))) is None:  # by id: torch's hash of an operation is a Python call
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
        """Record that the host reads a number, and waits for the work before it."""
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
            made = TapedCall(
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
        """Record a kernel of the engine; see ``kernels.Report``."""
        if not self._on:
            return
        tensors = [*tensors_in(tuple(given.values())), *tensors_in(tuple(given.get("flats", {}).values()))]
        bytes_ = costs.bytes_of_kernel(name, given, result)
        form = (name, bytes_, *_form(dict(given)))
        if (known := self._known.get(form)) is None:
            made = TapedCall(name, form[1:], _dtype(tensors), 0, bytes_, True, (name, _shapes(dict(given))))
            known = self._known[form] = self._add(made)
        self.note(Compute(known, self._apart and any(map(self._is_host, tensors))))

    def _add(self, made: TapedCall) -> int:
        self.tape.calls.append(made)
        return len(self.tape.calls) - 1


def _form(given: Any) -> tuple[Any, ...]:
    """Return an operation's arguments as values that can be compared: numbers as they are, tensors by their shapes."""
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
