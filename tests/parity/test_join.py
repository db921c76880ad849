"""Uneven inputs: what ranks with unequal numbers of batches train in ``engine.join`` is the oracle's, bit for bit.

A rank that has run out of data adds zeros; no rank's losses, norms, weights, states or buffers depend on who has. That
windows of nothing but zeros are not stepped shows in every comparison: states and step counts would differ.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from shardengine.errors import UsageError
from tests import oracle
from tests.parity.test_delays import delayed
from tests.support import cases, muon_cases
from tests.support import special_models as models
from tests.support.comparing import assert_same, expected_state
from tests.support.ranks import RankPool
from tests.support.special_losses import gpt2, lora, net, regression, seeded, two_forwards

Pools = Callable[[int], RankPool]
STAGES = list(cases.STAGES)


@dataclass(frozen=True)
class Run:
    """Rank r has ``counts[r]`` micro-batches in all. quiet: all but a step's last one are inside of ``no_sync``;
    plain: the loop calls ``loss.backward()``."""

    counts: tuple[int, ...]
    micros: int = 1
    kind: str = "AdamW"
    by_active: bool = False
    model: str = "mlp"
    quiet: bool = False
    plain: bool = False
    options: dict[str, Any] = field(default_factory=dict, hash=False)
    precision: dict[str, Any] = field(default_factory=dict, hash=False)
    """The oracle's."""

    @property
    def steps(self) -> int:
        return -(-max(self.counts) // self.micros)

    def has(self, step: int, rank: int, micro: int) -> bool:
        return step * self.micros + micro < self.counts[rank]


MODELS: dict[str, tuple[Callable[[], Any], cases.LossOf]] = {
    "mlp": (cases.make_mlp, cases.loss_of),
    "gpt2": (gpt2, cases.loss_of),
    "gpt2 recomputing": (lambda: gpt2(checkpointing=True), cases.loss_of),
    "norms": (lambda: net(models.BatchNormBlock), regression),
    "adapters": (lambda: lora(torch.float32), regression),
    "twice": (net, two_forwards),
    "late": (lambda: net(route=models.checkpointed_pair), regression),
    "branches": (lambda: net(models.BranchBlock, models.branching(lambda at: at.rank == 1)), regression),
    "scalars": (lambda: seeded(models.Odd), regression),
}


def engine_of(run: Run, stage: str) -> Any:
    zero = {"reduce_bucket_size": 600, **run.options.get("zero_optimization", {})}
    options = {key: value for key, value in run.options.items() if key != "zero_optimization"}
    config = cases.config_of(stage, run.micros, zero=zero, **options)
    return cases.make_engine(MODELS[run.model][0](), config, run.kind)


def train_through(engine: Any, run: Run) -> dict[str, Any]:
    """Inside of an open ``engine.join`` the loop of this rank: losses, and norms of the steps that it saw end."""
    losses, norms = [], []
    for number in range(run.counts[engine.rank]):
        step, micro = divmod(number, run.micros)
        last = micro + 1 == run.micros
        with engine.no_sync() if run.quiet and not last else nullcontext():
            loss = MODELS[run.model][1](engine, step, engine.rank, micro)
            if run.plain:
                (loss if run.micros == 1 else loss / run.micros).backward()
            else:
                engine.backward(loss)
        if last or not run.quiet:
            engine.step()
        losses.append(float(loss.item()))
        if last:
            norms.append(engine.get_global_grad_norm())
    return {"losses": losses, "norms": norms}


def facts_of(engine: Any) -> dict[str, Any]:
    """What all ranks must agree on after the ``with``, and what they hold together."""
    counts = {"steps": engine.global_steps, "samples": engine.global_samples, "micro steps": engine.micro_steps}
    counts |= {"norm": engine.get_global_grad_norm(), "scale": engine.get_loss_scale(), "lr": engine.get_lr()}
    weights = {name: cases.copy_out(value).float().numpy() for name, value in engine.state_dict().items()}
    buffers = {name: cases.copy_out(value).float().numpy() for name, value in engine.module.named_buffers()}
    return {"facts": counts, "weights": weights, "state": cases.local_state(engine), "buffers": buffers}


def train(run: Run, stage: str) -> dict[str, Any]:
    engine = engine_of(run, stage)
    with engine.join(divide_by_initial_world_size=not run.by_active):
        found = train_through(engine, run)
    found |= facts_of(engine)
    engine.close()
    return found


@functools.lru_cache(maxsize=64)
def truth_of(run: Run, order: str) -> oracle.Trace:
    make, loss = MODELS[run.model]
    network, precision = make(), dict(run.precision)
    if (scaling := precision.pop("scaling", None)) is not None:
        precision["scaler"] = oracle.Scaler(*scaling)
    return oracle.train(
        network, loss, ranks=len(run.counts), micros=run.micros, steps=run.steps, kind=run.kind,
        groups=cases.groups_of(network, run.kind), order=order if run.micros > 1 else "full",
        clip=run.options.get("gradient_clipping", cases.CLIP), has=run.has, by_active=run.by_active, **precision,
    )  # fmt: skip


def assert_true(results: Sequence[dict[str, Any]], run: Run, truth: oracle.Trace, where: str) -> None:
    for rank, found in enumerate(results):
        losses = [loss for row in truth.losses for loss in row[rank]][: run.counts[rank]]
        assert found["losses"] == losses, f"{where}: losses of rank {rank}"
        seen = run.counts[rank] // run.micros
        assert repr(found["norms"]) == repr(truth.norms[:seen]), f"{where}: norms of rank {rank}"
        facts = found["facts"]
        assert facts == results[0]["facts"], f"{where}: rank {rank} and rank 0 disagree"
        assert (facts["steps"], facts["samples"]) == (run.steps, sum(run.counts)), where
        assert facts["micro steps"] == run.steps * run.micros and repr(facts["norm"]) == repr(truth.norms[-1]), where
        buffers = {name: value for name, value in truth.shown.items() if name in found["buffers"]}
        assert_same({name: found["buffers"][name] for name in buffers}, buffers, f"{where}: buffers of rank {rank}")
    assert_same(results[0]["weights"], truth.shown, where)
    assert_same(cases.assemble([found["state"] for found in results]), expected_state(truth), where)


def train_all(run: Run, stages: list[str]) -> list[dict[str, Any]]:
    return [train(run, stage) for stage in stages]


def check(pools: Pools, run: Run, stages: Sequence[str] = STAGES) -> None:
    by_rank = pools(len(run.counts)).run(train_all, run, list(stages))
    for number, stage in enumerate(stages):
        truth = truth_of(
            run, run.options.get("gradient_accumulation") or ("full" if run.quiet else cases.LETTER[stage])
        )
        assert_true([found[number] for found in by_rank], run, truth, f"stage {stage}, {run}")


# Every stage, 2, 3 and 4 ranks


@pytest.mark.core
@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
@pytest.mark.parametrize("by_active", [False, True], ids=["all", "active"])
@pytest.mark.parametrize("counts", [(2, 4), (4, 0, 3), (3, 1, 2, 4)], ids=str)
def test_uneven_inputs_are_the_oracle(pools: Pools, counts: tuple[int, ...], by_active: bool, kind: str) -> None:
    check(pools, Run(counts, 1, kind, by_active))


@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
@pytest.mark.parametrize("by_active", [False, True], ids=["all", "active"])
@pytest.mark.parametrize("counts", [(4, 8), (0, 7, 4), (3, 9, 6, 1)], ids=str)
def test_a_rank_runs_dry_in_the_middle_of_a_window(
    pools: Pools, counts: tuple[int, ...], by_active: bool, kind: str
) -> None:
    """Two in three of these end between two steps: what a rank had of that step counts."""
    check(pools, Run(counts, 3, kind, by_active))


@pytest.mark.parametrize("counts", [(1, 1), (4, 4), (5, 5, 5)], ids=str)
def test_all_ranks_run_dry_together(pools: Pools, counts: tuple[int, ...]) -> None:
    """The step that they began is taken, and no window without data follows it."""
    check(pools, Run(counts, 3))


@pytest.mark.parametrize("letter", ["full", "sharded"])
def test_either_letter_at_stages_that_know_both(pools: Pools, letter: str) -> None:
    check(pools, Run((2, 7), 3, options={"gradient_accumulation": letter}), ["0", "1", "2"])


@pytest.mark.parametrize("by_active", [False, True], ids=["all", "active"])
def test_clipping_by_value_is_of_the_mean(pools: Pools, by_active: bool) -> None:
    options, told = {"gradient_clipping": 0.0, "gradient_clipping_value": 0.02}, {"clip_value": 0.02}
    check(pools, Run((2, 4, 3), by_active=by_active, options=options, precision=told), ["0", "2", "3"])


def loop_that_validates(stage: str) -> list[float]:
    """The loop of each rank ends in ``eval()``; with data the others go on to send buffers."""
    engine = engine_of(Run((), model="norms"), stage)
    with engine.join():
        for step in range(2 + engine.rank):
            engine.module.train()
            engine.backward(regression(engine, step, engine.rank, 0))
            engine.step()
        engine.module.eval()
    buffers = [float(cases.copy_out(each).double().sum()) for each in engine.module.buffers()]
    engine.close()
    return buffers


@pytest.mark.parametrize("stage", ["0", "3"])
def test_a_rank_that_has_ended_with_eval_sends_buffers_as_the_others(pools: Pools, stage: str) -> None:
    one, other, last = pools(3).run(loop_that_validates, stage)
    assert one == other == last and len(one) > 0


def refused(options: dict[str, Any]) -> str:
    engine = engine_of(Run((), options=options), "2")
    try:
        with engine.join(divide_by_initial_world_size=False):
            pass
    except UsageError as error:
        return str(error)
    finally:
        engine.close()
    return ""


@pytest.mark.parametrize("options", [{"gradient_allreduce_op": "sum"}, {"gradient_divide_factor": 3.0}], ids=str)
def test_a_mean_over_ranks_with_data_needs_a_mean(pools: Pools, options: dict[str, Any]) -> None:
    assert all("needs gradients that are averaged over the ranks" in said for said in pools(2).run(refused, options))


# The published cases of DistributedDataParallel.join, at every stage


@pytest.mark.parametrize("fewer", [(1, 2), (1, 2, 3), (1, 1, 2)], ids=str)
def test_one_batch_more_on_each_rank(pools: Pools, fewer: tuple[int, ...]) -> None:
    check(pools, Run(fewer))


@pytest.mark.parametrize("counts", [(0, 3), (3, 0), (0, 0, 2)], ids=str)
def test_ranks_without_any_input(pools: Pools, counts: tuple[int, ...]) -> None:
    check(pools, Run(counts, by_active=True))


@pytest.mark.parametrize("counts", [(4, 6), (2, 3), (8, 4, 6)], ids=str)
@pytest.mark.parametrize("plain", [False, True], ids=["engine", "plain"])
def test_no_sync_in_all_but_the_last_micro_batch(pools: Pools, counts: tuple[int, ...], plain: bool) -> None:
    """The last of these, where a rank does not come to the end of its step, shows the pattern in the step before."""
    check(pools, Run(counts, 2, quiet=True, plain=plain, by_active=True))


@pytest.mark.parametrize(
    ("model", "counts", "micros"),
    [
        ("gpt2", (1, 3), 1),
        ("gpt2 recomputing", (3, 1), 1),
        ("norms", (2, 4, 3), 1),
        ("norms", (3, 8), 2),
        ("adapters", (3, 2), 1),
        ("twice", (1, 3), 1),
        ("late", (3, 1), 1),
        ("late", (2, 5), 2),
        ("branches", (2, 4), 1),
        ("scalars", (3, 1, 1), 1),
    ],
)
def test_models(pools: Pools, model: str, counts: tuple[int, ...], micros: int) -> None:
    """Tied weights, dropout, recomputation, buffers, frozen parts, a module that runs twice, gradients that autograd
    delivers twice, parts that only some ranks use."""
    check(pools, Run(counts, micros, model=model))


@pytest.mark.parametrize("counts", [(0, 2), (2, 0, 1)], ids=str)
@pytest.mark.parametrize("model", ["gpt2", "gpt2 recomputing", "norms", "adapters"])
def test_models_on_a_rank_that_never_ran_them(pools: Pools, model: str, counts: tuple[int, ...]) -> None:
    check(pools, Run(counts, model=model))


@pytest.mark.parametrize("plain", [False, True], ids=["engine", "plain"])
def test_a_plain_loop_that_accumulates(pools: Pools, plain: bool) -> None:
    check(pools, Run((0, 5), 2, plain=plain))


# Precisions, tiers, optimizers


@pytest.mark.parametrize(
    ("options", "precision"),
    [
        ({"bf16": {"enabled": True}}, {"low": torch.bfloat16}),
        ({"communication_data_type": "bf16"}, {"wire": torch.bfloat16}),
        (
            {"fp16": {"enabled": True, "initial_scale_power": 20, "loss_scale_window": 2, "hysteresis": 1}},
            {"low": torch.float16, "scaling": (2.0**20, 2, 1, 1.0)},
        ),
        ({"gradient_clipping": 0.0}, {}),
    ],
    ids=["bf16", "bf16 wire", "fp16", "no clipping"],
)
@pytest.mark.parametrize("by_active", [False, True], ids=["all", "active"])
def test_precisions(pools: Pools, options: dict[str, Any], precision: dict[str, Any], by_active: bool) -> None:
    check(pools, Run((3, 6), 2, by_active=by_active, options=options, precision=precision))
    check(pools, Run((4, 2), 1, by_active=by_active, options=options, precision=precision))


def test_the_scale_falls_where_a_rank_has_no_data() -> None:
    """What ``test_precisions`` compares has steps that are skipped."""
    options = {"low": torch.float16, "scaling": (2.0**20, 2, 1, 1.0)}
    truth = truth_of(Run((4, 2), 1, by_active=True, precision=options), "full")
    assert truth.skipped and truth.scales[0] < 2.0**20


@pytest.mark.parametrize(
    "zero",
    [
        {"offload_optimizer": {"device": "cpu"}},
        {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
        {"offload_optimizer": {"device": "nvme"}},
        {"stage3_prefetch_bucket_size": 0},
    ],
    ids=["states on the host", "weights too", "states on a disk", "no prefetch"],
)
def test_tiers(pools: Pools, tmp_path: Any, zero: dict[str, Any]) -> None:
    placed = {
        key: {**value, "nvme_path": str(tmp_path)} if isinstance(value, dict) and value["device"] == "nvme" else value
        for key, value in zero.items()
    }
    stages = ["3k", "3"] if "offload_param" in zero else STAGES
    check(pools, Run((2, 4, 0), by_active=True, options={"zero_optimization": placed}), stages)
    check(pools, Run((4, 7), 3, options={"zero_optimization": placed}), stages)


@pytest.mark.parametrize(
    "options",
    [{"overlap_comm": True}, {"overlap_comm": False}, {"debug": True}],
    ids=["overlap", "no overlap", "every collective compared"],
)
def test_the_order_of_collectives_is_that_of_ranks_with_data(pools: Pools, options: dict[str, Any]) -> None:
    check(pools, Run((4, 1), by_active=True, options=options))
    check(pools, Run((0, 5), 2, options=options))


def test_weights_that_are_gathered_in_the_next_forward(pools: Pools) -> None:
    check(pools, Run((4, 1, 2), by_active=True, options={"overlap_param_gather": True}), ["1", "2"])


def test_buckets_that_are_stepped_in_backward(pools: Pools) -> None:
    zero = {"offload_optimizer": {"device": "cpu", "step_in_backward": True}}
    options = {"zero_optimization": zero, "bf16": {"enabled": True}, "gradient_clipping": 0.0}
    check(pools, Run((5, 2), options=options, precision={"low": torch.bfloat16}), ["1", "2", "3k", "3"])


@pytest.mark.parametrize(("name", "feeds_back"), [("int8", True), ("bf16", True), ("int4", False)])
@pytest.mark.parametrize(("counts", "micros"), [((2, 4), 1), ((7, 0, 4), 3)])
def test_communication_hooks(pools: Pools, counts: tuple[int, ...], micros: int, name: str, feeds_back: bool) -> None:
    """Errors of a rank that has no data for a step wait; so the window without data at the end loses none."""
    options = {"comm_hook": {"name": name, "params": {"error_feedback": feeds_back}}}
    check(pools, Run(counts, micros, options=options, precision={"coding": (name, feeds_back)}))


def train_twice(stage: str, runs: list[tuple[int, int]]) -> dict[str, Any]:
    """One join after the other, with a hook that feeds errors back."""
    options = {"comm_hook": {"name": "int8", "params": {"error_feedback": True}}}
    engine = engine_of(Run((1,), options=options), stage)
    step = 0
    for counts in runs:
        with engine.join():
            for number in range(counts[engine.rank]):
                cases.run_micro_batch(engine, cases.loss_of, step + number, 0)
        step += max(counts)
    found = facts_of(engine)
    engine.close()
    return found


@pytest.mark.parametrize("stage", STAGES)
def test_errors_that_are_fed_back_outlast_a_join(pools: Pools, stage: str) -> None:
    runs = [(1, 3), (2, 2), (2, 0)]
    firsts = [0, 3, 5]

    def has(step: int, rank: int, micro: int) -> bool:
        join = max(number for number, first in enumerate(firsts) if first <= step)
        return step - firsts[join] < runs[join][rank]

    network = cases.make_mlp()
    truth = oracle.train(
        network, cases.loss_of, ranks=2, steps=7, groups=cases.groups_of(network, "AdamW"), clip=cases.CLIP, has=has,
        coding=("int8", True),
    )  # fmt: skip
    results = pools(2).run(train_twice, stage, runs)
    assert_same(results[0]["weights"], truth.shown, stage)
    assert_same(cases.assemble([found["state"] for found in results]), expected_state(truth), stage)


@pytest.mark.parametrize(("counts", "micros"), [((1, 4, 0, 2), 1), ((3, 7, 9, 4), 3)])
@pytest.mark.parametrize("by_active", [False, True], ids=["all", "active"])
def test_hybrid_meshes(pools: Pools, counts: tuple[int, ...], micros: int, by_active: bool) -> None:
    """A whole shard group may have run dry, or one rank of each."""
    check(pools, Run(counts, micros, by_active=by_active, precision={"inside": 2}), list(cases.HYBRID))


def train_muon(counts: tuple[int, ...], stages: list[str]) -> list[dict[str, Any]]:
    found = []
    for stage in stages:
        engine = muon_cases.engine_of("both", cases.config_of(stage, zero={"reduce_bucket_size": 512}))
        with engine.join(divide_by_initial_world_size=False):
            for step in range(counts[engine.rank]):
                cases.run_micro_batch(engine, cases.loss_of, step, 0)
        found.append({"weights": facts_of(engine)["weights"], "state": cases.local_state(engine)})
        engine.close()
    return found


def test_matrices_are_exchanged_with_ranks_that_have_no_data(pools: Pools) -> None:
    """Muon: every rank owns some, also one that has run dry. All stages have the same bits, and those of torch's class
    (``tests/parity/test_muon.py``) where nobody has run dry."""
    by_rank = pools(3).run(train_muon, (3, 1, 4), STAGES)
    first = cases.assemble([found[0]["state"] for found in by_rank])
    for number, stage in enumerate(STAGES):
        whole = cases.assemble([found[number]["state"] for found in by_rank])
        assert whole.keys() == first.keys()
        for key, value in whole.items():
            assert value.tobytes() == first[key].tobytes(), f"{key} at stage {stage}"


# Delays


def train_delayed(run: Run, seed: int) -> list[tuple[dict[str, Any], dict[str, int]]]:
    found = []
    for number, stage in enumerate(STAGES):
        engine = engine_of(run, stage)
        with delayed(1000 * seed + 10 * number + engine.rank) as slept, engine.join():
            result = train_through(engine, run)
        found.append(({**result, **facts_of(engine)}, slept))
        engine.close()
    return found


@pytest.mark.parametrize(
    ("counts", "micros", "seed"), [((1, 4), 1, 1), ((5, 0), 1, 2), ((2, 4, 1), 1, 3), ((2, 7, 4), 3, 4)]
)
def test_delays_change_no_bit(pools: Pools, counts: tuple[int, ...], micros: int, seed: int) -> None:
    run = Run(counts, micros, options={"overlap_comm": True})
    by_rank = pools(len(counts)).run(train_delayed, run, seed)
    for number, stage in enumerate(STAGES):
        truth = truth_of(run, cases.LETTER[stage])
        assert_true([found[number][0] for found in by_rank], run, truth, f"stage {stage}, delayed")
        assert all(len(found[number][1]) >= 3 for found in by_rank), "nobody slept"


# Several joins, and training before and after


def train_around(stage: str, counts: Sequence[tuple[int, ...]]) -> dict[str, Any]:
    """An epoch without join, then one with, and so on: each starts where the one before ended."""
    engine = cases.make_engine(cases.make_mlp(), cases.config_of(stage, zero={"reduce_bucket_size": 600}))
    losses, step = [], 0
    for epoch in counts:
        with engine.join(enable=len(set(epoch)) > 1):
            for number in range(epoch[engine.rank]):
                losses.append(cases.run_micro_batch(engine, cases.loss_of, step + number, 0))
        step += max(epoch)
    found = {"losses": losses, **facts_of(engine)}
    engine.close()
    return found


@pytest.mark.parametrize("stage", STAGES)
def test_epochs_with_and_without_join(pools: Pools, stage: str) -> None:
    epochs = [(2, 2), (1, 3), (1, 1), (0, 2), (2, 1)]
    firsts = [sum(max(epoch) for epoch in epochs[:number]) for number in range(len(epochs))]

    def has(step: int, rank: int, micro: int) -> bool:
        epoch = max(number for number, first in enumerate(firsts) if first <= step)
        return step - firsts[epoch] < epochs[epoch][rank]

    network = cases.make_mlp()
    truth = oracle.train(
        network, cases.loss_of, ranks=2, steps=firsts[-1] + 2, groups=cases.groups_of(network, "AdamW"),
        clip=cases.CLIP, has=has,
    )  # fmt: skip
    results = pools(2).run(train_around, stage, epochs)
    assert_same(results[0]["weights"], truth.shown, stage)
    assert_same(cases.assemble([found["state"] for found in results]), expected_state(truth), stage)
    for rank, found in enumerate(results):
        had = [row[rank][0] for step, row in enumerate(truth.losses) if has(step, rank, 0)]
        assert found["losses"] == had, rank


def train_alone(stage: str) -> dict[str, Any]:
    engine = cases.make_engine(cases.make_mlp(), cases.config_of(stage, 2))
    with engine.join(divide_by_initial_world_size=False):
        found = train_through(engine, Run((5,), 2))
    found |= facts_of(engine)
    engine.close()
    return found


@pytest.mark.parametrize("stage", ["0", "3"])
def test_one_rank(pools: Pools, stage: str) -> None:
    run = Run((5,), 2, by_active=True)
    assert_true(pools(1).run(train_alone, stage), run, truth_of(run, cases.LETTER[stage]), stage)
