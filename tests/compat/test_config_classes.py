"""deepspeed's classes of a config, and its monitors: wrong values are errors of the kind that scripts catch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import shardengine.compat.deepspeed as deepspeed
from shardengine.errors import ConfigError

precision, zero = deepspeed.runtime.precision_config, deepspeed.runtime.zero.config
WRONG: list[tuple[Any, dict[str, Any], str]] = [
    (precision.DeepSpeedFP16Config, {"loss_scale": -1}, "loss_scale: must be a number of at least 0"),
    (precision.DeepSpeedFP16Config, {"loss_scale": []}, r"loss_scale: must be a number, got \[\]"),
    (precision.DeepSpeedFP16Config, {"loss_scale": float("inf")}, "loss_scale: must be a number, got inf"),
    (precision.DeepSpeedFP16Config, {"min_loss_scale": True}, "min_loss_scale: must be a number, got True"),
    (precision.DeepSpeedFP16Config, {"enabled": True, "loss_scale_window": 0}, "must be a number above 0, got 0"),
    (precision.DeepSpeedFP16Config, {"hysteresis": 1.5}, "hysteresis: must be a whole number, got 1.5"),
    (zero.DeepSpeedZeroConfig, {"stage": 4}, "stage: expected 0, 1, 2 or 3, got 4"),
    (zero.DeepSpeedZeroConfig, {"reduce_bucket_size": 0}, "reduce_bucket_size: expected a number above 0"),
    (zero.DeepSpeedZeroConfig, {"stag": 1}, "stag: unknown key; the nearest valid key is 'stage'"),
    (zero.DeepSpeedZeroConfig, {"offload_param": {"device": "gpu"}}, "device: expected none, cpu or nvme, got 'gpu'"),
]


@pytest.mark.parametrize(("kind", "given", "said"), WRONG)
def test_a_wrong_value_is_a_value_error(kind: Any, given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        kind(**given)


def test_a_script_that_has_pydantic_catches_its_error() -> None:
    pytest.importorskip("pydantic")
    catches = """
import shardengine.compat.deepspeed as deepspeed
kind = deepspeed.runtime.precision_config.DeepSpeedFP16Config
try:
    kind(loss_scale=-1)
except ValueError as error:
    print(type(error).__module__)
import pydantic
try:
    kind(loss_scale=-1)
except pydantic.ValidationError as error:
    print("must be a number of at least 0" in str(error))
"""
    found = subprocess.run([sys.executable, "-c", catches], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["shardengine.errors", "True"]


def test_what_counts_only_where_the_scale_finds_itself_is_not_checked_elsewhere() -> None:
    assert precision.DeepSpeedFP16Config(enabled=True, loss_scale=128, min_loss_scale=0).min_loss_scale == 0
    assert precision.DeepSpeedFP16Config(enabled=False, loss_scale_window=-1).loss_scale_window == -1
    assert zero.DeepSpeedZeroConfig(cpu_offload=True).offload_optimizer.device == "cpu"


@pytest.mark.parametrize(
    ("given", "kind", "said"),
    [
        ({}, AssertionError, "expected train_batch_size or train_micro_batch_size_per_gpu"),
        ({"train_batch_size": 3, "train_micro_batch_size_per_gpu": 2}, AssertionError, "got 3 and 2 × 1 × 1"),
        ({"train_batch_size": 2, "gradient_allreduce_op": "max"}, ValueError, "expected mean or sum, got 'max'"),
    ],
)
def test_a_config_that_cannot_be_is_an_error_of_deepspeeds_kind(given: Any, kind: Any, said: str) -> None:
    with pytest.raises(kind, match=said):
        deepspeed.DeepSpeedConfig(given)


def test_an_engine_answers_from_the_same_config() -> None:
    import torch

    model = torch.nn.Linear(2, 1)
    config = {"train_batch_size": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "gradient_clipping": 0.25}
    engine = deepspeed.initialize(model=model, config=config)[0]
    assert (engine.gradient_clipping(), engine.zero_optimization(), engine.optimizer_name()) == (0.25, False, "sgd")
    assert not engine.monitor.enabled
    engine.destroy()


def test_numbers_of_a_script_are_in_a_file_of_each_name(tmp_path: Path) -> None:
    """As DeepSpeed 0.19.8 writes them."""
    tree = {"train_batch_size": 1, "csv_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "j"}}
    master = deepspeed.monitor.monitor.MonitorMaster(deepspeed.DeepSpeedConfig(tree).monitor_config)
    master.write_events([("Train/Loss", 1.5, 3), ("a", 2, 4)])
    master.write_events([("Train/Loss", 2.5, 5)])
    files = {path.name: path.read_text(encoding="utf-8") for path in (tmp_path / "j").iterdir()}
    assert files == {"Train_Loss.csv": "step,Loss\n3,1.5\n5,2.5\n", "a.csv": "step,a\n4,2.0\n"}


def test_a_log_level_is_that_of_the_logger() -> None:
    logger = deepspeed.utils.logger
    before = logger.level
    with pytest.raises(ConfigError, match="log_level: expected one of DEBUG"):
        deepspeed.initialize(
            model=__import__("torch").nn.Linear(1, 1), config={"train_batch_size": 1, "log_level": "X"}
        )
    assert logger.level == before
