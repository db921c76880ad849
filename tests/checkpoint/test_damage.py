"""Damage of each kind to each kind of file is found before anything is changed, on every rank, by name."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardengine.checkpoint import directory, tensor_file
from shardengine.errors import CheckpointError, ShardEngineError, UsageError
from tests.support import cases, damage
from tests.support.raising import raises
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]
FILES = ("rank-00000.safetensors", "rank-00001.safetensors", "index.json")


def saves(folder: str, count: int = 1) -> None:
    engine = damage.make()
    for _ in range(count):
        damage.train(engine)
        engine.save_checkpoint(folder)
    engine.close()


def refusals(source: str, folder: str) -> dict[tuple[str, str], str]:
    """(file, way) → what a load says; "changed" where the engine is another one afterwards."""
    engine = damage.make()
    damage.train(engine, 2)
    before = damage.tensors(engine), damage.rest(engine)
    found = {}
    for file in FILES:
        for way, change in damage.WAYS.items():
            if engine.rank == 0:
                damage.copy(Path(source), Path(folder))
                change(Path(folder) / "step-00000001" / file)
            dist.barrier()
            try:
                engine.load_checkpoint(folder, "step-00000001")
                found[file, way] = "no error"
            except CheckpointError as error:
                found[file, way] = str(error)
            if (damage.tensors(engine), damage.rest(engine)) != before:
                found[file, way] = "changed"
            dist.barrier()
    if engine.rank == 0:
        damage.copy(Path(source), Path(folder))
    dist.barrier()
    assert engine.load_checkpoint(folder).global_steps == 1
    engine.close()
    return found


def test_each_damage_to_each_file(pools: Pools, tmp_path: Path) -> None:
    pools(2).run(saves, str(tmp_path / "good"))
    results = pools(2).run(refusals, str(tmp_path / "good"), str(tmp_path / "bad"))
    assert len(results[0]) == len(FILES) * len(damage.WAYS)
    for (file, way), text in results[0].items():
        assert text == results[1][file, way], "one sentence on all ranks"
        assert text.startswith(("checkpoint ", str(tmp_path))) and "there is no other checkpoint" in text, (
            file,
            way,
            text,
        )
        assert file in text or (way == "other file" and FILES[0] in text), (file, way, text)
        assert file == "index.json" or "it holds " in text, (file, way, text)


def wide(stage: str = "1") -> Any:
    """Of more bytes than a small chunk has."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    return cases.make_engine(model, cases.config_of(stage), "AdamW")


def wide_saves(folder: str, tags: list[str]) -> None:
    """One step before each."""
    engine = wide()
    back = damage.small_chunks()
    for tag in tags:
        engine.backward(engine(torch.full((2, 64), float(len(tag)))).square().mean())
        engine.step()
        engine.save_checkpoint(folder, tag)
    back()
    engine.close()


def flips(folder: str) -> list[str]:
    """What is said of a flipped bit in the middle of tensors, with every way to load."""
    wide_saves(folder, ["a"])
    place = Path(folder) / "a"
    stored = json.loads((place / "index.json").read_text(encoding="utf-8"))["index"]["tensors"]
    path, texts = place / FILES[0], []
    good = path.read_bytes()
    for name, kind, only in (
        ("1.weight", "weight", False),
        ("0.weight", "exp_avg_sq", False),
        ("0.weight", "exp_avg", True),
    ):
        engine = wide()
        data = bytearray(good)
        data[stored[name][kind]["pieces"][0][3] + 8000] ^= 1
        path.write_bytes(data)
        try:
            engine.load_checkpoint(folder, weights_only=only)
            texts.append("no error")
        except CheckpointError as error:
            texts.append(str(error))
        engine.close()
    return texts


def test_the_parameter_is_named(tmp_path: Path) -> None:
    """In files of many chunks; what nobody reads does no harm: here the optimizer's, where only weights are taken."""
    texts = flips(str(tmp_path))
    assert f"{tmp_path / 'a' / FILES[0]} is damaged (a checksum differs); it holds 1.weight (weight); there" in texts[0]
    assert "; it holds 0.weight (exp_avg_sq); there" in texts[1] and texts[2] == "no error"


# Going back


def test_a_load_goes_back_to_the_last_whole_one(tmp_path: Path) -> None:
    saves(str(tmp_path), 4)
    engine = damage.make()
    for step, file in ((4, FILES[0]), (3, "index.json")):
        path = tmp_path / f"step-0000000{step}" / file
        damage.WAYS["last byte"](path)
        with pytest.warns(UserWarning, match=f"goes back to .*-0000000{step - 1}, because .*0000000{step}.*{file}"):
            assert engine.load_checkpoint(tmp_path).global_steps == step - 1
        with pytest.raises(CheckpointError, match=rf"{file}.*there are: .*step-0000000{step - 1}"):
            engine.load_checkpoint(tmp_path, f"step-0000000{step}")
    for path in (tmp_path / "step-00000001" / FILES[0], tmp_path / "step-00000002" / "index.json"):
        path.unlink()
    before = damage.tensors(engine), damage.rest(engine)
    with raises("checkpoint-damaged", "00003", "00001", "there is no other checkpoint"):
        engine.load_checkpoint(tmp_path)
    with raises("checkpoint-tag-unknown", "'step-00000009'", "-00000001"):
        engine.load_checkpoint(tmp_path, "step-00000009")
    assert (damage.tensors(engine), damage.rest(engine)) == before
    engine.close()


def new_engines(folder: str, stage: str) -> None:
    """The newest is damaged where a new engine finds it while it is filled: in the weights of a rank, in a state."""
    wide_saves(folder, ["a", "b"])
    place = Path(folder) / "b"
    stored = json.loads((place / "index.json").read_text(encoding="utf-8"))["index"]["tensors"]
    expected = wide(stage)
    expected.load_checkpoint(folder, "a")
    files = {name: (place / name).read_bytes() for name in FILES[:2]}
    for name, kind in (("1.weight", "weight"), ("0.weight", "exp_avg_sq")):
        if expected.rank == 0:
            file, _, _, offset = stored[name][kind]["pieces"][0]
            data = bytearray(files[file])
            data[offset + 5000] ^= 1
            (place / file).write_bytes(data)
        dist.barrier()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            engine = wide(stage)
            assert engine.load_checkpoint(folder).tag == "a"
            assert sum("goes back to" in str(row.message) and kind in str(row.message) for row in said) == (
                engine.rank == 0
            )
        assert damage.tensors(engine) == damage.tensors(expected)
        assert damage.rest(engine) == damage.rest(expected)
        engine.close()
        half = wide(stage)
        half._window.total = half.rank  # as after a reset(): only one rank has begun
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert half.load_checkpoint(folder).tag == "a"
        assert damage.tensors(half) == damage.tensors(expected)
        half.close()
        alone = wide(stage)
        with pytest.raises(CheckpointError, match=r"it holds .*there are: a. The engine is partly loaded and refuses"):
            alone.load_checkpoint(folder, "b")
        with pytest.raises(UsageError, match=r"call engine.load_checkpoint\(\)"):
            alone.backward(alone(torch.ones(2, 64)).square().mean())
        with pytest.raises(UsageError, match="a load that was interrupted"):
            alone.load_checkpoint(folder, "a", weights_only=True)
        assert alone.load_checkpoint(folder, "a").global_steps == 1
        assert damage.tensors(alone) == damage.tensors(expected)
        alone.backward(alone(torch.ones(2, 64)).square().mean())
        alone.step()
        alone.close()
        dist.barrier()
        if expected.rank == 0:
            for file, good in files.items():
                (place / file).write_bytes(good)
        dist.barrier()
    expected.close()


@pytest.mark.parametrize("stage", ["0", "2", "3"])
def test_a_new_engine_goes_back_while_it_is_filled(pools: Pools, tmp_path: Path, stage: str) -> None:
    pools(2).run(new_engines, str(tmp_path), stage)


LATEST: dict[str, Callable[[Path], Any]] = {
    **damage.WAYS,
    "binary": lambda path: path.write_bytes(bytes(range(128, 256))),
    "something gone": lambda path: path.write_text("step-00000009\n", encoding="utf-8"),
    "another place": lambda path: path.write_text("../step-00000001\n", encoding="utf-8"),
    "an absolute path": lambda path: path.write_text("/etc\n", encoding="utf-8"),
    "itself": lambda path: path.write_text("latest\n", encoding="utf-8"),
    "a long text": lambda path: path.write_text("x" * 100_000, encoding="utf-8"),
}


@pytest.mark.parametrize("way", sorted(LATEST.keys() - {"other file"}))
def test_latest_may_be_anything(good: Path, tmp_path: Path, way: str) -> None:
    damage.copy(good, tmp_path / "a")
    latest = tmp_path / "a" / "latest"
    LATEST[way](latest)
    fine = latest.is_file() and latest.read_text(encoding="latin1").strip() == "step-00000002"
    engine = damage.make()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert engine.load_checkpoint(tmp_path / "a").global_steps == 2
    said = [str(each.message) for each in told if "goes back to" in str(each.message)]
    expected = [] if fine or not os.path.lexists(latest) else [f"/a/step-00000002, because {latest} names "]
    assert len(said) == len(expected) and all(part in text for part, text in zip(expected, said, strict=True))
    names = {"something gone": "'step-00000009', which is not there", "itself": "'latest', which", "binary": "no check"}
    assert f"{latest} names {names.get(way, '')}" in said[0] if said else way not in names
    damage.train(engine)
    if way != "directory":
        engine.save_checkpoint(tmp_path / "a")
        assert engine.load_checkpoint(tmp_path / "a").global_steps == 3
    else:
        with pytest.raises(CheckpointError, match="Is a directory"):
            engine.save_checkpoint(tmp_path / "a")
        assert sorted(directory.saved(tmp_path / "a")) == ["step-00000001", "step-00000002"]
    engine.close()


def test_latest_that_names_nothing_beside_nothing_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "latest").write_text("step-00000009\n", encoding="utf-8")
    engine = damage.make()
    with raises("checkpoint-not-found"):
        engine.load_checkpoint(tmp_path)
    engine.close()


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints of one rank."""
    folder = tmp_path_factory.mktemp("good")
    saves(str(folder), 2)
    return folder


# Which one is the last


def test_equal_and_wrong_dates(good: Path, tmp_path: Path) -> None:
    """Saves within one tick of the clock; copies without dates; an older one that seems to be of the future."""
    for date in (1_000_000_000, 4_000_000_000):
        folder = damage.copy(good, tmp_path / "a")
        for step in (1, 2):
            os.utime(folder / f"step-0000000{step}" / "index.json", (date, date))
        assert directory.saved(folder) == ["step-00000002", "step-00000001"]
        engine = damage.make(checkpoint={"keep_last": 2})
        assert engine.load_checkpoint(folder).global_steps == 2
        damage.train(engine)
        engine.save_checkpoint(folder)
        assert directory.saved(folder) == ["step-00000003", "step-00000002"]
        engine.close()


def test_the_last_ones_are_those_that_were_written_last(good: Path, tmp_path: Path) -> None:
    folder = damage.copy(good, tmp_path / "a")
    engine = damage.make(checkpoint={"keep_last": 2})
    engine.load_checkpoint(folder, "step-00000001")
    engine.save_checkpoint(folder, "mine")
    assert directory.saved(folder)[0] == "mine" and len(directory.saved(folder)) == 3, "a named one does not count"
    engine.save_checkpoint(folder)
    damage.train(engine)
    engine.save_checkpoint(folder)
    assert directory.saved(folder) == ["step-00000002", "step-00000001", "mine"]
    engine.load_checkpoint(folder, "step-00000001")
    engine.save_checkpoint(folder)
    assert directory.saved(folder) == ["step-00000001", "step-00000002", "mine"]
    assert directory.latest(folder) == "step-00000001"
    engine.config.checkpoint.__dict__["keep_last"] = 1
    engine.save_checkpoint(folder)
    assert directory.saved(folder) == ["step-00000001", "mine"]
    engine.close()


# In the place of directories


@pytest.mark.parametrize("what", ["file", "link", "dangling link"])
def test_something_else_in_the_place_of_directories(good: Path, tmp_path: Path, what: str) -> None:
    """Of the tag, and of what a killed save leaves: replaced or removed; what a link names stays as it is."""
    folder, outside = damage.copy(good, tmp_path / "a"), damage.copy(good, tmp_path / "outside")
    for name in ("mine", ".tmp-mine", ".tmp-other", ".old-step-00000001"):
        path = folder / name
        path.write_text("x", encoding="utf-8") if what == "file" else path.symlink_to(
            outside / ("step-00000002" if what == "link" else "nowhere")
        )
    engine = damage.make()
    assert engine.load_checkpoint(folder).global_steps == 2
    for _ in range(2):
        engine.save_checkpoint(folder, "mine")
    assert engine.load_checkpoint(folder, "mine").global_steps == 2
    assert sorted(path.name for path in folder.iterdir()) == ["latest", "mine", "step-00000001", "step-00000002"]
    assert sorted(path.name for path in outside.iterdir()) == ["latest", "step-00000001", "step-00000002"]
    assert engine.load_checkpoint(outside).tag == "step-00000002"
    engine.close()


def test_links_to_whole_checkpoints_are_followed(good: Path, tmp_path: Path) -> None:
    place = tmp_path / "linked"
    place.mkdir()
    for path in (good / "step-00000001").iterdir():
        (place / path.name).symlink_to(path)
    (tmp_path / "mine").symlink_to(place)
    engine = damage.make()
    assert engine.load_checkpoint(tmp_path, "mine").global_steps == 1
    engine.close()


# Where nothing can be written


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    engine = damage.make()
    (tmp_path / "file").write_text("mine", encoding="utf-8")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(CheckpointError, match=f"could not be written to {place}: (File exists|Not a directory)"):
            engine.save_checkpoint(place)
    for wrong in ("", 7, None):
        with raises("checkpoint-folder-not-a-path"):
            engine.save_checkpoint(wrong)
    assert (tmp_path / "file").read_text(encoding="utf-8") == "mine"
    engine.close()


def one_that_vanishes(folder: str) -> list[str]:
    """Rank 1 removes the directory while the ranks write their files, or what it finds there by then."""
    engine = damage.make()
    original = tensor_file.write

    def write(*given: Any) -> Any:
        done = original(*given)
        if engine.rank == 1:
            shutil.rmtree(folder, ignore_errors=True)
        return done

    texts = []
    tensor_file.write = write  # type: ignore[assignment]
    try:
        engine.save_checkpoint(folder)
    except ShardEngineError as error:
        texts.append(f"{type(error).__name__}: {error}")
    finally:
        tensor_file.write = original
    engine.save_checkpoint(folder)
    texts.append(engine.load_checkpoint(folder).tag)
    engine.close()
    return texts


def test_a_directory_that_vanishes(pools: Pools, tmp_path: Path) -> None:
    for text, tag in pools(2).run(one_that_vanishes, str(tmp_path / "a")):
        assert text.startswith("CheckpointError: ") and "could not be written" in text and tag == "step-00000000"
