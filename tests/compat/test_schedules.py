"""The schedules of DeepSpeed: its own numbers, as classes, from a config, and from a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardengine.compat.deepspeed as deepspeed
from shardengine.compat.deepspeed import schedules
from shardengine.errors import ConfigError
from tests.compat.test_own_loops import batch_of, config_of, make_model
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]
RECORDED = json.loads(Path(__file__).parents[1].joinpath("data/deepspeed_schedules.json").read_text(encoding="utf-8"))
"""Of DeepSpeed 0.19.8: after each step the rates of two groups, whose own are 0.5 and 0.25, and the betas of one."""


@pytest.mark.parametrize("case", RECORDED, ids=lambda case: case["type"])
def test_the_numbers_are_those_of_deepspeed_bit_for_bit(case: dict[str, Any]) -> None:
    groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": rate} for rate in (0.5, 0.25)]
    optimizer = torch.optim.AdamW(groups)
    schedule = getattr(deepspeed.runtime.lr_schedules, case["type"])(optimizer, **case["options"])
    for expected in case["rates"]:
        found = [*(group["lr"] for group in optimizer.param_groups), *optimizer.param_groups[0]["betas"]]
        assert found == expected
        assert schedule.get_last_lr() == expected[:2]
        if case["type"] == "OneCycle" and case["options"].get("cycle_momentum", True):
            assert list(schedule.get_mom()[0]) == expected[2:] or schedule.last_batch_iteration == -1
        schedule.step()


def test_options_are_named_where_they_are_wrong() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    classes = deepspeed.runtime.lr_schedules
    with pytest.raises(TypeError, match=r"WarmupDecayLR: 'warmup_step' is unknown, .*; 'total_num_steps' is missing"):
        classes.WarmupDecayLR(optimizer, warmup_step=3)
    with pytest.raises(ValueError, match="expected 1 values, one per parameter group, got 2"):
        classes.LRRangeTest(optimizer, [0.1, 0.2])
    with pytest.raises(TypeError, match="expected a torch optimizer, got str"):
        classes.WarmupLR("sgd")
    assert classes.OneCycle(optimizer, 0.1, 0.2).get_mom() is None
    assert classes.WARMUP_NUM_STEPS == "warmup_num_steps" and set(classes.VALID_LR_SCHEDULES) == set(schedules.CLASSES)


def of_a_config(stage: int, folder: str) -> None:
    """LRRangeTest from a config; its rates go on from a checkpoint; one that is given counts before the config's."""

    def step(engine: Any) -> None:
        x, y = batch_of(engine.global_rank, 0)
        engine.backward(nn.functional.mse_loss(engine(x), y))
        engine.step()

    section = {"type": "LRRangeTest", "params": {"lr_range_test_min_lr": 0.25, "lr_range_test_step_size": 4}}
    config = {**config_of(stage), "gradient_accumulation_steps": 1, "scheduler": section}
    engine, _, _, scheduler = deepspeed.initialize(model=make_model(), config=config)
    assert isinstance(scheduler, deepspeed.runtime.lr_schedules.LRRangeTest)
    for expected in (0.25, 0.3125, 0.375):
        assert engine.get_lr() == [expected]
        step(engine)
    engine.save_checkpoint(folder)
    engine.destroy()
    engine, *_ = deepspeed.initialize(model=make_model(), config=config)
    engine.load_checkpoint(folder)
    assert engine.get_lr() == [0.4375] and engine.lr_scheduler.last_batch_iteration == 2
    step(engine)
    assert engine.get_lr() == [0.5]
    engine.destroy()
    model = make_model()
    given = torch.optim.SGD(model.parameters(), lr=1.0)
    own = deepspeed.runtime.lr_schedules.WarmupLR(given, 0.0, 1.0, 4, "linear")
    engine, *_ = deepspeed.initialize(model=model, optimizer=given, lr_scheduler=own, config=config)
    step(engine)
    step(engine)
    assert given.param_groups[0]["lr"] == 0.25
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 3])
def test_a_config_names_one_and_a_checkpoint_goes_on(stage: int, pools: Pools, tmp_path: Path) -> None:
    pools(2).run(of_a_config, stage, str(tmp_path))


@pytest.mark.parametrize(
    ("params", "said"),
    [({"warmup_steps": 3}, "'warmup_steps' is unknown"), ({"warmup_num_steps": 0}, "expected a whole number above 0")],
)
def test_a_config_with_wrong_options_is_refused(params: dict[str, Any], said: str) -> None:
    config = {**config_of(1), "scheduler": {"type": "WarmupLR", "params": params}}
    with pytest.raises(deepspeed.DeepSpeedConfigError, match=said) as raised:
        deepspeed.initialize(model=make_model(), config=config)
    assert isinstance(raised.value, ConfigError)
