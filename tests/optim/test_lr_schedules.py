"""Schedules: their values at the points where they bend, group rates, and what is refused."""

from __future__ import annotations

import copy
import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardengine.config.load import load_config
from shardengine.config.schema import SchedulerConfig
from shardengine.errors import ConfigError
from shardengine.optim.lr_schedules import build, check

LINEAR = {"warmup_num_steps": 10, "warmup_type": "linear"}


def sgd(*rates: float) -> torch.optim.SGD:
    groups = [{"params": [torch.zeros(1, requires_grad=True)], "lr": rate} for rate in rates or (0.1,)]
    return torch.optim.SGD(groups, lr=1.0, momentum=0.5)


def rates(kind: str, params: dict[str, Any], steps: int, optimizer: torch.optim.Optimizer | None = None) -> list[Any]:
    """Rates of every group at steps 0 … steps."""
    optimizer = optimizer or sgd()
    schedule = build(SchedulerConfig(kind, params), optimizer)
    found = []
    for _ in range(steps + 1):
        found.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        schedule.step()
    return found


def at(kind: str, params: dict[str, Any], *steps: int) -> list[float]:
    """Rates of a single group with base rate 0.1 at some steps."""
    found = rates(kind, params, max(steps))
    return [found[step][0] for step in steps]


def refused(kind: str, **params: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        build(SchedulerConfig(kind, params), sgd())
    return caught.value.problems


def test_warmup_lr_rises_in_a_line_and_stays() -> None:
    params = {**LINEAR, "warmup_min_lr": 0.01, "warmup_max_lr": 0.05}
    assert at("WarmupLR", params, 0, 5, 10, 30) == pytest.approx([0.01, 0.03, 0.05, 0.05])


def test_warmup_lr_rises_with_the_logarithm_unless_told() -> None:
    params = {"warmup_num_steps": 16, "warmup_max_lr": 0.4}
    assert at("WarmupLR", params, 0, 1, 3, 15, 16) == pytest.approx([0.0, 0.1, 0.2, 0.4, 0.4])


@pytest.mark.parametrize("kind", ["log", "linear"])
@pytest.mark.parametrize(("steps", "first"), [(0, 0.4), (1, 0.0)])
def test_a_warmup_of_no_steps_or_one_has_no_division_by_zero(kind: str, steps: int, first: float) -> None:
    params = {"warmup_num_steps": steps, "warmup_max_lr": 0.4, "warmup_type": kind}
    assert at("WarmupLR", params, 0, 1) == [first, 0.4]


def test_the_end_of_the_warmup_is_the_peak_exactly() -> None:
    assert at("WarmupLR", {**LINEAR, "warmup_min_lr": 1e-7, "warmup_max_lr": 3e-4}, 10) == [3e-4]


def test_warmup_without_a_peak_keeps_each_groups_rate() -> None:
    assert rates("WarmupLR", LINEAR, 10, sgd(0.1, 0.2))[5] == pytest.approx([0.05, 0.1])
    assert rates("WarmupLR", LINEAR, 10, sgd(0.1, 0.2))[10] == [0.1, 0.2]


def test_a_peak_becomes_the_rate_of_every_group() -> None:
    assert rates("WarmupLR", {**LINEAR, "warmup_max_lr": 0.4}, 10, sgd(0.1, 0.2))[10] == [0.4, 0.4]


def test_a_peak_replaces_the_base_rate_of_an_earlier_schedule() -> None:
    optimizer = sgd(0.1)
    build(SchedulerConfig("StepLR", {"step_size": 1}), optimizer)
    assert rates("WarmupLR", {**LINEAR, "warmup_max_lr": 0.4}, 10, optimizer)[10] == [0.4]


def test_warmup_decay_lr_falls_to_its_minimum_and_stays() -> None:
    params = {**LINEAR, "warmup_min_lr": 0.02, "warmup_max_lr": 0.1, "total_num_steps": 30}
    assert at("WarmupDecayLR", params, 0, 10, 20, 30, 40) == pytest.approx([0.02, 0.1, 0.06, 0.02, 0.02])


def test_warmup_cosine_lr_is_half_a_cosine() -> None:
    params = {**LINEAR, "warmup_min_ratio": 0.5, "cos_min_ratio": 0.2, "total_num_steps": 30}
    quarter = 0.02 + 0.08 * 0.5 * (1 + math.cos(math.pi / 4))
    found = at("WarmupCosineLR", params, 0, 5, 10, 15, 20, 30, 40)
    assert found == pytest.approx([0.05, 0.075, 0.1, quarter, 0.06, 0.02, 0.02])


def test_warmup_cosine_lr_is_a_ratio_of_each_groups_rate() -> None:
    for row in rates("WarmupCosineLR", {**LINEAR, "total_num_steps": 30}, 30, sgd(0.1, 0.3)):
        assert row[1] == pytest.approx(3 * row[0])


@given(st.integers(0, 50), st.integers(1, 50), st.sampled_from(["log", "linear"]), st.floats(0, 1), st.floats(0, 1))
def test_warmup_cosine_lr_rises_then_falls_within_its_bounds(
    warmup: int, rest: int, kind: str, first: float, last: float
) -> None:
    params = {"warmup_num_steps": warmup, "total_num_steps": warmup + rest, "warmup_type": kind}
    params |= {"warmup_min_ratio": first, "cos_min_ratio": last}
    found = [row[0] for row in rates("WarmupCosineLR", params, warmup + rest, sgd(1.0))]
    assert found[warmup] == pytest.approx(1.0)
    assert found[-1] == pytest.approx(last)
    rise, fall = found[: warmup + 1], found[warmup:]
    assert all(a <= b + 1e-12 for a, b in itertools.pairwise(rise))
    assert all(a + 1e-12 >= b for a, b in itertools.pairwise(fall))


CYCLE = {"cycle_min_lr": 0.1, "cycle_max_lr": 0.5, "cycle_first_step_size": 4, "cycle_second_step_size": 8}


def test_one_cycle_rises_and_falls() -> None:
    assert at("OneCycle", CYCLE, 0, 2, 4, 8, 12, 20) == pytest.approx([0.1, 0.3, 0.5, 0.3, 0.1, 0.1])


def test_one_cycle_falls_as_long_as_it_rises_unless_told() -> None:
    params = {key: value for key, value in CYCLE.items() if key != "cycle_second_step_size"}
    assert at("OneCycle", params, 4, 6, 8) == pytest.approx([0.5, 0.3, 0.1])


def test_one_cycle_decays_after_the_cycle() -> None:
    params = {**CYCLE, "decay_step_size": 2, "decay_lr_rate": 0.5}
    assert at("OneCycle", params, 12, 14, 16) == pytest.approx([0.1, 0.1 / 1.5, 0.1 / 2])


def test_one_cycle_moves_momentum_against_the_rate() -> None:
    optimizer = sgd()
    params = {**CYCLE, "cycle_min_mom": 0.8, "cycle_max_mom": 0.9, "decay_mom_rate": 0.1, "decay_step_size": 2}
    schedule = build(SchedulerConfig("OneCycle", params), optimizer)
    found = {}
    for step in range(15):
        found[step] = optimizer.param_groups[0]["momentum"]
        optimizer.step()
        schedule.step()
    assert [found[step] for step in (0, 2, 4, 8, 12, 14)] == pytest.approx([0.9, 0.85, 0.8, 0.85, 0.9, 0.99])


def test_one_cycle_moves_the_first_beta_of_adam() -> None:
    optimizer = torch.optim.AdamW([torch.zeros(1, requires_grad=True)], lr=0.1, betas=(0.5, 0.99))
    build(SchedulerConfig("OneCycle", CYCLE), optimizer)
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.99)


def test_one_cycle_leaves_momentum_alone_when_told() -> None:
    optimizer = sgd()
    build(SchedulerConfig("OneCycle", {**CYCLE, "cycle_momentum": False}), optimizer)
    assert optimizer.param_groups[0]["momentum"] == 0.5


def test_one_cycle_with_momentum_needs_an_optimizer_that_has_it() -> None:
    optimizer = torch.optim.Adagrad([torch.zeros(1, requires_grad=True)], lr=0.1)
    with pytest.raises(ConfigError, match="expected an optimizer with momentum or betas, got Adagrad"):
        build(SchedulerConfig("OneCycle", CYCLE), optimizer)


def test_one_cycle_with_max_lr_is_torchs() -> None:
    schedule = build(SchedulerConfig("OneCycle", {"max_lr": 0.4, "total_steps": 20}), sgd())
    assert isinstance(schedule, torch.optim.lr_scheduler.OneCycleLR)


def test_a_torch_schedule_is_built_by_its_name() -> None:
    config = load_config(
        {"train_batch_size": 1, "scheduler": {"type": "MultiStepLR", "params": {"milestones": [2, 4], "gamma": 0.5}}}
    )
    assert config.scheduler is not None
    found = rates("MultiStepLR", dict(config.scheduler.params), 5)
    assert [row[0] for row in found] == pytest.approx([0.1, 0.1, 0.05, 0.05, 0.025, 0.025])


@pytest.mark.parametrize(
    ("kind", "params"),
    [
        ("WarmupDecayLR", {**LINEAR, "total_num_steps": 30, "warmup_max_lr": 0.1}),
        ("WarmupCosineLR", {**LINEAR, "total_num_steps": 30}),
        ("OneCycle", CYCLE),
        ("CosineAnnealingLR", {"T_max": 30}),
    ],
)
def test_a_schedule_resumes_from_its_state(kind: str, params: dict[str, Any]) -> None:
    whole = rates(kind, params, 12)
    first, second = sgd(), sgd()
    schedule = build(SchedulerConfig(kind, params), first)
    for _ in range(7):
        first.step()
        schedule.step()
    again = build(SchedulerConfig(kind, params), second)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    again.load_state_dict(copy.deepcopy(schedule.state_dict()))
    for step in range(7, 13):
        assert second.param_groups[0]["lr"] == pytest.approx(whole[step][0])
        second.step()
        again.step()


@pytest.mark.parametrize(
    ("kind", "params", "message"),
    [
        (
            "WarmupLR",
            {"warmup_steps": 1},
            'unknown parameter of WarmupLR; the nearest valid key is "scheduler.params.w',
        ),
        ("WarmupLR", {"total_num_steps": 9}, "scheduler.params.total_num_steps: unknown parameter of WarmupLR"),
        ("WarmupLR", {"warmup_num_steps": 1.5}, "warmup_num_steps: expected an integer >= 0, got the number 1.5"),
        (
            "WarmupLR",
            {"warmup_type": "cosine"},
            'warmup_type: expected one of "log", "linear", got the string "cosine"',
        ),
        (
            "WarmupLR",
            {"warmup_min_lr": 2, "warmup_max_lr": 1},
            "warmup_min_lr: expected at most warmup_max_lr, which is 1",
        ),
        ("WarmupLR", {"warmup_min_lr": 2}, "expected at most the rate of every parameter group, one has 0.1"),
        ("WarmupDecayLR", {}, "scheduler.params.total_num_steps: the key is missing"),
        ("WarmupCosineLR", {"total_num_steps": 200}, "expected at least warmup_num_steps, which is 1000, got 200"),
        ("OneCycle", {**CYCLE, "cycle_min_lr": 1}, "cycle_min_lr: expected at most cycle_max_lr, which is 0.5, got 1"),
        ("OneCycle", {**CYCLE, "decay_lr_rate": 1}, "decay_step_size: expected an integer >= 1 beside decay_lr_rate"),
        ("StepLR", {"step_sise": 3, "step_size": 1}, 'the nearest valid key is "scheduler.params.step_size"'),
        ("StepLR", {}, "scheduler.params.step_size: the key is missing, StepLR needs it"),
        ("StepLR", {"step_size": 1, "last_epoch": 3}, "scheduler.params.last_epoch: unknown parameter"),
        ("OneCycleLR", {"max_lr": 1.0}, "torch's OneCycleLR says: You must define either total_steps"),
        ("LambdaLR", {}, "cannot come from JSON, because it needs a Python function"),
        ("ReduceLROnPlateau", {}, "cannot come from JSON, because it needs a metric"),
        (
            "ReduceLROnPlateau",
            {},
            "initialize(lr_scheduler=lambda optimizer: ReduceLROnPlateau(optimizer, ...)); then ",
        ),
        ("WarmupCosine", {}, 'unknown schedule "WarmupCosine"; the nearest valid name is "WarmupCosineLR"'),
        ("LRScheduler", {}, 'unknown schedule "LRScheduler"'),
    ],
)
def test_wrong_names_and_parameters_are_refused(kind: str, params: dict[str, Any], message: str) -> None:
    found = refused(kind, **params)
    assert len(found) == 1
    assert message in found[0]


def test_all_problems_of_a_schedule_are_reported_together() -> None:
    assert len(refused("WarmupCosineLR", warmup_num_step=3, warmup_type=1)) == 3


def test_wrong_parameters_are_told_in_the_order_in_which_they_are_written() -> None:
    wrong = dict.fromkeys(("decay_mom_rate", "cycle_min_mom", "cycle_max_lr", "cycle_min_lr", "decay_lr_rate"), "x")
    assert [problem.split(":")[0] for problem in refused("OneCycle", **wrong)] == [
        f"scheduler.params.{p}" for p in wrong
    ]


def test_check_needs_no_optimizer() -> None:
    check(SchedulerConfig("WarmupLR"))
    with pytest.raises(ConfigError, match="total_num_steps: the key is missing"):
        check(SchedulerConfig("WarmupDecayLR"))
