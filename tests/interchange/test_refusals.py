"""What cannot be imported is refused in a sentence, and what is read is read once."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

from shardengine.app.cli import main
from shardengine.checkpoint import directory
from shardengine.errors import CheckpointError, UsageError
from shardengine.interchange import dcp, deepspeed, shards, writing
from shardengine.interchange.dcp_files import DcpStore
from shardengine.interchange.unpickling import load_torch
from tests.interchange.test_deepspeed import copied, foreign_of
from tests.support.raising import raises

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
WEIGHTS = {"a.weight": torch.arange(9.0).reshape(3, 3), "a.bias": torch.arange(3.0)}
STATE = {"step": torch.tensor(3.0), "exp_avg": torch.zeros(3, 3), "exp_avg_sq": torch.zeros(3, 3)}
GROUP = {"lr": 0.1, "betas": (0.9, 0.9), "eps": 1e-8, "weight_decay": 0.0, "params": ["a.weight"]}


def whole(groups: Any = None, **state: Any) -> dict[str, Any]:
    optimizer = {"state": {"a.weight": {**STATE, **state}}, "param_groups": [GROUP] if groups is None else groups}
    return {"model": WEIGHTS, "optim": optimizer}


A_COUNT, GROUPS = "expected a whole number that is not negative, got ", r"optimizer's groups \(param_groups\), got "
ODD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "groups are numbers": (whole([1, 2]), CheckpointError, f"{GROUPS}a whole number"),
    "groups are a text": (whole("x"), CheckpointError, f"{GROUPS}a string"),
    "step is a text": (whole(step="three"), CheckpointError, f"optim.state.a.weight.step: {A_COUNT}'three'"),
    "several steps": (whole(step=torch.ones(2)), CheckpointError, rf"step: {A_COUNT}a tensor of shape \(2,\)"),
    "step below 0": (whole(step=torch.tensor(-3.0)), CheckpointError, f"step: {A_COUNT}-3.0"),
    "step is nan": (whole(step=torch.tensor(float("nan"))), CheckpointError, f"step: {A_COUNT}nan"),
    "half a step": (whole(step=2.5), CheckpointError, f"step: {A_COUNT}2.5"),
    "unlike values": (whole([{**GROUP, "lr": torch.ones(2)}]), CheckpointError, "lr is a tensor, expected a number"),
    "lr is nan": (whole([{**GROUP, "lr": float("nan")}]), CheckpointError, "lr is nan, expected a finite number"),
    "one beta": (whole([{**GROUP, "betas": 0.9}]), CheckpointError, "expected two numbers as betas, got 0.9"),
    "an optimizer alone": ({"optim": whole()["optim"]}, UsageError, "an optimizer without a model"),
    "a bare optimizer": (whole()["optim"], UsageError, "an optimizer without a model"),
    "no tensors": ({"model": {"x": "hello"}}, UsageError, "expected the tensors of a model, there are none"),
    "nothing": ({}, UsageError, "expected the tensors of a model, there are none"),
    "wrong counters": (
        {**whole(), "shardengine": {"global_steps": -1, "global_samples": 0, "micro_steps": 0}}, CheckpointError,
        f"counters of 'shardengine': {A_COUNT}-1",
    ),
    "not all counters": ({**whole(), "shardengine": {"global_steps": 1}}, CheckpointError, f"{A_COUNT}None"),
}  # fmt: skip


def test_odd_sections_of_dcp_are_refused_in_a_sentence(tmp_path: Path):
    for number, (name, (content, error, text)) in enumerate(ODD.items()):
        place = tmp_path / str(number)
        save_dcp(content, checkpoint_id=str(place), no_dist=True)
        with pytest.raises(error, match=text) as caught:
            dcp.read(place)
        assert str(place) in str(caught.value) or "optimizer group 0" in str(caught.value), name


def test_values_of_dcp_that_nobody_expects_are_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    save_dcp(whole(), checkpoint_id=str(tmp_path), no_dist=True)
    monkeypatch.setattr(DcpStore, "paths", lambda store: dict.fromkeys(store.tensors))
    with raises("import-damaged", "TypeError"):
        dcp.read(tmp_path)


def test_optimizer_sections_without_groups_are_named(tmp_path: Path):
    for number, (optimizer, notes) in enumerate((
        ({"lr": 0.1}, ["optim.lr: neither a state nor a group of an optimizer"]),
        ({"state": {"a.weight": STATE}, "param_groups": {"x": 1}},
         ["optim.param_groups.x: neither a state nor a group of an optimizer",
          "optimizer state of a.weight: no group of the optimizer has these names"]),
    )):  # fmt: skip
        save_dcp({"model": WEIGHTS, "optim": optimizer}, checkpoint_id=str(tmp_path / str(number)), no_dist=True)
        foreign = dcp.read(tmp_path / str(number))
        assert foreign.kind is None and foreign.notes == notes and all(p.trainable for p in foreign.parameters)


def test_dcp_tensors_of_equal_form_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    values = {f"layer{number}.weight": torch.rand(4, 4) for number in range(12)}
    values |= {"tied.weight": values["layer3.weight"].clone(), "ones": torch.ones(4, 4), "others": torch.ones(4, 4)}
    save_dcp({**values, "alone": torch.rand(3)}, checkpoint_id=str(tmp_path), no_dist=True)
    reads: Counter[str] = Counter()
    tensor = DcpStore.tensor
    monkeypatch.setattr(DcpStore, "tensor", lambda store, key: reads.update([key]) or tensor(store, key))
    names = [parameter.names for parameter in dcp.read(tmp_path).parameters]
    assert sorted(reads) == sorted(values) and set(reads.values()) == {1}
    assert ("layer3.weight", "tied.weight") in names and ("ones",) in names and len(names) == 15


# DeepSpeed


@pytest.mark.parametrize("name", ["stage1-fp32", "stage2-bf16", "stage3-fp32"])
def test_a_weight_that_is_not_in_the_model_file_is_missed(name: str, tmp_path: Path):
    place = copied(name, tmp_path) / "global_step3"
    for victim in ("norm.bias", "fixed.weight") if name != "stage1-fp32" else ("norm.bias",):
        for path in place.glob("*model_states.pt"):
            content = dict(load_torch(path))
            content["module"] = {key: value.clone() for key, value in content["module"].items() if key != victim}
            path.unlink()
            torch.save(content, path)
        with pytest.raises(CheckpointError, match=f"model_states.pt: its model has no {victim}, which it says"):
            deepspeed.read(place)
        shutil.rmtree(place)
        shutil.copytree(copied(name, tmp_path / victim) / "global_step3", place)
    assert len(deepspeed.read(place).parameters) == 10


def test_shapes_of_stage_3_are_looked_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    calls: Counter[str] = Counter()
    shapes = deepspeed._shapes
    monkeypatch.setattr(deepspeed, "_shapes", lambda *arguments: calls.update(["call"]) or shapes(*arguments))
    assert len(deepspeed.read(copied("stage3-fp32", tmp_path)).parameters) == 10
    assert calls.total() == 2  # of what is trained, of what is frozen


def test_a_value_of_another_kind_is_named_in_words():
    path = Path("file.pt")
    for content, text in (
        ({}, "file.pt: 'names' is missing"), ({"names": None}, "file.pt: 'names' is missing"),
        ({"names": {}}, "file.pt: expected 'names' to be a list, got a dict"),
        ({"names": True}, "file.pt: expected 'names' to be a list, got true or false"),
    ):  # fmt: skip
        with pytest.raises(CheckpointError) as caught:
            shards.need(content, "names", list, path)
        assert str(caught.value) == text
    part = shards.ShardPart(path, {"fp32_flat_groups": [None], "base_optimizer_state": {
        "state": {0: {"step": -1}}, "param_groups": [{"params": [0]}]}})  # fmt: skip
    with raises("import-entry-wrong-type", "nothing"):
        shards.rows_by_parameter([part], [{"a": (2,)}], 0)
    part.content["fp32_flat_groups"][0] = torch.rand(2)
    with pytest.raises(CheckpointError, match=f"file.pt: 'step' of the optimizer: {A_COUNT}-1"):
        shards.rows_by_parameter([part], [{"a": (2,)}], 0)


# Writing


def test_what_another_engine_is_writing_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    foreign = foreign_of(torch.nn.Linear(2, 2))
    work = directory.begin(tmp_path / "out", "taken")
    (work / "rank-00000.safetensors").write_bytes(b"half of it")
    with raises("checkpoint-tag-being-written"):
        writing.write(foreign, tmp_path / "out", "taken")
    assert (work / "rank-00000.safetensors").read_bytes() == b"half of it"
    directory.abandon(tmp_path / "out", "taken")
    (tmp_path / "file").write_bytes(b"")
    with raises("import-not-written", "file/tag"):
        writing.write(foreign, tmp_path / "file", "tag")


def test_help_says_which_checkpoint_is_the_default(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["import", "--help"])
    assert "for torch.distributed.checkpoint SOURCE itself" in " ".join(capsys.readouterr().out.split())
