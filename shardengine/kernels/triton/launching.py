"""The launch of every kernel, and the parts that several kernels share. Owns: launch options, tables of pointers.

Must not know: any operation. The functions under ``triton.jit`` are parts of kernels.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr
from triton.language import tensor as Value

from shardengine.errors import UsageError
from shardengine.kernels.random_bits import GOLDEN, MIX_1, MIX_2


@triton.jit
def _nothing() -> None:
    pass


INTERPRETED = not isinstance(_nothing, triton.JITFunction)
"""Whether TRITON_INTERPRET was set when kernels were declared: Python then runs them, on the CPU."""

_BY_HAND = tl.constexpr(INTERPRETED)
"""Whether conversions to and from bf16 use integers: Triton's interpreter truncates fp32 and loses bf16's denormals."""

OPTIONS = {"enable_fp_fusion": False}
"""The options of every launch: [Note: Bits of a kernel]."""

DTYPES = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float64: tl.float64,
}

GRANULE = tl.constexpr(16)
"""Elements. Ranges that begin and end at multiples of it are read and written 16 bytes at a time in every dtype."""

STEP, _MIX_1, _MIX_2 = tl.constexpr(GOLDEN), tl.constexpr(MIX_1), tl.constexpr(MIX_2)


def launch(kernel: Any, programs: int, on: Tensor, *arguments: Any, num_warps: int, **constants: Any) -> None:
    """Start ``programs`` programs of ``kernel`` on the device of ``on`` and on its current stream; none for 0."""
    if on.device.type == "cpu" and not INTERPRETED:
        raise UsageError(
            "Triton kernels were asked for on a CPU: set TRITON_INTERPRET=1 before Triton is first imported, or leave "
            "SHARDENGINE_KERNELS unset",
            code="kernels-triton-on-cpu",
        )
    if programs:
        with torch.cuda.device_of(on):
            kernel[(programs,)](*arguments, **constants, **OPTIONS, num_warps=num_warps)


def integers(values: list[int]) -> Tensor:
    """Return an int64 tensor on the host, whatever torch's default device is."""
    return torch.tensor(values, dtype=torch.int64, device="cpu")


def sent(table: Tensor, device: torch.device) -> Tensor:
    """Return a new host tensor on ``device``.

    It goes to CUDA from pinned memory, which torch keeps until the copy is done.
    """
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table


def blocks_of(count: int, block: int) -> int:
    """Return how many programs of ``block`` elements ``count`` elements need."""
    return -(-count // block)


def signed(word: int) -> int:
    """Return a 32-bit word as the signed number with the same bits.

    So a kernel's argument has one type for all words.
    """
    return word - (1 << 32) if word >= 1 << 31 else word


@triton.jit
def pointer(address: Value, DTYPE: constexpr, ALIGNED: constexpr) -> Value:
    """Return an address of a table as a pointer; ALIGNED: it is a multiple of 16."""
    made = address.to(tl.pointer_type(DTYPE), bitcast=True)
    if ALIGNED:
        made = tl.multiple_of(made, 16)
    return made


@triton.jit
def wide(values: Value) -> Value:
    """Return half-precision values as fp32, exactly; other dtypes unchanged."""
    if values.dtype == tl.bfloat16:
        if _BY_HAND:
            return (values.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
        else:
            return values.to(tl.float32)
    elif values.dtype == tl.float16:
        return values.to(tl.float32)
    else:
        return values


@triton.jit
def nearest(values: Value, DTYPE: constexpr) -> Value:
    """Return fp32 values as DTYPE, rounded to nearest, ties to even."""
    if _BY_HAND and DTYPE == tl.bfloat16:  # noqa: SIM300  a constexpr is written in capitals
        words = values.to(tl.uint32, bitcast=True)
        nearest = (words + 0x7FFF + ((words >> 16) & 1)) >> 16
        quiet_nan = (words >> 16) | 0x40
        return tl.where(values == values, nearest, quiet_nan).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return values.to(DTYPE)


@triton.jit
def is_finite(values: Value) -> Value:
    """Return whether values are neither infinite nor NaN."""
    return tl.abs(values) < float("inf")


@triton.jit
def mix(words: Value) -> Value:
    """Return the mix of random_bits: [Note: Random bits]."""
    words = (words ^ (words >> 16)) * _MIX_1
    words = (words ^ (words >> 13)) * _MIX_2
    return words ^ (words >> 16)


@triton.jit
def random_words(numbers: Value, k0: Value, k1: Value) -> Value:
    """Return the bits of random_bits: [Note: Random bits] for elements with these int64 numbers, as uint32.

    k0, k1: the key's words.
    """
    k0 = tl.cast(k0, tl.int32).to(tl.uint32, bitcast=True)
    k1 = tl.cast(k1, tl.int32).to(tl.uint32, bitcast=True)
    low = numbers.to(tl.uint32)
    high = (numbers >> 32).to(tl.uint32)
    return mix(mix(low ^ k0) + high * STEP + k1)
