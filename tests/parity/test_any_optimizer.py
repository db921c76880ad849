"""Optimizers that are stepped by their own class: equal to that class on whole tensors, bit for bit, at every stage."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import shardengine
from tests import oracle
from tests.support import cases, optimizer_classes
from tests.support.comparing import assert_equal_to_truth
from tests.support.covering import covering
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]
STEPS = 6


def engine_of(name: str, config: dict[str, Any], model: str = "mlp") -> shardengine.Engine:
    network = cases.MODELS[model]()
    optimizer = optimizer_classes.make(name, optimizer_classes.groups_of(network, name))
    mesh = cases.mesh_of_this_process()
    return shardengine.initialize(network, config, optimizer=optimizer, mesh=mesh)


def train(name: str, config: dict[str, Any], steps: int = STEPS) -> dict[str, Any]:
    engine = engine_of(name, config)
    result = cases.run_steps(engine, steps)
    engine.close()
    return result


@functools.lru_cache(maxsize=64)
def truth(name: str, ranks: int, micros: int, order: str, **precision: Any) -> oracle.Trace:
    network = cases.make_mlp()
    made = functools.partial(optimizer_classes.make, name), optimizer_classes.ROWS[name][2]
    return oracle.train(
        network, cases.loss_of, ranks=ranks, micros=micros, steps=STEPS, made=made,
        groups=optimizer_classes.groups_of(network, name), order=order if micros > 1 else "full",
        clip=cases.CLIP, **cases.groups_told(order), **precision,
    )  # fmt: skip


PLACES: dict[str, dict[str, Any]] = {
    "device": {},
    "cpu": {"offload_optimizer": {"device": "cpu"}},
    "nvme": {"offload_optimizer": {"device": "nvme"}},
}


@pytest.mark.parametrize(
    ("name", "ranks", "stage", "micros", "low", "place"),
    covering(
        itertools.product(optimizer_classes.ROWS, (1, 2, 3, 4), cases.STAGES, (1, 3), (None, torch.bfloat16), PLACES)
    ),
)
def test_a_class_on_slices_equals_it_on_whole_tensors(
    pools: Pools, tmp_path: Any, name: str, ranks: int, stage: str, micros: int, low: torch.dtype | None, place: str
) -> None:
    zero = {key: {**value, "nvme_path": str(tmp_path)} if place == "nvme" else value
            for key, value in PLACES[place].items()}  # fmt: skip
    config = cases.config_of(stage, micros, zero=zero, **({"bf16": {"enabled": True}} if low else {}))
    results = pools(ranks).run(train, name, config)
    expected = truth(name, ranks, micros, cases.LETTER[stage], **({"low": low} if low else {}))
    assert_equal_to_truth(results, expected, name)


# From one run to the next


def run_on(engine: shardengine.Engine, first: int, last: int) -> list[list[float]]:
    losses = []
    for step in range(first, last):
        losses.append([cases.run_micro_batch(engine, cases.loss_of, step, 0)])
    return losses


def train_in_two(name: str, stages: tuple[str, str], folder: str, part: int) -> dict[str, Any]:
    """Steps 0 to 3 and a checkpoint, or from there on to the end."""
    engine = engine_of(name, cases.config_of(stages[part]))
    optimizer = engine.optimizer
    assert optimizer is not None
    if part:
        engine.load_checkpoint(folder)
    losses = run_on(engine, 3 * part, 3 * part + 3)
    if not part:
        engine.save_checkpoint(folder)
    found = {"losses": losses, "state": cases.local_state(engine), "steps": optimizer.steps,
             "facts": optimizer.arithmetic.saved()}  # fmt: skip
    found["options"] = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    engine.close()
    return found


@pytest.mark.parametrize(
    ("name", "stages"),
    [("NAdam", ("1", "3")), ("Rprop", ("3", "0")), ("ScheduleFree", ("2", "3k")), ("Plain", ("0", "2")),
     ("Adagrad", ("3", "1"))],
)  # fmt: skip
def test_training_goes_on_at_another_stage(pools: Pools, tmp_path: Any, name: str, stages: tuple[str, str]) -> None:
    """At the same number of ranks, bit for bit; and what is kept is there at another one."""
    for part in (0, 1):
        results = pools(2).run(train_in_two, name, stages, str(tmp_path), part)
        if not part:
            before = results
    expected = truth(name, 2, 1, "full")
    for rank, result in enumerate(results):
        assert result["losses"] == [row[rank] for row in expected.losses[3:]], name
    third = pools(3).run(loaded, name, stages[1], str(tmp_path))
    assert cases.digest([result["state"] for result in third]) == cases.digest([each["state"] for each in before])
    for result in third:
        assert result["facts"] == before[0]["facts"] and result["steps"] == before[0]["steps"]
        assert result["options"] == before[0]["options"]


def loaded(name: str, stage: str, folder: str) -> dict[str, Any]:
    engine = engine_of(name, cases.config_of(stage))
    optimizer = engine.optimizer
    assert optimizer is not None
    engine.load_checkpoint(folder)
    found = {"state": cases.local_state(engine), "steps": optimizer.steps, "facts": optimizer.arithmetic.saved()}
    found["options"] = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    engine.close()
    return found


def exchanging(stage: str, bf16: bool) -> dict[str, Any]:
    """Schedule-free: weights for evaluation between two steps, and what a step says of them."""
    options: dict[str, Any] = {"bf16": {"enabled": True}} if bf16 else {}
    engine = engine_of("ScheduleFree", cases.config_of(stage, **options))
    optimizer = engine.optimizer
    assert optimizer is not None
    losses, shown = [], []
    for step in range(3):
        optimizer.train()
        optimizer.train()  # nothing happens
        losses.append([cases.run_micro_batch(engine, cases.loss_of, step, 0)])
        optimizer.eval()
        shown.append({name: cases.copy_out(value).float().numpy() for name, value in engine.state_dict().items()})
    said = ""
    try:
        cases.run_micro_batch(engine, cases.loss_of, 3, 0)
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    engine.zero_grad()
    optimizer.train()
    losses.append([cases.run_micro_batch(engine, cases.loss_of, 3, 0)])
    state = cases.local_state(engine)
    engine.close()
    return {"losses": losses, "shown": shown, "said": said, "state": state}


@pytest.mark.parametrize(
    ("stage", "ranks", "bf16"),
    [("0", 1, False), ("1", 2, True), ("2", 2, False), ("3k", 2, False), ("3", 3, True)],
)
def test_schedule_free_exchanges_weights_as_the_class_does(pools: Pools, stage: str, ranks: int, bf16: bool) -> None:
    results = pools(ranks).run(exchanging, stage, bf16)
    expected, shown = exchanged(ranks, bf16)
    for rank, result in enumerate(results):
        assert result["losses"] == [row[rank] for row in expected.losses]
        assert "UsageError" in result["said"] and "optimizer.train() was not called" in result["said"]
    for ours, wanted in zip(results[0]["shown"], shown, strict=True):
        for name, value in wanted.items():
            assert torch.equal(torch.from_numpy(ours[name]), value), name


def exchanged(ranks: int, bf16: bool) -> tuple[oracle.Trace, list[dict[str, torch.Tensor]]]:
    """Plain torch: after each step the weights for evaluation are looked at, in the class's own arithmetic."""
    network, shown = cases.make_mlp(), list[dict[str, torch.Tensor]]()

    class Watched(optimizer_classes.ScheduleFree):
        of: dict[str, torch.Tensor]

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step()
            self.eval()
            dtype = torch.bfloat16 if bf16 else torch.float32
            shown.append({n: p.detach().to(dtype, copy=True).float() for n, p in self.of.items()})
            self.train()

    def make(groups: list[Any]) -> torch.optim.Optimizer:
        made = Watched(groups, **optimizer_classes.ROWS["ScheduleFree"][1])
        made.train()
        whole = [p for group in made.param_groups for p in group["params"]]
        given = [p for group in of_network for p in group["params"]]
        names = {id(p): name for name, p in network.named_parameters()}
        made.of = {names[id(p)]: q for p, q in zip(given, whole, strict=True)}
        return made

    of_network = optimizer_classes.groups_of(network, "ScheduleFree")
    low: dict[str, Any] = {"low": torch.bfloat16} if bf16 else {}
    trace = oracle.train(
        network, cases.loss_of, ranks=ranks, steps=4, groups=of_network, made=(make, ("z",)), clip=cases.CLIP, **low
    )
    return trace, shown[:3]


# State dicts


def in_two_by_dicts(stages: tuple[str, str], name: str, ema: bool) -> dict[str, Any]:
    """Three steps; another engine, at another stage, goes on from the dicts of the first."""
    options: dict[str, Any] = {"ema": {"decay": 0.9}} if ema else {}
    first = engine_of(name, cases.config_of(stages[0], **options))
    run_on(first, 0, 3)
    assert first.optimizer is not None
    weights, states = first.state_dict(), first.optimizer.state_dict()
    averages = cases.local_state(first)
    first.close()
    second = engine_of(name, cases.config_of(stages[1], **options))
    assert second.optimizer is not None
    second.load_state_dict(weights)
    second.optimizer.load_state_dict(states)
    same = cases.local_state(second)
    losses = run_on(second, 3, STEPS)
    found = {"losses": losses, "before": averages, "after": same, "facts": second.optimizer.arithmetic.saved()}
    second.close()
    return found


@pytest.mark.parametrize(
    ("name", "stages", "ema"),
    [("NAdam", ("3", "1"), True), ("Adagrad", ("0", "2"), False), ("ScheduleFree", ("2", "3"), True),
     ("Plain", ("1", "3k"), False)],
)  # fmt: skip
def test_training_goes_on_from_state_dicts(pools: Pools, name: str, stages: tuple[str, str], ema: bool) -> None:
    results = pools(2).run(in_two_by_dicts, stages, name, ema)
    expected = truth(name, 2, 1, "full")
    for rank, result in enumerate(results):
        assert result["losses"] == [row[rank] for row in expected.losses[3:]], name
    before, after = (cases.digest([result[key] for result in results]) for key in ("before", "after"))
    assert before == after


@pytest.mark.parametrize("name", ["NAdam", "Adagrad", "AMSGrad", "Plain"])
def test_plain_torch_and_an_engine_take_each_others_dicts(name: str) -> None:
    """The same class steps in both: bit for bit, in both directions, and dicts that are equal."""

    def plain(network: torch.nn.Module, optimizer: Any, first: int, last: int) -> None:
        for step in range(first, last):
            optimizer.zero_grad()
            cases.loss_of(network, step, 0, 0).backward()
            optimizer.step()

    config = {**cases.config_of("2"), "gradient_clipping": 0.0}
    network = cases.make_mlp()
    optimizer = optimizer_classes.make(name, optimizer_classes.groups_of(network, name))
    plain(network, optimizer, 0, 3)
    engine = engine_of(name, config)
    assert engine.optimizer is not None
    engine.load_state_dict(network.state_dict())
    engine.optimizer.load_state_dict(optimizer.state_dict())
    run_on(engine, 3, 5)
    plain(network, optimizer, 3, 5)
    weights, states = engine.state_dict(), engine.optimizer.state_dict()
    expected = optimizer.state_dict()
    assert all(torch.equal(weights[key], value) for key, value in network.state_dict().items())
    for number, entry in expected["state"].items():
        assert list(states["state"][number]) == list(entry)
        for key, value in entry.items():
            found = states["state"][number][key]
            assert torch.equal(found, value) if isinstance(value, torch.Tensor) else found == value, key
    assert states["param_groups"] == expected["param_groups"]
    other = cases.make_mlp()
    following = optimizer_classes.make(name, optimizer_classes.groups_of(other, name))
    other.load_state_dict(weights)
    following.load_state_dict(states)
    plain(other, following, 5, STEPS)
    run_on(engine, 5, STEPS)
    assert all(torch.equal(engine.state_dict()[key], value) for key, value in other.state_dict().items())
    engine.close()
