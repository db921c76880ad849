"""Training goes on from a checkpoint: at another stage as if nothing had been, at other ranks as the oracle says."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import oracle
from tests.checkpoint.test_checkpoint import outcome, schedule, steps
from tests.support import cases
from tests.support.comparing import assert_same, expected_state
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]
STAGES = list(cases.STAGES)
Case = tuple[str, int, bool, str]
"""Optimizer, micro-batches, whether bf16 with master weights, order of the sums (the third letter)."""


def make(stage: str, case: Case, bucket: int = 4096) -> Any:
    kind, micros, low, letter = case
    options = {"bf16": {"enabled": True}} if low else {}
    config = cases.config_of(
        stage, micros, gradient_accumulation=letter, zero={"reduce_bucket_size": bucket}, **options
    )
    return cases.make_engine(cases.make_gpt2(), config, kind, lr_scheduler=schedule)


def unbroken(case: Case, count: int) -> dict[str, Any]:
    """Steps whose dropout and data go on from the random state, at stage 0."""
    engine = make("0", case)
    torch.manual_seed(5 + engine.rank)
    return outcome(engine, steps(engine, 0, count))


def relay(folder: str, case: Case, legs: list[tuple[str, int]], at: int = 0) -> dict[str, Any]:
    """The same steps from step ``at`` on; each stage of ``legs`` takes some of them, from the checkpoint before."""
    rows: list[Any] = []
    for number, (stage, count) in enumerate(legs, start=1):
        engine = make(stage, case, bucket=900 + 700 * number)
        torch.manual_seed((99 if at else 5) + engine.rank)
        if at:
            engine.load_checkpoint(folder, f"step-{at:08}")
        rows += steps(engine, 0, count)
        engine.save_checkpoint(folder)
        at += count
        if number < len(legs):
            engine.close()
    return outcome(engine, rows)


def assert_equal(after: list[dict[str, Any]], before: list[dict[str, Any]], where: object = "") -> None:
    """Outcomes of all ranks; of ``after`` the last rows."""
    for one, two in zip(before, after, strict=True):
        assert two["rows"] and one["rows"][-len(two["rows"]) :] == two["rows"], where
        assert one["counters"][:3] == two["counters"][:3] and one["weights"].keys() == two["weights"].keys()
        for name, value in one["weights"].items():
            assert value.tobytes() == two["weights"][name].tobytes(), (where, name)
    whole = [cases.assemble([result["state"] for result in results]) for results in (before, after)]
    assert whole[0].keys() == whole[1].keys()
    assert all(flat.tobytes() == whole[1][at].tobytes() for at, flat in whole[0].items()), where


@pytest.mark.core
@pytest.mark.parametrize(
    ("way", "case"),
    [
        (1, ("AdamW", 1, False, "full")),
        (2, ("SGD", 3, False, "full")),
        (3, ("AdamW", 3, True, "sharded")),
        (4, ("SGD", 1, True, "full")),
    ],
)
def test_every_change_of_stage_gives_the_run_that_was_not_interrupted(
    pools: Pools, tmp_path: Path, way: int, case: Case
) -> None:
    """The four ways take all 20 changes; with dropout, a scheduler, data from the random state, other buckets."""
    legs = [(STAGES[way * number % len(STAGES)], 1) for number in range(5)] + [("0", 5)]
    before = pools(2).run(unbroken, case, 10)
    assert_equal(pools(2).run(relay, str(tmp_path), case, legs), before)


def test_20_steps_are_10_and_10_in_new_processes(pools: Pools, tmp_path: Path) -> None:
    """At the stage that saved, and at another."""
    case: Case = ("SGD", 3, False, "sharded")
    before = pools(2).run(unbroken, case, 20)
    pools(2).run(relay, str(tmp_path), case, [("2", 10)])
    pools(2).stop()
    for stage in ("2", "3k"):
        assert_equal(pools(2).run(relay, str(tmp_path), case, [(stage, 10)], at=10), before, stage)


# Across a change of the number of ranks


def two_steps(folder: str, model: str, kind: str, config: dict[str, Any]) -> None:
    engine = cases.make_engine(cases.MODELS[model](), config, kind)
    cases.run_steps(engine, 2)
    engine.save_checkpoint(folder)
    engine.close()


def third_step(folder: str, model: str, kind: str, config: dict[str, Any]) -> dict[str, Any]:
    engine = cases.make_engine(cases.MODELS[model](), config, kind)
    engine.load_checkpoint(folder)
    losses = [
        cases.run_micro_batch(engine, cases.loss_of, 2, micro) for micro in range(engine.gradient_accumulation_steps())
    ]
    weights = {name: cases.copy_out(value).float().numpy() for name, value in engine.state_dict().items()}
    counters = (engine.global_steps, engine.global_samples, engine.micro_steps)
    found: dict[str, Any] = {
        "losses": losses,
        "norm": engine.get_global_grad_norm(),
        "weights": weights,
        "counters": counters,
    }
    found["state"] = cases.local_state(engine)
    engine.close()
    return found


@functools.lru_cache(maxsize=16)
def truth(
    model: str, kind: str, low: bool, before: tuple[int, int, str], after: tuple[int, int, str], **hook: Any
) -> oracle.Trace:
    """Two steps as ``before`` (ranks, micro-batches, stage), a third one as ``after``."""
    network = cases.MODELS[model]()
    groups, trace = cases.groups_of(network, kind), None
    for last, (ranks, micros, stage) in ((2, before), (3, after)):
        trace = oracle.train(
            network, cases.loss_of, ranks=ranks, micros=micros, steps=last, kind=kind, groups=groups,
            order=cases.LETTER[stage] if micros > 1 else "full", clip=cases.CLIP,
            low=torch.bfloat16 if low else None, earlier=trace, **hook,
        )  # fmt: skip
    assert trace is not None
    return trace


@pytest.mark.parametrize(
    ("model", "kind", "low", "before", "after"),
    [
        ("gpt2", "AdamW", False, (1, 4, "3"), (4, 1, "2")),
        ("gpt2", "SGD", True, (4, 1, "1"), (2, 2, "3k")),
        ("mlp", "Lion", False, (3, 1, "0"), (1, 3, "3")),
        ("mlp", "AdamW", True, (2, 3, "2"), (3, 2, "0")),
        ("mlp", "SGD", False, (4, 3, "3k"), (3, 4, "1")),
    ],
)
def test_at_other_ranks_the_next_step_equals_the_oracle(
    pools: Pools, tmp_path: Path, model: str, kind: str, low: bool,
    before: tuple[int, int, str], after: tuple[int, int, str],
) -> None:  # fmt: skip
    """With the same global batch, by accumulation."""
    options: dict[str, Any] = {"bf16": {"enabled": True}} if low else {}
    configs = [cases.config_of(stage, micros, **options) for _, micros, stage in (before, after)]
    pools(before[0]).run(two_steps, str(tmp_path), model, kind, configs[0])
    results = pools(after[0]).run(third_step, str(tmp_path), model, kind, configs[1])
    expected = truth(model, kind, low, before, after)
    for rank, result in enumerate(results):
        assert result["losses"] == expected.losses[2][rank] and result["norm"] == expected.norms[2]
        batch = before[0] * before[1]
        assert result["counters"] == (3, 3 * batch, 2 * before[1] + after[1])
    assert_same(results[0]["weights"], expected.shown)
    assert_same(cases.assemble([result["state"] for result in results]), expected_state(expected))


LOW_RANK: dict[str, Any] = {"rank": 2, "start_step": 0, "min_compression_rate": 1.5}


@pytest.mark.parametrize(
    ("hook", "before", "after"),
    [
        ("int4", (3, 1, "2"), (2, 2, "0")),
        ("int4", (2, 1, "0"), (3, 1, "3")),
        ("int8", (4, 1, "3"), (2, 2, "2")),
        ("power_sgd", (3, 1, "1"), (2, 1, "2")),
        ("power_sgd", (2, 1, "2"), (4, 1, "0")),
    ],
)
def test_at_other_ranks_the_errors_of_messages_go_on_in_all(
    pools: Pools, tmp_path: Path, hook: str, before: tuple[int, int, str], after: tuple[int, int, str]
) -> None:
    chosen = {"name": hook, "params": LOW_RANK if hook == "power_sgd" else {}}
    configs = [cases.config_of(stage, micros, comm_hook=chosen) for _, micros, stage in (before, after)]
    pools(before[0]).run(two_steps, str(tmp_path), "mlp", "AdamW", configs[0])
    results = pools(after[0]).run(third_step, str(tmp_path), "mlp", "AdamW", configs[1])
    told = {"low_rank": (2, 0, True, True, 1.5, False, 42)} if hook == "power_sgd" else {"coding": (hook, True)}
    expected = truth("mlp", "AdamW", False, before, after, **told)
    for rank, result in enumerate(results):
        assert result["losses"] == expected.losses[2][rank] and result["norm"] == expected.norms[2]
    assert_same(results[0]["weights"], expected.shown)
    assert_same(cases.assemble([result["state"] for result in results]), expected_state(expected))
