"""A recording of the torch operations that make a model, instead of their execution. Owns: the record and its steps.

Must not know: files, engines, ranks, the use of the values.

Inside of ``recording`` every tensor that would be made on the CPU has no memory (it lies on torch's meta device), and
each operation that gives it values is a ``Step``. Steps name storages and the places of their tensors in them
(``View``), so views, in-place operations, tied and copied parameters need no rules of their own. ``values.py`` carries
out the steps that a value needs.

[Note: Looks like a CPU] torch's own initialisers leave a meta tensor alone, and so does other code that checks. So a
recorded tensor reports the CPU as its device while the recording lasts.

[Note: Values asked for] An operation whose result depends on values (``item()``, ``torch.equal``) is carried out at
once, on values that are computed for it.

[Note: Drawing] A step that draws knows its generator, and the state that it was set to since the last draw, if it was.
None draws anything: recording leaves the state of torch's generator unchanged.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from shardengine.errors import UsageError

_MARK = "shardengine_recording"
_COPIED = 1 << 20
"""Elements: data up to this size is copied, in case somebody writes to it later."""
_META = torch.device("meta")
_CPU = torch.device("cpu")
_ASKS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_LIKE = ("_like", "new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided")


@dataclass(frozen=True, slots=True)
class View:
    """A tensor of ``dtype`` in a storage: ``size`` and ``stride`` from element ``offset`` on."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        """The number of its elements."""
        return torch.Size(self.size).numel()

    def permuted(self, order: Sequence[int]) -> View:
        """Return it with its dimensions in another order; () leaves them."""
        if not order:
            return self
        return replace(self, size=tuple(self.size[i] for i in order), stride=tuple(self.stride[i] for i in order))

    @property
    def order(self) -> tuple[int, ...]:
        """Its dimensions from the outermost in memory to the innermost."""
        return tuple(sorted(range(len(self.size)), key=lambda dimension: (-self.stride[dimension], dimension)))

    @property
    def is_contiguous(self) -> bool:
        """Whether its elements follow one another in the order of its dimensions."""
        expected = 1
        for size, stride in zip(reversed(self.size), reversed(self.stride), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True

    def on(self, storage: torch.UntypedStorage) -> Tensor:
        """Return the tensor in ``storage``, which has values."""
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.size, self.stride)


def view_of(tensor: Tensor) -> View:
    """Return the place of ``tensor`` in its storage."""
    offset = int(tensor.storage_offset())
    return View(key_of(tensor), tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), offset)


def key_of(tensor: Tensor) -> int:
    """Return the identity of its storage."""
    return tensor.untyped_storage()._cdata


Evaluate = Callable[["Recording", Any, tuple[Any, ...], dict[str, Any]], Any]
"""Carries out a function of torch at once; tensors without values are passed as ``View``."""


@dataclass
class Step:
    """One operation.

    args, kwargs: with ``View`` for tensors without values · made: its new results, by place among all results · reads,
    writes: storages · draws: whether it draws random numbers; ``state``: the state that the generator was set to
    before, or None; ``own``: whether the generator is the user's.
    """

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    made: dict[int, View]
    reads: set[int]
    writes: set[int]
    draws: bool = False
    state: Tensor | None = None
    own: bool = False


@dataclass
class Recording:
    """Steps in their order.

    writers: storage → numbers of the steps that write to it · sources: storage → (reader, name) of the reader's tensor
    that it stands for · kept: storages that must outlive it, so that identities stay unique · lost: storages that
    received values of a tensor without values.
    """

    steps: list[Step] = field(default_factory=list)
    writers: dict[int, list[int]] = field(default_factory=dict)
    sources: dict[int, tuple[Any, str]] = field(default_factory=dict)
    kept: dict[int, torch.UntypedStorage] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)
    state: Tensor | None = None
    evaluate: Evaluate | None = None

    def knows(self, tensor: Tensor) -> bool:
        """Return whether it is a tensor without values of this recording."""
        return key_of(tensor) in self.kept

    def take(self, tensor: Tensor) -> None:
        """Register a new tensor without values."""
        storage = tensor.untyped_storage()
        self.kept[storage._cdata] = storage
        setattr(storage, _MARK, self)

    def add_source(self, reader: Any, name: str) -> Tensor:
        """Return a tensor without values that stands for tensor ``name`` of ``reader``."""
        facts = reader.tensors[name]
        tensor = torch.empty(tuple(facts.shape), dtype=facts.dtype, device=_META)
        self.take(tensor)
        self.sources[key_of(tensor)] = reader, name
        return tensor

    def add(self, step: Step) -> None:
        """Append a step."""
        for storage in step.writes | {view.storage for view in step.made.values()}:
            self.writers.setdefault(storage, []).append(len(self.steps))
        self.steps.append(step)


def recording_of(tensor: Tensor) -> Recording | None:
    """Return the recording that ``tensor`` was made in, or None if it was made outside of one."""
    return getattr(tensor.untyped_storage(), _MARK, None)


@contextmanager
def recording(evaluate: Evaluate) -> Iterator[Recording]:
    """Record the operations on the CPU inside: their results have no memory.

    evaluate: computes values that they ask for.
    """
    if getattr(_under_way, "yes", False):
        raise UsageError(
            "meta_init: expected one at a time, this is inside of another one, which is enough", code="meta-init-nested"
        )
    record, _under_way.yes = Recording(evaluate=evaluate), True
    try:
        with _Recorder(record), _Appearance(record):
            yield record
    finally:
        _under_way.yes = False
    record.evaluate = None


_under_way = threading.local()
"""Whether this thread records."""


class _Appearance(TorchFunctionMode):
    """Makes recorded tensors report the CPU: [Note: Looks like a CPU]."""

    def __init__(self, record: Recording) -> None:
        super().__init__()
        self._record = record

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in _APPEARANCE and torch.Tensor.is_meta.__get__(args[0]) and self._record.knows(args[0]):  # type: ignore[attr-defined]
            return _APPEARANCE[function]
        return function(*args, **(kwargs or {}))


_APPEARANCE = {
    torch.Tensor.is_meta.__get__: False,  # type: ignore[attr-defined]
    torch.Tensor.is_cpu.__get__: True,  # type: ignore[attr-defined]
    torch.Tensor.device.__get__: _CPU,
}


class _Recorder(TorchDispatchMode):
    def __init__(self, record: Recording) -> None:
        super().__init__()
        self._record = record

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        record, schema = self._record, function._schema
        tensors = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, Tensor)]
        known = [each for each in tensors if each.is_meta and record.knows(each)]
        draws = torch.Tag.nondeterministic_seeded in function.tags
        if not known and not self._begins(function, tensors, kwargs, draws):
            return function(*args, **kwargs)
        written = _written(schema, args, kwargs)
        if _ASKS.intersection(function.tags) or any(not each.is_meta for each in written):
            return self._now(function, args, kwargs)
        if any(argument.name == "device" for argument in schema.arguments):
            given = kwargs.get("device")
            if known and given is not None and torch.device(given).type not in ("cpu", "meta"):
                return self._now(function, args, kwargs)
            kwargs["device"] = _META
        return self._record_step(function, args, kwargs, written, draws)

    def _begins(self, function: Any, tensors: list[Tensor], kwargs: dict[str, Any], draws: bool) -> bool:
        """Return whether an operation without recorded arguments makes a tensor that has to be recorded."""
        name = function._schema.name
        if draws and any(not each.is_meta for each in _written(function._schema, tensors[:1], {})):
            raise UsageError(
                f"meta_init: {name.removeprefix('aten::')} draws into a tensor that was made from data or outside of "
                "it, which cannot be put off: make that tensor with torch.empty or torch.zeros inside of meta_init",
                code="meta-init-draws-into-data",
            )
        if not any(argument.name == "device" for argument in function._schema.arguments):
            return draws and bool(tensors) and all(each.device.type == "cpu" for each in tensors)
        if tensors and not name.endswith(_LIKE):
            return False
        device = kwargs.get("device") or (tensors[0].device if tensors else _CPU)
        return torch.device(device).type == "cpu" or name == "aten::scalar_tensor"  # of ``tensor[index] = number``

    def _now(self, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Carry out an operation at once: [Note: Values asked for]."""

        def noted(each: Tensor) -> Any:
            return view_of(each) if each.is_meta and self._record.knows(each) else each

        assert self._record.evaluate is not None
        args, kwargs = tree_map_only(Tensor, noted, (args, kwargs))
        return self._record.evaluate(self._record, function, args, kwargs)

    def _record_step(self, function: Any, args: Any, kwargs: dict[str, Any], written: list[Tensor], draws: bool) -> Any:
        record = self._record
        reads: set[int] = set()
        like = function._schema.name.endswith(_LIKE)
        unknown = False

        def noted(each: Any) -> Any:
            nonlocal unknown
            if isinstance(each, torch.device):
                return _CPU
            if not isinstance(each, Tensor):
                return each
            if each.is_meta and (like or record.knows(each)):
                reads.update(() if like else (key_of(each),))
                return view_of(each)
            unknown |= each.is_meta
            return each if each.is_meta or each.numel() > _COPIED else each.detach().clone()

        def without_values(each: Tensor) -> Tensor:
            return each if each.is_meta else _blank(view_of(each), _META)

        noted_args, noted_kwargs = tree_map_only(object, noted, (args, kwargs))
        state, own = self._before_drawing(function, noted_args, noted_kwargs, kwargs) if draws else (None, False)
        result = function(*tree_map_only(Tensor, without_values, args), **tree_map_only(Tensor, without_values, kwargs))
        before = {key_of(each) for each in tree_flatten((args, kwargs))[0] if isinstance(each, Tensor)}
        made: dict[int, View] = {}
        for number, each in enumerate(tree_flatten(result)[0]):
            if isinstance(each, Tensor) and key_of(each) not in before and key_of(each) not in record.kept:
                record.take(each)
                made[number] = view_of(each)
        writes = {key_of(each) for each in written}
        if unknown:
            record.lost |= writes | {view.storage for view in made.values()}
        if made or writes:
            record.add(Step(function, noted_args, noted_kwargs, made, reads | writes, writes, draws, state, own))
        return result

    def _before_drawing(
        self, function: Any, args: Any, noted: dict[str, Any], kwargs: dict[str, Any]
    ) -> tuple[Tensor | None, bool]:
        """Return the state to set the generator to, if any, and whether it is the user's own ([Note: Drawing])."""
        generator = kwargs.get("generator")
        if generator is not None:
            kwargs["generator"] = noted["generator"] = None
            state = generator.get_state()
            real = tree_map_only(View, _blank, (args, noted))
            function(*real[0], **{**real[1], "generator": generator})
            return state, True
        state = torch.get_rng_state()
        if self._record.state is not None and torch.equal(state, self._record.state):
            return None, False
        self._record.state = state
        return state, False


def _blank(view: View, device: torch.device = _CPU) -> Tensor:
    """Return a tensor of its form, with any values."""
    return torch.empty_strided(view.size, view.stride, dtype=view.dtype, device=device)


def _written(schema: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the arguments that the operation writes to."""
    found: list[Any] = []
    for number, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(kwargs.get(argument.name, args[number] if number < len(args) else None))
    return [each for each in tree_flatten(found)[0] if isinstance(each, Tensor)]
