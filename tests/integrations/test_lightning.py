"""The Lightning strategy against ``strategy="ddp"``: the same losses, checkpoints and habits, and a sentence elsewhere.

Lightning takes seconds to import, so one process imports it and forks the ranks of each case.
"""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import shardengine
from tests.support import HANG_S, cases
from tests.support.forks import Forks

LIVES = "tests.integrations.lightning_lives"
CODE = Path(shardengine.__file__).parent / "integrations" / "lightning.py"
Run = Callable[..., list[Any]]


class Lives:
    """The module of the lives where it arrives; here it is never imported."""

    def __reduce__(self) -> Any:
        return importlib.import_module, (LIVES,)


def live(say: Any, rank: int, lives: Any, name: str, *args: Any) -> None:
    getattr(lives, name)(say, rank, *args)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """``run(name, *args, ranks=2)``: what each rank of that life said."""
    forks, count = Forks(), iter(range(1000))

    def of(name: str, *args: Any, ranks: int = 2) -> list[Any]:
        store = tmp_path_factory.mktemp("store") / f"{next(count)}"
        said = forks.live(live, Lives(), name, ranks, str(store), *args, ranks=ranks)
        return [words[0] if len(words) == 1 else words for words in said]

    yield of
    forks.end()


def same(one: Any, other: Any) -> bool:
    """Bit for bit: what ``trained`` returned."""
    return one[0] == other[0] and same_weights(one[2], other[2]) and one[1] == other[1] and one[3] == other[3]


def same_weights(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def assert_near(one: Any, other: Any, bound: float = 1e-6) -> None:
    """Losses and metrics of two runs."""
    assert len(one[0]) == len(other[0]) > 10 and one[3] == other[3]
    assert max(abs(a - b) for a, b in zip(one[0], other[0], strict=True)) <= bound
    assert one[1].keys() == other[1].keys()
    assert all(abs(one[1][name] - other[1][name]) <= bound for name in one[1])


OPTIONS = {
    "1": {},
    "3, the last window shorter": {"accumulate_grad_batches": 3},
    "3, clipped by norm": {"accumulate_grad_batches": 3, "gradient_clip_val": 0.05},
    "clipped by value": {"gradient_clip_val": 0.005, "gradient_clip_algorithm": "value"},
}


@pytest.mark.core
@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_a_fit_is_that_of_ddp_and_stages_have_the_same_bits(run: Run, optimizer: str, options: dict[str, Any]) -> None:
    for found in run("equality", optimizer, options):
        ddp, stages = found["ddp"], [found[f"shardengine_stage_{stage}"] for stage in range(4)]
        for stage in stages:
            assert_near(ddp, stage)
        assert same(stages[0], stages[1]) and same(stages[2], stages[3])
        assert ddp[0][-1] < ddp[0][0]


def test_lightnings_own_boring_model_is_as_under_ddp(run: Run) -> None:
    for found in run("boring"):
        ddp, stages = found["ddp"], [found[f"shardengine_stage_{stage}"] for stage in range(4)]
        for stage in stages:
            assert_near(ddp, stage)
            assert torch.allclose(ddp[2]["predicted"], stage[2]["predicted"], atol=1e-6)
        assert same(stages[0], stages[1]) and same(stages[2], stages[3])
        assert ddp[0][-1] < ddp[0][0] and len(ddp[2]["predicted"]) == 32


@pytest.mark.parametrize("kind", ["Penalty", "Own"])
def test_what_modules_do_in_their_hooks_is_as_under_ddp(run: Run, kind: str) -> None:
    for ddp, one, three in run("stages", kind, {"accumulate_grad_batches": 2}):
        assert_near(ddp, one, 5e-6)
        assert_near(ddp, three, 5e-6)


def test_buffers_are_rank_0s_and_norms_of_gradients_the_whole_ones(run: Run) -> None:
    first, _ = run("stages", "Normed", {"accumulate_grad_batches": 2})
    for sharded in first[1:]:
        assert max(abs(a - b) for a, b in zip(first[0][0], sharded[0], strict=True)) <= 5e-6
        assert torch.allclose(first[0][2]["norm.running_mean"], sharded[2]["norm.running_mean"], atol=1e-6)


def test_gradients_are_shown_after_the_last_backward_of_a_window(run: Run) -> None:
    for found in run("stages", "Shows", {"accumulate_grad_batches": 3, "max_epochs": 1}):
        for losses, *_ in found[1:]:
            assert losses == [0, 0, 11, 0, 0, 11, 0, 0, 11, 0, 11]


def test_a_window_sends_what_its_stage_says(run: Run) -> None:
    for found in run("traffic"):
        assert len(found) == 4 and all(measured == formula > 0 for measured, formula in found)


def test_a_window_whose_last_batch_gives_no_loss_is_stepped(run: Run) -> None:
    [[ddp, one, three]] = run("stages", "Skips", {"accumulate_grad_batches": 2}, ranks=1)
    assert_near(ddp, one)
    assert same(one, three)


def test_a_window_without_any_loss_is_not_stepped(run: Run) -> None:
    [[ddp, one, three]] = run("stages", "NoLoss", {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}, ranks=1)
    assert_near(ddp, one)
    assert same(one, three)


def test_callbacks_unfreeze_and_average_at_stage_3(run: Run) -> None:
    for (two, average), (three, same_average) in run("callbacks"):
        assert same(two, three) and same_weights(average, same_average)
        assert len(two[0]) == 22 and not same_weights(average, two[2])


def test_the_engine_waits_as_long_as_the_strategy_says(run: Run) -> None:
    assert run("waits", ranks=1) == [[600.0, 120.0, 90.0, 90.0]]


def test_rank_0_alone_may_make_the_weights(run: Run) -> None:
    first, second = run("meta")
    assert first[0] == first[1] and second[0] == second[1]


def test_validate_fit_twice_test_and_predict(run: Run) -> None:
    for ddp, sharded in run("ways"):
        for before, after in zip(ddp[0], sharded[0], strict=True):
            assert abs(before[0]["error"] - after[0]["error"]) <= 1e-6
        assert torch.allclose(ddp[1], sharded[1], atol=1e-6) and abs(ddp[2] - sharded[2]) <= 1e-6
        assert ddp[3] == sharded[3] == 22


def test_precisions(run: Run) -> None:
    for found in run("precisions"):
        for name in ("bf16-true", "16-true", "bf16-mixed", "16-mixed"):
            two, three = (found[name, f"shardengine_stage_{stage}"] for stage in (2, 3))
            assert same(two, three) and two[0][-1] < two[0][0]
            weights = next(iter(two[2].values()))
            assert (weights.dtype is torch.float32) == ("mixed" in name)
            if "mixed" in name:
                assert_near(found[name, "ddp"], two, 2e-3)


# Checkpoints. An epoch has 11 micro-batches. In the middle of one Lightning starts the data anew, under DDP as well.


@pytest.mark.parametrize("after", [0, 6, 7], ids=["after an epoch", "between two steps", "inside of a window"])
def test_a_resumed_run_goes_on_as_under_ddp(run: Run, tmp_path: Path, after: int) -> None:
    whole = run("save", 3, str(tmp_path / "three.ckpt"), after, True)
    run("save", -1, str(tmp_path / "ddp.ckpt"), after, True)
    truth = run("resume", -1, str(tmp_path / "ddp.ckpt"))
    found = {stage: run("resume", stage, str(tmp_path / "three.ckpt")) for stage in (3, 2, 0)}
    for stage, ranks in found.items():
        for rank, (before, losses, weights, steps) in enumerate(ranks):
            assert abs(before[0]["error"] - truth[rank][0][0]["error"]) <= 1e-6
            assert steps == truth[rank][3] and len(losses) > 10
            assert max(abs(a - b) for a, b in zip(losses, truth[rank][1], strict=True)) <= 1e-6
            if after == 0 and stage > 0:
                assert losses == whole[rank][0][11:] and same_weights(weights, whole[rank][2])


def test_another_number_of_ranks_resumes_without_whole_weights_in_the_file(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    run("save", 2, str(path), 6, False)
    assert torch.load(path, weights_only=True)["state_dict"] == {}
    [(before, losses, _, _)] = run("resume", 3, str(path), ranks=1)
    [(again, same_losses, _, _)] = run("resume", 1, str(path), ranks=1)
    assert before == again and len(losses) == len(same_losses) > 10
    assert max(abs(a - b) for a, b in zip(losses, same_losses, strict=True)) <= 1e-6
    assert before[0]["error"] < 1.0


def test_files_of_checkpoints(run: Run, tmp_path: Path) -> None:
    for found in run("files", str(tmp_path)):
        [kept] = [name for name in found["kept"] if name.startswith("step=") and name.endswith(".ckpt")]
        assert found["kept"] == sorted([kept, f"{kept}.shards", "last.ckpt"])
        assert same_weights(found["loaded"], found["trained"])
        assert found["more"] == sorted([*found["kept"], "after.ckpt", "weights.ckpt"])
        assert "has no optimizer states, because the engine was closed at the end of fit" in found["after"]
        assert "save_weights_only" in found["weights"]
        assert found["last"] == "nothing"
        assert f"expected the file {kept}, got the folder" in found["folder"]
        assert "the checkpoint has AdamW, the engine SGD" in found["SGD"]
        assert "strict_loading = False of the LightningModule" in found["SGD"]
        assert "expected the folder step-" in found["moved"] and "move both" in found["moved"]
        (expected, losses), *ours = found["ddp"]
        assert len(losses) > 10
        for taken, same_losses in ours:  # goes on in the middle of a run under DDP
            assert max(abs(a - b) for a, b in zip(losses, same_losses, strict=True)) <= 1e-6
            assert all(torch.allclose(taken[name], expected[name], atol=1e-5) for name in expected)


# What goes wrong


def test_a_failing_rank_is_not_hidden_and_the_others_end(run: Run) -> None:
    first, last = run("failing", False)
    assert last == "ValueError: mine"
    assert "rank 1" in first and "mine" in first


def test_a_rank_that_saves_alone_is_told_so(run: Run) -> None:
    first, last = run("alone")
    assert last == "ValueError: mine"
    assert "CommunicationError: trainer.save_checkpoint on rank 0: expected the call on every rank" in first


def test_after_a_failure_of_all_ranks_the_trainer_fits_again(run: Run) -> None:
    for said, weights in run("failing", True):
        assert said == "ValueError: mine"
        assert all(torch.isfinite(value).all() for value in weights.values())


MISUSE = {
    "no stage": "UsageError: ShardStrategy: expected a stage, 0 to 3",
    "two stages": "got stage=2 and 3 in config",
    "a typo": "ConfigError: config: 1 problem\n  - gradient_cliping: unknown key",
    "no file": "ConfigError: nowhere.json: 1 problem\n  - the file cannot be read",
    "a list": "expected config as a dict, a path or a Config, got list",
    "of DDP": "got find_unused_parameters",
    "closed": "no engine is open",
    "precision": "got DoublePrecision with '64-true'",
    "two precisions": "Trainer(precision='16-true') and bf16 {'enabled': True} in config",
    "two windows": "Trainer(accumulate_grad_batches=1) and 4 gradient_accumulation_steps in config",
    "two norms": "gradient_clipping in config and Trainer(gradient_clip_val=...)",
    "batch norm": "Trainer(sync_batchnorm=True) is not available",
    "manual": "automatic_optimization=False is not available",
    "several": "multiple optimizers",
    "no optimizer": "configure_optimizers returned None",
    "matrices": "it evaluates the loss several times per step",
    "averages": "reads them inside of `with trainer.strategy.engine.full_params():`",
    "elsewhere": "expected a folder that all ranks can write to for checkpoints, got s3://bucket/x.ckpt",
    "config's optimizer": "nothing",
    "auto": "nothing",
}


def test_each_mistake_is_answered_in_a_sentence(run: Run) -> None:
    [found] = run("misuse", ranks=1)
    assert found.keys() == MISUSE.keys()
    for name, sentence in MISUSE.items():
        assert sentence in found[name], (name, found[name])
        assert found[name].count("\n") <= 1


# Lightning's names, and the engine's part


def test_what_the_strategy_takes_from_lightning_is_there(run: Run) -> None:
    [[found, lost]] = run("missing", str(CODE), ranks=1)
    assert found == []
    assert {"Lost._should_accumulate is gone", "Lost(timeout=) is gone", "Lost.setup is gone"} <= set(lost)
    assert any(each.startswith("Lost.load_checkpoint takes ['self', 'path']") for each in lost)


def test_importing_the_engine_imports_no_lightning() -> None:
    code = "import sys, shardengine; print(any('lightning' in name for name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG_S)
    assert done.stdout.strip() == "False", done.stderr


def test_only_one_file_imports_lightning() -> None:
    package = CODE.parents[1]
    found = []
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            found += [path for name in names if name.split(".")[0] == "lightning"]
    assert set(found) == {CODE}


class Reading(torch.nn.Sequential):
    """One whose own forward reads a weight of a part of it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight: Any = self[0].weight
        return super().forward(x).sum() + weight.square().sum()


@pytest.mark.parametrize("stage", list(cases.STAGES))
def test_zero_grad_between_forward_and_backward(stage: str) -> None:
    """A weight that was read outside of its module's forward is there in backward."""
    found, losses = [], []
    for before in (True, False):
        torch.manual_seed(0)
        model = Reading(torch.nn.Linear(4, 4), torch.nn.Sequential(torch.nn.Linear(4, 4)))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        engine = shardengine.initialize(model, cases.config_of(stage), optimizer=optimizer)
        for _ in range(2):
            if before:
                optimizer.zero_grad()
            loss = engine(torch.ones(2, 4))
            if not before:
                optimizer.zero_grad()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        found.append(engine.state_dict())
        engine.close()
    assert losses[:2] == losses[2:] and losses[1] < losses[0]
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
