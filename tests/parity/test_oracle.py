"""The oracle itself: equal to plain torch on the whole batch, and to rational numbers where it rounds.

Lion has a file of its own (``test_lion.py``).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests import oracle
from tests.support import cases


@pytest.mark.parametrize("model", ["mlp", "gpt2", "llama"])
def test_equals_plain_torch_on_the_whole_batch(model: str) -> None:
    """SGD, 5 steps; rtol 1e-5: plain torch adds the micro-batches' gradients in another order."""
    ranks, micros = 3, 2
    network, plain = cases.MODELS[model](), cases.MODELS[model]()
    trace = oracle.train(
        network, cases.loss_of, ranks=ranks, micros=micros, steps=5, kind="SGD",
        groups=cases.groups_of(network, "SGD"), order="full", clip=cases.CLIP,
    )  # fmt: skip
    optimizer = cases.make_optimizer(plain, "SGD")
    for step in range(5):
        for rank in range(ranks):
            for micro in range(micros):
                loss = cases.loss_of(plain, step, rank, micro)
                assert loss.item() == pytest.approx(trace.losses[step][rank][micro], rel=1e-5)
                (loss / (ranks * micros)).backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), cases.CLIP)
        assert norm.item() == pytest.approx(trace.norms[step], rel=1e-5)
        optimizer.step()
        optimizer.zero_grad()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(trace.parameters[name], parameter.detach(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", ["AdamW", "Adam"])
def test_adam_equals_torch_optim(kind: str) -> None:
    """One rank, one micro-batch, 5 steps; rtol 1e-5: torch.optim's own kernels round in another order."""
    network, plain = cases.make_mlp(), cases.make_mlp()
    trace = oracle.train(network, cases.loss_of, ranks=1, steps=5, kind=kind, groups=cases.groups_of(network, kind))
    optimizer = cases.make_optimizer(plain, kind)
    for step in range(5):
        cases.loss_of(plain, step, 0, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(trace.parameters[name], parameter.detach(), rtol=1e-5, atol=1e-7)


def test_sum_over_ranks_is_a_balanced_tree() -> None:
    terms = [torch.tensor(value) for value in (1e8, 1.0, -1e8, 1.0, 3.0)]
    assert oracle.tree_sum(list(terms)) == ((terms[0] + terms[1]) + (terms[2] + terms[3])) + terms[4]
    assert oracle.tree_sum(list(terms[:3])) == (terms[0] + terms[1]) + terms[2]


def test_orders_differ_for_three_micro_batches() -> None:
    """If they did not, the test of the third letter would prove nothing."""
    full, sharded = (cases.truth("mlp", "SGD", 2, 3, order) for order in ("full", "sharded"))
    assert any(not torch.equal(full.parameters[n], sharded.parameters[n]) for n in full.parameters)


# What is rounded where, one element at a time, in rational numbers: only ``nearest`` rounds.

Numbers = Callable[..., Fraction]
"""``x(rank, micro, number=0)``: the gradient that a backward delivers, of one element in one step."""
DIGITS = {torch.float32: 24, torch.bfloat16: 8}
RANKS, MICROS, STEPS, RATE, ELEMENTS = range(3), range(2), 3, 0.25, 37


def nearest(value: Fraction, dtype: torch.dtype) -> Fraction:
    """The nearest number with the binary digits of ``dtype``; of two the even one."""
    unit = Fraction(2) ** (math.frexp(value)[1] - DIGITS[dtype])
    return round(value / unit) * unit


def add(terms: Iterable[Fraction]) -> Fraction:
    """A sum in fp32, first to last."""
    return functools.reduce(lambda a, b: nearest(a + b, torch.float32), terms)


def over_ranks(sums: Iterable[Fraction], wire: torch.dtype) -> Fraction:
    """Each rank's sum is rounded and sent, what arrives is added up. (0 + 1) + 2: three ranks have no other tree."""
    return add(nearest(local, wire) for local in sums)


def divide(total: Fraction, wire: torch.dtype, divisor: int = len(RANKS)) -> Fraction:
    return nearest(nearest(total / divisor, torch.float32), wire)


class Weight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.weight = nn.Parameter(torch.randn(ELEMENTS))


@functools.cache
def drawn(dtype: torch.dtype, step: int, rank: int, micro: int, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(cases.seed_of(step, rank, micro) + 1_000_000 * number)
    return torch.randn(ELEMENTS, generator=generator).to(dtype)


def products(model: Any, step: int, rank: int, micro: int, count: int) -> list[Tensor]:
    """weight · x, for so many x: the weight's gradient is x, whatever the weight is. Each in a backward of its own."""
    xs = [drawn(model.weight.dtype, step, rank, micro, number).clone().requires_grad_() for number in range(count)]
    return [checkpoint(lambda x: model.weight * x, x, use_reentrant=True).sum() for x in xs]


def one_loss(model: Any, step: int, rank: int, micro: int) -> Tensor:
    return products(model, step, rank, micro, 1)[0]


def two_losses(model: Any, step: int, rank: int, micro: int) -> list[Tensor]:
    return products(model, step, rank, micro, 2)


def delivered_twice(model: Any, step: int, rank: int, micro: int) -> Tensor:
    """One loss. Autograd begins with what ran last, so that number 0 is the late gradient."""
    first, last = products(model, step, rank, micro, 2)
    return first + last


def assert_rounded(loss: Any, micros: int, gradient: Callable[[Numbers], Fraction], **options: Any) -> None:
    """SGD on ``loss``: weights, masters and norms follow from ``gradient(x)``, the complete gradient of one element."""
    model, low = Weight(), options.get("low")
    start = model.weight.tolist()
    sgd = {"lr": RATE, "weight_decay": 0.0, "momentum": 0.0, "dampening": 0.0, "nesterov": False}
    groups: list[dict[str, Any]] = [{"params": [model.weight], **sgd}]
    trace = oracle.train(
        model, loss, ranks=len(RANKS), micros=micros, steps=STEPS, kind="SGD", groups=groups, **options
    )
    dtype = low or torch.float32
    squares = [Fraction(0)] * STEPS
    for element in range(ELEMENTS):
        weight = Fraction(start[element])
        for step in range(STEPS):
            x = functools.partial(number_of, dtype, element, micros, step)
            found = gradient(x)
            squares[step] += found**2
            weight = nearest(weight - Fraction(RATE) * found, torch.float32)
        assert Fraction(trace.parameters["weight"][element].item()) == nearest(weight, dtype), f"weight {element}"
        if low:
            assert Fraction(trace.states["weight"]["master"][element].item()) == weight, f"master {element}"
    assert trace.parameters["weight"].dtype is dtype
    assert trace.norms == [torch.tensor(math.sqrt(total)).item() for total in squares]


def number_of(
    dtype: torch.dtype, element: int, micros: int, step: int, rank: int, micro: int, number: int = 0
) -> Fraction:
    return Fraction(drawn(dtype, step, rank, micro, number)[element].item()) / micros


DTYPES = [(None, None), (torch.bfloat16, None), (torch.bfloat16, torch.float32), (None, torch.bfloat16)]


def sent_as(low: torch.dtype | None, wire: torch.dtype | None) -> torch.dtype:
    return wire or low or torch.float32


@pytest.mark.parametrize("mean", [True, False])
@pytest.mark.parametrize(("low", "wire"), DTYPES)
def test_micro_batches_then_ranks(low: torch.dtype | None, wire: torch.dtype | None, mean: bool) -> None:
    sent = sent_as(low, wire)

    def gradient(x: Numbers) -> Fraction:
        total = over_ranks((add(x(rank, micro) for micro in MICROS) for rank in RANKS), sent)
        return divide(total, sent, len(RANKS) if mean else 1)

    assert_rounded(one_loss, len(MICROS), gradient, order="full", low=low, wire=wire, mean=mean)


@pytest.mark.parametrize(("low", "wire"), DTYPES)
def test_ranks_then_micro_batches(low: torch.dtype | None, wire: torch.dtype | None) -> None:
    sent = sent_as(low, wire)

    def gradient(x: Numbers) -> Fraction:
        return divide(add(over_ranks((x(rank, micro) for rank in RANKS), sent) for micro in MICROS), sent)

    assert_rounded(one_loss, len(MICROS), gradient, order="sharded", low=low, wire=wire)


@pytest.mark.parametrize(("low", "wire"), DTYPES)
def test_every_loss_is_completed_on_its_own(low: torch.dtype | None, wire: torch.dtype | None) -> None:
    sent = sent_as(low, wire)

    def gradient(x: Numbers) -> Fraction:
        first, second = (divide(over_ranks((x(rank, 0, n) for rank in RANKS), sent), sent) for n in range(2))
        return nearest(add([first, second]), sent)

    assert_rounded(two_losses, 1, gradient, low=low, wire=wire)


@pytest.mark.parametrize("order", ["full", "sharded"])
@pytest.mark.parametrize(("low", "wire"), DTYPES)
def test_a_late_gradient_is_completed_on_its_own(low: torch.dtype | None, wire: torch.dtype | None, order: str) -> None:
    """Late is what comes second in a backward that communicates: with "full" the window's last, else each one."""
    sent = sent_as(low, wire)

    def gradient(x: Numbers) -> Fraction:
        if order == "full":
            total = over_ranks((add([x(rank, 0, 1), x(rank, 0, 0), x(rank, 1, 1)]) for rank in RANKS), sent)
            late = over_ranks((x(rank, 1, 0) for rank in RANKS), sent)
        else:
            total = add(over_ranks((x(rank, micro, 1) for rank in RANKS), sent) for micro in MICROS)
            late = over_ranks((add(x(rank, micro, 0) for micro in MICROS) for rank in RANKS), sent)
        return nearest(add([divide(total, sent), divide(late, sent)]), sent)

    assert_rounded(delivered_twice, len(MICROS), gradient, order=order, low=low, wire=wire)


@pytest.mark.parametrize("low", [None, torch.bfloat16])
@pytest.mark.parametrize("kind", ["AdamW", "Adam", "SGD", "Lion"])
def test_a_training_in_two_parts_is_one_training(kind: str, low: torch.dtype | None) -> None:
    network = cases.make_mlp()
    options: dict[str, Any] = {"ranks": 2, "kind": kind, "groups": cases.groups_of(network, kind), "low": low}
    half = oracle.train(network, cases.loss_of, steps=2, **options)
    parts = oracle.train(network, cases.loss_of, steps=4, earlier=half, **options)
    whole = cases.truth("mlp", kind, 2, 1, "full", steps=4, clip=0.0, low=low)
    assert parts.losses == whole.losses and parts.norms == whole.norms and len(whole.norms) == 4
    assert parts.states.keys() == whole.states.keys() == set(parts.trained)
    for name, states in whole.states.items():
        assert torch.equal(parts.parameters[name], whole.parameters[name]), name
        assert parts.states[name].keys() == states.keys()
        assert all(torch.equal(parts.states[name][key], value) for key, value in states.items()), name


class Counting(nn.Module):
    """The output is what its buffer has counted."""

    counted: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.register_buffer("counted", torch.zeros(1))

    def forward(self, x: float) -> Tensor:
        self.counted += x
        return (self.weight * self.counted).sum()


@pytest.mark.parametrize("own", [False, True])
def test_buffers_are_rank_0s_before_each_step_or_each_ranks_own(own: bool) -> None:
    model = Counting()
    groups: list[dict[str, Any]] = [{"params": [model.weight], "lr": 0.0, "betas": (0.9, 0.9), "weight_decay": 0.0}]
    trace = oracle.train(
        model, lambda model, step, rank, micro: model(10.0**rank), ranks=3, micros=2, steps=2, kind="Lion",
        groups=groups, own_buffers=own,
    )  # fmt: skip
    second = [[3.0, 4.0], [30.0, 40.0], [300.0, 400.0]] if own else [[3.0, 4.0], [12.0, 22.0], [102.0, 202.0]]
    assert trace.losses == [[[1.0, 2.0], [10.0, 20.0], [100.0, 200.0]], second]
    assert trace.shown["counted"].item() == 4.0
