"""``benchmarks.host_time``: a tiny run in a process of its own, and its arithmetic."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from benchmarks import host_layouts, host_time
from benchmarks.reporting import MIN_ROUNDS

ROOT = Path(__file__).resolve().parents[2]


def test_a_tiny_run() -> None:
    asked = ["--rounds", "1", "--layers", "2", "--layouts", "GPT-2 1.5B", "--json", "--no-write"]
    command = [sys.executable, "-m", "benchmarks.host_time", *asked]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert [row["variant"] for row in result["thin"]] == [
        *(f"stage {stage}" for stage in host_layouts.STAGES), "DDP", "FSDP2",
    ]  # fmt: skip
    assert [(row["stage"], row["bucket_elements"]) for row in result["layouts"]] == [
        (stage, bucket) for bucket in host_time.BUCKETS for stage in host_layouts.STAGES
    ]
    elements = 1.55e9
    for row in result["layouts"]:
        assert row["buckets"] >= elements / row["bucket_elements"]
        assert row["ms_per_step"]["backward"]["median"] > 0
    assert "stage 3" in host_time.tables(result)


def test_the_shapes_have_the_parameters_of_their_models() -> None:
    counts = {}
    for name, shape in host_layouts.LAYOUTS.items():
        model = host_layouts.Model(shape)
        counts[name] = round(sum(parameter.numel() for parameter in model.parameters()) / 1e9, 2)
    assert counts == {"GPT-2 1.5B": 1.56, "Llama 8B": 8.03, "Llama 70B": 70.55}


def test_only_a_whole_interval_decides() -> None:
    assert host_time.verdict({"low": 1.0, "high": 2.0}, 2.0, MIN_ROUNDS) == "reached"
    assert host_time.verdict({"low": 1.0, "high": 2.1}, 2.0, MIN_ROUNDS) == "not decided"
    assert host_time.verdict({"low": 2.1, "high": 2.2}, 2.0, MIN_ROUNDS) == "missed"
    assert host_time.verdict({"low": 1.0, "high": 2.0}, 2.0, MIN_ROUNDS - 1) == "not decided"


def test_a_sum_is_of_the_phases_of_one_round() -> None:
    found = host_time.summarise({"forward": [1.0, 2.0, 3.0], "backward": [3.0, 2.0, 1.0]})
    assert found["sum"] == {"median": 4e3, "low": 4e3, "high": 4e3}
    assert found["forward"]["median"] == 2e3
