"""Models that are unfrozen, and groups that are added to the optimizer, between steps: equal to the oracle bit for bit.

The oracle and the engine are told the same story: a list of changes, with a few steps after each.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shardengine
from tests import oracle
from tests.support import cases
from tests.support.comparing import assert_equal_to_truth
from tests.support.covering import covering
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]
Add = Callable[[dict[str, Any]], None]
STAGES = list(cases.STAGES)
OPTIONS: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-8},
    "SGD": {"lr": 0.05, "weight_decay": 0.1, "momentum": 0.9, "dampening": 0.0, "nesterov": False},
}


def group(kind: str, parameters: list[nn.Parameter], lr: float = 1.0) -> dict[str, Any]:
    """An optimizer group; lr: a factor."""
    return {"params": parameters, **OPTIONS[kind], "lr": OPTIONS[kind]["lr"] * lr}


def set_trainable(module: nn.Module, trainable: bool) -> list[nn.Parameter]:
    for parameter in module.parameters():
        parameter.requires_grad_(trainable)
    return list(module.parameters())


def begin_mlp(model: Any, kind: str, add: Add) -> None:
    """Block 0: frozen, in a group. Block 1: frozen, in none. One bias: trainable, in none."""
    early, late = set_trainable(model.blocks[0], False), set_trainable(model.blocks[1], False)
    elsewhere = {*early, *late, model.out.bias}
    add(group(kind, [*early, *(p for p in model.parameters() if p not in elsewhere and p.dim() >= 2)]))
    add(group(kind, [p for p in model.parameters() if p not in elsewhere and p.dim() < 2], 0.3))


def join_a_group(model: Any, kind: str, add: Add) -> None:
    add(group(kind, [*set_trainable(model.blocks[1], True), model.out.bias], 0.5))


def unfreeze_and_freeze(model: Any, kind: str, add: Add) -> None:
    set_trainable(model.blocks[0], True)
    set_trainable(model.blocks[2], False)


def thaw_all(model: Any, kind: str, add: Add) -> None:
    set_trainable(model.blocks[2], True)


def begin_gpt2(model: Any, kind: str, add: Add) -> None:
    set_trainable(model, False)
    add(group(kind, set_trainable(model.transformer.ln_f, True)))


def gpt2_block(number: int, model: Any, kind: str, add: Add) -> None:
    add(group(kind, set_trainable(model.transformer.h[number], True), 0.5**number))


def gpt2_embeddings(model: Any, kind: str, add: Add) -> None:
    """The tied embedding and head, and the positions."""
    frozen = [p for p in model.parameters() if not p.requires_grad]
    set_trainable(model, True)
    add(group(kind, frozen, 0.1))


STORIES: dict[str, list[Callable[[Any, str, Add], None]]] = {
    "mlp": [begin_mlp, join_a_group, unfreeze_and_freeze, thaw_all],
    "gpt2": [begin_gpt2, functools.partial(gpt2_block, 1), functools.partial(gpt2_block, 0), gpt2_embeddings],
}
STEPS = 2
"""Steps of each part of a story."""


@functools.lru_cache(maxsize=64)
def truth(story: str, kind: str, ranks: int, micros: int, order: str, low: torch.dtype | None) -> oracle.Trace:
    model = cases.MODELS[story]()
    groups: list[dict[str, Any]] = []
    trace = None
    for number, change in enumerate(STORIES[story], start=1):
        change(model, kind, groups.append)
        trace = oracle.train(
            model, cases.loss_of, ranks=ranks, micros=micros, steps=STEPS * number, kind=kind, groups=groups,
            order=order, clip=cases.CLIP, low=low, earlier=trace, **cases.groups_told(order),
        )  # fmt: skip
    assert trace is not None
    return trace


def tell(story: str, kind: str, config: dict[str, Any]) -> dict[str, Any]:
    """One rank's run of a story: as ``cases.train_engine``, and whether the groups stayed the user's own objects."""
    model = cases.MODELS[story]()
    groups: list[dict[str, Any]] = []
    begin, *changes = STORIES[story]
    begin(model, kind, groups.append)
    given = {"AdamW": torch.optim.AdamW, "SGD": torch.optim.SGD}[kind](groups)
    parameters = dict(model.named_parameters())
    engine = engine_of(model, given, config)
    optimizer, held = engine.optimizer, engine.optimizer.param_groups

    def change(step: int) -> None:
        if step and step % STEPS == 0:
            changes[step // STEPS - 1](model, kind, add_to(engine, groups))

    result = cases.run_steps(engine, STEPS * len(STORIES[story]), before=change)
    assert engine.optimizer is optimizer and optimizer.param_groups is held is given.param_groups
    assert all(mine is theirs for mine, theirs in zip(held, groups, strict=True))
    assert all(parameters[name] is parameter for name, parameter in model.named_parameters())
    traffic = engine.traffic()
    assert traffic["measured_bytes_last_step"] == traffic["formula_bytes_per_step"]
    engine.close()
    return result


def engine_of(model: nn.Module, optimizer: Any, config: dict[str, Any], **options: Any) -> Any:
    mesh = cases.mesh_of_this_process() if torch.distributed.is_initialized() else None
    return shardengine.initialize(model, config, optimizer=optimizer, mesh=mesh, **options)


def add_to(engine: Any, groups: list[dict[str, Any]]) -> Add:
    def add(new: dict[str, Any]) -> None:
        groups.append(new)
        engine.optimizer.add_param_group(new)

    return add


def assert_story(pools: Pools, story: str, ranks: int, stage: str, kind: str, micros: int, low: bool) -> None:
    options: dict[str, Any] = {"zero": {"reduce_bucket_size": 700}, **({"bf16": {"enabled": True}} if low else {})}
    results = pools(ranks).run(tell, story, kind, cases.config_of(stage, micros, **options))
    order = cases.LETTER[stage] if micros > 1 else "full"
    assert_equal_to_truth(results, truth(story, kind, ranks, micros, order, torch.bfloat16 if low else None))


@pytest.mark.parametrize(
    ("ranks", "stage", "kind", "micros", "low"),
    covering(itertools.product((1, 2, 3), STAGES, ("AdamW", "SGD"), (1, 3), (False, True)), 3),
)
def test_a_changed_model_equals_the_oracle(
    pools: Pools, ranks: int, stage: str, kind: str, micros: int, low: bool
) -> None:
    assert_story(pools, "mlp", ranks, stage, kind, micros, low)


@pytest.mark.parametrize(("kind", "micros", "low"), [("AdamW", 1, False), ("SGD", 3, True)])
@pytest.mark.parametrize("stage", STAGES)
def test_gpt2_unfrozen_from_the_last_block_on_equals_the_oracle(
    pools: Pools, stage: str, kind: str, micros: int, low: bool
) -> None:
    assert_story(pools, "gpt2", 2, stage, kind, micros, low)
