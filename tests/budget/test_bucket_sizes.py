"""Sizes of buckets for "auto": the formulas of docs/limits.md, and what a config says afterwards."""

from __future__ import annotations

import math

import pytest

from shardengine.budget import BucketSizes, bucket_elements, prefetch_elements, settled
from shardengine.budget.bucket_sizes import HIDDEN_BY_CPU, HOST_S, LEAST_ELEMENTS, MOST_ELEMENTS
from shardengine.comm import GroupSpeed
from shardengine.config import load_config
from shardengine.errors import InternalError

BATCH = {"train_micro_batch_size_per_gpu": 2}
GLOO, NCCL = GroupSpeed(4e-4, 5e-10), GroupSpeed(3e-5, 1 / 50e9)


@pytest.mark.parametrize("speed", [GLOO, NCCL])
@pytest.mark.parametrize("elements", [10**7, 63 * 10**6, 8 * 10**9])
@pytest.mark.parametrize("apart", [True, False])
def test_no_other_size_costs_less(speed: GroupSpeed, elements: int, apart: bool) -> None:
    size, most = 4 * elements, min(MOST_ELEMENTS, elements)

    def cost(bucket: int) -> float:
        return size / (4 * bucket) * (speed.latency_s + HOST_S) + hidden * speed.s_per_byte * 4 * bucket

    hidden = 1 if apart else HIDDEN_BY_CPU
    found = bucket_elements(speed, elements, 4, apart=apart)
    others = [LEAST_ELEMENTS * 2**power for power in range(20) if LEAST_ELEMENTS * 2**power <= most]
    assert found <= most + 65_536 and all(cost(found) <= cost(other) * 1.01 for other in others)


def test_sizes_have_bounds_and_steps() -> None:
    assert bucket_elements(GLOO, 1000, 4) == LEAST_ELEMENTS
    assert bucket_elements(GroupSpeed(1.0, 1e-12), 10**10, 2) == round(MOST_ELEMENTS / 65_536) * 65_536
    assert bucket_elements(GLOO, 10**8, 4) == bucket_elements(GroupSpeed(4.01e-4, 5e-10), 10**8, 4)


def test_as_much_is_gathered_ahead_as_a_latency_hides() -> None:
    ahead = prefetch_elements(GLOO, 4)
    assert math.isclose(4 * ahead * GLOO.s_per_byte, GLOO.latency_s + HOST_S, rel_tol=0.2)
    assert prefetch_elements(GroupSpeed(1e-6, 1e-6), 4) == 65_536  # one unit, however large


def test_numbers_take_the_place_of_auto_alone() -> None:
    config = load_config({**BATCH, "zero_optimization": {"reduce_bucket_size": "auto"}})
    with pytest.raises(InternalError, match="auto"):
        settled(config.zero_optimization.reduce_bucket_size)
    sizes = BucketSizes(reduce=70, reduction=GLOO)
    found = sizes.put_into(config)
    assert settled(found.zero_optimization.reduce_bucket_size) == 70
    assert found.zero_optimization.stage3_prefetch_bucket_size == 12_500_000
    assert found.sources["zero_optimization.reduce_bucket_size"] == "derived"
    assert sizes.sentences() == ["reduce_bucket_size auto: 70 elements (reductions take 400 µs + 2.00 GB/s)"]
    assert BucketSizes().put_into(config) is config and BucketSizes().sentences() == []
    assert BucketSizes(reduce=5).sentences() == ["reduce_bucket_size auto: 5 elements (the default, of one rank)"]
