"""What an imported optimizer goes on with: SGD and Lion, whose steps nobody counts; our own export; their order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_dcp
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

import shardengine
from shardengine.app.cli import main
from shardengine.errors import CheckpointError
from shardengine.interchange import dcp, unsharded, writing
from shardengine.interchange.foreign import Foreign
from shardengine.optim.lion import Lion
from tests.interchange.test_deepspeed import parameter

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
CONFIG = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}}
DATA = torch.arange(40.0).reshape(5, 8).sin()
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "plain": (torch.optim.SGD, {"lr": 0.1}),
    "Lion": (Lion, {"lr": 0.01}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01}),
}


def make(kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = nn.Linear(8, 8)
    made_by, options = KINDS[kind]
    return model, made_by(model.parameters(), **options)


def engine_of(kind: str) -> shardengine.Engine:
    model, optimizer = make(kind)
    with torch.no_grad():
        for weight in model.parameters():
            weight.fill_(0.5)
    return shardengine.initialize(model, CONFIG, optimizer=optimizer)


def step(model: Any, optimizer: Any = None) -> None:
    loss = model(DATA).square().mean()
    if optimizer is None:
        model.backward(loss)
        model.step()
    else:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("kind", ["momentum", "plain", "Lion"])
def test_an_optimizer_that_does_not_count_goes_on(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    model, optimizer = make(kind)
    for _ in range(3):
        step(model, optimizer)
    weights, states = get_state_dict(model, optimizer)
    save_dcp({"model": weights, "optim": states}, checkpoint_id=str(tmp_path / "from"), no_dist=True)
    assert main(["import", str(tmp_path / "from"), str(tmp_path / "to")]) == 0
    assert "does not say it; global_steps is 0, and states that are there go on" in capsys.readouterr().out
    engine = engine_of(kind)
    engine.load_checkpoint(tmp_path / "to")
    step(engine)
    step(model, optimizer)
    for name, value in engine.state_dict().items():
        # torch's own kernels round in other places: a few units in the last place of weights of about 1
        torch.testing.assert_close(value, model.state_dict()[name], rtol=1e-6, atol=2e-7, msg=name)
    engine.close()


@pytest.mark.parametrize("kind", list(KINDS))
def test_our_own_export_comes_back_whole(kind: str, tmp_path: Path):
    engine = engine_of(kind)
    for _ in range(3):
        step(engine)
    engine.save_checkpoint(tmp_path / "a")
    step(engine)
    expected = {name: value.clone() for name, value in engine.state_dict().items()}
    engine.close()
    assert main(["export", "--format", "dcp", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    foreign = dcp.read(tmp_path / "b")
    assert {p.steps for p in foreign.parameters} == {3} and foreign.notes == []
    assert main(["import", str(tmp_path / "b"), str(tmp_path / "c")]) == 0
    engine = engine_of(kind)
    loaded = engine.load_checkpoint(tmp_path / "c")
    assert (loaded.tag, loaded.global_steps, engine.global_samples, loaded.micro_steps) == ("step-00000003", 3, 3, 3)
    step(engine)
    for name, value in engine.state_dict().items():
        assert torch.equal(value, expected[name]), name
    engine.close()


@pytest.mark.parametrize("kind", list(KINDS))
def test_torch_loads_our_export_in_each_of_its_ways(kind: str, tmp_path: Path):
    """What it asks for in either form, and all that is there."""
    engine = engine_of(kind)
    step(engine)
    engine.save_checkpoint(tmp_path / "a")
    engine.close()
    assert main(["export", "--format", "dcp", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    expected = {parameter.names[0]: parameter for parameter in dcp.read(tmp_path / "b").parameters}
    for way in ("nested", "flat", "all"):
        model, optimizer = make(kind)
        options = StateDictOptions(flatten_optimizer_state_dict=way == "flat")
        weights, states = get_state_dict(model, optimizer, options=options)
        state: dict[str, Any] = {"model": weights, "optim": states}
        if way == "all":
            dcp_to_torch_save(tmp_path / "b", tmp_path / "file.pt")
            state = torch.load(tmp_path / "file.pt")
            assert state["shardengine"] == {"global_steps": 1, "global_samples": 1, "micro_steps": 1}
        else:
            load_dcp(state, checkpoint_id=str(tmp_path / "b"), no_dist=True)
        set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"], options=options
        )
        for name, value in model.named_parameters():
            assert torch.equal(value, expected[name].read("weight"))
            held = {key: tensor for key, tensor in optimizer.state[value].items() if key != "step"}
            assert held.keys() == set(expected[name].states) - {"weight"}
            assert all(torch.equal(tensor, expected[name].read(key)) for key, tensor in held.items())
        step(model, optimizer)


def test_a_state_that_lacks_something_is_refused_and_what_is_not_taken_is_named(tmp_path: Path):
    model, optimizer = make("AdamW")
    step(model, optimizer)
    weights, got = get_state_dict(model, optimizer)
    states: dict[str, Any] = dict(got)
    for number, (missing, text) in enumerate((
        ("step", r"state of bias has exp_avg, exp_avg_sq and no number of steps \('step'\)"),
        ("exp_avg_sq", "the optimizer has stepped bias, but its state there has no exp_avg_sq"),
    )):  # fmt: skip
        bias = {key: value for key, value in states["state"]["bias"].items() if key != missing}
        torn = {**states, "state": {**states["state"], "bias": bias}}
        save_dcp({"model": weights, "optim": torn}, checkpoint_id=str(tmp_path / str(number)), no_dist=True)
        with pytest.raises(CheckpointError, match=text):
            dcp.read(tmp_path / str(number))
    states["state"]["bias"]["max_exp_avg"] = torch.zeros(8)
    states["state"]["gone"] = {"exp_avg": torch.zeros(8)}
    save_dcp({"model": weights, "optim": {**states, "note": "x"}}, checkpoint_id=str(tmp_path / "named"), no_dist=True)
    assert dcp.read(tmp_path / "named").notes == [
        "optim.note: neither a state nor a group of an optimizer",
        "optimizer state of gone: no group of the optimizer has these names",
        "optimizer states max_exp_avg",
    ]


def test_sgd_has_momentum_in_all_groups_or_in_none(tmp_path: Path):
    rows = [parameter("a", torch.rand(2), 3), parameter("b", torch.rand(2), 3)]
    for number, momentum in enumerate((0.0, 0.9)):  # of group 1; both parameters are in group 0, which has none
        groups = [{"lr": 0.1, "momentum": 0.0}, {"lr": 0.1, "momentum": momentum}]
        foreign = Foreign("nowhere", rows, {}, "SGD", groups, 3, 3, 3, None, [])
        place = writing.write(foreign, tmp_path, f"tag{number}")
        assert ("momentum_buffer" in (place / "index.json").read_text(encoding="utf-8")) == bool(momentum)


# Stage 0 of DeepSpeed


def test_what_only_the_order_of_a_whole_optimizer_tells_apart_is_noted():
    model: Any = nn.ModuleDict(
        {"a": nn.Linear(3, 3, bias=False), "b": nn.Linear(3, 3, bias=False), "c": nn.Linear(3, 2)}
    )
    optimizer = torch.optim.AdamW([model[name].weight for name in "bac"])  # the model's order is another one
    sum(model[name](torch.rand(2, 3)).square().sum() for name in "abc").backward()
    optimizer.step()
    weights = {name: value.detach() for name, value in model.named_parameters()}
    notes: list[str] = []
    assert unsharded.rows_of(optimizer.state_dict(), weights, 1, notes) is not None
    assert len(notes) == 1 and "nothing else tells apart a.weight and b.weight. If" in notes[0]

    def noted(values: dict[str, torch.Tensor]) -> list[str]:
        """Of an optimizer in half precision, whose master weights are the model's, one vector of all."""
        masters = [torch.cat([value.float().reshape(-1) for value in values.values()])]
        inner = {"state": {0: {"exp_avg": masters[0]}}, "param_groups": [{"params": [0], "step": 1}]}
        found: list[str] = []
        assert unsharded.rows_of({"optimizer_state_dict": inner, "fp32_groups_flat": masters}, values, 1, found)
        return found

    low = {name: value.bfloat16() for name, value in weights.items()}
    assert noted(low) == []
    low["b.weight"] = low["a.weight"].clone()
    assert "nothing else tells apart a.weight and b.weight. If" in noted(low)[0]
