"""Every stage equals the oracle bit for bit: losses, norms, parameters and optimizer states of ten steps."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from tests.support import cases
from tests.support.comparing import assert_equal_to_truth
from tests.support.covering import covering
from tests.support.ranks import RankPool

MODELS = [*itertools.product((1, 2, 3, 4), ("mlp", "gpt2")), (2, "llama"), (3, "llama")]
ALL = [(*model, *rest) for model in MODELS for rest in itertools.product(cases.STAGES, (1, 3), ("AdamW", "SGD"))]


@pytest.mark.parametrize(("ranks", "model", "stage", "micros", "kind"), covering(ALL, 3))
def test_stage_equals_oracle(
    pools: Callable[[int], RankPool], ranks: int, model: str, stage: str, micros: int, kind: str
) -> None:
    results = pools(ranks).run(cases.train_engine, model, kind, cases.config_of(stage, micros))
    order = cases.LETTER[stage] if micros > 1 else "full"
    assert_equal_to_truth(results, cases.truth(model, kind, ranks, micros, order))


def train_at_every_stage(kind: str, micros: int) -> dict[str, dict[str, Any]]:
    return {stage: cases.train_engine("mlp", kind, cases.config_of(stage, micros)) for stage in cases.STAGES}


@pytest.mark.parametrize(("ranks", "micros"), [(2, 1), (3, 3)])
def test_adam_adds_weight_decay_to_the_gradient(pools: Callable[[int], RankPool], ranks: int, micros: int) -> None:
    results = pools(ranks).run(train_at_every_stage, "Adam", micros)
    for stage in cases.STAGES:
        order = cases.LETTER[stage] if micros > 1 else "full"
        truth = cases.truth("mlp", "Adam", ranks, micros, order)
        assert_equal_to_truth([result[stage] for result in results], truth, stage)
        assert truth.losses[-1] != cases.truth("mlp", "AdamW", ranks, micros, order).losses[-1]
