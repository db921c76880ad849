"""`shardengine inspect`: what is in a checkpoint, every damage with file and parameter; nothing is changed."""

from __future__ import annotations

import json
import shutil
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardengine.app import inspect_checkpoint
from shardengine.app.cli import main
from shardengine.checkpoint import index
from shardengine.interchange import stored, summary
from tests.support import cases
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]
FILES = ("rank-00000.safetensors", "rank-00001.safetensors")


def saves(folder: str) -> None:
    """Two steps and a checkpoint, three times, on every rank."""
    torch.manual_seed(2)
    model = nn.Sequential(cases.make_mlp(), nn.BatchNorm1d(3))
    model[1].weight.requires_grad_(False)
    model.register_buffer("\x1b[31m", torch.ones(3))  # a name that would colour a terminal
    engine = cases.make_engine(
        model, cases.config_of("3"), lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 5)
    )
    for _ in range(3):
        engine.backward(engine(torch.randn(5, 7)).square().mean())
        engine.step()
        engine.save_checkpoint(folder, client_state={"epoch": engine.global_steps})
    engine.close()


@pytest.fixture(scope="module")
def folder(pools: Pools, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("saved")
    pools(2).run(saves, str(place))
    return place


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def said(capsys: Any, *arguments: object) -> tuple[int, str]:
    code = main(["inspect", *map(str, arguments)])
    return code, capsys.readouterr().out


def test_a_whole_checkpoint_is_described(folder: Path, capsys: Any) -> None:
    code, text = said(capsys, folder / "step-00000003")
    assert code == 0 and "\x1b" not in text
    rows = {line.strip().split("  ")[0].rstrip(":"): line for line in text.splitlines()}
    assert "whole" in rows["state"] and rows["step"].split()[1] == "3"
    assert "2 rank(s), stage 3 (SSSS), batch 2 = 1 x 1 x 2" in rows["made by"]
    assert "AdamW, step 3" in rows["optimizer"] and "lr 0.01" in rows["group 0"] and "StepLR" in rows["scheduler"]
    assert '"epoch": 3' in rows["client state"] and torch.__version__ in rows["versions"]
    assert rows["0.blocks.*.0.weight"].split() == ["0.blocks.*.0.weight", "x", "3", "[29,", "13]", "float32", "0"]
    assert rows["1.weight"].split()[-1] == "frozen" and rows["0.scale"].split()[-3] == "[]"
    assert {*FILES, "index.json", "1.running_mean"} <= set(rows)


def test_json_says_everything(folder: Path, capsys: Any) -> None:
    code, text = said(capsys, folder / "step-00000003", "--json")
    facts, saved = json.loads(text), index.read(folder / "step-00000003")
    assert code == 0 and facts["whole"] is True and facts["damaged"] == [] and facts["unknown_files"] == []
    for key in ("parameters", "buffers", "client_state", "lr_scheduler", "versions", "stage", "batch"):
        assert facts[key] == saved[key], key
    assert facts["files"] == {path.name: path.stat().st_size for path in (folder / "step-00000003").iterdir()}
    assert facts["dtypes"]["exp_avg"] == ["float32"] and facts["optimizer"]["steps"] == [3]


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def test_a_flipped_bit_is_found_anywhere(copy: Path, capsys: Any, monkeypatch: Any) -> None:
    """In the head, in a weight, in a state, in a random state, in the last byte; each is the only thing reported."""
    place = copy / "step-00000003"
    saved = index.read(place)
    file, _, _, at = saved["tensors"]["0.inp.weight"]["exp_avg"]["pieces"][-1]
    random = saved["random"]["torch"][1]
    spots = {
        (FILES[0], 11): "",
        (file, at): "0.inp.weight (exp_avg)",
        (random[0], random[1] + 9): "random state 'torch'",
        (FILES[1], saved["files"][FILES[1]]["bytes"] - 1): "",
    }
    for (name, spot), inside in spots.items():
        flip(place / name, spot)
        code, text = said(capsys, place, "--json")
        (damage,) = json.loads(text)["damaged"]
        assert code == 1 and damage["file"] == name and "a checksum differs" in damage["what"]
        assert not inside or inside in damage["holds"]
        assert f"DAMAGED: {place / name} is damaged" in said(capsys, place)[1]
        flip(place / name, spot)
    assert said(capsys, place)[0] == 0


def rechunked(place: Path, size: int) -> None:
    """Write the index anew with chunks of ``size`` bytes, as one of another version may have."""
    saved = index.read(place)
    for name, facts in saved["files"].items():
        data = (place / name).read_bytes()
        facts["chunks"] = [zlib.crc32(data[start : start + size]) for start in range(0, len(data), size)]
    saved["chunk_bytes"] = size
    facts = {key: value for key, value in saved.items() if key not in ("format", "versions")}
    text = index.to_text(facts)
    (place / "index.json").write_text(text, encoding="utf-8")


def test_every_damaged_chunk_is_listed_with_what_is_in_it(copy: Path, capsys: Any) -> None:
    place = copy / "step-00000003"
    rechunked(place, 512)
    assert said(capsys, place)[0] == 0
    saved = index.read(place)
    hit = []
    for name in ("0.inp.weight", "0.out.weight"):
        for state in ("weight", "exp_avg_sq"):
            file, _, _, at = saved["tensors"][name][state]["pieces"][0]
            flip(place / file, at)
            hit.append((file, f"{name} ({state})"))
    code, text = said(capsys, place, "--json")
    holds = {damage["file"]: damage["holds"] for damage in json.loads(text)["damaged"]}
    assert code == 1 and all(name in holds[file] for file, name in hit)
    assert all(len(set(names)) == len(names) < 40 for names in holds.values())
    assert not any("0.blocks.1.2.weight (exp_avg)" in names for names in holds.values())


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("truncate", "rank-00001.safetensors has "), ("delete", "rank-00001.safetensors is missing"),
        ("longer", "rank-00001.safetensors has "), ("index", "index.json is damaged"),
        ("index gone", "cannot read index.json: No such file"),
    ],
)  # fmt: skip
def test_a_damaged_file_and_what_load_checkpoint_then_takes(copy: Path, capsys: Any, what: str, text: str) -> None:
    place = copy / "step-00000003"
    file = place / ("index.json" if what.startswith("index") else FILES[1])
    data = file.read_bytes()
    if what in ("delete", "index gone"):
        file.unlink()
    else:
        file.write_bytes({"truncate": data[:-30], "longer": data + b"x", "index": data.replace(b"0", b"1", 3)}[what])
    code, out = said(capsys, place)
    assert code == 1 and out.count("DAMAGED: ") == 1 and text in out and str(place) in out
    assert what not in ("truncate", "delete") or "in it: " in out
    code, out = said(capsys, copy)
    rows = {line.split()[0]: line for line in out.splitlines() if line}
    assert code == 1 and rows["step-00000001"].split()[1:5] == ["whole", "1", "2", "3"] and text in out
    assert rows["step-00000003"].split()[1] == "DAMAGED"
    assert "latest names:           step-00000003" in out and "load_checkpoint takes:  step-00000002" in out
    model = nn.Sequential(cases.make_mlp(), nn.BatchNorm1d(3))
    model.register_buffer("\x1b[31m", torch.ones(3))
    engine = cases.make_engine(model, cases.config_of("0"))
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        assert engine.load_checkpoint(copy, weights_only=True).tag == "step-00000002"
    engine.close()


def test_a_directory_of_checkpoints_is_not_touched(copy: Path, capsys: Any) -> None:
    """Another process may be in the middle of a save: what it put aside stays aside."""
    (copy / "step-00000002").rename(copy / ".old-step-00000002")
    (copy / ".tmp-step-00000004").mkdir()
    (copy / "latest").write_text("step-00000009\n", encoding="utf-8")
    before = sorted((path.name, path.stat().st_mtime_ns) for path in copy.rglob("*"))
    code, out = said(capsys, copy)
    assert code == 0 and "step-00000009, which is not there" in out and "load_checkpoint takes:  step-00000003" in out
    assert "replacing step-00000002" in out
    assert sorted((path.name, path.stat().st_mtime_ns) for path in copy.rglob("*")) == before
    code, out = said(capsys, copy, "--json")
    facts = json.loads(out)
    assert (facts["latest"], facts["loaded"], len(facts["checkpoints"])) == ("step-00000009", "step-00000003", 3)


def test_a_save_that_was_killed_between_its_renames(copy: Path, tmp_path: Path, capsys: Any) -> None:
    """inspect, export and load_checkpoint take the same one; only the last of them puts it back."""
    (copy / "step-00000003").rename(copy / ".old-step-00000003")
    before = sorted(copy.iterdir())
    code, out = said(capsys, copy)
    assert code == 0 and "load_checkpoint takes:  step-00000003" in out and "not there" not in out
    assert main(["export", str(copy), str(tmp_path / "out"), "--format", "safetensors"]) == 0
    assert f"{copy / '.old-step-00000003'} → " in capsys.readouterr().out and sorted(copy.iterdir()) == before
    model = nn.Sequential(cases.make_mlp(), nn.BatchNorm1d(3))
    model.register_buffer("\x1b[31m", torch.ones(3))
    engine = cases.make_engine(model, cases.config_of("0"))
    assert engine.load_checkpoint(copy, weights_only=True).tag == "step-00000003"
    engine.close()
    (copy / "step-00000003").rename(tmp_path / ".old-step-00000003")
    assert said(capsys, tmp_path)[0] == 0  # the only one


@pytest.mark.parametrize("end", ["removed", "replaced"])
def test_a_run_that_goes_on_meanwhile(folder: Path, copy: Path, capsys: Any, monkeypatch: Any, end: str) -> None:
    """keep_last removes a checkpoint while it is read, or a save replaces it: that is no damage."""
    read = stored.damages

    def late(place: Path, saved: dict[str, Any]) -> Any:
        if place.name == "step-00000001":
            place.rename(copy / ".tmp-removed-step-00000001")
            shutil.rmtree(copy / ".tmp-removed-step-00000001")
            if end == "replaced":
                shutil.copytree(copy / "step-00000002", place)
        return read(place, saved)

    monkeypatch.setattr(summary, "damages", late)
    code, out = said(capsys, copy)
    assert code == 0 and "note: step-00000001 was removed or replaced while it was read" in out
    assert "DAMAGED" not in out and "step-00000002  whole" in out
    shutil.copytree(folder / "step-00000001", copy / "step-00000001", dirs_exist_ok=True)
    assert json.loads(said(capsys, copy, "--json")[1])["removed"] == ["step-00000001"]
    shutil.copytree(folder / "step-00000001", copy / "step-00000001", dirs_exist_ok=True)
    assert main(["inspect", str(copy / "step-00000001")]) == 2
    assert "was removed or replaced" in capsys.readouterr().err


@pytest.mark.parametrize("versions", [[1], "x", {"torch": 2}])
def test_an_index_with_odd_versions_is_damaged(copy: Path, capsys: Any, versions: Any) -> None:
    place = copy / "step-00000003"
    saved = {key: value for key, value in index.read(place).items() if key != "format"}
    (place / "index.json").write_text(index.to_text({**saved, "versions": versions}), encoding="utf-8")
    code, out = said(capsys, place)
    assert code == 1 and "versions" in out


def test_an_imported_checkpoint_is_described_by_what_is_known(tmp_path: Path, capsys: Any) -> None:
    assert main(["import", str(Path(__file__).parents[1] / "data" / "deepspeed-stage2-bf16"), str(tmp_path)]) == 0
    (place,) = tmp_path.glob("step-*")
    capsys.readouterr()
    code, out = said(capsys, place)
    rows = {line.partition(":")[0]: line.partition(":")[2].strip() for line in out.splitlines()}
    assert code == 0 and "None" not in out and rows["random"] == "none"
    assert rows["made by"].startswith("imported from DeepSpeed") and "= " not in rows["made by"]
    assert rows["model"].split()[1] == "parameters,"
    imported = {"stage": {"name": "imported from there", "letters": "RRPR"}, "ranks": 1}
    assert inspect_checkpoint._maker({**imported, "batch": {}}) == "imported from there"
    assert inspect_checkpoint._maker({**imported, "batch": {"train_batch_size": 6}}) == "imported from there, batch 6"


@pytest.mark.parametrize(
    ("files", "text"),
    [
        (None, "found nothing there"), ([], "an empty directory"), (["notes.txt"], "nothing of the kind"),
        ([".metadata", "__0_0.distcp"], "torch.distributed.checkpoint"),
        (["latest", "global_step3/mp_rank_00_model_states.pt"], "DeepSpeed"),
        (["config.json", "model.safetensors"], "a Hugging Face model"), (["adapter_config.json"], "adapters of peft"),
    ],
)  # fmt: skip
def test_what_is_no_checkpoint_of_ours_is_named(
    tmp_path: Path, capsys: Any, files: list[str] | None, text: str
) -> None:
    place = tmp_path / "place"
    for name in files or []:
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(b"")
    if files == []:
        place.mkdir()
    assert main(["inspect", str(place)]) == 2
    printed = capsys.readouterr()
    assert text in printed.err and not printed.out
