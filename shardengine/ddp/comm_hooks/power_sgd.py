"""Low-rank approximations of gradients: two thin factors travel instead of a matrix, and every rank has the whole sum.

Source: PowerSGD, Vogels et al., arXiv 1905.13727, algorithms 1 and 2.

Must not know: how sums over ranks are made, where the result is kept.

[Note: Low rank] A parameter's gradient is a matrix M of n rows and m columns on each rank. The ranks' sum is
approximated by P Qᵀ with r columns each. P is the ranks' sum of M Q, with the Q of the previous step, and made
orthonormal; the new Q is the ranks' sum of Mᵀ P. So P and Q travel, (n + m)·r numbers, once for the sum and once to
reach all ranks. That is one iteration of the power method. The next step continues with this Q (``warm_start``), or
each step begins with random numbers, drawn for the parameter and the step. With error feedback each rank keeps the
error of its share of the result, M - P Qᵀ / ranks, and adds it to its next gradient of that parameter. Parameters with
one dimension, or that would not become smaller by ``min_compression_rate``, are summed unchanged.

A parameter is approximated on its own and lies in one bucket, so the bits do not depend on buckets and stages. P is
made orthonormal on every rank, from the same numbers; ranks on different kinds of machines may round that differently.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from shardengine.ddp.comm_hooks.error_feedback import keep
from shardengine.ddp.comm_hooks.hook import CommHook, HookPiece, Used

_ALIGN = 16
"""Factors begin at multiples of so many elements in a message."""


@dataclass(frozen=True)
class LowRank:
    """The hook's params in the config.

    rank: columns of a factor · start_step: updates before which gradients are summed unchanged · warm_start: Q
    continues from step to step · error_feedback: see [Note: Low rank] · min_compression_rate: a gradient that does not
    become smaller by this factor is summed unchanged · square: a parameter, of any shape, is a square matrix of its
    elements, with zeros at the end · seed: of random numbers.
    """

    rank: int
    start_step: int
    warm_start: bool
    error_feedback: bool
    min_compression_rate: float
    square: bool
    seed: int

    def shape_of(self, shape: Sequence[int]) -> tuple[int, int] | None:
        """Return rows and columns of the matrix that approximates a parameter; None: it is summed unchanged.

        shape: the parameter's, in memory order.
        """
        count = math.prod(shape)
        if self.square:
            side = math.isqrt(max(count - 1, 0)) + 1
            rows, columns = side, side
        else:
            rows, columns = (shape[0], count // shape[0]) if len(shape) > 1 and count else (1, count)
        fits = (rows + columns) * self.rank * self.min_compression_rate < count
        return (rows, columns) if fits else None


class _Matrix(NamedTuple):
    """A part of a bucket that is approximated.

    at, then: the places of its factors P and Q in the first and second message.
    """

    part: HookPiece
    rows: int
    columns: int
    at: int
    then: int


class _FactorPlan(NamedTuple):
    """The messages of a bucket.

    matrices: the approximated parts · plain: parts that are summed unchanged: (place in the bucket, place in the
    message, elements) · lengths: elements of both messages.
    """

    matrices: Sequence[_Matrix]
    plain: Sequence[tuple[int, int, int]]
    lengths: tuple[int, int]


class PowerSGD(CommHook):
    """See [Note: Low rank]. factors: with ``warm_start`` each parameter's Q, [columns, rank] fp32."""

    name = "power_sgd"
    whole_parameters = True

    def __init__(self, options: LowRank) -> None:
        self._options, self.keeps_errors = options, options.error_feedback
        self.errors: dict[int, Tensor] = {}
        self.factors: dict[int, Tensor] = {}
        self._plans: dict[int, _FactorPlan] = {}
        self._step, self._scale, self._ranks = 0, 1.0, 1

    @property
    def in_rounds(self) -> bool:
        """Whether the current step has reached ``start_step``."""
        return self._step >= self._options.start_step

    @property
    def makes_messages(self) -> bool:
        """It makes none: before ``start_step`` gradients travel unchanged."""
        return False

    def allocate(self, bucket: int, length: int, parts: Sequence[HookPiece], ranks: int, device: torch.device) -> None:
        """Plan the messages of the bucket, with errors of zero and random factors."""
        self._ranks = ranks
        plan = self._plans[bucket] = _plan(self._options, parts, ranks)
        if not plan.matrices:
            return
        if self._options.error_feedback:
            self.errors[bucket] = torch.zeros(length, dtype=torch.float32, device=device)
        for matrix in plan.matrices if self._options.warm_start else ():
            self.factors[matrix.part.parameter] = self._random(matrix, 0, device)

    def begin_step(self, number: int) -> None:
        """Note the number of updates so far."""
        self._step = number

    def note_scale(self, scale: float) -> None:
        """As ``ErrorFeedback``'s."""
        self._scale = scale

    def bytes_of_bucket(self, bucket: int) -> int:
        """Return the bytes of both rounds; each is summed over ranks, and then gathered."""
        return 4 * sum(self._plans[bucket].lengths)

    def rounds(self, bucket: int, full: Tensor, used: Used) -> Iterator[Tensor]:
        """Yield two messages: factors P together with the parts that are summed unchanged, then factors Q."""
        plan, errors = self._plans[bucket], self.errors.get(bucket)
        if errors is not None:
            for start, end in used:
                full[start:end].add_(errors[start:end], alpha=self._scale)
        said = full.new_zeros(plan.lengths[0])
        for start, at, count in plan.plain:
            said[at : at + count].copy_(full[start : start + count])
        whole = [self._matrix(full, matrix) for matrix in plan.matrices]
        before = [self._factor(matrix, full.device) for matrix in plan.matrices]
        for matrix, values, factor in zip(plan.matrices, whole, before, strict=True):
            torch.mm(values, factor, out=self._part(said, matrix.at, matrix.rows))
        yield said
        for start, at, count in plan.plain:
            full[start : start + count].copy_(said[at : at + count])
        if not plan.matrices:
            return
        bases = [torch.linalg.qr(self._part(said, each.at, each.rows))[0].contiguous() for each in plan.matrices]
        said = full.new_zeros(plan.lengths[1])
        for matrix, values, basis in zip(plan.matrices, whole, bases, strict=True):
            torch.mm(values.t(), basis, out=self._part(said, matrix.then, matrix.columns))
        yield said
        for matrix, basis in zip(plan.matrices, bases, strict=True):
            start, end = matrix.part.start, matrix.part.start + matrix.part.numel
            self._take(matrix, basis, said, full[start:end], errors if errors is None else errors[start:end],
                       is_used=any(first <= start < last for first, last in used))  # fmt: skip

    def _take(
        self, matrix: _Matrix, basis: Tensor, said: Tensor, full: Tensor, error: Tensor | None, *, is_used: bool
    ) -> None:
        """Replace this rank's gradient by the product; keep the error of its share, and the factor.

        If this rank has no gradient, its error has waited, and still takes its share.
        """
        factor = self._part(said, matrix.then, matrix.columns)
        product = torch.mm(basis, factor.t()).view(-1)[: full.numel()]
        if error is not None:
            before = full if is_used else error * self._scale
            torch.sub(before, product / self._ranks, out=error)
            keep(error, self._scale)
        full.copy_(product)
        if self._options.warm_start:
            kept = self.factors[matrix.part.parameter]
            kept.copy_(torch.where(factor.isfinite().all() & factor.any(), factor, kept))

    def start_again(self) -> None:
        """Restart with random factors, the same on all ranks."""
        for matrix in (matrix for plan in self._plans.values() for matrix in plan.matrices):
            if (factor := self.factors.get(matrix.part.parameter)) is not None:
                factor.copy_(self._random(matrix, 0, factor.device))

    def _part(self, said: Tensor, at: int, rows: int) -> Tensor:
        rank = self._options.rank
        return said[at : at + rows * rank].view(rows, rank)

    def _matrix(self, full: Tensor, matrix: _Matrix) -> Tensor:
        """Return a view of the parameter's gradient, or a copy with zeros at its end."""
        values = full[matrix.part.start : matrix.part.start + matrix.part.numel]
        missing = matrix.rows * matrix.columns - matrix.part.numel
        if missing:
            values = torch.cat([values, values.new_zeros(missing)])
        return values.view(matrix.rows, matrix.columns)

    def _factor(self, matrix: _Matrix, device: torch.device) -> Tensor:
        if self._options.warm_start:
            return self.factors[matrix.part.parameter]
        return self._random(matrix, self._step, device)

    def _random(self, matrix: _Matrix, step: int, device: torch.device) -> Tensor:
        """Return random numbers that are the same on every rank and device."""
        generator = torch.Generator().manual_seed((self._options.seed + matrix.part.number + (step << 40)) % 2**63)
        return torch.randn(matrix.columns, self._options.rank, generator=generator).to(device)


def _plan(options: LowRank, parts: Sequence[HookPiece], ranks: int) -> _FactorPlan:
    matrices, plain, first, second = [], [], 0, 0

    def aligned(count: int) -> int:
        return -(-count // _ALIGN) * _ALIGN

    for part in parts:
        shape = options.shape_of(part.shape)
        if shape is None:
            plain.append((part.start, first, part.numel))
            first += aligned(part.numel)
            continue
        matrices.append(_Matrix(part, *shape, first, second))
        first += aligned(shape[0] * options.rank)
        second += aligned(shape[1] * options.rank)
    quantum = ranks * _ALIGN
    return _FactorPlan(matrices, plain, (-(-first // quantum) * quantum, -(-second // quantum) * quantum))
