"""``benchmarks.load``: its arithmetic, what is left out, and a tiny run that proves every load."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.load import DISK, HEADER, LOADERS, OURS, cells, chosen, main, summarise

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")


def test_a_load_lasts_as_long_as_its_slowest_rank_and_the_disk_is_its_better_way() -> None:
    ranks = [
        {"seconds": {DISK[0]: [2.0, 2.0], DISK[1]: [1.0, 1.0], OURS: [1.0, 2.0]}, "peaks": {}, "warm": 0.0},
        {"seconds": {DISK[0]: [1.0, 1.0], DISK[1]: [1.0, 1.0], OURS: [2.0, 1.0]}, "peaks": {}, "warm": 0.5},
    ]
    for rank in ranks:
        rank["peaks"] = {name: [1 << 20, 3 << 20] for name in (*DISK, OURS)}
    found = summarise(ranks, size=4 << 20)
    assert found["disk"] == DISK[1] and found["cached_before_loads"] == 0.5
    ours = found["rows"][OURS]
    assert ours["median_s"] == 2.0 and ours["ratio"]["median"] == 0.5 and ours["verdict"] == "not decided"
    assert ours["of_a_half"] == 1.5
    assert all(len(row) == len(HEADER) for row in cells(found))


def test_what_is_not_installed_is_left_out_by_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("benchmarks.load.find_spec", lambda name: None)
    assert chosen(None) == tuple(name for name in LOADERS if name != "DeepSpeed")
    assert "left out: DeepSpeed" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="needs deepspeed"):
        chosen(["DeepSpeed"])


@pytest.mark.usefixtures("forked_ranks")
def test_a_tiny_run_proves_every_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = [name for name in LOADERS if name != "DeepSpeed"]
    options = ["--rounds", "1", "--hidden", "64", "--layers", "2", "--json", "--loaders", *names]
    assert main([*options, "--directory", str(tmp_path)]) == 0
    said = capsys.readouterr()
    assert list(json.loads(said.out)["rows"]) == [*DISK, *names] and "not written" in said.err
    assert not list(tmp_path.iterdir())
