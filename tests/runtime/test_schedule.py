"""schedule.py: predictions, prefetching and holds, on a real engine at one rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardengine
from shardengine.runtime.prefetch_order import PrefetchOrder
from shardengine.runtime.schedule import Schedule
from shardengine.runtime.unit import Unit, UnshardState
from tests.support.cases import Mlp, config_of, make_engine, make_mlp


def recorded(order: list[int]) -> PrefetchOrder:
    prediction = PrefetchOrder()
    for unit in order:
        prediction.request(unit)
    prediction.end()
    return prediction


def test_a_prediction_predicts_nothing_in_its_first_pass() -> None:
    prediction = PrefetchOrder()
    prediction.request(1)
    assert list(prediction.ahead()) == []


def test_a_prediction_predicts_the_rest_of_the_last_pass() -> None:
    prediction = recorded([1, 2, 3])
    assert list(prediction.ahead()) == [1, 2, 3]
    prediction.request(1)
    assert list(prediction.ahead()) == [2, 3]


def test_a_wrong_prediction_ends_predicting_for_the_pass_and_is_learnt() -> None:
    prediction = recorded([1, 2, 3])
    for unit in (1, 3, 2):
        prediction.request(unit)
        assert unit == 1 or list(prediction.ahead()) == []
    prediction.end()
    assert list(prediction.ahead()) == [1, 3, 2]


def test_a_pass_longer_than_predicted_goes_on_without_prediction() -> None:
    prediction = recorded([1])
    prediction.request(1)
    prediction.request(2)
    assert list(prediction.ahead()) == []
    prediction.end()
    assert list(prediction.ahead()) == [1, 2]


def parts(engine: shardengine.Engine) -> tuple[Schedule, list[Unit]]:
    return engine._core.schedule, engine._core.units


MANY = 50_000_000


def blocks_of(model: nn.Module) -> Any:
    """The blocks of an ``Mlp``: a ModuleList of Sequentials."""
    return model.blocks


@contextmanager
def an_engine(stage: str = "3", prefetch: int = MANY, model: nn.Module | None = None) -> Iterator[shardengine.Engine]:
    config = config_of(stage, zero={"stage3_prefetch_bucket_size": prefetch})
    engine = make_engine(make_mlp() if model is None else model, config)
    yield engine
    engine.close()


def step(engine: shardengine.Engine) -> float:
    torch.manual_seed(0)
    loss = engine(torch.randn(5, 7)).square().mean()
    engine.backward(loss)
    engine.step()
    return loss.item()


LETTER = {UnshardState.SHARDED: "s", UnshardState.UNSHARDING: "g", UnshardState.UNSHARDED: "f"}
"""Sharded, unsharding (g), unsharded (f)."""


def states(engine: shardengine.Engine) -> str:
    """The root and the three blocks: s(harded), g(athering) or f(ull)."""
    return "".join(LETTER[unit.state] for unit in parts(engine)[1])


@contextmanager
def watching(engine: shardengine.Engine) -> Iterator[list[str]]:
    """The states when each block computes its forward, and then when each gets its gradient."""
    seen: list[str] = []
    handles = []
    for block in blocks_of(engine.module):
        handles.append(block[1].register_forward_pre_hook(lambda _module, _args: seen.append(states(engine))))
        handles.append(block[1].register_full_backward_pre_hook(lambda _module, _grads: seen.append(states(engine))))
    yield seen
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize(
    ("prefetch", "expected"),
    [
        (0, ["ffss", "fsfs", "fssf", "fssf", "fsfs", "ffss"]),
        (1, ["ffgs", "fsfg", "fssf", "fsgf", "fgfs", "ffss"]),
        (MANY, ["ffgg", "fsfg", "fggf", "fggf", "fgfs", "ffss"]),
    ],
)
def test_units_are_unsharded_ahead_within_the_budget_but_at_least_one(prefetch: int, expected: list[str]) -> None:
    with an_engine(prefetch=prefetch) as engine:
        step(engine)
        with watching(engine) as seen:
            step(engine)
        assert seen == expected


def test_a_budget_of_one_and_a_half_units_gathers_one_ahead_and_of_two_units_two() -> None:
    with an_engine() as engine:
        size = parts(engine)[1][1].elements
    one = ["ffgs", "fsfg", "fssf", "fsgf", "fgfs", "ffss"]
    two = ["ffgg", "fsfg", "fsgf", "fggf", "fgfs", "ffss"]
    for budget, expected in ((size, one), (size * 3 // 2, one), (size * 2, two)):
        with an_engine(prefetch=budget) as engine:
            step(engine)
            with watching(engine) as seen:
                step(engine)
            assert seen == expected


def test_the_first_pass_gathers_nothing_ahead() -> None:
    with an_engine() as engine, watching(engine) as seen:
        step(engine)
        assert seen[:3] == ["ffss", "fsfs", "fssf"]


def test_kept_after_forward_a_unit_is_full_until_its_backward_is_over() -> None:
    with an_engine("3k", prefetch=0) as engine:
        with watching(engine) as seen:
            step(engine)
        assert seen == ["ffss", "fffs", "ffff", "ffff", "fffs", "ffss"]


@pytest.mark.parametrize("stage", ["3", "3k"])
def test_everything_rests_sharded_after_a_step(stage: str) -> None:
    with an_engine(stage) as engine:
        for _ in range(2):
            step(engine)
            assert states(engine) == "ssss"


def test_weights_that_rest_replicated_are_one_unit_that_is_always_full() -> None:
    with an_engine("2") as engine:
        step(engine)
        assert states(engine) == "f"


@pytest.mark.parametrize("stage", ["3", "3k"])
def test_without_grad_everything_rests_after_the_outermost_forward(stage: str) -> None:
    with an_engine(stage) as engine:
        for _ in range(2):
            with torch.no_grad():
                engine(torch.randn(5, 7))
            assert states(engine) == "ssss"


def test_an_evaluation_between_forward_and_backward_leaves_the_training_pass_alone() -> None:
    with an_engine() as plain, an_engine() as mixed:
        expected = [step(plain) for _ in range(2)]
        found = []
        for _ in range(2):
            torch.manual_seed(0)
            loss = mixed(torch.randn(5, 7)).square().mean()
            with torch.no_grad():
                mixed(torch.randn(2, 7))
            mixed.backward(loss)
            mixed.step()
            found.append(loss.item())
        assert found == expected and states(mixed) == "ssss"


def test_a_forward_without_a_backward_is_put_to_rest_by_the_next_step() -> None:
    with an_engine() as engine:
        engine(torch.randn(5, 7))
        assert states(engine)[0] == "f"
        step(engine)
        assert states(engine) == "ssss"


class Skipping(Mlp):
    """Runs its blocks in the order of ``order``."""

    order = (0, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for index in self.order:
            x = x + self.blocks[index](x) * self.scale
        return self.out(x)


def skipping() -> Skipping:
    torch.manual_seed(11)
    return Skipping()


def test_a_wrong_prediction_changes_no_result_and_leaves_nothing_unsharded() -> None:
    orders: list[tuple[int, ...]] = [(0, 1, 2), (0, 2), (2, 1, 0), (1, 1, 0)]
    losses: list[list[float]] = []
    for stage, prefetch in (("2", 0), ("3", 0), ("3", MANY)):
        model = skipping()
        with an_engine(stage, prefetch, model) as engine:
            row = []
            for order in orders:
                model.order = order  # type: ignore[assignment]
                row.append(step(engine))
            losses.append(row)
            assert set(states(engine)[1:]) <= {"s"}
    assert losses[0] == losses[1] == losses[2]


def test_a_unit_called_twice_is_held_until_both_calls_are_over() -> None:
    model = skipping()
    model.order = (0, 0)  # type: ignore[assignment]
    with an_engine(prefetch=0, model=model) as engine:
        with watching(engine) as seen:
            step(engine)
        assert seen == ["ffss"] * 4 and states(engine) == "ssss"


def test_a_forward_that_raised_is_forgotten() -> None:
    with an_engine() as broken, an_engine() as plain:
        with pytest.raises(RuntimeError):
            broken(torch.randn(5, 8))
        assert step(broken) == step(plain)
        assert states(broken) == "ssss"


def test_a_forward_that_raised_inside_a_unit_is_forgotten() -> None:
    def refuse(*_args: Any) -> None:
        raise ValueError("inside")

    with an_engine() as broken, an_engine() as plain:
        handle = blocks_of(broken.module)[1][1].register_forward_pre_hook(refuse)
        with pytest.raises(ValueError):
            broken(torch.randn(5, 7))
        handle.remove()
        assert [step(broken) for _ in range(2)] == [step(plain) for _ in range(2)]
        assert states(broken) == "ssss"


def test_an_output_that_is_a_view_of_a_units_weights_stays_valid() -> None:
    model = make_mlp()

    class Lender(nn.Module):
        """Returns its own weight beside its result."""

        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.inner(x), self.inner[0].weight[0]  # type: ignore[index]

    class Lending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Lender(block) for block in blocks_of(model))

        def forward(self, x: Tensor) -> list[Tensor]:
            return [block(x)[1] for block in self.blocks]

    lending = Lending()
    expected = [block.inner[0].weight[0].detach().clone() for block in blocks_of(lending)]
    with an_engine(prefetch=0, model=lending) as engine:
        for _ in range(2):
            rows = engine(torch.randn(5, 13))
            engine._core.schedule.reshard_all()
            assert states(engine) == "ssss"
            assert all(torch.equal(row.detach(), before) for row, before in zip(rows, expected, strict=True))
            torch.empty(4096).fill_(7)


def test_only_units_with_trainable_parameters_train() -> None:
    model = make_mlp()
    blocks_of(model)[1].requires_grad_(False)
    with an_engine(model=model) as engine:
        schedule, units = parts(engine)
        assert [schedule.trains(unit.index) for unit in units] == [True, True, False, True]
        assert units[2].state is UnshardState.SHARDED
