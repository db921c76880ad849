"""``benchmarks.ddp``: a tiny run of a sweep, the choice of best points, and the charts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import ddp

TINY = "--layers 1 --hidden 64 --vocabulary 40 --sequence 8 --rounds 2 --warmup 1 --ranks 2 --json --no-write".split()


@pytest.mark.usefixtures("forked_ranks")
def test_a_tiny_sweep(capsys: pytest.CaptureFixture[str]) -> None:
    assert ddp.main([*TINY, "--sweeps", (sweep := "sync")]) == 0
    run = json.loads(capsys.readouterr().out)["runs"][0]
    assert run["ranks"] == 2 and list(run["rows"]) == list(ddp.SWEEPS[sweep])
    assert all(len(row["seconds"]) == 2 for row in run["rows"].values())
    assert run["rows"][ddp.AUTO]["buckets"] == 1 and run["rows"][ddp.AUTO]["tuning"]


def test_every_sweep_holds_what_ratios_are_taken_to() -> None:
    assert all({ddp.AUTO, ddp.BASE} <= set(points) for points in ddp.SWEEPS.values())
    assert [point.every for point in ddp.SWEEPS["sync"].values()] == [1, 1, 2, 2, 4, 4, 8, 8]


def summary_of_sizes() -> dict[str, object]:
    """The fastest of ours takes 1 s, of torch's 2 s, "auto" 1.5 s."""
    seconds = {name: [4.0] * 3 for name in ddp.SWEEPS["size"]}
    seconds |= {"ours 4M": [1.0] * 3, "torch 10 MB": [2.0] * 3, ddp.AUTO: [1.5] * 3}
    found = {name: {"elements": 7, "tuning": []} if name.startswith("ours") else {} for name in seconds}
    return ddp.summarise("size", seconds, found)


def test_targets_are_compared_with_the_best_of_both() -> None:
    targets = summary_of_sizes()["targets"]
    assert isinstance(targets, dict)
    assert [(of["point"], of["ratio"]["median"]) for of in targets.values()] == [
        ("ours 4M", 1.5),
        ("torch 10 MB", 0.75),
    ]


def test_a_sweep_takes_the_place_of_its_earlier_result_alone(tmp_path: Path) -> None:
    path, result = tmp_path / "ddp.json", {"machine": {"name": "x"}, "rounds": 3, "setting": {"layers": 1}}
    before = [{"ranks": ranks, "sweep": sweep, "at": 1} for ranks in (2, 4) for sweep in ("size", "hooks")]
    path.write_text(json.dumps({**result, "runs": before}), encoding="utf-8")
    new = [{"ranks": 2, "sweep": "hooks", "at": 2}]
    assert [run["at"] for run in ddp.with_earlier(path, result, new)] == [1, 2, 1, 1]
    assert ddp.with_earlier(path, result | {"rounds": 20}, new) == new
    assert ddp.with_earlier(tmp_path / "none.json", result, new) == new


def test_charts_are_drawn(tmp_path: Path) -> None:
    runs = [{"ranks": ranks, **summary_of_sizes()} for ranks in (2, 4)]
    seconds = {name: [1.0] for name in ddp.SWEEPS["sync"]}
    runs.append({"ranks": 2, **ddp.summarise("sync", seconds, {name: {} for name in seconds})})
    seconds = {name: [1.0] for name in ddp.SWEEPS["hooks"]}
    runs.append({"ranks": 2, **ddp.summarise("hooks", seconds, {name: {} for name in seconds})})
    result = {"runs": runs, "rounds": 3, "setting": {"parameters": 1}, "machine": {"processor": "", "torch": ""}}
    ddp.draw(result, tmp_path / "chart.svg")
    text = (tmp_path / "chart.svg").read_text(encoding="utf-8")
    assert "size, 4 ranks" in text and "sync, 2 ranks" in text and ddp.tables(result).count("target 1.03") == 2
