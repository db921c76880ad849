"""Adafactor, torch's and transformers': equal to the oracle with exact sums, bit for bit, at every stage."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import shardengine
from tests import oracle
from tests.engine import test_recovery
from tests.support import adafactor_cases as adafactor
from tests.support import cases
from tests.support.comparing import assert_equal_to_truth, assert_same, expected_state
from tests.support.covering import covering
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]
PLACES: dict[str, dict[str, Any]] = {
    "device": {},
    "cpu": {"offload_optimizer": {"device": "cpu"}},
    "nvme": {"offload_optimizer": {"device": "nvme"}},
}


def placed(place: str, path: Any, bucket: int) -> dict[str, Any]:
    """The section of a config for what rests there."""
    zero = {
        key: {**value, "nvme_path": str(path)} if place == "nvme" else value for key, value in PLACES[place].items()
    }
    return {**zero, "reduce_bucket_size": bucket}


def train(form: str, config: dict[str, Any]) -> dict[str, Any]:
    engine = adafactor.engine_of(form, config)
    result = cases.run_steps(engine, adafactor.STEPS)
    engine.close()
    return result


@pytest.mark.parametrize(
    ("form", "ranks", "stage", "micros", "low", "place", "bucket"),
    covering(
        itertools.product(
            ("torch", "transformers"), (1, 2, 3, 4), cases.STAGES, (1, 3), (None, torch.bfloat16), PLACES,
            (64, 512, 4096),
        )
    ),
)  # fmt: skip
def test_adafactor_on_slices_equals_that_on_whole_matrices(
    pools: Pools, tmp_path: Any, form: str, ranks: int, stage: str, micros: int, low: torch.dtype | None, place: str,
    bucket: int,
) -> None:  # fmt: skip
    """Matrices of 39 to 377 elements, more than a bucket in some of them."""
    extra = {"bf16": {"enabled": True}} if low else {}
    config = cases.config_of(stage, micros, zero=placed(place, tmp_path, bucket), **extra)
    results = pools(ranks).run(train, form, config)
    expected = adafactor.truth(form, ranks, micros, cases.LETTER[stage], **({"low": low} if low else {}))
    assert_equal_to_truth(results, expected, form)


@pytest.mark.parametrize(
    ("form", "number"), [(form, n) for form, rows in adafactor.MORE.items() for n in range(len(rows))]
)
def test_options_do_what_the_oracle_says(pools: Pools, form: str, number: int) -> None:
    """Learning rates, epsilons, thresholds, averages of directions, the other direction."""
    options, stage = adafactor.MORE[form][number], ("3", "1", "2")[number]
    network = cases.make_mlp()
    expected = oracle.train(
        network, cases.loss_of, ranks=2, steps=adafactor.STEPS, made=adafactor.made(form, **options), clip=cases.CLIP,
        groups=[{"params": list(network.parameters())}],
    )  # fmt: skip
    results = pools(2).run(train_with, form, cases.config_of(stage, zero={"reduce_bucket_size": 512}), options)
    assert_equal_to_truth(results, expected, (form, options))


def train_with(form: str, config: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    engine = adafactor.engine_of(form, config, **options)
    result = cases.run_steps(engine, adafactor.STEPS)
    engine.close()
    return result


def train_odd(form: str, config: dict[str, Any]) -> dict[str, Any]:
    engine = adafactor.engine_of(form, config, "odd")
    result = cases.run_steps(engine, 6, adafactor.odd_loss)
    engine.close()
    return result


@pytest.mark.parametrize(
    ("form", "stage", "ranks", "low", "bucket"),
    [("torch", "0", 2, None, 4096), ("transformers", "1", 3, torch.bfloat16, 1024), ("torch", "2", 4, None, 256),
     ("transformers", "3k", 2, None, 1024), ("torch", "3", 3, None, 512), ("torch", "3", 1, None, 1024)],
)  # fmt: skip
def test_odd_shapes_unused_parameters_and_a_skipped_step(
    pools: Pools, form: str, stage: str, ranks: int, low: torch.dtype | None, bucket: int
) -> None:
    config = cases.config_of(
        stage, 1, zero={"reduce_bucket_size": bucket}, **({"bf16": {"enabled": True}} if low else {})
    )
    results = pools(ranks).run(train_odd, form, config)
    network = adafactor.make_odd()
    precision: dict[str, Any] = {"low": low} if low else {}
    expected = oracle.train(
        network, adafactor.odd_loss, ranks=ranks, steps=6, clip=cases.CLIP, made=adafactor.made(form),
        groups=[{"params": [p for p in network.parameters() if p.requires_grad]}], **precision,
    )  # fmt: skip
    assert expected.skipped == [3]
    assert_equal_to_truth(results, expected, stage)


def under(settings: list[dict[str, Any]], stage: str) -> list[dict[str, Any]]:
    zero = {"reduce_bucket_size": 512}
    return [
        train("torch", cases.config_of(stage, **{**each, "zero": {**zero, **each.get("zero", {})}}))
        for each in settings
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
            assert_equal_to_truth(results, adafactor.truth("torch", 2, 1, "full", **options), number)
        digests.add(cases.digest([row[3]["state"] for row in rows]))
        assert len(set(map(str, rows[0][3]["losses"]))) == adafactor.STEPS
    assert len(digests) == 1


# From one run to the next


def train_in_two(form: str, stages: tuple[str, str], folder: str, part: int) -> dict[str, Any]:
    """Steps 0 to 2 and a checkpoint, or from there on."""
    engine = adafactor.engine_of(form, cases.config_of(stages[part], zero={"reduce_bucket_size": 512}))
    if part:
        engine.load_checkpoint(folder)
    losses = [[cases.run_micro_batch(engine, cases.loss_of, step, 0)] for step in range(3 * part, 3 + 2 * part)]
    if not part:
        engine.save_checkpoint(folder)
    found = {"losses": losses, "state": cases.local_state(engine), "steps": cases.steps_of(engine)}
    engine.close()
    return found


def loaded(form: str, stage: str, folder: str) -> Any:
    engine = adafactor.engine_of(form, cases.config_of(stage))
    engine.load_checkpoint(folder)
    found = cases.local_state(engine)
    engine.close()
    return found


@pytest.mark.parametrize(
    ("form", "stages"), [("torch", ("1", "3")), ("transformers", ("3", "0")), ("torch", ("0", "2"))]
)
def test_training_goes_on_at_another_stage(pools: Pools, tmp_path: Any, form: str, stages: tuple[str, str]) -> None:
    """At the same number of ranks, bit for bit; and what is kept is there at another one."""
    before = pools(2).run(train_in_two, form, stages, str(tmp_path), 0)
    results = pools(2).run(train_in_two, form, stages, str(tmp_path), 1)
    expected = adafactor.truth(form, 2, 1, "full")
    for rank, result in enumerate(results):
        assert result["losses"] == [row[rank] for row in expected.losses[3:]]
        assert set(result["steps"]) == {5}
    assert_same(cases.assemble([result["state"] for result in results]), expected_state(expected))
    third = pools(3).run(loaded, form, stages[1], str(tmp_path))
    assert cases.digest(third) == cases.digest([each["state"] for each in before])


def finished(stage: str, place: str, failing: int) -> dict[str, Any]:
    """A failure of one rank in the second step; then as if nothing had happened."""
    config = cases.config_of(stage, zero={"reduce_bucket_size": 512}, timeout_s=20)
    network = cases.make_mlp()
    optimizer = adafactor.make("torch", list(network.parameters()))
    engine = shardengine.initialize(network, config, optimizer=optimizer)  # a mesh of its own
    stepping: Any = engine.optimizer

    def go_wrong(engine: Any) -> None:
        if engine.rank != failing:
            return
        if place == "between two buckets":
            test_recovery.stop_after_buckets(stepping, 2)
        else:
            name, good_calls = place.split()
            test_recovery.fail_once(engine._core.collectives, name, int(good_calls))

    def recover(engine: Any, error: Exception) -> None:
        engine.reset()

    with test_recovery.listening_closely():
        return test_recovery.train_through(engine, go_wrong, recover)


@pytest.mark.parametrize(
    ("stage", "place"),
    [("1", "between two buckets"), ("3", "between two buckets"), ("0", "between two buckets"), ("2", "deliver 1"),
     ("3", "share 1"), ("1", "deliver 2")],
)  # fmt: skip
def test_an_interrupted_update_is_finished_or_dropped(pools: Pools, stage: str, place: str) -> None:
    results = pools(2).run(finished, stage, place, 1)
    assert_equal_to_truth(results, adafactor.truth("torch", 2, 1, "full", test_recovery.STEPS), place)


def extended(form: str, stage: str) -> dict[str, Any]:
    """A matrix and its bias join between two steps."""
    network: Any = cases.make_mlp()
    late = network.blocks[1][0]
    late.requires_grad_(False)
    optimizer = adafactor.make(form, [p for p in network.parameters() if p.requires_grad])
    engine = shardengine.initialize(
        network, cases.config_of(stage), optimizer=optimizer, mesh=cases.mesh_of_this_process()
    )
    losses = [[cases.run_micro_batch(engine, cases.loss_of, step, 0)] for step in range(2)]
    late.requires_grad_(True)
    assert engine.optimizer is not None
    options = {key: value for key, value in engine.optimizer.param_groups[0].items() if key != "params"}
    engine.optimizer.add_param_group({**options, "params": list(late.parameters())})
    losses += [[cases.run_micro_batch(engine, cases.loss_of, step, 0)] for step in range(2, 4)]
    state = cases.local_state(engine)
    engine.close()
    return {"losses": losses, "state": state}


@pytest.mark.parametrize(("form", "stage"), [("torch", "1"), ("transformers", "3")])
def test_a_group_joins(pools: Pools, form: str, stage: str) -> None:
    def loss_of(model: Any, step: int, rank: int, micro: int) -> torch.Tensor:
        for parameter in model.blocks[1][0].parameters():
            parameter.requires_grad_(step > 1)
        return cases.loss_of(model, step, rank, micro)

    network: Any = cases.make_mlp()
    joining = list(network.blocks[1][0].parameters())
    first = [p for p in network.parameters() if not any(p is each for each in joining)]
    expected = oracle.train(
        network, loss_of, ranks=2, steps=4, clip=cases.CLIP, made=adafactor.made(form),
        groups=[{"params": first}, {"params": joining}],
    )  # fmt: skip
    results = pools(2).run(extended, form, stage)
    for rank, result in enumerate(results):
        assert result["losses"] == [row[rank] for row in expected.losses]
    assert_same(cases.assemble([result["state"] for result in results]), expected_state(expected))


def alike(config: dict[str, Any]) -> tuple[bool, bool]:
    """Whether two parameters with the same values and gradients are the same after three steps; whether they stay."""
    torch.manual_seed(3)
    network = torch.nn.Sequential(torch.nn.Linear(16, 16, bias=False), torch.nn.Linear(16, 16, bias=False))
    one, two = network.parameters()
    with torch.no_grad():
        two.copy_(one)
    before, (first, second) = one.detach().bfloat16(), network
    optimizer = adafactor.make("torch", list(network.parameters()), lr=1e-3)
    engine = shardengine.initialize(network, config, optimizer=optimizer, mesh=cases.mesh_of_this_process())
    for _ in range(3):
        x = torch.linspace(-1, 1, 64).view(4, 16).bfloat16()
        engine.backward((first(x).square() + second(x).square()).mean())
        engine.step()
    values = list(engine.state_dict().values())
    engine.close()
    return torch.equal(*values), torch.equal(values[0], before)


def test_weights_without_masters_are_rounded_by_numbers_of_their_own() -> None:
    low = {"enabled": True, "master_weights": False, "stochastic_rounding": True}
    assert alike(cases.config_of("1", bf16=low, seed=5)) == (False, False)
