"""A config error that a script does not catch: its sentences, the script's line, no frames of ours, once a machine."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
from torch import nn

import shardengine
from shardengine import uncaught
from shardengine.errors import ConfigError
from tests.support import HANG_S

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
from torch import nn
import shardengine
try:
    shardengine.initialize(nn.Linear(1, 1), {"train_micro_batch_size": 1})
except shardengine.errors.ConfigError:
    pass
if CAUGHT:
    raise ValueError("of my own")
engine = shardengine.initialize(nn.Linear(1, 1), {"train_micro_batch_size_per_gpu": 1, "zero_optimisation": {}})
"""


def errors_of(folder: Path, caught: bool, **environment: str) -> str:
    (folder / "script.py").write_text(SCRIPT.replace("CAUGHT", str(caught)), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=folder, capture_output=True, text=True, timeout=HANG_S, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment},
    )  # fmt: skip
    assert done.returncode == 1
    return done.stderr


def test_the_first_process_of_a_machine_tells_it_in_short(tmp_path: Path) -> None:
    lines = errors_of(tmp_path, caught=False).splitlines()
    assert lines[0].endswith('script.py", line 10, in <module>')
    assert "engine = shardengine.initialize(" in lines[1] and set(lines[2].strip()) <= set("^~")
    assert lines[3:] == [
        "shardengine.errors.ConfigError: config: 1 problem",
        '  - zero_optimisation: unknown key; the nearest valid key is "zero_optimization"',
    ]


def test_the_others_say_nothing_and_end_later(tmp_path: Path) -> None:
    assert errors_of(tmp_path, caught=False, LOCAL_RANK="1") == ""


def test_any_other_error_is_told_as_always(tmp_path: Path) -> None:
    text = errors_of(tmp_path, caught=True)
    assert text.startswith("Traceback (most recent call last):") and text.endswith("ValueError: of my own\n")


def test_who_had_the_hook_before_hears_of_other_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, value, trace: heard.append(value))
    for _ in range(2):
        with pytest.raises(ConfigError), uncaught.told_in_short():
            raise ConfigError("wrong")
    other = ConfigError("another")
    sys.excepthook(ConfigError, other, None)
    assert heard == [other]


def test_an_error_that_was_caught_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    model = nn.Linear(1, 1)
    with contextlib.suppress(ConfigError):
        shardengine.initialize(model, {"nope": 1})
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
