"""kernels/native: building, caching and choosing the library, and going without it."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from shardengine.errors import UsageError
from shardengine.kernels import native, operations
from shardengine.kernels.native import build, library
from tests.support import HANG_S
from tests.support.raising import raises

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(isinstance(build.find_compiler(), str), reason="no C++ compiler (g++ or clang++)")

PROGRAM = """
import hashlib, torch
from shardengine.kernels import Noise, Spans, native, operations, rule_for
from tests.kernels.native_cases import OPTIONS, drawn, some_case
digest = hashlib.sha256()
for seed in range(40):
    case = some_case(seed, 700)
    operations.update(case.flats, case.spans, case.rule, **case.options)
    for flat in case.flats.values():
        digest.update(flat.float().nan_to_num(-7.5).numpy().tobytes())
terms, out = [drawn(70_001, torch.bfloat16, seed) for seed in range(5)], torch.empty(70_001)
operations.ordered_sum(terms, out, divisor=5)
digest.update(out.numpy().tobytes())
digest.update(operations.sum_of_squares(out).numpy().tobytes())
loaded = native.load()
print(loaded.instruction_set if loaded else None, digest.hexdigest())
"""
LOAD = "from shardengine.kernels import native; print(native.load() is not None)"


def run(program: str, cache: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """``program`` in a fresh process with its own cache."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SHARDENGINE_")}
    environment |= {"SHARDENGINE_CACHE": str(cache), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **variables}
    return subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


def load_again() -> library.Library | None:
    """``library.load`` as in a fresh process."""
    return library.load.__wrapped__()


def script(path: Path, text: str) -> Path:
    path.write_text("#!/bin/sh\n" + text, encoding="utf-8")
    path.chmod(0o755)
    return path


def counting_compiler(folder: Path) -> tuple[Path, Path]:
    """A compiler that writes a line per compilation, and the file that it writes into."""
    found = build.find_compiler()
    assert isinstance(found, build.Compiler)
    log = folder / "compilations"
    log.touch()
    count = f'case "$*" in *--version*) ;; *) echo one >> {log};; esac\n'
    return script(folder / "compiler", f'{count}exec {" ".join(found.command)} "$@"\n'), log


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that holds the library."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHARDENGINE_CACHE", str(folder))
        assert build.library().path is not None
    return folder


@pytest.fixture
def own_cache(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it for one test, which this process uses, too. Returns the library."""
    (made,) = cache.glob("*.so")
    copy = tmp_path / "cache" / made.name
    copy.parent.mkdir()
    copy.write_bytes(made.read_bytes())
    monkeypatch.setenv("SHARDENGINE_CACHE", str(copy.parent))
    return copy


@pytest.fixture(scope="module")
def expected(cache: Path) -> str:
    """The digest of PROGRAM's results with the library."""
    done = run(PROGRAM, cache, SHARDENGINE_NATIVE="require")
    assert done.returncode == 0, done.stderr
    return done.stdout.split()[1]


def test_without_a_compiler_torch_gives_the_same_bits_and_one_line_says_so(tmp_path: Path, expected: str) -> None:
    (tmp_path / "empty").mkdir()
    done = run(PROGRAM, tmp_path / "cache", PATH=str(tmp_path / "empty"), CXX="")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["None", expected]
    lines = [line for line in done.stderr.splitlines() if "CPU kernels" in line]
    assert len(lines) == 1 and "no compiler" in lines[0] and "g++, clang++, c++" in lines[0]


@pytest.mark.parametrize(("rank", "lines"), [(None, 1), ("0", 1), ("1", 0)])
def test_only_the_first_rank_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, rank: str | None, lines: int
) -> None:
    monkeypatch.setattr(build, "library", lambda: build.Built(None, "no compiler here"))
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    assert load_again() is None
    assert [record.message.endswith("no compiler here") for record in caplog.records] == [True] * lines


def test_switched_off_nothing_is_built_and_the_bits_are_the_same(tmp_path: Path, expected: str) -> None:
    done = run(PROGRAM, tmp_path / "cache", SHARDENGINE_NATIVE="off")
    assert done.stdout.split() == ["None", expected], done.stderr
    assert not done.stderr and not (tmp_path / "cache").exists()


def test_the_body_without_vectors_gives_the_same_bits(cache: Path, expected: str) -> None:
    done = run(PROGRAM, cache, SHARDENGINE_ISA="scalar")
    assert done.stdout.split() == ["0", expected], done.stderr


def test_an_instruction_set_is_taken_or_an_error_says_that_it_is_not_there(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SHARDENGINE_ISA", raising=False)
    best = load_again()
    assert best is not None
    taken = []
    for name in library.INSTRUCTION_SETS:
        monkeypatch.setenv("SHARDENGINE_ISA", name)
        number = best.number_of(name.encode())
        if number >= 0:
            forced = load_again()
            assert forced is not None and forced.instruction_set == number
            taken.append(number)
        else:
            with pytest.raises(UsageError, match=f"SHARDENGINE_ISA={name}: .*(lacks it|no such body)"):
                load_again()
    assert best.instruction_set == max(taken) and 0 in taken and len(taken) < len(library.INSTRUCTION_SETS)


@pytest.mark.parametrize("name", ["SHARDENGINE_ISA", "SHARDENGINE_NATIVE"])
def test_a_value_that_does_not_exist_is_an_error(own_cache: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "sse9")
    with pytest.raises(UsageError, match=f"{name}: expected one of .*, got 'sse9'"):
        load_again()


def test_what_is_required_and_cannot_be_had_is_an_error_that_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDENGINE_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("SHARDENGINE_NATIVE", "require")
    with raises("kernels-native-unavailable", "no-such-compiler was found and ran"):
        load_again()
    monkeypatch.setattr(build, "library", lambda: build.Built(None, "none"))
    monkeypatch.setattr(operations, "wanted", lambda: "native")
    monkeypatch.setattr(native, "load", lambda: None)
    with raises("kernels-native-unavailable"):
        operations._native.__wrapped__()


def test_a_compiler_that_is_no_command_line_is_one_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDENGINE_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", 'g++ "unterminated')
    assert build.library() == build.Built(None, "ValueError: No closing quotation")


def test_a_compiler_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = script(tmp_path / "broken", 'case "$*" in *--version*) echo 1;; *) echo no such target >&2; exit 3;; esac')
    monkeypatch.setenv("CXX", str(broken))
    monkeypatch.setenv("SHARDENGINE_CACHE", str(tmp_path / "cache"))
    built = build.library()
    assert built.path is None and "returned 3" in built.problem and "no such target" in built.problem


@pytest.mark.parametrize("damage", ["truncated", "one bit", "empty"])
def test_a_damaged_library_in_the_cache_is_built_again(own_cache: Path, damage: str) -> None:
    good = own_cache.read_bytes()
    flipped = bytearray(good)
    flipped[len(good) // 2] ^= 1
    own_cache.write_bytes({"truncated": good[: len(good) // 2], "one bit": bytes(flipped), "empty": b""}[damage])
    assert not build.is_whole(own_cache)
    built = build.library()
    assert built.path == own_cache and build.is_whole(own_cache)


def test_the_bytes_are_checked_before_they_are_loaded(own_cache: Path) -> None:
    data = b"\x7fELF" + bytes(5000)
    own_cache.write_bytes(data)
    assert not build.is_whole(own_cache)
    own_cache.write_bytes(data + build._MARK + hashlib.sha256(data).digest())
    assert build.is_whole(own_cache)  # whole, but not what this source makes
    done = run(LOAD, own_cache.parent)
    assert done.stdout.strip() == "False" and "does not load" in done.stderr, done.stderr


def test_another_source_or_compiler_is_another_library(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = build.source_key()
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-g"))
    assert build.source_key() != before
    monkeypatch.undo()
    monkeypatch.setenv("SHARDENGINE_CACHE", str(own_cache.parent))
    folder = own_cache.parent.parent
    monkeypatch.setenv("CXX", str(counting_compiler(folder)[0]))
    built = build.library()
    assert built.path is not None and built.path != own_cache and built.path.parent == own_cache.parent


def test_processes_that_start_together_compile_once(tmp_path: Path) -> None:
    compiler, log = counting_compiler(tmp_path)
    environment = {**os.environ, "CXX": str(compiler), "SHARDENGINE_CACHE": str(tmp_path / "cache")}
    program = f"import sys; sys.path.insert(0, {str(Path(build.__file__).parent)!r}); import build; b = build.library()"
    command = [sys.executable, "-c", program + "; print(b.path, b.temporary)"]
    started = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    said = {process.communicate(timeout=HANG_S)[0] for process in started}
    assert len(said) == 1 and said.pop().strip().endswith(".so False")
    assert log.read_text().splitlines() == ["one"]


def test_a_cache_that_cannot_be_written_is_replaced_by_a_temporary_folder(tmp_path: Path, expected: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "temporary").mkdir()
    done = run(PROGRAM, tmp_path / "file" / "cache", SHARDENGINE_NATIVE="require", TMPDIR=str(tmp_path / "temporary"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[1] == expected
    assert not list((tmp_path / "temporary").iterdir())


@pytest.mark.parametrize("full", ["the cache", "everything"])
def test_a_full_disk_leaves_no_part_of_a_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: str) -> None:
    cache, replace = tmp_path / "cache", os.replace

    def limited(source: str, target: Path) -> None:
        if full == "everything" or target.parent == cache:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        replace(source, target)

    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("SHARDENGINE_CACHE", str(cache))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr(os, "replace", limited)
    built = build.library()
    assert [path.suffix for path in cache.iterdir()] == [".lock"]
    if full == "everything":
        assert built.path is None and "No space left" in built.problem
    else:
        assert built.path is not None and built.temporary and build.is_whole(built.path)


def test_a_library_that_is_there_needs_no_compiler(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert build.library() == build.Built(own_cache)


def test_a_library_beside_the_package_is_taken_first(
    own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "PREBUILT", tmp_path)
    shipped = tmp_path / f"{build.source_key()}.so"
    shipped.write_bytes(own_cache.read_bytes()[:-1])
    assert build.library() == build.Built(own_cache)
    shipped.write_bytes(own_cache.read_bytes())
    assert build.library() == build.Built(shipped)


def test_a_library_beside_the_package_that_does_not_load_is_left_alone(
    own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that was made with a newer C library."""
    monkeypatch.setattr(build, "PREBUILT", tmp_path)
    shipped = tmp_path / f"{build.source_key()}.so"
    data = b"\x7fELF" + bytes(5000)
    shipped.write_bytes(data + build._MARK + hashlib.sha256(data).digest())
    assert build.library() == build.Built(shipped)
    assert load_again() is not None
    monkeypatch.setenv("CXX", "no-such-compiler")
    own_cache.unlink()
    assert load_again() is None


def test_a_library_made_with_another_c_library_is_not_taken_from_the_cache(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = build.source_key()
    monkeypatch.setattr(build, "_c_library", lambda: "glibc-99.1")
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert build.library().path is None and build.source_key() == key
    monkeypatch.delenv("CXX")
    built = build.library()
    assert built.path is not None and "glibc-99.1" in built.path.name and built.path.parent == own_cache.parent


@pytest.mark.skipif(os.uname().machine not in build.BASELINE, reason="no baseline is known for this processor family")
@pytest.mark.skipif(shutil.which("objdump") is None, reason="objdump is not installed")
def test_a_library_runs_on_the_oldest_processor_of_its_family(tmp_path: Path) -> None:
    """A cache may be shared: outside of the chosen bodies there are no vectors longer than the family's."""
    found = build.find_compiler()
    assert isinstance(found, build.Compiler)
    eager = build.Compiler((*found.command, "-march=native"), found.version)
    path = tmp_path / "library.so"
    path.write_bytes(build.compile_library(eager, build.source_key()))
    text = subprocess.run(["objdump", "-d", "--no-show-raw-insn", path], capture_output=True, text=True, check=True)
    functions = re.findall(r"^\w+ <(\S+)>:\n((?:.+\n)*)", text.stdout, flags=re.MULTILINE)
    chosen = [code for name, code in functions if "avx2" in name or "avx512" in name]
    others = {name: code for name, code in functions if "avx2" not in name and "avx512" not in name}
    newer = re.compile(r"\t(v[a-z]|shlx|shrx|sarx|mulx|bzhi|rorx|andn\s)|%[yz]mm")
    assert any("scalar" in name for name in others) and "shardengine_update" in others
    assert [name for name, code in others.items() if newer.search(code)] == []
    assert os.uname().machine != "x86_64" or any(newer.search(code) for code in chosen)
