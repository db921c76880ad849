"""Sums of squares over rows and columns of a matrix, from slices of it, and directions divided by roots of such sums.

This is the part of Adafactor that is not elementwise.

Owns: the places of rows and columns in memory, sums that do not depend on the order of additions. Must not know: ranks,
messages, the use of the sums.

[Note: Exact sums] The square of an fp32 number is exact in fp64. A sum of such squares is kept as two fp64 numbers: the
rounded sum and its error, which Knuth's two-sum computes exactly (The Art of Computer Programming, vol. 2, 4.2.2,
theorem B). As no square is negative, a sum of n of them is known to a relative n · 2^-105, whatever the order of
additions. So slices, ranks and devices round it to the same fp64 number, unless two sums that differ by so little lie
on both sides of the midpoint between two fp64 numbers: less than one in 2^40.

[Note: Rows in memory] A matrix's elements are counted in memory order, and its rows here are contiguous in memory: if
the columns of a parameter are contiguous (``turned``), its rows here are these columns. A parameter with more than two
dimensions is ``count`` matrices, made of its last two. If other dimensions are innermost in memory, a slice is handled
as the whole parameter with zeros around it. A parameter with less than two dimensions is one column: its rows are its
elements.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

_AT_ONCE = 32_768
"""Elements whose fp64 values exist at one time."""


def two_sum(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Return the fp64 sum and its rounding error ([Note: Exact sums])."""
    total = one + other
    taken = total - one
    return total, (one - (total - taken)).add_(other - taken)


def join_sums(one: Tensor, other: Tensor) -> Tensor:
    """Return the sum of two tensors of sums. All are [2, n]: the sums and their errors."""
    total, lack = two_sum(one[0], other[0])
    lack += one[1] + other[1]
    joined = total + lack
    return torch.stack([joined, lack.sub_(joined - total)])


def sum_over(values: Tensor, dimension: int) -> Tensor:
    """Return the exact sums over one dimension: fp64 [..., n, ...] → [2, ...], the sums and their errors."""
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
    """Rows [first, first + count · rows) of all rows of a parameter.

    They are some rows of one matrix, or all rows of ``count`` of them. matrix: the first of these.
    """

    first: int
    matrix: int
    count: int
    rows: int


@dataclass(frozen=True)
class Factored:
    """The places of the rows and columns of a parameter ([Note: Rows in memory]).

    The first ``all_rows`` of its sums are those of rows, matrix by matrix; ``all_columns`` of columns follow.

    shape: the parameter's · order: its dimensions from the outermost in memory to the innermost, () if that is their
    own order.
    """

    shape: tuple[int, ...]
    order: tuple[int, ...] = ()

    @property
    def is_matrix(self) -> bool:
        """Whether it has at least two dimensions."""
        return len(self.shape) > 1

    @cached_property
    def _real(self) -> list[int]:
        """The order without dimensions of one element, whose place does not matter."""
        return [each for each in self.order or range(len(self.shape)) if self.shape[each] != 1]

    @cached_property
    def turned(self) -> bool:
        """Whether its columns are contiguous in memory."""
        last = len(self.shape) - 1
        return self._real[-2:] == [last, last - 1] and self._real[:-2] == sorted(self._real[:-2])

    @cached_property
    def scattered(self) -> bool:
        """Whether neither its rows nor its columns are contiguous in memory."""
        return not self.turned and self._real != sorted(self._real)

    @cached_property
    def sizes(self) -> tuple[int, int, int]:
        """The number of matrices, of rows of each, and of columns of each, in memory order."""
        if not self.is_matrix:
            return 1, self.numel, 1
        rows, columns = self.shape[-2:]
        rows, columns = (columns, rows) if self.turned else (rows, columns)
        return self.numel // max(rows * columns, 1), rows, columns

    @cached_property
    def numel(self) -> int:
        """The number of elements."""
        found = 1
        for size in self.shape:
            found *= size
        return found

    @property
    def all_rows(self) -> int:
        """The number of rows of all matrices."""
        return self.sizes[0] * self.sizes[1]

    @property
    def all_columns(self) -> int:
        """The number of columns of all matrices."""
        return self.sizes[0] * self.sizes[2]

    def blocks(self, start: int, end: int) -> Iterator[Block]:
        """Yield the rows that contain elements [start, end), a few at a time: rows of one matrix, or whole matrices."""
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
    """Return ``block`` of ``values``, which begin at ``offset``, zero-padded: [matrices, rows, columns]."""
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
    """Return a tensor of the parameter's shape: ``values`` from element ``offset`` on, and zeros."""
    flat = values.new_zeros(form.numel)
    flat[offset : offset + values.numel()] = values
    in_memory = flat.view([form.shape[each] for each in form.order])
    return in_memory.permute([form.order.index(each) for each in range(len(form.shape))])
