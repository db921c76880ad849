"""A checkpoint that does not fit: one list on every rank and nothing changed; ``strict=False`` takes what fits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardengine.errors import UsageError
from tests.support import cases, topology
from tests.support.ranks import RankPool
from tests.support.special_models import VOCAB, WIDTH

Pools = Callable[[int], RankPool]
Lr = torch.optim.lr_scheduler


def saves(folder: str, stage: str = "2", **options: Any) -> dict[str, Any]:
    engine = topology.make(stage, **options)
    topology.train(engine, 2)
    engine.save_checkpoint(folder)
    found = topology.snapshot(engine)
    engine.close()
    return found


def refusal(engine: Any, folder: str | Path, **options: Any) -> list[str]:
    """The lines of the error; the engine is as it was, bit for bit, and closed."""
    before = topology.snapshot(engine)
    try:
        engine.load_checkpoint(folder, **options)
        text = "no error"
    except UsageError as error:
        text = str(error)
    topology.assert_same([topology.snapshot(engine)], [before])
    topology.train(engine, 1)
    engine.close()
    return text.replace("\n  - ", "\n").split("\n")


def changed_model() -> Any:
    """Other names, shapes, kinds, dtypes, orders in memory, ties; another parameter is frozen."""
    model = topology.make_model(5)
    model.conv = nn.Conv2d(3, 5, 3)  # not channels_last
    model.still.requires_grad_(True)
    model.lift.requires_grad_(False)
    model.blocks[1].b = nn.Linear(2, WIDTH)
    model.never = nn.Linear(3, 4)
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    model.table.data = model.table.data.int()
    del model.mask, model.count
    model.register_buffer("mask", torch.tensor([True]), persistent=False)
    model.register_parameter("count", nn.Parameter(torch.tensor(3), requires_grad=False))
    model.register_buffer("more", torch.zeros(2))
    return model


CHANGED = {
    "conv.weight: its order in memory is [0, 2, 3, 1] in the checkpoint, [] here ([]: the shape's own)",
    "table: its dtype is int64 in the checkpoint, int32 here",
    "never.weight: its shape is [2, 3] in the checkpoint, [4, 3] here",
    "never.bias: its shape is [2] in the checkpoint, [4] here",
    "count: a buffer in the checkpoint, a parameter here",
    "blocks.1.b.bias: not in the checkpoint",
    "more: not in the checkpoint",
    "mask: only in the checkpoint",
    "embed.weight, head.weight: one tensor in the checkpoint, 2 here",
    "still.weight: frozen in the checkpoint, trained here",
    "still.bias: frozen in the checkpoint, trained here",
    "lift.weight: trained in the checkpoint, frozen here",
    "lift.bias: trained in the checkpoint, frozen here",
    "optimizer group 0: no group of the checkpoint holds just empty, embed.weight, conv.weight, "
    "still.weight and 6 more",
    "optimizer group 1: no group of the checkpoint holds just conv.bias, still.bias, blocks.1.b.bias, never.bias",
    "optimizer: the engine has no group that holds just empty, embed.weight, conv.weight, lift.weight and 5 more",
    "optimizer: the engine has no group that holds just conv.bias, lift.bias, never.bias",
    "lr_scheduler: the checkpoint has SequentialLR, the engine StepLR",
}
ALWAYS = {line for line in CHANGED if " its " in line or "a buffer in" in line}
"""What cannot be taken over in part either."""


def refuses_changed(folder: str, **options: Any) -> list[str]:
    engine = topology.make("3", model=changed_model(), schedule=lambda optimizer: Lr.StepLR(optimizer, 2))
    return refusal(engine, folder, **options)


def test_everything_that_differs_is_one_list_on_every_rank(pools: Pools, tmp_path: Path) -> None:
    pools(2).run(saves, str(tmp_path))
    for lines in pools(3).run(refuses_changed, str(tmp_path)):
        assert "does not fit this engine" in lines[0] and "strict=False" in lines[-1]
        assert sorted(lines[1:-1]) == sorted(CHANGED)
    for lines in pools(3).run(refuses_changed, str(tmp_path), strict=False):
        assert "strict=False" not in lines[-1] and set(lines[1:]) == ALWAYS


@pytest.mark.parametrize(
    ("kind", "options", "expected"),
    [
        ("SGD", {"kind": "AdamW"}, "has SGD, the engine AdamW (weights_only=True takes the weights)"),
        ("SGD without momentum", {"kind": "SGD"}, "SGD has no state in the checkpoint, momentum_buffer here"),
        ("SGD", {"kind": "SGD without momentum"}, "SGD has momentum_buffer in the checkpoint, no state here"),
        ("Lion", {"kind": "Lion", "schedule": None}, "lr_scheduler: the checkpoint has SequentialLR, the engine none"),
    ],
)
def test_another_optimizer_or_scheduler_is_refused_by_name(
    tmp_path: Path, kind: str, options: dict[str, Any], expected: str
) -> None:
    saves(str(tmp_path), kind=kind)
    engine = topology.make("1", **options)
    (line,) = refusal(engine, tmp_path)[1:-1]
    assert line.endswith(expected)


@pytest.mark.parametrize("strict", [True, False])
def test_a_scheduler_of_another_make_is_refused_or_begins_anew(tmp_path: Path, strict: bool) -> None:
    saves(str(tmp_path))

    def other(optimizer: Any) -> Any:
        parts = [Lr.LinearLR(optimizer, total_iters=2), Lr.ExponentialLR(optimizer, 0.5)]
        return Lr.SequentialLR(optimizer, parts, [2])

    engine = topology.make("2", schedule=other)
    if strict:
        assert refusal(engine, tmp_path)[1:-1] == ["lr_scheduler._schedulers[1] is another schedule here"]
        return
    before = topology.snapshot(engine)["schedule"]
    with pytest.warns(UserWarning, match="scheduler is another one"):
        engine.load_checkpoint(tmp_path, strict=False)
    assert topology.snapshot(engine)["schedule"] == before and engine.global_steps == 2
    topology.train(engine, 2, first=2)
    engine.close()


def test_tensors_that_are_one_here_are_refused(tmp_path: Path) -> None:
    """Untied there, tied here: there is no telling which of the two to take."""
    model = topology.make_model()
    model.head.weight = nn.Parameter(torch.ones(VOCAB, WIDTH))
    saves(str(tmp_path), model=model)
    line = "embed.weight: one tensor here, several in the checkpoint: embed.weight, head.weight"
    for options in ({"strict": False}, {"weights_only": True}):
        lines = refusal(topology.make("3"), tmp_path, **options)
        assert line in lines


# strict=False


def part_of(found: dict[str, Any], name: str) -> dict[tuple[str, str], bytes]:
    """The stepped weight and the states of ``name``."""
    pieces = cases.assemble([found["state"]])
    return {at: flat.tobytes() for at, flat in pieces.items() if at[0] == name}


def some_changed() -> Any:
    """A bias less, a bias more; another layer is frozen, another trained; no longer tied."""
    model = topology.make_model(5)
    model.lift, model.blocks[1].b = nn.Linear(5, WIDTH, bias=False), nn.Linear(2, WIDTH)
    model.still.requires_grad_(True)
    model.conv.requires_grad_(False)
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    return model


def loads_in_part(folder: str, stage: str) -> tuple[Any, ...]:
    engine = topology.make(stage, model=some_changed())
    topology.train(engine, 1)
    before = topology.snapshot(engine)
    loaded = engine.load_checkpoint(folder, strict=False)
    after = topology.snapshot(engine)
    topology.train(engine, 2, first=2)
    engine.close()
    return before, after, loaded.missing, loaded.unexpected


@pytest.mark.parametrize("stage", ["1", "3"])
def test_not_strict_takes_what_fits_and_keeps_the_rest(tmp_path: Path, stage: str) -> None:
    there = saves(str(tmp_path))
    with pytest.warns(UserWarning) as said:
        before, after, missing, unexpected = loads_in_part(str(tmp_path), stage)
    texts = " ".join(str(warning.message) for warning in said)
    assert missing == ("blocks.1.b.bias",) and unexpected == ("lift.bias",)
    assert "are not in the checkpoint: blocks.1.b.bias" in texts and "only in the checkpoint: lift.bias" in texts
    assert "keep their own options" not in texts
    for name in missing:  # kept, with the states and the count of steps that belong to them
        assert before["steps"][name] == 1
        assert after["whole"][name] == before["whole"][name] and after["steps"][name] == before["steps"][name]
        assert part_of(after, name) == part_of(before, name)
    for name in ("blocks.0.a.weight", "scale", "never.weight", "lift.weight", "embed.weight"):
        assert part_of(after, name) == part_of(there, name) and after["steps"][name] == there["steps"][name]
    for name in there["whole"].keys() & after["whole"].keys():
        assert after["whole"][name] == there["whole"][name], name
    states = part_of(after, "still.weight")
    assert not any(states["still.weight", key].strip(b"\0") for key in ("exp_avg", "exp_avg_sq"))
    assert after["steps"]["still.weight"] == 0 and before["steps"]["still.weight"] == 1
    tied = part_of(after, "head.weight")
    assert list(tied.values()) == list(part_of(there, "embed.weight").values())
    assert list(after["groups"].values()) == list(there["groups"].values()) != list(before["groups"].values())
    assert after["counters"] == there["counters"]
    assert after["schedule"]["last_epoch"] == there["schedule"]["last_epoch"]


def test_a_group_that_is_new_keeps_its_options_and_the_schedule_goes_on(tmp_path: Path) -> None:
    there = saves(str(tmp_path))
    model = topology.make_model(5)
    model.blocks[0].c = nn.Linear(3, 3)
    new = list(model.blocks[0].c.parameters())
    groups = topology.groups_of(model, "AdamW")
    for group in groups:
        group["params"] = [p for p in group["params"] if all(p is not other for other in new)]
    groups.insert(1, {"params": new, "lr": 0.7})
    engine = topology.make_engine(model, groups, "AdamW", cases.config_of("3"), topology.make_schedule)
    own = engine.optimizer.param_groups[1]["lr"]
    with pytest.warns(UserWarning) as said:
        engine.load_checkpoint(tmp_path, strict=False)
    assert any("group(s) 1 keep their own options" in str(warning.message) for warning in said)
    rates = [group["lr"] for group in there["groups"].values()]
    assert engine.get_lr() == [rates[0], own, *rates[1:]]
    schedule = engine.lr_scheduler.state_dict()
    assert schedule["last_epoch"] == 2 and schedule["_schedulers"][1]["base_lrs"] == [0.01, 0.7, 0.005, 0.0025]
    topology.train(engine, 2, first=2)
    engine.close()


@pytest.mark.parametrize(("there", "here"), [("SGD without momentum", "SGD"), ("SGD", "SGD without momentum")])
def test_momentum_that_is_new_begins_at_zero_and_stays_off_where_it_is_off(
    tmp_path: Path, there: str, here: str
) -> None:
    saves(str(tmp_path), kind=there)
    engine = topology.make("3", kind=here, seed=5)
    topology.train(engine, 1)
    engine.load_checkpoint(tmp_path, strict=False)
    found = topology.snapshot(engine)
    states = {key: flat for (_, key), flat in cases.assemble([found["state"]]).items() if key != "weight"}
    assert all(not flat.any() for flat in states.values()) and bool(states) == (here == "SGD")
    assert {group["momentum"] for group in found["groups"].values()} == {0.9 if here == "SGD" else 0}
    topology.train(engine, 2, first=2)
    engine.close()


@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
def test_weights_only_leaves_everything_else(tmp_path: Path, kind: str) -> None:
    there = saves(str(tmp_path))
    engine = topology.make("1", kind=kind, seed=5, schedule=lambda optimizer: Lr.StepLR(optimizer, 2))
    topology.train(engine, 1)
    before, state = topology.snapshot(engine), torch.get_rng_state()
    engine.load_checkpoint(tmp_path, weights_only=True)
    after = topology.snapshot(engine)
    assert torch.equal(state, torch.get_rng_state())
    assert after["whole"] == there["whole"]
    for key in ("steps", "groups", "schedule", "counters"):
        assert after[key] == before[key], key
    states = [cases.assemble([found["state"]]) for found in (before, after, there)]
    for at, flat in states[1].items():
        assert flat.tobytes() == states[2 if at[1] == "weight" else 0][at].tobytes(), at
    engine.close()


def test_empty_groups_are_matched_in_their_order(tmp_path: Path) -> None:
    def make(seed: int) -> Any:
        model = topology.make_model(seed)
        empty = [{"params": [], "lr": 0.3}, {"params": [], "lr": 0.4}]
        return topology.make_engine(model, topology.groups_of(model, "AdamW") + empty, "AdamW", cases.config_of("2"))

    engine = make(31)
    engine.save_checkpoint(tmp_path)
    engine.close()
    engine = make(5)
    for group in engine.optimizer.param_groups:
        group["lr"] = 1.0
    with pytest.warns(UserWarning, match="lr of group 0 is 0.01, and this run began with 1.0"):
        engine.load_checkpoint(tmp_path)
    assert engine.get_lr() == [0.01, 0.005, 0.0025, 0.3, 0.4]
    engine.close()
