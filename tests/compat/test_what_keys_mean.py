"""Keys and calls that DeepSpeed answers with an error of its own kind, or that change what is counted and cast."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

import shardengine.compat.deepspeed as deepspeed
from shardengine.errors import MismatchError, UsageError
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]
zero = deepspeed.runtime.base_optimizer.ZeROOptimizer


def make(stage: int = 1, optimizer: Any = None, buffer: Any = None, **more: Any) -> Any:
    logging.getLogger("shardengine").setLevel(logging.ERROR)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 1))
    if buffer is not None:
        for each in model:
            each.register_buffer("kept", buffer)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        **({} if optimizer else {"optimizer": {"type": "Adam", "params": {"lr": 0.1}}}),
    }
    config["zero_optimization"].update(more.pop("zero", {}))
    given = None if optimizer is None else optimizer(model.parameters(), lr=0.1)
    return deepspeed.initialize(model=model, optimizer=given, config=config | more)[0]


@pytest.mark.parametrize(
    ("key", "optimizer", "error"),
    [
        ({"zero_allow_untested_optimizer": False}, torch.optim.SGD, AssertionError),
        ({"zero_force_ds_cpu_optimizer": True, "zero": {"offload_optimizer": {"device": "cpu"}}}, torch.optim.Adam,
         deepspeed.runtime.zero.utils.ZeRORuntimeException),
    ],
)  # fmt: skip
def test_what_a_config_does_not_allow_is_refused(key: dict[str, Any], optimizer: Any, error: Any) -> None:
    with pytest.raises(error, match=f"{next(iter(key))} is "):
        make(optimizer=optimizer, **key)
    make(stage=0, optimizer=optimizer, **key).destroy()
    make(optimizer=optimizer, **({"zero": key["zero"]} if "zero" in key else {})).destroy()
    if optimizer is torch.optim.SGD:
        make(optimizer=torch.optim.AdamW, **key).destroy()
    else:
        make(optimizer=deepspeed.ops.adam.DeepSpeedCPUAdam, **key).destroy()


@pytest.mark.parametrize("stage", [0, 3])
def test_buffers_are_cast_where_a_config_says_so(stage: int) -> None:
    engine = make(stage, buffer=torch.ones(2), bf16={"enabled": True})
    assert engine.module[0].kept.dtype == torch.float32
    engine.destroy()
    engine = make(stage, buffer=torch.ones(2), data_types={"buffer_dtype": "bf16"})
    assert engine.module[0].kept.dtype == torch.bfloat16 and engine.module[0].kept is engine.module[1].kept
    assert engine.module[0].weight.dtype == torch.float32 and engine._config.buffer_dtype == "bf16"
    engine.destroy()
    with pytest.raises(deepspeed.DeepSpeedConfigError, match="buffer_dtype: expected one of fp32, fp16, bf16, got 'x'"):
        make(stage, data_types={"buffer_dtype": "x"})


def test_a_key_beside_params_is_told(caplog: pytest.LogCaptureFixture) -> None:
    section = {"type": "Adam", "torch_adam": True, "params": {"lr": 0.1}}
    with caplog.at_level(logging.WARNING, logger="shardengine"):
        model = torch.nn.Linear(2, 1)
        deepspeed.initialize(model=model, config={"train_batch_size": 1, "optimizer": section})[0].destroy()
    assert "optimizer.torch_adam has no effect, as under DeepSpeed: write it into optimizer.params" in caplog.text


def test_no_boundary_is_set_where_every_step_is_one() -> None:
    engine = make(managed_gradient_accumulation=False)
    with pytest.raises(AssertionError, match="set_gradient_accumulation_boundary: expected no call"):
        engine.set_gradient_accumulation_boundary(True)
    engine.destroy()
    engine = make()
    engine.set_gradient_accumulation_boundary(False)
    assert not engine.is_gradient_accumulation_boundary()
    engine.destroy()


@pytest.mark.parametrize(("stage", "more", "scales"), [(0, {}, False), (3, {"bf16": {"enabled": True}}, False),
                                                       (1, {"fp16": {"enabled": True}}, True)])  # fmt: skip
def test_what_the_optimizer_is(stage: int, more: dict[str, Any], scales: bool) -> None:
    engine = make(stage, **more)
    assert isinstance(engine.optimizer, zero) == (stage > 0) and engine.optimizer.needs_scaler() == scales
    engine.destroy()


def of_every_rank(folder: str) -> None:
    engine = make(2)
    groups = engine.optimizer.state_dict()["param_groups"]
    assert groups[0]["lr"] == 0.1 and len(groups) == 1
    with pytest.raises(AssertionError, match="the place given to save_checkpoint differs between ranks") as raised:
        engine.save_checkpoint(folder, f"tag{engine.global_rank}")
    assert isinstance(raised.value, MismatchError)
    engine.destroy()


def test_groups_are_on_every_rank_and_tags_must_be_alike(pools: Pools, tmp_path: Any) -> None:
    pools(2).run(of_every_rank, str(tmp_path))


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_skipped_steps_are_counted_on_without_the_optimizer(stage: int, tmp_path: Any) -> None:
    fp16 = {"enabled": True, "initial_scale_power": 30}
    engine = make(stage, fp16=fp16)
    for _ in range(3):
        engine.backward(engine(torch.full((1, 4), 100.0).half()).sum())
        engine.step()
    assert engine.skipped_steps == 3
    engine.save_checkpoint(tmp_path, "one")
    scale = engine.optimizer.loss_scale
    for given, skipped, kept in (
        ({}, 3, scale),
        ({"load_optimizer_states": False}, 3, 2.0**30),
        ({"load_module_only": True}, 0, 2.0**30),
    ):
        engine = make(stage, fp16=fp16)
        engine.load_checkpoint(tmp_path, "one", **given)
        assert (engine.skipped_steps, engine.optimizer.loss_scale) == (skipped, kept), given
        engine.destroy()


def test_checkpoints_need_no_conversion() -> None:
    with pytest.raises(UsageError, match="a checkpoint loads at any stage and number of ranks as it is"):
        deepspeed.checkpoint.ds_to_universal.main(None)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_derivative_of_torch_func_is_no_share_of_a_step(stage: int) -> None:
    engine = make(stage, gradient_accumulation_steps=4)
    x = torch.ones(1, 4)
    found = torch.func.grad(lambda each: engine(each).sum())(x)
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        first, last = (each.weight.detach().clone() for each in engine.module)
    assert torch.allclose(found, last @ first)
    engine.destroy()
