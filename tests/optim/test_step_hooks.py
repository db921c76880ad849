"""Hooks of an optimizer's step run once per update, and what they change is what is stepped; ReduceLROnPlateau."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import shardengine
from shardengine import Engine
from shardengine.errors import MismatchError
from tests.support import cases
from tests.support.raising import raises
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]
STAGES = list(cases.STAGES)


def make(stage: str = "2", micros: int = 1, **options: Any) -> tuple[Engine, torch.optim.Optimizer]:
    """An engine, and the optimizer that was given to it."""
    model = cases.make_mlp()
    given = cases.make_optimizer(model, "AdamW")
    mesh = cases.mesh_of_this_process() if torch.distributed.is_initialized() else None
    engine = shardengine.initialize(model, cases.config_of(stage, micros, **options), optimizer=given, mesh=mesh)
    return engine, given


def micro_batches(engine: Engine, step: Callable[[], Any], steps: int) -> None:
    for number in range(steps):
        for micro in range(engine.gradient_accumulation_steps()):
            engine.backward(cases.loss_of(engine, number, engine.rank, micro))
            step()


@pytest.mark.parametrize("whose", ["the engine's", "the user's"])
def test_once_per_update_whoever_calls_and_wherever_they_are_registered(whose: str) -> None:
    said: list[str] = []
    model = cases.make_mlp()
    given = cases.make_optimizer(model, "AdamW")
    given.register_step_pre_hook(lambda each, args, _: said.append(f"early {each is given and args[0] is given}"))
    handles = [
        register_optimizer_step_pre_hook(lambda *_: said.append("global before")),
        register_optimizer_step_post_hook(lambda *_: said.append("global after")),
    ]
    try:
        engine = shardengine.initialize(model, cases.config_of("3", 3), optimizer=given)
        optimizer = engine.optimizer
        assert optimizer is not None
        optimizer.register_step_pre_hook(lambda each, *_: said.append(f"before {each is optimizer}"))
        given.register_step_post_hook(lambda *_: said.append("after"))
        gone = optimizer.register_step_post_hook(lambda *_: said.append("gone"))
        gone.remove()
        micro_batches(engine, engine.step if whose == "the engine's" else given.step, 2)
        once = ["global before", "before True", "early True", "after", "global after"]
        assert said == once * 2
        engine.backward(cases.loss_of(engine, 5, 0, 0))
        optimizer.step()
        assert said == once * 2, "a step() that only counts has no hooks"
        engine.close()
    finally:
        for handle in handles:
            handle.remove()


def halves(optimizer: Any, _args: Any, _kwargs: Any) -> None:
    """What a pre hook may do: gradients, and rates."""
    for group in optimizer.param_groups:
        group["lr"] *= 0.5
        for parameter in group["params"]:
            parameter.grad.clamp_(-0.01, 0.01)


def hooked() -> None:
    """By a hook, or by the loop between backward and step(): the same bits, also on several ranks."""
    for stage in STAGES:
        found = []
        for way in ("hook", "loop"):
            engine, given = make(stage, zero={"reduce_bucket_size": 200})
            if way == "hook":
                given.register_step_pre_hook(halves)
            for step in range(3):
                engine.backward(cases.loss_of(engine, step, engine.rank, 0))
                if way == "loop":
                    halves(given, (), {})
                engine.step()
            assert engine.optimizer is not None
            found.append((engine.state_dict(), engine.get_global_grad_norm(), engine.get_lr()))
            engine.close()
        (weights, *rest), (others, *more) = found
        assert rest == more and all(torch.equal(value, others[key]) for key, value in weights.items()), stage


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_a_pre_hook_changes_is_what_is_stepped_with(pools: Pools, ranks: int) -> None:
    pools(ranks).run(hooked)


def test_a_skipped_step_has_pre_hooks_alone_and_they_may_save_it() -> None:
    said: list[str] = []
    engine, given = make("2")
    given.register_step_pre_hook(lambda *_: said.append("before"))
    given.register_step_post_hook(lambda *_: said.append(f"after {engine.global_steps}"))
    for step in range(3):
        loss = cases.loss_of(engine, step, 0, 0)
        engine.backward(loss * float("inf") if step == 1 else loss)
        engine.step()
    assert said == ["before", "after 1", "before", "before", "after 3"] and engine.skipped_steps == 1

    def save(optimizer: Any, *_: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad.nan_to_num_(0.0, 0.0, 0.0)

    given.register_step_pre_hook(save)
    engine.backward(cases.loss_of(engine, 3, 0, 0) * float("inf"))
    engine.step()
    assert engine.skipped_steps == 1 and said[-1] == "after 4"
    engine.close()


def test_a_post_hook_comes_before_the_scheduler() -> None:
    engine, given = make("2")
    engine.lr_scheduler = lr_scheduler.ExponentialLR(given, 0.5)
    rates: list[float] = []
    given.register_step_post_hook(lambda each, *_: rates.append(each.param_groups[0]["lr"]))
    micro_batches(engine, engine.step, 2)
    assert rates == [1e-2, 5e-3]
    engine.close()


def test_arguments_that_a_hook_wants_to_change_are_refused() -> None:
    engine, given = make("2")
    handle = given.register_step_pre_hook(lambda each, args, kwargs: ((each, None), kwargs))
    engine.backward(cases.loss_of(engine, 0, 0, 0))
    with raises("optimizer-hook-returned-value", "lambda"):
        engine.step()
    handle.remove()
    given.register_step_pre_hook(lambda each, args, kwargs: (args, kwargs))
    engine.step()
    assert engine.global_steps == 1
    engine.close()


def test_a_pre_hook_is_refused_where_buckets_are_stepped_in_backward() -> None:
    early = {"offload_optimizer": {"device": "cpu", "step_in_backward": True}}
    engine, given = make("2", zero=early, gradient_clipping=0.0)
    handle = given.register_step_pre_hook(halves)
    with raises("optimizer-hook-step-in-backward", "halves"):
        engine.backward(cases.loss_of(engine, 0, 0, 0))
    handle.remove()
    said: list[int] = []
    given.register_step_post_hook(lambda *_: said.append(1))
    micro_batches(engine, engine.step, 2)
    assert said == [1, 1]
    engine.close()


# ReduceLROnPlateau


def plateau(optimizer: Any) -> lr_scheduler.ReduceLROnPlateau:
    return lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)


METRICS = [1.0, 0.5, 0.7, 0.4, 0.6, 0.6]


@pytest.mark.parametrize("way", ["function", "given", "set", "own"])
def test_the_user_steps_a_scheduler_that_needs_a_metric(way: str) -> None:
    model = cases.make_mlp()
    given = cases.make_optimizer(model, "AdamW")
    scheduler: Any = {"function": plateau, "given": plateau(given)}.get(way)
    engine = shardengine.initialize(model, cases.config_of("2"), optimizer=given, lr_scheduler=scheduler)
    if way == "set":
        engine.lr_scheduler = plateau(engine.optimizer)
    mine = plateau(engine.optimizer) if way == "own" else engine.lr_scheduler
    assert isinstance(mine, lr_scheduler.ReduceLROnPlateau)
    rates = []
    for step, metric in enumerate(METRICS):
        engine.backward(cases.loss_of(engine, step, 0, 0))
        engine.step()
        mine.step(metric)
        rates.append(engine.get_lr()[0])
    assert rates == [1e-2, 1e-2, 5e-3, 5e-3, 2.5e-3, 1.25e-3] and mine.last_epoch == len(METRICS)
    engine.close()


def test_it_goes_with_an_optimizer_that_the_config_names() -> None:
    """As the refusal of ``"scheduler": {"type": "ReduceLROnPlateau"}`` says."""
    config = {**cases.config_of("2"), "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}
    engine = shardengine.initialize(
        cases.make_mlp(),
        config,
        lr_scheduler=lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0),
    )
    for step, metric in enumerate(METRICS):
        engine.backward(cases.loss_of(engine, step, 0, 0))
        engine.step()
        engine.lr_scheduler.step(metric)
    assert engine.get_lr() == [1.25e-3]
    engine.close()


@pytest.mark.parametrize("steps", [0, 3])
def test_it_is_in_checkpoints_and_state_dicts(steps: int, tmp_path: Path) -> None:
    """At the first moment its best metric is infinite, which JSON has not."""
    engine, given = make("2")
    engine.lr_scheduler = plateau(given)
    for step in range(steps):
        micro_batches(engine, engine.step, 1)
        engine.lr_scheduler.step(METRICS[step])
    engine.save_checkpoint(tmp_path)
    saved, state = copy.deepcopy(engine.lr_scheduler.state_dict()), given.state_dict()
    engine.close()
    for way in ("checkpoint", "dicts"):
        again, other = make("3")
        again.lr_scheduler = plateau(other)
        if steps == 0:
            again.lr_scheduler.step(0.1)
        if way == "checkpoint":
            again.load_checkpoint(tmp_path)
        else:
            again.lr_scheduler.load_state_dict(saved)
            other.load_state_dict(state)
        assert again.lr_scheduler.state_dict() == saved
        rates = []
        for metric in METRICS[steps:]:
            again.lr_scheduler.step(metric)
            rates.append(again.get_lr()[0])
        assert rates == [1e-2, 1e-2, 5e-3, 5e-3, 2.5e-3, 1.25e-3][steps:]
        again.close()


def test_a_new_group_needs_a_rate_in_it() -> None:
    model: Any = cases.make_mlp()
    optimizer = torch.optim.AdamW([model.out.weight])
    engine = shardengine.initialize(model, cases.config_of("2"), optimizer=optimizer, lr_scheduler=plateau)
    assert engine.optimizer is not None
    with raises("scheduler-cannot-add-group"):
        engine.optimizer.add_param_group({"params": [model.out.bias]})
    engine.lr_scheduler.min_lrs.append(0.0)
    engine.optimizer.add_param_group({"params": [model.out.bias]})
    engine.lr_scheduler.step(1.0)
    engine.close()


def differing() -> str:
    engine, given = make("2")
    engine.lr_scheduler = plateau(given)
    for step in range(2):
        engine.backward(cases.loss_of(engine, step, engine.rank, 0))
        engine.step()
        engine.lr_scheduler.step(1.0 - 0.5 * step * engine.rank)
    try:
        engine.backward(cases.loss_of(engine, 2, engine.rank, 0))
    except MismatchError as error:
        return str(error)
    return ""


def test_metrics_that_differ_between_ranks_are_named(pools: Pools) -> None:
    for said in pools(2).run(differing):
        assert "lr of optimizer group 0 is" in said and "ReduceLROnPlateau) needs the metric's mean" in said


@pytest.mark.parametrize(
    "make_scheduler",
    [
        lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (step + 1)),
        lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.ConstantLR(o, 0.5, 2), lr_scheduler.ExponentialLR(o, 0.5)], [2]
        ),
        lambda o: lr_scheduler.OneCycleLR(o, 0.1, 10),
    ],
    ids=["LambdaLR", "SequentialLR", "OneCycleLR"],
)
def test_other_schedulers_go_on_from_dicts(make_scheduler: Callable[[Any], Any]) -> None:
    engine, _ = make("2")
    engine.lr_scheduler = make_scheduler(engine.optimizer)
    micro_batches(engine, engine.step, 3)
    assert engine.optimizer is not None
    weights, state, saved = engine.state_dict(), engine.optimizer.state_dict(), engine.lr_scheduler.state_dict()
    saved = copy.deepcopy(saved)
    micro_batches(engine, engine.step, 3)
    again, _ = make("3")
    again.lr_scheduler = make_scheduler(again.optimizer)
    assert again.optimizer is not None
    again.lr_scheduler.load_state_dict(saved)
    again.optimizer.load_state_dict(state)
    again.load_state_dict(weights)
    micro_batches(again, again.step, 3)
    assert again.get_lr() == engine.get_lr()
    ours, theirs = again.state_dict(), engine.state_dict()
    assert all(torch.equal(value, theirs[key]) for key, value in ours.items())
    engine.close()
    again.close()
