"""kernels/native/source/threads.h: how the work of one call is shared by threads."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from shardengine.kernels.native import build
from tests.support import HANG_S

COMPILER = build.find_compiler()


@pytest.mark.skipif(isinstance(COMPILER, str), reason="no C++ compiler (g++ or clang++)")
def test_threads_cover_everything_once_and_take_over_what_another_one_does_not_get_to(tmp_path: Path) -> None:
    assert isinstance(COMPILER, build.Compiler)
    program, source = tmp_path / "sharing", Path(__file__).with_name("sharing.cpp")
    flags = ("-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread", f"-I{build.SOURCE}")
    subprocess.run([*COMPILER.command, *flags, str(source), "-o", str(program)], check=True)
    done = subprocess.run([str(program)], capture_output=True, text=True, check=True, timeout=HANG_S)
    assert not done.stdout
