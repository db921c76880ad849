"""One mistake in a config is one problem: nothing is reported that only follows from it."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardengine.config.load import load_config
from shardengine.errors import ConfigError

Tree = dict[str, Any]
BATCH: Tree = {"train_micro_batch_size_per_gpu": 2}
ADAMW: Tree = {"type": "AdamW", "params": {"lr": 1e-3}}
SGD: Tree = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, "nesterov": True}}

FINE: dict[str, Tree] = {
    "disk": {
        "train_batch_size": 8,
        **BATCH,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0,
        "optimizer": ADAMW,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {
                "device": "nvme",
                "nvme_path": "/disk",
                "ratio": "auto",
                "device_memory": 1000,
                "step_in_backward": True,
            },
            "offload_param": {"device": "nvme", "nvme_path": "/disk"},
        },
        "bf16": {"enabled": True, "master_weights": False, "stochastic_rounding": True},
        "activation_checkpointing": {"enabled": True, "cpu_offload": True},
        "nonfinite_gradients": "raise",
        "aio": {"block_size": 4096},
        "communication_data_type": "fp32",
    },
    "dynamic loss scale": {
        **BATCH,
        "optimizer": SGD,
        "zero_optimization": {"stage": 2},
        "nonfinite_gradients": "skip",
        "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 17, "min_loss_scale": 131072},
    },
    "fixed loss scale": {
        **BATCH,
        "optimizer": ADAMW,
        "nonfinite_gradients": "raise",
        "fp16": {"enabled": True, "loss_scale": 128, "initial_scale_power": 1, "min_loss_scale": 4},
    },
    "old names": {
        **BATCH,
        "optimizer": ADAMW,
        "bfloat16": {"enabled": True},
        "zero_optimization": {"stage": 3, "cpu_offload": True, "cpu_offload_params": True},
        "activation_checkpointing": {"enabled": True, "cpu_checkpointing": True},
    },
    "step in backward": {
        **BATCH,
        "optimizer": ADAMW,
        "gradient_clipping": 0,
        "fp16": {"enabled": False},
        "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu", "step_in_backward": True}},
    },
}
WRONG: tuple[Any, ...] = ("wrong", -1, [1, 2, 3], {"of": "what"}, None, True, 1.5)


def keys(tree: Tree, above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, value in tree.items():
        yield (*above, name)
        if isinstance(value, dict):
            yield from keys(value, (*above, name))


def damaged(tree: Tree, place: tuple[str, ...]) -> Iterator[tuple[str, Tree]]:
    """``tree`` with one mistake at ``place``, of every kind: its key mistyped, its value wrong."""
    for wrong in ("a typo", *WRONG):
        copied = copy.deepcopy(tree)
        holder = copied
        for name in place[:-1]:
            holder = holder[name]
        value = holder.pop(place[-1])
        if wrong == "a typo":
            holder[place[-1] + "x"] = value
        elif isinstance(value, dict) and isinstance(wrong, dict):
            continue  # what was in there is missing as well
        else:
            holder[place[-1]] = wrong
        yield f"{'.'.join(place)}: {wrong!r}", copied


def found(source: Any, auto: Tree | None = None) -> list[str]:
    try:
        load_config(source, auto)
    except ConfigError as error:
        return error.problems
    return []


@pytest.mark.parametrize("name", FINE)
def test_one_mistake_is_one_problem(name: str) -> None:
    assert not found(FINE[name])
    wrong = 0
    for place in keys(FINE[name]):
        for what, tree in damaged(FINE[name], place):
            problems = found(tree)
            assert len(problems) <= 1, (what, problems)
            wrong += len(problems)
    assert wrong > 50  # some values are right at their place


@pytest.mark.parametrize(
    ("written", "place"),
    [
        ({"optimizer": {"name": "AdamW"}}, "optimizer.name"),
        ({"scheduler": {"name": "WarmupLR", "params": {"warmup_num_steps": 3}}}, "scheduler.name"),
        ({"zero_optimization": {"level": 3, "offload_param": {"device": "cpu"}}}, "zero_optimization.level"),
        ({"zero_optimization": {"stage": "three", "offload_param": {"device": "cpu"}}}, "zero_optimization.stage"),
        ({"zero_optimization": 2, "zero_optimization.offload_param": {"device": "cpu"}}, "zero_optimization"),
        ({"zero_optimisation": {"stage": 3}, "gradient_clipping": 1}, "zero_optimisation"),
        ({**FINE["step in backward"], "fp16": {"enabled": True}, "bf16": {"enabled": True}}, "fp16.enabled"),
        ({"torch_autocast": {"enabled": True, "dtype": "fp16"}, "fp16": "on", "nonfinite_gradients": "raise"}, "fp16"),
        ({"train_micro_batch_size_per_gpu": -1, "train_batch_size": 7}, "train_micro_batch_size_per_gpu"),
        ({"optimizer": {**SGD, "params": {"momentum": "0.9", "nesterov": True}}}, "optimizer.params.momentum"),
        ({"optimizer": {**SGD, "params": {"momentun": 0.9, "nesterov": True}}}, "optimizer.params.momentun"),
    ],
)
def test_one_mistake_of_an_ordinary_user_is_one_problem(written: Tree, place: str) -> None:
    [problem] = found({**BATCH, **written})
    assert problem.startswith(place)


def test_a_mistyped_batch_size_is_not_missing() -> None:
    [problem] = found({"train_micro_batch_size": 2})
    assert "unknown key" in problem
    assert len(found({"seeds": 2})) == 2  # that one is missing


def test_a_type_that_is_missing_is_a_problem_of_its_own() -> None:
    said = found({**BATCH, "optimizer": {"params": {"lr": -1}}, "scheduler": {}})
    assert [line.partition(":")[0] for line in said] == ["optimizer.type", "scheduler.type"]


def test_a_wrong_name_in_auto_is_one_problem() -> None:
    source = {**BATCH, "zero_optimization": {"stage": "auto"}}
    assert len(found(source)) == 1 and not found(source, {"zero_optimization.stage": 2})
    [problem] = found(source, {"zero_optimization.stages": 2})
    assert 'nearest valid key is "zero_optimization.stage"' in problem


@pytest.mark.parametrize("text", ['{"stage": 3, "stage": 2, %s}', '{"stage": NaN, %s}', '{"level": 3, %s}'])
def test_one_mistake_in_a_file_is_one_problem(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    section = text % '"cpu_offload_params": true'
    path.write_text(json.dumps(BATCH)[:-1] + f', "zero_optimization": {section}}}', encoding="utf-8")
    assert len(found(path)) == 1


def test_an_old_name_that_cannot_be_read_is_that_key(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    written = '"bfloat16": {"enabled": true, "stochastic_rounding": true, "master_weights": NaN}'
    path.write_text(json.dumps(BATCH)[:-1] + f", {written}}}", encoding="utf-8")
    assert len(found(path)) == 1
