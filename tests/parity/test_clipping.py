"""Clipping by other norms and by value, said in the config and with torch's functions: the oracle's bits."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import shardengine
from shardengine.errors import ConfigError
from shardengine.kernels import join_powers, norm_from_powers, power_sum
from tests.support import cases
from tests.support.comparing import assert_equal_to_truth
from tests.support.covering import covering
from tests.support.raising import raises
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]
STEPS = 4
ORDERS: dict[Any, float] = {"inf": math.inf, 1: 1.0, 3.5: 3.5}
MAX = {"inf": 0.05, 1: 3.0, 3.5: 0.1}
"""Norms that clip in some steps of the shared training, and not in all."""
VALUE = 0.01
PRECISIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fp32": ({}, {}),
    "bf16": ({"bf16": {"enabled": True}}, {"low": torch.bfloat16}),
    "fp16": (
        {"fp16": {"enabled": True, "loss_scale": 96.0}},
        {"low": torch.float16, "scaling": (96.0, 1000, 2, 96.0)},
    ),
}
ALL = itertools.product((2, 3), cases.STAGES, (1, 3), ("AdamW", "SGD"), PRECISIONS, (600, 1 << 20))
BY_NORM = covering([(order, *row) for order, row in itertools.product(ORDERS, ALL)], 2)
ALL = itertools.product((2, 3), cases.STAGES, (1, 3), ("AdamW", "SGD"), PRECISIONS, (600, 1 << 20))
BY_VALUE = covering(list(ALL), 2)


def run(kind: str, config: dict[str, Any]) -> dict[str, Any]:
    return cases.train_engine("mlp", kind, config, STEPS)


def truth_of(stage: str, ranks: int, micros: int, kind: str, precision: str, **clipping: Any) -> Any:
    told = {**PRECISIONS[precision][1], "clip": 0.0, **clipping}
    return cases.truth("mlp", kind, ranks, micros, cases.LETTER[stage], STEPS, **told)


@pytest.mark.parametrize(("order", "ranks", "stage", "micros", "kind", "precision", "bucket"), BY_NORM)
def test_by_a_norm_of_another_order(
    pools: Pools, order: Any, ranks: int, stage: str, micros: int, kind: str, precision: str, bucket: int
) -> None:  # fmt: skip
    said = {"gradient_clipping": MAX[order], "gradient_clipping_norm_type": order, **PRECISIONS[precision][0]}
    results = pools(ranks).run(run, kind, cases.config_of(stage, micros, zero={"reduce_bucket_size": bucket}, **said))
    truth = truth_of(stage, ranks, micros, kind, precision, clip=MAX[order], norm_type=ORDERS[order])
    assert any(norm > MAX[order] for norm in truth.norms), truth.norms
    assert_equal_to_truth(results, truth, stage)


@pytest.mark.parametrize(("ranks", "stage", "micros", "kind", "precision", "bucket"), BY_VALUE)
def test_by_value(
    pools: Pools, ranks: int, stage: str, micros: int, kind: str, precision: str, bucket: int
) -> None:  # fmt: skip
    said = {"gradient_clipping": 0.0, "gradient_clipping_value": VALUE, **PRECISIONS[precision][0]}
    results = pools(ranks).run(run, kind, cases.config_of(stage, micros, zero={"reduce_bucket_size": bucket}, **said))
    truth = truth_of(stage, ranks, micros, kind, precision, clip_value=VALUE)
    assert truth.losses != truth_of(stage, ranks, micros, kind, precision).losses, "something was clipped"
    assert_equal_to_truth(results, truth, stage)


@pytest.mark.parametrize(("order", "stage"), zip(("inf", 1, "inf", 1, 3.5), cases.HYBRID, strict=True))
def test_on_hybrid_meshes(pools: Pools, order: Any, stage: str) -> None:
    said: dict[str, Any] = {"gradient_clipping": MAX[order], "gradient_clipping_norm_type": order}
    results = pools(4).run(run, "AdamW", cases.config_of(stage, 2, **said))
    truth = truth_of(stage, 4, 2, "AdamW", "fp32", clip=MAX[order], norm_type=ORDERS[order])
    assert_equal_to_truth(results, truth, stage)
    said = {"gradient_clipping": 0.0, "gradient_clipping_value": VALUE}
    results = pools(4).run(run, "AdamW", cases.config_of(stage, 2, **said))
    assert_equal_to_truth(results, truth_of(stage, 4, 2, "AdamW", "fp32", clip_value=VALUE), stage)


def by_hand(stage: str, order: float, micros: int, ways: str, options: dict[str, Any]) -> Any:
    """The loop of torch's users: its functions on the shown gradients, or the engine's own call."""
    config = cases.config_of(stage, micros, gradient_clipping=0.0, zero={"reduce_bucket_size": 600}, **options)
    engine: Any = cases.make_engine(cases.make_mlp(), config, "AdamW")
    norms = []

    def micro_batch(engine: Any, loss_of: cases.LossOf, step: int, micro: int) -> float:
        loss = loss_of(engine, step, engine.rank, micro)
        engine.backward(loss)
        if micro == micros - 1:
            parameters = list(engine.module.parameters())
            if ways == "engine":
                norms.append(engine.clip_grad_norm_(0.05, order))
            elif ways == "value":
                torch.nn.utils.clip_grad_value_(parameters, VALUE, foreach=step % 2 == 0)
            else:
                norms.append(torch.nn.utils.clip_grad_norm_(parameters, 0.05, order, foreach=step % 2 == 0).item())
        engine.step()
        return float(loss.item())

    result = cases.run_steps(engine, STEPS, run=micro_batch)
    engine.close()
    return result, norms


@pytest.mark.parametrize("order", [math.inf, 1.0, 3.0])
@pytest.mark.parametrize(("ranks", "stage", "micros"), covering(itertools.product((2, 3), cases.STAGES, (1, 2))))
def test_with_torchs_function(pools: Pools, order: float, ranks: int, stage: str, micros: int) -> None:
    results = pools(ranks).run(by_hand, stage, order, micros, "torch", {})
    truth = cases.truth("mlp", "AdamW", ranks, micros, cases.LETTER[stage], STEPS, clip=0.0, torch_clip=0.05,
                        norm_type=order)  # fmt: skip
    found = [{**result, "norms": truth.norms} for result, _ in results]  # the engine's own is the 2-norm
    assert_equal_to_truth(found, truth, stage)
    for result, norms in results:
        assert norms == results[0][1] and result["norms"] == results[0][0]["norms"]
        exact = order == math.inf
        assert norms == (truth.norms if exact else pytest.approx(truth.norms, rel=1e-6))


@pytest.mark.parametrize("order", [math.inf, 1.0])
@pytest.mark.parametrize("stage", cases.STAGES)
def test_with_the_engines_call(pools: Pools, order: float, stage: str) -> None:
    results = pools(2).run(by_hand, stage, order, 2, "engine", {})
    truth = cases.truth("mlp", "AdamW", 2, 2, cases.LETTER[stage], STEPS, clip=0.05, norm_type=order)
    assert_equal_to_truth([result for result, _ in results], truth, stage)
    assert all(norms == truth.norms for _, norms in results)


@pytest.mark.parametrize("stage", cases.STAGES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_torchs_clipping_by_value_is_the_configs(pools: Pools, stage: str, precision: str) -> None:
    said, told = PRECISIONS[precision]
    results = pools(2).run(by_hand, stage, 2.0, 2, "value", said)
    truth = cases.truth("mlp", "AdamW", 2, 2, cases.LETTER[stage], STEPS, clip=0.0, clip_value=VALUE, **told)
    found = [{**result, "norms": truth.norms} for result, _ in results]  # torch's changes it before it is taken
    assert_equal_to_truth(found, truth, stage)


def after_a_change(stage: str) -> list[float]:
    """Norms of another order follow changes, and the step's clipping does."""
    config = cases.config_of(stage, gradient_clipping=1e9, gradient_clipping_norm_type="inf")
    engine: Any = cases.make_engine(cases.make_mlp(), config, "SGD")
    cases.loss_of(engine, 0, engine.rank, 0).backward()
    parameters = list(engine.module.parameters())
    found = [max(p.grad.norm(math.inf).item() for p in parameters)]
    for p in parameters:
        p.grad.mul_(3.0)
    found.append(max(torch.linalg.vector_norm(p.grad, math.inf).item() for p in parameters))
    found.append(engine.clip_grad_norm_(1.0))
    engine.step()
    found.append(engine.get_global_grad_norm())
    cases.loss_of(engine, 1, engine.rank, 0).backward()
    engine.clip_grad_norm_(1e9, 2)
    second = engine.get_global_grad_norm()
    for p in parameters:
        p.grad.mul_(0.0)
    engine.step()
    cases.run_micro_batch(engine, cases.loss_of, 2, 0)
    assert engine.optimizer.norm_type == math.inf, "the config's again"
    with engine.full_params():
        assert all(bool(value.isfinite().all()) for value in engine.module.parameters())
    engine.close()
    return [*found, second]


@pytest.mark.parametrize("stage", cases.STAGES)
def test_norms_follow_changes(pools: Pools, stage: str) -> None:
    results = pools(2).run(after_a_change, stage)
    first, tripled, stale, stepped, second = results[0]
    assert results[0] == results[1]
    assert tripled == pytest.approx(3 * first, rel=1e-6) and stale == first and stepped == tripled
    truth = cases.truth("mlp", "SGD", 2, 1, "full", 1, clip=0.0, norm_type=math.inf)
    assert first == truth.norms[0] and second > 0


def test_what_does_not_go_together_is_refused() -> None:
    base = {"train_micro_batch_size_per_gpu": 1}
    with pytest.raises(ConfigError, match="by norm or by value, got both"):
        shardengine.load_config({**base, "gradient_clipping": 1.0, "gradient_clipping_value": 0.5})
    with pytest.raises(ConfigError, match='expected a number > 0, or "inf"'):
        shardengine.load_config({**base, "gradient_clipping_norm_type": 0})
    away = {"stage": 1, "offload_optimizer": {"device": "cpu", "step_in_backward": True}}
    with pytest.raises(ConfigError, match="expected gradient_clipping_value 0"):
        shardengine.load_config({**base, "gradient_clipping_value": 0.5, "zero_optimization": away})
    assert not shardengine.load_config({**base, "gradient_clipping_value": 0.5}).notices
    engine = cases.make_engine(cases.make_mlp(), {**cases.config_of("1"), "gradient_clipping": 0.0,
                                                  "gradient_clipping_value": 0.5}, "SGD")  # fmt: skip
    engine.backward(cases.loss_of(engine, 0, 0, 0))
    with raises("clip-by-value-in-config"):
        engine.clip_grad_norm_(1.0)
    engine.close()
    engine = cases.make_engine(cases.make_mlp(), cases.config_of("1"), "SGD")
    engine.backward(cases.loss_of(engine, 0, 0, 0))
    for order in (0, -1.0, math.nan):
        with raises("clip-norm-type-invalid"):
            engine.clip_grad_norm_(1.0, order)
    engine.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_largest_magnitude_is_exact_however_it_is_cut(dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    values: Tensor = (torch.randn(100_000) * 50).to(dtype)
    for cuts in ((1,), (7, 50_001), (99_999,)):
        parts = torch.stack([power_sum(part, math.inf) for part in values.tensor_split(cuts)])
        assert norm_from_powers(join_powers(parts, math.inf), math.inf).item() == values.float().abs().max().item()
    for bad in (math.nan, math.inf, -math.inf):
        values[77] = bad
        assert repr(power_sum(values, math.inf).item()) == repr(abs(bad))
        assert not power_sum(values, 1.0).isfinite()
    assert power_sum(values[:0], math.inf) == 0 == power_sum(values[:0], 1.0)
