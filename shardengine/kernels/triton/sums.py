"""The two sums: over ranks in tree order, and of squares. Their order is declared in ``reference.py``.

Must not know: process groups, the use of the sums.

[Note: Groups of terms] Terms are added in groups of eight, whose tree is unrolled; a loop goes over the groups, so that
one compiled kernel serves any number of them. The groups' sums are the leaves of a tree again. Its finished subtrees
wait in registers: at level l the one over 2^l groups that has no right neighbour yet. As in a binary counter, the sum
of group g is joined to the sums that wait at level 0, 1, … as long as the bits of g are ones, and then waits itself at
the level of its first zero. (It is also stored at higher levels whose bit is zero; these are overwritten before they
are read.) The last group is joined to all waiting sums, at the levels of its ones: an odd one out moves up past the
levels that have no left neighbour for it.
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
from shardengine.kernels.triton.launching import (
    DTYPES,
    blocks_of,
    integers,
    is_finite,
    launch,
    nearest,
    pointer,
    sent,
    wide,
)

BLOCK, WARPS = 2048, 8
LOOP_BLOCK = 1024
"""The block if terms are added in several groups: four elements per thread, as every level takes registers for each."""
GROUP, LEVELS = 8, 7
LANE_WARPS = 16


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
    """See ``operations.ordered_sum``. Terms at equal distances, such as slices of one buffer, need no table.

    More than GROUP · 2^LEVELS terms, 1024, are added in several launches with sums in memory of their own.
    """
    if len({term.dtype for term in terms}) > 1:
        terms = [term.float() for term in terms]  # exact, and so are the sums
    if len(terms) > (most := GROUP << LEVELS):
        parts = torch.empty(blocks_of(len(terms), most), out.numel(), dtype=torch.float32, device=out.device)
        for number, part in enumerate(parts):
            ordered_sum(terms[number * most : (number + 1) * most], part, reduce_dtype=reduce_dtype)
        terms = list(parts)
    addresses = [term.data_ptr() for term in terms]
    size = terms[0].element_size()
    distance = addresses[1] - addresses[0] if len(terms) > 1 else 0
    regular = distance % size == 0 and addresses == [addresses[0] + i * distance for i in range(len(terms))]
    where = terms[0] if regular else sent(integers(addresses), out.device)
    flag = None if nonfinite is None else nonfinite.view(torch.uint8)
    middle = rounded if rounded is not out.dtype else torch.float32
    several = len(terms) > GROUP
    block = LOOP_BLOCK if several else BLOCK
    launch(_ordered_sum_kernel, blocks_of(out.numel(), block), out, where, distance // size if regular else 0,
           len(terms), total, out, flag, out.numel(), float(divisor),
           GROUP=GROUP if several else triton.next_power_of_2(len(terms)), SEVERAL=several,
           TERM=DTYPES[terms[0].dtype], REGULAR=regular, ALIGNED=all(address % 16 == 0 for address in addresses),
           DIVIDED=divisor != 1, ROUNDED=DTYPES[middle], REDUCED=DTYPES[reduce_dtype], BLOCK=block,
           num_warps=WARPS)  # fmt: skip


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
    launch(_lanes_kernel, 1, tensor, sums, total, blocks, LANES=LANES, num_warps=LANE_WARPS)
    return total


@triton.jit
def _term(
    where: Value, distance: Value, place: Value, count: Value, number: Value, terms: Value, TERM: constexpr,
    REGULAR: constexpr, ALIGNED: constexpr,
) -> Value:  # fmt: skip
    """Return one term in fp32; unspecified values if there is no term of that number."""
    mask = place < tl.where(number < terms, count, 0)
    if REGULAR:
        values = tl.load(where + tl.cast(distance, tl.int64) * number + place, mask=mask, other=0.0)
    else:
        address = tl.load(where + tl.where(number < terms, number, 0))
        values = tl.load(pointer(address, TERM, ALIGNED) + place, mask=mask, other=0.0)
    return wide(values)


@triton.jit
def _added(left: Value, right: Value, REDUCED: constexpr) -> Value:
    return wide(nearest(left + right, REDUCED))


@triton.jit
def _group(
    where: Value, distance: Value, place: Value, count: Value, first: Value, terms: Value, SIZE: constexpr,
    TERM: constexpr, REGULAR: constexpr, ALIGNED: constexpr, REDUCED: constexpr,
) -> Value:  # fmt: skip
    """Return the sum of up to SIZE terms from ``first`` on, added pair by pair; an odd one out moves up."""
    if SIZE == 1:
        return _term(where, distance, place, count, first, terms, TERM, REGULAR, ALIGNED)
    else:
        HALF: constexpr = SIZE // 2
        left = _group(where, distance, place, count, first, terms, HALF, TERM, REGULAR, ALIGNED, REDUCED)
        right = _group(where, distance, place, count, first + HALF, terms, HALF, TERM, REGULAR, ALIGNED, REDUCED)
        return tl.where(first + HALF < terms, _added(left, right, REDUCED), left)


@triton.jit
def _carry(
    waiting: Value, found: Value, group: Value, groups: Value, LEVEL: constexpr, REDUCED: constexpr
) -> tuple[Value, Value]:
    """Return the sum that waits at a level, and the one that goes up from it: [Note: Groups of terms]."""
    if (group >> LEVEL) & 1 == 0:
        waiting = found
    elif ((group + 1) & ((1 << LEVEL) - 1) == 0) | (group == groups - 1):
        found = _added(waiting, found, REDUCED)
    return waiting, found


@triton.jit(do_not_specialize=["terms"])
def _ordered_sum_kernel(
    where: Value, distance: Value, terms: Value, total: Value, out: Value, nonfinite: Value, count: Value,
    divisor: Value, GROUP: constexpr, SEVERAL: constexpr, TERM: constexpr, REGULAR: constexpr, ALIGNED: constexpr,
    DIVIDED: constexpr, ROUNDED: constexpr, REDUCED: constexpr, BLOCK: constexpr,
) -> None:  # fmt: skip
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < count
    if SEVERAL:
        groups = (terms + GROUP - 1) // GROUP
        found = tl.zeros([BLOCK], tl.float32)
        at_0, at_1, at_2, at_3, at_4, at_5, at_6 = found, found, found, found, found, found, found
        for group in range(groups):
            found = _group(where, distance, place, count, group * GROUP, terms, GROUP, TERM, REGULAR, ALIGNED, REDUCED)
            at_0, found = _carry(at_0, found, group, groups, 0, REDUCED)
            at_1, found = _carry(at_1, found, group, groups, 1, REDUCED)
            at_2, found = _carry(at_2, found, group, groups, 2, REDUCED)
            at_3, found = _carry(at_3, found, group, groups, 3, REDUCED)
            at_4, found = _carry(at_4, found, group, groups, 4, REDUCED)
            at_5, found = _carry(at_5, found, group, groups, 5, REDUCED)
            at_6, found = _carry(at_6, found, group, groups, 6, REDUCED)
    else:
        found = _group(where, distance, place, count, 0, terms, GROUP, TERM, REGULAR, ALIGNED, REDUCED)
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
    """Return the sum of lanes, neighbours added pair by pair. A reduction of two terms has only one order."""
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


@triton.jit(do_not_specialize=["count"])
def _lanes_kernel(sums: Value, total: Value, count: Value, LANES: constexpr) -> None:
    place = tl.arange(0, LANES)
    lanes = tl.zeros([LANES], tl.float64)
    for _ in range((count + LANES - 1) // LANES):
        lanes += tl.load(sums + place, mask=place < count, other=0.0)
        place += LANES
    tl.store(total + tl.arange(0, 1), _pairs(lanes, LANES))
