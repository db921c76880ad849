"""Delays change no bit: ranks that sleep at random before gathers, reductions and steps and after forwards.

Each rank draws its own delays, so that collectives find the others early, late, and in the middle of something else.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardengine
from shardengine.comm import Wire
from tests.support import cases
from tests.support.comparing import assert_equal_to_truth
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]
STEPS = 3
LONGEST_S = 0.02


@contextmanager
def delayed(seed: int) -> Iterator[dict[str, int]]:
    """One of each function's first three calls, and by chance one in six, sleep 1 to 20 ms; how often per function."""
    dice, slept, left = random.Random(seed), dict[str, int](), dict[str, int]()

    def doze(name: str) -> None:
        left[name] = left.get(name, dice.randrange(3)) - 1
        if left[name] == -1 or dice.random() < 1 / 6:
            slept[name] = slept.get(name, 0) + 1
            time.sleep(dice.uniform(0.001, LONGEST_S))

    def before(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            doze(name)
            return function(*args, **kwargs)

        return call

    def after(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            doze(name)
            return result

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Wire, "broadcast", before("gather", Wire.broadcast))
        patch.setattr(Wire, "all_to_all", before("reduce", Wire.all_to_all))
        patch.setattr(Wire, "all_gather", before("exchange", Wire.all_gather))
        patch.setattr(shardengine.Engine, "step", before("step", shardengine.Engine.step))
        patch.setattr(torch.nn.Linear, "forward", after("forward", torch.nn.Linear.forward))
        yield slept


def train_delayed(chosen: list[tuple[str, int, dict[str, Any]]]) -> list[tuple[dict[str, Any], dict[str, int]]]:
    """Per (model, seed, config): what ``cases.train_engine`` gives, and where this rank slept in training."""
    found = []
    for model, number, config in chosen:
        seed = 1000 * number + dist.get_rank()
        with delayed(seed + 500):
            engine = cases.make_engine(cases.MODELS[model](), config)
        with delayed(seed) as slept:
            found.append((cases.run_steps(engine, STEPS), slept))
        engine.close()
    return found


BF16 = {"bf16": {"enabled": True}}


@pytest.mark.core
@pytest.mark.parametrize(("micros", "options"), [(1, {}), (3, {}), (3, BF16)], ids=["1", "3", "3, bf16"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_delays_change_no_bit(pools: Pools, ranks: int, micros: int, options: dict[str, Any]) -> None:
    low = torch.bfloat16 if options else None
    zero = {"reduce_bucket_size": 1000}
    stages = cases.HYBRID if ranks == 4 else cases.STAGES
    chosen = [
        ("mlp", seed, cases.config_of(stage, micros, zero=zero, overlap_comm=True, **options))
        for seed, stage in enumerate(stages)
    ]
    by_rank = pools(ranks).run(train_delayed, chosen)
    for number, stage in enumerate(stages):
        order = cases.LETTER[stage] if micros > 1 else "full"
        truth = cases.truth("mlp", "AdamW", ranks, micros, order, STEPS, low=low)
        assert_equal_to_truth([found[number][0] for found in by_rank], truth, f"stage {stage}")
        for rank, found in enumerate(by_rank):
            slept = found[number][1].keys()
            assert slept == {"gather", "reduce", "exchange", "step", "forward"}, f"stage {stage}, rank {rank}"
