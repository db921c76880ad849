"""kernels.update: the optimizers' arithmetic, stochastic rounding and its random bits."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shardengine import kernels
from shardengine.kernels import Noise, Rule, Spans, rule_for
from tests import oracle
from tests.kernels.test_operations import property_test, random, same

ADAM = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
SGD = {"lr": 0.05, "momentum": 0.9, "dampening": 0.0, "nesterov": False, "weight_decay": 0.1}
LION = {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.1}
OPTIONS: dict[str, dict[str, Any]] = {"AdamW": ADAM, "Adam": ADAM, "SGD": SGD, "Lion": LION}
KINDS = tuple(OPTIONS)


Flats = dict[str, Tensor]


def flats_for(kind: str, length: int, seed: int = 0) -> Flats:
    weight, gradient = random(2, length, seed)
    return {"weight": weight, "gradient": gradient} | {
        name: torch.zeros(length) for name in kernels.STATE_NAMES[kind]
    }  # fmt: skip


def run(kind: str, flats: Flats, spans: Spans | None = None, steps: int = 2, **change: Any) -> None:
    """Step ``flats`` in place, all of it unless ``spans`` are given; change: of options, or keywords of ``update``."""
    how = {name: change.pop(name) for name in ("factor", "skip", "noise") if name in change}
    for step in range(1, steps + 1):
        every = Spans([(0, flats["weight"].numel())])
        kernels.update(flats, spans or every, rule_for(kind, {**OPTIONS[kind], **change}, step), **how)


@given(st.sampled_from(KINDS), st.integers(2, 90), st.sets(st.integers(1, 89)), st.booleans(), st.integers(0, 9))
@property_test
def test_bits_of_an_update_do_not_depend_on_how_it_is_cut(
    kind: str, length: int, cuts: set[int], clipped: bool, seed: int
) -> None:
    factor: Any = {"factor": torch.tensor(0.7)} if clipped else {}
    whole, cut = flats_for(kind, length, seed), flats_for(kind, length, seed)
    run(kind, whole, **factor)
    edges = [0, *sorted(c for c in cuts if c < length), length]
    run(kind, cut, Spans(itertools.pairwise(edges)), **factor)
    assert all(same(whole[name], cut[name]) for name in whole)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("low", [torch.float32, torch.bfloat16, torch.float16])
def test_an_update_is_the_declared_one(kind: str, low: torch.dtype) -> None:
    """Against the oracle's own formula, three steps of a long tensor."""
    flats = flats_for(kind, 140_000)
    flats["gradient"] = flats["gradient"].to(low)
    flats["low"] = torch.zeros(140_000, dtype=torch.bfloat16)
    weight = flats["weight"].clone()
    states = {name: torch.zeros(140_000) for name in kernels.STATE_NAMES[kind]}
    factor = torch.tensor(0.37)
    for step in range(1, 4):
        gradient = flats["gradient"].float() * factor
        weight, states = oracle.new_values(kind, weight, gradient, states, OPTIONS[kind], step)
    run(kind, flats, steps=3, factor=factor)
    assert same(flats["weight"], weight) and same(flats["low"], weight.bfloat16())
    assert all(same(flats[name], value) for name, value in states.items())


def test_roots_and_quotients_are_correctly_rounded() -> None:
    """By numpy, whose root is the processor's. One of six of torch's own roots on a CPU is not."""
    weight = torch.zeros(50_000)
    moment = torch.rand(50_000, generator=torch.Generator().manual_seed(0)) * 1e-6
    assert moment.all(), "numpy would warn of a division by zero"
    flats = {"weight": weight, "gradient": torch.zeros(50_000), "exp_avg": torch.ones(50_000), "exp_avg_sq": moment}
    expected = -(np.float32(1) / np.sqrt(moment.numpy()))
    kernels.update(flats, Spans([(0, 50_000)]), Rule("AdamW", 1.0, keep=1.0, keep_square=1.0))
    assert same(weight, torch.from_numpy(expected))


@pytest.mark.parametrize("kind", KINDS)
def test_what_lies_outside_of_the_spans_is_left_alone(kind: str) -> None:
    flats = {**flats_for(kind, 64), "low": torch.zeros(64, dtype=torch.bfloat16)}
    before = {name: flat.clone() for name, flat in flats.items()}
    run(kind, flats, Spans([(3, 17), (20, 33)]))
    for name, flat in flats.items():
        for outside in (slice(0, 3), slice(17, 20), slice(33, 64)):
            assert same(flat[outside], before[name][outside])
        assert name == "gradient" or not same(flat[3:17], before[name][3:17])


@pytest.mark.parametrize("kind", KINDS)
def test_an_update_that_is_skipped_writes_nothing(kind: str) -> None:
    flats = {**flats_for(kind, 64), "low": torch.zeros(64, dtype=torch.bfloat16)}
    before = {name: flat.clone() for name, flat in flats.items()}
    run(kind, flats, skip=torch.tensor(True))
    assert all(same(flats[name], before[name]) for name in flats)
    run(kind, flats, skip=torch.tensor(False))
    assert not same(flats["weight"], before["weight"])


TORCH: dict[str, Any] = {"AdamW": torch.optim.AdamW, "Adam": torch.optim.Adam, "SGD": torch.optim.SGD}


@pytest.mark.parametrize("kind", ["AdamW", "Adam", "SGD"])
@pytest.mark.parametrize("nesterov", [False, True])
def test_an_update_is_that_of_torch_optim(kind: str, nesterov: bool) -> None:
    change: dict[str, Any] = {"nesterov": nesterov} if kind == "SGD" else {"eps": 1e-3 if nesterov else 1e-8}
    flats = flats_for(kind, 160)
    parameter = torch.nn.Parameter(flats["weight"].clone())
    parameter.grad = flats["gradient"].clone()
    theirs = TORCH[kind]([parameter], **{**OPTIONS[kind], **change}, foreach=False, fused=False)
    for _ in range(3):
        theirs.step()
    run(kind, flats, steps=3, **change)
    # the same formula in another order of operations: a few roundings of fp32 per step, on values of about 1
    torch.testing.assert_close(flats["weight"], parameter.data, rtol=2e-6, atol=2e-7)
    for name, flat in list(flats.items())[2:]:
        torch.testing.assert_close(flat, theirs.state[parameter][name], rtol=2e-6, atol=2e-7)


def test_sgd_dampening_spares_the_first_step() -> None:
    flats = flats_for("SGD", 16)
    run("SGD", flats, steps=1, dampening=0.5, weight_decay=0.0)
    assert same(flats["momentum_buffer"], flats["gradient"])
    rule = rule_for("SGD", {**SGD, "momentum": 0.25, "dampening": 0.5, "weight_decay": 0.0}, 2)
    kernels.update(flats, Spans([(0, 16)]), rule)
    assert same(flats["momentum_buffer"], 0.75 * flats["gradient"])  # powers of two: only the sum is rounded


def test_sgd_without_momentum_needs_no_buffer() -> None:
    weight, gradient = random(2, 32)
    expected = weight - gradient / 16
    rule = rule_for("SGD", {**SGD, "lr": 1 / 16, "momentum": 0.0, "weight_decay": 0.0}, 1)
    assert rule.states == ()
    kernels.update({"weight": weight, "gradient": gradient}, Spans([(0, 32)]), rule)
    assert same(weight, expected)  # a power of two: only the difference is rounded


@pytest.mark.parametrize("kind", ["AdamW", "SGD", "Lion"])
def test_maximize_goes_the_other_way(kind: str) -> None:
    up, down = flats_for(kind, 16), flats_for(kind, 16)
    down["gradient"].neg_()
    run(kind, up, steps=1, maximize=True)
    run(kind, down, steps=1)
    assert same(up["weight"], down["weight"])


def test_the_first_two_adam_moments_start_with_their_bias_corrected() -> None:
    flats = flats_for("AdamW", 16)
    start, gradient = flats["weight"].clone(), flats["gradient"].clone()
    run("AdamW", flats, steps=1, weight_decay=0.0)
    # at step 1 the corrected moments are g and g², so every weight moves by the learning rate against its sign; both
    # and the root are rounded (a few 1e-7 of the move), eps shortens it by 1e-8 / |g|, the weight is rounded once
    torch.testing.assert_close(flats["weight"], start - 1e-2 * gradient.sign(), rtol=1e-5, atol=1e-6)


def test_a_rule_holds_numbers_of_fp32() -> None:
    for kind, step in itertools.product(KINDS, (1, 7, 100_000)):
        rule = rule_for(kind, OPTIONS[kind], step)
        numbers = [value for value in rule if isinstance(value, float)]
        assert [torch.tensor(value).item() for value in numbers] == numbers


# Stochastic rounding and random bits


def test_random_bits_are_those_of_the_oracle_wherever_they_begin() -> None:
    weights = torch.randn(1000)
    for seed, step, first in itertools.product((0, 42, 2**63 - 1), (1, 2**31), (0, 7, 2**32 - 500, 2**40)):
        expected = oracle.round_stochastically(weights, seed, step, first)
        flats = {"weight": torch.zeros(1000).bfloat16(), "gradient": -weights}
        rule = Rule("SGD", 1.0)
        kernels.update(flats, Spans([(0, 1000, first)]), rule, noise=Noise(seed, step))
        assert same(flats["weight"], expected)


@given(st.integers(0, 2**40), st.integers(1, 200), st.integers(0, 199))
@property_test
def test_bits_of_stochastic_rounding_do_not_depend_on_the_cut(first: int, length: int, cut: int) -> None:
    cut = min(cut, length)
    whole = kernels.random_bits(Noise(3, 5), first, length)
    parts = [kernels.random_bits(Noise(3, 5), first, cut), kernels.random_bits(Noise(3, 5), first + cut, length - cut)]
    assert torch.equal(whole, torch.cat(parts))


def test_stochastic_rounding_keeps_the_mean_and_goes_to_a_neighbour() -> None:
    value = 1 + 3 / 1024  # bf16 has 1 and 1 + 8 / 1024
    weights = torch.full((100_000,), value)
    flats = {"weight": torch.zeros(100_000).bfloat16(), "gradient": -weights}
    kernels.update(flats, Spans([(0, 100_000)]), Rule("SGD", 1.0), noise=Noise(1, 1))
    rounded = flats["weight"].float()
    assert set(rounded.unique().tolist()) == {1.0, 1 + 8 / 1024}
    # a binomial of 100 000 with p = 3/8 deviates by 5 sigma, 0.0077, once in two million
    assert rounded.mean().item() == pytest.approx(value, abs=0.0077 * 8 / 1024)


@pytest.mark.parametrize("special", [math.inf, -math.inf, math.nan, 0.0, -0.0, 1.0])
def test_stochastic_rounding_leaves_what_bf16_can_hold(special: float) -> None:
    flats = {"weight": torch.full((64,), special).bfloat16(), "gradient": torch.zeros(64)}
    before = flats["weight"].clone()
    kernels.update(flats, Spans([(0, 64)]), Rule("SGD", 0.0), noise=Noise(1, 1))
    assert torch.equal(flats["weight"].isnan(), before.isnan())
    assert same(flats["weight"].nan_to_num(), before.nan_to_num())


def test_random_bits_look_random() -> None:
    words = torch.stack([kernels.random_bits(Noise(seed, step), 0, 50_000) for seed in (0, 1) for step in (1, 2)])
    bits = (words.unsqueeze(-1) >> torch.arange(32)) & 1
    # each of 128 means of 50 000 fair bits deviates by 5 sigma, 0.0112, with probability 6e-7
    assert (bits.double().mean(dim=1) - 0.5).abs().max() < 0.0112
    pairs = (bits[:, :-1] == bits[:, 1:]).double().mean(dim=1)
    assert (pairs - 0.5).abs().max() < 0.0112, "neighbours are alike"
    assert len(words.view(-1).unique()) > 199_980  # 200 000 draws of 2^32 collide about five times
