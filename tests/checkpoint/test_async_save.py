"""Saves behind training: what is written is the state at the call; failures reach all ranks once; memory is bounded."""

from __future__ import annotations

import errno
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import shardengine
from shardengine.checkpoint import atomic, directory, tensor_file
from shardengine.comm import mesh as mesh_module
from shardengine.errors import CheckpointError, ShardEngineError
from shardengine.offload import CopyStream, Platform
from tests.support import HANG_S, cases
from tests.support.raising import raises
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]
SLOW_S = 0.15


def make(stage: str = "3", keep_last: int | None = None, behind: bool = True) -> Any:
    config = cases.config_of(stage, checkpoint={"async_save": behind, "keep_last": keep_last})
    return cases.make_engine(cases.make_mlp(), config, "AdamW")


def train(engine: Any, count: int = 1) -> None:
    for _ in range(count):
        engine.backward(cases.loss_of(engine, engine.global_steps, engine.rank, 0))
        engine.step()


@contextmanager
def replaced(owner: Any, name: str, function: Any) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, function)
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextmanager
def slow_writes(seconds: float = SLOW_S) -> Iterator[None]:
    original = tensor_file.write

    def write(*args: Any) -> Any:
        time.sleep(seconds)
        return original(*args)

    with replaced(tensor_file, "write", write):
        yield


@contextmanager
def held_writes() -> Iterator[threading.Event]:
    """No file is written before the event is set."""
    original, gate = tensor_file.write, threading.Event()

    def write(*args: Any) -> Any:
        assert gate.wait(60)
        return original(*args)

    with replaced(tensor_file, "write", write):
        try:
            yield gate
        finally:
            gate.set()


def bits(engine: Any) -> dict[Any, bytes]:
    return {(name, key, first): flat.tobytes() for name, key, first, flat in cases.local_state(engine)}


# What is written


def trains_on_while_it_is_written(folder: str, stage: str) -> list[str]:
    """Saves four times, each while up to two earlier ones wait to be written, and compares what then loads."""
    engine = make(stage)
    before = {}
    with slow_writes(0.05):
        for tag in ("a", "b", "c", "d"):
            train(engine)
            engine.save_checkpoint(folder, tag)
            before[tag] = bits(engine)
            train(engine, 2)
        engine.wait_for_checkpoint()
    for tag, state in before.items():
        engine.load_checkpoint(folder, tag)
        assert bits(engine) == state, tag
    assert len(set(map(str, before.values()))) == 4
    engine.close()
    return sorted(path.name for path in Path(folder).iterdir())


@pytest.mark.parametrize(("ranks", "stage"), [(1, "0"), (1, "3"), (2, "0"), (2, "1"), (2, "3"), (3, "2"), (3, "3k")])
def test_the_state_at_the_call_is_written(pools: Pools, tmp_path: Path, ranks: int, stage: str) -> None:
    for names in pools(ranks).run(trains_on_while_it_is_written, str(tmp_path), stage):
        assert names == ["a", "b", "c", "d", "latest"]


def test_two_saves_may_be_under_way_and_a_third_waits(tmp_path: Path) -> None:
    engine = make()
    done: list[str] = []
    with held_writes() as gate:
        engine.save_checkpoint(tmp_path, "a")
        engine.save_checkpoint(tmp_path, "b")
        third = threading.Thread(target=lambda: done.append(str(engine.save_checkpoint(tmp_path, "c"))))
        third.start()
        third.join(0.3)
        assert third.is_alive() and not done and not (tmp_path / "a").exists()
        gate.set()
        third.join(60)
    assert done == [str(tmp_path / "c")]
    engine.close()
    assert directory.saved(tmp_path) == ["c", "b", "a"]


def test_host_memory_is_two_copies_that_are_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make()
    places, streams, new_stream = set(), [], Platform.copy_stream

    def counted(platform: Platform) -> CopyStream:
        made = new_stream(platform)
        if platform is engine._core.mesh.platform:
            streams.append(made)
        return made

    monkeypatch.setattr(Platform, "copy_stream", counted)
    for count in range(10):
        train(engine)
        engine.save_checkpoint(tmp_path, "same" if count % 3 else None)
        places |= {memory.data_ptr() for memory in engine._saves._memory if memory.numel()}
    size = sum(memory.numel() for memory in engine._saves._memory)
    engine.close()
    written = (tmp_path / "same" / "rank-00000.safetensors").stat().st_size
    assert len(places) == 2 and size <= 2 * 1.2 * written and len(streams) == 1


def test_the_same_tag_and_keep_last(tmp_path: Path) -> None:
    engine = make(keep_last=2)
    with slow_writes(0.05):
        for _ in range(2):
            train(engine)
            engine.save_checkpoint(tmp_path, "best")
        assert engine.load_checkpoint(tmp_path, "best").global_steps == 2  # it waits for the newer one
        for _ in range(4):
            train(engine)
            engine.save_checkpoint(tmp_path)
    engine.close()
    assert directory.saved(tmp_path) == ["step-00000006", "step-00000005", "best"]
    assert directory.latest(tmp_path) == "step-00000006"


def test_close_waits(tmp_path: Path) -> None:
    engine = make()
    with slow_writes():
        engine.save_checkpoint(tmp_path)
        assert not (tmp_path / "latest").exists()
        engine.close()
    assert directory.latest(tmp_path) == "step-00000000"


# Several engines


def two_engines(folder: str, other: str) -> list[int]:
    """Over one mesh and, where ``other`` is ``folder``, in one directory."""
    one, two = make("3"), make("1")
    with slow_writes(0.02):
        for count in range(3):
            train(one)
            train(two, 2)
            one.save_checkpoint(folder, f"one-{count}")
            two.save_checkpoint(other, f"two-{count}")
        one.wait_for_checkpoint()
        two.wait_for_checkpoint()
    states = bits(one), bits(two)
    train(one)
    train(two)
    steps = [one.load_checkpoint(folder, "one-2").global_steps, two.load_checkpoint(other, "two-2").global_steps]
    assert (bits(one), bits(two)) == states
    one.close()
    two.close()
    return steps


@pytest.mark.parametrize("shared", [False, True])
def test_two_engines_in_one_process(pools: Pools, tmp_path: Path, shared: bool) -> None:
    for steps in pools(2).run(two_engines, str(tmp_path / "a"), str(tmp_path / ("a" if shared else "b"))):
        assert steps == [3, 6]


def test_two_engines_do_not_write_one_checkpoint(tmp_path: Path) -> None:
    one, two = make(), make()
    with held_writes() as gate:
        one.save_checkpoint(tmp_path, "same")
        while not (tmp_path / ".tmp-same").exists():
            time.sleep(0.01)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with raises("save-earlier-failed", "written by another engine"):
                two.save_checkpoint(tmp_path, "same")  # says so at once, if it is known that soon
                two.wait_for_checkpoint()
        gate.set()
        one.wait_for_checkpoint()
    assert one.load_checkpoint(tmp_path).tag == "same"
    one.close()
    two.close()


# Failures


def fails_once(folder: str, where: str, rank: int, then: str) -> tuple[list[str], list[str]]:
    """A disk that is full for one rank in the second save: what ``then`` and the calls after it raise; warnings."""
    engine = make()
    engine.save_checkpoint(folder)
    engine.wait_for_checkpoint()
    train(engine)
    owner, name = {"write": (tensor_file, "write"), "rename": (directory, "finish"), "index": (atomic, "write_text"),
                   "directory": (directory, "begin")}[where]  # fmt: skip
    original = getattr(owner, name)

    def full(*args: Any) -> None:
        if where == "write":
            original(*args)
        raise OSError(errno.ENOSPC, "No space left on device")

    texts = []
    with (
        warnings.catch_warnings(record=True) as caught,
        replaced(owner, name, full if engine.rank == rank else original),
    ):
        warnings.simplefilter("always")
        engine.save_checkpoint(folder)
        deadline = time.monotonic() + HANG_S
        while not caught and engine.rank == 0 and time.monotonic() < deadline:
            time.sleep(0.01)
        engine._saves._running[0][1].exception()
    train(engine)  # training goes on
    calls = {
        "save": lambda: engine.save_checkpoint(folder), "wait": engine.wait_for_checkpoint, "close": engine.close,
        "load": lambda: engine.load_checkpoint(folder),
    }  # fmt: skip
    for call in (then, "wait", "load", "save", "wait", "close"):
        try:
            calls[call]()
        except CheckpointError as error:
            texts.append(f"{call}: {error}")
            assert engine._core.collectives.failures._reported is None, "every rank raised: nothing is reported besides"
        if then == "close":
            break
    return texts, [str(warning.message) for warning in caught]


@pytest.mark.parametrize(
    ("where", "rank", "then"),
    [
        ("write", 1, "save"),
        ("write", 0, "wait"),
        ("rename", 0, "load"),
        ("index", 0, "close"),
        ("directory", 0, "wait"),
    ],
)
def test_a_failure_is_raised_once_on_every_rank(pools: Pools, tmp_path: Path, where: str, rank: int, then: str) -> None:
    results = pools(2).run(fails_once, str(tmp_path), where, rank, then)
    for texts, _ in results:
        assert len(texts) == 1 and texts[0].startswith(f"{then}: an earlier save_checkpoint failed: ")
        assert "No space left on device; the previous one is intact" in texts[0] and str(tmp_path) in texts[0]
    assert len(results[0][1]) == 1 and "No space left" in results[0][1][0], "a warning at once, on rank 0"
    kept = ["latest", "step-00000000"] + (["step-00000002"] if then == "save" else [])  # that save went on
    assert sorted(path.name for path in tmp_path.iterdir()) == kept


def test_both_failures_are_told(tmp_path: Path) -> None:
    engine = make()

    def full(path: Path, *_: Any) -> None:
        assert gate.wait(60)
        raise OSError(errno.ENOSPC, f"no space for {path.parent.name}")

    gate = threading.Event()
    with warnings.catch_warnings(), replaced(tensor_file, "write", full):
        warnings.simplefilter("ignore")
        engine.save_checkpoint(tmp_path, "a")
        engine.save_checkpoint(tmp_path, "b")
        gate.set()
        with raises("save-earlier-failed", "no space for .tmp-a", "no space for .tmp-b"):
            engine.wait_for_checkpoint()
    engine.wait_for_checkpoint()
    engine.close()


def no_memory_on_one(folder: str) -> str:
    engine = make()
    real = torch.empty

    def empty(*args: Any, **kwargs: Any) -> Any:
        if engine.rank == 1 and "pin_memory" in kwargs:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return real(*args, **kwargs)

    with replaced(torch, "empty", empty):
        try:
            engine.save_checkpoint(folder)
            text = "no error"
        except (ShardEngineError, RuntimeError) as error:
            text = str(error)
    engine.save_checkpoint(folder)
    engine.close()
    return text


def test_no_memory_for_the_copy_on_one_rank(pools: Pools, tmp_path: Path) -> None:
    for text in pools(2).run(no_memory_on_one, str(tmp_path)):
        assert "can't allocate memory" in text
    assert directory.latest(tmp_path) == "step-00000000"


def resets_during_a_save(folder: str) -> tuple[int, int]:
    """A rank fails in forward while a save goes on; both go back to one step, and the save is whole."""
    mesh = mesh_module.build(torch.device("cpu"), timeout_s=20)
    model = cases.make_mlp()
    config = cases.config_of("3", checkpoint={"async_save": True})
    engine = shardengine.initialize(model, config, optimizer=cases.make_optimizer(model, "AdamW"), mesh=mesh)
    train(engine)
    state = bits(engine)
    with slow_writes(1.0):
        engine.save_checkpoint(folder)
        try:
            if engine.rank == 1:
                raise ValueError("a bad batch")
            train(engine)
        except (ValueError, ShardEngineError):
            pass
        engine.reset()
        train(engine, 2)
        engine.wait_for_checkpoint()
    steps = engine.global_steps, engine.load_checkpoint(folder).global_steps
    assert bits(engine) == state
    engine.save_checkpoint(folder, "again")
    engine.close()
    mesh.destroy()
    return steps


def test_reset_while_a_save_goes_on(pools: Pools, tmp_path: Path) -> None:
    for steps in pools(2).run(resets_during_a_save, str(tmp_path)):
        assert steps == (3, 1)
    assert directory.latest(tmp_path) == "again"


def test_the_end_of_a_process_waits(tmp_path: Path) -> None:
    program = (
        "import sys\nfrom tests.checkpoint import test_async_save as own\nengine = own.make()\n"
        "own.slow_writes(0.3).__enter__()\n"
        "for tag in 'ab':\n    own.train(engine)\n    engine.save_checkpoint(sys.argv[1], tag)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=HANG_S, check=False
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    engine = make()
    assert [engine.load_checkpoint(tmp_path, tag).global_steps for tag in ("a", "b")] == [1, 2]
    assert directory.latest(tmp_path) == "b"
    engine.close()
