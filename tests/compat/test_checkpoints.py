"""Checkpoints of DeepSpeed's own are resumed where they lie; whole weights for those who ask as they are used to."""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import shardengine
import shardengine.compat.deepspeed as deepspeed
from shardengine.app.cli import main
from shardengine.errors import CheckpointError
from tests.data import make_deepspeed as made
from tests.support import cases
from tests.support.raising import raises
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]
DATA = Path(made.__file__).parent
SCHEDULE = {"type": "WarmupLR", "params": {"warmup_num_steps": 10}}
RANKS = 2


def model_with_other_values() -> torch.nn.Module:
    model = made.make_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    return model


def config_of(stage: int, name: str, *, scheduler: bool) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
    }
    if "low" in made.CASES[name]:
        config["bf16"] = {"enabled": True}
    return config | ({"scheduler": SCHEDULE} if scheduler else {})


def steps_of(engine: Any, rank: int) -> tuple[list[float], list[list[float]]]:
    """Losses and learning rates of two more steps."""
    losses, rates = [], []
    for step in (made.STEPS, made.STEPS + 1):
        loss = engine(made.batch(step, rank))
        engine.backward(loss)
        rates.append([group["lr"] for group in engine.optimizer.param_groups])
        engine.step()
        losses.append(loss.item())
    return losses, rates


def resume(folder: str, name: str, stage: int) -> tuple[Any, Any]:
    """As a script for DeepSpeed resumes; and as ``shardengine import`` and our engine do."""
    kind: Any = {"AdamW": torch.optim.AdamW, "SGD": torch.optim.SGD}[made.CASES[name].get("kind", "AdamW")]
    word = made.CASES[name].get("kind", "AdamW")
    model = model_with_other_values()
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=kind(made.groups_of(model, word), lr=1e-3), config=config_of(stage, name, scheduler=True)
    )
    path, client_state = engine.load_checkpoint(f"{folder}/{name}")
    assert (
        path == f"{folder}/{name}/global_step3" and client_state == {"epoch": 2} and engine.global_steps == made.STEPS
    )
    theirs = steps_of(engine, engine.rank)
    assert engine.save_checkpoint(f"{folder}/{name}", client_state={"epoch": 5})  # beside it, and resumed from there
    assert engine.load_checkpoint(f"{folder}/{name}")[1] == {"epoch": 5} and engine.global_steps == made.STEPS + 2
    engine.destroy()
    model = model_with_other_values()
    ours = shardengine.initialize(
        model,
        config_of(stage, name, scheduler=False),
        optimizer=kind(made.groups_of(model, word), lr=1e-3),
        mesh=cases.mesh_of_this_process(),
    )
    ours.load_checkpoint(f"{folder}/imported-{name}")
    assert ours.optimizer is not None
    found: tuple[list[float], list[list[float]]] = ([], [])
    for number, step in enumerate((made.STEPS, made.STEPS + 1)):
        for group, rate in zip(ours.optimizer.param_groups, theirs[1][number], strict=True):
            group["lr"] = rate
        loss = ours(made.batch(step, ours.rank))
        ours.backward(loss)
        ours.step()
        found[0].append(loss.item())
    ours.close()
    return theirs, found[0]


@pytest.mark.parametrize(
    ("name", "stage"),
    [("stage1-fp32", 2), ("stage2-fp32", 3), ("stage3-fp32", 1), ("stage3-bf16", 3), ("stage2-sgd", 0)],
)
def test_one_that_deepspeed_has_written_is_resumed_where_it_lies(
    name: str, stage: int, tmp_path: Path, pools: Pools
) -> None:
    shutil.copytree(DATA / f"deepspeed-{name}", tmp_path / name)
    before = {path.name for path in (tmp_path / name).iterdir()}
    assert not main(["import", str(tmp_path / name), str(tmp_path / f"imported-{name}")])
    for (losses, rates), expected in pools(RANKS).run(resume, str(tmp_path), name, stage):
        assert losses == expected
        for step, rate in zip((3, 4), rates, strict=True):  # up to each group's own, by logarithms
            assert rate == pytest.approx([peak * math.log(step) / math.log(10) for peak in (1e-2, 2e-3)], rel=1e-9)
    after = {path.name for path in (tmp_path / name).iterdir()}
    assert after - before == {"global_step5", "zero_to_fp32.py"}


def test_our_own_engine_says_whose_it_is() -> None:
    engine = shardengine.initialize(
        made.make_model(), config_of(1, "stage2-fp32", scheduler=False), mesh=cases.mesh_of_this_process()
    )
    with raises("checkpoint-damaged", "DeepSpeed has written it, `shardengine import` makes one of ours"):
        engine.load_checkpoint(DATA / "deepspeed-stage2-fp32")
    engine.close()


def cannot(folder: str) -> str:
    model = made.make_model()
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(made.groups_of(model, "AdamW")),
        config=config_of(2, "stage2-fp32", scheduler=False),
    )
    with pytest.raises(CheckpointError) as raised:
        engine.load_checkpoint(folder)
    engine.destroy()
    return str(raised.value)


def test_one_that_cannot_be_imported_is_told_on_every_rank(tmp_path: Path, pools: Pools) -> None:
    shutil.copytree(DATA / "deepspeed-stage2-fp32", tmp_path / "checkpoint")
    (tmp_path / "checkpoint" / "global_step3" / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    first, second = pools(RANKS).run(cannot, str(tmp_path / "checkpoint"))
    assert "could not be imported" in first and "shardengine import" in first and "rank 0 says why" in second
    assert not (tmp_path / "checkpoint" / "imported-by-shardengine").exists()


def test_whole_weights_of_one_of_deepspeeds() -> None:
    expected = load_file(DATA / "deepspeed-stage3-bf16" / "expected.safetensors")
    state = deepspeed.utils.zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(DATA / "deepspeed-stage3-bf16")
    assert state["head.weight"] is not None and state.keys() == made.make_model().state_dict().keys()
    for name, value in state.items():
        saved = expected.get(f"weight/{name}", expected.get(f"buffer/{name}", expected["weight/embed.weight"]))
        assert torch.equal(value, saved.float() if saved.is_floating_point() else saved), name


def save(folder: str) -> dict[str, torch.Tensor]:
    model = made.make_model()
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(made.groups_of(model, "AdamW")),
        config=config_of(3, "stage3-bf16", scheduler=False),
    )
    steps_of(engine, engine.rank)
    engine.save_checkpoint(folder, "epoch-1")
    with engine.full_optimizer_state() as states:
        weights = {name: cases.copy_out(row["weight"]) for name, row in states.items() if row is not None}
    engine.destroy()
    return weights


def test_whole_weights_of_ours(tmp_path: Path, pools: Pools) -> None:
    masters = pools(RANKS).run(save, str(tmp_path / "run"))[0]
    state = deepspeed.utils.zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path / "run")
    assert state.keys() == made.make_model().state_dict().keys() and state["head.weight"] is state["embed.weight"]
    for name, value in masters.items():
        assert value.dtype is torch.float32 and torch.equal(state[name], value), name
    trained = deepspeed.utils.zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(
        tmp_path / "run", "epoch-1", exclude_frozen_parameters=True
    )
    assert state.keys() - trained.keys() == {"fixed.weight", "fixed.bias"}
    model = deepspeed.utils.zero_to_fp32.load_state_dict_from_zero_checkpoint(made.make_model(), tmp_path / "run")
    assert torch.equal(model.gain, masters["gain"])
    command = [sys.executable, "zero_to_fp32.py", ".", "whole"]
    done = subprocess.run(command, cwd=tmp_path / "run", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (file,) = (tmp_path / "run" / "whole").glob("*.safetensors")
    assert torch.equal(load_file(file)["gain"], masters["gain"])
