"""A bucket filled from many tensors in one launch, and copied back to them.

Owns: the table that assigns copies to programs. Must not know: units, parameters.

[Note: Table of pieces] A launch has one row per tensor: (start in the flat tensor, elements, elements that its programs
cover, its first program), and before all rows the tensors' addresses. A program finds its row by bisection, because the
last column ascends. The elements that a row covers beyond its tensor are the zeros up to the next one. The rows are
made once for the same starts and lengths; the table of a launch is new memory, since the last one may still be in
flight.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr
from triton.language import tensor as Value

from shardengine.kernels.triton.launching import (
    DTYPES,
    GRANULE,
    blocks_of,
    integers,
    launch,
    nearest,
    pointer,
    sent,
    wide,
)

BLOCK, WARPS = 4096, 8
_COLUMNS = tl.constexpr(4)
_PLANS = 4096
"""The most plans that are cached, over buckets and devices; each takes some 50 bytes per tensor."""

_Piece = tuple[int, int, int]
"""A row of [Note: Table of pieces] without its first program."""


class _Plan(NamedTuple):
    """The rows for some starts and lengths, int64, one after the other.

    of: the number of each row's tensor, -1 if it has none · programs: their number.
    """

    rows: Tensor
    of: tuple[int, ...]
    programs: int


def flatten(
    tensors: Sequence[Tensor], starts: Sequence[int], out: Tensor, *, scale: float = 1.0, add: bool = False
) -> None:
    """See ``operations.flatten``."""
    plan = _plan(tuple(starts), tuple([tensor.numel() for tensor in tensors]), None if add else out.numel())
    if plan.programs:
        source = DTYPES[tensors[0].dtype] if tensors else DTYPES[out.dtype]
        launch(_flatten_kernel, plan.programs, out, _table(plan, tensors, out.device), len(plan.of), out, scale,
               SOURCE=source, SCALED=scale != 1.0, ADD=add, BLOCK=BLOCK, num_warps=WARPS)  # fmt: skip


def unflatten(flat: Tensor, starts: Sequence[int], outs: Sequence[Tensor]) -> None:
    """See ``operations.unflatten``."""
    by_dtype: dict[torch.dtype, tuple[list[int], list[Tensor]]] = {}
    for out, start in zip(outs, starts, strict=True):
        places, tensors = by_dtype.setdefault(out.dtype, ([], []))
        places.append(start)
        tensors.append(out)
    for dtype, (places, tensors) in by_dtype.items():
        plan = _plan(tuple(places), tuple([tensor.numel() for tensor in tensors]), None)
        if plan.programs:
            launch(_unflatten_kernel, plan.programs, flat, _table(plan, tensors, flat.device), len(plan.of), flat,
                   OUT=DTYPES[dtype], BLOCK=BLOCK, num_warps=WARPS)  # fmt: skip


@functools.lru_cache(_PLANS)
def _plan(starts: tuple[int, ...], lengths: tuple[int, ...], end: int | None) -> _Plan:
    """Return the plan. end: zeros cover the gaps between tensors up to here; None: gaps are left alone.

    A piece that covers nothing gets no row.
    """
    covers = lengths
    pieces: list[tuple[int, _Piece]] = []
    if end is not None:
        edges = [*starts, end]
        covers = tuple(after - start for start, after in itertools.pairwise(edges))
        pieces.append((-1, (0, 0, edges[0])))
    pieces += enumerate(zip(starts, lengths, covers, strict=True))
    rows: list[int] = []
    of: list[int] = []
    programs = 0
    for number, piece in pieces:
        if piece[2]:
            rows += (*piece, programs)
            of.append(number)
            programs += blocks_of(piece[2], BLOCK)
    return _Plan(integers(rows), tuple(of), programs)


def _table(plan: _Plan, tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the table of [Note: Table of pieces] on ``device``."""
    addresses = [0 if number < 0 else tensors[number].data_ptr() for number in plan.of]
    return sent(torch.cat([integers(addresses), plan.rows]), device)


@triton.jit
def _row_of(pieces: Value, rows: Value, program: Value) -> Value:
    """Return the row of a program: the last one whose first program is not above it."""
    low = program * 0
    high = low + rows
    while high - low > 1:
        middle = (low + high) // 2
        before = tl.load(pieces + rows + middle * _COLUMNS + 3) <= program
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    return low


@triton.jit
def _put(target: Value, values: Value, mask: Value, scale: Value, SCALED: constexpr, ADD: constexpr) -> None:
    values = wide(values)
    if SCALED:
        values = values.to(tl.float32) * tl.cast(scale, tl.float32)
    if ADD:
        values = wide(tl.load(target, mask=mask)) + values
    tl.store(target, nearest(values, target.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _flatten_kernel(
    pieces: Value, rows: Value, out: Value, scale: Value,
    SOURCE: constexpr, SCALED: constexpr, ADD: constexpr, BLOCK: constexpr,
) -> None:  # fmt: skip
    program = tl.program_id(0)
    number = _row_of(pieces, rows, program)
    address, row = tl.load(pieces + number), pieces + rows + number * _COLUMNS
    start, count = tl.load(row), tl.load(row + 1)
    begin = (program - tl.load(row + 3)) * BLOCK
    place = begin + tl.arange(0, BLOCK)
    if (begin + BLOCK <= count) & (address % 16 == 0) & (start % GRANULE == 0):
        values = tl.load(pointer(address, SOURCE, True) + place)
        _put(out + tl.multiple_of(start, GRANULE) + place, values, None, scale, SCALED, ADD)
    else:
        values = tl.load(pointer(address, SOURCE, False) + place, mask=place < count, other=0.0)
        _put(out + start + place, values, place < tl.load(row + 2), scale, SCALED, ADD)


@triton.jit(do_not_specialize=["rows"])
def _unflatten_kernel(pieces: Value, rows: Value, flat: Value, OUT: constexpr, BLOCK: constexpr) -> None:
    program = tl.program_id(0)
    number = _row_of(pieces, rows, program)
    address, row = tl.load(pieces + number), pieces + rows + number * _COLUMNS
    start, count = tl.load(row), tl.load(row + 1)
    begin = (program - tl.load(row + 3)) * BLOCK
    place = begin + tl.arange(0, BLOCK)
    if (begin + BLOCK <= count) & (address % 16 == 0) & (start % GRANULE == 0):
        values = wide(tl.load(flat + tl.multiple_of(start, GRANULE) + place))
        tl.store(pointer(address, OUT, True) + place, nearest(values, OUT))
    else:
        values = wide(tl.load(flat + start + place, mask=place < count, other=0.0))
        tl.store(pointer(address, OUT, False) + place, nearest(values, OUT), mask=place < count)
