"""kernels/: the declared arithmetic, bit for bit where it is declared so."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shardengine import kernels

ADAM = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
SGD = {"lr": 0.05, "momentum": 0.9, "dampening": 0.0, "nesterov": False, "weight_decay": 0.1}
LION = {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.1}
ADAM_TENSORS = ("weight", "gradient", "exp_avg", "exp_avg_sq")
TENSORS = {"SGD": ("weight", "gradient", "momentum_buffer"), "Lion": ("weight", "gradient", "exp_avg")}

property_test = settings(max_examples=25, deadline=None, derandomize=True)


def random(count: int, length: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(length, generator=generator) for _ in range(count)]


def same(a: Tensor, b: Tensor) -> bool:
    """Equal bits (0.0 is not -0.0)."""
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


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
def test_a_tree_sum_adds_in_the_declared_order(count: int) -> None:
    terms = random(count, 4096)
    expected = TREES[count](terms)
    if count > 3:
        assert not same(expected, sum(terms[1:], terms[0])), "the values do not tell the orders apart"
    out = torch.empty(4096)
    kernels.tree_sum([t.clone() for t in terms], out)
    assert same(out, expected)


@pytest.mark.parametrize("count", sorted(TREES))
def test_the_result_of_a_tree_sum_may_be_one_of_its_terms(count: int) -> None:
    for position in range(count):
        terms = random(count, 64, seed=count)
        expected = TREES[count]([t.clone() for t in terms])
        kernels.tree_sum(terms, terms[position])
        assert same(terms[position], expected)


def test_the_first_gradient_of_a_window_is_copied_with_its_signs_and_later_ones_are_added() -> None:
    destination = torch.full((3,), math.nan)
    kernels.store_gradient(destination, torch.tensor([-0.0, 0.0, 2.0]), first=True)
    assert same(destination, torch.tensor([-0.0, 0.0, 2.0]))
    kernels.store_gradient(destination, torch.tensor([1.0, 2.0, 3.0]), first=False)
    assert destination.tolist() == [1.0, 2.0, 5.0]


def test_division_is_correctly_rounded() -> None:
    (values,) = random(1, 1000)
    total = values.clone()
    kernels.divide(total, 3)
    assert same(total, torch.tensor([float(v) / 3 for v in values.tolist()]))
    assert not same(total, values * (1 / 3)), "the values do not tell division from a reciprocal"


def test_division_by_one_changes_nothing() -> None:
    total = torch.tensor([-0.0, 3.5])
    kernels.divide(total, 1)
    assert same(total, torch.tensor([-0.0, 3.5]))


@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=0, max_size=40))
@property_test
def test_a_sum_of_squares_is_exact_to_fp64(values: list[float]) -> None:
    exact = float(sum((Fraction(v) ** 2 for v in values), Fraction(0)))
    found = kernels.sum_of_squares(torch.tensor(values, dtype=torch.float32))
    assert found.dtype is torch.float64 and found.shape == ()
    assert found.item() == pytest.approx(exact, rel=1e-14)


def test_a_sum_of_squares_counts_every_element_of_a_long_tensor() -> None:
    assert kernels.sum_of_squares(torch.ones(200_001)).item() == 200_001
    (values,) = random(1, 150_000)
    exact = math.fsum(v * v for v in values.double().tolist())
    assert kernels.sum_of_squares(values).item() == pytest.approx(exact, rel=1e-13)


def test_a_norm_is_rounded_to_fp32_once_at_the_end() -> None:
    partials = torch.tensor([1e30**2, 2e30**2, 1e38**2], dtype=torch.float64)
    norm = kernels.norm_from_squares(partials)
    assert norm.dtype is torch.float32 and norm.shape == ()
    assert norm.item() == torch.tensor(math.sqrt(1e60 + 4e60 + 1e76)).item()


def test_partial_sums_of_the_norm_are_added_in_rank_order() -> None:
    partials = torch.tensor([1.0, 2.0**-53, 2.0**-53], dtype=torch.float64)
    assert kernels.norm_from_squares(partials * 2.0**106).item() == 2.0**53


@pytest.mark.parametrize(("norm", "expected"), [(0.0, 1.0), (0.5, 1.0), (1.0, 1.000001), (4.0, 4.000001)])
def test_the_clip_divisor_brings_the_norm_to_its_bound_and_never_raises_it(norm: float, expected: float) -> None:
    divisor = kernels.clip_divisor(torch.tensor(norm), 1.0)
    assert divisor.shape == () and divisor.dtype is torch.float32
    assert divisor.item() == pytest.approx(expected, rel=1e-7)


def test_the_clip_divisor_scales_with_the_bound() -> None:
    assert kernels.clip_divisor(torch.tensor(3.0), 0.5).item() == pytest.approx(6.000002, rel=1e-7)


Flats = dict[str, Tensor]


def run(kind: str, flats: Flats, cuts: list[int], steps: int = 2, divisor: Tensor | None = None, **change: Any) -> None:
    """Step ``flats`` in place, cut at ``cuts``; the gradients are the same at every step."""
    gradient = flats["gradient"].clone()
    edges = [0, *cuts, gradient.numel()]
    for step in range(1, steps + 1):
        flats["gradient"].copy_(gradient)
        tensors = {name: [flat[a:b] for a, b in itertools.pairwise(edges)] for name, flat in flats.items()}
        if kind == "SGD":
            kernels.sgd_step(tensors, {**SGD, **change}, step, divisor)
        elif kind == "Lion":
            kernels.lion_step(tensors, {**LION, **change}, step, divisor)
        else:
            kernels.adam_step(tensors, {**ADAM, **change}, step, divisor, decoupled=kind == "AdamW")


def flats_for(kind: str, length: int, seed: int = 0) -> dict[str, Tensor]:
    names = TENSORS.get(kind, ADAM_TENSORS)
    drawn = random(2, length, seed)
    return {name: drawn[i] if i < 2 else torch.zeros(length) for i, name in enumerate(names)}


@given(
    st.sampled_from(["AdamW", "Adam", "SGD", "Lion"]),
    st.integers(2, 12),
    st.sets(st.integers(1, 11)),
    st.booleans(),
    st.integers(0, 9),
)
@property_test
def test_bits_of_an_update_do_not_depend_on_how_aligned_segments_are_cut(
    kind: str, granules: int, cuts: set[int], clipped: bool, seed: int
) -> None:
    divisor = torch.tensor(1.7) if clipped else None
    whole, cut = flats_for(kind, 16 * granules, seed), flats_for(kind, 16 * granules, seed)
    run(kind, whole, [], divisor=divisor)
    run(kind, cut, [16 * c for c in sorted(cuts) if c < granules], divisor=divisor)
    assert all(same(whole[name], cut[name]) for name in whole)


TORCH: dict[str, Any] = {"AdamW": torch.optim.AdamW, "Adam": torch.optim.Adam, "SGD": torch.optim.SGD}


@pytest.mark.parametrize("kind", ["AdamW", "Adam", "SGD"])
@pytest.mark.parametrize("nesterov", [False, True])
def test_an_update_is_that_of_torch_optim(kind: str, nesterov: bool) -> None:
    change: dict[str, Any] = {"nesterov": nesterov} if kind == "SGD" else {"eps": 1e-3 if nesterov else 1e-8}
    flats = flats_for(kind, 160)
    parameter = torch.nn.Parameter(flats["weight"].clone())
    parameter.grad = flats["gradient"].clone()
    reference = TORCH[kind]([parameter], **{**(SGD if kind == "SGD" else ADAM), **change}, foreach=False, fused=False)
    for _ in range(3):
        reference.step()
    run(kind, flats, [], steps=3, **change)
    # the same formula in another order of operations: a few roundings of fp32 per step, on values of about 1
    torch.testing.assert_close(flats["weight"], parameter.data, rtol=2e-6, atol=2e-7)
    for name, flat in list(flats.items())[2:]:
        torch.testing.assert_close(flat, reference.state[parameter][name], rtol=2e-6, atol=2e-7)


def test_sgd_dampening_spares_the_first_step() -> None:
    flats = flats_for("SGD", 16)
    gradient = flats["gradient"].clone()
    run("SGD", flats, [], steps=1, dampening=0.5, weight_decay=0.0)
    assert same(flats["momentum_buffer"], gradient)
    tensors = {name: [flat] for name, flat in flats.items()}
    kernels.sgd_step(tensors, {**SGD, "momentum": 0.25, "dampening": 0.5, "weight_decay": 0.0}, 2, None)
    assert same(flats["momentum_buffer"], 0.75 * gradient)  # powers of two: only the sum is rounded


def test_sgd_without_momentum_needs_no_buffer() -> None:
    weight, gradient = random(2, 32)
    expected = weight - gradient / 16
    tensors = {"weight": [weight], "gradient": [gradient]}
    kernels.sgd_step(tensors, {**SGD, "lr": 1 / 16, "momentum": 0.0, "weight_decay": 0.0}, 1, None)
    assert same(weight, expected)  # a power of two: only the difference is rounded


@pytest.mark.parametrize("kind", ["AdamW", "Adam", "SGD", "Lion"])
def test_clipping_is_a_division_of_the_gradient_before_the_update(kind: str) -> None:
    divisor = torch.tensor(4.0)  # a power of two: dividing by it is exact, so the bits must agree
    clipped, divided = flats_for(kind, 64), flats_for(kind, 64)
    divided["gradient"].div_(4)
    run(kind, clipped, [], divisor=divisor, steps=1)
    run(kind, divided, [], steps=1)
    assert all(same(clipped[name], divided[name]) for name in clipped)


@pytest.mark.parametrize("kind", ["AdamW", "SGD", "Lion"])
def test_maximize_goes_the_other_way(kind: str) -> None:
    up, down = flats_for(kind, 16), flats_for(kind, 16)
    down["gradient"].neg_()
    run(kind, up, [], steps=1, maximize=True)
    run(kind, down, [], steps=1)
    assert same(up["weight"], down["weight"])


def test_the_first_two_adam_moments_start_with_their_bias_corrected() -> None:
    flats = flats_for("AdamW", 16)
    start, gradient = flats["weight"].clone(), flats["gradient"].clone()
    run("AdamW", flats, [], steps=1, weight_decay=0.0)
    # at step 1 the corrected moments are g and g², so every weight moves by the learning rate against its sign; both
    # and the root are rounded (a few 1e-7 of the move), eps shortens it by 1e-8 / |g|, the weight is rounded once
    torch.testing.assert_close(flats["weight"], start - 1e-2 * gradient.sign(), rtol=1e-5, atol=1e-6)
