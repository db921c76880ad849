"""Muon and AdamW for the rest: equal to torch's two classes on whole tensors, bit for bit, at every stage."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support import cases, muon_cases
from tests.support.comparing import assert_equal_to_truth
from tests.support.covering import covering
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]
PLACES: dict[str, dict[str, Any]] = {
    "device": {},
    "cpu": {"offload_optimizer": {"device": "cpu"}},
    "nvme": {"offload_optimizer": {"device": "nvme"}},
}


def train(form: str, config: dict[str, Any]) -> dict[str, Any]:
    engine = muon_cases.engine_of(form, config)
    result = cases.run_steps(engine, muon_cases.STEPS)
    engine.close()
    return result


@pytest.mark.parametrize(
    ("form", "ranks", "stage", "micros", "low", "place", "bucket"),
    covering(
        itertools.product(
            ("both", "alone"), (1, 2, 3, 4), cases.STAGES, (1, 3), (None, torch.bfloat16), PLACES, (64, 512, 4096)
        )
    ),
)
def test_muon_on_slices_equals_torchs_on_whole_matrices(
    pools: Pools,
    tmp_path: Any,
    form: str,
    ranks: int,
    stage: str,
    micros: int,
    low: torch.dtype | None,
    place: str,
    bucket: int,
) -> None:
    """Matrices of 39 to 377 elements, more than a bucket in some of them."""
    zero = {key: {**value, "nvme_path": str(tmp_path)} if place == "nvme" else value
            for key, value in PLACES[place].items()}  # fmt: skip
    zero["reduce_bucket_size"] = bucket
    config = cases.config_of(stage, micros, zero=zero, **({"bf16": {"enabled": True}} if low else {}))
    results = pools(ranks).run(train, form, config)
    expected = muon_cases.truth(form, ranks, micros, cases.LETTER[stage], **({"low": low} if low else {}))
    assert_equal_to_truth(results, expected, form)
