"""Tensors without values in an ordinary process: a step's shapes, dtypes and strides, and no memory.

Owns: which tensors are fake, the answer if code reads a value. Must not know: engines, how storages are counted.

[Note: Without values] Weights and activations are torch's fake tensors of the CPU. So decisions of a model's code by
device, dtype and layout (autocast, the kernel of an attention) are those of a CPU. Tensors of whole numbers that
programs compute with (positions, masks of a few elements, the engine's messages) stay real. Reading a value of a fake
tensor gives a fixed answer: a floating-point number is 1, a whole number 0, a flag False, and two tensors are equal. If
code needs more, such as how many elements of a mask are set, torch raises; the model cannot be planned, and
``UsageError`` is raised.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from shardengine import kernels
from shardengine.planner.ledger import LedgerMode, Seen, tensors_in

_NONE: Mapping[nn.Module, Any] = MappingProxyType({})
LARGE = 1 << 20
"""A new tensor of at least so many bytes is fake, whatever its dtype."""
_LARGE_OF: Mapping[torch.dtype, int] = dict.fromkeys((torch.uint8, torch.int8), 256)
"""The same for these dtypes, which packed weights have, and positions do not."""
_aten = torch.ops.aten
_CPU, _META = torch.device("cpu"), torch.device("meta")
_MAKERS = frozenset({"aten::empty", "aten::zeros", "aten::ones", "aten::full", "aten::rand", "aten::randn",
                     "aten::empty_strided", "aten::new_empty"})  # fmt: skip
_DEVICE = torch.ops.prim.device.default
_LIKE = frozenset({_aten.empty_like.default, _aten.new_empty.default})
"""Operations that make a tensor like another one."""
_IN_PLACE = frozenset({_aten.copy_.default, _aten.zero_.default, _aten.fill_.Scalar, _aten.add_.Tensor,
                       _aten.mul_.Tensor, _aten.div_.Tensor})  # fmt: skip
"""Operations that return their first argument, whatever the others are."""
_FROM_META = (_aten._to_copy.default, _aten.empty_like.default)
_Way = Callable[[Any, tuple[Any, ...], Mapping[str, Any], bool], Any]
"""Answers an operation on fake tensors. Its last argument: whether all tensors are fake."""


_forms: dict[Any, Any] = {}
"""The form of an operation's arguments → the form of its result. Shared by all plans of a process, because it depends
on torch alone."""
_MOST_FORMS = 1 << 14


class NoValues(LedgerMode):
    """Inside, new tensors are fake if they hold floating-point numbers or are large ([Note: Without values]).

    seen: called for each operation. A dispatch mode for each of them would cost as much as this one.
    """

    def __init__(self, *seen: Seen) -> None:
        super().__init__()
        self._seen = seen
        from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._kind = FakeTensor
        self._ways: dict[int, _Way] = {}
        self._on_cpu = vars(FakeTensor(self._fake, torch.empty(0, device="meta"), _CPU))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """One operation."""
        if func is _DEVICE and isinstance(args[0], self._kind):
            return args[0].fake_device  # the most frequent operation
        kwargs = kwargs or {}
        tensors = tensors_in(args)
        if kwargs:
            tensors += tensors_in(tuple(kwargs.values()))
        result = self._answer(func, args, kwargs, tensors)
        for seen in self._seen:
            seen(func, args, kwargs, tensors, result)
        return result

    def _answer(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], tensors: Sequence[Tensor]) -> Any:
        if not tensors:
            return self._make(func, args, kwargs)
        kind, fakes = self._kind, 0
        for each in tensors:
            fakes += isinstance(each, kind)
        if not fakes:
            if func in _FROM_META and tensors[0].is_meta and _device(kwargs, "meta").type != "meta":
                return self._empty(tensors[0], kwargs.get("dtype") or tensors[0].dtype)
            return func(*args, **kwargs)
        how = self._ways.get(id(func))
        if how is None:
            how = self._ways[id(func)] = self._way(func)
        return how(func, args, kwargs, fakes == len(tensors))

    def _way(self, func: Any) -> _Way:
        """Return the function that answers ``func`` on fake tensors."""
        schema = func._schema
        makes_new = not schema.is_mutable and all(each.alias_info is None for each in schema.returns)
        chosen: Mapping[Any, _Way] = {
            **dict.fromkeys(_LIKE, self._like),
            **dict.fromkeys(_IN_PLACE, lambda func, args, kwargs, alone: args[0]),
            _aten._local_scalar_dense.default: lambda func, args, kwargs, alone: self._number(args[0].dtype),
            _aten.equal.default: lambda func, args, kwargs, alone: True,
            _aten.allclose.default: lambda func, args, kwargs, alone: True,
            _aten._grouped_mm.default: self._grouped,
            _aten.stack.out: self._stacked,
        }
        if func in chosen:
            return chosen[func]
        return self._view if func.is_view else self._new if makes_new else self._as_torch

    @staticmethod
    def _as_torch(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], alone: bool) -> Any:
        return func(*args, **kwargs)

    def _view(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], alone: bool) -> Any:
        return self._of_meta(func, args, kwargs) if alone else func(*args, **kwargs)

    def _like(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], alone: bool) -> Any:
        if alone and _device(kwargs, "cpu").type == "cpu" and not kwargs.get("pin_memory"):
            return self._of_meta(func, args, {**kwargs, "device": _META})
        return func(*args, **kwargs)

    def _new(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], alone: bool) -> Any:
        """Make a result that has memory of its own, and whose shape follows from the arguments.

        torch is asked once for each form of arguments, because asking takes longer than the rest of an operation.
        """
        form = _form_of(self._kind, (func, torch.get_default_dtype(), args, tuple(kwargs.items()))) if alone else None
        if form is None:
            return func(*args, **kwargs)
        if (known := _forms.get(form)) is None:
            found = func(*args, **kwargs)
            if len(_forms) >= _MOST_FORMS:
                _forms.clear()
            _forms[form] = self._shapes_of(found) or ()
            return found
        if not known:
            return func(*args, **kwargs)
        kind, shapes = known
        made = [self._shown(torch.empty_strided(*shape, dtype=dtype, device=_META)) for *shape, dtype in shapes]
        return made[0] if kind is None else kind(made)

    def _shapes_of(self, found: Any) -> tuple[type | None, Sequence[tuple[Any, ...]]] | None:
        """Return the type if there are several results, and each one's size, strides and dtype.

        None if these do not describe the result in full.
        """
        several = type(found) in (list, tuple)
        shapes = []
        for each in found if several else (found,):
            if type(each) is not self._kind or each.layout is not torch.strided or each.storage_offset():
                return None
            shape = (each.size(), each.stride(), each.dtype)
            new = torch.empty_strided(each.size(), each.stride(), dtype=each.dtype, device=_META)
            if new.untyped_storage().nbytes() != each.untyped_storage().nbytes() or each.device != _CPU:
                return None
            shapes.append(shape)
        if len({each.untyped_storage()._cdata for each in (found if several else (found,))}) != len(shapes):
            return None
        return (type(found) if several else None), shapes

    def _of_meta(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run an operation on the meta device, as torch's fake mode does for these, in a sixth of its time.

        The fake mode looks up a cache of all operations, which takes longer than the operation itself.
        """
        fake = self._fake
        with torch._C._DisableTorchDispatch(), torch._C._PreserveDispatchKeyGuard():
            fake.in_kernel_invocation = True
            torch._C._set_meta_in_tls_dispatch_include(True)
            try:
                found = func(*args, **kwargs)
            finally:
                fake.in_kernel_invocation = False
        if isinstance(found, (list, tuple)):
            return type(found)([self._shown(each) for each in found])
        return self._shown(found)

    def _shown(self, made: Tensor) -> Tensor:
        """Return ``FakeTensor(mode, made, device)`` of the CPU in a quarter of its time: all share their attributes."""
        found = Tensor._make_subclass(
            self._kind, made, made.requires_grad, dispatch_device=True, device_for_backend_keys=_CPU
        )
        torch._C._set_throw_on_mutable_data_ptr(found)
        vars(found).update(self._on_cpu)
        return found

    @staticmethod
    def _number(dtype: torch.dtype) -> bool | float | int:
        return False if dtype is torch.bool else 1.0 if dtype.is_floating_point else 0

    def _grouped(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], alone: bool) -> Any:
        """Ask torch for the shape with bf16: it gives shapes for no other dtype, although it computes in others."""
        if args[0].dtype is torch.bfloat16:
            return func(*args, **kwargs)
        dtype = kwargs.get("out_dtype") or args[0].dtype
        halves = [self._empty(each, torch.bfloat16) for each in args[:2]]
        return self._empty(func(*halves, *args[2:], **{**kwargs, "out_dtype": torch.bfloat16}), dtype)

    def _stacked(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], alone: bool) -> Any:
        """Return ``out`` at once if it has the right size, as for norms of buckets: torch takes a millisecond."""
        parts, out = args[0], kwargs["out"]
        fits = len(args) == 1 and "dim" not in kwargs and out.shape == (len(parts), *parts[0].shape)
        return out if fits and isinstance(out, self._kind) else func(*args, **kwargs)

    def _make(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if func._schema.name not in _MAKERS or _device(kwargs, "cpu").type == "meta":
            return func(*args, **kwargs)
        whole = func._schema.name == "aten::full" and not isinstance(args[1], float)
        dtype = kwargs.get("dtype") or (torch.int64 if whole else torch.get_default_dtype())
        count = torch.Size(args[0]).numel()
        if (dtype.is_floating_point and len(args[0])) or count * dtype.itemsize >= _LARGE_OF.get(dtype, LARGE):
            if kwargs.get("pin_memory"):
                with self._fake:
                    return func(*args, **kwargs)
            return self._shown(func(*args, **{**kwargs, "device": _META}))
        return func(*args, **kwargs)

    def empty(self, like: Tensor) -> Tensor:
        """Return a fake tensor with the shape and strides of ``like``."""
        found = self._empty(like, like.dtype)
        for seen in self._seen:
            seen(_aten.empty_strided.default, (), {}, (), found)
        return found

    def _empty(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        return self._shown(torch.empty_strided(like.shape, like.stride(), dtype=dtype, device=_META))


def _form_of(kind: type[Tensor], given: Any) -> Any:
    """Return the form of an operation's arguments, without values of tensors; None if it cannot be determined."""
    if type(given) is kind:
        return (given.shape, given.stride(), given.dtype) if given.layout is torch.strided else None
    if type(given) in (tuple, list):
        found = []
        for each in given:
            if each is None or type(each) in _WORDS:
                found.append(each)
            elif (form := _form_of(kind, each)) is None:
                return None
            else:
                found.append(form)
        return tuple(found)
    if type(given) in (int, float, bool):
        return type(given), given
    return given if isinstance(given, torch._ops.OpOverload) else None


_WORDS = frozenset({str, torch.dtype, torch.device, torch.layout, torch.memory_format})


def _device(kwargs: Mapping[str, Any], otherwise: str) -> torch.device:
    return torch.device(kwargs.get("device") or otherwise)


def _address(tensor: Tensor) -> int:
    """Return an address that is unique for each byte of each storage, however large the storage is."""
    with torch._C.DisableTorchFunctionSubclass():  # the address may be read even if the weights may not
        return (tensor.untyped_storage()._cdata << 64) + tensor.storage_offset() * tensor.element_size()


@contextmanager
def kept_on_gpu() -> Iterator[None]:
    """Inside, two operations keep for backward the tensors that a GPU keeps, even if backward recomputes them.

    dropout: a mask of bytes instead of one in the input's dtype (in place, both keep the same) ·
    scaled_dot_product_attention with dropout: the tensors of attention without dropout, because the mask is drawn
    again; a CPU keeps all probabilities.
    """
    whole = torch._C.DispatchKey.CompositeImplicitAutograd

    drop, attend = _aten.dropout.default, _aten.scaled_dot_product_attention.default

    def dropout(values: Tensor, chance: float, training: bool) -> Tensor:
        if training and 0 < chance < 1:
            return torch.native_dropout(values, chance, True)[0]
        return drop._op_dk(whole, values, chance, training)

    def attention(
        query: Tensor, key: Tensor, value: Tensor, mask: Any = None, _: float = 0.0, *more: Any, **rest: Any
    ) -> Tensor:
        return attend._op_dk(whole, query, key, value, mask, 0.0, *more, **rest)

    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("dropout", dropout, "AutogradCPU")
        library.impl("scaled_dot_product_attention", attention, "AutogradCPU")
        yield


_one_at_a_time = threading.RLock()
"""Threads that plan wait for each other, because some replacements inside apply to the whole process."""


@contextmanager
def without_values(*seen: Seen, on_gpu: bool = False, report: kernels.Report | None = None) -> Iterator[NoValues]:
    """Inside, tensors have no values. An engine that is made inside must also be closed inside.

    seen: as for ``NoValues`` · on_gpu: the tensors stand for a GPU's (``kept_on_gpu``) · report: as for
    ``kernels.without_values``.
    """
    from torch._subclasses.fake_tensor import FakeTensor

    with ExitStack() as last:
        last.enter_context(_one_at_a_time)
        if torch.get_default_device().type != "cpu":
            last.enter_context(torch.device("cpu"))
        last.enter_context(torch.compiler.set_stance("force_eager"))
        last.enter_context(kernels.without_values(report))
        if on_gpu:
            last.enter_context(kept_on_gpu())
        last.enter_context(patch.object(FakeTensor, "data_ptr", _address, create=True))
        yield last.enter_context(NoValues(*seen))


_CONTAINERS = (list, dict, set)
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


def without_weights(model: nn.Module, mode: NoValues, *others: Any, instead: Mapping[nn.Module, Any] = _NONE) -> Any:
    """Copy ``model`` with fake parameters and fake floating-point buffers; ``model`` itself stays unchanged.

    Shared parameters stay shared. Hooks and attributes are copied as by ``copy.deepcopy``; objects that it cannot copy
    (locks, open files) are shared with the copy.

    others: objects that refer to the parameters, such as an optimizer or a scheduler; if given, the result is a list of
    the model and these, all copied · instead: replacements for some of its modules.
    """
    memo: dict[int, Any] = {id(module): other for module, other in instead.items()}
    for _, module in model.named_modules(memo=set(instead)):
        for parameter in module.parameters(recurse=False):
            if id(parameter) not in memo:
                made = nn.Parameter(mode.empty(parameter), requires_grad=parameter.requires_grad)
                own = {name: copy.copy(each) if isinstance(each, _CONTAINERS) else each
                       for name, each in vars(parameter).items()}  # fmt: skip
                vars(made).update(own)
                memo[id(parameter)] = made
        for buffer in module.buffers(recurse=False):
            if buffer.is_floating_point() or buffer.is_meta or buffer.nbytes >= LARGE:
                memo.setdefault(id(buffer), mode.empty(buffer))
    try:
        copies = copy.deepcopy((model, *others), dict(memo))
    except Exception:  # a class's own __deepcopy__ may raise anything
        _share_others(model, mode, memo)
        copies = copy.deepcopy((model, *others), memo)
    return list(copies) if others else copies[0]


def _share_others(model: nn.Module, mode: NoValues, memo: dict[int, Any]) -> None:
    """Add to ``memo`` the attributes of modules that cannot be copied: as they are, and tensors without values."""
    for module in model.modules():
        for name, value in vars(module).items():
            if name in _OF_EVERY_MODULE or id(value) in memo:
                continue
            try:
                copy.deepcopy(value, dict(memo))
            except Exception:
                memo[id(value)] = mode.empty(value) if isinstance(value, Tensor) else value
