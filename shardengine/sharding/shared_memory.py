"""Finds parameters that share memory with another tensor of the model, or with themselves, and rejects them.

An engine would separate them. Owns: the tensors that share memory, to the byte; the cases that raise, and their error
messages. Must not know: units, ranks.

[Note: One memory] torch steps a parameter in place, so everything in the same memory follows it: a second parameter
(``Parameter(w.detach())``, ``v.data = w.data``), a slice of it, a buffer. An engine gives each parameter memory of its
own, and nothing follows there. One *object* under several names is a tied weight and stays one. Two objects over one
memory raise ``UsageError`` if one of them is trained. As one parameter they would get one step from one sum of
gradients; under torch they get two steps, one after the other. The engine cannot know which is meant. Frozen ones may
share memory, since nothing moves them. Each gets its own copy, so neither may be unfrozen later.

A plain tensor attribute (``module.cache = module.w.detach()``) is no state of the module. A forward may recompute it,
as ``torch.nn.utils.spectral_norm`` does with ``weight`` beside ``weight_orig``. The engine cannot see whether others
are recomputed, so a warning names them.

Views side by side in one storage (``both[:6]``, ``both[6:]``; the flat weights of an LSTM) share no element.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from shardengine.errors import UsageError
from shardengine.sharding.inner import is_outer


class _MemoryPlace(NamedTuple):
    """The memory of a tensor. space: the device, or a storage that has no addresses · start, end: bytes in it."""

    space: str
    start: int
    end: int
    number: int


def check(
    parameters: Mapping[str, nn.Parameter], buffers: Mapping[str, Tensor], alone: Mapping[str, nn.Parameter]
) -> dict[str, str]:
    """Raise ``UsageError`` for parameters that share memory and cannot be held ([Note: One memory]).

    alone: parameters that the user alone handles. Returns the names of frozen parameters that share memory, each with
    the name of the other tensor.
    """
    named: dict[str, Tensor] = {**buffers, **alone, **parameters}
    for name, parameter in parameters.items():
        if parameter.requires_grad:
            _check_itself(name, parameter)
    trained = {name for name, parameter in {**alone, **parameters}.items() if parameter.requires_grad}
    shared: dict[str, str] = {}
    for one, other in _pairs(named):
        first, second = (one, other) if one in parameters else (other, one)
        if first not in parameters or named[first] is named[second]:
            continue
        if first in trained or second in trained:
            raise UsageError(
                _sentence(*((second, first) if first not in trained else (first, second))),
                code="model-parameters-share-memory",
            )
        shared.setdefault(first, second)
        if second in parameters:
            shared.setdefault(second, first)
    return shared


def left_behind(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> dict[str, str]:
    """Return the plain tensor attributes of ``model`` in the memory of trained ``parameters``.

    The result maps the name of the attribute to the name of the parameter.
    """
    own = {id(parameter) for parameter in parameters.values()}
    trained = {name: p for name, p in parameters.items() if p.requires_grad and _is_strided(p)}
    kept: list[tuple[str, Tensor]] = []
    for prefix, module in model.named_modules():
        for key, value in vars(module).items() if not isinstance(module, torch.jit.ScriptModule) else ():
            recomputed = isinstance(module._parameters.get(f"{key}_orig"), nn.Parameter)
            for each in () if key in _REGISTERED or recomputed else _tensors_in(value):
                if id(each) not in own:
                    kept.append((f"{prefix}.{key}" if prefix else key, each))
    if not kept:
        return {}
    both = [*trained, *(name for name, _ in kept)]  # an attribute may have a parameter's name
    tensors = {str(number): tensor for number, tensor in enumerate([*trained.values(), *(each for _, each in kept)])}
    pairs = [(int(one), int(other)) for one, other in _pairs(tensors)]
    return {both[other]: both[one] for one, other in pairs if one < len(trained) <= other}


_REGISTERED = {"_parameters", "_buffers", "_modules"}
_MOST = 1000
"""The longest list or dict that is searched; longer ones hold data."""


def _tensors_in(value: object) -> Iterator[Tensor]:
    if isinstance(value, dict):
        value = list(value.values())
    few = isinstance(value, list | tuple) and len(value) <= _MOST
    for each in value if few else [value]:  # type: ignore[attr-defined]
        if isinstance(each, Tensor) and _is_strided(each):
            yield each


def check_unfrozen(name: str, shared: Mapping[str, str]) -> None:
    """Raise ``UsageError`` if the parameter ``name``, which came frozen, is trained now but shared memory.

    shared: the result of ``check``.
    """
    if name in shared:
        raise UsageError(_sentence(name, shared[name]), code="model-parameters-share-memory")


def _sentence(name: str, other: str) -> str:
    return (
        f"parameter {name!r} is trained and lies in the same memory as {other!r}, which is another object, so that one "
        "would no longer follow the other: expected one nn.Parameter under both names (model.b = model.a), a buffer "
        "that forward reads from the parameter instead, or a copy (.detach().clone()) where they are not to be tied"
    )


def _check_itself(name: str, parameter: nn.Parameter) -> None:
    if _is_strided(parameter) and _overlaps_itself(parameter):
        raise UsageError(
            f"parameter {name!r} is trained, and several of its elements lie in the same memory (shape "
            f"{tuple(parameter.shape)}, strides {parameter.stride()}; an expanded tensor?): expected one element for "
            "each, as torch's optimizers do; keep the smaller tensor as the parameter and expand it in forward, or "
            "take .contiguous() of it",
            code="model-parameter-overlaps-itself",
        )


def _pairs(named: Mapping[str, Tensor]) -> Iterator[tuple[str, str]]:
    """The pairs of names whose tensors share memory, in the order of ``named``."""
    names = [name for name, tensor in named.items() if _is_strided(tensor)]
    places = sorted(_place(named[name], number) for number, name in enumerate(names))
    open_places: list[_MemoryPlace] = []
    found: list[tuple[int, int]] = []
    for place in places:
        open_places = [each for each in open_places if each.space == place.space and each.end > place.start]
        for each in open_places:
            if _share(*((named[names[one.number]], one) for one in (each, place))):
                found.append((min(each.number, place.number), max(each.number, place.number)))
        open_places.append(place)
    return ((names[first], names[second]) for first, second in sorted(found))


def _is_strided(tensor: Tensor) -> bool:
    """Whether it has elements in ordinary (strided) memory of its own."""
    if isinstance(tensor, (nn.UninitializedParameter, nn.UninitializedBuffer)) or tensor.layout is not torch.strided:
        return False
    return tensor.numel() > 0 and not is_outer(tensor)


def _extent(tensor: Tensor) -> int:
    """The elements from the first to the last one in memory, both included."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _place(tensor: Tensor, number: int) -> _MemoryPlace:
    with torch._C.DisableTorchFunctionSubclass():
        if tensor.is_meta or isinstance(tensor, FakeTensor):
            space, start = f"meta {tensor.untyped_storage()._cdata}", int(tensor.storage_offset()) * tensor.itemsize
        else:
            space, start = str(tensor.device), tensor.data_ptr()
    return _MemoryPlace(space, start, start + _extent(tensor) * tensor.itemsize, number)


def _overlaps_itself(tensor: Tensor) -> bool:
    covered = 1
    for stride, size in sorted((stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1 and stride < covered:
            break
        covered += (size - 1) * stride
    else:
        return False
    extent = _extent(tensor)
    if extent < tensor.numel():
        return True
    numbers = torch.arange(extent, device="cpu").as_strided(tensor.shape, tensor.stride())
    return numbers.unique().numel() < tensor.numel()


def _share(*placed: tuple[Tensor, _MemoryPlace]) -> bool:
    """Whether two tensors whose intervals of bytes overlap have a byte in common."""
    if all(_extent(tensor) <= tensor.numel() for tensor, _ in placed):
        return True  # neither has gaps
    first, end = min(place.start for _, place in placed), max(place.end for _, place in placed)
    unit = math.gcd(*(tensor.itemsize for tensor, _ in placed), *(place.start - first for _, place in placed))
    seen = torch.zeros((end - first) // unit, dtype=torch.bool, device="cpu")
    marks = []
    for tensor, place in placed:
        parts = tensor.itemsize // unit
        shape, strides = (*tensor.shape, parts), (*(stride * parts for stride in tensor.stride()), 1)
        marks.append(seen.as_strided(shape, strides, (place.start - first) // unit))
    marks[0].fill_(True)
    return bool(marks[1].any())
