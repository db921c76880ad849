"""trl's trainers, as they are, with a DeepSpeed config: the same whole log as under DDP; stages 2 and 3 bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from tests.support.program_runs import Log, Runs, assert_equal, assert_same

LIBRARIES = ("transformers", "accelerate", "peft", "trl", "datasets")
_MISSING = [name for name in LIBRARIES if find_spec(name) is None]  # not imported here
pytestmark = pytest.mark.skipif(bool(_MISSING), reason=f"{_MISSING} are not installed")
quantising = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
STEPS = 3
MEASURED = ("entropy", "eval_entropy", "kl", "logits/", "logps/", "reward", "margin", "min_", "mean_reward", "max_")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    runs = Runs(tmp_path_factory.mktemp("runs"), "tests.compat.trl_programs", "train")
    yield runs
    runs.end()


def losses(log: Log) -> list[float]:
    """Of the training steps."""
    return [row["loss"] for row in log if "loss" in row]


def assert_trained_alike(case: str, stages: tuple[int, ...], runs: Runs) -> Log:
    """At these stages as under DDP, whose log is returned: what is logged, and which weights are saved."""
    expected = runs.log(None, case=case)
    assert len(set(losses(expected))) == STEPS and all(abs(loss) > 0.01 for loss in losses(expected))
    file = next((runs.output(None, case=case) / "final").glob("*model.safetensors")).name
    under_ddp = runs.final(None, file, case=case)
    for stage in stages:
        assert_same(runs.log(stage, case=case), expected, MEASURED)
        assert runs.log(stage, case=case) == runs.log(stages[0], case=case)
        found = runs.final(stage, file, case=case)
        assert found.keys() == under_ddp.keys()
        for name, value in found.items():
            apart = (value - under_ddp[name]).abs()
            # a gradient near zero, summed in another order, may move its weight by as much as AdamW ever does
            assert (apart > 1e-5).sum() <= max(1, apart.numel() // 1000) and apart.max() < 1e-3, name
        assert_equal(found, runs.final(stages[0], file, case=case))
    return expected


@pytest.mark.core
def test_sft_on_completions_evaluates_and_generates_unequal_lengths(runs: Runs) -> None:
    log = assert_trained_alike("sft completions", (2, 3), runs)
    (texts,) = (row["texts"] for row in log if "texts" in row)
    assert len({len(text) for rank in texts for kind in rank for text in kind}) > 1  # type: ignore[attr-defined]
    assert sum("eval_loss" in row for row in log) == 2


def test_sft_packed_saves_tied_weights_once(runs: Runs) -> None:
    assert_trained_alike("sft packed", (2, 3), runs)


def test_sft_with_adapters_and_checkpointed_activations(runs: Runs) -> None:
    assert_trained_alike("sft adapters", (2, 3), runs)


@pytest.mark.parametrize(
    ("case", "stages"),
    [
        ("dpo reference", (2, 3)),
        ("dpo adapters off", (3,)),
        ("dpo reference adapter", (3,)),
        ("dpo precomputed", (2, 3)),
        ("kto", (3,)),
    ],
)
def test_a_reference_says_what_it_says_under_ddp(case: str, stages: tuple[int, ...], runs: Runs) -> None:
    assert_trained_alike(case, stages, runs)


@pytest.mark.parametrize(("case", "stages"), [("grpo", (2, 3)), ("grpo adapters", (3,))])
def test_grpo_learns_from_the_same_completions(case: str, stages: tuple[int, ...], runs: Runs) -> None:
    log = assert_trained_alike(case, stages, runs)
    assert all(row["reward_std"] > 0 for row in log if "reward_std" in row)
    assert log[0]["completions/min_length"] < log[0]["completions/max_length"] and log[1]["clip_ratio/high_max"] > 0


def test_a_reward_model_trains_a_head_that_its_files_lack(runs: Runs) -> None:
    assert_trained_alike("reward", (3,), runs)


@pytest.mark.parametrize("case", ["sft adapters", "grpo"])
def test_bf16_is_trls_default_and_has_the_same_bits_at_stages_2_and_3(case: str, runs: Runs) -> None:
    lower: dict[str, Any] = {"config": {"bf16": {"enabled": "auto"}}, "options": {"bf16": True, "use_cpu": True}}
    logs = [runs.log(stage, case=case, **lower) for stage in (2, 3)]
    assert logs[0] == logs[1] and losses(logs[0])[0] == pytest.approx(losses(runs.log(3, case=case))[0], abs=2e-3)
    file = next((runs.output(3, case=case, **lower) / "final").glob("*model.safetensors")).name
    weights = [runs.final(stage, file, case=case, **lower) for stage in (2, 3)]
    assert_equal(*weights)
    assert {value.dtype for value in weights[0].values()} == {torch.bfloat16}


@quantising
@pytest.mark.parametrize(("case", "stages"), [("qlora", (2, 3)), ("qlora nested", (3,)), ("qlora in bf16", (3,))])
def test_a_base_of_4_bits(case: str, stages: tuple[int, ...], runs: Runs) -> None:
    assert_trained_alike(case, stages, runs)


@quantising
def test_adapters_that_trl_casts_to_bf16_have_master_weights(runs: Runs) -> None:
    """Under DDP they are stepped in bf16, so that losses are the same but for that rounding."""
    expected = runs.log(None, case="qlora as trl casts")
    logs = [runs.log(stage, case="qlora as trl casts") for stage in (2, 3)]
    assert logs[0] == logs[1]
    assert losses(logs[0]) == pytest.approx(losses(expected), abs=2e-3)
    assert losses(logs[0])[0] == pytest.approx(losses(expected)[0], abs=1e-6)
