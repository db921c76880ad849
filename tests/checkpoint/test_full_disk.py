"""A disk that is full, or read-only: the error says so on every rank, and what was there before is whole."""

from __future__ import annotations

import errno
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardengine
from shardengine.checkpoint import directory
from shardengine.comm import mesh as mesh_module
from shardengine.errors import CheckpointError
from tests.support import cases
from tests.support.forks import NO_FILE_SYSTEM, Forks, make_read_only
from tests.support.raising import raises

Say = Callable[[Any], None]
DISK = 1 << 20


def make(store: str, rank: int, behind: bool) -> Any:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mesh = mesh_module.build(torch.device("cpu"), timeout_s=30)
    model, config = cases.make_mlp(), cases.config_of("3", checkpoint={"async_save": behind})
    return shardengine.initialize(model, config, optimizer=cases.make_optimizer(model, "AdamW"), mesh=mesh)


def train(engine: Any) -> None:
    engine.backward(cases.loss_of(engine, engine.global_steps, engine.rank, 0))
    engine.step()


def fill(place: Path, left: int) -> None:
    """Leave about ``left`` bytes of the disk."""
    free = os.statvfs(place).f_bavail * os.statvfs(place).f_frsize
    with (place / "ballast").open("wb") as file:
        file.write(b"\0" * max(0, free - left))


def saves_on_a_full_disk(say: Say, rank: int, store: str, place: str, left: list[int], behind: bool) -> None:
    """One good save; then one with every number of bytes in ``left``; says what each raises and what is there."""
    folder = Path(place) / "run"
    engine = make(store, rank, behind)
    train(engine)
    engine.save_checkpoint(folder)
    engine.wait_for_checkpoint()
    state = [flat.tobytes() for *_, flat in cases.local_state(engine)]
    for count in left:
        train(engine)
        if rank == 0:
            fill(Path(place), count)
        dist.barrier()
        text = ""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                engine.save_checkpoint(folder, "next")
                engine.wait_for_checkpoint()
            except CheckpointError as error:
                text = str(error)
        dist.barrier()
        names = sorted(path.name for path in folder.rglob("*"))
        if rank == 0:
            (Path(place) / "ballast").unlink()
        dist.barrier()
        loaded = engine.load_checkpoint(folder)
        same = [flat.tobytes() for *_, flat in cases.local_state(engine)] == state
        say((count, text, names, loaded.tag, same))
        dist.barrier()
        if not text:
            break
    engine.save_checkpoint(folder, "next")
    engine.wait_for_checkpoint()
    say(engine.load_checkpoint(folder).tag)


@pytest.mark.parametrize("behind", [False, True])
def test_a_full_disk(forks: Forks, tmp_path: Path, behind: bool) -> None:
    """A file system of one MiB, with room for nothing, for some of the files, for all but the last, at last for all."""
    left = [*range(0, 400_000, 4096 * 3)]
    disk = tmp_path / "disk"
    disk.mkdir()
    said = forks.live(
        saves_on_a_full_disk, str(tmp_path / "store"), str(disk), left, behind, ranks=2, disk=(str(disk), DISK)
    )
    if said[0] == [NO_FILE_SYSTEM]:
        pytest.skip("this machine lets nobody mount a file system of his own")
    good = ["index.json", "latest", "rank-00000.safetensors", "rank-00001.safetensors", "step-00000001"]
    for words in said:
        *trials, newest = words
        assert newest == "next" and len(trials) > 5
        for count, text, names, tag, same in trials[:-1]:
            assert "No space left on device; the previous one is intact" in text and str(disk / "run") in text, count
            assert (names, tag, same) == (good, "step-00000001", True), count
        assert trials[-1][1] == "" and trials[-1][3] == "next" and not trials[-1][4]


def saves_on_a_read_only_disk(say: Say, rank: int, place: str) -> None:
    engine = cases.make_engine(cases.make_mlp(), cases.config_of("3"), "AdamW")
    folder = Path(place) / "run"
    engine.save_checkpoint(folder)
    engine.save_checkpoint(folder, "mine")
    (folder / "mine").rename(folder / ".old-mine")  # as a killed save may have left it
    make_read_only(place)
    try:
        engine.save_checkpoint(folder, "more")
    except CheckpointError as error:
        say(str(error))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # 'latest' names the one that cannot be put back
        say(engine.load_checkpoint(folder).tag)
    try:
        engine.load_checkpoint(folder, "mine")
    except CheckpointError as error:
        say(str(error))


def test_a_read_only_disk(forks: Forks, tmp_path: Path) -> None:
    (words,) = forks.live(saves_on_a_read_only_disk, str(tmp_path), disk=(str(tmp_path), DISK))
    if words == [NO_FILE_SYSTEM]:
        pytest.skip("this machine lets nobody mount a file system of his own")
    assert f"could not be written to {tmp_path / 'run'}: Read-only file system" in words[0]
    assert words[1] == "step-00000000" and "has no checkpoint 'mine'; there are: step-00000000" in words[2]


@pytest.mark.parametrize("name", ["index.json", "latest"])
@pytest.mark.parametrize("behind", [False, True])
def test_no_room_for_the_last_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, behind: bool) -> None:
    config = cases.config_of("3", checkpoint={"async_save": behind})
    engine = cases.make_engine(cases.make_mlp(), config, "AdamW")
    train(engine)
    engine.save_checkpoint(tmp_path)
    engine.wait_for_checkpoint()
    original = os.replace

    def replace(source: Any, target: Any) -> None:
        if Path(target).name == name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        original(source, target)

    monkeypatch.setattr(os, "replace", replace)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for tag in ("next", "step-00000001"):
            with raises("save-earlier-failed" if behind else "save-not-written", "No space left on device"):
                engine.save_checkpoint(tmp_path, tag)
                engine.wait_for_checkpoint()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000001"]
    assert directory.latest(tmp_path) == "step-00000001" and engine.load_checkpoint(tmp_path).global_steps == 1
    engine.close()
