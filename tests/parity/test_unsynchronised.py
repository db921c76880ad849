"""A parameter that only an unsynchronised (``no_sync``) micro-batch of one rank used: one gradient, on all ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest

from tests import oracle
from tests.support import cases
from tests.support import special_models as models
from tests.support.comparing import assert_equal_to_truth
from tests.support.ranks import RankPool
from tests.support.special_losses import net, regression

Pools = Callable[[int], RankPool]
STEPS, MICROS = 3, 3
ONLY_THERE = "blocks.1.other.weight"


def make() -> Any:
    """In every block ``other`` runs on rank 1 in the first micro-batch, and nowhere else."""
    return net(models.BranchBlock, models.branching(lambda at: at.rank == 1 and at.micro == 0))


def train(stage: str, kind: str, bucket: int) -> dict[str, Any]:
    engine = cases.make_engine(make(), cases.config_of(stage, MICROS, zero={"reduce_bucket_size": bucket}), kind)
    seen: list[dict[str, Any]] = []

    def run_micro_batch(engine: Any, loss_of: cases.LossOf, step: int, micro: int) -> float:
        last = micro + 1 == MICROS
        with nullcontext() if last else engine.no_sync():
            loss = loss_of(engine, step, engine.rank, micro)
            engine.backward(loss)
        if last:
            with engine.full_grads() as gradients:
                seen.append({name: g.clone().numpy() for name, g in gradients.items() if g is not None})
            engine.step()
        return float(loss.item())

    result = cases.run_steps(engine, STEPS, regression, run_micro_batch)
    engine.close()
    return {**result, "gradients": seen}


@functools.cache
def truths(ranks: int, kind: str) -> list[oracle.Trace]:
    """The oracle after each of the steps: a trace holds the gradients of its last one."""
    found = []
    for steps in range(1, STEPS + 1):
        model = make()
        trace = oracle.train(
            model, regression, ranks=ranks, micros=MICROS, steps=steps, kind=kind,
            groups=cases.groups_of(model, kind), order="full", clip=cases.CLIP,
        )  # fmt: skip
        found.append(trace)
    return found


@pytest.mark.parametrize(("kind", "bucket"), [("AdamW", 600), ("SGD", 10**6)])
@pytest.mark.parametrize("stage", list(cases.STAGES))
@pytest.mark.parametrize("ranks", [2, 3])
def test_used_in_an_unsynchronised_micro_batch_of_one_rank(
    pools: Pools, ranks: int, stage: str, kind: str, bucket: int
) -> None:
    truth = truths(ranks, kind)[-1]
    results = pools(ranks).run(train, stage, kind, bucket)
    assert_equal_to_truth(results, truth)
    assert truth.gradients[ONLY_THERE].any()
    for result in results:
        for step, (found, expected) in enumerate(zip(result["gradients"], truths(ranks, kind), strict=True)):
            assert found.keys() == expected.gradients.keys()
            for name, gradient in expected.gradients.items():
                assert (found[name] == gradient.numpy()).all(), f"{name} in step {step}"
