"""ordered_sum and sum_of_squares under Triton's interpreter, bit for bit with the reference."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardengine.kernels import reference, triton
from shardengine.kernels.triton import sums
from shardengine.kernels.triton.sums import BLOCK, LOOP_BLOCK
from tests.kernels import kernel_cases as cases
from tests.kernels.kernel_cases import BF16, FP16, FP32, Sum

CPU = torch.device("cpu")
SIZES = [0, 1, 15, 16, 17, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5]
BLOCK_OF_SQUARES = reference.LANES * reference.ROWS
property_test = settings(max_examples=25, deadline=None, derandomize=True)


@pytest.mark.parametrize("buffer", [True, False])
@pytest.mark.parametrize("reduce_dtype", [FP32, BF16])
@pytest.mark.parametrize("count", range(1, 8))
def test_the_tree_over_any_number_of_terms(count: int, reduce_dtype: torch.dtype, buffer: bool) -> None:
    for dtype, special in ((FP32, False), (BF16, True)):
        case = Sum(count, 500, dtype, reduce_dtype=reduce_dtype, buffer=buffer, special=special)
        cases.check_ordered_sum(CPU, case)
        case = dataclasses.replace(case, total=FP32, divisor=count + 2, nonfinite=True, special=not special)
        cases.check_ordered_sum(CPU, case)


@pytest.mark.parametrize("count", [*range(1, 10), 65])
def test_a_sum_of_negative_zeros_is_one(count: int) -> None:
    zeros = torch.full((20,), -0.0)
    for total in (None, zeros):
        out = torch.ones(20)
        triton.ordered_sum([zeros] * count, out, total=total, divisor=3)
        cases.assert_same(out, zeros)


@pytest.mark.parametrize("counts", [range(8, 40), range(40, 71, 3), (127, 128, 129), (255, 256, 257)], ids=str)
def test_the_tree_over_many_terms(counts: Sequence[int]) -> None:
    """Numbers of groups with every pattern of ones, and every number of terms in the last group."""
    kinds = itertools.cycle(itertools.product((True, False), (FP32, BF16), (FP32, BF16, FP16)))
    for count, (buffer, reduce_dtype, dtype) in zip(counts, kinds, strict=False):
        case = Sum(count, 30, dtype, total=FP32, divisor=count, buffer=buffer, reduce_dtype=reduce_dtype, special=False)
        cases.check_ordered_sum(CPU, case)
    cases.check_ordered_sum(CPU, Sum(counts[-1], LOOP_BLOCK + 1, BF16, BF16, divisor=3, nonfinite=True))


@pytest.mark.parametrize("reduce_dtype", [FP32, BF16])
@pytest.mark.parametrize("count", [16, 17, 31, 33, 40, 49])
def test_a_tree_of_more_terms_than_one_launch_adds(
    count: int, reduce_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sums, "LEVELS", 1)
    assert sums.GROUP << sums.LEVELS == 16
    case = Sum(count, 50, BF16, total=FP32, divisor=3, reduce_dtype=reduce_dtype, special=False, alias=count - 1)
    cases.check_ordered_sum(CPU, dataclasses.replace(case, out=BF16))


@pytest.mark.parametrize("count", [9, 64, 70])
@pytest.mark.parametrize("alias", ["total", 0, 8])
def test_the_result_may_be_the_total_or_one_of_many_terms(alias: str | int, count: int) -> None:
    cases.check_ordered_sum(CPU, Sum(count, LOOP_BLOCK + 3, total=FP32, divisor=3, alias=alias, nonfinite=True))


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("length", SIZES)
def test_a_sum_of_every_size(length: int, offset: int) -> None:
    cases.check_ordered_sum(CPU, Sum(2, length, offset=offset, nonfinite=True))
    cases.check_ordered_sum(CPU, Sum(3, length, BF16, buffer=False, offset=offset, total=BF16, divisor=3))


@pytest.mark.parametrize(("dtype", "out"), [*itertools.product((FP32, BF16, FP16), repeat=2)])
def test_where_a_sum_is_rounded(dtype: torch.dtype, out: torch.dtype) -> None:
    for rounded, total in itertools.product((FP32, BF16, FP16), (None, FP32, BF16)):
        case = Sum(2, 300, dtype, out, total, divisor=3, rounded=rounded, nonfinite=True)
        cases.check_ordered_sum(CPU, case)
    cases.check_ordered_sum(CPU, Sum(1, 300, dtype, out, rounded=BF16, reduce_dtype=BF16))


@pytest.mark.parametrize("alias", ["total", 0, 1, 2])
@pytest.mark.parametrize("buffer", [True, False])
def test_the_result_may_be_the_total_or_a_term(alias: str | int, buffer: bool) -> None:
    cases.check_ordered_sum(CPU, Sum(3, 2 * BLOCK + 1, total=FP32, divisor=3, buffer=buffer, alias=alias))


def test_terms_of_several_dtypes() -> None:
    terms = [cases.numbers(100, seed, dtype) for seed, dtype in enumerate((FP32, BF16, FP16))]
    found, expected = torch.zeros(100), torch.zeros(100)
    triton.ordered_sum(terms, found)
    reference.ordered_sum(terms, expected)
    cases.assert_same(found, expected)


def test_the_flag_is_raised_by_any_program_and_never_lowered() -> None:
    term = torch.ones(3 * BLOCK)
    for bad, before in itertools.product((None, 0, 3 * BLOCK - 1), (False, True)):
        values = term.clone()
        if bad is not None:
            values[bad] = float("nan")
        flag = torch.tensor(before)
        triton.ordered_sum([values], torch.empty_like(values), nonfinite=flag)
        assert flag.item() is (before or bad is not None)


def test_an_overflow_of_the_last_rounding_raises_the_flag() -> None:
    flag = torch.tensor(False)
    triton.ordered_sum([torch.full((5,), 60000.0)] * 2, torch.empty(5, dtype=FP16), nonfinite=flag)
    assert flag.item()


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
@pytest.mark.parametrize("length", [0, 1, 2, 3, 15, 16, 17, 4095, 4096, 4097, 8193, 65535, 65536, 65537, 150_000])
def test_squares_of_every_size(length: int, dtype: torch.dtype) -> None:
    cases.check_sum_of_squares(CPU, cases.numbers(length, 1, dtype, special=False), offset=length % 2)


def test_squares_of_denormals_huge_numbers_and_what_is_not_finite() -> None:
    cases.check_sum_of_squares(CPU, torch.full((5000,), 1e-45))
    cases.check_sum_of_squares(CPU, torch.full((5000,), 3.4e38))
    for bad in (float("nan"), float("inf")):
        values = torch.ones(70_000)
        values[-1] = bad
        cases.check_sum_of_squares(CPU, values)


def test_the_order_of_squares_tells_itself_from_others() -> None:
    values = cases.numbers(200_000, 2, special=False)
    found = triton.sum_of_squares(values)
    assert found.item() != values.double().square().cumsum(0)[-1].item(), "the values do not tell the orders apart"
    cases.assert_same(found, reference.sum_of_squares(values))


@pytest.mark.parametrize("blocks", [1, 2, 3, 4095, 4096, 4097, 3 * 4096 + 11])
def test_the_sums_of_more_blocks_than_lanes(blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    block_sums = cases.numbers(blocks, 3, special=False).double().square()

    def instead(kernel: object, programs: int, on: torch.Tensor, *arguments: object, **options: object) -> None:
        if kernel is sums._squares_kernel:
            assert programs == blocks
            arguments[1].copy_(block_sums)  # type: ignore[attr-defined]
        else:
            launch(kernel, programs, on, *arguments, **options)

    launch = vars(sums)["launch"]
    monkeypatch.setattr(sums, "launch", instead)
    whole = torch.zeros(1).expand(blocks * BLOCK_OF_SQUARES - 5)  # nothing reads it
    cases.assert_same(triton.sum_of_squares(whole), reference._lanes(block_sums))


@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), max_size=40))
@property_test
def test_a_sum_of_squares_is_exact_to_fp64(values: list[float]) -> None:
    exact = sum((Fraction(value) ** 2 for value in values), Fraction(0))
    found = triton.sum_of_squares(torch.tensor(values, dtype=FP32))
    assert found.item() == pytest.approx(float(exact), rel=1e-14)
