"""benchmarks/versions.py: two versions of the package in the same processes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from benchmarks import versions

ROOT = Path(__file__).resolve().parents[2]
TINY = ["--layers", "1", "--hidden", "64", "--rounds", "2", "--no-write", "--variants", "ours-2", "ours-3"]


@pytest.mark.usefixtures("forked_ranks")
def test_a_version_that_trains_otherwise_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(ROOT / "shardengine", tmp_path / "shardengine")
    with (tmp_path / "shardengine" / "start.py").open("a", encoding="utf-8") as file:
        file.write("_begin = initialize\ndef initialize(model, config, mesh=None):\n")
        file.write("    config['optimizer']['params']['lr'] *= 1 + (config['zero_optimization']['stage'] == 3)\n")
        file.write("    return _begin(model, config, mesh=mesh)\n")
    versions.main([str(tmp_path), *TINY])
    rows = [row.split() for row in capsys.readouterr().out.splitlines()[-2:]]
    assert [(row[0], row[-1]) for row in rows] == [("ours-2", "yes"), ("ours-3", "no")]
    assert all("not decided" in " ".join(row) for row in rows)


def test_a_folder_without_the_package_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"holds no shardengine/__init__\.py: expected another checkout"):
        versions.main([str(tmp_path), *TINY])


def test_variants_measured_apart_are_in_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "result_path", lambda *_: tmp_path / "file.json")
    result = {"machine": {"name": "m"}, "before": "a", "now": "b", "setting": {"ranks": 2}, "variants": {"ours-2": 1}}
    assert versions.earlier_variants(result) == {}
    (tmp_path / "file.json").write_text(json.dumps(result), encoding="utf-8")
    assert versions.earlier_variants(result) == {"ours-2": 1}
    assert versions.earlier_variants({**result, "now": "c"}) == {}
    changed = {**result, "now": "b-dirty"}
    (tmp_path / "file.json").write_text(json.dumps(changed), encoding="utf-8")
    assert versions.earlier_variants(changed) == {}
