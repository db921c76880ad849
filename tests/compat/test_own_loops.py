"""Loops that are written for DeepSpeed train bit for bit as the engine's own; checkpoints, gathering, refusals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardengine
import shardengine.compat.deepspeed as deepspeed
from shardengine.errors import UsageError
from tests.support import cases
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]
RANKS, STEPS = 2, 3
CONFIG = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "gradient_clipping": 0.5}
ADAM = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}
SCHEDULE = {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 4}}}


def config_of(stage: int, **more: Any) -> dict[str, Any]:
    return {**CONFIG, **ADAM, **more, "zero_optimization": {"stage": stage}}


def batch_of(rank: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * rank + number)
    return torch.randn(4, 8, generator=generator), torch.randn(4, 3, generator=generator)


def make_model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))


def train_ours(stage: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    engine = shardengine.initialize(make_model(), config_of(stage, **SCHEDULE))
    losses = []
    for number in range(2 * STEPS):
        x, y = batch_of(engine.rank, number)
        loss = nn.functional.mse_loss(engine(x), y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.close()
    return losses, {name: value.clone() for name, value in engine.module.state_dict().items()}


def whole(engine: Any) -> dict[str, torch.Tensor]:
    """Copies of all weights, as scripts for DeepSpeed read them."""
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        return {name: value.detach().clone() for name, value in engine.module.named_parameters()}


def train_theirs(stage: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """As a script for DeepSpeed does: the scheduler is the config's, the framework's boundary, gradients forgotten."""
    model = make_model()
    engine, optimizer, loader, scheduler = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config_of(stage, **SCHEDULE)
    )
    assert loader is None and nn.Module in type(engine).__mro__ and engine.module is model and scheduler is not None
    assert isinstance(optimizer, torch.optim.Optimizer) and engine.optimizer is optimizer
    losses = []
    for number in range(2 * STEPS):
        x, y = batch_of(deepspeed.comm.get_rank(), number)
        engine.zero_grad()
        loss = nn.functional.mse_loss(engine(x), y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    assert engine.global_steps == STEPS and engine.get_lr() == [group["lr"] for group in optimizer.param_groups]
    weights = whole(engine)
    engine.destroy()
    engine.destroy()
    return losses, weights


def both(stage: int) -> None:
    ours, weights = train_ours(stage)
    theirs, same = train_theirs(stage)
    assert ours == theirs
    for name, value in weights.items():
        assert torch.equal(value, same[name]), name


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_loop_for_deepspeed_is_the_engines_own_bit_for_bit(stage: int, pools: Pools) -> None:
    pools(RANKS).run(both, stage)


def host_divides(stage: int) -> None:
    """A framework that says the boundary and divides itself: losses of three micro-batches, of which the last ends."""
    results = []
    for divides in (True, False):
        model = make_model()
        given = torch.optim.AdamW(model.parameters(), lr=1e-2)
        engine, *_ = deepspeed.initialize(model=model, optimizer=given, config_params=config_of(stage))
        for number in range(4):
            x, y = batch_of(deepspeed.comm.get_rank(), number)
            engine.set_gradient_accumulation_boundary(is_boundary=number % 2 == 1)
            loss = nn.functional.mse_loss(engine(x), y)
            engine.backward(loss / 2, scale_wrt_gas=False) if divides else engine.backward(loss)
            if number % 2 == 1:
                engine.step()
        assert engine.global_steps == 2 and engine.get_global_grad_norm() > 0
        results.append(whole(engine))
        engine.destroy()
    for name, value in results[0].items():
        assert torch.equal(value, results[1][name]), name


@pytest.mark.parametrize("stage", [1, 3])
def test_a_framework_may_say_the_boundary_and_divide_by_itself(stage: int, pools: Pools) -> None:
    pools(RANKS).run(host_divides, stage)


def save_and_resume(stage: int, folder: str) -> None:
    def step(engine: Any, number: int) -> float:
        x, y = batch_of(deepspeed.comm.get_rank(), number)
        loss = nn.functional.mse_loss(engine(x), y)
        engine.backward(loss)
        engine.step()
        return loss.item()

    config = {**config_of(stage), "gradient_accumulation_steps": 1}
    engine, *_ = deepspeed.initialize(model=make_model(), config=config)
    assert engine.load_checkpoint(folder) == (None, None)
    step(engine, 0)
    assert engine.save_checkpoint(folder, client_state={"epoch": 4})
    after = [step(engine, number) for number in (1, 2)]
    engine.destroy()
    assert Path(folder, "latest").read_text(encoding="utf-8").strip() == "global_step1"
    engine, *_ = deepspeed.initialize(model=make_model(), config={**config, "zero_optimization": {"stage": 3 - stage}})
    path, client = engine.load_checkpoint(folder)
    assert path is not None and client == {"epoch": 4} and engine.global_steps == 1
    assert [step(engine, number) for number in (1, 2)] == pytest.approx(after, abs=1e-6)
    engine.destroy()


@pytest.mark.parametrize("stage", [1, 3])
def test_a_checkpoint_is_resumed_at_another_stage(stage: int, pools: Pools, tmp_path: Path) -> None:
    pools(RANKS).run(save_and_resume, stage, str(tmp_path))


def gather() -> None:
    model, other = make_model(), make_model()
    weight: Any = model[0].weight
    bias: Any = other[4].bias
    whole = {name: value.clone() for name, value in model.state_dict().items()}
    with deepspeed.zero.Init(config_dict_or_path=config_of(3)):
        assert not hasattr(weight, "ds_id")
    engines = [deepspeed.initialize(model=each, config=config_of(3))[0] for each in (model, other)]
    status = deepspeed.runtime.zero.partition_parameters.ZeroParamStatus
    assert weight.ds_shape == (16, 8) and weight.ds_numel == 128 and weight.ds_status is status.NOT_AVAILABLE
    assert not torch.equal(weight.detach(), whole["0.weight"])
    with deepspeed.zero.GatheredParameters([*model.parameters(), *other.parameters()]):
        assert weight.ds_status is status.AVAILABLE
        assert torch.equal(weight.detach(), whole["0.weight"]) and torch.equal(bias, whole["4.bias"])
    assert weight.ds_status is status.NOT_AVAILABLE
    with deepspeed.zero.GatheredParameters(weight, modifier_rank=0):
        if deepspeed.comm.get_rank() == 0:
            weight.data.fill_(2.0)
    with deepspeed.zero.GatheredParameters(weight, enabled=True):
        assert torch.equal(weight.detach(), torch.full((16, 8), 2.0))
    assert torch.equal(deepspeed.utils.safe_get_full_fp32_param(weight), torch.full((16, 8), 2.0))
    with pytest.raises(UsageError, match="modifier_rank None or 0"):
        deepspeed.zero.GatheredParameters(weight, modifier_rank=1)
    state = engines[0]._zero3_consolidated_16bit_state_dict()
    assert (set(state) == set(whole)) if deepspeed.comm.get_rank() == 0 else state == {}
    for engine in engines:
        engine.destroy()
    assert not hasattr(weight, "ds_id")
    again = deepspeed.initialize(model=model, config=config_of(3))[0]  # takes the shards over
    with deepspeed.zero.GatheredParameters(weight):
        assert torch.equal(weight.detach(), torch.full((16, 8), 2.0))
    again.destroy()


def test_sharded_parameters_are_gathered_by_the_engine_that_holds_them(pools: Pools) -> None:
    pools(RANKS).run(gather)


def overflow() -> None:
    model = make_model()
    config = {**config_of(2), "gradient_accumulation_steps": 1, "fp16": {"enabled": True, "initial_scale_power": 4}}
    given = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine, optimizer, *_ = deepspeed.initialize(model=model, optimizer=given, config=config)
    seen = []
    for factor in (1.0, float("inf"), 1.0):
        x, y = batch_of(deepspeed.comm.get_rank(), 0)
        engine.backward(nn.functional.mse_loss(engine(x.half()).float(), y) * factor)
        engine.step()
        seen.append(optimizer.overflow)
    assert seen == [False, True, False]
    engine.destroy()


def test_an_optimizer_says_that_its_step_was_skipped(pools: Pools) -> None:
    pools(RANKS).run(overflow)


def again_on_the_same_model() -> None:
    model = make_model()
    first, *_ = deepspeed.initialize(model=model, config=config_of(3))
    second, optimizer, *_ = deepspeed.initialize(model=model, config={"train_micro_batch_size_per_gpu": 4})
    assert optimizer is None and second.optimizer is None and first.optimizer is None
    with torch.no_grad():
        assert second(batch_of(0, 0)[0]).shape == (4, 3)
    with pytest.raises(UsageError, match="was destroyed"):
        first.step()
    second.destroy()


def test_a_model_that_an_engine_holds_is_taken_over(pools: Pools) -> None:
    pools(RANKS).run(again_on_the_same_model)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"model": "net"}, "expected model=, a torch module, got str"),
        ({"mpu": object()}, "mpu= is not available"),
        ({"training_data": iter([1])}, "expected training_data with a length"),
        ({"config": None}, "expected config="),
        ({"colour": 1}, "colour= is unknown"),
    ],
)
def test_arguments_of_initialize_that_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        deepspeed.initialize(**{"model": cases.make_mlp(), "config": config_of(0), **given})


def test_a_config_that_means_something_else_here(caplog: pytest.LogCaptureFixture) -> None:
    config = config_of(2)
    config["zero_optimization"] |= {"offload_param": {"device": "cpu"}}
    model = make_model()
    engine, _, _, scheduler = deepspeed.initialize(
        model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.5), config={**config, **SCHEDULE}
    )
    assert "offload_param has no effect below stage 3" in caplog.text and "optimizer has no effect" in caplog.text
    assert engine.get_lr() != [0.5] and scheduler is engine.lr_scheduler
    assert engine.config["zero_optimization"]["offload_param"] == {"device": "cpu"}
    engine.destroy()
