"""One loss curve: a hash of every master weight and optimizer state is the same however the work is cut up.

Owns: the comparison over stages, bucket sizes, overlap, prefetch, dtypes and ways to end a window. Where the order of
summation is declared, the hash is the oracle's. Must not know how the engine gets there.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardengine import Engine
from tests import oracle
from tests.support import cases
from tests.support.comparing import expected_state
from tests.support.ranks import RankPool
from tests.support.special_losses import regression, two_dtypes

Pools = Callable[[int], RankPool]

STEPS = 3
MICROS = 3
SHORT_WINDOWS = (3, 1, 2)
ORDERS = ("full", "sharded")
NOTHING, ONE_UNIT, EVERYTHING = 0, 1, 10**9
MODELS: dict[str, tuple[Callable[[], nn.Module], cases.LossOf]] = {
    **{name: (make, cases.loss_of) for name, make in cases.MODELS.items()},
    "two dtypes": (two_dtypes, regression),
}


@dataclass(frozen=True)
class Case:
    """One run: a stage, the micro-batches of a window, how the user's loop is written, and options of the config."""

    stage: str
    micros: int = 1
    loop: str = "every"
    options: dict[str, Any] = field(default_factory=dict)

    def config(self) -> dict[str, Any]:
        return cases.config_of(self.stage, self.micros, **self.options)


@dataclass(frozen=True)
class Outcome:
    """What one rank has after a run. ``shown``: hash of the whole weights as the user sees them."""

    pieces: list[tuple[str, str, int, Any]]
    shown: str
    losses: list[list[float]]
    norms: list[float | None]


def micro_batches_of(loop: str, step: int, micros: int) -> int:
    """Micro-batches in the window of ``step``."""
    return SHORT_WINDOWS[step] if loop in ("boundary", "flush") else micros


def run_window(engine: Engine, loop: str, step: int, loss_of: cases.LossOf) -> list[float]:
    """One window as a user with this habit writes it; the losses.

    every: step() after each backward · end: step() once per window · no_sync: all but the last micro-batch inside ·
    no_sync_first: only the first one inside · boundary, flush: windows of SHORT_WINDOWS micro-batches, ended either way
    """
    count = micro_batches_of(loop, step, engine.gradient_accumulation_steps())
    losses = []
    for micro in range(count):
        last = micro + 1 == count
        quiet = (loop == "no_sync" and not last) or (loop == "no_sync_first" and micro == 0)
        if loop == "boundary" and last:
            engine.set_gradient_accumulation_boundary(True)
        with engine.no_sync() if quiet else nullcontext():
            loss = loss_of(engine, step, engine.rank, micro)
            engine.backward(loss)
        losses.append(loss.item())
        if last or loop != "end":
            engine.step(flush=loop == "flush" and last)
            assert engine.was_step_applied() is last
    return losses


def run_cases(model: str, kind: str, chosen: list[Case]) -> list[Outcome]:
    """One rank's part of ``chosen``, one after the other."""
    outcomes = []
    for case in chosen:
        make, loss_of = MODELS[model]
        network = make()
        engine = cases.make_engine(network, case.config(), kind)
        losses, norms = [], []
        for step in range(STEPS):
            losses.append(run_window(engine, case.loop, step, loss_of))
            norms.append(engine.get_global_grad_norm())
        assert engine.global_steps == STEPS
        with engine.full_params():
            shown = hash_of_weights(dict(network.named_parameters()))
        outcomes.append(Outcome(cases.local_state(engine), shown, losses, norms))
        engine.close()
    return outcomes


def hash_of_weights(weights: dict[str, Any]) -> str:
    total = hashlib.sha256()
    for name, weight in sorted(weights.items()):
        total.update(name.encode())
        total.update(cases.copy_out(weight).float().contiguous().numpy().tobytes())
    return total.hexdigest()


def hash_of_truth(truth: oracle.Trace) -> str:
    """The oracle's masters and states, hashed as ``cases.digest`` does."""
    return cases.digest([[(name, key, 0, flat.numpy()) for (name, key), flat in expected_state(truth).items()]])


def run(pools: Pools, ranks: int, model: str, chosen: list[Case]) -> list[tuple[Case, list[Outcome]]]:
    """Every case with the outcomes of all ranks."""
    by_rank = pools(ranks).run(run_cases, model, "AdamW", chosen)
    return [(case, [outcomes[i] for outcomes in by_rank]) for i, case in enumerate(chosen)]


def assert_one_hash(finished: list[tuple[Case, list[Outcome]]], expected: str) -> None:
    """Masters and states of all ranks together hash to ``expected`` in every case."""
    hashes = {case: cases.digest([outcome.pieces for outcome in outcomes]) for case, outcomes in _hashable(finished)}
    wrong = [case for case, found in hashes.items() if found != expected]
    assert not wrong, f"{len(wrong)} of {len(hashes)} runs have another hash: {wrong[:6]}"


def assert_truth(finished: list[tuple[Case, list[Outcome]]], truth: oracle.Trace) -> None:
    """Masters, states, what each rank shows, losses and norms are the oracle's."""
    assert_one_hash(finished, hash_of_truth(truth))
    shown = hash_of_weights(truth.parameters)
    for case, outcomes in finished:
        for rank, outcome in enumerate(outcomes):
            assert outcome.shown == shown, f"{case}: rank {rank} shows other weights"
            assert outcome.norms == truth.norms, f"{case}: norms on rank {rank}"
            for step, losses in enumerate(outcome.losses):
                assert losses == truth.losses[step][rank][: len(losses)], f"{case}: losses of step {step}, rank {rank}"


def _hashable(finished: list[tuple[Case, list[Outcome]]]) -> list[tuple[str, list[Outcome]]]:
    return [(str(case), outcomes) for case, outcomes in finished]


def truth_of(model: str, ranks: int, micros: int, order: str, **options: Any) -> oracle.Trace:
    """The oracle's run with the clipping of ``cases.config_of``."""
    make, loss_of = MODELS[model]
    network = make()
    settings: dict[str, Any] = {
        "loss_of": loss_of, "groups": cases.groups_of(network, "AdamW"), "clip": cases.CLIP, "kind": "AdamW",
        **options,
    }  # fmt: skip
    return oracle.train(network, ranks=ranks, micros=micros, steps=STEPS, order=order, **settings)


def cut_up(stage: str, ways: Iterable[tuple[int, bool, int]], **options: Any) -> list[Case]:
    """``stage`` with each (bucket size, overlap, prefetch); options: further ones of the config."""
    found = []
    for size, overlap, ahead in ways:
        zero = {"reduce_bucket_size": size, "stage3_prefetch_bucket_size": ahead}
        found.append(Case(stage, options={**options, "zero": zero, "overlap_comm": overlap}))
    return found


# every pair of values occurs; the whole product runs where all three matter most
SOME_WAYS = [
    (600, True, ONE_UNIT), (600, False, NOTHING), (4096, True, EVERYTHING), (4096, False, ONE_UNIT),
    (10**6, True, NOTHING), (10**6, False, EVERYTHING),
]  # fmt: skip
ALL_WAYS = list(itertools.product((600, 4096, 10**6), (True, False), (NOTHING, ONE_UNIT, EVERYTHING)))


@pytest.mark.parametrize(("model", "ranks"), [("gpt2", 2), ("mlp", 3)])
def test_one_micro_batch_has_one_hash_over_everything(pools: Pools, model: str, ranks: int) -> None:
    chosen = []
    for stage in cases.STAGES:
        if stage == "3" and ranks == 2:
            chosen += cut_up(stage, ALL_WAYS)
        else:
            chosen += cut_up(stage, SOME_WAYS if stage in ("3", "3k") else SOME_WAYS[::2] + SOME_WAYS[1:2])
    assert_truth(run(pools, ranks, model, chosen), truth_of(model, ranks, 1, "full"))


FURTHER_POINTS: list[tuple[str, int, dict[str, Any]]] = [
    ("mlp", 2, {"bf16": {"enabled": True}}), ("mlp", 4, {}), ("two dtypes", 3, {}),
    ("two dtypes", 2, {"communication_data_type": "bf16"}),
]  # fmt: skip
"""Other dtypes, and four ranks: (model, ranks, options). Sums of bf16 values are often exact, whatever their order."""


def dtypes_of(options: dict[str, Any]) -> dict[str, Any]:
    """The oracle's words for ``options``."""
    return {
        "low": torch.bfloat16 if "bf16" in options else None,
        "wire": torch.bfloat16 if "communication_data_type" in options else None,
    }


@pytest.mark.core
@pytest.mark.parametrize(("model", "ranks", "options"), FURTHER_POINTS)
def test_further_points_have_one_hash(pools: Pools, model: str, ranks: int, options: dict[str, Any]) -> None:
    chosen = [
        case
        for stage in cases.STAGES
        for case in cut_up(stage, SOME_WAYS if stage == "3" else SOME_WAYS[:2] + SOME_WAYS[-1:], **options)
    ]
    chosen.append(Case("3", options={"debug": True, "zero": {"reduce_bucket_size": 600}, **options}))
    truth = truth_of(model, ranks, 1, "full", **dtypes_of(options))
    assert_truth(run(pools, ranks, model, chosen), truth)


@pytest.mark.parametrize(("model", "ranks", "options"), FURTHER_POINTS)
def test_further_points_have_one_hash_per_letter(pools: Pools, model: str, ranks: int, options: dict[str, Any]) -> None:
    ways = ((True, ONE_UNIT, False), (False, EVERYTHING, True))
    chosen = [
        Case(stage, MICROS, options={
            "gradient_accumulation": order, "overlap_comm": overlap, "debug": debug, **options,
            "zero": {"reduce_bucket_size": 600, "stage3_prefetch_bucket_size": ahead},
        })
        for order in ORDERS for stage in cases.STAGES for overlap, ahead, debug in ways
    ]  # fmt: skip
    finished = run(pools, ranks, model, chosen)
    hashes = set()
    for order in ORDERS:
        truth = truth_of(model, ranks, MICROS, order, **dtypes_of(options))
        assert_truth([each for each in finished if each[0].options["gradient_accumulation"] == order], truth)
        hashes.add(hash_of_truth(truth))
    assert len(hashes) == 2, "the two orders of summation agree: this test cannot tell them apart"


@pytest.mark.parametrize("ranks", [2, 3])
def test_three_micro_batches_have_one_hash_per_third_letter(pools: Pools, ranks: int) -> None:
    chosen = [Case(stage, MICROS, options={"zero": {"reduce_bucket_size": 600}}) for stage in cases.STAGES]
    finished = run(pools, ranks, "gpt2", chosen)
    hashes = {}
    for order in ("full", "sharded"):
        truth = truth_of("gpt2", ranks, MICROS, order)
        assert_truth([(case, found) for case, found in finished if cases.LETTER[case.stage] == order], truth)
        hashes[order] = hash_of_truth(truth)
    assert hashes["full"] != hashes["sharded"], "the two orders of summation agree: this test cannot tell them apart"


@pytest.mark.parametrize(("model", "ranks"), [("gpt2", 2), ("mlp", 3)])
@pytest.mark.parametrize("order", ["full", "sharded"])
def test_overridden_letter_has_one_hash_over_all_stages(pools: Pools, order: str, model: str, ranks: int) -> None:
    chosen = [
        Case(stage, MICROS, options={"gradient_accumulation": order, "overlap_comm": overlap, "zero": zero})
        for stage in cases.STAGES
        for overlap, zero in ((True, {"reduce_bucket_size": 600}), (False, {"stage3_prefetch_bucket_size": 0}))
    ]
    assert_truth(run(pools, ranks, model, chosen), truth_of(model, ranks, MICROS, order))


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("order", ["full", "sharded"])
def test_debug_mode_and_calling_step_at_the_end_change_nothing(pools: Pools, order: str, ranks: int) -> None:
    chosen = [
        Case(stage, MICROS, loop, {"debug": debug, "zero": {"reduce_bucket_size": 600}})
        for stage in cases.STAGES
        if cases.LETTER[stage] == order
        for loop, debug in (("every", True), ("end", False))
    ]
    assert_truth(run(pools, ranks, "mlp", chosen), truth_of("mlp", ranks, MICROS, order))


@pytest.mark.parametrize("ranks", [2, 3])
def test_sum_instead_of_mean(pools: Pools, ranks: int) -> None:
    chosen = [Case(stage, options={"gradient_allreduce_op": "sum"}) for stage in cases.STAGES]
    truth = truth_of("mlp", ranks, 1, "full", mean=False)
    assert_truth(run(pools, ranks, "mlp", chosen), truth)
    assert hash_of_truth(truth) != hash_of_truth(truth_of("mlp", ranks, 1, "full"))


@pytest.mark.parametrize("ranks", [2, 3])
def test_no_sync_is_the_letter_p_at_every_stage(pools: Pools, ranks: int) -> None:
    zero = {"reduce_bucket_size": 600}
    chosen = [Case(stage, MICROS, "no_sync", {"zero": zero}) for stage in cases.STAGES]
    chosen += [
        Case(stage, MICROS, "no_sync", {"zero": zero, "gradient_accumulation": "sharded"}) for stage in cases.STAGES
    ]
    assert_truth(run(pools, ranks, "mlp", chosen), truth_of("mlp", ranks, MICROS, "full"))


@pytest.mark.parametrize("ranks", [2, 3])
def test_no_sync_for_a_part_of_the_window(pools: Pools, monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    """Letter S with the first micro-batch unsent: the first two are summed here, then over ranks, then the third."""
    plain = oracle.complete_gradient

    def first_two_together(grads: list[list[oracle.Fires]], *rest: Any) -> Tensor | None:
        def add(a: oracle.Fires, b: oracle.Fires) -> oracle.Fires:
            return [a[0] + b[0]] if a and b else a or b

        return plain([[add(row[0], row[1]), row[2]] for row in grads], *rest)

    monkeypatch.setattr(oracle, "complete_gradient", first_two_together)
    options = {"gradient_accumulation": "sharded", "zero": {"reduce_bucket_size": 600}}
    chosen = [Case(stage, MICROS, "no_sync_first", options) for stage in cases.STAGES]
    assert_truth(run(pools, ranks, "mlp", chosen), truth_of("mlp", ranks, MICROS, "sharded"))


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("order", ["full", "sharded"])
def test_windows_that_end_early(pools: Pools, order: str, ranks: int) -> None:
    """Ended by the boundary before the last backward or by a flush after it; the loss's divisor stays."""

    def unless_left_out(model: nn.Module, step: int, rank: int, micro: int) -> Tensor:
        if micro >= SHORT_WINDOWS[step]:
            return torch.zeros((), requires_grad=True)  # reaches no parameter
        return cases.loss_of(model, step, rank, micro)

    options = {"gradient_accumulation": order, "zero": {"reduce_bucket_size": 600}}
    chosen = [Case(stage, MICROS, loop, options) for stage in cases.STAGES for loop in ("boundary", "flush")]
    truth = truth_of("mlp", ranks, MICROS, order, loss_of=unless_left_out)
    assert_truth(run(pools, ranks, "mlp", chosen), truth)
