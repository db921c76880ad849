"""What users call after an interrupted step, or inside of a block that must end first: a sentence, and nothing lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shardengine.errors import CheckpointError, UsageError
from shardengine.optim import optimizer as optimizer_module
from shardengine.optim import update
from tests.support import cases

SMALL = 64


def engine_at(stage: str, **zero: Any) -> Any:
    config = cases.config_of(stage, zero={"reduce_bucket_size": SMALL, **zero})
    return cases.make_engine(cases.make_mlp(), config, "AdamW")


def train(engine: Any, first: int, last: int) -> None:
    for step in range(first, last):
        cases.run_micro_batch(engine, cases.loss_of, step, 0)


def weights_of(engine: Any) -> dict[str, Tensor]:
    with engine.full_params():
        return {name: value.detach().clone() for name, value in engine.module.named_parameters()}


def interrupt_step(engine: Any, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """A step that raises between two buckets."""
    plain, calls = update.step_bucket, 0

    def failing(*args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise MemoryError("between two buckets")
        plain(*args)

    engine.backward(cases.loss_of(engine, step, 0, 0))
    with monkeypatch.context() as patch:
        patch.setattr(optimizer_module, "step_bucket", failing)
        with pytest.raises(MemoryError):
            engine.step()


HALF: dict[str, Callable[[Any, Path], Any]] = {
    "state_dict": lambda engine, _: engine.state_dict(),
    "save_pretrained": lambda engine, folder: engine.save_pretrained(folder / "model"),
    "save_checkpoint": lambda engine, folder: engine.save_checkpoint(folder),
    "full_grads": lambda engine, _: engine.full_grads(writable=True).__enter__(),
    "full_params": lambda engine, _: engine.full_params(writable=True).__enter__(),
    "full_optimizer_state": lambda engine, _: engine.full_optimizer_state().__enter__(),
    "clipping": lambda engine, _: engine.clip_grad_norm_(1.0),
    "backward": lambda engine, _: engine.backward(cases.loss_of(engine, 3, 0, 0)),
    "loss.backward": lambda engine, _: cases.loss_of(engine, 3, 0, 0).backward(),
    "zero_grad": lambda engine, _: engine.zero_grad(),
    "offload_states": lambda engine, _: engine.offload_states(),
}


@pytest.mark.parametrize("stage", cases.STAGES)
def test_half_stepped_weights_go_nowhere_and_the_step_can_be_finished(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stage: str
) -> None:
    calm, engine = engine_at(stage), engine_at(stage)
    train(calm, 0, 4)
    train(engine, 0, 2)
    interrupt_step(engine, monkeypatch, 2)
    for name, call in HALF.items():
        with pytest.raises(UsageError, match=r"interrupted in the middle of its update.*engine\.reset\(\)"):
            call(engine, tmp_path)
        assert not list(tmp_path.iterdir()), name
    engine.step()
    train(engine, 3, 4)
    assert all(torch.equal(value, weights_of(calm)[name]) for name, value in weights_of(engine).items())
    calm.close()
    engine.close()


@pytest.mark.parametrize("stage", ["1", "3"])
def test_a_load_that_fails_after_an_interrupted_step_leaves_one_way_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stage: str
) -> None:
    """Its gradients are gone then, so that nothing may finish the update any more."""
    calm, engine = engine_at(stage), engine_at(stage)
    train(calm, 0, 3)
    train(engine, 0, 2)
    engine.save_checkpoint(tmp_path)
    interrupt_step(engine, monkeypatch, 2)
    files = {path: path.read_bytes() for path in tmp_path.rglob("*.safetensors")}
    for path in files:
        path.write_bytes(b"damaged")
    with pytest.raises(CheckpointError):
        engine.load_checkpoint(tmp_path)
    for call in (engine.step, engine.reset, engine.zero_grad):
        with pytest.raises(UsageError, match="checkpoint"):
            call()
    for path, data in files.items():
        path.write_bytes(data)
    engine.load_checkpoint(tmp_path)
    train(engine, 2, 3)
    assert all(torch.equal(value, weights_of(calm)[name]) for name, value in weights_of(engine).items())
    calm.close()
    engine.close()


def test_no_new_layout_and_no_load_inside_of_states_that_are_written(tmp_path: Path) -> None:
    engine = engine_at("2")
    train(engine, 0, 1)
    engine.save_checkpoint(tmp_path)
    parameter = next(iter(engine.module.parameters()))
    with engine.full_optimizer_state(writable=True):
        for call in (
            lambda: engine.optimizer.add_param_group({"params": [parameter]}),
            lambda: engine.load_checkpoint(tmp_path),
            lambda: engine.offload_states(),
        ):
            with pytest.raises(UsageError, match=r"inside full_optimizer_state\(\).*after the `with` block"):
                call()
    train(engine, 1, 2)
    engine.close()
