"""`shardengine export` that does not end well: what is refused, what is said, and that nothing is left."""

from __future__ import annotations

import errno
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardengine.app.cli import main
from shardengine.checkpoint import new_directory, tensor_file
from shardengine.offload import direct_io
from tests.interchange.test_export import saved_run  # noqa: F401
from tests.support import cases


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["nowhere", "out"], "found nothing there"),
        (["run/run.json", "out"], "found a file"),
        (["run/start", "out"], "a directory with nothing of the kind"),
        (["run", "run"], "expected a new or empty directory, found a directory with something in it"),
        (["run", "run/run.json"], "expected a new or empty directory, found a file"),
        (["run", "out", "--max-shard-size", "5 elephants"], "expected a size such as 5GB"),
        (["run", "out", "--tokenizer", "run"], "expected a directory with a tokenizer's files"),
        (["run", "out", "--adapter", "mine"], "no such adapter"),
        (["run", "out", "--adapter", "mine", "--format", "dcp"], "--adapter goes with --format hf"),
        (["run", "out", "--max-shard-size", "9" * 309 + "GB"], "expected a size such as 5GB"),
        (["run", "out", "--max-shard-size", "1GB", "--format", "dcp"], "goes with --format hf or safetensors, got"),
        (["run", "out", "--tokenizer", "run/start", "--format", "dcp"], "--tokenizer goes with --format hf, got"),
        (["run", "out", "--config", "run", "--format", "safetensors"], "--config goes with --format hf, got"),
        (["run", "out", "--config", "run"], "--config run: expected a directory with config.json"),
        (["run", "run/run.json/out"], "run/run.json is a file"),
        (["run", "y" * 300], "File name too long"),
    ],
)
def test_wrong_arguments(
    saved: Path, tmp_path: Path, monkeypatch: Any, capsys: Any, arguments: list[str], text: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").symlink_to(saved)
    assert main(["export", *arguments]) == 2
    assert text in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("damage", ["flip", "delete", "truncate", "index"])
def test_a_damaged_checkpoint_leaves_nothing(saved: Path, tmp_path: Path, capsys: Any, damage: str) -> None:
    shutil.copytree(saved / "checkpoints", tmp_path / "saved")
    place = tmp_path / "saved" / "step-00000002"
    file = place / ("index.json" if damage == "index" else "rank-00000.safetensors")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    if damage == "delete":
        file.unlink()
    else:
        file.write_bytes(data[:-9] if damage == "truncate" else data)
    assert main(["export", str(tmp_path / "saved"), str(tmp_path / "out")]) == 1
    said = capsys.readouterr().err
    assert file.name in said and "there are also: step-00000001" in said
    assert damage == "index" or "it holds transformer." in said
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


@pytest.mark.parametrize("form", ["hf", "dcp"])
def test_a_full_disk_leaves_nothing(saved: Path, tmp_path: Path, monkeypatch: Any, capsys: Any, form: str) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    from torch.distributed.checkpoint import filesystem

    monkeypatch.setattr(direct_io, "write", full)
    monkeypatch.setattr(filesystem, "_write_item", full)
    assert main(["export", str(saved), str(tmp_path / "out"), "--format", form]) == 1
    said = capsys.readouterr().err
    assert said.endswith("No space left on device; nothing is left there\n")  # no other checkpoint would help
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("form", ["hf", "dcp"])
def test_sigterm_leaves_nothing(saved: Path, tmp_path: Path, monkeypatch: Any, form: str) -> None:
    from torch.distributed.checkpoint import filesystem

    before = signal.getsignal(signal.SIGTERM)
    write: Any = filesystem._write_item if form == "dcp" else tensor_file.Stream._flush

    def ended(*arguments: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return write(*arguments)

    monkeypatch.setattr(tensor_file.Stream, "_flush", ended)
    monkeypatch.setattr(filesystem, "_write_item", ended)
    with pytest.raises(SystemExit) as left:
        main(["export", str(saved), str(tmp_path / "out"), "--format", form])
    assert left.value.code == 143 and not list(tmp_path.iterdir())
    assert signal.getsignal(signal.SIGTERM) is before is signal.SIG_DFL


def test_what_a_killed_export_left_is_removed_by_the_next_one(saved: Path, tmp_path: Path, capsys: Any) -> None:
    left = tmp_path / ".out.partial" / "out"
    left.mkdir(parents=True)
    (left / "junk").write_text("half", encoding="utf-8")
    arguments = ["export", str(saved), str(tmp_path / "out")]
    with new_directory(tmp_path / "out"):
        assert main(arguments) == 2  # two at a time
        assert "another program is writing" in capsys.readouterr().err
        shutil.copytree(saved / "start", left, dirs_exist_ok=True)
        (tmp_path / "out").mkdir()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["tokenizer.json"]
    shutil.rmtree(tmp_path / "out")
    left.mkdir(parents=True)
    (left / "junk").write_text("half", encoding="utf-8")
    assert main(arguments) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"] and not (tmp_path / "out" / "junk").exists()


def test_a_mounted_file_system_is_refused_at_once(saved: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(os.path, "ismount", lambda place: place == tmp_path)
    assert main(["export", str(saved), str(tmp_path)]) == 2
    assert "name a new directory inside of it" in capsys.readouterr().err


def test_latest_that_names_nothing_is_said(saved: Path, tmp_path: Path, capsys: Any) -> None:
    shutil.copytree(saved / "checkpoints", tmp_path / "saved")
    (tmp_path / "saved" / "step-00000002" / "index.json").unlink()
    assert main(["export", str(tmp_path / "saved"), str(tmp_path / "out")]) == 0
    assert "note: 'latest' names step-00000002, which is not there or has no index.json; taken is step-00000001" in (
        capsys.readouterr().out
    )


def test_a_number_that_is_too_large_for_the_dtype_is_refused(tmp_path: Path, capsys: Any) -> None:
    model = nn.Linear(3, 3)
    with torch.no_grad():
        model.weight[1, 2] = 1e6
    engine = cases.make_engine(model, cases.config_of("0"), None)
    engine.save_checkpoint(tmp_path / "saved")
    engine.close()
    arguments = ["export", str(tmp_path / "saved"), str(tmp_path / "out"), "--format", "safetensors", "--dtype"]
    assert main([*arguments, "fp16"]) == 2
    assert "weight: its largest value is 1e+06" in capsys.readouterr().err and not (tmp_path / "out").exists()
    assert main([*arguments, "bf16"]) == 0
