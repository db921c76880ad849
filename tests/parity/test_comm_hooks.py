"""Communication hooks: the bits of the oracle at every stage, whatever the buckets; bytes on the wire; convergence of
what is lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.support import cases
from tests.support.comparing import assert_equal_to_truth
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]
STEPS = 4
HOOKS: dict[str, tuple[str, bool]] = {
    "fp16": ("fp16", False),
    "bf16 with error feedback": ("bf16", True),
    "int8": ("int8", True),
    "int8 without error feedback": ("int8", False),
    "int4": ("int4", True),
}


def train(
    stages: list[str], hook: tuple[str, bool], micros: int, kind: str, zero: dict[str, Any], options: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    """Per stage what ``cases.run_steps`` gives."""
    said = {"comm_hook": {"name": hook[0], "params": {"error_feedback": hook[1]}}}
    found = {}
    for stage in stages:
        config = cases.config_of(stage, micros, zero={"reduce_bucket_size": 600, **zero}, **said, **options)
        engine = cases.make_engine(cases.make_mlp(), config, kind)
        found[stage] = {**cases.run_steps(engine, STEPS), "traffic": engine.traffic()}
        engine.close()
    return found


def check(results: list[dict[str, Any]], hook: tuple[str, bool], micros: int, kind: str, **told: Any) -> None:
    for stage in results[0]:
        truth = cases.truth("mlp", kind, len(results), micros, cases.LETTER[stage], STEPS, coding=hook, **told)
        for result in results:
            traffic = result[stage].pop("traffic")
            assert traffic["measured_bytes_last_step"] == traffic["formula_bytes_per_step"], stage
        assert_equal_to_truth([result[stage] for result in results], truth, f"stage {stage}")


@pytest.mark.parametrize("micros", [1, 3])
@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", HOOKS)
def test_bits(pools: Pools, name: str, ranks: int, kind: str, micros: int) -> None:
    check(pools(ranks).run(train, list(cases.STAGES), HOOKS[name], micros, kind, {}, {}), HOOKS[name], micros, kind)


@pytest.mark.parametrize("micros", [1, 3])
@pytest.mark.parametrize("name", HOOKS)
def test_hybrid_meshes(pools: Pools, name: str, micros: int) -> None:
    """What travels across is coded once more."""
    results = pools(4).run(train, list(cases.HYBRID), HOOKS[name], micros, "AdamW", {}, {})
    check(results, HOOKS[name], micros, "AdamW", inside=2)


@pytest.mark.parametrize("zero", [{"reduce_bucket_size": 100_000}, {"reduce_bucket_size": 1}])
@pytest.mark.parametrize("overlap", [True, False])
def test_buckets_and_overlap_change_no_bit(pools: Pools, zero: dict[str, Any], overlap: bool) -> None:
    hook = ("int4", True)
    results = pools(3).run(train, ["0", "2", "3"], hook, 3, "AdamW", zero, {"overlap_comm": overlap})
    check(results, hook, 3, "AdamW")
