"""Every class of two libraries of optimizers, where they are installed: what the trial admits is equal to the class on
whole tensors, bit for bit, at stage 3 on two ranks."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shardengine
from shardengine.errors import UsageError
from shardengine.optim.arithmetic import Declared
from tests.support import cases
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]
LIBRARIES = {"pytorch_optimizer": 40, "schedulefree": 5}
"""Package → how many classes are admitted at least."""
STEPS = 4


def classes(package: str) -> dict[str, type[torch.optim.Optimizer]]:
    module = importlib.import_module(package)
    members = {name: getattr(module, name) for name in dir(module)}
    return {n: c for n, c in members.items() if inspect.isclass(c) and issubclass(c, torch.optim.Optimizer)}


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(13, 37), nn.Tanh(), nn.Linear(37, 5))


def loss_of(model: Any, step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x, y = torch.randn(4, 13, generator=generator), torch.randn(4, 5, generator=generator)
    return (model(x) - y).square().mean()


def made(made_by: Any, model: nn.Module) -> Any:
    optimizer = made_by(model.parameters(), lr=1e-2)
    if hasattr(optimizer, "train"):
        optimizer.train()
    return optimizer


def trained(package: str) -> dict[str, dict[str, Any]]:
    """Class → weights, of all that an engine admits."""
    found = {}
    for name, made_by in sorted(classes(package).items()):
        model = make_model()
        try:
            optimizer = made(made_by, model)
        except Exception:  # it wants other arguments, another optimizer, …
            continue
        try:
            engine = shardengine.initialize(
                model, {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 3}},
                optimizer=optimizer, mesh=cases.mesh_of_this_process(),
            )  # fmt: skip
        except UsageError:
            continue
        declared = engine.optimizer is not None and isinstance(engine.optimizer.arithmetic, Declared)
        for step in range(0 if declared else STEPS):
            engine.backward(loss_of(engine, step, engine.rank))
            engine.step()
        weights = {key: cases.copy_out(value).numpy() for key, value in engine.state_dict().items()}
        found.update({} if declared else {name: weights})
        engine.close()
    return found


@pytest.mark.parametrize("package", LIBRARIES)
def test_what_is_admitted_is_the_class_on_whole_tensors(pools: Pools, package: str) -> None:
    pytest.importorskip(package)
    results = pools(2).run(trained, package)
    assert len(results[0]) >= LIBRARIES[package]
    for name, weights in results[0].items():
        model = make_model()
        optimizer = made(classes(package)[name], model)
        for step in range(STEPS):
            gradients = []
            for rank in range(2):
                optimizer.zero_grad()
                loss_of(model, step, rank).backward()
                gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
            for parameter, one, two in zip(model.parameters(), *gradients, strict=True):
                parameter.grad = (one + two) / 2
            optimizer.step()
        for key, value in model.state_dict().items():
            assert torch.equal(value, torch.from_numpy(weights[key])), (name, key)
