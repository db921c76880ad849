"""Modules and parameters of kinds that cannot be trained: TorchScript, complex numbers, fp64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shardengine
from shardengine.errors import UsageError
from tests.support import cases
from tests.support.raising import raises
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]
STAGES = pytest.mark.parametrize("stage", list(cases.STAGES))


def net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def scripted(part: str, how: str) -> Any:
    """``net`` with that part of it as TorchScript; the first layer is frozen."""
    model = net()
    model[0].requires_grad_(False)
    if not part:
        return model
    if part == "all":
        return torch.jit.script(model)
    old = model.get_submodule(part)
    model[int(part)] = torch.jit.script(old) if how == "script" else torch.jit.trace(old, torch.ones(2, 4))
    return model


def refusal(stage: str, part: str, how: str) -> str:
    with pytest.raises(UsageError) as raised:
        initialize(scripted(part, how), stage)
    return str(raised.value)


def initialize(model: nn.Module, stage: str, **options: Any) -> shardengine.Engine:
    config = cases.config_of(stage, optimizer={"type": "SGD", "params": {"lr": 0.1}}, **options)
    return cases.make_engine(model, config, None)


@STAGES
@pytest.mark.parametrize("how", ["script", "trace"])
def test_a_trained_part_of_torchscript_is_refused_by_name(pools: Pools, stage: str, how: str) -> None:
    for text in pools(2).run(refusal, stage, "1", how):
        assert "module '1' is TorchScript (torch.jit.script or torch.jit.trace) with the parameter 'weight'" in text
        assert '"ignored_parameters": ["1.*"] in the config where it is frozen' in text


@STAGES
def test_a_model_of_torchscript_is_refused(stage: str) -> None:
    text = refusal(stage, "all", "script")
    assert "the model is TorchScript" in text and "expected the Python module that it was made from" in text


def weights_beside(stage: str, part: str, how: str) -> Any:
    """After three steps, with that part as TorchScript, or with no part of it ("")."""
    engine = initialize(scripted(part, how), stage, ignored_parameters=["0.*"])
    for step in range(3):
        torch.manual_seed(10 * step + engine.rank)
        engine.backward(engine(torch.randn(6, 4)).square().mean())
        engine.step()
    found = {name: cases.copy_out(value).numpy() for name, value in engine.state_dict().items()}
    engine.close()
    return found


@STAGES
@pytest.mark.parametrize(("ranks", "part", "how"), [(1, "2", "script"), (2, "0", "trace"), (3, "0", "script")])
def test_parts_without_trained_parameters_stay_as_they_are(
    pools: Pools, stage: str, ranks: int, part: str, how: str
) -> None:
    pool = pools(ranks)
    found, plain = pool.run(weights_beside, stage, part, how)[0], pool.run(weights_beside, "0", "", "")[0]
    assert found.keys() == plain.keys()
    assert all(found[name].tobytes() == plain[name].tobytes() for name in plain)


@STAGES
def test_kinds_of_parameters_that_are_not_trained(stage: str) -> None:
    model = net()
    model.extra = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    with raises("model-dtype-not-trainable", "'extra'", "torch.complex64"):
        initialize(model, stage)
    with raises("model-dtype-not-trainable", "'0.weight'", "torch.float64"):
        initialize(net().double(), stage)
    model.extra.requires_grad_(False)
    engine = initialize(model, stage)
    engine.close()
    assert torch.equal(model.extra, torch.ones(3, dtype=torch.complex64))
