"""Exact sums over rows and columns of slices: those of ``math.fsum``, whatever the shape, the order, the cuts."""

from __future__ import annotations

import functools
import itertools
import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

from shardengine.kernels import Factored, factored, join_sums, native, use_threads
from tests import oracle

SHAPES: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
    ((7, 130), ()), ((130, 7), (1, 0)), ((3, 4, 5), ()), ((4, 6, 3, 3), ()), ((4, 6, 3, 3), (0, 2, 3, 1)), ((50,), ()),
    ((), ()), ((1, 9), ()), ((9, 1), ()), ((1, 1), ()), ((300, 400), ()), ((300, 400), (1, 0)),
    ((5, 200, 300), (0, 2, 1)), ((4, 1, 3, 3), (0, 2, 3, 1)), ((2, 3, 4), (1, 0, 2)), ((3, 70_000), ()),
]  # fmt: skip
"""With the order of dimensions in memory."""


OWN: list[Any] = [factored, *([native] if native.load() is not None else [])]
"""Who carries the operations out."""


def name_of(module: Any) -> str:
    return str(module.__name__.rpartition(".")[2])


def numbers(shape: tuple[int, ...], seed: int = 0, decades: int = 12) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    exponents = (torch.rand(shape, generator=generator) - 0.5) * decades
    return torch.randn(shape, generator=generator) * 10**exponents


def in_memory(values: Tensor, order: tuple[int, ...]) -> Tensor:
    return (values.permute(order) if order else values).reshape(-1)


def places(count: int) -> list[list[int]]:
    """Ways to cut so many elements."""
    return [[0, count], [0, min(count, 16), count], [0, count // 3 // 16 * 16, count // 2 // 16 * 16, count]]


@pytest.mark.parametrize("own", OWN, ids=name_of)
@pytest.mark.parametrize(("shape", "order"), SHAPES)
def test_sums_of_slices_are_exact(own: Any, shape: tuple[int, ...], order: tuple[int, ...]) -> None:
    values, form = numbers(shape), Factored(shape, order)
    flat, squares = in_memory(values, order), values.double().square()
    if len(shape) > 1:
        rows, columns = oracle.exact_sum(squares, -1).reshape(-1), oracle.exact_sum(squares, -2).reshape(-1)
        expected = torch.cat([columns, rows] if form.turned else [rows, columns])
    else:
        expected = torch.cat([squares.reshape(-1), oracle.exact_sum(squares.reshape(-1), 0).view(1)])
    for cuts in places(flat.numel()):
        parts = [own.squares_of_slice(form, flat[a:b].clone(), a) for a, b in itertools.pairwise(cuts) if a < b]
        for order_of_parts in (parts, parts[::-1]):
            total = order_of_parts[0]
            for part in order_of_parts[1:]:
                total = join_sums(total, part)
            assert torch.equal(total[0], expected), (shape, cuts)


@pytest.mark.parametrize("own", OWN, ids=name_of)
@pytest.mark.parametrize(("shape", "order"), SHAPES)
def test_directions_of_slices_are_those_of_the_whole(own: Any, shape: tuple[int, ...], order: tuple[int, ...]) -> None:
    values, form = numbers(shape), Factored(shape, order)
    flat = in_memory(values, order)
    scales = torch.rand(form.all_rows + form.all_columns, dtype=torch.float64) + 0.1
    rows, columns = scales.split([form.all_rows, form.all_columns])
    if form.turned:
        rows, columns = columns, rows
    product = rows * columns if len(shape) < 2 else rows.view(*shape[:-1], 1) * columns.view(*shape[:-2], 1, shape[-1])
    expected = in_memory((values.double() * product.view(shape).clamp(max=0.5)).float(), order)
    for cuts in places(flat.numel()):
        parts = [(flat[a:b].clone(), a, scales, 0.5) for a, b in itertools.pairwise(cuts) if a < b]
        assert torch.equal(torch.cat([own.direction_of_slice(form, *part) for part in parts]), expected), (shape, cuts)
        weights = torch.arange(flat.numel()) / 7
        stepped = weights * 0.9 - expected * 0.3
        for a, b in itertools.pairwise(cuts):
            own.step_along(weights[a:b], form, flat[a:b].clone(), a, scales, 0.5, (0.9, 0.3))
        assert torch.equal(weights, stepped), (shape, cuts)
        squares = functools.reduce(join_sums, [own.squares_of_direction(form, *part).view(2, 1) for part in parts])
        assert squares[0].item() == math.fsum(expected.double().square().tolist())


def test_blocks_of_any_size_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    values = numbers((5, 30, 40)).reshape(-1)
    form = Factored((5, 30, 40))
    expected = factored.squares_of_slice(form, values[640:5120], 640)[0]
    for size in (1, 50, 130, 1200, 5000):
        monkeypatch.setattr(factored, "_AT_ONCE", size)
        assert torch.equal(factored.squares_of_slice(form, values[640:5120], 640)[0], expected), size


@pytest.mark.parametrize("own", OWN, ids=name_of)
@pytest.mark.parametrize("count", [1, 2, 3, 4096, 32_769, 100_001, 1_500_000])
def test_a_sum_of_all_squares_is_exact(own: Any, count: int) -> None:
    values = numbers((count,), count)
    found = own.exact_sum_of_squares(values)
    squares = values.double().square().tolist()
    assert found[0].item() == math.fsum(squares)
    exact = sum(map(Fraction, squares[:5000]))
    if count <= 5000:  # and what it lacks is there
        assert abs(Fraction(found[0].item()) + Fraction(found[1].item()) - exact) <= exact * Fraction(1, 1 << 90)


@pytest.mark.parametrize("own", OWN, ids=name_of)
@pytest.mark.parametrize("shape", [(6, 3000), (18_000,), (6, 3000, 1), (3000, 6)])
def test_cuts_change_nothing_where_numbers_are_far_apart(own: Any, shape: tuple[int, ...]) -> None:
    """Squares of which one has nothing of another in 106 bits."""
    values = numbers((18_000,), 3, decades=36)
    form, found = Factored(shape), []
    for cuts in (*places(18_000), [*range(0, 18_000, 16), 18_000]):
        parts = [own.squares_of_slice(form, values[a:b], a) for a, b in itertools.pairwise(cuts)]
        for total in (parts, parts[::-1]):
            found.append(functools.reduce(join_sums, total)[0])
    assert all(torch.equal(found[0], each) for each in found)
    for row in range(6) if shape == (6, 3000) else ():
        exact = sum(Fraction(value) ** 2 for value in values[row * 3000 : (row + 1) * 3000].tolist())
        assert abs(Fraction(found[0][row].item()) - exact) <= exact * Fraction(1, 1 << 53)


@pytest.mark.parametrize("own", OWN, ids=name_of)
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("shape", [(700, 1200), (1_000_000,), (9, 300, 400), (300_000, 3)])
def test_threads_change_nothing(own: Any, threads: int, shape: tuple[int, ...]) -> None:
    form, values = Factored(shape), numbers(shape).reshape(-1)
    scales = torch.rand(form.all_rows + form.all_columns, dtype=torch.float64)
    expected = factored.squares_of_slice(form, values, 0)[0]
    direction = factored.direction_of_slice(form, values, 0, scales, 0.4)
    use_threads(threads)
    try:
        assert torch.equal(own.squares_of_slice(form, values, 0)[0], expected)
        assert torch.equal(own.direction_of_slice(form, values, 0, scales, 0.4), direction)
        squares = own.squares_of_direction(form, values, 0, scales, 0.4)[0]
        assert torch.equal(squares, factored.exact_sum_of_squares(direction)[0])
        assert torch.equal(own.exact_sum_of_squares(values)[0], factored.exact_sum_of_squares(values)[0])
    finally:
        use_threads(None)


@pytest.mark.parametrize("own", OWN, ids=name_of)
def test_what_is_not_finite_stays_so(own: Any) -> None:
    for odd in (math.inf, math.nan):
        values = torch.ones(12)
        values[5] = odd
        found = own.squares_of_slice(Factored((3, 4)), values, 0)[0]
        assert not found[1].isfinite() and not found[3 + 1].isfinite()
        assert found[0] == 4 and found[2] == 4 and found[3] == 3
