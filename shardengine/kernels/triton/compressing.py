"""Gradients and weights in fewer bits, and back, one launch each: compression: [Note: Blocks of integers].

Must not know: messages and their receivers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr
from triton.language import tensor as Value

from shardengine.kernels.compression import FLOATS, LEVELS, Compressed, allocated, subtract
from shardengine.kernels.random_bits import Noise
from shardengine.kernels.triton.launching import blocks_of, is_finite, launch, nearest, random_words, signed, wide

BLOCK, WARPS = 2048, 8
_ROUNDER = tl.constexpr(1.5 * 2**23)
"""Adding it to a number below 2^22 and subtracting it again leaves the nearest integer, ties to even."""


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
    count = values.numel()
    out = allocated(kind, count, block, values.device) if out is None else out
    if kind in FLOATS:
        launch(_saturate_kernel, blocks_of(count, BLOCK), values, values, out.values, saturated, count,
               LARGEST=torch.finfo(FLOATS[kind]).max, BLOCK=BLOCK, num_warps=WARPS)  # fmt: skip
        return out
    width = triton.next_power_of_2(block)
    rows = max(1, BLOCK // width)
    k0, k1 = (signed(word) for word in noise.key) if noise is not None else (0, 0)
    launch(_integers_kernel, blocks_of(count, rows * block), values, values, out.values, out.scales, count, first,
           k0, k1, LEVELS=LEVELS[kind], PACKED=kind == "int4", NOISE=noise is not None, BLOCK=block, WIDTH=width,
           ROWS=rows, num_warps=WARPS)  # fmt: skip
    return out


def decompress(compressed: Compressed, out: Tensor) -> None:
    """See ``operations.decompress``."""
    kind, count, block, values, scales = compressed
    launch(_widen_kernel, blocks_of(count, BLOCK), out, values, scales, out, count, PACKED=kind == "int4", EACH=block,
           BLOCK=BLOCK, num_warps=WARPS)  # fmt: skip


def residual(values: Tensor, compressed: Compressed, out: Tensor, *, divisor: float = 1.0) -> None:
    """See ``operations.residual``: torch subtracts."""
    decompress(compressed, out)
    subtract(values, out, divisor)


@triton.jit
def _saturate_kernel(
    values: Value,
    made: Value,
    saturated: Value,
    count: Value,
    LARGEST: constexpr,
    BLOCK: constexpr,
) -> None:
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < count
    exact = wide(tl.load(values + place, mask=mask, other=0.0))
    rounded = nearest(exact, made.dtype.element_ty)
    beyond = is_finite(exact) & (tl.abs(wide(rounded)) == float("inf"))
    clamped = nearest(tl.where(exact > 0, LARGEST, -LARGEST).to(tl.float32), made.dtype.element_ty)
    tl.store(made + place, tl.where(beyond, clamped, rounded), mask=mask)
    if saturated is not None:
        number = tl.sum(beyond.to(tl.int32), axis=0)
        if number > 0:
            tl.atomic_add(saturated, number.to(tl.int64))


@triton.jit
def _clamped(values: Value, LARGEST: constexpr) -> Value:
    return tl.where(values > LARGEST, LARGEST, tl.where(values < -LARGEST, -LARGEST, values)).to(tl.float32)


@triton.jit(do_not_specialize=["first", "k0", "k1"])
def _integers_kernel(
    values: Value, made: Value, scales: Value, count: Value, first: Value, k0: Value, k1: Value,
    LEVELS: constexpr, PACKED: constexpr, NOISE: constexpr, BLOCK: constexpr, WIDTH: constexpr, ROWS: constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, WIDTH)
    place = row[:, None] * BLOCK + lane[None, :]
    mask = (lane < BLOCK)[None, :] & (place < count)
    exact = wide(tl.load(values + place, mask=mask, other=0.0))
    sizes = tl.where(is_finite(exact), tl.abs(exact), float("inf"))
    scale = tl.div_rn(tl.max(sizes, axis=1), tl.full([ROWS], LEVELS, tl.float32))
    scale = tl.where(is_finite(scale), scale, float("nan"))
    tl.store(scales + row, scale, mask=row * BLOCK < count)

    each = tl.broadcast_to(scale[:, None], [ROWS, WIDTH])
    scaled = tl.where(each == 0, 0.0, tl.div_rn(exact, tl.where(each == 0, 1.0, each)))
    if NOISE:
        words = random_words(place + first, k0, k1)
        scaled = scaled + (words >> 8).to(tl.float32) * 5.9604644775390625e-08  # 2^-24
    scaled = _clamped(tl.where(scaled == scaled, scaled, 0.0), LEVELS + 1)
    whole = (scaled + _ROUNDER) - _ROUNDER
    if NOISE:
        whole = tl.where(whole > scaled, whole - 1.0, whole)  # tl.floor takes a negative denormal for zero on a GPU
    integers = _clamped(whole, LEVELS).to(tl.int32)
    if PACKED:
        even, odd = tl.split(tl.reshape(integers, [ROWS, WIDTH // 2, 2]))
        half = tl.arange(0, WIDTH // 2)
        at = row[:, None] * (BLOCK // 2) + half[None, :]
        inside = (half < BLOCK // 2)[None, :] & (at < (count + 1) // 2)
        tl.store(made + at, ((even & 15) | ((odd & 15) << 4)).to(tl.uint8), mask=inside)
    else:
        tl.store(made + place, integers.to(tl.int8), mask=mask)


@triton.jit
def _widen_kernel(
    values: Value,
    scales: Value,
    out: Value,
    count: Value,
    PACKED: constexpr,
    EACH: constexpr,
    BLOCK: constexpr,
) -> None:
    begin = tl.program_id(0).to(tl.int64) * BLOCK
    place = begin + tl.arange(0, BLOCK)
    mask = place < count
    if PACKED:
        half = begin // 2 + tl.arange(0, BLOCK // 2)
        pairs = tl.load(values + half, mask=half < (count + 1) // 2, other=0).to(tl.int32)
        halves = tl.reshape(tl.join(pairs & 15, pairs >> 4), [BLOCK])
        found = (halves - ((halves & 8) << 1)).to(tl.float32)
    else:
        found = wide(tl.load(values + place, mask=mask, other=0)).to(tl.float32)
    if scales is not None:
        found = found * tl.load(scales + place // EACH, mask=mask, other=0.0)
    tl.store(out + place, nearest(found, out.dtype.element_ty), mask=mask)
