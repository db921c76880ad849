"""state_dict and load_state_dict of engine and optimizer: training goes on from them as from a checkpoint, bit for bit.

At any stage, number of ranks, precision and tier; torch.distributed.checkpoint's functions are given the same.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions

from shardengine import Engine
from tests.support import cases
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]
dcp: Any = torch.distributed.checkpoint
theirs: Any = torch.distributed.checkpoint.state_dict
BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 6, "loss_scale_window": 2}}
SMALL, LARGE = {"reduce_bucket_size": 200}, {"reduce_bucket_size": 4096}


def tier(device: str, folder: str) -> dict[str, Any]:
    place = {"nvme_path": folder, "buffer_count": 3} if device == "nvme" else {}
    return {"offload_optimizer": {"device": device, **place}} if device != "device" else {}


def make(stage: str, kind: str, zero: dict[str, Any], **options: Any) -> Engine:
    return cases.make_engine(cases.make_mlp(), cases.config_of(stage, zero=zero, **options), kind)


def train(engine: Engine, first: int, last: int) -> None:
    for step in range(first, last):
        engine.backward(cases.loss_of(engine, step, engine.rank, 0))
        engine.step()


def both(engine: Engine) -> tuple[dict[str, Any], dict[str, Any]]:
    assert engine.optimizer is not None
    return engine.state_dict(), engine.optimizer.state_dict()


def take(engine: Engine, weights: dict[str, Any], states: dict[str, Any]) -> None:
    assert engine.optimizer is not None
    engine.load_state_dict(weights)
    engine.optimizer.load_state_dict(states)


def packed(found: Any) -> bytes:
    file = io.BytesIO()
    torch.save(found, file)
    return file.getvalue()


def unpacked(found: bytes) -> Any:
    return torch.load(io.BytesIO(found), weights_only=True)


def assert_same(ours: Any, other: Any, where: str = "") -> None:
    assert type(ours) is type(other), where
    if isinstance(ours, dict):
        assert list(ours) == list(other), (where, list(ours), list(other))
        for key in ours:
            assert_same(ours[key], other[key], f"{where}.{key}")
    elif isinstance(ours, list | tuple):
        assert len(ours) == len(other), where
        for number, (one, two) in enumerate(zip(ours, other, strict=True)):
            assert_same(one, two, f"{where}[{number}]")
    elif isinstance(ours, Tensor):
        assert ours.dtype == other.dtype and torch.equal(ours, other), where
    else:
        assert ours == other, where


WAYS: dict[str, tuple[str, str, str, dict[str, Any], str, str]] = {
    "0 to 3": ("0", "3", "AdamW", {}, "device", "device"),
    "3 to 0, bf16": ("3", "0", "AdamW", BF16, "device", "device"),
    "1 to 3k, bf16, cpu": ("1", "3k", "AdamW", BF16, "cpu", "device"),
    "2 to 3, nvme": ("2", "3", "AdamW", {}, "device", "nvme"),
    "3k to 2, bf16, nvme": ("3k", "2", "AdamW", BF16, "nvme", "cpu"),
    "3 to 1, SGD, cpu": ("3", "1", "SGD", {}, "device", "cpu"),
    "2 to 3, Lion, bf16": ("2", "3", "Lion", BF16, "cpu", "nvme"),
    "3 to 2, fp16": ("3", "2", "Adam", FP16, "device", "device"),
}
"""Name → from which stage, to which, the optimizer, precision, the tiers."""


def goes_on(folder: str) -> None:
    """Two steps, dicts, another engine for the next two: as four steps in one go."""
    for name, (first, second, kind, options, tier_before, tier_after) in WAYS.items():
        whole = make(first, kind, SMALL | tier(tier_before, folder), **options)
        train(whole, 0, 2)
        weights, states = both(whole)
        assert bool(weights) == bool(states) == (whole.rank == 0), "rank 0 has them"
        train(whole, 2, 4)
        expected = both(whole)
        whole.close()
        after = make(second, kind, LARGE | tier(tier_after, folder), **options)
        train(after, 5, 6)  # what it has is replaced
        take(after, weights, states)
        assert_same(both(after), (weights, states), f"{name}: loaded")
        train(after, 2, 4)
        assert_same(both(after), expected, name)
        assert cases.steps_of(after) == [4] * len(cases.steps_of(after)) or kind in ("SGD", "Lion")
        after.close()


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_another_engine_goes_on_from_dicts(pools: Pools, ranks: int, tmp_path: Path) -> None:
    pools(ranks).run(goes_on, str(tmp_path))


def writes(folder: str, options: dict[str, Any]) -> bytes:
    engine = make("3", "AdamW", SMALL, **options)
    train(engine, 0, 2)
    found = both(engine)
    engine.save_checkpoint(folder)
    engine.close()
    return packed(found)


def reads(folder: str, options: dict[str, Any], given: bytes, everywhere: bool) -> None:
    """As from the checkpoint of the same moment; every rank has the dicts, or rank 0 alone."""
    results = []
    for stage in cases.STAGES:
        for way in ("checkpoint", "dicts"):
            engine = make(stage, "AdamW", LARGE, **options)
            if way == "checkpoint":
                engine.load_checkpoint(folder)
            elif everywhere or engine.rank == 0:
                take(engine, *unpacked(given))
            else:
                take(engine, {}, {})
            train(engine, 2, 4)
            results.append(both(engine))
            engine.close()
        assert_same(results[-1], results[-2], f"stage {stage}")


@pytest.mark.parametrize("options", [{}, BF16], ids=["fp32", "bf16"])
def test_another_number_of_ranks_goes_on_as_from_a_checkpoint(
    pools: Pools, options: dict[str, Any], tmp_path: Path
) -> None:
    given = pools(2).run(writes, str(tmp_path), options)[0]
    pools(1).run(reads, str(tmp_path), options, given, True)
    pools(3).run(reads, str(tmp_path), options, given, everywhere=bool(options))


# torch.distributed.checkpoint

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


def asks_torch(folder: str) -> None:
    """Its functions give what state_dict gives, by names, and take no step; another engine takes over from them."""
    for stage, options in (("0", {}), ("2", {}), ("3", BF16)):
        engine = make(stage, "AdamW", SMALL, **options)
        optimizer, place = engine.optimizer, f"{folder}/{stage}-{engine.world_size}"
        assert optimizer is not None
        unstepped = theirs.get_optimizer_state_dict(engine.module, optimizer)
        assert all(
            not value.any() for each in unstepped["state"].values() for k, value in each.items() if k != "master"
        )
        assert engine.global_steps == 0 and bool(optimizer.state_dict().get("state")) == bool(
            options and not engine.rank
        )
        train(engine, 0, 2)
        weights, states = both(engine)
        names = [name for name, _ in engine.module.named_parameters()]
        order = [p for group in optimizer.param_groups for p in group["params"]]
        numbers = {name: next(i for i, p in enumerate(order) if p is q) for name, q in engine.module.named_parameters()}
        for found in (
            theirs.get_optimizer_state_dict(engine, optimizer, options=FULL),
            theirs.get_optimizer_state_dict(engine.module, optimizer, options=StateDictOptions(full_state_dict=True)),
            theirs.get_state_dict(engine, optimizer, options=FULL)[1],
        ):
            for name in names if found and engine.rank == 0 else ():
                assert_same(found["state"][name], states["state"][numbers[name]], name)
        assert_same(dict(theirs.get_model_state_dict(engine, options=FULL)), dict(weights))
        with engine.full_params():
            model = {k: v.clone() for k, v in theirs.get_model_state_dict(engine.module).items()}
        dcp.save(
            {"model": model, "optim": theirs.get_optimizer_state_dict(engine.module, optimizer)}, checkpoint_id=place
        )
        train(engine, 2, 3)
        expected = both(engine)
        engine.close()
        assert_goes_on(place, "3" if stage == "0" else "1", options, expected)


def assert_goes_on(place: str, stage: str, options: dict[str, Any], expected: Any = None) -> Any:
    engine = make(stage, "AdamW", LARGE, **options)
    assert engine.optimizer is not None
    with engine.full_params():
        model = {k: v.clone() for k, v in theirs.get_model_state_dict(engine.module).items()}
    states = theirs.get_optimizer_state_dict(engine.module, engine.optimizer)
    dcp.load({"model": model, "optim": states}, checkpoint_id=place)
    with engine.full_params(writable=True):
        theirs.set_model_state_dict(engine.module, model)
    theirs.set_optimizer_state_dict(engine.module, engine.optimizer, states)
    loaded = both(engine)
    engine.load_state_dict({name: torch.zeros_like(value) for name, value in loaded[0].items()})
    everywhere = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    theirs.set_model_state_dict(engine, loaded[0], options=everywhere)
    theirs.set_optimizer_state_dict(engine.module, engine.optimizer, states)
    assert_same(both(engine), loaded)
    train(engine, 2, 3)
    after = both(engine)
    engine.close()
    if expected is not None:
        assert_same(after, expected)
    return packed(loaded)


def test_torchs_functions_give_and_take_the_same(pools: Pools, tmp_path: Path) -> None:
    for ranks in (2, 1):
        pools(ranks).run(asks_torch, str(tmp_path))
    at_three = pools(3).run(assert_goes_on, f"{tmp_path}/3-2", "2", BF16)[0]
    at_one = pools(1).run(assert_goes_on, f"{tmp_path}/3-2", "3k", BF16)[0]
    assert_same(unpacked(at_three), unpacked(at_one), "whatever the number of ranks")
