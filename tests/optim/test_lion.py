"""Lion: the kernel, the torch optimizer and the oracle against the paper's algorithm in rational numbers, exactly."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardengine import kernels
from shardengine.errors import UsageError
from shardengine.optim.lion import Lion
from tests import oracle

Result = tuple[Tensor, Tensor]
"""Weights and averages."""
# Powers of two, so that fp32 holds every intermediate value and no order of operations can matter. The betas differ.
NICE: dict[str, Any] = {"lr": 0.125, "betas": (0.5, 0.75), "weight_decay": 0.25}
WEIGHTS = [0.75, -0.5, 0.0, 1.25, -1.0]
# per step; in the second the average and the gradient of the first element cancel: sign(0) = 0
GRADIENTS = [
    [1.0, -2.0, 0.0, 0.5, 3.0],
    [-0.25, 1.0, 0.0, -4.0, 3.0],
    [2.0, 1.0, -1.0, 0.125, -0.5],
    [-1.0, 0.5, 0.25, 0.125, -8.0],
]


def by_hand(weight: float, gradients: list[float], options: dict[str, Any]) -> tuple[Fraction, Fraction]:
    """One element, as algorithm 2 of arXiv 2302.06675 is written: (weight, average)."""
    rate, decay, beta1, beta2 = (Fraction(v) for v in (options["lr"], options["weight_decay"], *options["betas"]))
    theta, average = Fraction(weight), Fraction(0)
    for gradient in map(Fraction, gradients):
        blend = beta1 * average + (1 - beta1) * gradient
        theta = theta - rate * ((blend > 0) - (blend < 0) + decay * theta)
        average = beta2 * average + (1 - beta2) * gradient
    return theta, average


def by_kernel(start: Tensor, gradients: list[Tensor], options: dict[str, Any], factor: Tensor | None = None) -> Result:
    weight, average = start.clone(), torch.zeros_like(start)
    spans = kernels.Spans([(0, start.numel())])
    for gradient in gradients:
        flats = {"weight": weight, "gradient": gradient, "exp_avg": average}
        kernels.update(flats, spans, kernels.rule_for("Lion", options, 1), factor=factor)
    return weight, average


def by_optimizer(start: Tensor, gradients: list[Tensor], options: dict[str, Any]) -> Result:
    parameter = nn.Parameter(start.clone())
    optimizer = Lion([parameter], **options)
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
    return parameter.detach(), optimizer.state[parameter]["exp_avg"]


def by_oracle(start: Tensor, gradients: list[Tensor], options: dict[str, Any], factor: Tensor | None = None) -> Result:
    parameter = nn.Parameter(start.clone())
    optimizer = oracle.Optimizer("Lion", [{"params": [parameter], **options}], {})
    for gradient in gradients:
        optimizer.step({parameter: gradient}, torch.tensor(1.0) if factor is None else factor)
    return parameter.detach(), optimizer.state[parameter]["exp_avg"][: start.numel()]


def assert_exact(found: Result, scale: float = 1.0) -> None:
    """scale: what each gradient is multiplied with."""
    for i, start in enumerate(WEIGHTS):
        theta, average = by_hand(start, [scale * row[i] for row in GRADIENTS], NICE)
        assert Fraction(found[0][i].item()) == theta, f"weight {i}"
        assert Fraction(found[1][i].item()) == average, f"average {i}"


def rows() -> list[Tensor]:
    return [torch.tensor(row) for row in GRADIENTS]


@pytest.mark.parametrize("run", [by_kernel, by_optimizer, by_oracle])
def test_an_update_is_the_papers(run: Callable[..., Result]) -> None:
    assert_exact(run(torch.tensor(WEIGHTS), rows(), NICE))


@pytest.mark.parametrize("run", [by_kernel, by_oracle])
def test_clipping_multiplies_the_gradient_first(run: Callable[..., Result]) -> None:
    assert_exact(run(torch.tensor(WEIGHTS), rows(), NICE, torch.tensor(0.25)), scale=0.25)


@pytest.mark.parametrize("run", [by_kernel, by_optimizer])
def test_maximize_follows_the_gradient(run: Callable[..., Result]) -> None:
    assert_exact(run(torch.tensor(WEIGHTS), rows(), {**NICE, "maximize": True}), scale=-1.0)


@pytest.mark.parametrize("run", [by_kernel, by_optimizer, by_oracle])
def test_usual_numbers_are_those_of_fp64(run: Callable[..., Result]) -> None:
    """rtol and atol: some roundings of fp32 per step on values of about 1."""
    generator = torch.Generator().manual_seed(4)
    start, *gradients = (torch.randn(500, generator=generator) for _ in range(6))
    theta, average = start.double(), torch.zeros(500, dtype=torch.float64)
    for gradient in gradients:
        theta = theta - 1e-3 * torch.sign(average.lerp(gradient.double(), 0.1)) - 1e-3 * 0.1 * theta
        average = average.lerp(gradient.double(), 0.01)
    found = run(start, gradients, {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.1})
    torch.testing.assert_close(found[0].double(), theta, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found[1].double(), average, rtol=1e-6, atol=1e-7)


def test_the_defaults_are_the_papers() -> None:
    (group,) = Lion([nn.Parameter(torch.zeros(1))]).param_groups
    options = {key: value for key, value in group.items() if key != "params"}
    assert options == {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0, "maximize": False}


def test_groups_keep_their_options_and_what_has_no_gradient_stays() -> None:
    slow, fast, unused = (nn.Parameter(torch.zeros(2)) for _ in range(3))
    optimizer = Lion([{"params": [slow]}, {"params": [fast, unused], "lr": 0.5}], lr=0.25)
    slow.grad, fast.grad = torch.tensor([1.0, -1.0]), torch.tensor([-3.0, 0.0])
    optimizer.step()
    assert slow.tolist() == [-0.25, 0.25] and fast.tolist() == [0.5, 0.0] and unused.tolist() == [0.0, 0.0]
    assert set(optimizer.state) == {slow, fast}


def test_a_closure_runs_with_grad_before_the_update_and_its_loss_comes_back() -> None:
    parameter = nn.Parameter(torch.tensor([2.0]))
    optimizer = Lion([parameter], lr=0.5)

    def closure() -> Tensor:
        loss = parameter.square().sum()
        loss.backward()
        return loss

    with torch.no_grad():
        assert optimizer.step(closure).item() == 4.0
    assert parameter.item() == 1.5
    assert optimizer.step() is None


@pytest.mark.parametrize("what", ["bfloat16", "sparse"])
def test_other_dtypes_and_sparse_gradients_are_refused(what: str) -> None:
    parameter = nn.Parameter(torch.ones(2, 2, dtype=torch.bfloat16 if what == "bfloat16" else torch.float32))
    parameter.grad = torch.ones_like(parameter) if what == "bfloat16" else torch.eye(2).to_sparse()
    with pytest.raises(UsageError, match=f"expected dense fp32 parameters, got .*{what}"):
        Lion([parameter]).step()
    assert parameter.eq(1).all()
