"""transformers' Trainer, as it is, with a DeepSpeed config: the same log as under DDP, at every stage; resuming."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.data.make_trainer_deepspeed import CASES, STEP, place_of
from tests.support.program_runs import HABITS, MISSING, Runs, assert_equal, assert_resumes, assert_same

pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"{MISSING} are not installed")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    runs = Runs(tmp_path_factory.mktemp("runs"), "tests.compat.trainers", "train")
    yield runs
    runs.end()


def precision(kind: str) -> dict[str, Any]:
    """Of a run; weights in half precision need no more than the config and the argument."""
    sections: dict[str, Any] = {
        "fp32": {},
        "bf16": {"bf16": {"enabled": "auto"}},
        "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}},
    }
    return {} if kind == "fp32" else {"config": sections[kind], "options": {kind: True, "use_cpu": True}}


def offloaded(kind: str, device: str, runs: Runs) -> dict[str, Any]:
    """The same with the optimizer on ``device``."""
    run = precision(kind)
    where = {"device": device} | ({"nvme_path": str(runs.folder / "nvme")} if device == "nvme" else {})
    return run | {"config": {**run.get("config", {}), "zero_optimization": {"offload_optimizer": where}}}


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


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
@pytest.mark.parametrize("stages", [(0, 1), (2, 3)])
def test_low_precision_has_the_same_bits_where_one_third_letter_is(
    stages: tuple[int, int], kind: str, runs: Runs
) -> None:
    logs = [runs.log(stage, k=3, **precision(kind)) for stage in stages]
    assert logs[0] == logs[1] and logs[0][-2]["eval_loss"] < logs[0][0]["loss"]


@pytest.mark.parametrize(
    ("stage", "kind", "device"), [(0, "bf16", "cpu"), (1, "fp32", "nvme"), (2, "bf16", "nvme"), (3, "bf16", "cpu")]
)
def test_an_optimizer_elsewhere_has_the_same_bits(stage: int, kind: str, device: str, runs: Runs) -> None:
    assert runs.log(stage, k=3, **offloaded(kind, device, runs)) == runs.log(stage, k=3, **precision(kind))
    assert device != "nvme" or (runs.folder / "nvme").is_dir()


@pytest.mark.parametrize("stage", [2, 3])
def test_random_weights_are_those_of_a_run_under_ddp(stage: int, runs: Runs) -> None:
    assert_same(runs.log(stage, begins=True), runs.log(None, begins=True))


@pytest.mark.parametrize(
    ("saved", "ranks", "resumed", "new_ranks", "k"),
    [
        (3, 2, 0, 2, 2),
        (3, 2, 1, 3, 2),
        (3, 2, 2, 2, 2),
        (3, 2, 3, 2, 2),
        (0, 2, 3, 2, 2),
        (1, 2, 2, 3, 2),
        (2, 2, 3, 1, 2),
        (1, 1, 3, 2, 2),
        (2, 3, 0, 2, 3),
        (3, 3, 1, 2, 3),
    ],
)
def test_a_trainer_resumes_at_another_stage_and_number_of_ranks_as_under_ddp(
    saved: int, ranks: int, resumed: int, new_ranks: int, k: int, runs: Runs
) -> None:
    assert_resumes((saved, ranks), (resumed, new_ranks), k, runs)
    checkpoint = runs.output(saved, ranks=ranks, k=k) / "checkpoint-2"
    assert (checkpoint / "latest").read_text(encoding="utf-8").strip() == "global_step2"


@pytest.mark.parametrize(
    ("saved", "resumed"),
    [
        ((2, "bf16", None), (3, "bf16", None)),
        ((1, "bf16", None), (0, "bf16", "cpu")),
        ((3, "bf16", "cpu"), (2, "bf16", "nvme")),
        ((2, "bf16", "nvme"), (3, "bf16", "cpu")),
        ((1, "fp32", "nvme"), (0, "fp32", None)),
    ],
)
def test_low_precision_and_offload_resume_at_another_stage_with_the_same_bits(
    saved: tuple[int, str, str | None], resumed: tuple[int, str, str | None], runs: Runs
) -> None:
    """From stage 0 or 1 to the other, or from 2 or 3: equal to the run that was not interrupted, but for its evaluation
    at step 2, which comes after the save."""
    first, then = (
        (stage, precision(kind) if device is None else offloaded(kind, device, runs))
        for stage, kind, device in (saved, resumed)
    )
    whole = runs.log(first[0], k=3, **first[1])
    checkpoint = runs.output(first[0], k=3, **first[1]) / "checkpoint-2"
    found = runs.log(then[0], k=3, resume=str(checkpoint), **then[1])
    assert found == [row for row in whole if (row["step"], "eval_loss" in row) != (2, True)] and len(found) >= 6


@pytest.mark.parametrize("name", CASES)
def test_a_trainer_goes_on_from_what_it_saved_over_deepspeed(name: str, runs: Runs) -> None:
    """Losses, norms and rates of the training that DeepSpeed itself carried on, at each other stage in turn."""
    resumed = {"stage1": 3, "stage2": 0, "stage3": 1, "stage2-lora": 3, "stage3-lora": 2}[name]
    shutil.copytree(place_of(name), runs.folder / name, dirs_exist_ok=True)
    checkpoint = runs.folder / name / f"checkpoint-{STEP}"
    found = runs.log(resumed, resume=str(checkpoint), begins=True, lora="lora" in name)
    expected = json.loads((checkpoint.parent / "log.json").read_text(encoding="utf-8"))
    for row in (*found, *expected):
        row.pop("total_flos", None)  # DeepSpeed's has its shards' sizes in it
    assert_same(found, expected)
    assert len(expected) == 9 and expected[-2]["eval_loss"] < expected[0]["loss"]


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


@pytest.mark.parametrize(("saved", "resumed"), [(1, 3), (3, 0)])
def test_adapters_resume_at_another_stage(saved: int, resumed: int, runs: Runs) -> None:
    runs.log(saved, lora=True)
    checkpoint = runs.output(saved, lora=True) / "checkpoint-2"
    assert_same(runs.log(resumed, lora=True, resume=str(checkpoint)), runs.log(None, lora=True))


@pytest.mark.parametrize("stage", [0, 3])
def test_adapters_do_not_go_on_over_another_base(stage: int, runs: Runs) -> None:
    """Trainer asks for a load that is not strict; a warning would be overlooked."""
    runs.log(3, lora=True)
    checkpoint = str(runs.output(3, lora=True) / "checkpoint-2")
    for said, alone, steps in runs.said("resume_over_another_base", stage, lora=True, resume=checkpoint):
        assert "UsageError" in said and "leaves out frozen parameters, and this engine's are other ones" in said
        assert "load_module_only=True" in said and "PeftModel.from_pretrained" in said
        assert (alone, steps) == (f"{checkpoint}/global_step2", 1), "the ways on that it names"


@pytest.mark.parametrize("stage", [2, 3])
def test_habits_that_frameworks_have_special_cases_for(stage: int, runs: Runs) -> None:
    assert_same(runs.log(stage, options=HABITS), runs.log(None, options=HABITS))
    kept, expected = (
        {path.name for path in runs.output(each, options=HABITS).glob("checkpoint-*")} for each in (stage, None)
    )
    assert kept == expected == {"checkpoint-3"}
    best = runs.final(None, options=HABITS)
    for name, value in runs.final(stage, options=HABITS).items():
        assert torch.allclose(value, best[name], atol=1e-5), name
    assert_equal(runs.final(2, options=HABITS), runs.final(3, options=HABITS))


def test_the_best_model_at_the_end_may_be_of_another_stage_before_it_was_resumed(runs: Runs) -> None:
    whole = runs.log(3, options=HABITS)
    resumed: dict[str, Any] = {"options": HABITS, "resume": str(runs.output(3, options=HABITS) / "checkpoint-3")}
    assert runs.log(2, **resumed) == whole
    assert_equal(runs.final(2, **resumed), runs.final(3, options=HABITS))
