"""Poison: a parameter while its weights are elsewhere has its shape and dtype, one element of memory, and no values.

Owns: the tensors that parameters show then; the classes of hidden parameters, and of tensors made of them without
reading (``.data``, ``.detach()``, a view). Must not know: buckets, units, who hides a parameter.

[Note: Reads of hidden weights] The values of poison are NaN (integers: the smallest). That alone would show an error
late or never: an average of weights that reads it is NaN without a message. So a hidden parameter has a subclass of its
own class. The subclass has a ``__torch_function__`` that allows attributes and views, and raises ``UsageError`` if an
operation would read or write values. There is no list of such operations. A dispatch mode checks the operations that
reach ATen, where every operation declares its aliases. Weights that are present cost nothing, because their parameters
have their ordinary class.

A state dict of such parameters has their names and shapes. Its values are hidden tensors, whose memory cannot be
accessed either: a file would hold the poison of a single element.

Accesses that bypass ``torch``'s Python functions are not noticed and find NaN: C++ code of other libraries, and
parameter classes with a ``__torch_function__`` of their own. Most writes raise in ATen there, because all elements are
one. Fills are found later (``restore_poison``).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from shardengine.errors import UsageError
from shardengine.kernels import has_values
from shardengine.offload import Fetched, Platform
from shardengine.sharding.inner import aliases_of, class_of, is_linked, is_outer, leaves_of, outers_of

_MARK = "shardengine_poison"
_HIDDEN = "_shardengine_hidden"
_MANY = 256


class _Element:
    """The one element, per dtype and device, that every parameter shows while its weights are elsewhere."""

    def __init__(self, dtype: torch.dtype, device: torch.device, count: int) -> None:
        """count: elements of its storage."""
        has_nan = dtype.is_floating_point or dtype.is_complex
        lowest = False if dtype is torch.bool else 0 if has_nan else torch.iinfo(dtype).min
        self._value: float | int = float("nan") if has_nan else lowest
        with torch.inference_mode(False):
            self.element = torch.full((count,), self._value, dtype=dtype, device=device)[0]
        setattr(self.element.untyped_storage(), _MARK, True)
        self._asked: WeakKeyDictionary[Platform, Fetched] = WeakKeyDictionary()  # each waits for its own

    def restore(self, platform: Platform) -> bool:
        """Restore the element. Returns whether it was written to, as far as the device knows. Never blocks."""
        if platform not in self._asked:
            with torch.no_grad():
                is_nan = self._value != self._value
                written = self.element == self.element if is_nan else self.element != self._value
                self._asked[platform] = platform.fetch(written)
                self.element.fill_(self._value)
        if not self._asked[platform].reached:
            return False
        return bool(self._asked.pop(platform).get())


def _element_of(dtype: torch.dtype, device: torch.device) -> _Element:
    return _made(dtype, device, has_values())


@functools.cache
def _made(dtype: torch.dtype, device: torch.device, valued: bool) -> _Element:
    """Make the element of ``dtype`` on ``device``.

    valued: False in ``kernels.without_values``, where tensors have no memory. There a few bytes are allocated for
    positions or flags, which have values.
    """
    return _Element(dtype, device, 1 if valued or dtype.is_floating_point else _MANY)


def restore_poison(dtype: torch.dtype, platform: Platform) -> bool:
    """Restore the poison of ``dtype``, and return whether somebody wrote into it past ``hide``.

    A device that runs behind the host reports a write at a later call.
    """
    return _element_of(dtype, platform.device).restore(platform)


def poison(dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Return a tensor of ``shape`` without values: NaN (integers: their smallest value).

    All poison of a dtype shares one element of memory. A view of freed storage could crash the process; this cannot.
    """
    with torch.inference_mode(False):
        return _element_of(dtype, device).element.expand(shape)


@dataclass(frozen=True)
class Elsewhere:
    """The place of weights that a parameter does not show, and the advice to code that reads or writes them."""

    where: str
    reading: str
    writing: str = ""
    saving: str = ""
    """Added if the values were to be saved."""


_INSIDE = (
    "expected this inside of `with engine.full_params():`, which every rank opens",
    "expected this inside of `with engine.full_params(writable=True):`, which every rank opens",
)
_SAVING = (
    ". A state dict that is made then has names and shapes alone: save with engine.save_pretrained(dir) or "
    "engine.state_dict(), under the name deepspeed engine.save_16bit_model(dir), with a Trainer "
    "trainer.save_model(dir), each on every rank"
)
SHARDED = Elsewhere("its weights are sharded", *_INSIDE, _SAVING)
IN_FLIGHT = Elsewhere("its stepped weights are on their way (overlap_param_gather)", *_INSIDE)
AWAY = Elsewhere("its weights are in host memory", "call engine.reload_states() first")


def hide(parameter: nn.Parameter, shown: Tensor, name: str, elsewhere: Elsewhere = SHARDED) -> None:
    """Let ``parameter`` show the poison ``shown``, and raise on reads and writes of values until ``reveal``.

    name: of the parameter and the rank, for the error message.
    """
    with torch._C.DisableTorchFunctionSubclass():
        parameter.data = shown
        kind = _hidden_kind(type(parameter)) if shown.numel() else None
    linked = is_linked(parameter)
    if kind is not None:
        vars(parameter)[_HIDDEN] = name, elsewhere
        if type(parameter) is not kind:
            parameter.__class__ = kind
        for outer in outers_of(parameter) if linked else ():
            vars(outer)[_HIDDEN] = name, elsewhere
            if not isinstance(outer, _Hidden):
                outer.__class__ = _hidden_outer_kind(type(outer))
    for alias in aliases_of(parameter) if linked else ():
        alias.data = shown


def reveal(parameter: nn.Parameter, shown: Tensor) -> None:
    """Let ``parameter`` show ``shown``, and give it its own class again."""
    linked = is_linked(parameter)
    if isinstance(parameter, _Hidden):
        parameter.__class__ = type(parameter).own_class
        vars(parameter).pop(_HIDDEN, None)
        for outer in outers_of(parameter) if linked else ():
            if isinstance(outer, _Hidden) and not any(isinstance(leaf, _Hidden) for leaf in leaves_of(outer)):
                outer.__class__ = type(outer).own_class
                vars(outer).pop(_HIDDEN, None)
    parameter.data = shown
    for alias in aliases_of(parameter) if linked else ():
        alias.data = shown


def stand_in(parameter: Tensor, name: str, elsewhere: Elsewhere = SHARDED) -> Tensor:
    """Return a hidden tensor of ``parameter``'s shape and dtype.

    It stays hidden, even when ``parameter`` shows values again.
    """
    made = poison(parameter.dtype, tuple(parameter.shape), parameter.device).detach()
    vars(made)[_HIDDEN] = name, elsewhere
    made.__class__ = _hidden_kind(Tensor)
    return made


class _Hidden:
    """A tensor whose values are elsewhere."""

    own_class: ClassVar[type]
    """The class of the tensor while it is not hidden."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Allow attributes and views. Raise ``UsageError`` if values are read or written."""
        if function.__name__ == "__set__" and function == _SET_DATA:
            _check_given(*args)
        if function.__name__ in _WITHOUT_VALUES and (function not in _OF_MEMORY or issubclass(cls, nn.Parameter)):
            result = _call(function, types, args, kwargs or {})
        else:
            found = next(each for each in _tensors((args, kwargs)) if isinstance(each, _Hidden))
            if function in _PRINTED:
                name, elsewhere = vars(found)[_HIDDEN]
                return f"<{name}: shape {tuple(found.shape)}, {found.dtype}; {elsewhere.where}>"
            if function in _BY_PYTHON or function in _OF_MEMORY:
                _refuse(found, function.__name__, "read")
            with _Refusal(found, function.__name__):
                result = _call(function, types, args, kwargs or {})
        if isinstance(result, Tensor | tuple | list):
            _hide_too(result, (args, kwargs))
        return result


_call = nn.Parameter.__torch_function__
"""(function, types, args, kwargs) → the result of torch without any override."""


def _hide_too(result: Any, given: Any) -> None:
    """Hide tensors in ``result`` that were made of poison in ``given``, with the same error message."""
    for each in _tensors(result):
        unmarked = class_of(each) is Tensor or (is_outer(each) and _HIDDEN not in vars(each))
        if unmarked and _is_poison(each):
            vars(each)[_HIDDEN] = next(vars(other)[_HIDDEN] for other in _tensors(given) if isinstance(other, _Hidden))
            if not isinstance(each, _Hidden):
                each.__class__ = _hidden_outer_kind(type(each)) if is_outer(each) else _hidden_kind(type(each))


def _check_given(target: Tensor, value: Tensor) -> None:
    """Check ``target.data = value``: raise ``UsageError`` if the value would be lost or is other poison.

    It would be lost because ``reveal`` puts the weights in its place. The poison of another parameter is the same
    memory. The target's own poison may be assigned (``module.to(device)``).
    """
    if not isinstance(target, _Hidden):
        return
    given, own = vars(value).get(_HIDDEN), vars(target)[_HIDDEN]
    if given != own and (given is not None or own[1].writing):
        _refuse(target, "an assignment to .data", "written")


@functools.cache
def _hidden_kind(kind: Any) -> Any:
    """The class of hidden tensors of class ``kind``; None if they keep their own class."""
    if issubclass(kind, _Hidden):
        return kind
    if kind.__torch_function__ not in (nn.Parameter.__torch_function__, Tensor.__torch_function__):
        return None
    return _hidden_outer_kind(kind)


@functools.cache
def _hidden_outer_kind(kind: Any) -> Any:
    """The same for objects around inner tensors, which cannot raise by themselves inside ``__torch_dispatch__``."""
    return type(kind.__name__, (_Hidden, kind), {"own_class": kind, "__module__": kind.__module__})


class _Refusal(TorchDispatchMode):
    """Raises on operations that would read or write values of poison.

    found: the hidden tensor · called: the name of torch's function, for the message.
    """

    def __init__(self, found: Tensor, called: str) -> None:
        super().__init__()
        self._found = found
        self._called = called

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func`` if it takes no poison or needs no values."""
        if any(_is_poison(each) for each in _tensors((args, kwargs))) and not _goes_without_values(func):
            declared = func._schema.arguments
            given = [*args, *((kwargs or {}).get(argument.name) for argument in declared[len(args) :])]
            written = any(
                argument.alias_info is not None
                and argument.alias_info.is_write
                and any(map(_is_poison, _tensors(value)))
                for argument, value in zip(declared, given, strict=True)
            )
            cast = func._schema.name == "aten::_to_copy"
            _refuse(self._found, self._called, "moved or cast" if cast else "written" if written else "read")
        return func(*args, **(kwargs or {}))


@functools.cache
def _goes_without_values(func: Any) -> bool:
    infos = [argument.alias_info for argument in func._schema.arguments if argument.alias_info is not None]
    is_view = bool(infos) and not any(info.is_write for info in infos)
    return is_view or func._schema.name in _FROM_SHAPE or func.namespace == "prim"  # prim::device asks fake tensors


def _refuse(found: Tensor, called: str, what: str) -> None:
    name, elsewhere = vars(found)[_HIDDEN]
    instead = (elsewhere.writing if what == "written" else "") or elsewhere.reading
    if what == "moved or cast":
        instead += "; call .to(), .half() and the like on a model before initialize"
    if called in _SAVES:
        instead += elsewhere.saving
    raise UsageError(
        f"{name} was {what} by {called} while {elsewhere.where}: {instead}", code="weights-used-while-sharded"
    )


def _is_poison(value: object) -> bool:
    if not isinstance(value, Tensor) or value.layout is not torch.strided or not value.numel():
        return False
    if is_outer(value):
        return any(map(_is_poison, leaves_of(value)))
    try:
        return getattr(value.untyped_storage(), _MARK, False)
    except NotImplementedError:  # a tensor without a storage
        return False


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in nested lists, tuples and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, dict):
        for each in value.values():
            yield from _tensors(each)


_WITHOUT_VALUES = {
    *("__get__", "__set__", "__delete__"),  # attributes
    *("data_ptr", "dim", "element_size", "is_contiguous", "is_floating_point", "numel", "size", "stride"),
    *("register_hook", "register_post_accumulate_grad_hook", "requires_grad_", "untyped_storage"),
    *("detach", "expand_as", "view", "view_as"),
}
"""Names of functions that are called often. ``_Refusal`` checks all others."""
_PRINTED = {Tensor.__repr__, Tensor.__format__}
_BY_PYTHON = {
    *(Tensor.__array__, Tensor.__deepcopy__, Tensor.__dlpack__, Tensor.__reduce_ex__, Tensor.numpy, Tensor.tolist),
}
"""Functions that read values without an operation of ATen."""
_OF_MEMORY = {Tensor.data_ptr, Tensor.storage, Tensor._typed_storage, Tensor.untyped_storage}
"""Functions that savers of files read values with. A parameter answers them: frameworks look for tied ones by memory,
and poison has memory."""
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_SAVES = {"__deepcopy__", "__reduce_ex__", "clone", "contiguous", *(each.__name__ for each in _OF_MEMORY)}
_FROM_SHAPE = {
    f"aten::{name}"
    for name in (
        *("empty_like", "full_like", "ones_like", "rand_like", "randint_like", "randn_like", "zeros_like"),
        *("new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros", "is_same_size"),
    )
}


def explain_let_go(error: BaseException) -> None:
    """Add a note to torch's ``error`` about missing memory, once.

    The memory may be that of freed weights, which somebody has kept without the parameter.
    """
    if _NOT_THERE.search(str(error)) and not any("let go of" in note for note in getattr(error, "__notes__", ())):
        error.add_note(
            "shardengine: at stage 3 the memory of gathered weights is let go of when their unit has run. A tensor "
            "over it (weight.detach(), weight.data, a view) that is kept for later, or used by another module, has no "
            "values then: expected a copy, `weight.detach().clone()`, the parameter itself inside of its module, or "
            "both modules in one unit (zero_optimization.units)"
        )


_NOT_THERE = re.compile("data is not allocated yet|[Ss]torage of size 0|out of bounds for storage")
