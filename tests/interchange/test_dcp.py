"""Import of torch.distributed.checkpoint, and pickles that want to run something: read inertly, or refused by name."""

from __future__ import annotations

import os
import pickle
import shutil
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

import shardengine
from shardengine.app.cli import main
from shardengine.errors import CheckpointError, UsageError
from shardengine.interchange import dcp, deepspeed, unpickling, writing
from tests.data import make_deepspeed as made
from tests.support import cases
from tests.support.raising import raises

DATA = Path(made.__file__).parent
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def trained(steps: int = 3) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = made.make_model()
    optimizer = torch.optim.AdamW(made.groups_of(model, "AdamW"))
    for step in range(steps):
        model(made.batch(step, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def saved(folder: Path, *, flat: bool = False, form: str = "both", steps: int = 3) -> tuple[nn.Module, Any]:
    """Save a trained model in ``folder`` as users do; the model and its optimizer."""
    model, optimizer = trained(steps)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    weights, states = get_state_dict(model, optimizer, options=options)
    both = {"model": weights, "optim": states}
    whole = {"both": both, "deeper": {"app": both, "epoch": 3}, "model": {"model": weights}, "bare": weights}[form]
    save_dcp(whole, checkpoint_id=str(folder), no_dist=True)
    return model, optimizer


@pytest.mark.parametrize(("flat", "form"), [(False, "both"), (True, "both"), (False, "deeper"), (True, "deeper")])
def test_a_model_with_its_optimizer_comes_back(flat: bool, form: str, tmp_path: Path):
    model, optimizer = saved(tmp_path, flat=flat, form=form)
    foreign = dcp.read(tmp_path, ["shift"])
    assert foreign.kind == "AdamW" and foreign.global_steps == 3
    assert [(g["lr"], g["weight_decay"], g["betas"]) for g in foreign.groups] == [
        (1e-2, 0.1, [0.9, 0.95]), (2e-3, 0.0, [0.9, 0.95]),
    ]  # fmt: skip
    own = dict(model.named_parameters())
    assert {p.names[0] for p in foreign.parameters} == own.keys()
    assert ("embed.weight", "head.weight") in [p.names for p in foreign.parameters]
    for parameter in foreign.parameters:
        value = own[parameter.names[0]]
        assert torch.equal(parameter.read("weight"), value) and parameter.trainable == value.requires_grad
        assert parameter.group == (-1 if not value.requires_grad else 0 if value.dim() > 1 else 1)
        assert parameter.states == ("weight", *(("exp_avg", "exp_avg_sq") if value.requires_grad else ()))
        for state in parameter.states[1:]:
            assert torch.equal(parameter.read(state), optimizer.state[value][state])
    assert all(torch.equal(foreign.buffers[name], value) for name, value in model.named_buffers())
    assert any("fixed.weight, fixed.bias" in note for note in foreign.notes)
    assert any(note.startswith("epoch: ") for note in foreign.notes) == (form == "deeper")


def test_an_engine_trains_on_from_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    model, optimizer = saved(tmp_path / "from")
    source, out = str(tmp_path / "from"), str(tmp_path / "to")
    assert main(["import", source, out, "--buffer", "shift"]) == 0
    assert "not stepped by the optimizer, taken for frozen parameters" in capsys.readouterr().out
    ours = made.make_model()
    engine = shardengine.initialize(
        ours,
        {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}},
        optimizer=torch.optim.AdamW(made.groups_of(ours, "AdamW")),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the format says nothing of batches: nothing to compare
        engine.load_checkpoint(out)
    own = dict(model.named_parameters())
    for (name, state), flat in cases.assemble([cases.local_state(engine)]).items():
        value = own[name] if state == "weight" else optimizer.state[own[name]][state]
        assert torch.equal(torch.from_numpy(flat), value.detach().reshape(-1)), (name, state)
    for step in (3, 4):
        engine.backward(engine(made.batch(step, 0)))
        engine.step()
        model(made.batch(step, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, value in engine.state_dict().items():
        # the engine's declared arithmetic rounds in another order than torch.optim: a few units in the last place
        torch.testing.assert_close(value, model.state_dict()[name], rtol=2e-5, atol=2e-6)
    engine.close()


@pytest.mark.parametrize("form", ["model", "bare"])
def test_a_model_alone(form: str, tmp_path: Path):
    model, _ = saved(tmp_path / "from", form=form)
    foreign = dcp.read(tmp_path / "from")
    assert foreign.kind is None and all(parameter.trainable for parameter in foreign.parameters)
    found = {name: p.read("weight") for p in foreign.parameters for name in p.names} | foreign.buffers
    assert all(torch.equal(found[name], value) for name, value in model.state_dict().items())
    writing.write(foreign, tmp_path / "to")
    with raises("import-buffer-unknown", "shifd"):
        dcp.read(tmp_path / "from", ["shifd"])


def test_pieces_of_several_ranks_are_put_together(tmp_path: Path):
    """As FSDP saves them: every rank a part. The chunks are cut by hand, the reader is torch's."""
    value = torch.arange(35.0).reshape(7, 5)
    save_dcp({"a": value[:4].clone(), "b": value[4:].clone()}, checkpoint_id=str(tmp_path), no_dist=True)
    with (tmp_path / ".metadata").open("rb") as file:
        metadata = pickle.load(file)
    rows, storage = metadata.state_dict_metadata, metadata.storage_data
    shift = {"a": 0, "b": 4}
    for key, first in shift.items():
        for chunk in rows[key].chunks:
            chunk.offsets = torch.Size([first, 0])
    moved = {}
    for at, info in storage.items():
        moved[type(at)("whole", torch.Size([shift[at.fqn], 0]), shift[at.fqn] // 4)] = info
    rows["a"].chunks += rows["b"].chunks
    rows["a"].size = torch.Size([7, 5])
    metadata.state_dict_metadata, metadata.storage_data = {"whole": rows["a"]}, moved
    metadata.planner_data = {"whole": ("whole",)}
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    assert torch.equal(dcp.read(tmp_path).parameters[0].read("weight"), value)

    rows["a"].size, absurd = torch.Size([1 << 40, 1 << 40]), [torch.Size([0, 0]), torch.Size([1 << 40, 1 << 40])]
    rows["a"].chunks.append(type(rows["a"].chunks[0])(*absurd))
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with raises("import-damaged", ".metadata", "whole"):
        dcp.read(tmp_path).parameters[0].read("weight")
    rows["a"].size = torch.Size([7, 5])
    rows["a"].chunks.pop()
    rows["a"].chunks.pop()
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with raises("import-damaged", ".metadata", "do not cover it"):
        dcp.read(tmp_path)


def test_a_file_that_is_missing_or_damaged_is_named(tmp_path: Path):
    saved(tmp_path / "good")
    file = next((tmp_path / "good").glob("*.distcp"))
    for name, data in ((file.name, file.read_bytes()[:3000]), (file.name, None), (".metadata", b"\x80\x04"),
                       (".metadata", None)):  # fmt: skip
        place = tmp_path / f"bad-{name}-{data is None}"
        shutil.copytree(tmp_path / "good", place)
        (place / name).unlink() if data is None else (place / name).write_bytes(data)
        with pytest.raises(CheckpointError, match=f"{name} is missing" if data is None else name):
            foreign = dcp.read(place)
            writing.write(foreign, tmp_path / "out")


# Pickles that want to run something


class Runs:
    """Unpickles to a call."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


class Config:
    """Somebody's own class."""


@pytest.fixture
def marker(tmp_path: Path) -> Any:
    path = tmp_path / "was-run"
    yield path
    assert not path.exists()


def hostile(marker: Path, allowed: type) -> dict[str, Any]:
    """Name that must be in the message → object. allowed: a class that has a stand-in, to hide a call in."""
    touch = f"open({str(marker)!r}, 'w')"
    return {
        f"{os.system.__module__}.system": Runs(os.system, f"touch {marker}"),
        "eval": Runs(eval, touch),
        "exec": Runs(allowed, Runs(exec, touch)),
        "getattr": Runs(getattr, Runs, "__reduce__"),
        "tests.interchange.test_dcp.Config": Config(),
        "functools.partial": __import__("functools").partial(print),
    }


def test_deepspeed_files_that_name_what_is_not_allowed(marker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    name = "deepspeed.runtime.fp16.loss_scaler"
    module: Any = types.ModuleType(name)
    module.LossScaler = type("LossScaler", (), {"__module__": name})
    for parent in ("deepspeed", "deepspeed.runtime", "deepspeed.runtime.fp16"):
        monkeypatch.setitem(sys.modules, parent, types.ModuleType(parent))
    monkeypatch.setitem(sys.modules, name, module)
    source = tmp_path / "from"
    shutil.copytree(DATA / "deepspeed-stage1-fp32", source)
    model = next(source.glob("*/mp_rank_00_model_states.pt"))
    optimizer = next(source.glob("*/*_optim_states.pt"))
    for name, value in hostile(marker, module.LossScaler).items():
        for path in (model, optimizer):
            good = path.read_bytes()
            torch.save({"module": {}, "loss_scaler": value}, path)
            with pytest.raises(UsageError, match=name) as caught:
                deepspeed.read(source)
            assert path.name in str(caught.value)
            path.write_bytes(good)
    assert deepspeed.read(source).kind == "AdamW"  # nothing of it is left
    assert main(["import", str(source), str(tmp_path / "out")]) == 0


def test_dcp_files_that_name_what_is_not_allowed(marker: Path, tmp_path: Path):
    source = tmp_path / "from"
    saved(source)
    path = source / ".metadata"
    good = path.read_bytes()
    for name, value in hostile(marker, MetadataIndex).items():
        path.write_bytes(pickle.dumps({"state_dict_metadata": value}))
        with pytest.raises(UsageError, match=name) as caught:
            dcp.read(source)
        assert str(path) in str(caught.value)
        weights = {"w": torch.zeros(2)}
        groups = [{"params": ["w"], "lr": value, "betas": (0.9, 0.9), "eps": 1e-8}]
        shutil.rmtree(tmp_path / "values", ignore_errors=True)
        whole = {"model": weights, "optim": {"state": {}, "param_groups": groups}}
        save_dcp(whole, checkpoint_id=str(tmp_path / "values"), no_dist=True)
        with pytest.raises(UsageError, match=name) as caught:
            dcp.read(tmp_path / "values")
        assert "optim.param_groups.0.lr" in str(caught.value)
    path.write_bytes(good)
    assert dcp.read(source).kind == "AdamW"


def test_metadata_cannot_reach_other_files(tmp_path: Path):
    saved(tmp_path / "from")
    path = tmp_path / "from" / ".metadata"
    for file in ("../secret", "/etc/hostname", "..", "a/b"):
        with path.open("rb") as opened:
            metadata = pickle.load(opened)
        key = next(iter(metadata.storage_data))
        metadata.storage_data[key] = _StorageInfo(file, 0, 1)
        other = tmp_path / "bad"
        shutil.copytree(tmp_path / "from", other, dirs_exist_ok=True)
        (other / ".metadata").write_bytes(pickle.dumps(metadata))
        with raises("import-file-outside-folder"):
            dcp.read(other)


@pytest.mark.parametrize("name", ["torch.distributed.checkpoint.metadata Metadata", "torch.serialization _get_layout"])
def test_a_pickle_cannot_change_what_it_names(name: str, tmp_path: Path):
    """BUILD with (None, attributes) sets attributes of what is on the stack, a class or a function as well."""
    module, _, attribute = name.partition(" ")
    build = b"\x80\x02c" + f"{module}\n{attribute}\n".encode() + b"N}X\x05\x00\x00\x00addedK\x01s\x86b."
    (tmp_path / "file").write_bytes(build)
    with raises("import-damaged"):
        unpickling.load_plain(tmp_path / "file")
    allowed = [*unpickling._PLAIN.values(), getattr(sys.modules[module], attribute)]
    assert not any(hasattr(value, "added") for value in allowed)
    changed: Any = unpickling.stand_ins(["a.B"])["a.B"]
    with pytest.raises(pickle.UnpicklingError):
        changed.args = 1
