"""What users' models do, at every stage, equal to the oracle bit for bit; with tiny and with large buckets."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import cases, oracle
from tests.ranks import RankPool
from tests.special_losses import CASES, Case

RUNS: dict[str, tuple[str, int, int, dict[str, Any]]] = {
    "AdamW, buckets of 600 elements": ("AdamW", 3, 600, {}),
    "SGD, large buckets, no overlap, no prefetch": (
        "SGD", 2, 1_000_000, {"overlap_comm": False, "zero": {"stage3_prefetch_bucket_size": 0}}
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


def train_all(name: str, stage: str) -> dict[str, dict[str, Any]]:
    return {run: train_case(name, stage, run) for run in runs_at(stage)}


def runs_at(stage: str) -> list[str]:
    """All runs at the two ends of the stage table, the one with tiny buckets between them."""
    return list(RUNS) if stage in ("0", "3") else list(RUNS)[:1]


@functools.lru_cache(maxsize=1000)
def truth(name: str, kind: str, ranks: int, order: str, steps: int) -> oracle.Trace:
    case = CASES[name]
    model = case.make()
    return oracle.train(
        model, case.loss, ranks=ranks, micros=case.micros, steps=steps, kind=kind,
        groups=cases.groups_of(model, kind), order=order, clip=cases.CLIP,
    )  # fmt: skip


def assert_equal(results: list[dict[str, Any]], expected: oracle.Trace) -> None:
    for rank, result in enumerate(results):
        assert result["losses"] == [row[rank] for row in expected.losses], f"losses of rank {rank}"
        assert result["norms"] == expected.norms, f"norms of rank {rank}"
    for name, value in {**expected.parameters, **expected.buffers}.items():
        ours = torch.from_numpy(results[0]["weights"][name])
        assert torch.equal(ours, value.float()), f"{name}: {(ours != value.float()).sum()} of {value.numel()} differ"
    pieces = cases.assemble([result["state"] for result in results])
    for (name, key), flat in pieces.items():
        states = expected.states.get(name, {})
        if key == "weight":
            wanted = states.get("master", expected.parameters[name])
        else:
            wanted = states.get(key, torch.zeros(flat.shape))
        assert torch.equal(torch.from_numpy(flat), in_memory_order(wanted)), f"{key} of {name}"
    trained = {name for name, states in expected.states.items() if expected.parameters[name].numel()}
    assert trained <= {name for name, _ in pieces}


def in_memory_order(tensor: Tensor) -> Tensor:
    """Flat, as it lies in memory: states of a channels_last weight lie as the weight does."""
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dimension: -strides[dimension])
    return tensor.permute(order).reshape(-1)


@pytest.mark.parametrize("stage", list(cases.STAGES))
@pytest.mark.parametrize(("name", "ranks"), [(name, ranks) for name, case in CASES.items() for ranks in case.ranks])
def test_equals_oracle(pools: Callable[[int], RankPool], name: str, ranks: int, stage: str) -> None:
    results = pools(ranks).run(train_all, name, stage, timeout=60.0)
    order = cases.LETTER[stage] if CASES[name].micros > 1 else "full"
    for run in runs_at(stage):
        kind, steps, _, _ = RUNS[run]
        assert_equal([result[run] for result in results], truth(name, kind, ranks, order, steps))
