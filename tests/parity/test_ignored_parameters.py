"""Parameters that stay the user's: the rest trains with the oracle's bits, and nothing happens to them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardengine import load_config
from shardengine.errors import ConfigError, UsageError
from tests import oracle
from tests.support import cases
from tests.support.comparing import assert_equal_to_truth
from tests.support.covering import covering
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]
PATTERNS = ["blocks.1.*", "out.bias"]
"""A whole block, which would be a unit, and one parameter."""


def is_ignored(name: str) -> bool:
    return name.startswith("blocks.1.") or name == "out.bias"


def groups_without(model: nn.Module, kind: str) -> list[dict[str, Any]]:
    ignored = {id(p) for name, p in model.named_parameters() if is_ignored(name)}
    groups = cases.groups_of(model, kind)
    return [{**group, "params": [p for p in group["params"] if id(p) not in ignored]} for group in groups]


def initialize(model: nn.Module, config: dict[str, Any], kind: str) -> Any:
    import shardengine

    mesh = cases.mesh_of_this_process() if torch.distributed.is_initialized() else None
    made = {"AdamW": torch.optim.AdamW, "SGD": torch.optim.SGD}[kind](groups_without(model, kind))
    return shardengine.initialize(model, {**config, "ignored_parameters": PATTERNS}, optimizer=made, mesh=mesh)


def train(kind: str, config: dict[str, Any]) -> dict[str, Any]:
    engine = initialize(cases.make_mlp(), config, kind)
    result = cases.run_steps(engine, 3)
    traffic, memory = engine.traffic(), engine.memory()
    assert traffic["measured_bytes_last_step"] == traffic["formula_bytes_per_step"]
    assert memory["measured_model_state_bytes"] == memory["predicted_model_state_bytes"]
    engine.close()
    return result


ALL = itertools.product((2, 3), cases.STAGES, (1, 2), ("AdamW", "SGD"))


@pytest.mark.parametrize(("ranks", "stage", "micros", "kind"), covering(ALL, 2))
def test_the_rest_equals_the_oracle(pools: Pools, ranks: int, stage: str, micros: int, kind: str) -> None:
    results = pools(ranks).run(train, kind, cases.config_of(stage, micros))
    model = cases.make_mlp()
    truth = oracle.train(
        model, cases.loss_of, ranks=ranks, micros=micros, steps=3, kind=kind, groups=groups_without(model, kind),
        order=cases.LETTER[stage] if micros > 1 else "full", clip=cases.CLIP,
    )  # fmt: skip
    assert not any(map(is_ignored, truth.trained)) and len(truth.trained) > 8
    assert_equal_to_truth(results, truth, stage)


def own_values(stage: str, folder: str) -> list[Any]:
    """Each rank has values of its own, steps them itself, and finds them after everything that the engine does."""
    model: Any = cases.make_mlp()
    mine = {name: p for name, p in model.named_parameters() if is_ignored(name)}
    rank = torch.distributed.get_rank()
    for p in mine.values():
        p.data += rank
    where = {name: (p.data_ptr(), p.dtype) for name, p in mine.items()}
    expected = {name: p.detach().clone() for name, p in mine.items()}
    engine = initialize(model, {**cases.config_of(stage), "overlap_param_gather": True}, "SGD")
    for step in range(2):
        engine.backward(cases.loss_of(engine, step, engine.rank, 0))
        assert all(p.grad is not None and type(p.grad) is torch.Tensor for p in mine.values())
        engine.step()
        assert all(p.grad is not None for p in mine.values()), "it is nobody's but the user's"
        for name, p in mine.items():
            assert p.grad is not None
            p.data -= 0.1 * p.grad
            expected[name] -= 0.1 * p.grad
            p.grad = None
    whole = engine.state_dict()
    assert {*whole} == ({*dict(cases.make_mlp().state_dict())} if rank == 0 else set())
    assert all(torch.equal(whole[name], expected[name]) for name in mine if rank == 0)
    engine.load_state_dict({name: value + 1 for name, value in whole.items()})
    place = engine.save_checkpoint(folder)
    assert not any(is_ignored(name.partition("/")[0]) for name in (Path(place) / "index.json").read_text().split('"'))
    engine.load_checkpoint(folder)
    engine.backward(cases.loss_of(engine, 2, engine.rank, 0))
    engine.zero_grad()
    with engine.full_params(writable=True), pytest.raises(UsageError, match=r"has no parameter 'out\.bias'"):
        engine.full_params(["out.bias"]).__enter__()
    with pytest.raises(UsageError, match=r"'out.bias' is in ignored_parameters and in optimizer group 2"):
        engine.optimizer.add_param_group({"params": [model.out.bias]})
    assert {name: (p.data_ptr(), p.dtype) for name, p in mine.items()} == where
    assert all(torch.equal(p, expected[name]) for name, p in mine.items())
    cases.run_micro_batch(engine, cases.loss_of, 3, 0)
    engine.close()
    assert {name: (p.data_ptr(), p.dtype) for name, p in mine.items()} == where
    return [p.sum().item() for p in mine.values()]


@pytest.mark.parametrize("stage", cases.STAGES)
def test_every_rank_keeps_its_own(pools: Pools, stage: str, tmp_path: Path) -> None:
    first, second = pools(2).run(own_values, stage, str(tmp_path))
    assert all(one != other for one, other in zip(first, second, strict=True))


def refused(stage: str) -> None:
    import shardengine

    mesh = cases.mesh_of_this_process() if torch.distributed.is_initialized() else None
    config = {**cases.config_of(stage), "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}

    def said(text: str, patterns: Any, model: nn.Module, **options: Any) -> None:
        given = {**config, "ignored_parameters": patterns}
        if options:
            del given["optimizer"]
        with pytest.raises(UsageError, match=text):
            shardengine.initialize(model, given, mesh=mesh, **options)

    model = cases.make_mlp()
    said(r"got 'blocs.\*', which matches none; the nearest name is 'blocks", ["blocs.*"], model)
    every = torch.optim.SGD(model.parameters(), lr=0.1)
    said("'out.bias' is in ignored_parameters and in optimizer group 0", ["out.bias"], model, optimizer=every)
    assert isinstance(model, cases.Mlp)
    model.out.bias = nn.Parameter(torch.empty(3, device="meta"))
    said("'out.bias' is in ignored_parameters and on the meta device", ["out.*"], model)
    made = shardengine.initialize(
        cases.make_mlp(), {**config, "bf16": {"enabled": True}, "ignored_parameters": ["out.*"]}, mesh=mesh
    )
    dtypes = {name: p.dtype for name, p in made.module.named_parameters()}
    assert dtypes["out.bias"] is torch.float32 and dtypes["inp.bias"] is torch.bfloat16
    stepped = [p for group in made.optimizer.param_groups for p in group["params"]] if made.optimizer else []
    assert len(stepped) == len(dtypes) - 2, "the config's optimizer is over the rest"
    made.close()


@pytest.mark.parametrize("stage", ["0", "3"])
def test_what_cannot_be_is_refused_by_name(pools: Pools, stage: str) -> None:
    pools(2).run(refused, stage)


def test_the_key_is_a_list_of_different_names() -> None:
    base = {"train_micro_batch_size_per_gpu": 1}
    assert load_config({**base, "ignored_parameters": []}).ignored_parameters == ()
    assert load_config({**base, "ignored_parameters": ["a", "b.*"]}).ignored_parameters == ("a", "b.*")
    for wrong in ("a", ["a", "a"], [""], [1], {"a": 1}):
        with pytest.raises(ConfigError, match="ignored_parameters"):
            load_config({**base, "ignored_parameters": wrong})
