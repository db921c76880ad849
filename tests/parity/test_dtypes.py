"""bf16 with fp32 master weights, other dtypes on the wire, and Lion: equal to the oracle bit for bit at every stage."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import cases
from tests.support.comparing import assert_equal_to_truth
from tests.support.covering import covering
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]
BF16: dict[str, Any] = {"bf16": {"enabled": True}}


def assert_bf16_is_truth(
    pools: Pools, ranks: int, stage: str, micros: int, kind: str, model: str, **options: Any
) -> None:
    config = cases.config_of(stage, micros, **BF16, **options)
    results = pools(ranks).run(cases.train_engine, model, kind, config)
    order = cases.LETTER[stage] if micros > 1 else "full"
    assert_equal_to_truth(results, cases.truth(model, kind, ranks, micros, order, low=torch.bfloat16))


MODELS = [*((ranks, "mlp") for ranks in (1, 2, 3, 4)), (3, "gpt2"), (2, "llama")]


@pytest.mark.parametrize(
    ("model", "stage", "micros", "kind"), covering(itertools.product(MODELS, cases.STAGES, (1, 3), ("AdamW", "SGD")))
)
def test_bf16_equals_oracle(pools: Pools, model: tuple[int, str], stage: str, micros: int, kind: str) -> None:
    assert_bf16_is_truth(pools, model[0], stage, micros, kind, model[1])


@pytest.mark.parametrize(
    ("zero", "overlap"), [({"reduce_bucket_size": 600}, True), ({"reduce_bucket_size": 10**6}, False)]
)
@pytest.mark.parametrize("stage", list(cases.STAGES))
def test_bf16_does_not_depend_on_buckets_and_overlap(
    pools: Pools, stage: str, overlap: bool, zero: dict[str, Any]
) -> None:
    assert_bf16_is_truth(pools, 3, stage, 3, "SGD", "gpt2", zero=zero, overlap_comm=overlap)


@pytest.mark.parametrize("order", ["full", "sharded"])
@pytest.mark.parametrize("stage", list(cases.STAGES))
def test_bf16_has_one_curve_per_third_letter(pools: Pools, stage: str, order: str) -> None:
    config = cases.config_of(stage, 3, **BF16, gradient_accumulation=order)
    results = pools(2).run(cases.train_engine, "mlp", "SGD", config)
    assert_equal_to_truth(results, cases.truth("mlp", "SGD", 2, 3, order, low=torch.bfloat16))


def train_new_values(stage: str, through_data: bool, zero: dict[str, Any]) -> dict[str, Any]:
    """Weights are written after initialize, as an initialisation of a new head does."""
    config = cases.config_of(stage, **BF16, zero=zero)
    if zero:
        del config["gradient_clipping"]
    engine = cases.make_engine(cases.make_mlp(), config, "AdamW")
    with torch.no_grad(), engine.full_params(writable=True) if stage.startswith("3") else nullcontext():
        for parameter in engine.module.parameters():
            (parameter.data if through_data else parameter).mul_(1.5)
    result = cases.run_steps(engine, 2)
    engine.close()
    return result


IN_BACKWARD = {"offload_optimizer": {"device": "cpu", "step_in_backward": True}}


@pytest.mark.parametrize(("stage", "zero"), [*((stage, {}) for stage in cases.STAGES), ("2", IN_BACKWARD)])
def test_new_values_through_data_before_the_first_backward_count(
    pools: Pools, stage: str, zero: dict[str, Any]
) -> None:
    given, counted = (pools(2).run(train_new_values, stage, through_data, zero) for through_data in (True, False))
    for one, other in zip(given, counted, strict=True):
        assert one["losses"] == other["losses"]
        assert all((value == other["weights"][name]).all() for name, value in one["weights"].items())


def test_new_values_before_the_first_backward_count_on_disk(pools: Pools, tmp_path: Path) -> None:
    """Written under ``no_grad``: torch counts that, and so the masters on disk are read."""
    homes: list[dict[str, Any]] = [{"device": "nvme", "nvme_path": str(tmp_path)}, {"device": "cpu"}]
    disk, host = (pools(2).run(train_new_values, "2", False, {"offload_optimizer": home}) for home in homes)
    for one, other in zip(disk, host, strict=True):
        assert one["losses"] == other["losses"]
        assert all((value == other["weights"][name]).all() for name, value in one["weights"].items())


def test_the_orders_and_dtypes_of_the_truth_differ() -> None:
    """If they did not, the tests above would prove nothing."""
    found = [
        cases.truth("mlp", "SGD", 2, 3, order, low=low).norms
        for order in ("full", "sharded")
        for low in (None, torch.bfloat16)
    ]
    assert len({str(losses) for losses in found}) == 4


@pytest.mark.parametrize(
    ("low", "stage", "micros"), covering(itertools.product((None, torch.bfloat16), cases.STAGES, (1, 3)))
)
def test_the_wire_may_have_another_dtype(pools: Pools, low: torch.dtype | None, stage: str, micros: int) -> None:
    """fp32 parameters with bf16 on the wire, and bf16 parameters with fp32."""
    wire, name = (torch.bfloat16, "bf16") if low is None else (torch.float32, "fp32")
    config = cases.config_of(stage, micros, communication_data_type=name, **(BF16 if low else {}))
    results = pools(3).run(cases.train_engine, "mlp", "SGD", config)
    order = cases.LETTER[stage] if micros > 1 else "full"
    truth = cases.truth("mlp", "SGD", 3, micros, order, low=low, wire=wire)
    assert_equal_to_truth(results, truth)
    assert truth.losses[-1] != cases.truth("mlp", "SGD", 3, micros, order, low=low).losses[-1]


@pytest.mark.parametrize(
    ("ranks", "stage", "low"), covering(itertools.product((2, 3), cases.STAGES, (None, torch.bfloat16)))
)
def test_lion(pools: Pools, ranks: int, stage: str, low: torch.dtype | None) -> None:
    config = cases.config_of(stage, **(BF16 if low else {}))
    results = pools(ranks).run(cases.train_engine, "gpt2", "Lion", config)
    assert_equal_to_truth(results, cases.truth("gpt2", "Lion", ranks, 1, "full", low=low))
