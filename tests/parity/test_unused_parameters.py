"""``step_unused_parameters``: what no rank used is stepped with zeros, equal to the oracle bit for bit."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardengine import load_config
from shardengine.errors import ConfigError
from tests import oracle
from tests.support import cases
from tests.support.comparing import assert_equal_to_truth
from tests.support.covering import covering
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]
TIERS: dict[str, dict[str, Any]] = {"device": {}, "cpu": {"offload_optimizer": {"device": "cpu"}}}
ALL = itertools.product((1, 2, 3), cases.STAGES, TIERS, (1, 2), ("AdamW", "SGD"), (True, False))


class Sides(nn.Module):
    """A rank's loss is of some sides; one parameter is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.sides = nn.ModuleList(nn.Linear(5, 3) for _ in range(3))
        self.never = nn.Parameter(torch.ones(4, 2))

    def forward(self, x: Tensor) -> list[Tensor]:
        return [side(x) for side in self.sides]


def make() -> nn.Module:
    torch.manual_seed(17)
    return Sides()


def loss_of(model: Any, step: int, rank: int, micro: int) -> Tensor:
    """In the first step of all sides, then of the first, and of the second on rank 1."""
    torch.manual_seed(cases.seed_of(step, rank, micro))
    outputs = model(torch.randn(4, 5))
    chosen = range(3) if step == 0 else (0, rank % 2)
    return torch.stack([outputs[number].square().mean() for number in chosen]).sum()


def train(kind: str, config: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
    engine = cases.make_engine(make(), config, kind)
    result = cases.run_steps(engine, 3, loss_of)
    steps = cases.steps_of(engine)
    engine.close()
    return result, steps


@pytest.mark.parametrize(("ranks", "stage", "tier", "micros", "kind", "steps_unused"), covering(ALL, 2))
def test_equals_the_oracle(
    pools: Pools, ranks: int, stage: str, tier: str, micros: int, kind: str, steps_unused: bool
) -> None:
    config = cases.config_of(stage, micros, zero=TIERS[tier], step_unused_parameters=steps_unused)
    results = pools(ranks).run(train, kind, config)
    model = make()
    truth = oracle.train(
        model, loss_of, ranks=ranks, micros=micros, steps=3, kind=kind, groups=cases.groups_of(model, kind),
        order=cases.LETTER[stage] if micros > 1 else "full", clip=cases.CLIP, steps_unused=steps_unused,
    )  # fmt: skip
    assert_equal_to_truth([result for result, _ in results], truth, stage)
    assert (set(results[0][1]) == {3}) is steps_unused


def test_messages_that_say_what_earlier_ones_left_out_are_refused_beside_it() -> None:
    with pytest.raises(ConfigError, match="step_unused_parameters: expected false beside a comm_hook, got power_sgd"):
        load_config(
            {"train_batch_size": 1, "step_unused_parameters": True, "comm_hook": {"name": "power_sgd"}},
        )
