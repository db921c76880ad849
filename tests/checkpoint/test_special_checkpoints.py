"""Checkpoints of models and optimizers that are not ordinary, and of another precision, at any topology."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support import cases, topology
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]
Build = Callable[[str, bool], Any]
"""``build(stage, again)``: an engine that has trained, or (``again``) one that is to load what that one saved."""


def ordinary(kind: str) -> Build:
    def build(stage: str, again: bool) -> Any:
        engine = topology.make(stage, kind=kind, seed=5 if again else 31)
        topology.train(engine, 1 if again else 2)
        return engine

    return build


def without_optimizer(stage: str, again: bool) -> Any:
    return topology.make_engine(topology.make_model(5 if again else 31), None, "", cases.config_of(stage))


def all_frozen_but_states(stage: str, again: bool) -> Any:
    """What is trained is one bias, smaller than the ranks."""
    model = topology.make_model(5 if again else 31).requires_grad_(False)
    model.lift.bias.requires_grad_(True)
    engine = topology.make_engine(model, topology.groups_of(model, "SGD"), "SGD", cases.config_of(stage))
    topology.train(engine, 2)
    return engine


def joined(stage: str, again: bool) -> Any:
    """A layer was unfrozen and joined the optimizer between two steps; what loads has trained it from the start."""
    model = topology.make_model(5 if again else 31)
    late = list(model.lift.parameters())
    first = [p for p in (model.embed.weight, model.conv.weight, model.scale) if p is not None]
    groups: list[dict[str, Any]] = [{"params": first}, {"params": late, "lr": 3e-3, "initial_lr": 3e-3}]
    for parameter in model.parameters():
        parameter.requires_grad_(any(parameter is chosen for chosen in (*first, *(late if again else ()))))
    engine = topology.make_engine(
        model, groups if again else groups[:1], "AdamW", cases.config_of(stage),
        lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9),
    )  # fmt: skip
    topology.train(engine, 2)
    if not again:
        model.lift.requires_grad_(True)
        engine.optimizer.add_param_group(groups[1])
        topology.train(engine, 1, first=2)
    return engine


def adapted(stage: str, again: bool) -> Any:
    """peft's adapters over a frozen bf16 GPT-2."""
    from tests.parity.test_peft import make_lora

    model = make_lora("bf16")
    if again:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
    engine = cases.make_engine(model, cases.config_of(stage, zero={"reduce_bucket_size": 600}), "AdamW")
    cases.run_steps(engine, 1 if again else 2)
    return engine


SPECIAL: dict[str, Build] = {
    "Lion": ordinary("Lion"),
    "SGD": ordinary("SGD"),
    "SGD without momentum": ordinary("SGD without momentum"),
    "no optimizer": without_optimizer,
    "one bias": all_frozen_but_states,
    "joined the optimizer": joined,
    "adapters": adapted,
}


def saves(folder: str, stage: str, names: list[str]) -> list[dict[str, Any]]:
    found = []
    for name in names:
        engine = SPECIAL[name](stage, False)
        engine.save_checkpoint(folder, name.replace(" ", "-"))
        found.append(topology.snapshot(engine))
        engine.close()
    return found


def loads(folder: str, stage: str, names: list[str]) -> list[dict[str, Any]]:
    found = []
    for name in names:
        engine = SPECIAL[name](stage, True)
        engine.load_checkpoint(folder, name.replace(" ", "-"))
        found.append(topology.snapshot(engine))
        engine.close()
    return found


@pytest.mark.parametrize("source", [(1, "0"), (2, "3"), (3, "1")])
def test_what_is_special_is_the_same_at_another_topology(pools: Pools, tmp_path: Path, source: tuple[int, str]) -> None:
    names = [name for name in SPECIAL if name != "adapters" or pytest.importorskip("peft")]
    before = pools(source[0]).run(saves, str(tmp_path), source[1], names)
    for ranks, stage in {1: [(3, "3")], 2: [(1, "2"), (3, "0")], 3: [(2, "3k")]}[source[0]]:
        after = pools(ranks).run(loads, str(tmp_path), stage, names)
        for number, name in enumerate(names):
            rows = [result[number] for result in after]
            if name == "joined the optimizer":  # its scheduler has no entry for the group that joined
                for row in (*rows, before[0][number]):
                    row["schedule"] = {k: v for k, v in row["schedule"].items() if k not in ("base_lrs", "_last_lr")}
            topology.assert_same(rows, [result[number] for result in before], (name, stage))


def rates(engine: Any) -> list[dict[Any, float]]:
    """The learning rates of four more steps, by the parameters of the group."""
    found = []
    for step in range(2, 6):
        topology.train(engine, 1, first=step)
        found.append({names: group["lr"] for names, group in topology.snapshot(engine)["groups"].items()})
    return found


def ratios(optimizer: Any) -> Any:
    """A scheduler that multiplies the rates with which its groups began."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)


def nested(optimizer: Any) -> Any:
    rates = torch.optim.lr_scheduler
    return rates.SequentialLR(optimizer, [rates.ConstantLR(optimizer), ratios(optimizer)], [1])


@pytest.mark.parametrize(("stage", "schedule"), [("1", ratios), ("3", nested)])
def test_groups_may_come_in_another_order(tmp_path: Path, stage: str, schedule: Callable[[Any], Any]) -> None:
    """Also what the scheduler keeps per group, and one inside of it; the next steps are the same bits."""
    engine = topology.make("2", schedule=schedule)
    topology.train(engine, 2)
    engine.save_checkpoint(tmp_path)
    expected = rates(engine), topology.snapshot(engine)
    engine.close()
    engine = topology.make(stage, seed=5, order=(2, 0, 1), schedule=schedule)
    engine.load_checkpoint(tmp_path)
    assert rates(engine) == expected[0]
    found = topology.snapshot(engine)
    found["schedule"] = expected[1]["schedule"] = {}
    topology.assert_same([found], [expected[1]])
    engine.close()


Rates = torch.optim.lr_scheduler
SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda optimizer: Rates.LambdaLR(optimizer, [lambda step: 0.9**step] * 3),
    "MultiplicativeLR": lambda optimizer: Rates.MultiplicativeLR(optimizer, lambda step: 0.9),
    "CosineAnnealingWarmRestarts": lambda optimizer: Rates.CosineAnnealingWarmRestarts(optimizer, 3),
    "CyclicLR": lambda optimizer: Rates.CyclicLR(optimizer, 0.01, 0.1, 3),
    "OneCycleLR": lambda optimizer: Rates.OneCycleLR(optimizer, 0.1, total_steps=30),
    "PolynomialLR": lambda optimizer: Rates.PolynomialLR(optimizer, 9),
    "MultiStepLR over rates that are tensors": lambda optimizer: Rates.MultiStepLR(optimizer, [1, 4], 0.5),
}


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_every_scheduler_goes_on(tmp_path: Path, name: str) -> None:
    """With its state, and what it sets in the groups: rates, momentum."""

    def make(stage: str, seed: int) -> Any:
        model = topology.make_model(seed)
        groups = topology.groups_of(model, "SGD")
        for group in groups if "tensors" in name else ():
            group["lr"] = torch.tensor(group["lr"])
        return topology.make_engine(model, groups, "SGD", cases.config_of(stage), SCHEDULES[name])

    def values(engine: Any) -> list[Any]:
        groups = engine.optimizer.param_groups
        return [[(float(group["lr"]), type(group["lr"]), group["momentum"]) for group in groups]]

    engine = make("2", 31)
    topology.train(engine, 3)
    engine.save_checkpoint(tmp_path)
    expected, found = [], []
    for step in range(3, 8):
        topology.train(engine, 1, first=step)
        expected += values(engine)
    weights = topology.snapshot(engine)["whole"]
    engine.close()
    engine = make("3", 5)
    engine.load_checkpoint(tmp_path)
    for step in range(3, 8):
        topology.train(engine, 1, first=step)
        found += values(engine)
    assert found == expected and topology.snapshot(engine)["whole"] == weights
    engine.close()


def own_statistics(folder: str, save: bool) -> list[bytes]:
    engine = topology.make("3", broadcast_buffers=False)
    topology.train(engine, 2 if save else 1)
    if save:
        engine.save_checkpoint(folder)
    else:
        engine.load_checkpoint(folder)
    found = [topology.raw(buffer)[2] for buffer in engine.module.buffers()]
    engine.close()
    return found


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1)])
def test_buffers_of_every_rank_are_dealt_out_again(pools: Pools, tmp_path: Path, before: int, after: int) -> None:
    there = pools(before).run(own_statistics, str(tmp_path), True)
    here = pools(after).run(own_statistics, str(tmp_path), False)
    assert there[0] != there[1]
    assert here == [there[rank % before] for rank in range(after)]


# Another precision


def trains(folder: str, stage: str, low: bool) -> dict[str, Any]:
    engine = topology.make(stage, low)
    topology.train(engine, 2)
    engine.save_checkpoint(folder)
    found = topology.snapshot(engine)
    engine.close()
    return found


def converts(folder: str, stage: str, low: bool) -> tuple[dict[str, Any], list[str]]:
    engine = topology.make(stage, low, seed=5)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine.load_checkpoint(folder)
    found = topology.snapshot(engine)
    topology.train(engine, 1, first=2)
    engine.close()
    return found, [str(warning.message) for warning in caught]


def tensor_of(found: tuple[str, tuple[int, ...], bytes]) -> Tensor:
    name, shape, data = found
    dtype: torch.dtype = getattr(torch, name.removeprefix("torch."))
    return torch.frombuffer(bytearray(data), dtype=dtype).view(shape) if data else torch.empty(shape, dtype=dtype)


@pytest.mark.parametrize("low", [False, True], ids=["bf16 to fp32", "fp32 to bf16"])
def test_another_precision_takes_over_the_master_weights(pools: Pools, tmp_path: Path, low: bool) -> None:
    """States and masters keep their bits; the weights are the masters, rounded once. It is said what was converted."""
    before = pools(2).run(trains, str(tmp_path), "3", not low)
    after = pools(3).run(converts, str(tmp_path), "1", low)
    masters = cases.assemble([result["state"] for result in before])
    expected = dict(before[0])
    expected["whole"] = {}
    for name, was in before[0]["whole"].items():
        value, now = tensor_of(was), tensor_of(after[0][0]["whole"][name])
        master = masters.get(("embed.weight" if name == "head.weight" else name, "weight"))
        if master is not None:
            value = torch.from_numpy(master).view(value.shape)
        if name == "conv.weight":  # its master is in memory order
            value = value.view(5, 3, 3, 3).permute(0, 3, 1, 2)
        expected["whole"][name] = topology.raw(value.to(now.dtype))
    topology.assert_same([result for result, _ in after], [expected, *before[1:]])
    said = [text for text in after[0][1] if "converted" in text]
    words = "float32 to bfloat16" if low else "bfloat16 to float32"
    assert len(said) == 1 and f"embed.weight ({words})" in said[0] and not any("converted" in t for t in after[1][1])


@pytest.mark.parametrize("behind", [False, True])
def test_a_buffer_that_is_a_column(tmp_path: Path, behind: bool) -> None:
    """Elements that do not lie beside each other."""
    engine = cases.make_engine(torch.nn.BatchNorm1d(5), cases.config_of("1", checkpoint={"async_save": behind}))
    column = torch.arange(10.0).view(5, 2)[:, 1]
    engine.module._buffers["running_mean"] = column
    engine.save_checkpoint(tmp_path)
    expected = column.clone()
    column.zero_()
    engine.load_checkpoint(tmp_path)
    assert torch.equal(column, expected)
    engine.close()
