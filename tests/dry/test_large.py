"""A model of 70e9 parameters on 64 ranks, without memory: what is whole at one moment, what is sent and how often."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

import shardengine
from benchmarks.host_layouts import LAYOUTS, Model, Shapes
from tests.support.cases import STAGES
from tests.support.dry_run import META, Border, DryPlatform, Log, SilentWire, dry_mesh

RANKS, MICROS, BF16 = 64, 2, 2
SHAPE = LAYOUTS["Llama 70B"]
BUCKET, AHEAD = 100_000_000, 12_500_000


def elements(shapes: Shapes) -> int:
    return sum(torch.Size(shape).numel() for shape in shapes.values())


BLOCK, FIRST, LAST = (elements(shapes) for shapes in (SHAPE.block, SHAPE.first, SHAPE.last))
ALL = FIRST + SHAPE.layers * BLOCK + LAST


class Watched(SilentWire):
    """Counts, at each collective, the bytes of whole weights that are there."""

    engine: shardengine.Engine | None = None
    peak = 0

    def _begin(self, name: str, group: Any, *tensors: Tensor) -> Any:
        if self.engine is not None:
            units = self.engine._core.units
            self.peak = max(self.peak, sum(flat.storage_bytes for unit in units for flat in unit.flat_buffers))
        return super()._begin(name, group, *tensors)


def train(stage: str) -> tuple[shardengine.Engine, Watched, list[Counter[tuple[str, str]]]]:
    """An engine after two steps, and the collectives of each."""
    wire, log = Watched(RANKS), Log()
    mesh = dry_mesh(RANKS, RANKS // 2, wire=wire, platform=lambda device: DryPlatform(device, log))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": MICROS,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {
            **STAGES[stage], "reduce_bucket_size": BUCKET, "stage3_prefetch_bucket_size": AHEAD,
            "recut_buckets": False,
        },
    }  # fmt: skip
    issued = []
    with Border(log):
        engine = wire.engine = shardengine.initialize(Model(SHAPE), config, mesh=mesh)
        for _ in range(2):
            wire.issued.clear()
            wire.peak = 0
            for _ in range(MICROS):
                engine.backward(engine(torch.zeros((), device=META, requires_grad=True)))
                engine.step()
            issued.append(Counter(wire.issued))
    return engine, wire, issued


@pytest.mark.parametrize("stage", ["2", "3k", "3"])
def test_weights_that_are_whole_and_collectives(stage: str) -> None:
    """docs/limits.md, by hand: "Bytes sent per rank and optimizer step", and the live window of "Memory"."""
    engine, wire, (first, later) = train(stage)
    whole = {"2": ALL, "3k": ALL, "3": 2 * max(FIRST, BLOCK, LAST)}[stage]  # "3": at work, and as much ahead
    assert wire.peak <= BF16 * whole
    assert wire.peak > BF16 * whole * 0.9, "the window is counted"
    if stage != "2":
        shards = [bucket.weight_store for unit in engine._core.units for bucket in unit.buckets()]
        assert sum(sum(store.sizes.values()) for store in shards if store is not None) == BF16 * ALL // RANKS
        assert engine.memory()["live_window_bytes"] == BF16 * whole

    twice = ALL - LAST  # the unit that forward ends with waits for its backward
    weights = {"2": ALL, "3k": MICROS * ALL, "3": MICROS * (2 * twice + LAST)}[stage]
    sent = BF16 * (weights + MICROS * ALL) * (RANKS - 1) // RANKS
    assert engine.traffic()["measured_bytes_last_step"] == sent

    units = [len(list(unit.buckets())) for unit in engine._core.units]
    buckets, last = sum(units), units[-1]
    assert ALL / BUCKET <= buckets <= 1.2 * ALL / BUCKET
    gathers = {"2": buckets, "3k": MICROS * buckets, "3": MICROS * (2 * (buckets - last) + last)}[stage]
    assert later == {
        ("all_gather", "gather"): gathers + 1,  # and the norm
        ("all_to_all", "reduce"): MICROS * buckets,
        ("all_gather", "control"): 1,
    }
    assert first == later + Counter({("all_gather", "control"): 2})  # the order of buckets, in two frames
