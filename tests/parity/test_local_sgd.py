"""Shard groups that step apart (post-local SGD, gossip): the bits of the oracle, bytes by axis, and what is refused while
groups differ."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shardengine.errors import ConfigError, UsageError
from tests.parity.test_hybrid import LETTER, STAGES, counted
from tests.support import cases
from tests.support.comparing import assert_equal_to_truth
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]
STEPS, START, PERIOD = 7, 1, 2
HOOKS = {"post_local_sgd": "local"}
LOW: dict[str, Any] = {"bf16": {"enabled": True}}


def config_of(
    stage: str, size: int, micros: int, hook: tuple[str, int, int] | None, options: dict[str, Any]
) -> dict[str, Any]:
    """Of ``stage`` in shard groups of ``size``. hook: as the oracle's ``apart``."""
    zero = {"reduce_bucket_size": 600, **STAGES[stage], "shard_group_size": size, **options.get("zero", {})}
    others = {key: value for key, value in options.items() if key != "zero"}
    if hook is not None:
        others["comm_hook"] = {"name": hook[0], "params": {"start_step": hook[1], "period": hook[2]}}
    return cases.config_of("3", micros, zero=zero, **others)


def train(
    stages: list[str], size: int, micros: int, kind: str, hook: tuple[str, int, int], options: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    """Per stage what ``cases.run_steps`` gives, and whether each step's bytes were those of the formula."""
    found = {}
    for stage in stages:
        engine = cases.make_engine(cases.make_mlp(), config_of(stage, size, micros, hook, options), kind)
        exact = []

        def check(_step: int, engine: Any = engine, exact: list[bool] = exact) -> None:
            traffic = engine.traffic()
            if engine.global_steps:
                exact.append(traffic["measured_bytes_last_step"] == traffic["formula_bytes_per_step"])

        found[stage] = cases.run_steps(engine, STEPS, before=check, after=engine.average_replicas)
        assert all(exact) and len(exact) == STEPS - 1, (stage, exact)
        engine.close()
    return found


def compare(results: list[dict[str, Any]], size: int, micros: int, kind: str, hook: Any, **told: Any) -> None:
    apart = (HOOKS[hook[0]], *hook[1:])
    for stage in results[0]:
        truth = cases.truth("mlp", kind, len(results), micros, LETTER[stage], STEPS, inside=size, apart=apart, **told)
        assert_equal_to_truth([result[stage] for result in results], truth, f"stage {stage}")


@pytest.mark.parametrize("micros", [1, 2])
@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
@pytest.mark.parametrize(("ranks", "size"), [(2, 1), (3, 1), (4, 2)])
@pytest.mark.parametrize("name", HOOKS)
def test_bits(pools: Pools, name: str, ranks: int, size: int, kind: str, micros: int) -> None:
    hook = (name, START, PERIOD)
    results = pools(ranks).run(train, list(STAGES), size, micros, kind, hook, {})
    compare(results, size, micros, kind, hook)
