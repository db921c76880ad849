"""benchmarks/adam.py: a tiny run, what a row says, and what is written."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
import torch

from benchmarks import adam
from shardengine.kernels.native import build


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """One thread, measured in this process; the names of what is written instead of files."""
    written: list[str] = []
    monkeypatch.setattr(adam, "machine", lambda: {"name": "here"})
    monkeypatch.setattr(adam, "in_fresh_process", adam.measure)
    monkeypatch.setattr(adam, "first_use", dict)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    monkeypatch.setattr(adam, "deepspeed_adam", lambda *_: None)

    def write(name: str, result: dict[str, Any]) -> Any:
        written.append(name)
        return build.PREBUILT / f"{name}-{result['machine']['name']}.json"

    monkeypatch.setattr(adam, "write_result", write)
    return written


def test_a_tiny_run_measures_every_competitor(here: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert adam.main(["--parameters", "5000", "--rounds", "2", "--json"]) == 0
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    rows = {(row["part"], row["name"]): row for row in result["threads"]["1"]}
    assert [name for part, name in rows if part == "step"] == [
        "torch fused", "shardengine", "CPUAdam", "torch.optim.Adam", "copy", "triad",
    ]  # fmt: skip
    assert [name for part, name in rows if part == "update"] == ["shardengine", "torch", "copy", "triad"]
    for row in rows.values():
        assert row["min_ms"] > 0 and ("of_copy" in row) == (row["part"] in adam.BYTES)
    for part in adam.BYTES:
        assert rows[part, "copy"]["of_copy"] == rows[part, "triad"]["of_triad"] == 1.0
    assert here == [] and "not written" in captured.err


def test_enough_rounds_are_written(here: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert adam.main(["--parameters", "64", "--rounds", "20"]) == 0
    captured = capsys.readouterr()
    assert here == ["adam"] and "adam-here.json" in captured.err and "of triad" in captured.out


def test_bandwidth_is_what_must_be_moved_over_what_memory_can_do() -> None:
    samples = {"step": {"ours": [7.0, 14.0], "copy": [4.0, 8.0], "triad": [6.0, 12.0]}}
    rows = {row["name"]: row for row in adam.rows_of(samples, 1_000_000)}
    # 28 bytes in 7 ms, a copy of 8 in 4 ms, a triad of 12 in 6: 4, 2 and 2 GB/s
    assert [rows[name]["gb_per_s"] for name in ("ours", "copy", "triad")] == [4.0, 2.0, 2.0]
    assert (rows["ours"]["of_copy"], rows["ours"]["of_triad"]) == (2.0, 2.0)


def test_every_way_of_an_update_ends_at_the_same_weights() -> None:
    results = {}
    for name in ("shardengine", "torch"):
        flats = adam.tensors(4000)
        with torch.no_grad():
            adam.updates(flats)[name]()
        results[name] = (flats["weight"], flats["low"])
    for ours, theirs in zip(*results.values(), strict=True):
        # the same formula in another order of operations; bf16 may round to the neighbour
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=2e-6 if ours.dtype is torch.float32 else 2**-7,
                                   atol=1e-6)  # fmt: skip


def test_a_fresh_process_has_its_threads_from_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    samples = adam.in_fresh_process(64, 1, 1)
    assert set(samples) == set(adam.PARTS) and os.environ["OMP_NUM_THREADS"] == "7"


@pytest.mark.skipif(isinstance(build.find_compiler(), str), reason="no C++ compiler (g++ or clang++)")
def test_first_use_is_timed_with_an_empty_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adam, "FIRST_USE", {"shardengine": adam.FIRST_USE["shardengine"]})
    (found,) = adam.first_use().values()
    assert set(found) == {"built", "cached"} and min(found.values()) > 0
