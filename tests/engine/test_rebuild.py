"""A new layout between steps: what is refused, agreement of ranks, schedulers, memory (bits: tests/parity)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shardengine.comm.flight_recorder import Purpose
from shardengine.core import rebuild
from shardengine.errors import MismatchError, UsageError
from tests.parity.test_changed_models import OPTIONS, engine_of, group, set_trainable
from tests.stages.test_memory import live_storages, make_tower, only_new_tensors
from tests.stages.test_memory_placing import Peak
from tests.support import cases
from tests.support.raising import raises
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]
STAGES = list(cases.STAGES)


def begin(stage: str, micros: int = 1, **options: Any) -> Any:
    """An engine whose first block is frozen and in no group, and whose second is frozen and in one."""
    model: Any = cases.make_mlp()
    set_trainable(model.blocks[0], False)
    set_trainable(model.blocks[1], False)
    chosen = [p for p in model.parameters() if p.requires_grad] + list(model.blocks[1].parameters())
    make = options.pop("lr_scheduler", None)
    return engine_of(
        model, torch.optim.AdamW([group("AdamW", chosen)]), cases.config_of(stage, micros, **options), lr_scheduler=make
    )


def one_step(engine: Any, step: int) -> None:
    for micro in range(engine.gradient_accumulation_steps()):
        engine.backward(cases.loss_of(engine, step, engine.rank, micro))
        engine.step()


def step_both(engine: Any, calm: Any, step: int) -> None:
    one_step(engine, step)
    one_step(calm, step)


def assert_same(engine: Any, calm: Any) -> None:
    """Both hold the same bits; closes them."""
    assert cases.digest([cases.local_state(engine)]) == cases.digest([cases.local_state(calm)])
    engine.close()
    calm.close()


def new_group(engine: Any, **options: Any) -> dict[str, Any]:
    return {**group("AdamW", set_trainable(engine.module.blocks[0], True)), **options}


BAD_GROUPS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "no dict": (lambda engine: [engine.module.scale], 'expected a dict with "params"'),
    "no params": (lambda engine: {"lr": 0.1}, 'expected a dict with "params"'),
    "empty": (lambda engine: new_group(engine, params=[]), "at least one parameter"),
    "another model's": (lambda engine: new_group(engine, params=[nn.Parameter(torch.ones(3))]), "not one of the model"),
    "known": (
        lambda engine: new_group(engine, params=[engine.module.inp.weight]),
        "'inp.weight' is in optimizer group 0",
    ),
    "known, alone": (lambda engine: {"params": engine.module.inp.weight}, "'inp.weight' is in optimizer group 0"),
    "twice": (lambda engine: new_group(engine, params=[*engine.module.blocks[0].parameters()] * 2), "in no group"),
    "a set": (lambda engine: new_group(engine, params={engine.module.blocks[0][0].weight}), "ordered"),
    "an option": (lambda engine: new_group(engine, amsgrad=True), "amsgrad=True in group 1"),
    "another kind": (lambda engine: new_group(engine, decoupled_weight_decay=False), "decoupled_weight_decay"),
}


def attempt(engine: Any, bad: Any, sentence: str) -> None:
    """``bad`` is refused, and nothing has changed."""
    before, held = len(engine.optimizer.param_groups), dict(bad) if isinstance(bad, dict) else bad
    with pytest.raises((UsageError, TypeError), match=sentence):
        engine.optimizer.add_param_group(bad)
    assert len(engine.optimizer.param_groups) == before
    assert not isinstance(bad, dict) or (list(bad) == list(held) and all(bad[key] is held[key] for key in bad))
    set_trainable(engine.module.blocks[0], False)


@pytest.mark.parametrize("stage", ["0", "2", "3"])
def test_bad_groups_are_refused_and_leave_no_trace(stage: str) -> None:
    engine, calm = begin(stage), begin(stage)
    step_both(engine, calm, 0)
    for make, sentence in BAD_GROUPS.values():
        attempt(engine, make(engine), sentence)
    step_both(engine, calm, 1)
    assert_same(engine, calm)


@pytest.mark.parametrize("stage", STAGES)
def test_between_two_steps_is_the_only_time(stage: str) -> None:
    engine, calm = begin(stage, 2), begin(stage, 2)
    step_both(engine, calm, 0)
    with engine.full_params():
        attempt(engine, new_group(engine), r"inside full_params\(\)")
    with engine.no_sync():
        attempt(engine, new_group(engine), r"inside no_sync\(\)")
        set_trainable(engine.module.blocks[1], True)
        with pytest.raises(UsageError, match=r"'blocks\.1\.0\.weight' inside no_sync"):
            cases.loss_of(engine, 1, 0, 0)
        set_trainable(engine.module.blocks[1], False)
    engine.backward(cases.loss_of(engine, 1, 0, 0))
    engine.step()
    attempt(engine, new_group(engine), "in the middle of a step")
    set_trainable(engine.module.blocks[1], True)
    with pytest.raises(UsageError, match=r"'blocks\.1\.0\.weight' in the middle of a step"):
        cases.loss_of(engine, 1, 0, 1)
    set_trainable(engine.module.blocks[1], False)
    engine.backward(cases.loss_of(engine, 1, 0, 1))
    engine.step()
    one_step(calm, 1)
    assert_same(engine, calm)


@pytest.mark.parametrize("stage", STAGES)
def test_what_no_group_holds_is_named(stage: str) -> None:
    engine = begin(stage)
    set_trainable(engine.module.blocks[0], True)
    with raises("weights-unfrozen-without-group", "'blocks.0.0.weight'", "0"):
        cases.loss_of(engine, 0, 0, 0)
    with torch.no_grad():
        cases.loss_of(engine, 0, 0, 0)
    engine.close()


@pytest.mark.parametrize("stage", STAGES)
def test_a_loss_from_before_the_change_is_refused(stage: str) -> None:
    engine, calm = begin(stage), begin(stage)
    loss = cases.loss_of(engine, 0, 0, 0)
    for each in (engine, calm):
        each.optimizer.add_param_group(new_group(each))
    with pytest.raises((UsageError, RuntimeError), match=r"ran before|modified by an inplace operation"):
        engine.backward(loss)
    engine.zero_grad()
    step_both(engine, calm, 0)
    assert_same(engine, calm)


@pytest.mark.parametrize("stage", STAGES)
def test_a_group_may_be_added_frozen_and_unfrozen_later(stage: str) -> None:
    engine, calm = begin(stage), begin(stage)
    engine.module.blocks[0][0].weight.grad = torch.ones(29, 13)  # left over from before; must not join
    for each in (engine, calm):
        new = new_group(each)
        set_trainable(each.module.blocks[0], each is calm)
        each.optimizer.add_param_group(new)
        set_trainable(each.module.blocks[0], True)
    step_both(engine, calm, 0)
    step_both(engine, calm, 1)
    assert_same(engine, calm)


def test_weights_that_were_written_just_before_reach_their_masters() -> None:
    engine = begin("1", bf16={"enabled": True})
    with torch.no_grad():
        engine.module.inp.weight.fill_(0.5)
    engine.optimizer.add_param_group(new_group(engine))
    found = cases.assemble([cases.local_state(engine)])
    assert (found["inp.weight", "weight"] == 0.5).all()
    engine.close()


# Schedulers


def test_a_scheduler_moves_the_new_group_as_in_torch() -> None:
    engine = begin("2", lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))
    one_step(engine, 0)
    engine.optimizer.add_param_group(new_group(engine, lr=0.25))
    one_step(engine, 1)
    assert engine.get_lr() == [OPTIONS["AdamW"]["lr"] / 4, 0.125]
    engine.close()


@pytest.mark.parametrize("name", ["LambdaLR", "OneCycleLR"])
def test_a_scheduler_that_cannot_take_the_group_is_named_before_anything_changes(name: str) -> None:
    make: dict[str, Callable[[Any], Any]] = {
        "LambdaLR": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step),
        "OneCycleLR": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9),
    }
    engine = begin("2", lr_scheduler=make[name])
    one_step(engine, 0)
    attempt(engine, new_group(engine), f"{name} cannot schedule the new group")
    if name == "LambdaLR":
        engine.lr_scheduler.lr_lambdas.append(lambda step: 1.0)
        engine.lr_scheduler.base_lrs.append(0.25)
        engine.optimizer.add_param_group(new_group(engine))
    one_step(engine, 1)
    assert engine.get_lr()[1:] == ([0.25] if name == "LambdaLR" else [])
    engine.close()


# Ranks that disagree


def disagree(stage: str, about: str) -> str:
    """Rank 1 does something else than rank 0; the error, and training goes on."""
    engine = begin(stage)
    one_step(engine, 0)
    odd = engine.rank == 1
    with pytest.raises(MismatchError) as error:
        if about == "unfreezing":
            engine.module.blocks[1][0].weight.requires_grad_(odd)
            cases.loss_of(engine, 1, engine.rank, 0)
        elif about == "an error":
            bad = new_group(engine, params=[]) if odd else new_group(engine)
            try:
                engine.optimizer.add_param_group(bad)
            except UsageError as own:
                raise MismatchError(str(own)) from own
        else:
            chosen = list(engine.module.blocks[0].parameters())[odd if about == "parameters" else 0 :]
            new = new_group(engine, params=chosen, lr=0.1 + odd if about == "options" else 0.1)
            engine.optimizer.add_param_group(new)
    set_trainable(engine.module.blocks[0], False)
    set_trainable(engine.module.blocks[1], False)
    assert len(engine.optimizer.param_groups) == 1
    one_step(engine, 1)
    engine.close()
    return str(error.value)


@pytest.mark.parametrize("stage", ["1", "3"])
@pytest.mark.parametrize(
    ("about", "sentence"),
    [
        (
            "unfreezing",
            "set of unfrozen parameters differs between ranks: rank 0 has nothing more, rank 1 has [blocks.1",
        ),
        ("parameters", "parameters of the new optimizer group differs between ranks: rank 0 has [blocks.0.0.weight]"),
        ("options", "the optimizer differs between ranks"),
        ("an error", "at least one parameter"),
    ],
    ids=["unfreezing", "parameters", "options", "error"],
)
def test_ranks_that_disagree_are_told_and_go_on(pools: Pools, stage: str, about: str, sentence: str) -> None:
    for text in pools(2).run(disagree, stage, about):
        assert sentence in text


# Memory

BUCKET = 8192
SMALL = 1024


def peak_of_a_change(frozen: int) -> tuple[int, int, int, int]:
    """(largest live bytes while the layout changes, elements of the model, of its largest unit, ranks) at stage 3."""
    samples: list[int] = []
    with only_new_tensors():
        model = make_tower()
        for block in model.blocks[:frozen]:
            set_trainable(block, False)
        optimizer = torch.optim.AdamW(model.parameters())
        engine = engine_of(model, optimizer, cases.config_of("3", zero={"reduce_bucket_size": BUCKET}))
        x = torch.randn(4, 7)
        engine.backward(engine(x).square().mean())
        engine.step()
        engine._core.pool.clear()
        move = engine._core.collectives.move

        def observed(full: Any, source: Any, target: Any, what: Any, purpose: Purpose, *on_complete: Any) -> Any:
            if purpose is Purpose.REBUILD:
                assert "bucket" in what.label, "an error would not name it"
                samples.append(sum(live_storages().values()))
            return move(full, source, target, what, purpose, *on_complete)

        engine._core.collectives.move = observed
        set_trainable(model, True)
        engine(x)
        layout, ranks = engine._core.layout, engine.world_size
        largest = max(unit.elements for unit in engine._core.units)
    engine.close()
    return max(samples), layout.elements(trainable=True), largest, ranks


def test_at_stage_3_a_change_never_holds_the_whole_model(pools: Pools) -> None:
    """One unit whole, its new slices beside its old ones, and two buckets, on top of the state of the new layout."""
    for peak, elements, unit, ranks in pools(2).run(peak_of_a_change, 2):
        state = 12 * elements // ranks
        assert peak <= state + 12 * unit // ranks + 4 * unit + 2 * 4 * BUCKET
        assert peak < state + 4 * elements  # the model and its state would not fit into that


def peak_where_weights_are_replicated(stage: str) -> tuple[int, int, int]:
    """(largest live bytes while the layout changes, elements before, after): two of five blocks are unfrozen."""
    with only_new_tensors():
        model = make_tower()
        for block in model.blocks[:2]:
            set_trainable(block, False)
        optimizer = torch.optim.AdamW(model.parameters())
        engine = engine_of(model, optimizer, cases.config_of(stage, zero={"reduce_bucket_size": SMALL}))
        x = torch.randn(1, 7)
        engine.backward(engine(x).square().mean())
        engine.step()
        engine._core.pool.clear()
        before = engine._core.layout.elements(trainable=True)
        set_trainable(model, True)
        with Peak(set()) as peak, torch.no_grad():
            engine._core = rebuild.rebuild(engine._core, engine.module, engine.config, engine.optimizer)
        after = engine._core.layout.elements(trainable=True)
    engine.close()
    return peak.all, before, after


@pytest.mark.parametrize("stage", ["0", "2"])
def test_where_weights_are_replicated_a_change_needs_them_twice_and_no_state(pools: Pools, stage: str) -> None:
    for peak, before, after in pools(2).run(peak_where_weights_are_replicated, stage):
        share = 1 if stage == "0" else 2
        weights, buckets = 4 * after, 6 * 3 * 4 * SMALL  # what is gathered, and new buckets before old ones go
        assert peak <= max(2 * weights + 8 * before // share, weights + 8 * after // share) + buckets
        assert weights + 8 * after // share + buckets < 2 * weights + 8 * (before + after) // share, "shows nothing"
