"""What ``initialize`` needs at most while it places the weights, counted from outside after every operation of torch.

Owns: the peak of that time. What rests afterwards is ``test_memory*.py``'s.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import shardengine
from tests.stages.test_memory import (
    BLOCK_PARAMETERS,
    BUCKET,
    FLOAT,
    WIDTH,
    elements_of,
    live_storages,
    make_tower,
    only_new_tensors,
)
from tests.support import cases
from tests.support.ranks import RankPool
from tests.support.sizes import padded

Pools = Callable[[int], RankPool]

# one bucket in fp32, this rank's slice of it once more on its way to its store, and small tensors
BUCKET_BYTES = 2 * BUCKET * FLOAT + 1024
# the parameter that lies in several buckets, and those that end in the bucket at work
LARGEST = (WIDTH * WIDTH + BUCKET) * FLOAT


class Peak(TorchDispatchMode):
    """The most bytes at one moment: of all tensors, and of those that are not among ``given``."""

    def __init__(self, given: set[int]) -> None:
        super().__init__()
        self._given = given
        self.all = self.new = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        live = live_storages()
        self.all = max(self.all, sum(live.values()))
        self.new = max(self.new, sum(size for key, size in live.items() if key not in self._given))
        return result


def place_and_count(chosen: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """Per config the peak of ``initialize``: of all tensors, and without those that the model came with."""
    peaks = []
    for config in chosen:
        with only_new_tensors():
            model = make_tower()
            peak = Peak(set(live_storages()))
            with peak:
                stateless = torch.optim.SGD(model.parameters(), 0.1)  # nothing begins once all weights are placed
                engine = shardengine.initialize(model, config, optimizer=stateless, mesh=cases.mesh_of_this_process())
            engine.close()
            del engine, model
            gc.collect()
        peaks.append((peak.all, peak.new))
    return peaks


def weights_of(stage: str, ranks: int, size: int) -> int:
    """Bytes of weights while they are placed: what rests, and where they are sharded one whole unit."""
    whole = elements_of(stage, ranks, size) * size
    return whole // ranks + padded(BLOCK_PARAMETERS, ranks, size) * size if stage == "3" else whole


@pytest.mark.parametrize("low", [False, True])
def test_no_more_than_what_rests_and_one_bucket(pools: Pools, low: bool) -> None:
    """Beside what the model came with; and of that no more than what is not in its place yet."""
    ranks, stages, size = 2, ["0", "1", "2", "3"], 2 if low else 4
    options: dict[str, Any] = {"bf16": {"enabled": True}} if low else {}
    chosen = [cases.config_of(stage, zero={"reduce_bucket_size": BUCKET}, **options) for stage in stages]
    for peaks in pools(ranks).run(place_and_count, chosen):
        for stage, (everything, new) in zip(stages, peaks, strict=True):
            elements = elements_of(stage, ranks, size)
            share = 1 if stage == "0" else ranks
            masters = elements * FLOAT // share if low else 0
            weights = weights_of(stage, ranks, size)
            assert new <= weights + masters + BUCKET_BYTES, f"stage {stage}: {new}"
            came = elements_of("2", 1) * FLOAT  # and masters take its place
            assert everything <= weights + max(came, masters) + LARGEST + BUCKET_BYTES, f"stage {stage}: {everything}"
