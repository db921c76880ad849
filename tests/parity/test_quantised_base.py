"""Adapters on a frozen base that stays quantised: equal to plain torch on one process, at every stage."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests import oracle
from tests.support import cases, quantised
from tests.support.comparing import assert_equal_to_truth
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]
STEPS = 4
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TIERS: dict[str, dict[str, Any]] = {
    "": {},
    "cpu": {"offload_param": {"device": "cpu"}},
    "nvme": {"offload_param": {"device": "nvme"}},
}


def train(dtype: str, stage: str, micros: int, tier: str, folder: str) -> dict[str, Any]:
    """A run; beside what it gave, what a forward without grad gave between two steps."""
    offload = {key: {**value, **({"nvme_path": folder} if tier == "nvme" else {})} for key, value in TIERS[tier].items()}
    config = cases.config_of(stage, micros, zero={"reduce_bucket_size": 100, **offload})
    engine = cases.make_engine(quantised.make(dtype=DTYPES[dtype]), config, "AdamW")
    result = cases.run_steps(engine, STEPS, quantised.loss_of)
    engine.close()
    return result


@functools.lru_cache(maxsize=100)
def truth(dtype: str, ranks: int, micros: int, order: str) -> oracle.Trace:
    model = quantised.make(dtype=DTYPES[dtype])
    return oracle.train(
        model, quantised.loss_of, ranks=ranks, micros=micros, steps=STEPS, kind="AdamW",
        groups=cases.groups_of(model, "AdamW"), order=order, clip=cases.CLIP,
    )  # fmt: skip


@pytest.mark.core
@pytest.mark.parametrize(("ranks", "stage", "dtype", "micros", "tier"), [
    (2, "3", "bf16", 1, ""), (2, "3k", "fp32", 2, ""), (2, "2", "bf16", 1, ""), (2, "1", "fp32", 1, ""),
    (2, "0", "fp32", 1, ""), (1, "3", "fp32", 1, ""), (3, "3", "fp32", 2, "cpu"), (2, "3", "bf16", 1, "nvme"),
])  # fmt: skip
def test_equal_to_oracle(
    pools: Pools, tmp_path: Any, ranks: int, stage: str, dtype: str, micros: int, tier: str
) -> None:
    results = pools(ranks).run(train, dtype, stage, micros, tier, str(tmp_path))
    order = cases.LETTER[stage] if micros > 1 else "full"
    assert_equal_to_truth(results, truth(dtype, ranks, micros, order))
