"""A parameter that only an unsynchronised (``no_sync``) micro-batch of one rank used: one gradient, on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest

from tests import cases, oracle
from tests import special_models as models
from tests.parity.test_special_cases import assert_equal
from tests.ranks import RankPool
from tests.special_losses import net, regression

Pools = Callable[[int], RankPool]
STEPS, MICROS = 3, 3
ONLY_THERE = "blocks.1.other.weight"


def make() -> Any:
    """In every block ``other`` runs on rank 1 in the first micro-batch, and nowhere else."""
    return net(models.BranchBlock, models.branching(lambda at: at.rank == 1 and at.micro == 0))


def train(stage: str, kind: str, bucket: int) -> dict[str, Any]:
    engine = cases.make_engine(make(), cases.config_of(stage, MICROS, zero={"reduce_bucket_size": bucket}), kind)
    losses, norms, seen = [], [], {}
    for step in range(STEPS):
        row = []
        for micro in range(MICROS):
            with engine.no_sync() if micro + 1 < MICROS else nullcontext():
                loss = regression(engine, step, engine.rank, micro)
                engine.backward(loss)
            row.append(loss.item())
        with engine.full_grads() as gradients:
            seen = {name: g.clone().numpy() for name, g in gradients.items() if g is not None}
        engine.step()
        losses.append(row)
        norms.append(engine.get_global_grad_norm())
    weights = {key: value.float().numpy() for key, value in engine.state_dict().items()}
    state = cases.local_state(engine)
    engine.close()
    return {"losses": losses, "norms": norms, "weights": weights, "state": state, "gradients": seen}


@pytest.mark.parametrize(("kind", "bucket"), [("AdamW", 600), ("SGD", 10**6)])
@pytest.mark.parametrize("stage", list(cases.STAGES))
@pytest.mark.parametrize("ranks", [2, 3])
def test_used_in_an_unsynchronised_micro_batch_of_one_rank(
    pools: Pools, ranks: int, stage: str, kind: str, bucket: int
) -> None:
    model = make()
    truth = oracle.train(
        model, regression, ranks=ranks, micros=MICROS, steps=STEPS, kind=kind,
        groups=cases.groups_of(model, kind), order="full", clip=cases.CLIP,
    )  # fmt: skip
    results = pools(ranks).run(train, stage, kind, bucket)
    assert_equal(results, truth)
    assert truth.gradients[ONLY_THERE].any()
    for result in results:
        assert result["gradients"].keys() == truth.gradients.keys()
        for name, gradient in truth.gradients.items():
            assert (result["gradients"][name] == gradient.numpy()).all(), name
