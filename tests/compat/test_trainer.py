"""transformers' Trainer, as it is, with a DeepSpeed config: the same log as under DDP, at every stage; resuming."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.program_runs import MISSING, Runs, assert_equal, assert_same

pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"{MISSING} are not installed")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    runs = Runs(tmp_path_factory.mktemp("runs"), "tests.compat.trainers", "train")
    yield runs
    runs.end()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("ranks", "k"), [(2, 1), (2, 2), (2, 3), (3, 3)])
def test_a_trainer_logs_what_it_logs_under_ddp(ranks: int, k: int, stage: int, runs: Runs) -> None:
    """Five micro-batches an epoch, or four: the last window is shorter."""
    expected = runs.log(None, ranks=ranks, k=k)
    assert_same(runs.log(stage, ranks=ranks, k=k), expected)
    assert len(expected) >= 7 and expected[-2]["eval_loss"] < expected[0]["loss"]


@pytest.mark.parametrize("k", [1, 3])
def test_stages_with_one_third_letter_have_the_same_bits(k: int, runs: Runs) -> None:
    for one, other in ((0, 1), (2, 3)):
        assert runs.log(one, k=k) == runs.log(other, k=k)
        assert_equal(runs.final(one, k=k), runs.final(other, k=k))


@pytest.mark.parametrize(
    ("config", "options"),
    [
        ({"bf16": {"enabled": "auto"}}, {"bf16": True, "use_cpu": True}),
        (
            {"bf16": {"enabled": "auto"}, "zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
            {"bf16": True, "use_cpu": True},
        ),
        ({"fp16": {"enabled": True, "initial_scale_power": 8}}, {"fp16": True, "use_cpu": True}),
    ],
    ids=["bf16", "bf16 offloaded", "fp16"],
)
def test_low_precision_has_the_same_bits_at_stages_2_and_3(
    config: dict[str, Any], options: dict[str, Any], runs: Runs
) -> None:
    logs = [runs.log(stage, k=3, config=config, options=options) for stage in (2, 3)]
    assert logs[0] == logs[1] and logs[0][-2]["eval_loss"] < logs[0][0]["loss"]


@pytest.mark.parametrize("stage", [2, 3])
def test_random_weights_are_those_of_a_run_under_ddp(stage: int, runs: Runs) -> None:
    assert_same(runs.log(stage, begins=True), runs.log(None, begins=True))


@pytest.mark.parametrize(("stage", "ranks"), [(0, 2), (1, 3), (2, 2), (3, 2)])
def test_a_trainer_resumes_at_this_and_another_stage(stage: int, ranks: int, runs: Runs) -> None:
    whole, under_ddp = runs.log(3), runs.log(None)
    checkpoint = runs.output(3) / "checkpoint-2"
    assert (checkpoint / "latest").read_text(encoding="utf-8").strip() == "global_step2"
    resumed = runs.log(stage, ranks=ranks, resume=str(checkpoint))
    if ranks != 2:
        whole = runs.log(None, ranks=ranks, resume=str(runs.output(None) / "checkpoint-2"))
        assert len(whole) >= 5 and whole != under_ddp
    assert_same(resumed, whole)


@pytest.mark.parametrize("stage", [1, 3])
def test_adapters_train_and_are_saved_without_the_base(stage: int, runs: Runs) -> None:
    assert_same(runs.log(stage, lora=True), runs.log(None, lora=True))
    adapters = runs.final(stage, "adapter_model.safetensors", lora=True)
    folder = runs.output(stage, lora=True) / "checkpoint-2" / "global_step2"
    saved = {
        f"{file.name}: {name}": value
        for file in folder.glob("*.safetensors")
        for name, value in load_file(file).items()
    }
    weights = {name: value for name, value in saved.items() if ": random/" not in name}
    assert all(".lora_" in name for name in weights)
    assert sum(value.nbytes for value in weights.values()) == 3 * sum(value.nbytes for value in adapters.values())


@pytest.mark.parametrize("stage", [2, 3])
def test_habits_that_frameworks_have_special_cases_for(stage: int, runs: Runs) -> None:
    options = {
        "gradient_checkpointing": True,
        "load_best_model_at_end": True,
        "metric_for_best_model": "loss",
        "greater_is_better": True,  # the best one is not the last one
        "save_strategy": "epoch",
        "save_total_limit": 1,
        "max_grad_norm": 0.0,
    }
    assert_same(runs.log(stage, options=options), runs.log(None, options=options))
    best = runs.final(None, options=options)
    for name, value in runs.final(stage, options=options).items():
        assert torch.allclose(value, best[name], atol=1e-5), name
    assert_equal(runs.final(2, options=options), runs.final(3, options=options))
