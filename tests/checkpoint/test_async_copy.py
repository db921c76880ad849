"""Optimizer states are copied behind the call of an asynchronous save: what changes them waits for that."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from shardengine.checkpoint import background, directory
from shardengine.errors import CheckpointError
from tests.checkpoint.test_async_save import bits, make, replaced, train
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]


@contextmanager
def slow_copies(seconds: float) -> Iterator[list[threading.Event]]:
    """What is copied behind is copied late; an event per copy, set at its end."""
    original, ends = background._copy, []

    def copy(*given: Any) -> None:
        if threading.current_thread() is threading.main_thread():
            return original(*given)
        ends.append(threading.Event())
        time.sleep(seconds)
        original(*given)
        ends[-1].set()

    with replaced(background, "_copy", copy):
        yield ends


def changes_after_a_save(folder: str, stage: str) -> list[str]:
    """Everything that may change an engine right after the call, while its states are still being copied."""
    wrong: list[str] = []

    def step(engine: Any) -> None:
        train(engine)

    def load(engine: Any) -> None:
        engine.load_checkpoint(folder, "first")

    def write(engine: Any) -> None:
        with engine.full_params(writable=True), torch.no_grad():
            for parameter in engine.module.parameters():
                parameter.fill_(3.0)

    def write_states(engine: Any) -> None:
        with engine.full_optimizer_state(writable=True) as states, torch.no_grad():
            for tensors in states.values():
                tensors["exp_avg"].fill_(3.0)

    def again(engine: Any) -> None:
        engine.save_checkpoint(folder, "again")

    def close(engine: Any) -> None:
        engine.close()

    for change in (step, load, write, write_states, again, close):
        engine = make(stage)
        train(engine)
        engine.save_checkpoint(folder, "first")
        train(engine)
        engine.wait_for_checkpoint()
        before = bits(engine)
        with slow_copies(0.1) as ends:
            engine.save_checkpoint(folder, "state")
            if ends and ends[0].is_set():
                wrong.append(f"{change.__name__}: the call waited for the copy")
            change(engine)
            if change is not close:
                engine.wait_for_checkpoint()
                engine.close()
        engine = make(stage)
        engine.load_checkpoint(folder, "state")
        if bits(engine) != before:
            wrong.append(f"{change.__name__}: another state was saved")
        engine.close()
    return wrong


@pytest.mark.parametrize(("ranks", "stage"), [(1, "0"), (2, "2"), (2, "3")])
def test_what_changes_the_states_waits_for_their_copy(pools: Pools, tmp_path: Path, ranks: int, stage: str) -> None:
    assert pools(ranks).run(changes_after_a_save, str(tmp_path), stage) == [[]] * ranks


def copy_fails(folder: str) -> list[str]:
    """The thread that copies fails on rank 1: the save fails on both, and the next one is whole."""
    engine, said = make("2"), []
    original = background._copy

    def copy(*given: Any) -> None:
        if engine.rank == 1 and threading.current_thread() is not threading.main_thread():
            raise MemoryError("no room")
        original(*given)

    with warnings.catch_warnings(), replaced(background, "_copy", copy):
        warnings.simplefilter("ignore")
        engine.save_checkpoint(folder, "a")
        train(engine)
        try:
            engine.wait_for_checkpoint()
        except CheckpointError as error:
            said.append(str(error))
    engine.save_checkpoint(folder, "b")
    engine.close()
    return said


def test_a_copy_that_fails_fails_the_save(pools: Pools, tmp_path: Path) -> None:
    for said in pools(2).run(copy_fails, str(tmp_path)):
        assert len(said) == 1 and "no room" in said[0]
    assert directory.saved(tmp_path) == ["b"]


def test_a_save_from_an_evaluation(tmp_path: Path) -> None:
    engine = make("2")
    train(engine)
    expected = bits(engine)
    with torch.inference_mode():
        engine.save_checkpoint(tmp_path, "best")
    train(engine)
    engine.save_checkpoint(tmp_path, "later")
    engine.load_checkpoint(tmp_path, "best")
    assert bits(engine) == expected
    engine.close()
