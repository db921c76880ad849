"""ShardTrainer: the same log as Trainer's under DDP, at every stage; saving, resuming, evaluating first, twice."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.program_runs import HABITS, MISSING, Runs, assert_equal, assert_resumes, assert_same

pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"{MISSING} are not installed")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    runs = Runs(tmp_path_factory.mktemp("runs"), "tests.integrations.programs", "train", fresh=False)
    yield runs
    runs.end()


@pytest.mark.parametrize(
    ("ranks", "k", "stage"), [*((2, k, stage) for k in (1, 2, 3) for stage in (0, 1, 2, 3)), (3, 3, 1), (3, 3, 3)]
)
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


def test_a_stage_that_is_auto_is_decided_with_the_trainings_own_rows(runs: Runs) -> None:
    """Also where a second training takes over what the first one's engine has left."""
    auto = {"config": {"zero_optimization": {"stage": "auto"}}}
    assert runs.log(3, **auto) in (runs.log(0), runs.log(2))
    assert_same(runs.log(3, tour=True, **auto), runs.log(None, tour=True))
    for (said,) in runs.said("decided", 3):
        shape, stages, of_accelerator, without_batch = said
        assert shape[0] == 2 and stages == [1, 1] and of_accelerator == 1 and without_batch == [False, True]


@pytest.mark.parametrize("stage", [0, 3])
def test_it_evaluates_first_predicts_generates_and_trains_twice(stage: int, runs: Runs) -> None:
    assert_same(runs.log(stage, tour=True), runs.log(None, tour=True))


def test_a_batch_size_that_fits_is_found(runs: Runs) -> None:
    """transformers 5.23 leaves the model out of DDP then: stages are compared with each other."""
    options = {"auto_find_batch_size": True}
    logs = [runs.log(stage, k=1, options=options) for stage in (2, 3)]
    assert logs[0] == logs[1] and len(logs[0]) >= 20 and logs[0][-2]["eval_loss"] < logs[0][0]["loss"]


@pytest.mark.parametrize(
    ("saved", "ranks", "resumed", "new_ranks", "k"),
    [(3, 2, 0, 2, 2), (3, 2, 1, 3, 2), (3, 2, 3, 2, 2), (1, 3, 2, 2, 3), (2, 2, 3, 1, 2)],
)
def test_it_resumes_at_another_stage_and_number_of_ranks_as_under_ddp(
    saved: int, ranks: int, resumed: int, new_ranks: int, k: int, runs: Runs
) -> None:
    assert_resumes((saved, ranks), (resumed, new_ranks), k, runs)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_run_under_ddp_goes_on_over_an_engine(stage: int, runs: Runs) -> None:
    expected = runs.log(None)
    assert_same(runs.log(stage, resume=str(runs.output(None) / "checkpoint-2")), expected)


@pytest.mark.parametrize("stage", [1, 3])
def test_adapters_train_and_are_saved_without_the_base(stage: int, runs: Runs) -> None:
    assert_same(runs.log(stage, lora=True), runs.log(None, lora=True))
    adapters = runs.final(stage, "adapter_model.safetensors", lora=True)
    expected = runs.final(None, "adapter_model.safetensors", lora=True)
    assert adapters.keys() == expected.keys()
    folder = runs.output(stage, lora=True) / "checkpoint-2"
    kept = [name for file in (folder / "global_step2").glob("*.safetensors") for name in load_file(file)]
    assert all(name.startswith("random/") or ".lora_" in name for name in kept)
    assert_same(runs.log(4 - stage, lora=True, resume=str(folder)), runs.log(None, lora=True))


@pytest.mark.parametrize("save_only_model", [False, True])
def test_habits_that_frameworks_have_special_cases_for(save_only_model: bool, runs: Runs) -> None:
    options = {**HABITS, "save_only_model": save_only_model}
    for stage in (2, 3):
        assert_same(runs.log(stage, options=options), runs.log(None, options=options))
        kept, expected = (
            {path.name for path in runs.output(each, options=options).glob("checkpoint-*")} for each in (stage, None)
        )
        assert kept == expected
    best = runs.final(None, options=options)
    for name, value in runs.final(3, options=options).items():
        assert torch.allclose(value, best[name], atol=1e-5), name
    assert_equal(runs.final(2, options=options), runs.final(3, options=options))


def test_the_best_model_at_the_end_may_be_of_another_stage_before_it_was_resumed(runs: Runs) -> None:
    before: dict[str, Any] = {"options": {**HABITS, "save_only_model": False}}
    whole = runs.log(3, **before)
    resumed = {**before, "resume": str(runs.output(3, **before) / "checkpoint-3")}
    assert runs.log(2, **resumed) == whole
    assert_equal(runs.final(2, **resumed), runs.final(3, **before))


@pytest.mark.parametrize(("stage", "decay"), [(1, "auto"), (3, "auto"), (3, 0.5)])
def test_what_the_config_says_counts_and_auto_is_what_the_arguments_say(stage: int, decay: Any, runs: Runs) -> None:
    adam = {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": decay}
    warmup = {"total_num_steps": "auto", "warmup_num_steps": "auto", "warmup_max_lr": "auto", "warmup_type": "linear"}
    config = {
        "train_batch_size": "auto",
        "gradient_clipping": 0.3,
        "optimizer": {"type": "AdamW", "params": adam},
        "scheduler": {"type": "WarmupDecayLR", "params": warmup},
        "bf16": {"enabled": "auto"},
    }
    found = runs.log(stage, config=config, options={"adam_beta2": 0.9})
    expected = {"adam_beta2": 0.9, "max_grad_norm": 0.3, "lr_scheduler_type": "linear"}
    if decay != "auto":
        expected["weight_decay"] = decay
    assert_same(found, runs.log(None, options=expected))


@pytest.mark.parametrize("stage", [0, 3])
def test_bf16_is_autocast_also_in_evaluation(stage: int, runs: Runs) -> None:
    """Weights differ from DDP's in fp32's last bits; a cast to bf16 that rounds the other way then changes losses by
    more, after how many steps depends on the CPU. Until the first evaluation none has, and fp32 is further off."""
    options = {"bf16": True}
    expected, exact = runs.log(None, options=options), runs.log(None)
    log = runs.log(stage, options=options)
    assert [row.keys() for row in log] == [row.keys() for row in expected]
    bounds = {"loss": 3e-6, "eval_loss": 3e-6, "grad_norm": 1e-4}
    for row, other in zip(log, expected, strict=True):
        for key in bounds.keys() & row.keys():
            assert row[key] == pytest.approx(other[key], rel=bounds[key]), (row, other)
        if "eval_loss" in row:
            bounds = {"loss": 3e-5, "eval_loss": 3e-5, "grad_norm": 1e-3}
    evaluated = [next(row["eval_loss"] for row in each if "eval_loss" in row) for each in (log, expected, exact)]
    assert abs(evaluated[0] - evaluated[1]) < abs(evaluated[0] - evaluated[2]) / 2


def test_what_was_planned_and_measured_is_logged_where_somebody_hears_it(runs: Runs) -> None:
    first, second = runs.said("planned", 3)
    (kept, log), (exceeded, _), (refused, _), (silent, same) = first
    planned, measured = kept
    assert re.fullmatch(r"INFO plan: memory [\d.]+ kB of [\d.]+ GB at most per rank", planned)
    found = re.fullmatch(r"INFO plan: ([\d.]+) kB planned, ([\d.]+) kB measured at most \(\S+%\)", measured)
    assert found is not None, measured
    bytes_ = [float(each) for each in found.groups()]  # a bucket is a part of so small a run, and may not be needed
    assert 0.8 * bytes_[0] < bytes_[1] < 1.03 * bytes_[0]
    assert exceeded[1].startswith("INFO plan: ")
    assert re.fullmatch(
        r"WARNING the plan was exceeded by \S+ kB \(\d+%\): activations have \S+ kB more than planned; .*", exceeded[2]
    )
    assert refused == ["INFO plan: none: the loss is not the one that the model returns"]
    assert silent == [] and log == same == runs.log(3)
    assert [words for words, _ in second] == [[]] * 4


@pytest.mark.parametrize(("stage", "ranks"), [(0, 2), (1, 2), (2, 3), (3, 3)])
def test_every_rank_says_why_a_save_of_rank_0_has_failed(runs: Runs, stage: int, ranks: int) -> None:
    (zero,), *others = runs.said("save_that_fails", stage, ranks=ranks)
    assert zero == "OSError: [Errno 28] No space left on device"
    for (said,) in others:
        assert "saving the model failed on rank 0: OSError: [Errno 28] No space left on device" in said, said


@pytest.mark.parametrize("ranks", [1, 2])
def test_adalora_is_refused_at_every_stage(ranks: int, runs: Runs) -> None:
    for words in runs.said("adalora", 0, ranks=ranks):
        assert words[1::2] == ["nothing"] * 4, "frozen it is a model as any other"
        assert all("the adapter 'default' is AdaLoRA" in said and "peft.LoraConfig" in said for said in words[::2])
