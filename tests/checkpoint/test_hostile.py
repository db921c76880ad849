"""A checkpoint that was made to do harm is refused by name, or holds other numbers; it never does anything else."""

from __future__ import annotations

import copy
import json
import math
import os
import random
import re
import resource
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shardengine.errors import CheckpointError, UsageError
from tests.support import damage
from tests.support.raising import raises

VALUES: tuple[Any, ...] = (None, -1, 1e300, math.nan, "x", [], {}, True, 10**400)
NUMBERS = (
    "options",
    "counters",
    "batch",
    "client_state",
    "steps",
    "lr_scheduler",
    "model",
    "versions",
    "stage",
    "random",
)
"""Below these keys another number is only another number."""
MANY = (("tensors",), ("parameters",), ("optimizer", "steps"), ("random",))


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    engine = damage.make()
    damage.train(engine, 3)
    engine.save_checkpoint(folder, "a", {"a": [1, {"b": None}]})
    engine.close()
    return folder


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a JSON tree; of what is many times the same only the first and the last."""
    yield path
    keys = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    for key in {keys[0]: 0, keys[-1]: 0} if (keys and path in MANY) or (isinstance(value, list) and keys) else keys:
        yield from paths(value[key], (*path, key))


def put(index: dict[str, Any], path: tuple[Any, ...], value: Any) -> None:
    for key in path[:-1]:
        index = index[key]
    index[path[-1]] = value


Change = Callable[[dict[str, Any]], Any]


def becomes(index: dict[str, Any]) -> Change:
    return lambda _: index


class Victim:
    """An engine that loads one checkpoint after the other, and what it is before and may be afterwards."""

    def __init__(self, good: Path, folder: Path) -> None:
        self.good, self.folder = good, folder
        self.engine = damage.make()
        damage.train(self.engine)
        self.engine.load_checkpoint(good)
        self.loaded = damage.tensors(self.engine), damage.rest(self.engine)
        self._start()

    def _start(self) -> None:
        damage.train(self.engine, 2)
        self.before = damage.tensors(self.engine), damage.rest(self.engine)

    def meets(self, what: str, *, numbers: bool = False) -> str:
        """What a load of ``folder`` says. numbers: what is no tensor may be loaded as something else."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of another global batch
                self.engine.load_checkpoint(self.folder, "a")
        except (CheckpointError, UsageError) as error:
            assert (damage.tensors(self.engine), damage.rest(self.engine)) == self.before, f"{what}: changed, {error}"
            assert len(str(error)) < 2000 and str(self.folder) in str(error), what
            return str(error)
        after = damage.tensors(self.engine), damage.rest(self.engine)
        assert after[0] == self.loaded[0], f"{what}: other tensors"
        if after[1] != self.loaded[1]:
            assert numbers, f"{what}: accepted"
            damage.train(self.engine)
        self.engine.load_checkpoint(self.good)
        assert (damage.tensors(self.engine), damage.rest(self.engine)) == self.loaded, what
        self._start()
        return "no error"


@pytest.fixture(scope="module")
def victim(good: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victim]:
    victim = Victim(good, tmp_path_factory.mktemp("bad"))
    yield victim
    victim.engine.close()


@pytest.fixture
def bad(good: Path, victim: Victim) -> Path:
    return damage.copy(good, victim.folder) / "a"


def test_every_value_of_the_index(victim: Victim, bad: Path) -> None:
    """Each value in the tree is replaced by each of ``VALUES``, signed again."""
    original = json.loads((bad / "index.json").read_text(encoding="utf-8"))["index"]
    results = []
    for path in list(paths(original))[1:]:
        for value in VALUES:
            index = copy.deepcopy(original)
            put(index, path, value)
            damage.sign(bad, becomes(index))
            results.append(victim.meets(f"{path} is {value!r:.40}", numbers=bool({*NUMBERS} & {*path})))
    assert len(results) > 700 and results.count("no error") < len(results) // 3


def other_name(old: str, new: str) -> Change:
    """The name ``old`` is ``new``, everywhere in the index."""
    return lambda index: json.loads(json.dumps(index).replace(json.dumps(old), json.dumps(new)))


def at(*path: Any, value: Any) -> Change:
    return lambda index: put(index, path, value)


def options(**values: Any) -> Change:
    return lambda index: index["optimizer"]["groups"][0]["options"].update(values)


def schedule(**values: Any) -> Change:
    return lambda index: index["lr_scheduler"]["state"].update(values)


def piece(*values: Any) -> Change:
    return at("tensors", "0.weight", "weight", "pieces", value=[list(values)])


FILE, ROWS = "rank-00000.safetensors", ("parameters", 0)
REFUSED: dict[str, tuple[Change, str]] = {
    "a path as a file": (other_name(FILE, "../a/rank-00000.safetensors"), "file name"),
    "an absolute file": (other_name(FILE, "/etc/passwd"), "file name"),
    "another file": (other_name(FILE, "model.pkl"), "file name"),
    "a file with an end of line": (other_name(FILE, FILE + "\n"), "file name"),
    "a file that is not listed": (piece("rank-00007.safetensors", 0, 15, 0), "pieces"),
    "an absurd file": (at("files", FILE, "bytes", value=2**59), "chunks of"),
    "absurd chunks": (at("chunk_bytes", value=2**40), "chunk_bytes"),
    "tiny chunks": (at("chunk_bytes", value=1), "chunk_bytes"),
    "an absurd shape": (at(*ROWS, "shape", value=[2**60, 2**60]), "shape or dtype"),
    "another shape": (at(*ROWS, "shape", value=[2**50]), r"its shape is \[1125899906842624\]"),
    "a shape of many dimensions": (at(*ROWS, "shape", value=[1] * 100), "shape of"),
    "a float as a size": (at(*ROWS, "shape", value=[5.0, 3.0]), "shape of"),
    "a flag as a size": (at(*ROWS, "shape", value=[5, True]), "shape of"),
    "an unknown dtype": (at(*ROWS, "dtype", value="__class__"), "shape or dtype"),
    "a parameter with a path": (other_name("0.weight", "../../0.weight"), "only in the checkpoint"),
    "a parameter of python": (other_name("0.weight", "__class__.__init__"), "only in the checkpoint"),
    "a name twice": (at("parameters", 1, "names", value=["0.weight"]), "names in parameters"),
    "a gap": (piece(FILE, 1, 15, 8192), "some of its elements are in no file"),
    "beyond the end": (piece(FILE, 0, 15, 2**40), "pieces"),
    "before the beginning": (piece(FILE, 0, 15, -8), "pieces"),
    "more than there is": (piece(FILE, 0, 16, 8192), "pieces"),
    "backwards": (piece(FILE, 15, 0, 8192), "pieces"),
    "no tensor at all": (at("tensors", value={}), "has nothing of it"),
    "parameters as an option": (options(params=[]), "'params' is no option"),
    "an option of another name": (options(__class__="x"), "'__class__' is no option"),
    "an option of another type": (options(lr="0.1"), "lr is '0.1'"),
    "an option that is no number": (options(lr=math.nan), "lr is 'nan'"),
    "a text among numbers": (options(betas=[0.9, "x"]), "betas is"),
    "another optimizer": (at("optimizer", "kind", value="os.system"), "the checkpoint has os.system"),
    "another scheduler": (at("lr_scheduler", "type", value="os.system"), "the checkpoint has os.system"),
    "a schedule of another type": (schedule(last_epoch="x"), "last_epoch is x"),
    "milestones of another type": (schedule(_milestones="x"), "_milestones is x"),
    "schedules missing": (schedule(_schedulers=[]), "_schedulers is"),
    "absurd random states": (at("random", "torch", 0, 2, value=2**50), "random state torch"),
    "random states elsewhere": (at("random", "torch", 0, 1, value=2**40), "random state torch"),
    "short random states": (at("random", "torch", 0, 2, value=100), "random states cannot be used"),
    "random states of something else": (at("random", "python", 0, 1, value=8192), "random states cannot be used"),
    "another form": (at("format", value=99), "format 99, this version reads 2"),
    "many steps": (at("optimizer", "steps", "0.weight", value=2**61), "optimizer steps"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(victim: Victim, bad: Path, name: str) -> None:
    change, text = REFUSED[name]
    damage.sign(bad, change)
    assert re.search(text, victim.meets(name))


HARMLESS: dict[str, tuple[Change, bool]] = {
    "overlapping pieces of the same": (
        lambda index: index["tensors"]["0.weight"]["weight"]["pieces"].append(
            index["tensors"]["0.weight"]["weight"]["pieces"][0]), False),
    "names of the engine in the schedule": (schedule(optimizer="x", step="x", get_lr="x", __class__="x"), False),
    "unknown keys": (at("load", value="os.system"), False),
    "a hostile model": (at("model", value={"class": "os.system"}), False),
    "hostile client state": (at("client_state", value={"__reduce__": ["os.system", "x"], "n": 10**400}), False),
    "no random states": (at("random", value={}), True),
}  # fmt: skip


@pytest.mark.parametrize("name", HARMLESS)
def test_what_does_no_harm(victim: Victim, bad: Path, name: str) -> None:
    change, numbers = HARMLESS[name]
    damage.sign(bad, change)
    assert victim.meets(name, numbers=numbers) == "no error"


TEXTS: dict[str, str] = {
    "deep": '{"index": ' + "[" * 200_000 + "]" * 200_000 + "}",
    "deep objects": '{"a":' * 100_000 + "1" + "}" * 100_000,
    "a huge number": '{"sha256": "", "index": {"format": ' + "9" * 100_000 + "}}",
    "twice": '{"sha256": "x", "index": {}, "sha256": "y", "index": {"format": 2}}',
    "a list": "[]", "a number": "1e999", "nothing": "", "zeros": "\0" * 100, "half": '{"index": {"format"',
    "a surrogate": '{"sha256": "", "index": {"\\ud800": 1}}',
}  # fmt: skip


@pytest.mark.parametrize("name", TEXTS)
def test_what_is_no_index(victim: Victim, bad: Path, name: str) -> None:
    (bad / "index.json").write_text(TEXTS[name], encoding="utf-8")
    assert "index.json is damaged or not of shardengine" in victim.meets(name)


def test_pickles_are_data(victim: Victim, bad: Path) -> None:
    """In the place of the index, and in that of the tensors with checksums that are right: their bytes are numbers."""
    damage.WAYS["pickle"](bad / "index.json")
    assert "index.json is damaged" in victim.meets("index")
    damage.copy(victim.good, victim.folder)
    path = bad / FILE
    size = path.stat().st_size
    damage.WAYS["pickle"](path)
    (bad / "model.pkl").write_bytes(path.read_bytes())
    path.write_bytes((path.read_bytes() * size)[:size])
    data = path.read_bytes()
    damage.sign(bad, at("files", FILE, value={"bytes": size, "chunks": [zlib.crc32(data)]}))
    assert "random states cannot be used" in victim.meets("tensors")


@pytest.mark.parametrize("tag", ["../a", "/etc", "a/b", "..", ".", "", "a\0", "latest", ".tmp-a", "x" * 300, 7])
def test_tags(victim: Victim, bad: Path, tag: Any) -> None:
    for call in (victim.engine.load_checkpoint, victim.engine.save_checkpoint):
        with raises("checkpoint-tag-invalid"):
            call(bad, tag)


def test_random_bytes(victim: Victim, bad: Path) -> None:
    """A few hundred mutations of the text of an index, most of them no JSON any more."""
    chance = random.Random(3)
    text = (bad / "index.json").read_bytes()
    for number in range(200):
        data = bytearray(text)
        for _ in range(chance.choice((1, 1, 2, 8))):
            place = chance.randrange(len(data))
            data[place : place + chance.choice((0, 1, 1, 5))] = chance.choice(
                (b"", b"9", b"-", b"\xff", b"[", b'"', b"{")
            )
        (bad / "index.json").write_bytes(data)
        if bytes(data) != text:
            victim.meets(f"mutation {number}")


def test_a_sparse_file_is_not_taken_into_memory(victim: Victim, bad: Path) -> None:
    """A file of a tebibyte that takes no place on the disk, with the checksums that it would have."""
    os.truncate(bad / FILE, 1 << 40)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    chunks = [0] * (1 << 16)
    damage.sign(bad, lambda index: index.update(
        chunk_bytes=1 << 24, files={FILE: {"bytes": 1 << 40, "chunks": chunks}}))  # fmt: skip
    assert "is damaged" in victim.meets("sparse")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400_000, "kilobytes"
