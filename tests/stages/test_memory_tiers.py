"""Model state per tier is the formula, counted by walking all live tensors and by the file that is there.

A device that is a CPU has its own memory and the host's in one place: what is alive is compared with the sum, and what
the engine says of each tier with its own formula.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import shardengine
from shardengine import Engine
from shardengine.comm import mesh as mesh_module
from shardengine.offload import Platform
from shardengine.offload.host_memory import HUGE_PAGE
from tests.stages.test_memory import (
    FLOAT,
    config_of,
    elements_of,
    live_storages,
    make_tower,
    only_new_tensors,
    spare_bytes,
)
from tests.support import cases
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]
RANKS, STEPS = 2, 3
BUFFERS = 3
STATE = 3 * FLOAT
"""Bytes per element of what is away: master weight and two moments."""


@dataclass(frozen=True)
class Formula:
    """Bytes per rank when gradients are complete (docs/limits.md), with the part ``ratio`` of the buckets away."""

    device: int
    host: int
    disk: int

    @staticmethod
    def of(stage: str, place: str, away: int, whole: int) -> Formula:
        """away, whole: elements of the buckets that are away, and of all."""
        stays = whole - away
        slices = 1 if stage == "0" else RANKS
        weights = (whole // RANKS if stage.startswith("3") else whole) * FLOAT
        full = stage in ("0", "1")
        gradients = (stays if full else stays // RANKS) * FLOAT + (away * FLOAT if stage == "0" else 0)
        moved = 0 if stage == "0" else away // RANKS * FLOAT
        state = away // slices * STATE
        return Formula(
            device=weights + gradients + stays // slices * 2 * FLOAT,
            host=moved + (state if place == "cpu" else 0),
            disk=state if place == "nvme" else 0,
        )


def byte_storages() -> int:
    """Bytes of the buffers between memory and disk that are alive."""
    found = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), Tensor) and thing.dtype is torch.uint8 and thing.untyped_storage().nbytes() >= 4096:
            found[thing.untyped_storage()._cdata] = thing.untyped_storage().nbytes()
    return sum(found.values())


def count(chosen: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Per config and step: what is alive with complete gradients, what of it is spare, what the engine says."""
    found = []
    for config in chosen:
        rows = []
        with only_new_tensors():
            engine = cases.make_engine(make_tower(), config)
            for _ in range(STEPS):
                for _ in range(engine.gradient_accumulation_steps()):
                    loss = engine(torch.randn(2, 7)).square().mean()
                    engine.backward(loss)
                    del loss
                    live, spare = sum(live_storages().values()), spare_bytes(engine)
                    engine.step()
                rows.append(
                    {"live": live, "spare": spare, "buffers": byte_storages(), **engine.memory(), **away(engine)}
                )
            rows[-1]["on disk"] = sum(file.stat().st_blocks * 512 for file in engine._core.tiers.files)
            engine.close()
            del engine
            gc.collect()
        found.append(rows)
    return found


def away(engine: Engine) -> dict[str, float]:
    """Elements of the buckets that are away, and how many buckets there are."""
    buckets = [state.bucket for state in engine._core.reducer.buckets]
    return {"away": sum(bucket.layout.length for bucket in buckets if bucket.state_store.away), "buckets": len(buckets)}


@pytest.mark.parametrize("micros", [1, 3])
def test_bytes_of_every_tier_are_the_formula(pools: Pools, tmp_path: Path, micros: int) -> None:
    places: dict[str, dict[str, Any]] = {
        "cpu": {"device": "cpu"},
        "cpu, a part": {"device": "cpu", "ratio": 0.4},
        "nvme": {"device": "nvme", "nvme_path": str(tmp_path), "buffer_count": BUFFERS},
    }
    cells = [(stage, name) for stage in (cases.STAGES if micros == 1 else ("1", "2")) for name in places]
    chosen = []
    for stage, name in cells:
        config = config_of(stage, micros=micros)
        config["zero_optimization"]["offload_optimizer"] = places[name]
        chosen.append(config)
    for result in pools(RANKS).run(count, chosen):
        for (stage, name), rows in zip(cells, result, strict=True):
            whole = elements_of(stage, RANKS)
            first = rows[0]
            part = first["away"] / whole
            assert part == 1 if "part" not in name else 0.3 < part < 0.5, (stage, name, part)
            formula = Formula.of(stage, name.split(",")[0], first["away"], whole)
            for row in rows:
                assert row["predicted_model_state_bytes"] == row["measured_model_state_bytes"] == formula.device
                assert row["predicted_host_bytes"] == row["measured_host_bytes"] == formula.host, (stage, name)
                assert row["predicted_disk_bytes"] == row["measured_disk_bytes"] == formula.disk, (stage, name)
                assert row["live"] == formula.device + formula.host + row["spare"], (stage, name)
                assert row["buffers"] <= row["tier_buffer_bytes"]
                assert row["tier_buffer_bytes"] == (BUFFERS * HUGE_PAGE if name == "nvme" else 0), (stage, name)
            if name == "nvme":
                assert formula.disk <= rows[-1]["on disk"] <= formula.disk + rows[-1]["buckets"] * 2 * 4096


@pytest.mark.parametrize("stage", ["3k", "3"])
def test_weights_rest_in_their_tier_alone(pools: Pools, tmp_path: Path, stage: str) -> None:
    """fp32: with all on the host the weights that rest there are stepped themselves, on disk they have a copy."""
    disk = {"device": "nvme", "nvme_path": str(tmp_path), "buffer_count": BUFFERS}
    host = {"device": "cpu"}
    share = elements_of(stage, RANKS) // RANKS * FLOAT
    cells = {
        "weights": ({"offload_param": host}, Formula(device=3 * share, host=share, disk=0), 0),
        "all on the host": ({"offload_param": host, "offload_optimizer": host}, Formula(0, 4 * share, 0), 0),
        "all on disk": ({"offload_param": disk, "offload_optimizer": disk}, Formula(0, share, 4 * share), 2 * BUFFERS),
    }
    chosen = []
    for places, _, _ in cells.values():
        config = config_of(stage)
        config["zero_optimization"] |= places
        chosen.append(config)
    for result in pools(RANKS).run(count, chosen):
        for (name, (_, formula, buffers)), rows in zip(cells.items(), result, strict=True):
            for row in rows:
                assert row["predicted_model_state_bytes"] == row["measured_model_state_bytes"] == formula.device, name
                assert row["predicted_host_bytes"] == row["measured_host_bytes"] == formula.host, name
                assert row["predicted_disk_bytes"] == row["measured_disk_bytes"] == formula.disk, name
                assert row["live"] == formula.device + formula.host + row["spare"], name
                assert row["buffers"] <= row["tier_buffer_bytes"] == buffers * HUGE_PAGE, name


def engine_on_the_host(**options: Any) -> Engine:
    return cases.make_engine(
        cases.make_mlp(), cases.config_of("2", zero={"offload_optimizer": {"device": "cpu", **options}})
    )


def test_gradients_that_are_set_aside_lie_with_those_that_are_complete() -> None:
    engine = engine_on_the_host()
    engine.backward(cases.loss_of(engine, 0, 0, 0))
    complete, seen = engine._core.reducer.gradient_bytes(), []
    assert complete["cpu"] and not complete["device"]
    loss = cases.loss_of(engine, 1, 0, 0)
    loss.register_hook(lambda _: seen.append(engine._core.reducer.gradient_bytes()))
    engine.backward(loss)
    assert seen == [complete]


def test_buffers_in_host_memory_are_not_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_on_the_host()
    engine.backward(cases.loss_of(engine, 0, 0, 0))
    engine.step()
    before = engine.memory()
    assert before["buffer_bytes"] > 0 == before["host_buffer_bytes"]
    monkeypatch.setattr(Platform, "has_own_memory", True)
    engine._core.pool.acquire(10, torch.float32, on_host=True)
    after = engine.memory()
    assert after["buffer_bytes"] == before["buffer_bytes"] and after["host_buffer_bytes"] == 40
    engine._core.pool.clear()
    assert engine.memory()["buffer_bytes"] == 0, "what was not taken is free"


def test_nothing_is_page_locked_for_a_device_without_memory_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where there is a GPU: page-locked memory is slow to make, and taken from the whole machine."""
    mesh = mesh_module.build(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    tier = {"device": "cpu", "pin_memory": True}
    places = {"offload_optimizer": {**tier, "ratio": 0.5}, "offload_param": tier}
    config = cases.config_of("3", zero={"reduce_bucket_size": 600, **places})
    model = cases.make_mlp()
    engine = shardengine.initialize(model, config, optimizer=cases.make_optimizer(model, "AdamW"), mesh=mesh)
    buckets = [state.bucket for state in engine._core.reducer.buckets]
    stores = [store for unit in engine._core.units for store in unit.stores()]
    assert len(stores) == 2 * len(buckets) and {store.away for store in stores} == {True, False}
    engine.offload_states(pin_memory=True)
    assert not any(tensor.is_pinned() for store in stores for tensor in store.tensors().values())
    engine.close()
