"""A bucket filled from many tensors in one launch, and emptied into them.

Owns: the table that says which program copies what. Must not know: units, parameters.

[Note: Table of pieces] A launch has one row per tensor: (address, start in the flat tensor, elements, elements that its
programs cover, its first program). A program finds its row by bisection, for which the last column ascends. What a row
covers beyond its elements is the zeros up to the next one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr
from triton.language import tensor as Value

from shardengine.kernels.triton.launching import DTYPES, GRANULE, blocks_of, launch, nearest, pointer, table, wide

BLOCK, WARPS = 4096, 8
_COLUMNS = tl.constexpr(5)

_Piece = tuple[int, int, int, int]
"""A row of [Note: Table of pieces] without its first program."""


def flatten(
    tensors: Sequence[Tensor], starts: Sequence[int], out: Tensor, *, scale: float = 1.0, add: bool = False
) -> None:
    """See ``operations.flatten``."""
    edges = [*starts, out.numel()]
    pieces: list[_Piece] = [] if add else [(0, 0, 0, edges[0])]
    for tensor, (start, end) in zip(tensors, itertools.pairwise(edges), strict=True):
        count = tensor.numel()
        pieces.append((tensor.data_ptr(), start, count, count if add else end - start))
    rows, programs = _rows(pieces)
    if programs:
        source = DTYPES[tensors[0].dtype] if tensors else DTYPES[out.dtype]
        on_device = table(rows, out.device)
        launch(_flatten_kernel, programs, out, on_device, len(rows), out, scale, SOURCE=source, SCALED=scale != 1.0,
               ADD=add, BLOCK=BLOCK, num_warps=WARPS)  # fmt: skip


def unflatten(flat: Tensor, starts: Sequence[int], outs: Sequence[Tensor]) -> None:
    """See ``operations.unflatten``."""
    by_dtype: dict[torch.dtype, list[_Piece]] = {}
    for out, start in zip(outs, starts, strict=True):
        by_dtype.setdefault(out.dtype, []).append((out.data_ptr(), start, out.numel(), out.numel()))
    for dtype, pieces in by_dtype.items():
        rows, programs = _rows(pieces)
        if programs:
            launch(_unflatten_kernel, programs, flat, table(rows, flat.device), len(rows), flat, OUT=DTYPES[dtype],
                   BLOCK=BLOCK, num_warps=WARPS)  # fmt: skip


def _rows(pieces: Iterable[_Piece]) -> tuple[list[tuple[int, ...]], int]:
    """[Note: Table of pieces], and how many programs there are. Pieces that cover nothing get no row."""
    rows: list[tuple[int, ...]] = []
    programs = 0
    for piece in pieces:
        if piece[3]:
            rows.append((*piece, programs))
            programs += blocks_of(piece[3], BLOCK)
    return rows, programs


@triton.jit
def _row_of(pieces: Value, rows: Value, program: Value) -> Value:
    """Where the row of a program begins: the last one whose first program is not above it."""
    low = program * 0
    high = low + rows
    while high - low > 1:
        middle = (low + high) // 2
        before = tl.load(pieces + middle * _COLUMNS + 4) <= program
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    return pieces + low * _COLUMNS


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
    row = _row_of(pieces, rows, program)
    address, start, count = tl.load(row), tl.load(row + 1), tl.load(row + 2)
    begin = (program - tl.load(row + 4)) * BLOCK
    place = begin + tl.arange(0, BLOCK)
    if (begin + BLOCK <= count) & (address % 16 == 0) & (start % GRANULE == 0):
        values = tl.load(pointer(address, SOURCE, True) + place)
        _put(out + tl.multiple_of(start, GRANULE) + place, values, None, scale, SCALED, ADD)
    else:
        values = tl.load(pointer(address, SOURCE, False) + place, mask=place < count, other=0.0)
        _put(out + start + place, values, place < tl.load(row + 3), scale, SCALED, ADD)


@triton.jit(do_not_specialize=["rows"])
def _unflatten_kernel(pieces: Value, rows: Value, flat: Value, OUT: constexpr, BLOCK: constexpr) -> None:
    program = tl.program_id(0)
    row = _row_of(pieces, rows, program)
    address, start, count = tl.load(row), tl.load(row + 1), tl.load(row + 2)
    begin = (program - tl.load(row + 4)) * BLOCK
    place = begin + tl.arange(0, BLOCK)
    if (begin + BLOCK <= count) & (address % 16 == 0) & (start % GRANULE == 0):
        values = wide(tl.load(flat + tl.multiple_of(start, GRANULE) + place))
        tl.store(pointer(address, OUT, True) + place, nearest(values, OUT))
    else:
        values = wide(tl.load(flat + start + place, mask=place < count, other=0.0))
        tl.store(pointer(address, OUT, False) + place, nearest(values, OUT), mask=place < count)
