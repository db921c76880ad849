"""The table of names: all of it answers, what is refused says why, and it has every name that frameworks use."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

import shardengine
import shardengine.compat.deepspeed as deepspeed
from shardengine.compat.deepspeed import hosts, stand_in, table
from shardengine.errors import UsageError
from tests.compat.scan import names_in, names_used

FRAMEWORKS = ("transformers", "accelerate", "peft", "trl", "lightning")


def find(dotted: str) -> object:
    """What a script gets for ``deepspeed.<dotted>``: an import of its module, then the name."""
    module, _, name = f"{deepspeed.__name__}.{dotted}".rpartition(".")
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("name", sorted(set(table.PROVIDED) - set(table.REFUSED)))
def test_a_name_is_there(name: str) -> None:
    assert find(name) is table.PROVIDED[name]


@pytest.mark.parametrize("name", sorted(table.REFUSED))
def test_a_refused_name_says_why_when_it_is_called(name: str) -> None:
    with pytest.raises(UsageError) as raised:
        find(name)(1, two=3)  # type: ignore[operator]
    assert f"deepspeed.{name} is not available" in str(raised.value) and table.REFUSED[name] in str(raised.value)


def test_a_name_that_is_not_in_the_table_is_named() -> None:
    with pytest.raises(AttributeError, match=r"deepspeed\.zero\.Final is not provided by shardengine"):
        deepspeed.zero.Final  # noqa: B018
    with pytest.raises(AttributeError, match=r"deepspeed\.fly is not provided"):
        deepspeed.fly  # noqa: B018
    assert not hasattr(deepspeed, "nothing")


def test_what_python_asks_every_module_for_is_not_searched_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """``inspect.getmodule`` asks for ``__file__``: a search each time took two seconds of every class of pydantic."""
    monkeypatch.setattr(table, "nearest", lambda *_: pytest.fail("searched"))
    assert not any(hasattr(module, "__file__") for module in map(find, sorted(table.MODULES)))
    assert not hasattr(deepspeed, "__wrapped__")


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_table_has_every_name_that_a_framework_uses(framework: str) -> None:
    spec = importlib.util.find_spec(framework)
    if spec is None or spec.origin is None:
        pytest.skip(f"{framework} is not installed")
    used = list(names_used(Path(spec.origin).parent))
    assert used
    known = {"", "__version__", *table.MODULES, *table.PROVIDED}
    of_these = tuple(f"{name}." for name in table.PROVIDED)  # utils.logger.setLevel: an attribute of what is provided
    unknown = [f"{name}: {place}" for name, place in used if name not in known and not name.startswith(of_these)]
    assert not unknown, "\n".join(["neither provided nor refused:", *unknown])


def test_the_scan_follows_names() -> None:
    source = """
from .deepspeed import ours
def f():
    import deepspeed
    deepspeed.zero.Init()
    from deepspeed import comm as dist
    dist.get_rank()
import deepspeed.ops as o
o.adam
"""
    found = {name for name, _ in names_in(source)}
    assert found == {"", "zero.Init", "comm", "comm.get_rank", "ops", "ops.adam"}
    ast.parse(source)


def run(*lines: str, arguments: tuple[str, ...] = ()) -> str:
    command = [sys.executable, *arguments] if arguments else [sys.executable, "-c", "\n".join(lines)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_importing_shardengine_does_not_load_the_door_which_loads_no_framework() -> None:
    said = run(
        "import sys, shardengine; shardengine.initialize",
        "print([name for name in sys.modules if 'compat.deepspeed' in name])",
        "import shardengine.compat.deepspeed",
        f"print([name for name in {(*FRAMEWORKS, 'deepspeed')!r} if name in sys.modules])",
    )
    assert said.split() == ["[]", "[]"]


SCRIPT = """
import importlib.metadata, importlib.util, sys
import deepspeed
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed import comm as dist
import deepspeed.runtime.zero.partition_parameters as parameters
assert importlib.util.find_spec("deepspeed.zero") is not None
try:
    import deepspeed.moe.sharded
except ModuleNotFoundError as error:
    print(error)
print(sys.argv, __name__, importlib.metadata.version("deepspeed") == deepspeed.__version__, deepspeed.__version__)
"""


@pytest.mark.parametrize("command", ["shardengine", "shardengine.run"])
def test_a_script_finds_deepspeed_in_its_process_alone(command: str, tmp_path: Path) -> None:
    script = tmp_path / "train_it.py"
    script.write_text(SCRIPT, encoding="utf-8")
    start = ("-m", command, *(("run",) if command == "shardengine" else ()), "--as-deepspeed")
    said = run(arguments=(*start, str(script), "--config", "x", "-m"))
    assert "deepspeed.moe.sharded is not provided" in said and "provided by shardengine in this process" in said
    assert f"{[str(script), '--config', 'x', '-m']} __main__ True 0.19.8+shardengine.{shardengine.__version__}" in said
    assert importlib.util.find_spec("deepspeed") is None or "shardengine" not in str(sys.modules.get("deepspeed"))


def test_a_module_is_run_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_training.py").write_text(SCRIPT, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(Path(shardengine.__file__).parents[1]))
    monkeypatch.chdir(tmp_path)
    said = run(arguments=("-m", "shardengine.run", "--as-deepspeed", "-m", "my_training", "--steps", "3"))
    assert "'--steps', '3'] __main__ True" in said


PARENT = """
import os, subprocess, sys
child = "import deepspeed, importlib.metadata as m; print(deepspeed.__version__, m.version('deepspeed'))"
subprocess.run([sys.executable, "-c", "import sys; print('torch' in sys.modules)"], check=True)
print(subprocess.run([sys.executable, "-c", child], capture_output=True, text=True))
"""


def test_processes_that_a_script_starts_find_it_if_they_shall(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "parent.py").write_text(PARENT, encoding="utf-8")
    (tmp_path / "sitecustomize.py").write_text("print('the other sitecustomize')", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(Path(shardengine.__file__).parents[1])]))
    command = ("-m", "shardengine", "run", "--as-deepspeed")
    said = run(arguments=(*command, "--children", str(tmp_path / "parent.py")))
    assert f"{table.VERSION} {table.VERSION}" in said and "the other sitecustomize" in said
    assert "False" in said  # nothing is imported for those who do not ask
    if importlib.util.find_spec("deepspeed") is None:
        assert "ModuleNotFoundError" in run(arguments=(*command, str(tmp_path / "parent.py")))


def test_a_command_on_the_path_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "launcher").write_text("#!/usr/bin/env python3\nimport deepspeed, sys; print(sys.argv[1:])")
    (tmp_path / "launcher").chmod(0o755)
    (tmp_path / "other").write_text("#!/bin/sh\n")
    (tmp_path / "other").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "['--ranks', '2']" in run(arguments=("-m", "shardengine.run", "--as-deepspeed", "launcher", "--ranks", "2"))
    said = run(
        "from shardengine.app.cli import main",
        "print([main(['run', '--as-deepspeed', name]) for name in ('other', 'nothing.py')])",
    )
    assert "[2, 2]" in said and "Traceback" not in said
    assert "expected a Python script" in said and "expected a Python file, or a command" in said


def test_it_does_not_stand_in_for_one_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    real = types.ModuleType("deepspeed")
    real.__version__ = "0.16.0"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "deepspeed", real)
    with pytest.raises(RuntimeError, match=r"deepspeed 0\.16\.0 was imported before"):
        stand_in.install()
    assert sys.modules["deepspeed"] is real


def test_child_processes_change_the_modules_that_have_to_be() -> None:
    """Their file imports nothing of shardengine, so it says the names once more."""
    path = Path(shardengine.__file__).parent / "compat/for_children/sitecustomize.py"
    nodes = ast.parse(path.read_text(encoding="utf-8")).body
    (said,) = (
        node.value for node in nodes if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_CHANGED"
    )
    assert set(ast.literal_eval(said)) == set(hosts.CHANGES)
