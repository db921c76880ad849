"""engine.backward beside loss.backward(): arguments, what is refused, graphs that are older than the weights."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import shardengine
from shardengine.errors import UsageError
from tests import cases

STAGES = list(cases.STAGES)


def engine_of(stage: str, model: nn.Module | None = None, micros: int = 1, **options: Any) -> shardengine.Engine:
    return cases.make_engine(model or cases.make_mlp(), cases.config_of(stage, micros, **options), "SGD")


def digest(engine: shardengine.Engine) -> str:
    return cases.digest([cases.local_state(engine)])


@pytest.mark.parametrize("stage", STAGES)
def test_a_gradient_for_a_loss_that_is_no_scalar(stage: str) -> None:
    torch.manual_seed(3)
    x, weights = torch.randn(5, 7), torch.randn(5, 3)
    engine, plain = engine_of(stage, micros=2), engine_of(stage, micros=2)
    for _ in range(2):
        engine.backward(engine(x), weights)
        plain.backward((plain(x) * weights).sum())
        engine.step()
        plain.step()
    assert engine.global_steps == 1
    assert digest(engine) == digest(plain)


def test_a_loss_that_is_no_scalar_without_a_gradient_is_refused() -> None:
    engine = engine_of("2")
    with pytest.raises(UsageError, match=r"gradient= for one that is no scalar, came \(5, 3\)"):
        engine.backward(engine(torch.randn(5, 7)))
    with pytest.raises(UsageError, match="without requires_grad"):
        engine.backward(torch.zeros(()))
    engine.backward(cases.loss_of(engine, 0, 0, 0))
    engine.step()
    assert engine.global_steps == 1


@pytest.mark.parametrize("stage", STAGES)
def test_a_graph_that_is_older_than_the_weights_is_refused_by_torch(stage: str) -> None:
    """As after any torch optimizer's step: its backward would mix old activations with new weights."""
    engine = engine_of(stage)
    old = cases.loss_of(engine, 0, 0, 0)
    engine.backward(cases.loss_of(engine, 1, 0, 0))
    engine.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        engine.backward(old)
    engine.zero_grad()
    engine.backward(cases.loss_of(engine, 2, 0, 0))
    engine.step()


@pytest.mark.parametrize("stage", STAGES)
def test_calls_that_end_a_backward_without_the_engine(stage: str) -> None:
    """The norm may be asked for, clipping be set, the window be dropped, before the step."""
    engine, plain = engine_of(stage), engine_of(stage)
    cases.loss_of(engine, 7, 0, 0).backward()
    engine.zero_grad()
    for each, raw in ((engine, True), (plain, False)):
        loss = cases.loss_of(each, 0, 0, 0)
        if raw:
            loss.backward()
        else:
            each.backward(loss)
        assert each.clip_grad_norm_(0.1) == each.get_global_grad_norm()
        each.step()
    assert digest(engine) == digest(plain)
    assert engine.micro_steps == plain.micro_steps + 1


@pytest.mark.parametrize("stage", STAGES)
def test_micro_batches_are_counted_without_the_engine(stage: str) -> None:
    engine = engine_of(stage, micros=3)
    for micro in range(3):
        (cases.loss_of(engine.module, 0, 0, micro) / 3).backward()
        assert engine.is_gradient_accumulation_boundary() == (micro == 2)
    engine.step()
    assert (engine.global_steps, engine.micro_steps) == (1, 3)


@pytest.mark.parametrize("stage", ["0", "1", "2"])
def test_a_copy_of_the_model_does_not_drive_the_engine(stage: str) -> None:
    engine = engine_of(stage)
    copies = [copy.deepcopy(engine.module), pickle.loads(pickle.dumps(engine.module))]
    cases.loss_of(engine, 0, 0, 0).backward()
    for copied in copies:
        cases.loss_of(copied, 1, 0, 0).backward()
        assert all(p.grad is not None for p in copied.parameters())
    engine.step()
    assert engine.micro_steps == 1


def test_sparse_gradients_are_refused_by_name_at_the_start() -> None:
    model: Any = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 1))
    with pytest.raises(UsageError, match=r"'0' .*sparse=True.*'0.weight'"):
        engine_of("2", model)
    model[0].weight.requires_grad_(False)
    engine_of("2", model).close()


@pytest.mark.parametrize("stage", ["0", "1", "2"])
def test_master_weights_follow_what_is_loaded_into_the_module(stage: str) -> None:
    engine = engine_of(stage, bf16={"enabled": True})
    loaded = {name: torch.full_like(value, 0.5) for name, value in engine.module.state_dict().items()}
    loaded["out.bias"] = engine.module.state_dict()["out.bias"]
    before = {(name, key): values for name, key, _, values in cases.local_state(engine)}
    engine.module.load_state_dict(loaded)
    engine.backward(cases.loss_of(engine, 0, 0, 0) * 0.0)
    for name, key, _, values in cases.local_state(engine):
        if key == "weight":
            kept = before[name, key]
            assert (values == kept).all() if name == "out.bias" else (values == 0.5).all(), name


@pytest.mark.parametrize("stage", STAGES)
def test_master_weights_follow_what_is_written_in_full_params(stage: str) -> None:
    engine = engine_of(stage, bf16={"enabled": True})
    before = {(name, key): values for name, key, _, values in cases.local_state(engine)}
    module: Any = engine.module
    with engine.full_params(writable=True), torch.no_grad():
        module.inp.weight.fill_(0.25)
    after = {(name, key): values for name, key, _, values in cases.local_state(engine)}
    assert (after["inp.weight", "weight"] == 0.25).all()
    assert (after["out.weight", "weight"] == before["out.weight", "weight"]).all(), "unwritten masters keep their bits"
