"""ShardAccelerator: the same losses, norms and rates as under accelerate's DDP, at every stage; saving and resuming."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from safetensors.torch import load_file

from tests.support.program_runs import MISSING, Runs, assert_equal, assert_same

pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"{MISSING} are not installed")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    runs = Runs(tmp_path_factory.mktemp("runs"), "tests.integrations.programs", "loop", fresh=False)
    yield runs
    runs.end()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("ranks", "k"), [(2, 1), (2, 3), (3, 2)])
def test_a_loop_is_what_it_is_under_ddp(ranks: int, k: int, stage: int, runs: Runs) -> None:
    """Five micro-batches an epoch, or four; the last window is shorter."""
    expected = runs.log(None, ranks=ranks, k=k)
    assert_same(runs.log(stage, ranks=ranks, k=k), expected)
    assert len(expected) >= 8 and expected[-1]["loss"] < expected[0]["loss"]


def test_stages_with_one_third_letter_have_the_same_bits(runs: Runs) -> None:
    for one, other in ((0, 1), (2, 3)):
        assert runs.log(one, k=3) == runs.log(other, k=3)
        assert_equal(runs.final(one, k=3), runs.final(other, k=3))
    for name, value in runs.final(None, k=3).items():
        assert torch.allclose(runs.final(3, k=3)[name], value, atol=1e-5), name


@pytest.mark.parametrize("stage", [0, 3])
def test_it_resumes_at_this_and_another_stage(stage: int, runs: Runs) -> None:
    """accelerate shuffles anew after a resume, the same way under DDP."""
    states = {}
    for each in (None, 3):
        runs.log(each, k=3)
        states[each] = runs.output(each, k=3) / "state"
    assert_same(runs.log(stage, k=3, resume=str(states[3])), runs.log(None, k=3, resume=str(states[None])))
    assert not list(states[3].glob("model*")) and not list(states[3].glob("optimizer*"))


@pytest.mark.parametrize("stage", [1, 3])
def test_adapters_and_a_model_that_is_prepared_again(stage: int, runs: Runs) -> None:
    assert_same(runs.log(stage, lora=True, tour=True), runs.log(None, lora=True, tour=True))


@pytest.mark.parametrize("pops", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_hooks_of_save_state_get_the_model(stage: int, pops: bool, runs: Runs) -> None:
    (expected, _), _ = runs.said("save_hooks", None, tour=True)
    (found, files), (nothing, _) = runs.said("save_hooks", stage, tour=pops)
    assert nothing == {} and found.keys() == expected.keys() == {"get_state_dict", "weights", "unwrap"}
    for way, state in found.items():
        assert state.keys() == expected[way].keys()
        for name, value in state.items():
            assert torch.allclose(torch.tensor(value), torch.tensor(expected[way][name]), atol=1e-6), (way, name)
    written = load_file(runs.output(stage, tour=pops) / "state" / "alone" / "model.safetensors")
    assert all(value.tolist() == found["unwrap"][name] for name, value in written.items())
    assert "pytorch_model" in files and "model.safetensors" not in files


@pytest.mark.parametrize("stage", [0, 3])
def test_other_loops_are_what_they_are_under_ddp(stage: int, runs: Runs) -> None:
    for ours, theirs in zip(runs.said("habits", stage, k=2), runs.said("habits", None, k=2), strict=True):
        assert len(ours) == len(theirs) == 5
        for losses, expected in zip(ours, theirs, strict=True):
            assert losses == pytest.approx(expected, abs=1e-6) and len(losses) > 1


def test_the_loss_of_fp16_is_scaled_as_by_torch(runs: Runs) -> None:
    *found, refused = runs.said("loss_scales", 3, ranks=1)[0]
    assert [ours for ours, _ in found] == [theirs for _, theirs in found] == [(2.0**16, 2000, 1), (1024.0, 7, 1)]
    assert "expected init_scale to be a power of 2" in refused and "got 3.0, 2.0 and 0.5" in refused


def test_frameworks_have_what_the_doors_use(runs: Runs) -> None:
    """A name that is gone is named, before anything trains wrongly without it."""
    *found, lost = runs.said("contract", ranks=1)[0]
    assert found == [[], [], []]
    assert "Lost._clip_grad_norm is gone" in lost and "Lost sets no model_wrapped" in lost
    assert any(each.startswith("Lost.save_model takes") for each in lost)


def test_misuse_is_one_sentence_on_every_rank(runs: Runs) -> None:
    first, second = runs.said("misuse", 3)
    expected = [
        "zero_optimization.stages: unknown key; the nearest valid key is",
        "expected gradient_accumulation_steps to be 2, as the program's arguments say",
        "expected train_micro_batch_size_per_gpu to be 2",
        "torch_autocast in bfloat16 needs the same mixed_precision",
        "warmup_steps",
        "bf16_full_eval casts the model",
        "expected a dict or the path of a JSON file, got int",
        "load_pretrained: expected no device_map, got 'auto'",
        "the optimizer is over a model that was prepared before it; expected the model and its optimizer in one call",
        "expected one optimizer for each model",
        "expected all parameters that the optimizer steps",
        "expected norm_type 2, got 1",
        "save with engine.save_pretrained(dir) or engine.state_dict()",
        "the dict is another optimizer's; nothing was loaded; without this file training goes on",
        "expected a new torch optimizer, got one whose engine was closed",
    ]
    for said in (first, second):
        assert len(said) == len(expected)
        for sentence, part in zip(said, expected, strict=True):
            assert part in sentence and sentence.startswith(("UsageError: ", "ConfigError: ")), sentence
