"""Every operation for tensors without values: the shapes and dtypes of results, and the errors.

Such tensors are meta tensors, and fake ones of any device (``operations.without_values``). Nothing is computed. All
requirements in the operations' docstrings are checked here, at any cost: one device, contiguous, equal lengths, dtypes
that an implementation knows. Must not know: values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from shardengine.kernels.compression import Compressed, allocated
from shardengine.kernels.factored import Factored
from shardengine.kernels.moments import BLOCK, KEPT_IN, REMAINDER, SCALE
from shardengine.kernels.random_bits import Noise
from shardengine.kernels.rules import Rule
from shardengine.kernels.spans import Spans

_FLOATING = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def flatten(
    tensors: Sequence[Tensor], starts: Sequence[int], out: Tensor, *, scale: float = 1.0, add: bool = False
) -> None:
    """See ``operations.flatten``."""
    _require("flatten", {"out": out, **_numbered("tensor", tensors)}, flat=("out",))
    if len({tensor.dtype for tensor in tensors}) > 1:
        raise ValueError(f"flatten: expected tensors of one dtype, got {[tensor.dtype for tensor in tensors]}")


def unflatten(flat: Tensor, starts: Sequence[int], outs: Sequence[Tensor]) -> None:
    """See ``operations.unflatten``."""
    _require("unflatten", {"flat": flat, **_numbered("out", outs)}, flat=("flat",))


def ordered_sum(
    terms: Sequence[Tensor],
    out: Tensor,
    *,
    total: Tensor | None = None,
    divisor: float = 1,
    rounded: torch.dtype = torch.float32,
    reduce_dtype: torch.dtype = torch.float32,
    nonfinite: Tensor | None = None,
) -> None:
    """See ``operations.ordered_sum``."""
    if not terms:
        raise ValueError("ordered_sum: expected at least one term, got none")
    tensors = {"out": out, **_numbered("term", terms)} | ({} if total is None else {"total": total})
    _require("ordered_sum", tensors, flat=tuple(tensors))
    _require_lengths("ordered_sum", tensors)
    _require_scalar("ordered_sum", "nonfinite", nonfinite, torch.bool, out.device)


def sum_of_squares(tensor: Tensor) -> Tensor:
    """See ``operations.sum_of_squares``."""
    _require("sum_of_squares", {"tensor": tensor}, flat=("tensor",))
    return torch.zeros((), dtype=torch.float64, device=tensor.device)  # a single number may have a value: a finite one


def squares_of_slice(form: Factored, values: Tensor, offset: int) -> Tensor:
    """See ``operations.squares_of_slice``."""
    _require("squares_of_slice", {"values": values}, flat=("values",))
    return torch.empty(2, form.all_rows + form.all_columns, dtype=torch.float64, device=values.device)


def exact_sum_of_squares(values: Tensor) -> Tensor:
    """See ``operations.exact_sum_of_squares``."""
    _require("exact_sum_of_squares", {"values": values}, flat=("values",))
    return torch.empty(2, dtype=torch.float64, device=values.device)


def direction_of_slice(form: Factored, gradient: Tensor, offset: int, scales: Tensor, most: float) -> Tensor:
    """See ``operations.direction_of_slice``."""
    _require("direction_of_slice", {"gradient": gradient, "scales": scales}, flat=("gradient", "scales"))
    return torch.empty_like(gradient)


def step_along(
    weight: Tensor,
    form: Factored,
    gradient: Tensor,
    offset: int,
    scales: Tensor,
    most: float,
    factors: tuple[float, float],
) -> None:
    """See ``operations.step_along``."""
    _require_lengths("step_along", {"weight": weight, "gradient": gradient})


def squares_of_direction(form: Factored, gradient: Tensor, offset: int, scales: Tensor, most: float) -> Tensor:
    """See ``operations.squares_of_direction``."""
    return exact_sum_of_squares(direction_of_slice(form, gradient, offset, scales, most))


def update(
    flats: Mapping[str, Tensor],
    spans: Spans,
    rule: Rule,
    *,
    factor: Tensor | None = None,
    skip: Tensor | None = None,
    noise: Noise | None = None,
    state_noise: Noise | None = None,
) -> None:
    """See ``operations.update``."""
    missing = {"weight", "gradient", *rule.states} - flats.keys()
    if missing:
        raise ValueError(f"update: expected {', '.join(sorted(missing))} among the tensors, got {sorted(flats)}")
    coded = {name for name in rule.states if flats[name].dtype is torch.uint8}
    scales = {name + SCALE for name in coded}
    if missing := scales - flats.keys():
        raise ValueError(f"update: expected {', '.join(sorted(missing))} among the tensors, got {sorted(flats)}")
    floating = {name: flat for name, flat in flats.items() if name not in {*coded, REMAINDER}}
    if REMAINDER in flats and (flats["weight"].dtype is not torch.bfloat16 or flats[REMAINDER].dtype is not torch.int8):
        came = f"{flats['weight'].dtype} and {flats[REMAINDER].dtype}"
        raise ValueError(f"update: expected a weight in bf16 and its remainder in int8, got {came}")
    if REMAINDER in flats and "low" in flats:
        raise ValueError("update: expected low or remainder, got both")
    _require("update", floating, flat=tuple(floating))
    _require_lengths("update", {name: flat for name, flat in flats.items() if name not in scales})
    for name in rule.states:
        if flats[name].dtype not in KEPT_IN.values():
            raise ValueError(f"update: expected {name} in fp32, bf16 or uint8, got {flats[name].dtype}")
    blocks = -(-flats["weight"].numel() // BLOCK)
    for name in scales:
        if flats[name].numel() != blocks:
            raise ValueError(f"update: expected {name} to have {blocks} elements, got {flats[name].numel()}")
    for span in spans if coded else ():
        if span.start % BLOCK:
            raise ValueError(f"update: expected spans that begin at multiples of {BLOCK} elements, got {span}")
    if spans and spans[-1].end > flats["weight"].numel():
        raise ValueError(f"update: expected spans inside of {flats['weight'].numel()} elements, got {spans[-1]}")
    _require_scalar("update", "factor", factor, torch.float32, flats["weight"].device)
    _require_scalar("update", "skip", skip, torch.bool, flats["weight"].device)


def compress(
    values: Tensor,
    kind: str,
    *,
    block: int = 256,
    noise: Noise | None = None,
    first: int = 0,
    saturated: Tensor | None = None,
    out: Compressed | None = None,
) -> Compressed:
    """See ``operations.compress``."""
    _require("compress", {"values": values}, flat=("values",))
    _require_scalar("compress", "saturated", saturated, torch.int64, values.device)
    return allocated(kind, values.numel(), block, values.device) if out is None else out


def decompress(compressed: Compressed, out: Tensor) -> None:
    """See ``operations.decompress``."""
    _require("decompress", {"out": out}, flat=("out",))
    if out.numel() != compressed.length:
        raise ValueError(f"decompress: expected out to have {compressed.length} elements, got {out.numel()}")


def residual(values: Tensor, compressed: Compressed, out: Tensor, *, divisor: float = 1.0) -> None:
    """See ``operations.residual``."""
    _require("residual", {"values": values, "out": out}, flat=("values", "out"))
    _require_lengths("residual", {"values": values, "out": out})
    if out.numel() != compressed.length:
        raise ValueError(f"residual: expected out to have {compressed.length} elements, got {out.numel()}")
    if (values.dtype, out.dtype) != (torch.float32, torch.float32):
        raise ValueError(f"residual: expected values and out in fp32, got {values.dtype} and {out.dtype}")


def _numbered(name: str, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
    return {f"{name} {number}": tensor for number, tensor in enumerate(tensors)}


def _require(operation: str, tensors: Mapping[str, Tensor], flat: Sequence[str]) -> None:
    """Require tensors to be contiguous and floating, on the first one's device; those in ``flat`` to be 1-D."""
    device = next(iter(tensors.values())).device
    for name, tensor in tensors.items():
        if tensor.device != device:
            raise ValueError(
                f"{operation}: expected all tensors on one device, {device}, got {name} on {tensor.device}"
            )
        if not tensor.is_contiguous() or (name in flat and tensor.dim() != 1):
            wanted = "a flat, contiguous" if name in flat else "a contiguous"
            raise ValueError(f"{operation}: expected {name} to be {wanted} tensor, got {tuple(tensor.shape)} with "
                             f"strides {tensor.stride()}")  # fmt: skip
        if tensor.dtype not in _FLOATING:
            raise ValueError(f"{operation}: expected {name} to be floating, got {tensor.dtype}")


def _require_lengths(operation: str, tensors: Mapping[str, Tensor]) -> None:
    lengths = {name: tensor.numel() for name, tensor in tensors.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"{operation}: expected tensors of one length, got {lengths}")


def _require_scalar(operation: str, name: str, value: Tensor | None, dtype: torch.dtype, device: torch.device) -> None:
    if value is not None and (value.device != device or value.dim() or value.dtype is not dtype):
        raise ValueError(
            f"{operation}: expected {name} to be 0-dim, {dtype}, on {device}, got {tuple(value.shape)}, "
            f"{value.dtype}, on {value.device}"
        )
