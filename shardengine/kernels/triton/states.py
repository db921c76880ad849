"""Reading and writing of states in fp32, bf16 and codes of 8 bits, and of weights with remainders, as in ``moments``.

Must not know: the update.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import constexpr
from triton.language import tensor as Value

from shardengine.kernels import moments
from shardengine.kernels.triton.launching import STEP, is_finite, mix, nearest, random_words, wide

_SIGNED, _UNSIGNED = moments.code_of("exp_avg"), moments.code_of("exp_avg_sq")
_SIGNED_BASE, _BASE = constexpr(_SIGNED.base), constexpr(_UNSIGNED.base)
_SIGNED_CUT, _CUT = constexpr(_SIGNED.cut), constexpr(_UNSIGNED.cut)
_SIGNED_TOP, _TOP = constexpr(_SIGNED.top), constexpr(_UNSIGNED.top)
_SIGNED_UNIT, _UNIT = constexpr(_SIGNED.unit), constexpr(_UNSIGNED.unit)
_SIGNED_MOST, _MOST = constexpr(_SIGNED.most), constexpr(_UNSIGNED.most)
_ROW = constexpr(moments.BLOCK)
_SHIFT, _NEAREST = constexpr(moments.SHIFT), constexpr(1 << (moments.SHIFT - 1))


@triton.jit
def words_in_rows(numbers: Value, k0: Value, k1: Value) -> Value:
    """Return the bits of random_bits: [Note: Random bits in a row] for elements with these int64 numbers, as uint32."""
    return mix(random_words(numbers >> 8, k0, k1) + (numbers & 255).to(tl.uint32) * STEP)


@triton.jit
def joined(weights: Value, remainders: Value) -> Value:
    """Return the fp32 values of bf16 weights and int8 remainders: moments: [Note: Remainders]."""
    bits = weights.to(tl.uint16, bitcast=True).to(tl.int32)
    size = bits & 0x7FFF
    left = remainders.to(tl.int32)
    left = tl.where((size >= 0x7F80) | ((size == 0) & (left < 0)), 0, left)
    return (((bits << 8) + left) << 8).to(tl.float32, bitcast=True)


@triton.jit
def split(values: Value, words: Value, weights: Value, remainders: Value, mask: Value) -> None:
    """Store fp32 values as weights and remainders at these pointers. words: random words; None: round to nearest."""
    bits = values.to(tl.uint32, bitcast=True)
    if words is None:
        upper = (bits + (0x7F + ((bits >> 8) & 1))) >> 8
    else:
        upper = (bits + (mix(words + STEP) & 0xFF)) >> 8
    high = (upper + 0x7F + ((upper >> 8) & 1)) >> 8
    left = tl.minimum(upper.to(tl.int32) - (high << 8).to(tl.int32), 127)
    finite = is_finite(values)
    weight = tl.where(finite, (high << 16).to(tl.float32, bitcast=True), values)
    tl.store(weights, nearest(weight, weights.dtype.element_ty), mask=mask)
    tl.store(remainders, tl.where(finite, left, 0).to(tl.int8), mask=mask)


@triton.jit
def read_state(state: Value, scales: Value, place: Value, mask: Value, HAS_SIGN: constexpr) -> Value:
    """Return elements ``place`` of a state as fp32. scales: those of its blocks; None if it has none."""
    stored = tl.load(state + place, mask=mask)
    if scales is None:
        return wide(stored)
    else:
        code = stored.to(tl.uint32)
        size = code & (_SIGNED_MOST if HAS_SIGN else _MOST)
        number = ((size << _SHIFT) + (_SIGNED_BASE if HAS_SIGN else _BASE)).to(tl.float32, bitcast=True)
        value = ((number - (_SIGNED_CUT if HAS_SIGN else _CUT)) * (_SIGNED_UNIT if HAS_SIGN else _UNIT)) * tl.load(
            scales + place // _ROW, mask=mask
        )
        if HAS_SIGN:
            value = (value.to(tl.uint32, bitcast=True) ^ ((code & 128) << 24)).to(tl.float32, bitcast=True)
        return value


@triton.jit
def write_state(
    state: Value, scales: Value, place: Value, mask: Value, values: Value, words: Value, HAS_SIGN: constexpr
) -> None:
    """Store elements ``place`` of a state; ``place`` begins with a block.

    words: random words, whose lower halves are used; None: round to nearest.
    """
    if scales is None:
        if words is None or state.dtype.element_ty == tl.float32:
            tl.store(state + place, nearest(values, state.dtype.element_ty), mask=mask)
        else:
            bits = values.to(tl.uint32, bitcast=True) + (words & 0xFFFF)
            moved = (bits & 0xFFFF0000).to(tl.float32, bitcast=True)
            moved = tl.where(is_finite(values), moved, values)
            tl.store(state + place, nearest(moved, state.dtype.element_ty), mask=mask)
    else:
        bits = values.to(tl.uint32, bitcast=True)
        sizes = tl.where(mask, bits & 0x7FFFFFFF, 0)
        rows = tl.reshape(sizes, [sizes.shape[0] // _ROW, _ROW])
        largest = tl.max(rows.to(tl.int32), axis=1, keep_dims=True)
        filled = (largest >= 0x0D800000) & (largest < 0x7F800000)
        scale = largest.to(tl.float32, bitcast=True)
        part = tl.div_rn(
            tl.full(scale.shape, (_SIGNED_TOP if HAS_SIGN else _TOP), tl.float32), tl.where(filled, scale, 1.0)
        )
        number = rows.to(tl.float32, bitcast=True) * part + (_SIGNED_CUT if HAS_SIGN else _CUT)
        if words is None:
            noise = tl.full(rows.shape, _NEAREST, tl.int32)
        else:
            noise = tl.reshape((((words & 0xFFFF) << 3) + 4).to(tl.int32), rows.shape)
        size = (number.to(tl.int32, bitcast=True) + noise - (_SIGNED_BASE if HAS_SIGN else _BASE)) >> _SHIFT
        size = tl.minimum(tl.maximum(size, 0), (_SIGNED_MOST if HAS_SIGN else _MOST))
        if HAS_SIGN:
            size = size | (tl.reshape(bits, rows.shape) >> 24 & 128).to(tl.int32)
        codes = tl.reshape(tl.where(filled, size, 0), sizes.shape).to(tl.uint8)
        tl.store(state + place, codes, mask=mask)
        nan = tl.full(scale.shape, float("nan"), tl.float32)
        kept = tl.where(filled, scale, tl.where(largest < 0x0D800000, 0.0, nan))
        first = tl.reshape(place, rows.shape)
        begins = tl.reshape(mask, rows.shape) & (first % _ROW == 0)
        tl.store(scales + first // _ROW, tl.broadcast_to(kept, rows.shape), mask=begins)
