"""hatch_build.py: a wheel made with a compiler holds the library, one made without is pure, and its tag says which."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

import shardengine
from shardengine.kernels.native import build

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("hatchling") is None, reason="hatchling is not installed; it comes with the extra 'test'"
)
compiled = pytest.mark.skipif(isinstance(build.find_compiler(), str), reason="no C++ compiler (g++ or clang++)")
PREBUILT = f"shardengine/kernels/native/prebuilt/{build.source_key()}.so"
LOADS = """
import shardengine, torch
from shardengine.kernels import native, operations
print(shardengine.__file__, native.load() is not None, operations.sum_of_squares(torch.full((1000,), 2.0)).item())
"""


def run(command: list[str], folder: Path, **changes: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SHARDENGINE_")}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", **changes}
    return subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def built(folder: Path, changes: dict[str, str], target: str = "wheel", root: Path = ROOT) -> tuple[Path, str]:
    """What hatchling makes, and what it said. changes: of the environment."""
    done = run(["-m", "hatchling", "build", "-t", target, "-d", str(folder / "made")], root, **changes)
    assert done.returncode == 0, done.stderr
    (made,) = (folder / "made").iterdir()
    return made, done.stdout + done.stderr


def without_compiler(folder: Path) -> dict[str, str]:
    (folder / "empty").mkdir()
    return {"PATH": str(folder / "empty"), "CXX": "", "SHARDENGINE_CACHE": str(folder / "cache")}


def tags_of(wheel: Path) -> list[str]:
    """The lines of the wheel's own description that say for whom it is."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/WHEEL")]
        lines = archive.read(name).decode().splitlines()
    return [line for line in lines if line.startswith(("Tag: ", "Root-Is-Purelib: "))]


def the_hook(folder: Path) -> Any:
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.NativeLibrary(str(ROOT), {}, None, None, str(folder), "wheel")


@compiled
def test_a_wheel_made_with_a_compiler_works_without_one(tmp_path: Path) -> None:
    wheel, said = built(tmp_path, {})
    tag = wheel.name.removesuffix(".whl").split("-", 2)[2]
    assert tag.startswith("py3-none-") and tag.endswith(os.uname().machine) and "CPU kernels" not in said
    assert tags_of(wheel) == ["Root-Is-Purelib: false", f"Tag: {tag}"]
    with zipfile.ZipFile(wheel) as archive:
        assert [name for name in archive.namelist() if name.endswith(".so")] == [PREBUILT]
        recipes = {name.rpartition("/")[2] for name in archive.namelist() if name.startswith("shardengine/configs/")}
        archive.extractall(tmp_path / "site")
    assert recipes == {path.name for path in (ROOT / "configs").glob("*.json")}
    site = str(tmp_path / "site")
    told = run(["-m", "shardengine", "config", "lora-4x24"], tmp_path, PYTHONPATH=site)
    assert told.returncode == 0 and "zero_optimization.stage" in told.stdout, told.stderr
    assert wheel.name.startswith(f"shardengine-{shardengine.__version__}-")
    done = run(["-c", LOADS], tmp_path, PYTHONPATH=site, SHARDENGINE_NATIVE="require", **without_compiler(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [f"{site}/shardengine/__init__.py", "True", "4000.0"]
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("why", ["no compiler", "switched off", "a compiler that fails"])
def test_a_wheel_made_without_the_library_is_pure(tmp_path: Path, why: str) -> None:
    if why == "a compiler that fails":
        broken = tmp_path / "broken"
        broken.write_text('#!/bin/sh\ncase "$*" in *--version*) ;; *) echo broken here >&2; exit 1;; esac\n')
        broken.chmod(0o755)
        changes = {"CXX": str(broken)}
    else:
        changes = {"SHARDENGINE_NATIVE": "off"} if why == "switched off" else without_compiler(tmp_path)
    wheel, said = built(tmp_path, changes)
    assert wheel.name.endswith("-py3-none-any.whl")
    assert tags_of(wheel) == ["Root-Is-Purelib: true", "Tag: py3-none-any"]
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert not any(name.endswith(".so") for name in names) and "shardengine/kernels/native/source/library.cpp" in names
    expected = {"no compiler": "holds no library of CPU kernels: no compiler", "a compiler that fails": "broken here"}
    assert expected[why] in said if why in expected else "CPU kernels" not in said


def test_a_wheel_that_must_hold_the_library_is_not_made_without(tmp_path: Path) -> None:
    changes = {"SHARDENGINE_NATIVE": "require", **without_compiler(tmp_path)}
    done = run(["-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "made")], ROOT, **changes)
    assert done.returncode and "no compiler" in done.stderr and not list((tmp_path / "made").glob("*.whl"))


@compiled
def test_an_editable_install_and_an_sdist_compile_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive, _ = built(tmp_path, {"CXX": "no-such-compiler", "SHARDENGINE_NATIVE": "require"}, "sdist")
    listed = subprocess.run(["tar", "tzf", str(archive)], capture_output=True, text=True, check=True).stdout
    assert "/hatch_build.py\n" in listed and "/shardengine/kernels/native/source/sums.h\n" in listed
    assert ".so\n" not in listed
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("SHARDENGINE_NATIVE", "require")
    hook = the_hook(tmp_path)
    data: dict[str, Any] = {"force_include": {}}
    hook.initialize("editable", data)
    assert data == {"force_include": {}}
    with pytest.raises(OSError, match="no-such-compiler"):
        hook.initialize("standard", data)


@compiled
def test_a_wheel_made_from_an_sdist_holds_the_library(tmp_path: Path) -> None:
    archive, _ = built(tmp_path / "first", {}, "sdist")
    subprocess.run(["tar", "xzf", str(archive), "-C", str(tmp_path)], check=True)
    wheel, _ = built(tmp_path / "second", {}, root=tmp_path / archive.name.removesuffix(".tar.gz"))
    with zipfile.ZipFile(wheel) as opened:
        assert PREBUILT in opened.namelist()
