"""``managed_gradient_accumulation`` false: every ``step()`` ends the window, equal to the oracle bit for bit."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from shardengine.errors import UsageError
from tests import oracle
from tests.support import cases
from tests.support.comparing import assert_equal_to_truth
from tests.support.covering import covering
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]
STEPS = 3, 1, 2, 3
"""Micro-batches of each step; losses are divided by the largest."""
TIERS: dict[str, dict[str, Any]] = {"device": {}, "cpu": {"offload_optimizer": {"device": "cpu"}}}
ALL = itertools.product((1, 2, 3), cases.STAGES, TIERS, ("engine", "loss"))


def train(config: dict[str, Any], way: str) -> tuple[dict[str, Any], list[int]]:
    engine: Any = cases.make_engine(cases.make_mlp(), config)

    def micro_batch(engine: Any, loss_of: Any, step: int, micro: int) -> float:
        if micro >= STEPS[step]:
            return 0.0
        loss = loss_of(engine, step, engine.rank, micro)
        assert not engine.is_gradient_accumulation_boundary()
        if way == "engine":
            engine.backward(loss)
        else:
            (loss / max(STEPS)).backward()
        if micro + 1 == STEPS[step]:
            engine.step()
        return float(loss.item())

    result = cases.run_steps(engine, len(STEPS), run=micro_batch)
    with pytest.raises(UsageError, match="set_gradient_accumulation_boundary: expected no call"):
        engine.set_gradient_accumulation_boundary(True)
    counts = [engine.global_steps, engine.global_samples]
    engine.close()
    return result, counts


@pytest.mark.parametrize(("ranks", "stage", "tier", "way"), covering(ALL, 2))
def test_the_callers_step_ends_the_window(pools: Pools, ranks: int, stage: str, tier: str, way: str) -> None:
    config = cases.config_of(stage, max(STEPS), zero=TIERS[tier], managed_gradient_accumulation=False)
    results = pools(ranks).run(train, config, way)
    model = cases.make_mlp()
    truth = oracle.train(
        model, cases.loss_of, ranks=ranks, micros=max(STEPS), steps=len(STEPS), groups=cases.groups_of(model, "AdamW"),
        order=cases.LETTER[stage], clip=cases.CLIP, has=lambda step, _rank, micro: micro < STEPS[step],
    )  # fmt: skip
    assert_equal_to_truth([result for result, _ in results], truth, stage)
    assert results[0][1] == [len(STEPS), sum(STEPS) * ranks]
