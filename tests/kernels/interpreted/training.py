"""A whole training on Triton kernels: the engine's every path, equal to the oracle bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from shardengine.kernels import operations
from tests.support import cases
from tests.support.comparing import assert_equal_to_truth
from tests.support.ranks import RankPool

STEPS = 2
BF16: dict[str, Any] = {"bf16": {"enabled": True, "master_weights": False, "stochastic_rounding": True}, "seed": 3}


@pytest.mark.parametrize(
    ("stage", "micros", "kind", "said", "told"),
    [
        ("0", 1, "AdamW", {}, {}),
        ("2", 3, "SGD", {"communication_data_type": "bf16"}, {"wire": torch.bfloat16}),
        ("3", 2, "Lion", BF16, {"low": torch.bfloat16, "keeps_masters": False, "seed": 3}),
        ("2", 1, "AdamW", {"fp16": {"enabled": True}}, {"low": torch.float16, "scaling": (2.0**16, 1000, 2, 1.0)}),
    ],
)
def test_a_training_on_these_kernels_is_the_oracles(
    stage: str, micros: int, kind: str, said: dict[str, Any], told: dict[str, Any]
) -> None:
    assert operations.implementation(torch.device("cpu")) is not None
    result = cases.train_engine("mlp", kind, cases.config_of(stage, micros, **said), STEPS)
    assert_equal_to_truth([result], cases.truth("mlp", kind, 1, micros, cases.LETTER[stage], STEPS, **told))


def train_here(config: dict[str, Any]) -> dict[str, Any]:
    """One rank's run. Its process imports this package, and so interprets as this one does."""
    return cases.train_engine("mlp", "AdamW", config, STEPS)


def test_two_ranks(pools: Callable[[int], RankPool]) -> None:
    """Their processes inherit the environment: what they receive is summed by these kernels, too."""
    results = pools(2).run(train_here, cases.config_of("2", 2))
    assert_equal_to_truth(results, cases.truth("mlp", "AdamW", 2, 2, "sharded", STEPS))
