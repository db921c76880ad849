"""Lint and types are part of the tests, so that one command checks everything (``make lint`` runs the two alone)."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run_tool(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run ``python -m TOOL …`` in the repository; skips where the tool is not installed (extra ``test``)."""
    if importlib.util.find_spec(arguments[0]) is None:
        pytest.skip(f"{arguments[0]} is not installed; it comes with the extra 'test'")
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_ruff() -> None:
    done = run_tool("ruff", "check", ".")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.full  # a minute where there is no cache
def test_mypy() -> None:
    done = run_tool("mypy")
    assert done.returncode == 0, done.stdout + done.stderr


def test_ruff_can_fail(tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text("import os\n", encoding="utf-8")
    done = run_tool("ruff", "check", "--config", str(ROOT / "pyproject.toml"), "--no-cache", str(bad))
    assert done.returncode == 1 and "F401" in done.stdout


def test_mypy_can_fail(tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text("def f(x):\n    return x\n", encoding="utf-8")
    config = str(ROOT / "pyproject.toml")
    done = run_tool("mypy", "--config-file", config, "--cache-dir", str(tmp_path / "cache"), str(bad))
    assert done.returncode == 1 and "no-untyped-def" in done.stdout
