"""What users' models do, at every stage, equal to the oracle bit for bit; with tiny and with large buckets.

At stage 3 every case runs in every way, at the others in one, so that each way meets each case and each stage.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest

from tests import oracle
from tests.support import cases, ways_into_backward
from tests.support.comparing import assert_equal_to_truth
from tests.support.covering import Row, covering
from tests.support.ranks import RankPool
from tests.support.special_losses import CASES as SPECIAL
from tests.support.special_losses import Case

CASES = {**SPECIAL, **ways_into_backward.CASES}

RUNS: dict[str, tuple[str, int, int, dict[str, Any]]] = {
    "AdamW, buckets of 600 elements": ("AdamW", 3, 600, {}),
    "SGD, large buckets, no overlap, no prefetch": (
        "SGD", 3, 1_000_000, {"overlap_comm": False, "zero": {"stage3_prefetch_bucket_size": 0}}
    ),
}  # fmt: skip
"""name → optimizer, steps, elements per bucket, config"""


def config_of(case: Case, stage: str, run: str) -> dict[str, Any]:
    _, _, elements, options = RUNS[run]
    zero = {"reduce_bucket_size": elements, **case.zero, **options.get("zero", {})}
    return cases.config_of(stage, case.micros, **{**options, "zero": zero})


def train_case(name: str, stage: str, run: str) -> dict[str, Any]:
    """One rank's training: losses, norms, whole weights and buffers (rank 0), this rank's optimizer state."""
    case = CASES[name]
    model = case.make()
    engine = cases.make_engine(model, config_of(case, stage, run), RUNS[run][0])
    result = cases.run_steps(engine, RUNS[run][1], case.loss)
    engine.close()
    return result


@functools.lru_cache(maxsize=1000)
def truth(name: str, kind: str, ranks: int, order: str, steps: int) -> oracle.Trace:
    case = CASES[name]
    model = case.make()
    return oracle.train(
        model, case.loss, ranks=ranks, micros=case.micros, steps=steps, kind=kind,
        groups=cases.groups_of(model, kind), order=order, clip=cases.CLIP, **cases.groups_told(order),
    )  # fmt: skip


def chosen(every: list[tuple[str, int]], runs: list[str]) -> list[Row]:
    """every: (case, ranks). ((case, ranks), stage, run) of each test."""
    product = list(itertools.product(every, cases.STAGES, runs))
    some = covering(product)
    return [row for row in product if row[1] == "3" or row in some]


@pytest.mark.parametrize(
    ("case", "stage", "run"),
    chosen([(name, ranks) for name, case in CASES.items() for ranks in case.ranks], list(RUNS)),
)
def test_equals_oracle(pools: Callable[[int], RankPool], case: tuple[str, int], stage: str, run: str) -> None:
    name, ranks = case
    kind, steps, _, _ = RUNS[run]
    results = pools(ranks).run(train_case, name, stage, run)
    order = cases.LETTER[stage] if CASES[name].micros > 1 else "full"
    assert_equal_to_truth(results, truth(name, kind, ranks, order, steps), run)
