"""The forms in which initialize takes an optimizer and a learning-rate scheduler, against plain torch."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import shardengine
from shardengine.errors import UsageError
from shardengine.offload import CPUAdam
from tests import oracle
from tests.support import cases
from tests.support.comparing import assert_equal_to_truth
from tests.support.ranks import RankPool
from tests.support.special_losses import CASES

Pools = Callable[[int], RankPool]
CASE = CASES["two forwards, one backward"]
STEPS = 4
ADAMW: dict[str, Any] = {"lr": 0.01, "betas": (0.8, 0.9), "eps": 1e-7, "weight_decay": 0.05}
FORMS = ("optimizer", "CPUAdam", "callable", "config", "config over groups")


def engine_of(form: str, stage: str, **options: Any) -> shardengine.Engine:
    """An engine whose AdamW was given in one of the forms."""
    model = CASE.make()
    config = cases.config_of(stage, zero={"reduce_bucket_size": 600}, **options.pop("config", {}))
    section = {"type": "AdamW", "params": {**ADAMW, "betas": list(ADAMW["betas"])}}
    mesh = cases.mesh_of_this_process()
    if form in ("optimizer", "CPUAdam"):
        made_by: Any = CPUAdam if form == "CPUAdam" else torch.optim.AdamW
        optimizer = made_by(model.parameters(), **ADAMW)
        return shardengine.initialize(model, config, optimizer=optimizer, mesh=mesh, **options)
    if form == "callable":
        make = lambda parameters: torch.optim.AdamW(parameters, **ADAMW)  # noqa: E731
        return shardengine.initialize(model, config, optimizer=make, mesh=mesh, **options)
    config = {**config, "optimizer": section}
    if form == "config":
        return shardengine.initialize(model, config, mesh=mesh, **options)
    groups: list[dict[str, Any]] = [{"params": list(model.inp.parameters()), "lr": 0.002, "weight_decay": 0.0},
              {"params": [*model.blocks.parameters(), *model.out.parameters()]}]  # fmt: skip
    return shardengine.initialize(model, config, model_parameters=groups, mesh=mesh, **options)


def train_form(form: str, stage: str) -> dict[str, Any]:
    engine = engine_of(form, stage)
    losses = []
    for step in range(STEPS):
        loss = CASE.loss(engine, step, engine.rank, 0)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    weights = {name: cases.copy_out(value) for name, value in engine.state_dict().items()}
    result = {"losses": losses, "weights": weights, "lr": engine.get_lr()}
    engine.close()
    return result


def train_forms(stage: str) -> dict[str, dict[str, Any]]:
    return {form: train_form(form, stage) for form in FORMS}


def truth(form: str) -> oracle.Trace:
    model: Any = CASE.make()
    groups: list[dict[str, Any]] = [{"params": list(model.parameters()), **ADAMW}]
    if form == "config over groups":
        groups = [{**ADAMW, "params": list(model.inp.parameters()), "lr": 0.002, "weight_decay": 0.0},
                  {**ADAMW, "params": [*model.blocks.parameters(), *model.out.parameters()]}]  # fmt: skip
    return oracle.train(model, CASE.loss, ranks=2, steps=STEPS, kind="AdamW", groups=groups, clip=cases.CLIP)


@pytest.mark.parametrize("stage", list(cases.STAGES))
def test_resolve_equal_the_oracle(pools: Pools, stage: str) -> None:
    results = pools(2).run(train_forms, stage)
    for form in FORMS:
        expected = truth(form)
        for rank, result in enumerate(results):
            assert result[form]["losses"] == [row[rank][0] for row in expected.losses], form
            assert result[form]["lr"] == ([0.002, 0.01] if "groups" in form else [0.01])
        for name, value in expected.parameters.items():
            assert torch.equal(results[0][form]["weights"][name], value), (form, name)


def decaying(made_by: Any, decoupled: tuple[bool | None, bool | None]) -> shardengine.Engine:
    """An engine at one rank whose two groups say (None: do not) whether weight decay is decoupled."""
    model = cases.make_mlp()
    groups = cases.groups_of(model, "Adam")
    for group, said in zip(groups, decoupled, strict=True):
        group |= {} if said is None else {"decoupled_weight_decay": said}
    return shardengine.initialize(model, cases.config_of("2"), optimizer=made_by(groups))


@pytest.mark.parametrize(
    ("made_by", "decoupled", "kind"),
    [
        (torch.optim.Adam, (None, None), "Adam"),
        (torch.optim.Adam, (True, True), "AdamW"),
        (torch.optim.AdamW, (None, None), "AdamW"),
        (torch.optim.AdamW, (False, False), "Adam"),
    ],
)
def test_the_groups_say_whether_weight_decay_is_decoupled(made_by: Any, decoupled: Any, kind: str) -> None:
    engine = decaying(made_by, decoupled)
    result = cases.run_steps(engine, STEPS)
    engine.close()
    assert_equal_to_truth([result], cases.truth("mlp", kind, 1, 1, "full", steps=STEPS))


@pytest.mark.parametrize(
    ("made_by", "decoupled"), [(torch.optim.Adam, (None, True)), (torch.optim.AdamW, (None, False))]
)
def test_groups_that_decay_in_different_ways_are_stepped_by_their_class(made_by: Any, decoupled: Any) -> None:
    engine = decaying(made_by, decoupled)
    result = cases.run_steps(engine, STEPS)
    engine.close()
    model = cases.make_mlp()
    groups = cases.groups_of(model, "Adam")
    for group, said in zip(groups, decoupled, strict=True):
        group |= {} if said is None else {"decoupled_weight_decay": said}
    made = made_by, ("exp_avg", "exp_avg_sq")
    truth = oracle.train(model, cases.loss_of, ranks=1, steps=STEPS, groups=groups, made=made, clip=cases.CLIP)
    assert_equal_to_truth([result], truth)


def steps_without_optimizer() -> list[str]:
    engine = shardengine.initialize(CASE.make(), cases.config_of("3"), mesh=cases.mesh_of_this_process())
    engine.backward(CASE.loss(engine, 0, engine.rank, 0))
    texts = []
    for call in (engine.step, engine.get_lr, lambda: engine.clip_grad_norm_(1.0)):
        try:
            call()
        except UsageError as error:
            texts.append(str(error))
    engine.close()
    return texts


def test_without_an_optimizer_step_says_how_to_get_one(pools: Pools) -> None:
    for texts in pools(2).run(steps_without_optimizer):
        assert len(texts) == 3
        for text, call in zip(texts, ("step()", "get_lr()", "clip_grad_norm_()"), strict=True):
            assert call in text and "optimizer=" in text and '"optimizer": {"type": "AdamW"' in text


# Schedulers


def warm_up(step: int) -> float:
    return min(1.0, (step + 1) / 3)


def run_schedule(form: str, stage: str) -> dict[str, Any]:
    """Learning rates of the steps, and every warning that came."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if form == "made over the user's optimizer":
            model = CASE.make()
            optimizer = cases.make_optimizer(model, "AdamW")
            scheduler = lr_scheduler.LambdaLR(optimizer, warm_up)
            engine = shardengine.initialize(
                model, cases.config_of(stage, micros=2), optimizer=optimizer, lr_scheduler=scheduler,
                mesh=cases.mesh_of_this_process(),
            )  # fmt: skip
            assert engine.lr_scheduler is scheduler
        elif form == "callable":
            model = CASE.make()
            engine = cases.make_engine(
                model, cases.config_of(stage, micros=2), lr_scheduler=lambda o: lr_scheduler.LambdaLR(o, warm_up)
            )
        else:
            section = {"type": "ExponentialLR", "params": {"gamma": 0.5}}
            engine = cases.make_engine(CASE.make(), cases.config_of(stage, micros=2, scheduler=section))
        rates = [engine.get_lr()]
        for step in range(STEPS):
            for micro in range(2):
                engine.backward(CASE.loss(engine, step, engine.rank, micro))
                engine.step()
            rates.append(engine.get_lr())
        weights = {name: cases.copy_out(value) for name, value in engine.state_dict().items()}
        engine.close()
    return {"rates": rates, "weights": weights, "warnings": [str(w.message) for w in caught]}


def plain_schedule(form: str) -> tuple[list[list[float]], nn.Module]:
    """The same with torch alone, one process playing two ranks."""
    model = CASE.make()
    optimizer = cases.make_optimizer(model, "AdamW")
    scheduler: Any = (
        lr_scheduler.ExponentialLR(optimizer, 0.5) if form == "config" else lr_scheduler.LambdaLR(optimizer, warm_up)
    )
    rates = [[group["lr"] for group in optimizer.param_groups]]
    for step in range(STEPS):
        for rank in range(2):
            for micro in range(2):
                (CASE.loss(model, step, rank, micro) / 4).backward()
        nn.utils.clip_grad_norm_(model.parameters(), cases.CLIP)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        rates.append([group["lr"] for group in optimizer.param_groups])
    return rates, model


@pytest.mark.parametrize("form", ["config", "callable", "made over the user's optimizer"])
@pytest.mark.parametrize("stage", ["0", "2", "3"])
def test_scheduler_forms_equal_plain_torch(pools: Pools, stage: str, form: str) -> None:
    """Learning rates exactly, one scheduler step per optimizer step, no warning; weights within fp32 rounding."""
    rates, model = plain_schedule(form)
    assert len({tuple(row) for row in rates}) > 2
    results = pools(2).run(run_schedule, form, stage)
    for result in results:
        assert result["rates"] == rates
        assert result["warnings"] == []
    for name, value in model.named_parameters():
        torch.testing.assert_close(results[0]["weights"][name], value.detach(), rtol=1e-4, atol=1e-5)
