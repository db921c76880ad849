"""The cost of an operation on any device: its FLOPs, and the bytes that it reads and writes.

Owns: formulas. Must not know: speeds, when an operation happens.

FLOPs come from torch's own formulas (``torch.utils.flop_counter``), and from formulas here for operations that a CPU
alone has. Bytes count each tensor as often as it is read or written, even if it stays in a cache between two
operations. A view of another tensor, or an allocation that is not filled, is no work.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from shardengine.planner.ledger import tensors_in

_aten = torch.ops.aten
DTYPES: Mapping[torch.dtype, str] = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"
}  # fmt: skip
_NO_WORK = re.compile(
    r"empty|unsafe_view|^(detach|alias|lift_fresh|resize|set_|record_stream|is_same_size|_local_scalar_dense|_version|item)"
)
_MATRICES = re.compile(
    r"mm(_|$)|mv(_|$)|conv|attention|rnn|lstm|gru|(^|_)linear($|_)|einsum|cdist|linalg|cholesky|fft|(^|_)dot$"
)
"""Operations whose arithmetic is more than one pass over their tensors."""
_ROWS = frozenset({"embedding", "index", "index_select", "gather", "take", "slice_backward", "select_backward"})
"""These operations read no more of their arguments than they return."""
_OVERWRITE = frozenset({"copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_"})
"""These operations do not read the tensor that they change."""


def name_of(func: Any) -> str:
    """Return the name without its overload, and without the namespace if that is torch's own: ``mm``."""
    name: str = func._schema.name
    return name.removeprefix("aten::")


@cache
def is_work(func: Any) -> bool:
    """Whether the operation takes time that depends on its tensors."""
    return not (func.is_view or func.namespace == "prim" or _NO_WORK.search(name_of(func)))


def flops(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> int | None:
    """Return the FLOPs; None if the operation multiplies matrices, or is of another library, and has no formula."""
    formula = _formula(func)
    if formula is not None:
        return int(formula(*args, **kwargs, out_val=result))
    return None if _needs_formula(func) else 0


@cache
def _formula(func: Any) -> Callable[..., int] | None:
    from torch.utils import flop_counter  # it imports Triton if that is installed

    packet = func._overloadpacket
    return _OURS.get(packet) or flop_counter.flop_registry.get(packet)


@cache
def _needs_formula(func: Any) -> bool:
    return func.namespace != "aten" or _MATRICES.search(name_of(func)) is not None


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    from torch.utils import flop_counter

    return flop_counter.sdpa_flop_count(query.shape, key.shape, value.shape)


def _attention_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    from torch.utils import flop_counter

    return flop_counter.sdpa_backward_flop_count(grad.shape, query.shape, key.shape, value.shape)


def _grouped(left: Tensor, right: Tensor, *_: Any, out_val: Tensor, **__: Any) -> int:
    """FLOPs of a grouped product. Each row of one side is multiplied with the matrix of its group alone."""
    if left.dim() == right.dim() == 2:  # the groups lie along the dimension that is summed
        return 2 * left.shape[0] * left.shape[1] * right.shape[1]
    return 2 * out_val.numel() * left.shape[-1]


def _matrix_and_vector(matrix: Tensor, *_: Any, **__: Any) -> int:
    return 2 * matrix.numel()


def _sum_and_matrix_and_vector(_sum: Tensor, matrix: Tensor, *_: Any, **__: Any) -> int:
    return 2 * matrix.numel()


_OURS: Mapping[Any, Callable[..., int]] = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    _aten._grouped_mm: _grouped,
    _aten.mv: _matrix_and_vector,
    _aten.dot: _matrix_and_vector,
    _aten.vdot: _matrix_and_vector,
    _aten.addmv: _sum_and_matrix_and_vector,
}


def bytes_moved(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> int:
    """Return the bytes read and written. A tensor that shows the same memory several times (``expand``) counts once."""
    name, results = name_of(func), list(tensors_in(result))
    if name in _ROWS:
        return 2 * sum(map(_bytes, results))
    changed = [args[place] for place in _changed(func) if place < len(args)]
    changed += [kwargs[key] for key in ("out",) if isinstance(kwargs.get(key), Tensor)]
    written = {id(each): each for each in (*results, *tensors_in(changed))}
    read = {id(each): each for each in (*tensors_in(args), *tensors_in(tuple(kwargs.values())))}
    if name in _OVERWRITE or "out" in kwargs:
        for each in written:
            read.pop(each, None)
    return sum(map(_bytes, written.values())) + sum(map(_bytes, read.values()))


@cache
def _changed(func: Any) -> tuple[int, ...]:
    """Return the positions of the arguments that the operation writes to."""
    arguments = enumerate(func._schema.arguments)
    return tuple(place for place, each in arguments if each.alias_info is not None and each.alias_info.is_write)


def _bytes(tensor: Tensor) -> int:
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def bytes_of_kernel(name: str, given: Mapping[str, Any], result: Any) -> int:
    """Return the bytes that an operation of ``shardengine.kernels`` must read and write (docs/limits.md, "Kernels")."""
    tensors = {key: sum(each.nbytes for each in tensors_in((value,))) for key, value in given.items()}
    if name == "flatten":
        return tensors["tensors"] + tensors["out"] * (2 if given.get("add") else 1)
    if name == "unflatten":
        elements = sum(each.numel() for each in tensors_in((given["outs"],)))
        return tensors["outs"] + elements * int(given["flat"].element_size())
    if name == "update":
        flats, spans = given["flats"], given["spans"]
        once = {"gradient", "low"}
        whole = sum(each.nbytes * (1 if key in once else 2) for key, each in flats.items())
        return round(whole * sum(span.end - span.start for span in spans) / max(flats["weight"].numel(), 1))
    return sum(tensors.values()) + sum(each.nbytes for each in tensors_in((result,)))
