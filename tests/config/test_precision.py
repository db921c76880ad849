"""The config's keys of precision: what fits together, and what they make of an engine's dtypes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardengine.config import Config
from shardengine.optim import LossScaler
from shardengine.sharding import precision
from tests.config.test_keys import BATCH, load
from tests.config.test_reader import problems


@pytest.mark.parametrize(
    "section",
    [
        {"fp16": {"loss_scale": 128}},
        {"fp16": {"enabled": False, "initial_scale_power": 20, "hysteresis": 4}},
        {"bf16": {"enabled": False, "master_weights": False, "stochastic_rounding": True}},
        {"fp16": {"min_loss_scale": 1e9}},
    ],
)
def test_numbers_of_a_precision_that_is_off_are_accepted(section: dict[str, Any]) -> None:
    config = load(**section)
    assert not config.fp16.enabled and not config.bf16.enabled


@pytest.mark.parametrize(
    ("wrong", "place", "text"),
    [
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "fp16.enabled", "expected fp16 or bf16, got both"),
        (
            {"bf16": {"enabled": True, "stochastic_rounding": True}},
            "bf16.stochastic_rounding",
            '"master_weights": false',
        ),
        (
            {"fp16": {"enabled": True, "min_loss_scale": 2**17}},
            "fp16.min_loss_scale",
            "2 ** initial_scale_power = 65536",
        ),
        ({"fp16": {"enabled": True, "initial_scale_power": 128}}, "fp16.initial_scale_power", "127"),
        ({"fp16": {"enabled": True, "min_loss_scale": 0}}, "fp16.min_loss_scale", "expected"),
        ({"fp16": {"enabled": True, "hysteresis": 0}}, "fp16.hysteresis", "expected"),
        ({"fp16": {"enabled": True, "loss_scale": 1e-40}}, "fp16.loss_scale", "at least 2 ** -126"),
        ({"fp16": {"enabled": True, "min_loss_scale": 1e-60}}, "fp16.min_loss_scale", "at least 2 ** -126"),
        ({"fp16": {"enabled": True, "loss_scale": 1e39}}, "fp16.loss_scale", "< 3e+38"),
        ({"data_types": {"grad_accum_dtype": "int8"}}, "data_types.grad_accum_dtype", "got"),
        (
            {"data_types": {"optimizer_state_dtype": "int8"}},
            "data_types.optimizer_state_dtype",
            '"fp32" or "bf16" or "8bit"',
        ),
        ({"data_types": {"optimizer_state_dtype": "8-bit"}}, "data_types.optimizer_state_dtype", "got"),
        ({"communication_data_type": "fp64"}, "communication_data_type", "got"),
    ],
)
def test_precisions_that_do_not_fit_together_are_refused(wrong: dict[str, Any], place: str, text: str) -> None:
    (found,) = problems({**BATCH, **wrong})
    assert found.startswith(f"{place}:") and text in found


def scaler_of(config: Config) -> LossScaler | None:
    scaling = precision.of(config).scaling
    return None if scaling is None else LossScaler(scaling)


def test_keys_become_dtypes() -> None:
    plain = precision.of(load(nonfinite_gradients="step"))
    assert plain == precision.Precision() and plain.scaling is None and plain.master_dtype(torch.float32) is None
    low = precision.of(load(bf16={"enabled": True, "master_weights": False, "stochastic_rounding": True}, seed=7))
    assert (low.cast, low.keeps_masters, low.seed) == (torch.bfloat16, False, 7) and low.master_dtype(
        torch.bfloat16
    ) is None
    types = {"grad_accum_dtype": "bf16", "reduce_dtype": "fp16"}
    other = precision.of(load(communication_data_type="fp16", data_types=types))
    assert (other.wire, other.accumulate, other.reduce) == (torch.float16, torch.bfloat16, torch.float16)
    assert (
        precision.of(load(bf16={"enabled": True, "stochastic_rounding": False})).master_dtype(torch.bfloat16)
        is torch.float32
    )
    assert low.master_dtype(torch.bfloat16, copied=True) is torch.bfloat16


def test_numbers_of_the_loss_scale_are_taken_over() -> None:
    said = {"initial_scale_power": 5, "loss_scale_window": 7, "hysteresis": 3, "min_loss_scale": 2}
    scaler = scaler_of(load(fp16={"enabled": True, "consecutive_hysteresis": True, **said}))
    assert scaler is not None and scaler.scale == 32
    policy = scaler.policy
    assert (policy.window, policy.hysteresis, policy.minimum, policy.consecutive, policy.dynamic) == (
        7,
        3,
        2,
        True,
        True,
    )
    fixed = scaler_of(load(fp16={"enabled": True, "loss_scale": 12.5}))
    assert fixed is not None and fixed.scale == 12.5 and not fixed.policy.dynamic
    assert precision.of(load(torch_autocast={"enabled": True, "dtype": "float16"})).scaling is not None
    unscaled = scaler_of(load(torch_autocast={"enabled": True}))
    assert unscaled is not None and unscaled.scale == 1 and not unscaled.policy.dynamic
    assert scaler_of(load(nonfinite_gradients="step")) is None
