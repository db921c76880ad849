"""Parameters that consist of several tensors: quantised tensor subclasses, and tensors kept beside parameters.

Owns: the list of these tensors and their names; that each of them is a parameter of its own while an engine holds the
model; rebuilding the outer object from other tensors. Must not know: flat buffers, units, ranks.

[Note: Inner parameters] A frozen parameter of a class with ``__tensor_flatten__`` (torchao's, a user's own) has no
memory: it is an object around inner tensors. So each inner tensor is replaced by an ``nn.Parameter`` with its values,
named ``<parameter>.<inner>``. It is laid out, moved, hidden and saved as any frozen parameter. The outer object stays
the same and holds these parameters, whichever memory they show. It is hidden while one of them is.

[Note: Beside] A parameter with memory of its own may keep tensors beside it (bitsandbytes: ``quant_state.absmax`` of 4
bits, ``SCB`` of 8), in its attributes, or in attributes of objects there and on its module. They are replaced in the
same way, but stay whole on each rank, because backward reads them. A tensor in the memory of the parameter itself
(``CB``, which the module moves) shows the same values as the parameter.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from shardengine.errors import UsageError
from shardengine.kernels import has_values

_INNER = "_shardengine_inner"
_ALIASES = "_shardengine_aliases"
_LINKS = frozenset({_INNER, _ALIASES})
_DEEPEST = 3
"""The depth of nested objects beside a parameter that is searched."""
_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.Size)

Place = tuple[Any, str, str]
"""An object, its attribute that holds a tensor, and the tensor's name below the parameter or module."""


class _Outers:
    """Weak references to the objects that an inner parameter is a part of. A copy has none."""

    def __init__(self, outers: Iterable[Tensor] = (), *, beside: bool = False) -> None:
        self._outers = [weakref.ref(outer) for outer in outers]
        self.beside = beside

    def __reduce__(self) -> tuple[Any, ...]:
        return _Outers, ()

    def __deepcopy__(self, _memo: Any) -> _Outers:
        return _Outers()

    def alive(self) -> list[Tensor]:
        """The objects that still live."""
        return [outer for each in self._outers if (outer := each()) is not None]


def weights_in(parameter: Tensor) -> int:
    """The number of weights in ``parameter``.

    Packed weights count as before packing. Tensors beside a parameter, such as scales, count as 0.
    """
    if is_beside(parameter):
        return 0
    shape = getattr(getattr(parameter, "quant_state", None), "shape", None)
    return parameter.numel() if shape is None else math.prod(shape)


def is_inner(parameter: Tensor) -> bool:
    """Whether it was an inner tensor, or one beside a parameter. It keeps its dtype under any config."""
    return _INNER in vars(parameter)


def is_beside(parameter: Tensor) -> bool:
    """Whether it stays whole on each rank ([Note: Beside])."""
    return is_inner(parameter) and vars(parameter)[_INNER].beside


def is_packed(parameter: Tensor) -> bool:
    """Whether its elements are bytes that can be read only with the tensors beside it, whatever its dtype."""
    return _ALIASES in vars(parameter)


def is_linked(parameter: Tensor) -> bool:
    """Whether other tensors are hidden with ``parameter`` or show the same values. Called at every gather."""
    return not _LINKS.isdisjoint(vars(parameter))


def outers_of(parameter: Tensor) -> list[Tensor]:
    """The objects that are hidden while ``parameter`` is hidden."""
    found = vars(parameter).get(_INNER)
    return [] if found is None else found.alive()


def aliases_of(parameter: Tensor) -> list[Tensor]:
    """The tensors that always show the same values as ``parameter``."""
    return list(vars(parameter).get(_ALIASES, ()))


def is_outer(parameter: Tensor) -> bool:
    """Whether it is an object around inner tensors."""
    return is_traceable_wrapper_subclass(parameter)


def leaves_of(outer: Tensor) -> list[Tensor]:
    """The tensors with memory that ``outer`` consists of."""
    return [getattr(holder, key) for holder, key, _ in _leaves(outer)]


def parts_of(parameter: nn.Parameter) -> list[tuple[str, nn.Parameter]]:
    """The parameters that hold the values of ``parameter``, each with the suffix of its name.

    These are its inner parameters, or ("", parameter) itself.
    """
    if not is_outer(parameter):
        return [("", parameter)]
    return [(f".{path}", getattr(holder, key)) for holder, key, path in _leaves(parameter)]


def beside(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters that ``split`` made of tensors beside others, with their names."""
    found: dict[str, nn.Parameter] = {}
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for holder, key, path in _beside(module):
            tensor = getattr(holder, key)
            if isinstance(tensor, nn.Parameter) and is_beside(tensor) and id(tensor) not in seen:
                seen.add(id(tensor))
                found[f"{prefix}.{path}" if prefix else path] = tensor
    return list(found.items())


def split(model: nn.Module, device: torch.device) -> None:
    """Replace inner tensors, and tensors beside parameters, by parameters. device: the future device of the model.

    ``UsageError`` names a parameter that cannot be split. A model that is split already does not change.
    """
    made: dict[int, tuple[Tensor, nn.Parameter]] = {}  # with the tensor, which keeps the id in use
    for name, parameter in model.named_parameters():
        check(name, parameter)
        if is_outer(parameter):
            _split(name, parameter, device)
    for module in model.modules():
        for parameter in _quantised(module):
            storage, known = parameter.untyped_storage()._cdata, aliases_of(parameter)
            for holder, key, _ in _beside(module):
                tensor = getattr(holder, key)
                if tensor.is_meta or tensor is parameter or tensor.layout is not torch.strided or is_inner(tensor):
                    continue
                if tensor.untyped_storage()._cdata != storage:
                    continue
                if tensor.shape == parameter.shape and not any(tensor is each for each in known):
                    known.append(tensor)
            if _beside(module):
                vars(parameter)[_ALIASES] = known
        aliases = {id(each) for parameter in _quantised(module) for each in aliases_of(parameter)}
        for holder, key, _ in _beside(module):
            tensor = getattr(holder, key)
            if id(tensor) not in aliases and not is_inner(tensor) and not isinstance(tensor, nn.Parameter):
                _, whole = made.setdefault(id(tensor), (tensor, _parameter(tensor, device)))
                vars(whole)[_INNER] = _Outers(beside=True)
                setattr(holder, key, whole)


def join(model: nn.Module) -> None:
    """Undo ``split``: inner tensors are ordinary tensors again, with their current memory."""
    places: list[Place] = [place for module in model.modules() for place in _beside(module)]
    places += [place for parameter in model.parameters() if is_outer(parameter) for place in _leaves(parameter)]
    for holder, key, _ in places:
        tensor = getattr(holder, key)
        if isinstance(tensor, nn.Parameter) and is_inner(tensor):
            setattr(holder, key, tensor.detach())
    for parameter in model.parameters():
        vars(parameter).pop(_ALIASES, None)


def made_of(outer: Tensor, values: Mapping[int, Tensor]) -> Tensor:
    """An object like ``outer`` around other tensors. values: id(inner parameter) → its replacement."""
    keys, context = outer.__tensor_flatten__()  # type: ignore[attr-defined]
    inner = {key: getattr(outer, key) for key in keys}
    made = {key: made_of(each, values) if is_outer(each) else values[id(each)] for key, each in inner.items()}
    kind: Any = own_class(outer)
    built: Tensor = kind.__tensor_unflatten__(made, context, outer.size(), outer.stride())
    return built


def own_class(tensor: Tensor) -> type:
    """The class of ``tensor`` while it is not hidden."""
    return _stood_for(getattr(type(tensor), "own_class", type(tensor)), tensor)


def class_of(tensor: Tensor) -> type:
    """The class of ``tensor``; for a fake tensor (``kernels.without_values``) the class that it stands for."""
    return _stood_for(type(tensor), tensor)


def _stood_for(kind: type, tensor: Tensor) -> type:
    if kind is not FakeTensor or has_values():
        return kind
    return nn.Parameter if isinstance(tensor, nn.Parameter) else Tensor


def facts(model: nn.Module) -> list[str]:
    """The facts about quantised parameters that ranks compare, beside shapes and dtypes: class and way of reading."""
    found: list[str] = []
    for name, parameter in model.named_parameters():
        kind = own_class(parameter)
        if is_outer(parameter):
            keys, context = parameter.__tensor_flatten__()  # type: ignore[attr-defined]
            found.append(f"{name}: {kind.__name__} of {', '.join(keys)}, {_described(context)}")
    for prefix, module in model.named_modules():
        for parameter in _quantised(module):
            found.append(f"{prefix}: {own_class(parameter).__name__}, {_described(vars(parameter))}")
    return found


def _described(value: Any, depth: int = 0) -> str:
    """The plain values in ``value``, in a form that is the same on every rank."""
    if isinstance(value, _PLAIN):
        return str(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(_described(each, depth) for each in value)}]"
    rows = value.items() if isinstance(value, Mapping) else getattr(value, "__dict__", {}).items()
    if depth == _DEEPEST or isinstance(value, Tensor | nn.Module | type):
        return type(value).__name__
    shown = [
        f"{key}={_described(each, depth + 1)}"
        for key, each in sorted(rows, key=lambda row: str(row[0]))
        if not str(key).startswith("_") and not isinstance(each, Tensor | nn.Module)
    ]
    return f"{type(value).__name__}({', '.join(shown)})"


def check(name: str, parameter: nn.Parameter) -> None:
    """Raise ``UsageError`` if the engine cannot hold a parameter of this class."""
    kind = own_class(parameter).__name__
    if kind == "DTensor":
        raise UsageError(
            f"parameter {name!r} is a DTensor, which torch has spread over ranks: expected ordinary parameters, which "
            "initialize shards; take .full_tensor() of it, or, for tensor parallelism, its .to_local() with a library "
            "that works with each rank's own tensors",
            code="model-dtensor-parameter",
        )
    if is_outer(parameter) and parameter.requires_grad:
        raise UsageError(
            f"parameter {name!r} is a {kind}, a quantised tensor or another tensor subclass around inner ones, and "
            "requires grad: expected it to be frozen, with trainable parameters in torch.float32, torch.bfloat16 or "
            "torch.float16 beside it (adapters); call requires_grad_(False) on it, or dequantise it",
            code="model-trainable-tensor-subclass",
        )
    if is_outer(parameter) or parameter.is_meta or not parameter.numel():
        return
    if isinstance(parameter, nn.parameter.UninitializedParameter) or parameter.layout is not torch.strided:
        return
    if not has_values():  # nothing has memory
        return
    with torch._C.DisableTorchFunctionSubclass():
        has_memory = bool(parameter.data_ptr())
    if not has_memory:
        raise UsageError(
            f"parameter {name!r} is a {kind}, a tensor subclass without memory of its own that does not say which "
            "tensors it consists of: expected a class with __tensor_flatten__ and __tensor_unflatten__ "
            "(torch.utils._python_dispatch.is_traceable_wrapper_subclass)",
            code="model-opaque-tensor-subclass",
        )


def _split(name: str, outer: nn.Parameter, device: torch.device) -> None:
    """Replace the inner tensors of one parameter. If it was on another device, it reports ``device`` from now on."""
    leaves = _leaves(outer)
    if all(is_inner(getattr(holder, key)) for holder, key, _ in leaves) and outer.device == device:
        return
    kind = own_class(outer)
    held = {id(tensor := getattr(holder, key)): _parameter(tensor, device) for holder, key, _ in leaves}
    try:
        stand_ins = {key: each.new_empty(1, device=device).expand(each.shape) for key, each in held.items()}
        built = made_of(outer, {key: each.detach() for key, each in stand_ins.items()})
        fits = type(built) is kind and built.shape == outer.shape and built.dtype == outer.dtype
        problem = "" if fits else f"it gave a {type(built).__name__}, {tuple(built.shape)}, {built.dtype}"
        if fits and outer.device != built.device:
            other = nn.Parameter(built, requires_grad=False)
            vars(other).update({key: each for key, each in vars(outer).items() if key not in vars(other)})
            found = [getattr(holder, key) for holder, key, _ in leaves]
            torch.utils.swap_tensors(outer, other)
            held = {
                id(getattr(holder, key)): held[id(before)]
                for (holder, key, _), before in zip(_leaves(outer), found, strict=True)
            }
        for holder, key, path in _leaves(outer):
            inner = held[id(getattr(holder, key))]
            vars(inner)[_INNER] = _Outers((outer,) if holder is outer else (outer, holder))
            setattr(holder, key, inner)
            if getattr(holder, key) is not inner:
                problem = f"its attribute {path!r} cannot be set"
    except UsageError:
        raise
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    if problem:
        raise UsageError(
            f"parameter {name!r} is a {kind.__name__}, which cannot be made anew of its inner tensors ({problem}): "
            "expected __tensor_unflatten__ to give an object of the same class, shape and dtype, whose inner tensors "
            "are attributes",
            code="model-tensor-subclass-not-rebuilt",
        )


def _parameter(tensor: Tensor, device: torch.device) -> nn.Parameter:
    """The values of ``tensor`` as a frozen parameter, without a copy if the tensor has memory of its own."""
    if isinstance(tensor, nn.Parameter):
        return tensor
    if tensor.is_meta and device.type != "meta":  # another rank has the values
        shape_alone = torch.empty(1, dtype=tensor.dtype, device=device)
        return nn.Parameter(shape_alone.expand(tensor.shape), requires_grad=False)
    dense = tensor.numel() < 2 or any(tensor.stride())
    return nn.Parameter(tensor.detach() if dense else tensor.detach().contiguous(), requires_grad=False)


def _leaves(outer: Tensor, prefix: str = "") -> list[Place]:
    """The places of the inner tensors of ``outer``, including those of nested outer objects."""
    found: list[Place] = []
    for key in outer.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
        inner = getattr(outer, key)
        found += _leaves(inner, f"{prefix}{key}.") if is_outer(inner) else [(outer, key, f"{prefix}{key}")]
    return found


def _quantised(module: nn.Module) -> list[nn.Parameter]:
    """The parameters of ``module`` itself that may have tensors beside them: frozen ones of a class of their own."""
    return [
        p
        for p in module._parameters.values()
        if p is not None and not p.requires_grad and not is_outer(p) and own_class(p) is not nn.Parameter
    ]


def _beside(module: nn.Module) -> list[Place]:
    """The places of tensors beside parameters of ``module``, with names below the module.

    A tensor has the same name on the parameter and on an object of the module, which may take it from there.
    """
    chosen = {id(parameter) for parameter in _quantised(module)}
    keys = [key for key, parameter in module._parameters.items() if id(parameter) in chosen]
    found = [place for key in keys for place in _within(module._parameters[key], f"{key}.", 0)]
    for key, value in vars(module).items() if keys else ():
        if not key.startswith("_") and _may_hold(value):
            found += _within(value, f"{keys[0]}." if len(keys) == 1 else f"{key}.", 1)
    return found


def _within(thing: Any, prefix: str, depth: int) -> Iterator[Place]:
    for key, value in list(vars(thing).items()):
        if key.startswith("_"):
            continue
        if isinstance(value, Tensor):
            yield thing, key, f"{prefix}{key}"
        elif depth < _DEEPEST and _may_hold(value):
            yield from _within(value, f"{prefix}{key}.", depth + 1)


def _may_hold(value: Any) -> bool:
    """Whether ``value`` is an object with attributes, but no module, tensor, class or function."""
    return hasattr(value, "__dict__") and not isinstance(value, nn.Module | Tensor | type) and not callable(value)
