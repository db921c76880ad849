"""A plain torch loop (``loss.backward()``, torch's clipping, ``optimizer.step()``, ``zero_grad()``, a scheduler of the
user's) trains with the oracle's bits at every stage, on 1 to 4 ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

import shardengine
from tests import oracle
from tests.support import cases
from tests.support.comparing import assert_equal_to_truth
from tests.support.covering import covering
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]
MAX_NORM = 0.6
STEPS = 5
LOOPS = ("every call, every micro-batch", "calls at the end of a window", "the given optimizer")
PRECISIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fp32": ({}, {}),
    "bf16": ({"bf16": {"enabled": True}}, {"low": torch.bfloat16}),
}


def train(stage: str, loop: str, model: str, kind: str, micros: int, bucket: int, options: dict[str, Any]) -> Any:
    """One rank's run, and what torch's clipping returned at each step."""
    config = cases.config_of(stage, micros, gradient_clipping=0.0, zero={"reduce_bucket_size": bucket}, **options)
    module = cases.MODELS[model]()
    given = cases.make_optimizer(module, kind)
    early = LambdaLR(given, lambda step: 1.0)  # torch's schedulers replace optimizer.step
    mesh = cases.mesh_of_this_process() if torch.distributed.is_initialized() else None
    engine = shardengine.initialize(module, config, optimizer=given, mesh=mesh)
    optimizer: Any = given if loop == LOOPS[2] else engine.optimizer
    scheduler = LambdaLR(optimizer, lambda step: 1.0)
    norms = []

    def micro_batch(engine: Any, loss_of: cases.LossOf, step: int, micro: int) -> float:
        last = micro == micros - 1
        loss = loss_of(engine, step, engine.rank, micro)
        (loss if micros == 1 else loss / micros).backward()
        if last:
            norms.append(torch.nn.utils.clip_grad_norm_(engine.module.parameters(), MAX_NORM).item())
        if last or loop == LOOPS[0]:
            optimizer.step()
            optimizer.zero_grad()
        if last:
            scheduler.step()
            early.step()
        return float(loss.item())

    result = cases.run_steps(engine, STEPS, run=micro_batch)
    engine.close()
    return result, norms


ROWS = covering(
    itertools.product(
        cases.STAGES, (1, 2, 3, 4), LOOPS, (1, 3), ("AdamW", "SGD"), (600, 1 << 20), PRECISIONS, ("mlp", "gpt2")
    ),
)


@pytest.mark.parametrize(("stage", "ranks", "loop", "micros", "kind", "bucket", "precision", "model"), ROWS)
def test_equals_the_oracle(
    pools: Pools, stage: str, ranks: int, loop: str, micros: int, kind: str, bucket: int, precision: str, model: str
) -> None:  # fmt: skip
    said, told = PRECISIONS[precision]
    results = pools(ranks).run(train, stage, loop, model, kind, micros, bucket, said)
    truth = cases.truth(model, kind, ranks, micros, cases.LETTER[stage], STEPS, clip=0.0, torch_clip=MAX_NORM, **told)
    assert_equal_to_truth([result for result, _ in results], truth, stage)
    for _, norms in results:
        assert norms == pytest.approx(truth.norms, rel=1e-6)  # torch adds the parameters' norms in fp32
        assert norms == results[0][1], "on every rank the same bits"


def test_the_oracles_clipping_is_torchs() -> None:
    """Of whole numbers every order of summation has the same squares: the function itself does the same."""
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.zeros(3, 5)) for _ in range(2)]
    gradients: dict[torch.Tensor, torch.Tensor] = {
        parameter: torch.randint(-8, 9, (3, 5)).float() for parameter in parameters
    }
    for parameter, gradient in gradients.items():
        parameter.grad = gradient.clone()
    torch.nn.utils.clip_grad_norm_(parameters, 0.5)
    clipped = oracle.clipped_by_torch(gradients, 0.5, None)
    for parameter in parameters:
        assert parameter.grad is not None and torch.equal(clipped[parameter], parameter.grad)


@pytest.mark.parametrize(("stage", "rate"), [("0", 0.01), ("2", 0.01), ("1", torch.tensor(0.01))])
def test_a_scheduler_that_counts_micro_batches_is_told_once(
    stage: str, rate: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model = cases.make_mlp()
    given = torch.optim.AdamW(model.parameters(), lr=rate, foreach=False)
    engine: Any = shardengine.initialize(model, cases.config_of(stage, 3), optimizer=given)
    scheduler = LambdaLR(engine.optimizer, lambda step: 1 / (1 + step))
    for number in range(6):
        cases.loss_of(engine, 0, 0, number).backward()
        engine.optimizer.step()
        if engine.was_step_applied():
            scheduler.step()
    assert not caplog.messages
    for number in range(6):
        cases.loss_of(engine, 0, 0, number).backward()
        engine.optimizer.step()
        scheduler.step()
    (told,) = caplog.messages
    assert "learning rates changed inside an accumulation window, from [0.0" in told and "was_step_applied()" in told
    engine.close()
