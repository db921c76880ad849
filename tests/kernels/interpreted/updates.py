"""update under Triton's interpreter, bit for bit with the reference."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardengine.kernels import Noise, Rule, Spans, rule_for, triton
from shardengine.kernels.triton.updating import BLOCK
from tests.kernels import kernel_cases as cases
from tests.kernels.kernel_cases import BF16, FIRST, FP16, FP32, Step

CPU = torch.device("cpu")
OPTIONS: dict[str, dict[str, Any]] = {
    "Adam": {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8},
    "AdamW": {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8},
    "SGD": {"lr": 0.05, "momentum": 0.9, "dampening": 0.1, "nesterov": False},
    "Lion": {"lr": 1e-3, "betas": (0.9, 0.99)},
}
SPANS = Spans([(3, 40), (40, 41), (64, 64), (100, 357, FIRST)])
SIZES = [0, 1, 15, 16, 17, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5]
property_test = settings(max_examples=25, deadline=None, derandomize=True)


def rule(kind: str, step: int = 3, **change: Any) -> Rule:
    return rule_for(kind, {"weight_decay": 0.1, **OPTIONS[kind], **change}, step)


RULES = [
    *(rule(kind, weight_decay=decay, maximize=up) for kind in OPTIONS for decay in (0.0, 0.1) for up in (False, True)),
    *(rule(kind, step) for kind in OPTIONS for step in (1, 1000)),
    *(rule("SGD", step, nesterov=True, dampening=0.0, maximize=up) for step in (1, 2) for up in (False, True)),
    *(rule("SGD", step, momentum=0.0, dampening=0.0) for step in (1, 2)),
    rule("AdamW", lr=0.0),
]


@pytest.mark.parametrize("number", range(len(RULES)))
def test_every_option_of_every_kind(number: int) -> None:
    case = Step(RULES[number], SPANS, factor=0.37)
    cases.check_update(CPU, case)
    cases.check_update(CPU, dataclasses.replace(case, factor=None, gradient=BF16, low=BF16, special=False))
    cases.check_update(CPU, dataclasses.replace(case, weight=BF16, noise=cases.ONE))


@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize(("weight", "gradient"), [*itertools.product((FP32, BF16, FP16), repeat=2)])
def test_every_dtype(kind: str, weight: torch.dtype, gradient: torch.dtype) -> None:
    case = Step(rule(kind), SPANS, weight, gradient, factor=0.5)
    cases.check_update(CPU, dataclasses.replace(case, low=FP16))
    cases.check_update(CPU, dataclasses.replace(case, low=FP32, noise=cases.ONE))


@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize("size", SIZES)
def test_every_size(kind: str, size: int) -> None:
    cases.check_update(CPU, Step(rule(kind), Spans([(16, 16 + size)]), special=False))
    cases.check_update(CPU, Step(rule(kind), Spans([(0, size), (size + 1, 2 * size + 1)]), offset=1))


@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize("states", [BF16, torch.uint8])
def test_states_in_fewer_bytes(kind: str, states: torch.dtype) -> None:
    spans = Spans([(0, 300, FIRST), (512, 512 + BLOCK + 70), (2048, 2049, 5)])
    for drawn in (cases.ONE, None):
        case = Step(rule(kind), spans, factor=0.37, states=states, state_noise=drawn)
        cases.check_update(CPU, case)
        cases.check_update(CPU, dataclasses.replace(case, gradient=BF16, low=BF16, special=False, offset=1))
        cases.check_update(CPU, dataclasses.replace(case, weight=BF16, noise=cases.ONE))
        cases.check_update(CPU, dataclasses.replace(case, weight=BF16, remainder=True))
        cases.check_update(CPU, dataclasses.replace(case, weight=BF16, remainder=True, states=FP32))
    cases.check_update(CPU, Step(rule("SGD", 1, nesterov=True, dampening=0.0), spans, states=states))
    cases.check_update(CPU, Step(rule(kind), spans, states=states, skip=True))


def test_aligned_spans_with_gaps() -> None:
    spans = Spans([(16, 16 + BLOCK), (48 + BLOCK, 64 + BLOCK), (80 + BLOCK, 96 + 3 * BLOCK, FIRST)])
    for kind in OPTIONS:
        cases.check_update(CPU, Step(rule(kind), spans, BF16, BF16, low=BF16, noise=cases.ONE))


@pytest.mark.parametrize("kind", OPTIONS)
def test_a_flag_on_the_device_keeps_everything_as_it_is(kind: str) -> None:
    for skip in (False, True):
        cases.check_update(CPU, Step(rule(kind), SPANS, low=BF16, factor=0.5, skip=skip))
    flats = {name: cases.numbers(400, 1) for name in ("weight", "gradient", "low", *rule(kind).states)}
    before = {name: flat.clone() for name, flat in flats.items()}
    triton.update(flats, SPANS, rule(kind), skip=torch.tensor(True))
    assert all(cases.same(flats[name], before[name]) for name in flats)


@pytest.mark.parametrize("factor", [0.0, -0.0, 1.0, math.inf, math.nan, 1e-45])
def test_any_factor(factor: float) -> None:
    cases.check_update(CPU, Step(rule("AdamW"), SPANS, factor=factor))


def test_no_spans() -> None:
    cases.check_update(CPU, Step(rule("AdamW"), Spans([])))


@given(st.integers(0, 2**63 - 1), st.integers(0, 2**63 - 1), st.integers(0, 2**40))
@property_test
def test_noise_of_any_seed_step_and_place(seed: int, step: int, first: int) -> None:
    cases.check_update(CPU, Step(rule("SGD"), Spans([(1, 90, first)]), BF16, noise=Noise(seed, step)))


@given(st.sampled_from(list(OPTIONS)), st.lists(st.integers(0, 300), max_size=6), st.integers(0, 9))
@property_test
def test_bits_do_not_depend_on_how_elements_are_cut(kind: str, cuts: list[int], seed: int) -> None:
    edges = [0, *sorted(cuts), 300]
    pieces = Spans((a, b, FIRST + a) for a, b in itertools.pairwise(edges))
    made = []
    for spans in (Spans([(0, 300, FIRST)]), pieces):
        flats = {"weight": cases.numbers(300, seed, BF16), "gradient": cases.numbers(300, seed + 1)}
        flats |= {name: cases.numbers(300, seed + 2 + i).abs() for i, name in enumerate(rule(kind).states)}
        triton.update(flats, spans, rule(kind), noise=cases.ONE)
        made.append(flats)
    assert all(cases.same(made[0][name], made[1][name]) for name in made[0])
