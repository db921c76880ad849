"""Sums of squares over the rows and columns of a matrix, out of slices of it, and directions that are divided by roots
of such sums: what Adafactor needs beside elements.

Owns: where rows and columns lie in memory, sums that no order of additions changes. Must not know: ranks, messages,
what is done with the sums.

[Note: Exact sums] The square of an fp32 number is exact in fp64. A sum of such squares is kept as two fp64 numbers: the
sum, and what it lacks, which Knuth's two-sum finds without an error (The Art of Computer Programming, vol. 2, 4.2.2,
theorem B). As no square is negative, n of them are known to a relative n · 2^-105, in whatever order they were added,
and so is the fp64 number that they are rounded to: slices, ranks and devices give the same one, unless two sums that
differ by so little lie on both sides of the middle between two such numbers, less than one in 2^40.

[Note: Rows in memory] A matrix's elements are counted in memory order. Here rows are what lies together in memory: of a
parameter whose columns lie together (``turned``) they are its columns. One with more than two dimensions is a ``count``
of matrices, of its last two; where other dimensions lie innermost, a slice is seen as the whole parameter with zeros
around it. What has less than two dimensions is one column, so that its rows are its elements.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

_AT_ONCE = 32_768
"""Elements for which fp64 values are made at one time."""


def two_sum(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """fp64: the sum, and what is lacking to the exact one ([Note: Exact sums])."""
    total = one + other
    taken = total - one
    return total, (one - (total - taken)).add_(other - taken)


def join_sums(one: Tensor, other: Tensor) -> Tensor:
    """Two tensors of sums, each [2, n]: the sums and what they lack → their sum, as that."""
    total, lack = two_sum(one[0], other[0])
    lack += one[1] + other[1]
    joined = total + lack
    return torch.stack([joined, lack.sub_(joined - total)])


def sum_over(values: Tensor, dimension: int) -> Tensor:
    """fp64 [..., n, ...] → [2, ...]: the exact sums over that dimension, and what they lack."""
    total = values.movedim(dimension, 0)
    lack = total.new_zeros(()).expand(total.shape)
    while (count := total.shape[0]) > 1:
        half = count // 2
        added, lost = two_sum(total[:half], total[half : 2 * half])
        lost += lack[:half] + lack[half : 2 * half]
        if count % 2:
            added[0], last = two_sum(added[0], total[-1])
            lost[0] += last + lack[-1]
        total, lack = added, lost
    joined = total[0] + lack[0]
    return torch.stack([joined, lack[0] - (joined - total[0])])


@dataclass(frozen=True)
class Block:
    """Rows [first, first + count · rows) of all rows of a parameter: of one matrix, or all rows of several. matrix: the
    first of these."""

    first: int
    matrix: int
    count: int
    rows: int


@dataclass(frozen=True)
class Factored:
    """Where the rows and columns of a parameter lie ([Note: Rows in memory]). Of its sums the first ``all_rows`` are
    those of rows, matrix by matrix, then come ``all_columns``.

    shape: the parameter's · order: its dimensions from the outermost in memory to the innermost, () where that is their
    own order.
    """

    shape: tuple[int, ...]
    order: tuple[int, ...] = ()

    @property
    def is_matrix(self) -> bool:
        """Whether there are columns at all."""
        return len(self.shape) > 1

    @cached_property
    def _real(self) -> list[int]:
        """Its order without dimensions of one element, which have no place in it."""
        return [each for each in self.order or range(len(self.shape)) if self.shape[each] != 1]

    @cached_property
    def turned(self) -> bool:
        """Whether its columns lie together in memory."""
        last = len(self.shape) - 1
        return self._real[-2:] == [last, last - 1] and self._real[:-2] == sorted(self._real[:-2])

    @cached_property
    def scattered(self) -> bool:
        """Whether neither its rows nor its columns do."""
        return not self.turned and self._real != sorted(self._real)

    @cached_property
    def sizes(self) -> tuple[int, int, int]:
        """Matrices, rows of each, columns of each, as they lie in memory."""
        if not self.is_matrix:
            return 1, self.numel, 1
        rows, columns = self.shape[-2:]
        rows, columns = (columns, rows) if self.turned else (rows, columns)
        return self.numel // max(rows * columns, 1), rows, columns

    @cached_property
    def numel(self) -> int:
        """Elements."""
        found = 1
        for size in self.shape:
            found *= size
        return found

    @property
    def all_rows(self) -> int:
        """Rows of all matrices."""
        return self.sizes[0] * self.sizes[1]

    @property
    def all_columns(self) -> int:
        """Columns of all matrices."""
        return self.sizes[0] * self.sizes[2]

    def blocks(self, start: int, end: int) -> Iterator[Block]:
        """All rows in which elements [start, end) lie, a few at a time: rows of one matrix, or several matrices."""
        _, rows, columns = self.sizes
        first, last = start // columns, -(-end // columns)
        if rows * columns <= _AT_ONCE:
            many = _AT_ONCE // (rows * columns)
            matrices = first // rows, -(-last // rows)
            for matrix in range(*matrices, many):
                yield Block(matrix * rows, matrix, min(many, matrices[1] - matrix), rows)
            return
        many = max(1, _AT_ONCE // columns)
        while first < last:
            taken = min(many, last - first, rows - first % rows)
            yield Block(first, first // rows, 1, taken)
            first += taken


def squares_of_slice(form: Factored, values: Tensor, offset: int) -> Tensor:
    """See ``operations.squares_of_slice``."""
    count, rows, columns = form.sizes
    found = torch.zeros(2, form.all_rows + form.all_columns, dtype=torch.float64, device=values.device)
    if form.scattered:
        whole = _whole(form, values, offset).double().square_()
        parts = [sum_over(whole, -1).reshape(2, -1), sum_over(whole, -2).reshape(2, -1)]
        return torch.cat(parts, dim=1)
    of_rows = found[:, : form.all_rows].view(2, count, rows)
    of_columns = found[:, form.all_rows :].view(2, count, columns)
    for block in form.blocks(offset, offset + values.numel()):
        squares = _cut(form, values, offset, block).double().square_()
        row, matrices = block.first % rows, slice(block.matrix, block.matrix + block.count)
        of_rows[:, matrices, row : row + block.rows] = sum_over(squares, 2)
        here = of_columns[:, matrices]
        here.copy_(join_sums(here, sum_over(squares, 1)))
    return found


def direction_of_slice(form: Factored, gradient: Tensor, offset: int, scales: Tensor, most: float) -> Tensor:
    """See ``operations.direction_of_slice``."""
    count, rows, columns = form.sizes
    of_rows, of_columns = scales.split([form.all_rows, form.all_columns])
    if form.scattered:
        whole = of_rows.view(*form.shape[:-1], 1) * of_columns.view(*form.shape[:-2], 1, form.shape[-1])
        factors = whole.permute(form.order).reshape(-1)[offset : offset + gradient.numel()]
        return (gradient.double() * factors.clamp_(max=most)).float()
    of_rows, of_columns = of_rows.view(count, rows, 1), of_columns.view(count, 1, columns)
    found = torch.empty_like(gradient)
    for block in form.blocks(offset, offset + gradient.numel()):
        row, matrices = block.first % rows, slice(block.matrix, block.matrix + block.count)
        factors = of_rows[matrices, row : row + block.rows] * of_columns[matrices]
        first = block.first * columns
        start, end = max(first, offset), min(first + factors.numel(), offset + gradient.numel())
        near = factors.view(-1)[start - first : end - first].clamp_(max=most)
        found[start - offset : end - offset].copy_(near.mul_(gradient[start - offset : end - offset]))
    return found


def exact_sum_of_squares(values: Tensor) -> Tensor:
    """See ``operations.exact_sum_of_squares``."""
    found = torch.zeros(2, dtype=torch.float64, device=values.device)
    for part in values.split(_AT_ONCE):
        found = join_sums(found.view(2, 1), sum_over(part.double().square_(), 0).view(2, 1)).view(2)
    return found


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
    keep, rate = factors
    weight.mul_(keep).sub_(direction_of_slice(form, gradient, offset, scales, most).mul_(rate))


def squares_of_direction(form: Factored, gradient: Tensor, offset: int, scales: Tensor, most: float) -> Tensor:
    """See ``operations.squares_of_direction``."""
    return exact_sum_of_squares(direction_of_slice(form, gradient, offset, scales, most))


def _cut(form: Factored, values: Tensor, offset: int, block: Block) -> Tensor:
    """What ``values``, from element ``offset`` on, have of ``block``, else zeros: [matrices, rows, columns]."""
    columns = form.sizes[2]
    first, length = block.first * columns, block.count * block.rows * columns
    start, end = max(first, offset), min(first + length, offset + values.numel())
    part = values[start - offset : end - offset]
    if end - start < length:
        padded = values.new_zeros(length)
        padded[start - first : end - first] = part
        part = padded
    return part.view(block.count, block.rows, columns)


def _whole(form: Factored, values: Tensor, offset: int) -> Tensor:
    """``values``, from element ``offset`` on, among zeros: a tensor of the parameter's shape."""
    flat = values.new_zeros(form.numel)
    flat[offset : offset + values.numel()] = values
    in_memory = flat.view([form.shape[each] for each in form.order])
    return in_memory.permute([form.order.index(each) for each in range(len(form.shape))])
