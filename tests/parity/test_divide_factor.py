"""Sums of gradients over ranks divided by a factor of the user's: equal to the oracle bit for bit at every stage."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import shardengine
from shardengine.errors import ConfigError, MismatchError, UsageError
from tests import oracle
from tests.support import cases
from tests.support.comparing import assert_equal_to_truth
from tests.support.covering import covering
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]
LOW: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fp32": ({}, {}),
    "bf16": ({"bf16": {"enabled": True}}, {"low": torch.bfloat16}),
}
ALL = list(itertools.product((2, 3), cases.STAGES, (1, 3), ("AdamW", "SGD"), LOW, (1.7, 0.25), ("full", "late")))


def train(kind: str, config: dict[str, Any], late: bool) -> dict[str, Any]:
    loss_of = several if late else cases.loss_of
    engine = cases.make_engine(cases.make_mlp(), config, kind)

    def micro_batch(engine: Any, loss_of: Any, step: int, micro: int) -> float:
        total = 0.0
        for loss in loss_of(engine, step, engine.rank, micro):
            engine.backward(loss)
            total += loss.item()
        engine.step()
        return total

    result = cases.run_steps(engine, 4, loss_of, micro_batch if late else cases.run_micro_batch)
    engine.close()
    return result


def several(model: Any, step: int, rank: int, micro: int) -> list[Any]:
    """Two losses, a backward each: what comes with the second is completed on its own and added."""
    return [cases.loss_of(model, step, rank, micro), cases.loss_of(model, step + 50, rank, micro)]


@pytest.mark.parametrize(("ranks", "stage", "micros", "kind", "low", "factor", "grads"), covering(ALL, 2))
def test_sums_are_divided_by_the_factor(
    pools: Pools, ranks: int, stage: str, micros: int, kind: str, low: str, factor: float, grads: str
) -> None:
    said, told = LOW[low]
    late = grads == "late"
    micros = 1 if late else micros
    results = pools(ranks).run(train, kind, cases.config_of(stage, micros, gradient_divide_factor=factor, **said), late)
    model = cases.make_mlp()
    truth = oracle.train(
        model, several if late else cases.loss_of, ranks=ranks, micros=micros, steps=4, kind=kind,
        groups=cases.groups_of(model, kind), order=cases.LETTER[stage] if micros > 1 else "full", clip=cases.CLIP,
        divisor=factor, **told,
    )  # fmt: skip
    assert_equal_to_truth(results, truth, stage)
    assert truth.norms != cases.truth("mlp", kind, ranks, micros, cases.LETTER[stage], 4, **told).norms


@functools.lru_cache(maxsize=4)
def changed_truth(ranks: int) -> oracle.Trace:
    model = cases.make_mlp()
    groups, trace = cases.groups_of(model, "SGD"), None
    for steps, divisor in ((1, None), (2, 5.5), (3, 0.5)):
        trace = oracle.train(model, cases.loss_of, ranks=ranks, steps=steps, kind="SGD", groups=groups,
                             clip=cases.CLIP, divisor=divisor, earlier=trace)  # fmt: skip
    assert trace is not None
    return trace


def change(config: dict[str, Any]) -> dict[str, Any]:
    engine = cases.make_engine(cases.make_mlp(), config, "SGD")

    def before(step: int) -> None:
        if step:
            bad: Any
            for bad in (0, -1.0, float("inf"), float("nan"), True, "2"):
                with pytest.raises(UsageError, match="expected a finite number above 0"):
                    engine.set_gradient_divide_factor(bad)
            with pytest.raises(MismatchError, match="factor given to set_gradient_divide_factor"):
                engine.set_gradient_divide_factor(1.0 + engine.rank)
            engine.set_gradient_divide_factor((5.5, 0.5)[step - 1])

    result = cases.run_steps(engine, 3, before=before)
    engine.backward(cases.loss_of(engine, 3, engine.rank, 0))
    with pytest.raises(UsageError, match="set_gradient_divide_factor in the middle of a step"):
        engine.set_gradient_divide_factor(2.0)
    engine.close()
    return result


@pytest.mark.parametrize("stage", cases.STAGES)
def test_the_factor_may_change_between_steps(pools: Pools, stage: str) -> None:
    assert_equal_to_truth(pools(2).run(change, cases.config_of(stage)), changed_truth(2), stage)


def test_two_ways_to_say_it_are_refused() -> None:
    base = {"train_micro_batch_size_per_gpu": 1, "gradient_divide_factor": 3}
    assert shardengine.load_config(base).gradient_divide_factor == 3.0
    with pytest.raises(ConfigError, match='gradient_allreduce_op "sum" says that as well'):
        shardengine.load_config({**base, "gradient_allreduce_op": "sum"})
    with pytest.raises(ConfigError, match="expected a number > 0"):
        shardengine.load_config({**base, "gradient_divide_factor": 0})
