"""Gradients and weights in fewer bits, and back: the declared arithmetic, in torch.

Must not know: messages and their receivers. The contracts of the operations are in ``operations.py``.

[Note: Blocks of integers] A block's scale is its largest magnitude divided by the largest integer (127, or 7 for int4),
fp32. An element becomes x / scale rounded to nearest (ties to even), or with noise floor(x / scale + u), where u is the
upper 24 bits of the element's random word over 2^24; then it is clamped. Divisions are correctly rounded. A block of
zeros has scale 0 and zeros; so has one whose scale would be 0. A block with a value that is not finite has scale NaN
and is NaN after decompression. int4 holds two elements in a byte, the even one in the lower half, in two's complement.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from shardengine.kernels.random_bits import Noise, random_bits

LEVELS = {"int8": 127, "int4": 7}
FLOATS = {"fp16": torch.float16, "bf16": torch.bfloat16}


class Compressed(NamedTuple):
    """The result of ``compress`` for ``length`` elements.

    values: fp16, bf16, int8, or for int4 uint8 with two elements in each · scales: fp32, one per block, None for floats
    """

    kind: str
    length: int
    block: int
    values: Tensor
    scales: Tensor | None = None


def allocated(kind: str, length: int, block: int, device: torch.device) -> Compressed:
    """Return uninitialized memory for ``length`` elements."""
    values, scales = _form(kind, length, block)
    made = torch.empty(values[0], dtype=values[1], device=device)
    if scales is None:
        return Compressed(kind, length, block, made)
    return Compressed(kind, length, block, made, torch.empty(scales[0], dtype=scales[1], device=device))


def is_as_allocated(compressed: Compressed, kind: str, length: int, block: int) -> bool:
    """Return whether the tensors have the lengths and dtypes of those of ``allocated``, and are contiguous."""
    values, scales = _form(kind, length, block)
    return compressed[:3] == (kind, length, block) and _is(compressed.values, values) and _is(compressed.scales, scales)


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
    if kind in FLOATS:
        made = _saturate(values.float(), FLOATS[kind], saturated)
        return _given(Compressed(kind, values.numel(), block, made), out)
    levels = LEVELS[kind]
    rows = _in_blocks(values.float(), block)
    scales = _divide(rows.abs().amax(dim=1), levels)
    scales = torch.where(torch.isfinite(scales), scales, torch.nan)
    scaled = torch.where(scales.unsqueeze(1) == 0, 0.0, rows / scales.unsqueeze(1))
    if noise is not None:
        words = random_bits(noise, first, rows.numel(), values.device)
        fraction = ((words >> 8) & 0xFFFFFF).float() * 2.0**-24
        scaled = torch.floor(scaled + fraction.view(rows.shape))
    integers = torch.round(scaled).clamp(-levels, levels).nan_to_num(0.0).to(torch.int8).view(-1)
    if kind == "int4":
        pairs = integers.view(-1, 2).to(torch.uint8) & 15
        integers = (pairs[:, 0] | pairs[:, 1] << 4)[: (values.numel() + 1) // 2]
    else:
        integers = integers[: values.numel()]
    return _given(Compressed(kind, values.numel(), block, integers.contiguous(), scales), out)


def decompress(compressed: Compressed, out: Tensor) -> None:
    """See ``operations.decompress``."""
    kind, length, block, values, scales = compressed
    if scales is None:
        out.copy_(values)
        return
    if kind == "int4":
        halves = torch.stack([values & 15, values >> 4], dim=1).view(-1)[:length].to(torch.int8)
        values = halves - ((halves & 8) << 1)
    wide = _in_blocks(values.float(), block) * scales.unsqueeze(1)
    out.copy_(wide.view(-1)[:length])


def residual(values: Tensor, compressed: Compressed, out: Tensor, *, divisor: float = 1.0) -> None:
    """See ``operations.residual``."""
    decompress(compressed, out)
    subtract(values, out, divisor)


def subtract(values: Tensor, decoded: Tensor, divisor: float) -> None:
    """Replace ``decoded`` by the residual."""
    torch.sub(values, decoded, out=decoded)
    decoded.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
    if divisor != 1:
        torch.div(decoded, _number(divisor, decoded), out=decoded)


def _form(kind: str, length: int, block: int) -> tuple[tuple[int, torch.dtype], tuple[int, torch.dtype] | None]:
    """Return (elements, dtype) of the values and of the scales."""
    if kind in FLOATS:
        return (length, FLOATS[kind]), None
    values = (-(-length // 2), torch.uint8) if kind == "int4" else (length, torch.int8)
    return values, (-(-length // block), torch.float32)


def _is(tensor: Tensor | None, form: tuple[int, torch.dtype] | None) -> bool:
    if tensor is None or form is None:
        return tensor is None and form is None
    return tensor.dim() == 1 and (len(tensor), tensor.dtype) == form and tensor.is_contiguous()


def _given(made: Compressed, out: Compressed | None) -> Compressed:
    """Return ``made``, or ``out`` after ``made`` is copied to it."""
    if out is None:
        return made
    for place, part in zip(out[3:], made[3:], strict=True):
        if part is not None and place is not None:
            place.copy_(part)
    return out


def _saturate(values: Tensor, dtype: torch.dtype, saturated: Tensor | None) -> Tensor:
    """Round to ``dtype``. Finite values that would become infinite become the largest number, and are counted."""
    largest = torch.finfo(dtype).max
    rounded = values.to(dtype)
    if values.device.type == "cpu" and values.numel():  # one pass, which mostly saves the passes below
        least, most = values.aminmax()
        if -largest <= least and most <= largest:  # false if there is a NaN
            return rounded
    beyond = torch.isinf(rounded) & torch.isfinite(values)
    if saturated is not None:
        saturated += beyond.sum()
    return torch.where(beyond, values.clamp(-largest, largest).to(dtype), rounded)


def _in_blocks(flat: Tensor, block: int) -> Tensor:
    """Return [blocks, block], the last block padded with zeros."""
    return torch.cat([flat, flat.new_zeros(-flat.numel() % block)]).view(-1, block)


def _divide(values: Tensor, divisor: float) -> Tensor:
    """Divide with correct rounding on every device: a host scalar would become a reciprocal on CUDA."""
    return values / _number(divisor, values)


def _number(value: float, beside: Tensor) -> Tensor:
    return torch.full((), value, dtype=torch.float32, device=beside.device)
