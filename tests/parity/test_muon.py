"""Muon and AdamW for the rest: equal to torch's two classes on whole tensors, bit for bit, at every stage."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import shardengine
from tests import oracle
from tests.engine import test_recovery
from tests.support import cases, muon_cases
from tests.support.comparing import assert_equal_to_truth, assert_same, expected_state
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


def train_odd(config: dict[str, Any], steps: int) -> dict[str, Any]:
    network = muon_cases.make_odd()
    engine = shardengine.initialize(
        network, config, optimizer=muon_cases.make_both(network), mesh=cases.mesh_of_this_process()
    )
    result = cases.run_steps(engine, steps, muon_cases.odd_loss)
    engine.close()
    return result


@pytest.mark.parametrize(
    ("stage", "ranks", "low", "bucket"),
    [("0", 2, None, 4096), ("1", 3, torch.bfloat16, 1024), ("2", 4, None, 256), ("3k", 2, None, 1024),
     ("3", 3, None, 512)],
)  # fmt: skip
def test_unused_and_transposed_matrices_and_a_skipped_step(
    pools: Pools, stage: str, ranks: int, low: torch.dtype | None, bucket: int
) -> None:
    options: dict[str, Any] = {"bf16": {"enabled": True}} if low else {}
    config = cases.config_of(stage, zero={"reduce_bucket_size": bucket}, **options)
    results = pools(ranks).run(train_odd, config, 6)
    network = muon_cases.make_odd()
    matrices, rest = muon_cases.split(network)
    precision: dict[str, Any] = {"low": low} if low else {}
    expected = oracle.train(
        network, muon_cases.odd_loss, ranks=ranks, steps=6, clip=cases.CLIP, made=muon_cases.MADE,
        groups=[{"params": matrices}, {"params": rest, **muon_cases.ADAMW}], **precision,
    )  # fmt: skip
    assert expected.skipped == [3]
    assert_equal_to_truth(results, expected, stage)


def under(settings: list[dict[str, Any]], stage: str) -> list[dict[str, Any]]:
    zero = {"reduce_bucket_size": 512}
    return [
        train("both", cases.config_of(stage, **{**each, "zero": {**zero, **each.get("zero", {})}})) for each in settings
    ]


def test_other_settings_change_no_bit(pools: Pools) -> None:
    """Averages, collectives that are compared, or not overlapped; and weights without masters, rounded at random, which
    must be the same at every stage."""
    plain: list[dict[str, Any]] = [{"debug": True}, {"zero": {"overlap_comm": False}}]
    without = {"bf16": {"enabled": True, "master_weights": False, "stochastic_rounding": True}, "seed": 5}
    digests = set()
    for stage in ("1", "3"):
        rows = pools(2).run(under, [*plain, {"ema": {"decay": 0.9}}, without], stage)
        for number in range(3):
            options: dict[str, Any] = {"ema": 0.9} if number == 2 else {}
            results = [row[number] for row in rows]
            assert_equal_to_truth(results, muon_cases.truth("both", 2, 1, "full", **options), number)
        digests.add(cases.digest([row[3]["state"] for row in rows]))
        assert len(set(map(str, rows[0][3]["losses"]))) == muon_cases.STEPS
    assert len(digests) == 1


@pytest.mark.parametrize(("stage", "ranks", "kept_in"), [("2", 3, "8bit"), ("3", 2, "bf16")])
def test_what_adamw_keeps_may_take_fewer_bytes(pools: Pools, stage: str, ranks: int, kept_in: str) -> None:
    options: dict[str, Any] = {"data_types": {"optimizer_state_dtype": kept_in}, "seed": 5}
    results = pools(ranks).run(train, "both", cases.config_of(stage, zero={"reduce_bucket_size": 1024}, **options))
    expected = muon_cases.truth("both", ranks, 1, "full", kept_in=(kept_in, 5))
    for rank, result in enumerate(results):
        assert result["losses"] == [row[rank] for row in expected.losses], stage
    assert_same(results[0]["weights"], expected.shown, stage)


# From one run to the next


def train_in_two(stages: tuple[str, str], folder: str, part: int) -> dict[str, Any]:
    """Steps 0 to 2 and a checkpoint, or from there on."""
    engine = muon_cases.engine_of("both", cases.config_of(stages[part], zero={"reduce_bucket_size": 512}))
    if part:
        engine.load_checkpoint(folder)
    losses = [[cases.run_micro_batch(engine, cases.loss_of, step, 0)] for step in range(3 * part, 3 + 2 * part)]
    if not part:
        engine.save_checkpoint(folder)
    found = {"losses": losses, "state": cases.local_state(engine), "steps": cases.steps_of(engine)}
    engine.close()
    return found


def loaded(stage: str, folder: str) -> Any:
    engine = muon_cases.engine_of("both", cases.config_of(stage))
    engine.load_checkpoint(folder)
    found = cases.local_state(engine)
    engine.close()
    return found


@pytest.mark.parametrize("stages", [("1", "3"), ("3", "0"), ("0", "2")])
def test_training_goes_on_at_another_stage(pools: Pools, tmp_path: Any, stages: tuple[str, str]) -> None:
    """At the same number of ranks, bit for bit; and what is kept is there at another one."""
    before = pools(2).run(train_in_two, stages, str(tmp_path), 0)
    results = pools(2).run(train_in_two, stages, str(tmp_path), 1)
    expected = muon_cases.truth("both", 2, 1, "full")
    for rank, result in enumerate(results):
        assert result["losses"] == [row[rank] for row in expected.losses[3:]]
        assert set(result["steps"]) == {5}
    third = pools(3).run(loaded, stages[1], str(tmp_path))
    assert cases.digest(third) == cases.digest([each["state"] for each in before])


def finished(stage: str, place: str, failing: int) -> dict[str, Any]:
    """A failure of one rank in the second step; then as if nothing had happened."""
    config = cases.config_of(stage, zero={"reduce_bucket_size": 512}, timeout_s=20)
    network = cases.make_mlp()
    engine = shardengine.initialize(network, config, optimizer=muon_cases.make_both(network))  # a mesh of its own
    optimizer: Any = engine.optimizer

    def go_wrong(engine: Any) -> None:
        if engine.rank != failing:
            return
        if place == "between two buckets":
            test_recovery.stop_after_buckets(optimizer, 2)
        else:
            test_recovery.fail_once(engine._core.collectives, "deliver", 1)

    def recover(engine: Any, error: Exception) -> None:
        engine.reset()

    with test_recovery.listening_closely():
        return test_recovery.train_through(engine, go_wrong, recover)


@pytest.mark.parametrize(
    ("stage", "place"),
    [("1", "between two buckets"), ("3", "between two buckets"), ("0", "between two buckets"), ("2", "on the way")],
)
def test_an_interrupted_update_is_finished_or_dropped(pools: Pools, stage: str, place: str) -> None:
    results = pools(2).run(finished, stage, place, 1)
    assert_equal_to_truth(results, muon_cases.truth("both", 2, 1, "full", test_recovery.STEPS), place)


def extended(stage: str) -> dict[str, Any]:
    """A matrix and its bias join between two steps, in a group of each kind."""
    network: Any = cases.make_mlp()
    late = network.blocks[1][0]
    late.requires_grad_(False)
    engine = shardengine.initialize(
        network, cases.config_of(stage), optimizer=muon_cases.make_both(network), mesh=cases.mesh_of_this_process()
    )
    losses = [[cases.run_micro_batch(engine, cases.loss_of, step, 0)] for step in range(2)]
    late.requires_grad_(True)
    assert engine.optimizer is not None
    engine.optimizer.add_param_group({"params": [late.weight], "use_muon": True, **muon_cases.MUON})
    said = ""
    try:
        engine.optimizer.add_param_group({"params": [late.bias], "use_muon": True})
    except Exception as error:
        said = str(error)
    engine.optimizer.add_param_group({"params": [late.bias], "use_muon": False, **muon_cases.ADAMW})
    losses += [[cases.run_micro_batch(engine, cases.loss_of, step, 0)] for step in range(2, 4)]
    state = cases.local_state(engine)
    engine.close()
    return {"losses": losses, "state": state, "said": said}


@pytest.mark.parametrize("stage", ["1", "3"])
def test_groups_of_either_kind_join(pools: Pools, stage: str) -> None:
    def loss_of(model: Any, step: int, rank: int, micro: int) -> torch.Tensor:
        for parameter in model.blocks[1][0].parameters():
            parameter.requires_grad_(step > 1)
        return cases.loss_of(model, step, rank, micro)

    network = cases.make_mlp()
    matrices, rest = muon_cases.split(network)
    expected = oracle.train(
        network, loss_of, ranks=2, steps=4, clip=cases.CLIP, made=muon_cases.MADE,
        groups=[{"params": matrices}, {"params": rest, **muon_cases.ADAMW}],
    )  # fmt: skip
    results = pools(2).run(extended, stage)
    for rank, result in enumerate(results):
        assert "Muon steps matrices, got a parameter of shape (29,)" in result["said"]
        assert result["losses"] == [row[rank] for row in expected.losses]
    assert_same(cases.assemble([result["state"] for result in results]), expected_state(expected))
