"""benchmarks/states.py: a tiny run, what a row says, and that every row steps as its name says."""

from __future__ import annotations

import json
import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import adam, states
from shardengine import kernels


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """One thread, measured in this process, without other libraries; the names of what is written instead of files."""
    written: list[str] = []
    monkeypatch.setattr(states, "machine", lambda: {"name": "here"})
    monkeypatch.setattr(states, "in_fresh_process", lambda count, rounds, threads, how: how(count, rounds, threads))
    monkeypatch.setattr(states, "PEERS", {})
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)

    def write(name: str, _result: dict[str, Any]) -> str:
        written.append(name)
        return name

    monkeypatch.setattr(states, "write_result", write)
    return written


def test_a_tiny_run_has_every_row(here: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert states.main(["--parameters", "4096", "--rounds", "2", "--json"]) == 0
    captured = capsys.readouterr()
    rows = json.loads(captured.out)["threads"]["1"]
    kept = ["fp32", "bf16", "8bit"]
    for part, more in {
        states.FP32_WEIGHTS: ["copy", "triad"], states.BF16_WEIGHTS: ["copy", "triad"],
        states.IN_CACHE: ["8bit, to nearest"],
    }.items():  # fmt: skip
        assert [row["name"] for row in rows if row["part"] == part] == kept + more
    targets = {(row["part"], row["name"]): row["verdict"] for row in rows if "target" in row}
    assert targets == dict.fromkeys([(states.FP32_WEIGHTS, "8bit"), (states.BF16_WEIGHTS, "8bit")], "not decided")
    assert here == [] and "not written" in captured.err


def test_enough_rounds_are_written(here: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert states.main(["--parameters", "256", "--rounds", "20"]) == 0
    captured = capsys.readouterr()
    assert here == ["states"] and "at most" in captured.out


def test_bytes_are_what_a_step_must_move() -> None:
    eight = 2 * 2 * (1 + 4 / 256)
    wide = {name: states.bytes_of(states.FP32_WEIGHTS, name) for name in ("fp32", "bf16", "8bit")}
    assert wide == {"fp32": 28, "bf16": 20, "8bit": 12 + eight}
    assert states.bytes_of(states.BF16_WEIGHTS, "fp32") == 22 and states.bytes_of(states.BF16_WEIGHTS, "8bit") < 10.1
    assert states.bytes_of(states.IN_CACHE, "8bit, to nearest") == wide["8bit"]
    assert states.bytes_of(states.FP32_WEIGHTS, "torchao") == wide["8bit"]


def test_a_row_is_beside_fp32_states_of_its_part() -> None:
    samples = {
        states.FP32_WEIGHTS: {"fp32": [28.0] * 20, "8bit": [14.0] * 20, "copy": [4.0] * 20},
        states.IN_CACHE: {"fp32": [3.0] * 20, "8bit": [9.0] * 20, "calls": [1.0] * 20},
    }
    rows = {(row["part"], row["name"]): row for row in states.rows_of(samples, 1_000_000)}
    eight = rows[states.FP32_WEIGHTS, "8bit"]
    assert eight["speed"]["median"] == 2.0 and eight["verdict"] == "reached" and eight["ns"] == 14.0
    assert eight["at_most"] == pytest.approx(28 / 16.0625)
    fp32 = rows[states.FP32_WEIGHTS, "fp32"]
    assert fp32["gb_per_s"] == 1.0 and fp32["of_copy"] == 0.5  # 28 bytes in 28 ns, a copy of 8 in 4
    assert rows[states.IN_CACHE, "8bit"]["speed"]["median"] == 0.25
    assert rows[states.IN_CACHE, "8bit"]["ns"] == 8e6 / (16 * 16384) and (states.IN_CACHE, "calls") not in rows


def given(kept_in: str, weight: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What a step is given, and the same in fp32."""
    flats = adam.tensors(1024)
    flats["exp_avg_sq"].add_(1.0)
    gradient = "half" if weight == "low" else "gradient"
    found = {"weight": flats[weight].clone(), "gradient": flats[gradient]} | states.kept(flats, kept_in)
    return found, flats


@pytest.mark.parametrize("weight", ["weight", "low"])
@pytest.mark.parametrize("kept_in", list(kernels.KEPT_IN))
def test_every_row_steps_the_weights_as_fp32_states_do(kept_in: str, weight: str) -> None:
    found, flats = given(kept_in, weight)
    exact, before = given("fp32", weight)[0], found["weight"].clone()
    states.stepper(found)()
    states.stepper(exact)()
    assert not torch.equal(found["weight"], before)
    # a moment that is rounded by a sixteenth moves a step by as much of the learning rate, one of 2^-8 of a weight too
    atol = 0.3 * 1e-3 + (2**-7 * 4 if weight == "low" else 0)
    torch.testing.assert_close(found["weight"].float(), exact["weight"].float(), rtol=0, atol=atol)
    assert torch.equal(states.kept(flats, "fp32")["exp_avg"], flats["exp_avg"]), "states are copies"


def test_rows_round_at_random_but_for_the_one_that_says_so() -> None:
    drawn, _ = given("8bit", "weight")
    nearest, _ = given("8bit", "weight")
    states.stepper(drawn)()
    states.stepper(nearest, nearest=True)()
    assert torch.equal(drawn["weight"], nearest["weight"])
    assert not torch.equal(drawn["exp_avg_sq"], nearest["exp_avg_sq"])


def test_a_library_that_does_not_step_takes_no_part(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    modules: dict[str, Any] = {"good": SimpleNamespace(AdamW8bit=torch.optim.AdamW), "bad": SimpleNamespace()}
    monkeypatch.setattr(states, "PEERS", {"good": "good", "bad": "bad", "missing": "shardengine.no_such_module"})
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    flats = adam.tensors(256)
    before = flats["weight"].clone()
    assert list(states.peers(flats)) == ["good"]
    said = capsys.readouterr().err
    assert "bad takes no part: AttributeError" in said and "missing takes no part: ModuleNotFoundError" in said
    assert torch.equal(flats["weight"], before)
