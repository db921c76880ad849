"""The two sums: over ranks in tree order, and of squares. Their order is declared in ``reference.py``.

Must not know: process groups, what the sums are for.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr
from triton.language import tensor as Value

from shardengine.kernels.reference import LANES, ROWS
from shardengine.kernels.triton.launching import DTYPES, blocks_of, is_finite, launch, nearest, pointer, table, wide

BLOCK, WARPS = 2048, 8
LANE_WARPS = 16


def ordered_sum(
    terms: Sequence[Tensor],
    out: Tensor,
    *,
    total: Tensor | None = None,
    divisor: int = 1,
    rounded: torch.dtype = torch.float32,
    reduce_dtype: torch.dtype = torch.float32,
    nonfinite: Tensor | None = None,
) -> None:
    """See ``operations.ordered_sum``. Terms at equal distances, slices of one buffer above all, need no table."""
    if len({term.dtype for term in terms}) > 1:
        terms = [term.float() for term in terms]  # exact, and so are the sums
    addresses = [term.data_ptr() for term in terms]
    size = terms[0].element_size()
    distance = addresses[1] - addresses[0] if len(terms) > 1 else 0
    regular = distance % size == 0 and addresses == [addresses[0] + i * distance for i in range(len(terms))]
    where = terms[0] if regular else table([(address,) for address in addresses], out.device)
    flag = None if nonfinite is None else nonfinite.view(torch.uint8)
    middle = rounded if rounded is not out.dtype else torch.float32
    launch(_ordered_sum_kernel, blocks_of(out.numel(), BLOCK), out, where, distance // size if regular else 0, total,
           out, flag, out.numel(), float(divisor), TERM=DTYPES[terms[0].dtype], COUNT=len(terms), REGULAR=regular,
           ALIGNED=all(address % 16 == 0 for address in addresses), DIVIDED=divisor != 1, ROUNDED=DTYPES[middle],
           REDUCED=DTYPES[reduce_dtype], BLOCK=BLOCK, num_warps=WARPS)  # fmt: skip


def sum_of_squares(tensor: Tensor) -> Tensor:
    """See ``operations.sum_of_squares``: a launch for the blocks, and one for their sums if there are several."""
    count = tensor.numel()
    blocks = blocks_of(count, LANES * ROWS)
    if not blocks:
        return torch.zeros((), dtype=torch.float64, device=tensor.device)
    sums = torch.empty(blocks, dtype=torch.float64, device=tensor.device)
    launch(_squares_kernel, blocks, tensor, tensor, sums, count, ROWS=ROWS, LANES=LANES, num_warps=LANE_WARPS)
    if blocks == 1:
        return sums[0]
    total = torch.empty((), dtype=torch.float64, device=tensor.device)
    rows = blocks_of(blocks, LANES)  # 1 up to 268 million elements
    launch(_lanes_kernel, 1, tensor, sums, total, blocks, ROWS=rows, LANES=LANES, num_warps=LANE_WARPS)
    return total


@triton.jit
def _tree(
    where: Value, distance: Value, place: Value, mask: Value, FIRST: constexpr, COUNT: constexpr, TERM: constexpr,
    REGULAR: constexpr, ALIGNED: constexpr, REDUCED: constexpr,
) -> Value:  # fmt: skip
    """The terms FIRST … FIRST + COUNT - 1 in fp32, added in tree order. Neighbours added pair by pair, an odd one out
    moving up, is the same as: the largest power of two below COUNT first, the rest, and then both."""
    if COUNT == 1:
        if REGULAR:
            values = tl.load(where + tl.cast(distance, tl.int64) * FIRST + place, mask=mask, other=0.0)
        else:
            values = tl.load(pointer(tl.load(where + FIRST), TERM, ALIGNED) + place, mask=mask, other=0.0)
        return wide(values)
    else:
        HALF: constexpr = triton.next_power_of_2(COUNT) // 2
        left = _tree(where, distance, place, mask, FIRST, HALF, TERM, REGULAR, ALIGNED, REDUCED)
        right = _tree(where, distance, place, mask, FIRST + HALF, COUNT - HALF, TERM, REGULAR, ALIGNED, REDUCED)
        return wide(nearest(left + right, REDUCED))


@triton.jit
def _ordered_sum_kernel(
    where: Value, distance: Value, total: Value, out: Value, nonfinite: Value, count: Value, divisor: Value,
    TERM: constexpr, COUNT: constexpr, REGULAR: constexpr, ALIGNED: constexpr, DIVIDED: constexpr,
    ROUNDED: constexpr, REDUCED: constexpr, BLOCK: constexpr,
) -> None:  # fmt: skip
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < count
    found = _tree(where, distance, place, mask, 0, COUNT, TERM, REGULAR, ALIGNED, REDUCED)
    if total is not None:
        found = wide(tl.load(total + place, mask=mask, other=0.0)) + found
    if DIVIDED:
        found = tl.div_rn(found, tl.zeros_like(found) + divisor)
    result = nearest(wide(nearest(found, ROUNDED)), out.dtype.element_ty)
    tl.store(out + place, result, mask=mask)
    if nonfinite is not None:
        bad = mask & (is_finite(wide(result)) == 0)
        if tl.max(bad.to(tl.int32), axis=0) > 0:
            tl.store(nonfinite, 1)


@triton.jit
def _pairs(lanes: Value, LANES: constexpr) -> Value:
    """Neighbours added pair by pair, down to one. A reduction of two terms has but one order."""
    if LANES == 1:
        return lanes
    else:
        return _pairs(tl.sum(tl.reshape(lanes, [LANES // 2, 2]), axis=1), LANES // 2)


@triton.jit
def _squares_kernel(tensor: Value, sums: Value, count: Value, ROWS: constexpr, LANES: constexpr) -> None:
    block = tl.program_id(0).to(tl.int64)
    place = block * (ROWS * LANES) + tl.arange(0, LANES)
    lanes = tl.zeros([LANES], tl.float64)
    for _ in tl.static_range(ROWS):
        values = wide(tl.load(tensor + place, mask=place < count, other=0.0)).to(tl.float64)
        lanes += values * values
        place += LANES
    tl.store(sums + block + tl.arange(0, 1), _pairs(lanes, LANES))


@triton.jit
def _lanes_kernel(sums: Value, total: Value, count: Value, ROWS: constexpr, LANES: constexpr) -> None:
    place = tl.arange(0, LANES)
    lanes = tl.zeros([LANES], tl.float64)
    for _ in range(ROWS):
        lanes += tl.load(sums + place, mask=place < count, other=0.0)
        place += LANES
    tl.store(total + tl.arange(0, 1), _pairs(lanes, LANES))
