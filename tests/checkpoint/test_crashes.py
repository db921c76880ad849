"""A save that is killed anywhere leaves the last good checkpoint; the next save cleans up after it."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardengine
from shardengine.checkpoint import atomic, directory
from shardengine.comm import mesh as mesh_module
from shardengine.errors import ShardEngineError
from tests.support import cases
from tests.support.forks import Forks, operations

Say = Callable[[Any], None]
TRIALS = 60


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory where there is one: hundreds of fsyncs take their time on a disk."""
    shared = Path("/dev/shm")
    if not os.access(shared, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=shared) as place:
        yield Path(place)


def make(save: dict[str, Any], **options: Any) -> Any:
    return cases.make_engine(cases.make_mlp(), cases.config_of("3", checkpoint=save), "AdamW", **options)


def train(engine: Any) -> None:
    engine.backward(cases.loss_of(engine, engine.global_steps, engine.rank, 0))
    engine.step()


def digest(engine: Any) -> str:
    return cases.digest([cases.local_state(engine)])


def kept(folder: str) -> list[str]:
    return sorted(path.name for path in Path(folder).iterdir()) if Path(folder).is_dir() else []


def load(engine: Any, folder: str) -> dict[str, tuple[int, str]]:
    """Load the last checkpoint ("": tag=None), then every one by its tag, without a warning: (step, values) of each."""
    found = {}

    def take(tag: str | None) -> None:
        loaded = engine.load_checkpoint(folder, tag)
        found[tag or ""] = (loaded.global_steps, digest(engine))
        assert tag is None or loaded.tag == tag

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        take(None)
        for tag in [name for name in kept(folder) if name[0] != "." and name != "latest"]:
            take(tag)
    return found


# At any moment


def saves_until_it_is_killed(say: Say, rank: int, folder: str, first: bool, save: dict[str, Any]) -> None:
    """Says ("found", what loads), then of every save ("saves", step, values) and, once it is there, ("saved", step)."""
    engine = make(save)
    say(("found", {} if first else load(engine, folder)))
    for number in itertools.count(1):
        train(engine)
        say(("saves", engine.global_steps, digest(engine)))
        engine.save_checkpoint(folder, None if number % 3 else "best")
        if number % 4 == 0:
            engine.wait_for_checkpoint()
        if number % 4 == 0 or not save.get("async_save"):
            say(("saved", engine.global_steps))


def test_killed_at_any_moment(forks: Forks, tmp_path: Path) -> None:
    """Each life goes on from what the one before left."""
    chance = random.Random(4)
    values: dict[int, set[str]] = {}
    saved = last = inside = 0
    for trial in range(TRIALS):
        save = {"keep_last": 2, "async_save": trial % 2 == 1}
        moment = chance.randrange(1, 8), chance.random()
        (words,) = forks.live(saves_until_it_is_killed, str(tmp_path), saved == 0, save, kill_at=moment)
        inside += words[-1][0] == "saves"
        for word in words:
            if word[0] == "found" and saved:
                found = word[1]
                assert saved <= found[""][0] <= last, f"trial {trial}: step {saved} was saved, {found} is there"
                assert all(value in values[step] for step, value in found.values()), trial
                last = saved = found[""][0]
            elif word[0] == "saves":
                last = word[1]
                values.setdefault(last, set()).add(word[2])
            elif word[0] == "saved":
                saved = word[1]
    assert saved > 3 and inside > TRIALS // 10, (saved, inside)


# At every operation on files


def prepares(say: Say, rank: int, folder: str) -> None:
    engine = make({})
    say(digest(engine))
    for _ in range(3):
        train(engine)
        engine.save_checkpoint(folder)
        say(digest(engine))
    train(engine)
    say(digest(engine))


def saves_once(say: Say, rank: int, folder: str, tag: str | None, save: dict[str, Any], last: int | None) -> None:
    engine = make(save)
    engine.load_checkpoint(folder)
    train(engine)
    with operations(folder, last) as done:
        engine.save_checkpoint(folder, tag)
        engine.wait_for_checkpoint()
    say(done)


def looks(say: Say, rank: int, folder: str, save: dict[str, Any]) -> None:
    """Says what loads, then what is in the directory after another save."""
    engine = make(save)
    say(load(engine, folder))
    train(engine)
    engine.save_checkpoint(folder, "next")
    engine.wait_for_checkpoint()
    say(kept(folder))
    say(engine.load_checkpoint(folder).tag)


@pytest.mark.parametrize(
    ("tag", "behind"), [(None, False), ("step-00000002", True), ("step-00000003", False)]
)  # a new checkpoint, one that is replaced, the last one replaced; two older ones are removed
def test_killed_before_every_operation(forks: Forks, memory: Path, tag: str | None, behind: bool) -> None:
    start = memory / "start"
    (values,) = forks.live(prepares, str(start))
    save = {"keep_last": 1, "async_save": behind}
    new, before = tag or "step-00000004", {1, 2, 3}
    for last in itertools.count():
        folder = memory / "trial"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(start, folder)
        (words,) = forks.live(saves_once, str(folder), tag, save, last)
        found, after, newest = forks.live(looks, str(folder), save)[0]
        default = found.pop("")
        assert default in [(3, values[3]), (4, values[4])], (last, default)
        assert all(value == values[step] for step, value in found.values()), last
        complete = found.get(new) == (4, values[4])
        assert complete or {int(name[-1]) for name in found} == before, f"operation {last}: something is lost"
        assert complete or default[0] == 3
        assert not [name for name in after if name.startswith(".")] and newest == "next", (last, after)
        if words:
            assert complete and default[0] == 4 and list(found) == [new]
            assert last > 20, words
            return


# One of two ranks


def two_ranks(say: Say, rank: int, folder: str, save: dict[str, Any], victim: int, last: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}.store", rank=rank, world_size=2)
    within = 8 if save["async_save"] else 60  # what is written behind training waits for all of it
    mesh = mesh_module.build(torch.device("cpu"), timeout_s=within)
    config = cases.config_of("3", checkpoint=save)
    model = cases.make_mlp()
    engine = shardengine.initialize(model, config, optimizer=cases.make_optimizer(model, "AdamW"), mesh=mesh)
    train(engine)
    engine.save_checkpoint(folder)
    engine.wait_for_checkpoint()
    say(cases.local_state(engine))
    train(engine)
    try:
        with operations(folder, last if rank == victim else None):
            engine.save_checkpoint(folder)
            engine.wait_for_checkpoint()
        say("no error")
    except ShardEngineError as error:
        say(f"{type(error).__name__}: {error}")


def loads_alone(say: Say, rank: int, folder: str) -> None:
    engine = make({})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        say((engine.load_checkpoint(folder).global_steps, cases.local_state(engine)))
        engine.save_checkpoint(folder)
        say(kept(folder))


@pytest.mark.core
@pytest.mark.parametrize(
    ("victim", "last", "behind"),
    [(1, 0, False), (1, 1, False), (1, 2, False), (0, 3, False), (0, 12, False), (1, 1, True), (0, 3, True)],
)
def test_one_rank_is_killed(forks: Forks, tmp_path: Path, victim: int, last: int, behind: bool) -> None:
    """Before it opens its file, in the middle of writing, before the fsync; the first rank also before it concludes."""
    folder = tmp_path / "run"
    both = forks.live(two_ranks, str(folder), {"async_save": behind}, victim, last, ranks=2)
    survivor = both[1 - victim][-1]
    assert len(both[victim]) == 1, "the victim was to be killed"
    assert isinstance(survivor, str) and survivor != "no error"
    (step, state), after = forks.live(loads_alone, str(folder))[0]
    assert step == 1 and after == ["latest", "step-00000001"]
    before = cases.assemble([words[0] for words in both])
    assert {at: flat.tobytes() for at, flat in before.items()} == {
        at: flat.tobytes() for at, flat in cases.assemble([state]).items()
    }


# The order of the end


def test_latest_is_written_when_its_checkpoint_is_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    work, plain, there = directory.work_of(tmp_path, "a"), atomic.write_text, []
    work.mkdir(parents=True)
    (work / "index.json").write_text("{}")

    def noted(path: Path, text: str) -> None:
        there.append((tmp_path / "a" / "index.json").exists() and not work.exists())
        plain(path, text)

    monkeypatch.setattr(atomic, "write_text", noted)
    directory.finish(tmp_path, "a")
    assert there == [True] and (tmp_path / "latest").read_text() == "a\n"
