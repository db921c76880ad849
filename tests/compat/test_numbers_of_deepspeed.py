"""Under the name deepspeed programs compute what DeepSpeed computes: its numbers are test data, or it is asked."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import shardengine.compat.deepspeed as deepspeed
from tests.compat import deepspeed_programs as programs
from tests.data import make_deepspeed_numbers as made
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]
RECORDED: dict[str, Any] = json.loads(made.FILE.read_text(encoding="utf-8"))
STALE = "unused 3"
"""DeepSpeed steps a parameter without a gradient with its last one there (docs/migrating.md)."""


def ours(name: str, stage: int, folder: str) -> Any:
    logging.getLogger("shardengine").setLevel(logging.ERROR)
    return json.loads(json.dumps(programs.PROGRAMS[name](deepspeed, stage, Path(folder))))


def differences(found: Any, expected: Any, place: str = "") -> list[str]:
    """Where the two differ, by more than the roundings of other orders of operations."""
    if isinstance(expected, dict) and isinstance(found, dict) and found.keys() == expected.keys():
        return [text for key in expected for text in differences(found[key], expected[key], f"{place} {key}")]
    if isinstance(expected, list) and isinstance(found, list) and len(found) == len(expected):
        pairs = enumerate(zip(found, expected, strict=True))
        return [text for number, pair in pairs for text in differences(*pair, f"{place}[{number}]")]
    if isinstance(expected, float) and isinstance(found, (int, float)):
        return [] if found == pytest.approx(expected, rel=1e-5, abs=2e-6) else [f"{place}: {found}, not {expected}"]
    return [] if found == expected else [f"{place}: {found}, not {expected}"]


@pytest.mark.parametrize("ranks", made.RANKS)
@pytest.mark.parametrize(("name", "stage"), [row for row in programs.ALL if f"{row[0]} {row[1]}" != STALE])
def test_numbers_are_those_of_deepspeed(name: str, stage: int, ranks: int, pools: Pools, tmp_path: Path) -> None:
    found = pools(ranks).run(ours, name, stage, str(tmp_path))[0]
    assert differences(found, RECORDED[f"{name} {stage} {ranks}"]) == []


@pytest.mark.parametrize("ranks", made.RANKS)
def test_a_parameter_without_a_gradient_has_one_of_zeros_at_stage_3_too(
    ranks: int, pools: Pools, tmp_path: Path
) -> None:
    found = pools(ranks).run(ours, "unused", 3, str(tmp_path))[0]
    assert differences(found, RECORDED[f"unused 2 {ranks}"]) == []


@pytest.mark.parametrize(
    ("kind", "given", "expected"),
    [
        ("AdamW", {}, {"weight_decay": 0.0}),
        ("AdamW", {"weight_decay": 0.1}, {"weight_decay": 0.1}),
        ("Adam", {}, {"weight_decay": 0.0}),
        ("Adam", {"adam_w_mode": False, "torch_adam": True}, {"weight_decay": 0.0}),
        ("Lion", {}, {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.0}),
    ],
)
def test_what_is_not_said_of_its_own_classes_is_as_they_have_it(
    kind: str, given: dict[str, Any], expected: dict[str, Any]
) -> None:
    """Which need a compiler, or a GPU: their signatures are the truth."""
    optimizer = programs.make(deepspeed, 1, optimizer={"type": kind, "params": given})[1]
    assert {name: optimizer.param_groups[0][name] for name in expected} == expected


def test_what_counts_where_nothing_is_said_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    told = "gradients are clipped to a norm of 1.0, DeepSpeed's default"
    programs.make(deepspeed, 1)
    assert caplog.text.count(told) == 1
    caplog.clear()
    programs.make(deepspeed, 1, gradient_clipping=0.0)
    programs.make(deepspeed, 1, gradient_clipping_value=0.5)
    assert told not in caplog.text


@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs DeepSpeed")
def test_the_recorded_numbers_are_those_of_the_installed_deepspeed(tmp_path: Path) -> None:
    file = tmp_path / "numbers.json"
    command = [sys.executable, "-m", "tests.data.make_deepspeed_numbers", str(file)]
    subprocess.run(command, check=True, env={**os.environ, "DS_ACCELERATOR": "cpu"})
    assert differences(json.loads(file.read_text(encoding="utf-8")), RECORDED) == []
