"""Optimizer states in bf16 and in 8 bits: the oracle's bits at every stage, number of ranks and tier; their bytes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import shardengine
from tests import oracle
from tests.support import cases
from tests.support.comparing import assert_equal_to_truth
from tests.support.covering import covering
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]
STEPS, SEED = 6, 77
PLACES: dict[str, dict[str, Any]] = {
    "device": {},
    "cpu": {"offload_optimizer": {"device": "cpu"}},
    "all of it on cpu": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
    "nvme": {"offload_optimizer": {"device": "nvme"}},
    "in backward": {"offload_optimizer": {"device": "cpu", "step_in_backward": True}},
}
PRECISIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fp32": ({}, {}),
    "bf16": ({"bf16": {"enabled": True}}, {"low": torch.bfloat16}),
    "pure bf16": (
        {"bf16": {"enabled": True, "master_weights": False, "stochastic_rounding": True}},
        {"low": torch.bfloat16, "keeps_masters": False, "seed": SEED},
    ),
}


def config_of(stage: str, kept_in: str, micros: int = 1, **options: Any) -> dict[str, Any]:
    return cases.config_of(stage, micros, seed=SEED, data_types={"optimizer_state_dtype": kept_in}, **options)


def train(model: str, kind: str, config: dict[str, Any], steps: int = STEPS) -> dict[str, Any]:
    engine = cases.make_engine(cases.MODELS[model](), config, kind)
    result = cases.run_steps(engine, steps)
    engine.close()
    return result


def truth(model: str, kind: str, ranks: int, micros: int, order: str, clip: float, **options: Any) -> oracle.Trace:
    return cases.truth(model, kind, ranks, micros, order, STEPS, clip, **options)


def runs() -> list[tuple[Any, ...]]:
    """Each pair of settings at least once, without what the engine refuses."""
    found = covering(
        itertools.product(
            ("8bit", "bf16"), ("AdamW", "SGD", "Lion", "Adam"), (1, 2, 3, 4), cases.STAGES, (1, 3), PRECISIONS, PLACES,
            ("gpt2", "mlp"),
        )  # fmt: skip
    )
    chosen = []
    for kept_in, kind, ranks, stage, micros, precision, place, model in found:
        kept = place
        if (place == "all of it on cpu" and stage != "3") or (place == "in backward" and stage == "0"):
            kept = "cpu"
        chosen.append((kept_in, kind, ranks, stage, micros, precision, kept, model))
    return list(dict.fromkeys(chosen))


@pytest.mark.parametrize(("kept_in", "kind", "ranks", "stage", "micros", "precision", "place", "model"), runs())
def test_states_have_the_bits_of_the_oracle(
    pools: Pools, tmp_path: Any, kept_in: str, kind: str, ranks: int, stage: str, micros: int, precision: str,
    place: str, model: str,
) -> None:  # fmt: skip
    zero = {
        key: {**value, "nvme_path": str(tmp_path)} if place == "nvme" else value for key, value in PLACES[place].items()
    }
    ours, theirs = PRECISIONS[precision]
    clip = cases.CLIP
    config = config_of(stage, kept_in, micros, zero=zero, **ours)
    if place == "in backward":
        clip = config["gradient_clipping"] = 0.0
    results = pools(ranks).run(train, model, kind, config)
    expected = truth(model, kind, ranks, micros, cases.LETTER[stage], clip, kept_in=(kept_in, SEED), **theirs)
    assert_equal_to_truth(results, expected, (kept_in, kind, stage))
