"""A group is measured at ``initialize``: one fit on all ranks, sizes that follow from it, and no other bit."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest

from shardengine.comm import group_speed
from shardengine.comm.group_speed import LEAST_LATENCY_S, LEAST_S_PER_BYTE, fit
from shardengine.core import assembly
from tests.support import cases
from tests.support.comparing import assert_equal_to_truth
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]
AUTO = {"reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto"}


def test_the_fit_is_the_line_through_the_least_disturbed_times() -> None:
    alpha, beta, sizes = 2e-4, 1e-9, (1000, 4_000_000)
    exact = [alpha + beta * size for size in sizes]
    disturbed = [exact[0] + 1.0, exact[1] + 5.0, *exact, *exact]
    found = fit([disturbed, [0.0] * 6], sizes)
    assert math.isclose(found.latency_s, alpha) and math.isclose(found.s_per_byte, beta)
    assert fit([[0.0, 0.0]], sizes) == (LEAST_LATENCY_S, LEAST_S_PER_BYTE)


def test_a_collective_lasts_as_long_as_its_slowest_rank() -> None:
    found = fit([[1e-3, 2e-3], [2e-3, 9e-3]], (0, 7))
    assert found.latency_s == 2e-3 and math.isclose(found.s_per_byte, 1e-3)


def begin(stage: str) -> tuple[Any, ...]:
    engine = cases.make_engine(cases.make_mlp(), cases.config_of(stage, zero=AUTO), "AdamW")
    sizes, zero = engine._core.sizes, engine.config.zero_optimization
    counted = {purpose.value: size for purpose, size in engine._core.collectives.sent.items()}
    found = tuple(sizes.reduction or ()), tuple(sizes.gather or ()), zero.reduce_bucket_size, len(engine.tuning())
    kept = zero.stage3_prefetch_bucket_size
    engine.close()
    return (*found, kept, {name: size for name, size in counted.items() if name.startswith("gradients")})


@pytest.mark.parametrize(("ranks", "stage"), [(2, "0"), (3, "2"), (2, "3"), (4, "3k")])
def test_every_rank_has_the_same_fit(pools: Pools, ranks: int, stage: str) -> None:
    found = pools(ranks).run(begin, stage)
    assert all(each == found[0] for each in found)
    reduction, gather, bucket, sentences, prefetch, gradients = found[0]
    assert reduction and reduction[0] >= LEAST_LATENCY_S and reduction[1] >= LEAST_S_PER_BYTE
    assert bool(gather) == stage.startswith("3") and sentences == 2
    assert isinstance(bucket, int) and isinstance(prefetch, int) and bucket >= 262_144 and not gradients


def refuse(*_: Any) -> Any:
    raise AssertionError("measured")


def test_one_rank_measures_nothing() -> None:
    with mock.patch.object(group_speed, "_measure", refuse):
        found = begin("3")
    assert found[:3] == ((), (), 12_500_000) and found[4] == 12_500_000


def train_as(elements: int, stage: str) -> Any:
    """With a choice so small that it cuts."""
    with mock.patch.object(assembly, "bucket_elements", lambda *_, **__: elements):
        return cases.train_engine("mlp", "AdamW", cases.config_of(stage, zero=AUTO))


@pytest.mark.parametrize("stage", list(cases.STAGES))
@pytest.mark.parametrize("elements", [64, 1000])
def test_the_choice_changes_no_bit(pools: Pools, stage: str, elements: int) -> None:
    assert_equal_to_truth(pools(2).run(train_as, elements, stage), cases.truth("mlp", "AdamW", 2, 1, "full"))
