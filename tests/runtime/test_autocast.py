"""torch.autocast by the user and by the config: fp32 parameters, bf16 compute, the bits of the oracle under it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import oracle
from tests.support import cases
from tests.support.comparing import assert_equal_to_truth
from tests.support.ranks import RankPool

STEPS = 4


def loss_of(model: Any, step: int, rank: int, micro: int) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return cases.loss_of(model, step, rank, micro)


def loss_of_fresh_casts(model: Any, step: int, rank: int, micro: int) -> Tensor:
    torch.clear_autocast_cache()
    return cases.loss_of(model, step, rank, micro)


def train(runs: list[tuple[str, str, str, int, str]]) -> list[dict[str, Any]]:
    """One rank's runs of (model, optimizer, stage, micro-batches, where the region is: loss, loop or config)."""
    results = []
    for model, kind, stage, micros, who in runs:
        options = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}} if who == "config" else {}
        engine = cases.make_engine(cases.MODELS[model](), cases.config_of(stage, micros, **options), kind)
        with torch.autocast("cpu", torch.bfloat16) if who == "loop" else nullcontext():
            results.append(cases.run_steps(engine, STEPS, loss_of if who == "loss" else cases.loss_of))
        engine.close()
    return results


@functools.cache
def truth(model: str, kind: str, ranks: int, micros: int, order: str, loop: bool = False) -> oracle.Trace:
    """loop: one region around everything, backward included, without the casts of an earlier micro-batch."""
    network = cases.MODELS[model]()
    with torch.autocast("cpu", torch.bfloat16) if loop else nullcontext():
        return oracle.train(
            network, loss_of_fresh_casts if loop else loss_of, ranks=ranks, micros=micros, steps=STEPS, kind=kind,
            groups=cases.groups_of(network, kind), order=order, clip=cases.CLIP,
        )  # fmt: skip


def check(pools: Callable[[int], RankPool], ranks: int, runs: list[tuple[str, str, str, int, str]]) -> None:
    answers = pools(ranks).run(train, runs)
    for number, (model, kind, stage, micros, where) in enumerate(runs):
        order = cases.LETTER[stage] if micros > 1 else "full"
        expected = truth(model, kind, ranks, micros, order, loop=where == "loop")
        assert_equal_to_truth([answer[number] for answer in answers], expected, runs[number])


@pytest.mark.parametrize("micros", [1, 3])
@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_region_around_each_loss(pools: Callable[[int], RankPool], ranks: int, kind: str, micros: int) -> None:
    models = ("mlp", "gpt2") if kind == "AdamW" and ranks == 2 else ("mlp",)
    check(pools, ranks, [(model, kind, stage, micros, "loss") for model in models for stage in cases.STAGES])


@pytest.mark.parametrize("micros", [1, 3])
def test_one_region_around_all_steps_casts_the_stepped_weights(pools: Callable[[int], RankPool], micros: int) -> None:
    """Plain torch goes on with the casts of the first step there: its cache ends with the region."""
    check(pools, 2, [(model, "AdamW", stage, micros, "loop") for model in ("mlp", "gpt2") for stage in cases.STAGES])


def test_the_region_of_the_config(pools: Callable[[int], RankPool]) -> None:
    check(pools, 2, [("gpt2", "AdamW", stage, 1, "config") for stage in cases.STAGES])


def test_autocast_changes_the_bits_so_that_these_tests_can_fail() -> None:
    assert truth("mlp", "AdamW", 1, 1, "full").losses != cases.truth("mlp", "AdamW", 1, 1, "full", steps=STEPS).losses
