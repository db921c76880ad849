"""Optimizers that are stepped by their own class: equal to that class on whole tensors, bit for bit, at every stage."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import shardengine
from tests import oracle
from tests.support import cases, optimizer_classes
from tests.support.comparing import assert_equal_to_truth
from tests.support.covering import covering
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]
STEPS = 6


def engine_of(name: str, config: dict[str, Any], model: str = "mlp") -> shardengine.Engine:
    network = cases.MODELS[model]()
    optimizer = optimizer_classes.make(name, optimizer_classes.groups_of(network, name))
    mesh = cases.mesh_of_this_process()
    return shardengine.initialize(network, config, optimizer=optimizer, mesh=mesh)


def train(name: str, config: dict[str, Any], steps: int = STEPS) -> dict[str, Any]:
    engine = engine_of(name, config)
    result = cases.run_steps(engine, steps)
    engine.close()
    return result


@functools.lru_cache(maxsize=64)
def truth(name: str, ranks: int, micros: int, order: str, **precision: Any) -> oracle.Trace:
    network = cases.make_mlp()
    made = functools.partial(optimizer_classes.make, name), optimizer_classes.ROWS[name][2]
    return oracle.train(
        network, cases.loss_of, ranks=ranks, micros=micros, steps=STEPS, made=made,
        groups=optimizer_classes.groups_of(network, name), order=order if micros > 1 else "full",
        clip=cases.CLIP, **precision,
    )  # fmt: skip


PLACES: dict[str, dict[str, Any]] = {
    "device": {},
    "cpu": {"offload_optimizer": {"device": "cpu"}},
    "nvme": {"offload_optimizer": {"device": "nvme"}},
}


@pytest.mark.parametrize(
    ("name", "ranks", "stage", "micros", "low", "place"),
    covering(
        itertools.product(optimizer_classes.ROWS, (1, 2, 3, 4), cases.STAGES, (1, 3), (None, torch.bfloat16), PLACES)
    ),
)
def test_a_class_on_slices_equals_it_on_whole_tensors(
    pools: Pools, tmp_path: Any, name: str, ranks: int, stage: str, micros: int, low: torch.dtype | None, place: str
) -> None:
    zero = {key: {**value, "nvme_path": str(tmp_path)} if place == "nvme" else value
            for key, value in PLACES[place].items()}  # fmt: skip
    config = cases.config_of(stage, micros, zero=zero, **({"bf16": {"enabled": True}} if low else {}))
    results = pools(ranks).run(train, name, config)
    expected = truth(name, ranks, micros, cases.LETTER[stage], **({"low": low} if low else {}))
    assert_equal_to_truth(results, expected, name)
