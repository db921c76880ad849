"""kernels/: the declared operations in torch, bit for bit where they are declared so."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shardengine import kernels
from shardengine.kernels import Spans, operations, reference
from tests.support.raising import raises

property_test = settings(max_examples=25, deadline=None, derandomize=True)


def random(count: int, length: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(length, generator=generator) for _ in range(count)]


def same(a: Tensor, b: Tensor) -> bool:
    """Equal bits (0.0 is not -0.0)."""
    return a.dtype is b.dtype and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


# Sums over ranks

TREES = {
    1: lambda t: t[0],
    2: lambda t: t[0] + t[1],
    3: lambda t: (t[0] + t[1]) + t[2],
    4: lambda t: (t[0] + t[1]) + (t[2] + t[3]),
    5: lambda t: ((t[0] + t[1]) + (t[2] + t[3])) + t[4],
    6: lambda t: ((t[0] + t[1]) + (t[2] + t[3])) + (t[4] + t[5]),
    7: lambda t: ((t[0] + t[1]) + (t[2] + t[3])) + ((t[4] + t[5]) + t[6]),
}


@pytest.mark.parametrize("count", sorted(TREES))
def test_ranks_are_added_in_the_declared_order(count: int) -> None:
    terms = random(count, 4096)
    expected = TREES[count](terms)
    if count > 3:
        assert not same(expected, sum(terms[1:], terms[0])), "the values do not tell the orders apart"
    out = torch.empty(4096)
    kernels.ordered_sum([t.clone() for t in terms], out)
    assert same(out, expected)


@pytest.mark.parametrize("count", sorted(TREES))
def test_the_result_may_be_one_of_its_terms(count: int) -> None:
    for position in range(count):
        terms = random(count, 64, seed=count)
        expected = TREES[count]([t.clone() for t in terms])
        kernels.ordered_sum(terms, terms[position])
        assert same(terms[position], expected)


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("length", [0, 5, 131_072 + 3])
def test_a_sum_is_joined_divided_and_rounded_in_this_order(low: torch.dtype, length: int) -> None:
    terms = [t.to(low) for t in random(3, length)]
    (total,) = random(1, length, seed=9)
    wide = [t.float() for t in terms]
    expected = ((total + ((wide[0] + wide[1]) + wide[2])) / 3).to(low)
    for out in (torch.empty(length), torch.empty(length, dtype=low), total):
        kernels.ordered_sum(terms, out, total=total, divisor=3, rounded=low)
        assert same(out.to(low), expected) and same(out.float(), expected.float())


def test_each_sum_is_rounded_to_the_reduce_dtype() -> None:
    terms = [torch.tensor([2048.0]), torch.tensor([1.0]), torch.tensor([1.0]), torch.tensor([0.0])]
    out = torch.empty(1)
    kernels.ordered_sum(terms, out, reduce_dtype=torch.float16)
    assert out.item() == 2048.0  # 2048 + 1 has no place in fp16
    kernels.ordered_sum(terms, out)
    assert out.item() == 2050.0


def test_division_is_correctly_rounded() -> None:
    (values,) = random(1, 1000)
    total = torch.empty(1000)
    kernels.ordered_sum([values], total, divisor=3)
    assert same(total, torch.tensor([float(v) / 3 for v in values.tolist()]))
    assert not same(total, values * (1 / 3)), "the values do not tell division from a reciprocal"


def test_one_term_keeps_its_signs() -> None:
    out = torch.full((2,), math.nan)
    kernels.ordered_sum([torch.tensor([-0.0, 3.5])], out)
    assert same(out, torch.tensor([-0.0, 3.5]))


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan, 3e38])
def test_a_result_that_is_not_finite_is_noted_and_one_that_is_changes_nothing(bad: float) -> None:
    values = torch.ones(200_000)
    flag, out = torch.tensor(False), torch.empty(200_000)
    kernels.ordered_sum([values, values], out, nonfinite=flag)
    assert not flag
    values[199_999] = bad
    kernels.ordered_sum([values, values], out, nonfinite=flag)  # 3e38 + 3e38 overflows
    assert flag
    kernels.ordered_sum([torch.ones(3)], torch.empty(3), nonfinite=flag)
    assert flag, "an earlier finding is kept"


# Buckets

shapes = st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), max_size=6)


@given(shapes, st.lists(st.integers(0, 9), min_size=7, max_size=7), st.sampled_from(["float32", "bfloat16", "float16"]))
@property_test
def test_flatten_and_unflatten_are_opposites_and_padding_is_zero(
    sizes: list[tuple[int, ...]], gaps: list[int], dtype: str
) -> None:
    torch.manual_seed(0)
    low = getattr(torch, dtype)
    tensors = [torch.randn(size).to(low) for size in sizes]
    starts, position = [], gaps[-1]
    for tensor, gap in zip(tensors, gaps, strict=False):
        starts.append(position)
        position += tensor.numel() + gap
    out = torch.full((position,), math.nan)
    kernels.flatten(tensors, starts, out)
    covered = torch.zeros(position, dtype=torch.bool)
    for start, tensor in zip(starts, tensors, strict=True):
        covered[start : start + tensor.numel()] = True
        assert same(out[start : start + tensor.numel()], tensor.float().view(-1))
    assert same(out[~covered], torch.zeros(int((~covered).sum())))
    back = [torch.full_like(tensor, math.nan) for tensor in tensors]
    kernels.unflatten(out, starts, back)
    assert all(same(a, b) for a, b in zip(back, tensors, strict=True))


def test_flatten_multiplies_rounds_once_and_adds() -> None:
    (values,) = random(1, 100)
    out = torch.empty(112, dtype=torch.bfloat16)
    kernels.flatten([values], [3], out, scale=0.3)
    assert same(out[3:103], (values * 0.3).bfloat16())
    before = out.clone()
    kernels.flatten([values], [3], out, scale=3.0, add=True)
    assert same(out[3:103], (before[3:103].float() + values * 3.0).bfloat16())
    assert same(out[103:], before[103:]), "what lies between stays"


def test_the_first_gradient_of_a_window_keeps_its_signs_and_later_ones_are_added() -> None:
    destination = torch.full((3,), math.nan)
    kernels.flatten([torch.tensor([-0.0, 0.0, 2.0])], [0], destination)
    assert same(destination, torch.tensor([-0.0, 0.0, 2.0]))
    kernels.flatten([torch.tensor([1.0, 2.0, 3.0])], [0], destination, add=True)
    assert destination.tolist() == [1.0, 2.0, 5.0]


@pytest.mark.parametrize("starts", [[0, 4], [6, 0], [0, 8], [-1, 5]])
def test_tensors_that_overlap_or_leave_the_bucket_are_refused(starts: list[int]) -> None:
    tensors = [torch.ones(5), torch.ones(5)]
    with pytest.raises(ValueError, match="flatten: expected ascending starts inside of 12 elements"):
        kernels.flatten(tensors, starts, torch.empty(12))
    with pytest.raises(ValueError, match="unflatten: expected starts inside of 4 elements"):
        kernels.unflatten(torch.empty(4), starts, tensors)


def test_a_tensor_that_is_not_contiguous_is_refused() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        kernels.flatten([torch.ones(3, 4).t()], [0], torch.empty(12))


# Norms


@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=0, max_size=40))
@property_test
def test_a_sum_of_squares_is_exact_to_fp64(values: list[float]) -> None:
    exact = float(sum((Fraction(v) ** 2 for v in values), Fraction(0)))
    found = kernels.sum_of_squares(torch.tensor(values, dtype=torch.float32))
    assert found.dtype is torch.float64 and found.shape == ()
    assert found.item() == pytest.approx(exact, rel=1e-14)


def sum_by_hand(values: list[float]) -> float:
    """[Note: Sum of squares], one element after the other."""

    def pairs(lanes: list[float]) -> float:
        while len(lanes) > 1:
            lanes = [a + b for a, b in zip(lanes[0::2], lanes[1::2], strict=True)]
        return lanes[0]

    def over_lanes(terms: list[float]) -> float:
        lanes = [0.0] * reference.LANES
        for index, term in enumerate(terms):
            lanes[index % reference.LANES] += term
        return pairs(lanes)

    block = reference.LANES * reference.ROWS
    squares = [value * value for value in values]
    return over_lanes([over_lanes(squares[start : start + block]) for start in range(0, len(squares), block)])


@pytest.mark.parametrize("length", [1, 3, 4096, 4097, 65_536, 65_537, 200_001, 1_200_000])
def test_squares_are_added_in_the_declared_order(length: int) -> None:
    (values,) = random(1, length)
    expected = sum_by_hand(values.double().tolist())
    assert kernels.sum_of_squares(values).item() == expected
    if length > 1_000_000:
        assert expected != float((values.double() ** 2).sum()), "the values do not tell the orders apart"


def test_a_sum_of_squares_counts_every_element_of_a_long_tensor() -> None:
    assert kernels.sum_of_squares(torch.ones(1_200_001)).item() == 1_200_001
    assert kernels.sum_of_squares(torch.empty(0)).item() == 0


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_sum_of_squares_is_finite_exactly_where_every_element_is(bad: float) -> None:
    values = torch.full((70_000,), 3e38)
    assert kernels.sum_of_squares(values).isfinite()
    values[69_999] = bad
    assert not kernels.sum_of_squares(values).isfinite()


def test_a_norm_is_rounded_to_fp32_once_at_the_end() -> None:
    partials = torch.tensor([1e30**2, 2e30**2, 1e38**2], dtype=torch.float64)
    norm = kernels.norm_from_squares(partials)
    assert norm.dtype is torch.float32 and norm.shape == ()
    assert norm.item() == torch.tensor(math.sqrt(1e60 + 4e60 + 1e76)).item()
    scaled = kernels.norm_from_squares(partials, 3.0)
    assert scaled.item() == torch.tensor(math.sqrt(1e60 + 4e60 + 1e76) / 3).item()


def test_partial_sums_of_the_norm_are_added_pair_by_pair() -> None:
    """The first one's root lies between two numbers of fp32 and is rounded down; the others count only together."""
    partials = torch.tensor([(1 + 2.0**-24) ** 2] + [2.0**-53] * 8, dtype=torch.float64)
    assert kernels.norm_from_squares(partials[:1]).item() == kernels.norm_from_squares(partials[:2]).item() == 1.0
    assert kernels.norm_from_squares(partials).item() == 1 + 2.0**-23


@pytest.mark.parametrize(("norm", "expected"), [(0.0, 1.0), (0.5, 1.0), (1.0, 1 / 1.000001), (4.0, 1 / 4.000001)])
def test_the_factor_brings_the_norm_to_its_bound_and_never_raises_it(norm: float, expected: float) -> None:
    factor = kernels.gradient_factor(torch.tensor(norm), 1.0, 1.0)
    assert factor.shape == () and factor.dtype is torch.float32
    assert factor.item() == pytest.approx(expected, rel=1e-7)


def test_the_factor_scales_with_the_bound_and_takes_the_loss_scale_out() -> None:
    assert kernels.gradient_factor(torch.tensor(3.0), 0.5, 1.0).item() == pytest.approx(0.5 / 3.000001, rel=1e-7)
    assert kernels.gradient_factor(torch.tensor(3.0), 0.5, 8.0).item() == pytest.approx(0.0625 / 3.000001, rel=1e-7)
    assert kernels.gradient_factor(torch.tensor(3.0), 0.0, 1024.0).item() == 2.0**-10


# Who carries an operation out


def test_an_unknown_choice_of_kernels_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDENGINE_KERNELS", "fast")
    operations.wanted.cache_clear()
    with raises("kernels-choice-unknown", "auto, reference"):
        kernels.sum_of_squares(torch.ones(3))
    monkeypatch.undo()
    operations.wanted.cache_clear()


def test_on_a_cpu_nothing_imports_triton() -> None:
    chosen = operations.implementation(torch.device("cpu"))
    assert chosen is None or chosen.__name__ == "shardengine.kernels.native"


def test_spans_know_their_blocks() -> None:
    spans = Spans([(0, 5, 100), (8, 8), (10, 20)])
    rows, blocks = spans.table(torch.device("cpu"), 4)
    assert rows.tolist() == [[0, 5, 100], [8, 8, 0], [10, 20, 0]]
    assert blocks.tolist() == [[0, 0], [0, 1], [2, 0], [2, 1], [2, 2]]
    assert spans.table(torch.device("cpu"), 4)[1] is blocks and spans.elements == 15
