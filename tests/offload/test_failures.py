"""Failures of the disk that states and weights rest on: nothing is lost, no rank waits, a checkpoint goes on."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from shardengine import Engine, kernels
from shardengine.errors import MismatchError, OffloadError, ShardEngineError, UsageError
from shardengine.offload import direct_io
from tests.support import cases
from tests.support.raising import raises
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]
STEPS = 4
BF16: dict[str, Any] = {"bf16": {"enabled": True}}


def places(which: str, folder: Path) -> dict[str, Any]:
    """What of the model rests in a file, through as few buffers as there may be."""
    disk = {"device": "nvme", "nvme_path": str(folder), "buffer_count": 2}
    names = {"states": ["optimizer"], "weights": ["param"], "all": ["optimizer", "param"], "nothing": []}[which]
    return {"reduce_bucket_size": 600, **{f"offload_{name}": disk for name in names}}


def make(stage: str, which: str, folder: Path, **options: Any) -> Engine:
    return cases.make_engine(cases.make_mlp(), cases.config_of(stage, zero=places(which, folder), **options))


def step(engine: Engine) -> None:
    cases.run_micro_batch(engine, cases.loss_of, engine.global_steps, 0)


def weights_after(engine: Engine, steps: int = STEPS) -> dict[str, Any]:
    """The weights when ``steps`` are done (rank 0); the engine is closed."""
    while engine.global_steps < steps:
        step(engine)
    found = {name: cases.copy_out(value).float().numpy() for name, value in engine.state_dict().items()}
    engine.close()
    return found


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    assert all(found[name].tobytes() == expected[name].tobytes() for name in expected)


@contextmanager
def full_disk(writes: float) -> Iterator[None]:
    """That many writes fail."""
    plain, left = direct_io.pwritev, writes

    def refuse(*args: Any) -> int:
        nonlocal left
        if left > 0:
            left -= 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return plain(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(direct_io, "pwritev", refuse)
        yield


def damage(engine: Engine) -> None:
    """Another byte in every page of the file."""
    for path in engine._core.tiers.files:
        data = bytearray(path.read_bytes())
        for start in range(8, len(data), 4096):
            data[start] ^= 64
        with path.open("r+b") as file:
            file.write(data)


@pytest.mark.parametrize(("stage", "which"), [("1", "states"), ("3", "all")])
def test_writes_that_fail_for_a_while_lose_nothing(tmp_path: Path, stage: str, which: str) -> None:
    """Until every buffer holds what could not be written."""
    expected = weights_after(make(stage, "nothing", tmp_path))
    engine = make(stage, which, tmp_path)
    step(engine)
    failures = 0
    with full_disk(8):
        while engine.global_steps < STEPS and failures < 20:
            try:
                step(engine)
            except ShardEngineError:
                failures += 1
                for _ in range(20):
                    try:
                        engine.reset()
                        break
                    except OffloadError:
                        failures += 1
    assert 0 < failures < 20, "how many writes fail together depends on the load"
    assert_same(weights_after(engine), expected)


@pytest.mark.parametrize("precision", [{}, BF16])
@pytest.mark.parametrize(("stage", "which"), [("1", "states"), ("3", "weights"), ("3", "all")])
def test_other_bytes_are_noticed_and_a_checkpoint_goes_on(
    tmp_path: Path, stage: str, which: str, precision: dict[str, Any]
) -> None:
    """Without a wrong bit in any weight, also where weights are stepped that rest in the file."""
    expected = weights_after(make(stage, "nothing", tmp_path, **precision))
    engine = make(stage, which, tmp_path / "disk", **precision)
    step(engine)
    step(engine)
    engine.save_checkpoint(tmp_path / "run")
    step(engine)
    damage(engine)
    with pytest.raises(OffloadError, match="not those that were written"):
        step(engine)
    assert engine.load_checkpoint(tmp_path / "run").global_steps == 2
    assert_same(weights_after(engine), expected)


def refused_load(engine: Engine, folder: Path) -> None:
    """Of a checkpoint with a bad byte in every file."""
    for file in engine.save_checkpoint(folder / "bad").glob("*.safetensors"):
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 64
        file.write_bytes(data)
    with pytest.raises(ShardEngineError):
        engine.load_checkpoint(folder / "bad")


def read_states(engine: Engine, _: Path) -> None:
    with engine.full_optimizer_state() as found:
        assert found


def save_behind(engine: Engine, folder: Path) -> None:
    engine.save_checkpoint(folder / "run")
    engine.wait_for_checkpoint()


READERS: dict[str, Callable[[Engine, Path], object]] = {
    "save": lambda engine, folder: engine.save_checkpoint(folder / "run"),
    "save behind": save_behind,
    "states": read_states,
    "state dict": lambda engine, _: engine.state_dict(),
    "refused load": refused_load,
}


@pytest.mark.parametrize("which", ["states", "weights"])
@pytest.mark.parametrize("reader", READERS)
def test_what_was_only_read_is_still_compared(tmp_path: Path, reader: str, which: str) -> None:
    """Bytes that change between a save and the next step are no more believed than any others."""
    engine = make("3", which, tmp_path / "disk", checkpoint={"async_save": reader == "save behind"})
    step(engine)
    READERS[reader](engine, tmp_path)
    damage(engine)
    with pytest.raises(OffloadError, match="not those that were written"):
        step(engine)
    with suppress(OffloadError):
        engine.close()


@pytest.mark.parametrize("which", ["states", "all"])
def test_a_backward_inside_of_a_writable_context_loses_nothing(tmp_path: Path, which: str) -> None:
    """At its end the first buckets are fetched already, as they were before anything was written."""
    found = []
    for place in ("nothing", which):
        engine = make("3", place, tmp_path)
        step(engine)
        with engine.full_optimizer_state(writable=True) as states:
            engine.backward(cases.loss_of(engine, engine.global_steps, 0, 0))
            for entry in states.values():
                if entry is not None:
                    entry["exp_avg"].fill_(0.25)
        engine.step()
        found.append(weights_after(engine))
    assert_same(*found)


@pytest.mark.parametrize("resets", [True, False])
@pytest.mark.parametrize(("stage", "which"), [("1", "states"), ("3", "all")])
def test_a_step_that_was_torn_shows_nothing_and_a_checkpoint_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str, which: str, resets: bool
) -> None:
    """Interrupted inside of a bucket's kernels, when its states and weights lie in buffers."""
    expected = weights_after(make(stage, "nothing", tmp_path))
    engine = make(stage, which, tmp_path / "disk")
    step(engine)
    engine.save_checkpoint(tmp_path / "run")
    update, calls = kernels.update, 0

    def interrupted(*args: Any, **options: Any) -> None:
        nonlocal calls
        update(*args, **options)
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(kernels, "update", interrupted)
        with pytest.raises(KeyboardInterrupt):
            step(engine)
    with pytest.raises(UsageError, match=r"call engine\.reset\(\)"), engine.full_optimizer_state():
        pass
    if resets:
        with pytest.raises(UsageError, match=r"engine\.load_checkpoint\(\) on every rank"):
            engine.reset()
        with pytest.raises(UsageError, match=r"call engine\.load_checkpoint\(\)"), engine.full_optimizer_state():
            pass
    assert engine.load_checkpoint(tmp_path / "run").global_steps == 1
    assert_same(weights_after(engine), expected)


def test_an_engine_that_lost_its_states_refuses_to_train_until_it_is_loaded(tmp_path: Path) -> None:
    engine = make("1", "states", tmp_path / "disk")
    step(engine)
    place = engine.save_checkpoint(tmp_path / "run")
    step(engine)
    damage(engine)
    file = max(place.iterdir(), key=lambda path: path.stat().st_size)
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ShardEngineError):
        engine.load_checkpoint(tmp_path / "run")
    with pytest.raises(ShardEngineError, match=r"call engine\.load_checkpoint\(\) on every rank"):
        step(engine)
    file.write_bytes(whole)
    assert engine.load_checkpoint(tmp_path / "run").global_steps == 1
    step(engine)
    engine.close()


def own_groups(stage: str, which: str, folder: Path) -> Engine:
    """An engine with groups of its own, which a failure may ruin."""
    model = cases.make_mlp()
    config = cases.config_of(stage, zero=places(which, folder), timeout_s=30.0)
    return Engine(model, config, cases.make_optimizer(model, "AdamW"))


def fail_on_one_rank(stage: str, folder: Path, recovers: bool) -> dict[str, Any]:
    """Rank 1's disk is full in a step and in a reset(), then it has room again; or other bytes are on it."""
    engine = own_groups(stage, "states", folder / "disk")
    step(engine)
    engine.save_checkpoint(folder / "run")
    step(engine)
    fails = engine.rank == 1
    if fails and not recovers:
        damage(engine)
    with full_disk(1000 if fails and recovers else 0):
        with pytest.raises(ShardEngineError):
            step(engine)
        doing = "writing" if recovers else "reading"
        with pytest.raises(OffloadError if fails else MismatchError, match=f"rank 1: {doing}"):
            engine.reset()
    if recovers:
        engine.reset()
        assert engine.global_steps == 3
    else:
        assert engine.load_checkpoint(folder / "run").global_steps == 1
    return weights_after(engine)


@pytest.mark.parametrize("recovers", [True, False])
@pytest.mark.parametrize("stage", ["1", "2"])
def test_a_reset_that_fails_on_one_rank_fails_on_all(pools: Pools, tmp_path: Path, stage: str, recovers: bool) -> None:
    """And leaves the update as it was: another one finishes it, or a checkpoint is loaded."""
    found, _ = pools(2).run(fail_on_one_rank, stage, tmp_path, recovers)
    expected, _ = pools(2).run(train, stage, tmp_path)
    assert_same(found, expected)


def train(stage: str, folder: Path) -> dict[str, Any]:
    return weights_after(make(stage, "nothing", folder))


def close_without_a_file(folder: Path) -> str:
    """Rank 1's file is removed; what close() says. Nothing is left, and the next engine works."""
    engine = own_groups("3", "all", folder)
    step(engine)
    if engine.rank == 1:
        shutil.rmtree(engine._core.tiers.files[0].parent)
    mine = engine._core.tiers.files[0]
    with pytest.raises(ShardEngineError) as raised:
        engine.close()
    engine.close()
    assert not mine.parent.exists()
    assert torch.isfinite(torch.tensor(sum(float(w.sum()) for w in train("3", folder).values())))
    return str(raised.value)


def test_close_without_the_file_tells_all_ranks_and_lets_go(pools: Pools, tmp_path: Path) -> None:
    for said in pools(2).run(close_without_a_file, tmp_path, timeout=50.0):
        assert "rank 1: reading" in said and "somebody has removed the file" in said


def test_a_path_that_is_none_is_refused() -> None:
    with raises("nvme-file-not-made", "rank 0", "null byte"):
        make("1", "states", Path("a\0b"))
