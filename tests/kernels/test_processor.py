"""kernels/native/processor.py: py-cpuinfo's answer on disk, and beside that of the compiler's builtin."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardengine.app import environment
from shardengine.errors import UsageError
from shardengine.kernels.native import build, library, processor
from shardengine.kernels.native.processor import Processor

compiled = pytest.mark.skipif(isinstance(build.find_compiler(), str), reason="no C++ compiler (g++ or clang++)")


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often py-cpuinfo was asked, which says that the processor can do "avx2", with a cache of its own."""
    times: list[int] = []

    def answer() -> dict[str, Any]:
        times.append(1)
        return {"brand_raw": "Some CPU", "flags": ["avx2", "f16c"]}

    monkeypatch.setenv("SHARDENGINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(importlib, "import_module", lambda name: SimpleNamespace(get_cpu_info=answer))
    return times


def test_the_answer_is_kept(asked: list[int], tmp_path: Path) -> None:
    expected = Processor("Some CPU", frozenset({"avx2", "f16c"}))
    assert [processor.processor() for _ in range(3)] == [expected] * 3 and len(asked) == 1
    (file,) = (tmp_path / "cache").iterdir()
    assert json.loads(file.read_text()) == {"brand": "Some CPU", "flags": ["avx2", "f16c"]}


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"brand": "x"}', '{"brand": "x", "flags": 3}'])
def test_a_damaged_answer_is_asked_for_again(asked: list[int], tmp_path: Path, damage: str) -> None:
    processor.processor()
    (file,) = (tmp_path / "cache").iterdir()
    file.write_text(damage)
    assert processor.processor().brand == "Some CPU" and len(asked) == 2
    assert processor.processor().brand == "Some CPU" and len(asked) == 2


def no_home() -> Path:
    raise RuntimeError("no home")


@pytest.mark.parametrize("what", ["cannot be written", "no home"])
def test_without_a_cache_it_is_asked_each_time(
    asked: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    if what == "no home":
        monkeypatch.delenv("SHARDENGINE_CACHE")
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setattr(Path, "home", no_home)
    else:
        (tmp_path / "cache").touch()
    assert processor.processor().brand == "Some CPU" == processor.processor().brand and len(asked) == 2


def test_another_processor_with_the_same_cache_is_asked_itself(
    asked: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = {name: tmp_path / name for name in ("one", "same", "other")}
    told["one"].write_text("model name : A\ncpu MHz : 1.0\nflags : avx2\n\nmodel name : A\n")
    told["same"].write_text("model name : A\ncpu MHz : 2.5\nflags : avx2\n\n")
    told["other"].write_text("model name : A\ncpu MHz : 1.0\nflags : avx2 avx512f\n\n")
    keys = {name: processor._key(path) for name, path in told.items()}
    assert keys["one"] == keys["same"] != keys["other"] and processor._key(tmp_path / "missing")
    for name in ("one", "same", "other"):
        monkeypatch.setattr(processor, "_key", lambda name=name: keys[name])
        processor.processor()
    assert len(asked) == len(list((tmp_path / "cache").iterdir())) == 2


def stand_in(**numbers: int) -> library.Library:
    """A library that says this of its instruction sets; scalar is number 0."""
    known = {"scalar": 0, **numbers}
    functions = dict.fromkeys(set(library.Library._fields) - {"instruction_set", "number_of", "fast_crc32"})
    return library.Library(
        max(known.values()), lambda name: known.get(name.decode(), -1), **functions, fast_crc32=False
    )


AVX2, AVX512 = processor.NEEDS["avx2"], processor.NEEDS["avx512"]
OPINIONS = [
    ({"avx2": 1, "avx512": 2}, AVX512, []),
    ({"avx2": 1, "avx512": -2}, AVX2, []),
    ({"avx2": -2, "avx512": -2}, frozenset({"sse2"}), []),
    ({"avx2": 1, "avx512": 2}, AVX512 - {"avx512vl"}, ["avx512: the library uses it, py-cpuinfo misses avx512vl"]),
    ({"avx2": 1, "avx512": -2}, AVX512, ["avx512: the library does not find it, py-cpuinfo finds all that it needs"]),
    ({"neon": 1}, frozenset({"fp"}), ["neon: the library uses it, py-cpuinfo misses asimd"]),
]


@pytest.mark.parametrize(("numbers", "flags", "expected"), OPINIONS)
def test_two_opinions_are_compared(numbers: dict[str, int], flags: frozenset[str], expected: list[str]) -> None:
    assert processor.disagreements(stand_in(**numbers), Processor("x", flags)) == expected


@compiled
def test_on_this_machine_the_compilers_builtin_and_py_cpuinfo_agree() -> None:
    loaded = library.load()
    assert loaded is not None
    assert processor.disagreements(loaded, processor.processor()) == []
    assert environment._kernels() == f"native, {processor.name_of(loaded)} (py-cpuinfo agrees)"
    assert f"CPU kernels: native, {processor.name_of(loaded)} (" in environment.describe()


def test_the_environment_says_who_carries_out_kernels(asked: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "load", lambda: None)
    assert environment._kernels().startswith("torch (")
    monkeypatch.setattr(library, "load", lambda: stand_in(avx2=1, avx512=2))
    assert environment._kernels().startswith("native, avx512 (avx512: the library uses it, py-cpuinfo misses avx512bw")

    def refuse() -> None:
        raise UsageError("SHARDENGINE_NATIVE=require: none")

    monkeypatch.setattr(library, "load", refuse)
    assert environment._kernels() == "SHARDENGINE_NATIVE=require: none"
