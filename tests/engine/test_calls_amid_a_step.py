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
from tests.support.ranks import RankPool

SMALL = 64


def engine_at(stage: str, **zero: Any) -> Any:
    config = {**cases.config_of(stage, zero={"reduce_bucket_size": SMALL, **zero}), "gradient_clipping": 0.0}
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
        with pytest.raises(UsageError, match=r"interrupted during its update.*engine\.reset\(\)"):
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


@pytest.mark.parametrize("stage", ["0", "3"])
def test_a_checkpoint_is_not_loaded_into_weights_that_are_shown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stage: str
) -> None:
    """Also after an interrupted step: the end of the block would write over it. The same of ``reset()``."""
    engine = engine_at(stage)
    train(engine, 0, 1)
    engine.save_checkpoint(tmp_path)
    with engine.full_params():
        for call in (lambda: engine.load_checkpoint(tmp_path), engine.reset):
            with pytest.raises(UsageError, match=r"inside full_params\(\).*after the `with` block"):
                call()
    interrupt_step(engine, monkeypatch, 1)
    with engine.full_params():
        for call in (lambda: engine.load_checkpoint(tmp_path), engine.reset):
            with pytest.raises(UsageError, match=r"inside full_params\(\).*after the `with` block"):
                call()
    engine.load_checkpoint(tmp_path)
    train(engine, 1, 2)
    engine.close()


def test_what_is_written_inside_of_written_states_is_refused() -> None:
    engine = engine_at("3")
    with engine.full_optimizer_state(writable=True):
        for block in (engine.full_params(writable=True), engine.full_optimizer_state(writable=True)):
            with pytest.raises(UsageError, match=r"inside full_optimizer_state\(\)"), block:
                pass
    engine.close()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stage", ["1", "3"])
def test_reset_does_not_finish_a_step_whose_gradients_are_not_finite(
    pools: Callable[[int], RankPool], stage: str, ranks: int
) -> None:
    """Buckets that were stepped in backward cannot be taken back: only a checkpoint helps."""
    assert all(pools(ranks).run(reset_after_nan, stage))


def reset_after_nan(stage: str) -> bool:
    engine = engine_at(stage, offload_optimizer={"device": "cpu", "step_in_backward": True})
    for step in range(2):
        cases.run_micro_batch(engine, cases.loss_of, step, engine.rank)
    loss = cases.loss_of(engine, 2, engine.rank, 0)
    last = next(parameter for parameter in engine.module.parameters() if parameter.requires_grad)
    handle = last.register_hook(lambda gradient: gradient * float("nan"))
    engine.backward(loss)
    handle.remove()
    taken = len(engine.optimizer.stepped_early)
    with pytest.raises(UsageError, match="load_checkpoint"):
        engine.reset()
    return taken > 0 and engine.global_steps == 2


@pytest.mark.parametrize("stage", ["0", "1", "2", "3"])
def test_a_step_that_raised_on_all_ranks_is_finished_by_reset_alone(
    pools: Callable[[int], RankPool], stage: str
) -> None:
    assert pools(2).run(step_again, stage) == [True, True]


def step_again(stage: str) -> bool:
    calm, engine = engine_at(stage), engine_at(stage)
    for each in (calm, engine):
        cases.run_micro_batch(each, cases.loss_of, 0, 0)
    cases.run_micro_batch(calm, cases.loss_of, 1, 0)
    with pytest.MonkeyPatch.context() as patch:
        engine.backward(cases.loss_of(engine, 1, engine.rank, 0))
        core, calls = engine._core, 0
        publish = type(core)._publish

        def failing(self: Any, bucket: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == 2:
                raise MemoryError("in a gather")
            return publish(self, bucket)

        patch.setattr(type(core), "_publish", failing)
        with pytest.raises(MemoryError):
            engine.step()
    with pytest.raises(UsageError, match=r"engine\.reset\(\) on every rank"):
        engine.step()
    engine.reset()
    same = engine.global_steps == 2
    expected = weights_of(calm)
    same &= all(torch.equal(value, expected[name]) for name, value in weights_of(engine).items())
    calm.close()
    engine.close()
    return same


@pytest.mark.parametrize("stage", cases.STAGES)
def test_a_backward_while_states_are_in_host_memory_is_refused(stage: str) -> None:
    engine = engine_at(stage)
    loss = cases.loss_of(engine, 0, 0, 0)
    engine.offload_states()
    with pytest.raises(UsageError, match=r"expected engine\.reload_states\(\)"):
        loss.backward()
    engine.reload_states()
    engine.zero_grad()
    train(engine, 0, 1)
    engine.close()


def test_a_block_may_be_entered_again() -> None:
    engine = engine_at("2")
    silent, shown = engine.no_sync(), engine.full_params()
    for _ in range(2):
        with silent, silent:
            assert not engine._window.synchronises
        with shown:
            pass
    assert engine._window.synchronises
    train(engine, 0, 1)
    engine.close()
