"""``overlap_param_gather``: the same bits, gathers in flight after step(), nothing stale and nothing half-landed."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support import cases
from tests.support.comparing import assert_equal_to_truth
from tests.support.covering import covering
from tests.support.parts import is_hidden
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]
ON: dict[str, Any] = {"overlap_param_gather": True, "zero": {"reduce_bucket_size": 600}}


@pytest.mark.parametrize(
    ("ranks", "stage", "micros", "model"), covering(itertools.product((1, 2, 3), cases.STAGES, (1, 3), ("mlp", "gpt2")))
)
def test_equals_oracle(pools: Pools, ranks: int, stage: str, micros: int, model: str) -> None:
    results = pools(ranks).run(cases.train_engine, model, "SGD", cases.config_of(stage, micros, **ON))
    order = cases.LETTER[stage] if micros > 1 else "full"
    assert_equal_to_truth(results, cases.truth(model, "SGD", ranks, micros, order))


@pytest.mark.parametrize("stage", ["1", "2"])
def test_bf16(pools: Pools, stage: str) -> None:
    results = pools(2).run(cases.train_engine, "llama", "AdamW", cases.config_of(stage, bf16={"enabled": True}, **ON))
    assert_equal_to_truth(results, cases.truth("llama", "AdamW", 2, 1, "full", low=torch.bfloat16))


def bias_of(engine: Any) -> torch.Tensor:
    found: torch.Tensor = engine.module.inp.bias.sum()
    return found


def head(model: Any) -> torch.Tensor:
    """The last layer called by itself."""
    found: torch.Tensor = model.out(torch.ones(13))
    return found


def look_after_step(stage: str) -> dict[str, Any]:
    """What the model shows after a step, and every other way to its weights, one engine each."""
    found: dict[str, Any] = {}
    for way in ("poison", "state_dict", "module.state_dict", "full_params", "eval", "head", "copy", "step", "close"):
        model: Any = cases.make_mlp()
        plain = cases.make_engine(cases.make_mlp(), cases.config_of(stage), "SGD")
        engine = cases.make_engine(model, cases.config_of(stage, **ON), "SGD")
        for each in (engine, plain):
            each.backward(cases.loss_of(each, 0, each.rank, 0))
            each.step()
        expected = {name: value.clone() for name, value in plain.module.state_dict().items()}
        x = torch.randn(5, 7)
        if way == "poison":
            found[way] = is_hidden(model.out.weight) and model.out.weight.shape == (3, 13)
            continue
        if way == "state_dict":
            seen = engine.state_dict() or expected
        elif way == "module.state_dict":
            seen = model.state_dict()
        elif way == "full_params":
            with engine.full_params():
                seen = {name: p.detach().clone() for name, p in model.named_parameters()}
        elif way == "copy":
            model(x)
            seen = copy.deepcopy(model).state_dict()
        elif way == "step":
            for each in (engine, plain):
                each.backward(each(x).square().mean() * 0 + bias_of(each))
                each.step()
            seen, expected = model.state_dict(), plain.module.state_dict()
        elif way == "close":
            engine.close()
            seen = dict(model.named_parameters())
        else:
            with torch.no_grad():
                a, b = (model(x), plain.module(x)) if way == "eval" else (head(model), head(plain.module))
            found[way] = torch.equal(a, b)
            continue
        found[way] = all(torch.equal(seen[name], value) for name, value in expected.items())
    return found


@pytest.mark.parametrize("stage", ["1", "2"])
def test_every_way_to_the_weights_waits(pools: Pools, stage: str) -> None:
    for found in pools(2).run(look_after_step, stage):
        assert all(found.values()), found
