"""Floating-point inputs of the model in the dtype of its weights. Owns: which tensors are cast, new containers for
them.

Must not know: when it happens (``runtime/hooks.py``), why (``sharding/precision.py``).

[Note: Casts of inputs] Tensors of fp64, fp32, fp16 and bf16, in the arguments and in nested lists, tuples, mappings and
dataclasses. Not cast: integers, bools, complex numbers and fp8 (whose values mean nothing without a scale), buffers of
the model (an in-place write to a copy would be lost), tensors in other objects. The cast is an operation that autograd
records. The caller's objects are not modified: a container with a tensor that changes is copied, with all containers
around it; all others are passed on unchanged. A tensor or container that is passed twice is still one object
afterwards.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from collections import UserDict
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn

CAST = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})
"""The dtypes that are cast to each other."""


def cast_inputs(value: Any, dtype: torch.dtype, buffers: Callable[[], Iterable[Tensor]] = tuple) -> Any:
    """Return ``value`` with its floating-point tensors in ``dtype``; ``value`` itself if nothing changes.

    The note at the top of this file defines the tensors. buffers: tensors that are not cast; called at the first tensor
    that would be cast.
    """
    return _Cast(dtype, buffers).of(value)


class _Cast:
    """One call. Every visited object is kept alive next to its result, so that an id means one object."""

    def __init__(self, dtype: torch.dtype, buffers: Callable[[], Iterable[Tensor]]) -> None:
        self._dtype = dtype
        self._buffers = buffers
        self._staying: set[int] | None = None
        self._seen: dict[int, tuple[Any, Any]] = {}

    def of(self, value: Any) -> Any:
        """Return ``value``, cast."""
        if isinstance(value, Tensor):
            return value if value.dtype is self._dtype or value.dtype not in CAST else self._once(value, self._tensor)
        if isinstance(value, Mapping):
            return self._once(value, self._mapping)
        if isinstance(value, (list, tuple)):
            return self._once(value, self._sequence)
        if dataclasses.is_dataclass(value) and not isinstance(value, (type, nn.Module)):
            return self._once(value, self._dataclass)
        return value

    def _once(self, value: Any, cast: Callable[[Any], Any]) -> Any:
        known = self._seen.get(id(value))
        if known is None:
            self._seen[id(value)] = known = value, value  # a container that holds itself stays
            self._seen[id(value)] = known = value, cast(value)
        return known[1]

    def _tensor(self, tensor: Tensor) -> Tensor:
        if self._staying is None:
            self._staying = {id(buffer) for buffer in self._buffers()}
        return tensor if id(tensor) in self._staying else tensor.to(self._dtype)

    def _mapping(self, value: Mapping[Any, Any]) -> Mapping[Any, Any]:
        changed = {key: new for key, item in value.items() if (new := self.of(item)) is not item}
        return _replaced(value, changed) if changed else value

    def _sequence(self, value: list[Any] | tuple[Any, ...]) -> list[Any] | tuple[Any, ...]:
        items = [self.of(item) for item in value]
        if all(new is item for new, item in zip(items, value, strict=True)):
            return value
        if isinstance(value, list):
            new = copy.copy(value)
            new[:] = items
            return new
        return _same_tuple(value, items)

    def _dataclass(self, value: Any) -> Any:
        changed = {}
        for field in dataclasses.fields(value):
            item = getattr(value, field.name, None)
            if (new := self.of(item)) is not item:
                changed[field.name] = new
        return _with_fields(value, changed) if changed else value


def _replaced(value: Mapping[Any, Any], changed: dict[Any, Any]) -> Mapping[Any, Any]:
    """Return a copy of ``value`` with other items at the keys of ``changed``; ``value`` itself if its class refuses."""
    if type(value) is dict:
        return {**value, **changed}
    copies_items = isinstance(value, (dict, UserDict))
    try:
        if not copies_items and not (isinstance(value, MutableMapping) and hasattr(value, "__dict__")):
            return type(value)({**value, **changed})  # type: ignore[call-arg]  # such as a MappingProxyType
        new: Any = copy.copy(value)
        if not copies_items:  # a shallow copy shares the dict that holds the items
            vars(new).update({name: dict(held) for name, held in vars(value).items() if type(held) is dict})
        for key, item in changed.items():
            new[key] = item
    except (TypeError, ValueError, AttributeError, RuntimeError):
        return value
    return new


def _same_tuple(value: tuple[Any, ...], items: list[Any]) -> tuple[Any, ...]:
    """Return a tuple of the class of ``value``, named ones included, with ``items``."""
    kind = type(value)
    if kind is tuple:
        return tuple(items)
    if hasattr(kind, "n_sequence_fields"):  # torch.return_types: a sequence written in C
        return kind(items)
    new = tuple.__new__(kind, items)
    if hasattr(value, "__dict__"):
        vars(new).update(vars(value))
    return new


def _with_fields(value: Any, changed: dict[str, Any]) -> Any:
    """Return a copy of the dataclass ``value`` with other values in the fields of ``changed``, frozen or not."""
    new = copy.copy(value)
    for name, item in changed.items():
        object.__setattr__(new, name, item)
    return new


def explain(error: BaseException, cast: torch.dtype | None, *, inputs: bool) -> None:
    """Add advice to torch's ``error`` about dtypes, raised in the forward of a model that was ``cast``.

    inputs: whether inputs were cast.
    """
    if cast is None or not isinstance(error, RuntimeError) or not _ABOUT_DTYPES.search(str(error)):
        return
    name = str(cast).removeprefix("torch.")
    made = "what the forward makes itself, or computes with an fp32 buffer,"
    what = made if inputs else "the inputs, which auto_cast is switched off for,"
    error.add_note(
        f"shardengine: the weights are in {name}, so expected {what} in {name}, too (torch.zeros(..., "
        "dtype=self.weight.dtype), x.to(self.weight.dtype)); or train fp32 weights with "
        '"torch_autocast": {"enabled": true} instead'
    )


_ABOUT_DTYPES = re.compile("dtype|scalar type|Input type")
