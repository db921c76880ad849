"""The Triton kernels on the CPU: Triton's interpreter runs them, and what they give is the reference's, bit for bit.

The interpreter replaces parts of Triton for a whole process, and must be asked for before Triton is imported. So the
tests themselves are in ``tests/kernels/interpreted``, in two processes; and this process must not have noticed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from shardengine import kernels
from tests.support import HANG_S

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(
    path.name for path in (ROOT / "tests" / "kernels" / "interpreted").glob("*.py") if path.name != "__init__.py"
)
PROCESSES = (["first_launches.py", "sums.py", "copies.py"], ["updates.py", "compressions.py", "training.py"])
"""That take about as long. What is launched for the first time comes first."""


def environment(**change: str) -> dict[str, str]:
    """That of a process whose kernels Triton's interpreter runs, unless ``change`` says otherwise."""
    here = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}  # what is printed is read
    return {**here, "SHARDENGINE_KERNELS": "triton", "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", **change}


def run(code: str, **change: str) -> subprocess.CompletedProcess[str]:
    """``code`` in such a process, in the repository."""
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=ROOT, env=environment(**change), capture_output=True, text=True, check=False)


def test_there_are_interpreted_tests() -> None:
    assert sorted(file for files in PROCESSES for file in files) == FILES


@pytest.fixture(scope="module")
def running(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, tuple[subprocess.Popen[bytes], Path]]]:
    """By file: the process that runs it, and the file with its output. Those that are asked for, all at once."""
    names = {item.name for item in request.session.items}
    asked = {file for file in FILES if names & {f"test_interpreted[{file}]", f"test_interpreted_{file[:-3]}"}}
    started: dict[str, tuple[subprocess.Popen[bytes], Path]] = {}
    # numpy, which the interpreter computes with, warns of infinities that are declared results
    options = ["-x", "-p", "no:cacheprovider", "-W", "ignore::RuntimeWarning"]
    for files in PROCESSES:
        paths = [f"tests/kernels/interpreted/{file}" for file in files if file in asked]
        if not paths:
            continue
        output = tmp_path_factory.mktemp("interpreted") / "output"
        with output.open("wb") as stream:
            command = [sys.executable, "-m", "pytest", *options, *paths]
            process = subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=stream, stderr=subprocess.STDOUT)
        started |= dict.fromkeys(files, (process, output))
    yield started
    for process, _ in started.values():
        process.kill()
        process.wait()


def test_interpreted_sums(running: dict[str, tuple[subprocess.Popen[bytes], Path]]) -> None:
    passes("sums.py", running)


@pytest.mark.full  # whoever waits first pays for all files of a process
def test_interpreted_updates(running: dict[str, tuple[subprocess.Popen[bytes], Path]]) -> None:
    passes("updates.py", running)


@pytest.mark.full
@pytest.mark.parametrize("file", [file for file in FILES if file not in ("sums.py", "updates.py")])
def test_interpreted(file: str, running: dict[str, tuple[subprocess.Popen[bytes], Path]]) -> None:
    passes(file, running)


def passes(file: str, running: dict[str, tuple[subprocess.Popen[bytes], Path]]) -> None:
    process, output = running[file]
    code = process.wait(timeout=HANG_S)
    text = output.read_text(encoding="utf-8")
    assert code == 0 and " passed" in text and f"interpreted/{file} " in text, text


def test_the_interpreter_is_in_processes_of_its_own() -> None:
    assert "TRITON_INTERPRET" not in os.environ
    code = "from shardengine.kernels.triton import launching; print(launching.INTERPRETED)"
    assert run(code).stdout == "True\n"
    assert run(code, TRITON_INTERPRET="0").stdout == "False\n"


def test_without_the_interpreter_kernels_on_a_cpu_are_refused() -> None:
    code = "import torch, shardengine.kernels as k; k.sum_of_squares(torch.ones(3))"
    done = run(code, TRITON_INTERPRET="0")
    assert done.returncode == 1 and "UsageError: Triton kernels were asked for on a CPU" in done.stderr


def test_an_engine_on_a_cpu_says_what_kernels_of_triton_need_there() -> None:
    code = (
        "import torch, shardengine\n"
        "config = {'train_micro_batch_size_per_gpu': 1, 'optimizer': {'type': 'AdamW', 'params': {'lr': 0.1}}}\n"
        "shardengine.initialize(torch.nn.Linear(4, 4), config)"
    )
    done = run(code, TRITON_INTERPRET="0")
    assert done.returncode == 1 and "UsageError: Triton kernels were asked for on a CPU" in done.stderr
    assert "C compiler" not in done.stderr


def test_ordinary_use_on_a_cpu_imports_no_triton() -> None:
    code = (
        "import sys, torch, shardengine.kernels as k\n"
        "out = torch.zeros(4); k.flatten([torch.ones(3)], [1], out)\n"
        "print(out.tolist(), 'shardengine.kernels.triton' in sys.modules)"
    )
    assert run(code, SHARDENGINE_KERNELS="auto").stdout == "[0.0, 1.0, 1.0, 1.0] False\n"
    chosen = kernels.operations.implementation(torch.device("cpu"))
    assert chosen is None or chosen.__name__ == "shardengine.kernels.native"
