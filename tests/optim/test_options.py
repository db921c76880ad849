"""Options with which there is no step or no checkpoint are refused by name; functions stay as they are given."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import shardengine
from shardengine import Engine
from shardengine.errors import MismatchError, UsageError
from tests.support import cases
from tests.support.raising import raises
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]
RATES: dict[str, tuple[Any, str]] = {
    "none": (None, "is None"),
    "two": (torch.tensor([0.1, 0.2]), r"is a tensor of shape \(2,\)"),
    "text": ("fast", "is 'fast'"),
    "number as text": ("0.1", "is '0.1'"),
    "NaN": (math.nan, "is nan"),
    "infinite": (math.inf, "is inf"),
    "NaN in a tensor": (torch.tensor(math.nan), "is nan"),
    "function": (len, "is <built-in function len>"),
}
CLASSES: dict[str, type[torch.optim.Optimizer]] = {"kernels": torch.optim.AdamW, "a class": torch.optim.NAdam}


def halved(value: float) -> float:
    return value / 2


def doubled(value: float) -> float:
    return value * 2


def engine_of(made_by: Any = torch.optim.AdamW, second: dict[str, Any] | None = None, stage: str = "2") -> Engine:
    """second: options of the second group."""
    model = cases.make_mlp()
    weights = list(model.parameters())
    optimizer = made_by([{"params": weights[:3]}, {"params": weights[3:]}], lr=0.01)
    optimizer.param_groups[1].update(second or {})
    return shardengine.initialize(model, cases.config_of(stage), optimizer=optimizer, mesh=cases.mesh_of_this_process())


@pytest.mark.parametrize("made_by", CLASSES)
@pytest.mark.parametrize("rate", RATES)
def test_what_is_no_learning_rate_is_refused_by_its_group(made_by: str, rate: str) -> None:
    value, said = RATES[rate]
    said = f"the learning rate, option 'lr' of optimizer group 1, {said}: expected a finite number"
    with pytest.raises(UsageError, match=f"initialize: {said}"):
        engine_of(CLASSES[made_by], {"lr": value})
    engine = engine_of(CLASSES[made_by])
    assert engine.optimizer is not None
    engine.backward(cases.loss_of(engine, 0, 0, 0))
    engine.optimizer.param_groups[1]["lr"] = value
    with pytest.raises(UsageError, match=f"step: {said}"):
        engine.step()
    engine.optimizer.param_groups[1]["lr"] = 0.01
    engine.step()
    assert engine.was_step_applied() and engine.global_steps == 1
    engine.close()


@pytest.mark.parametrize("rate", [0.0, 1, True, torch.tensor(0.1), torch.tensor([0.1]), numpy.float64(0.1)])
def test_other_rates_are_taken(rate: Any, tmp_path: Path) -> None:
    engine = engine_of(second={"lr": rate})
    cases.run_steps(engine, 2)
    engine.save_checkpoint(tmp_path)
    engine.load_checkpoint(tmp_path)
    assert engine.get_lr()[1] == pytest.approx(float(rate))
    engine.close()


class Unrated(torch.optim.Optimizer):
    def __init__(self, params: Any, **_: Any) -> None:
        super().__init__(params, {"rate": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise NotImplementedError


def test_a_group_without_a_rate() -> None:
    with raises("optimizer-lr-missing", "group 0", "['rate']"):
        engine_of(Unrated)


REFUSED: dict[str, tuple[Any, str]] = {
    "object": (Path("x"), r"of the type pathlib\.\w+"),
    "set": ({1}, r"is, or holds, \{1\}, of the type set"),
    "generator": (torch.Generator(), "of the type torch._C.Generator"),
    "numpy": (numpy.float32(0.5), "of the type numpy.float32"),
    "tensor": (torch.ones(3), r"is a tensor of shape \(3,\)"),
    "inside": ({"a": [1, (2, halved)]}, "is, or holds, <function halved"),
    "NaN": ([0.1, math.nan], "is NaN"),
    "key": ({(1, 2): 3}, r"has the key \(1, 2\)"),
}


@pytest.mark.parametrize("made_by", CLASSES)
@pytest.mark.parametrize("name", REFUSED)
def test_what_no_checkpoint_can_hold_is_refused_at_initialize(name: str, made_by: str) -> None:
    value, said = REFUSED[name]
    with pytest.raises(UsageError, match=f"initialize: option 'mine' of optimizer group 1 .*{said}"):
        engine_of(CLASSES[made_by], {"mine": value})


def test_a_group_that_joins_later_is_asked_the_same() -> None:
    model = cases.make_mlp()
    weights = list(model.parameters())
    optimizer = torch.optim.AdamW(weights[:3], lr=0.01)
    engine = shardengine.initialize(model, cases.config_of("2"), optimizer=optimizer)
    assert engine.optimizer is not None
    for options, said in (
        ({"lr": math.nan}, "optimizer group 1, is nan"),
        ({"mine": {1}}, "group 1 is, or holds, {1}"),
    ):
        with pytest.raises(UsageError, match=f"add_param_group: .*{said}"):
            engine.optimizer.add_param_group({"params": weights[3:], **options})
    engine.optimizer.add_param_group({"params": weights[3:], "mine": halved})
    cases.run_steps(engine, 1)
    engine.close()


KEPT = {"by": halved, "of": functools.partial(doubled, value=2), "kind": dict, "as": torch.bfloat16, "on": "here"}


def saved_and_loaded(made_by: str, folder: str) -> list[Any]:
    """Functions are no reason to disagree; they are not in the checkpoint, and stay when that is loaded."""
    engine = engine_of(CLASSES[made_by], {**KEPT, "limit": math.inf}, "3")
    cases.run_steps(engine, 2)
    engine.save_checkpoint(folder)
    optimizer = engine.optimizer
    assert optimizer is not None
    found: list[Any] = [optimizer.state_dict()]
    group = optimizer.param_groups[1]
    other = {"by": doubled, "of": None, "kind": list, "as": torch.float16}
    group.update({**other, "limit": 5.0, "on": "there"})
    engine.load_checkpoint(folder)
    found.append({key: group[key] for key in (*KEPT, "limit")} == {**KEPT, **other, "limit": math.inf})
    group.update(on="there")
    optimizer.load_state_dict(found[0])
    found.append({key: group[key] for key in (*KEPT, "limit")} == {**KEPT, **other, "limit": math.inf})
    cases.run_steps(engine, 1)
    engine.close()
    return found


@pytest.mark.parametrize("made_by", CLASSES)
def test_functions_and_classes_stay_as_they_are_given(pools: Pools, made_by: str, tmp_path: Path) -> None:
    found = pools(2).run(saved_and_loaded, made_by, str(tmp_path))
    for rank, (_, *same) in enumerate(found):
        assert same == [True, True], rank
    assert {key: found[0][0]["param_groups"][1][key] for key in KEPT if key != "of"} == {
        key: value for key, value in KEPT.items() if key != "of"
    }, "as in torch's dict"
    (index,) = tmp_path.rglob("index.json")
    groups = json.loads(index.read_text(encoding="utf-8"))
    text = json.dumps(groups)
    assert '"on": "here"' in text and '"limit": "inf"' in text
    assert not any(f'"{key}":' in text for key in ("by", "as"))


def differing() -> str:
    rank = cases.mesh_of_this_process().rank
    try:
        engine_of(second={"by": doubled if rank else halved})
    except MismatchError as error:
        return str(error)
    return ""


def test_functions_are_compared_between_ranks_by_name(pools: Pools) -> None:
    for said in pools(2).run(differing):
        assert "test_options.halved" in said and "test_options.doubled" in said


def differing_later() -> str:
    engine = engine_of(second={"by": halved})
    assert engine.optimizer is not None
    cases.run_steps(engine, 1)
    if engine.rank:
        engine.optimizer.param_groups[1]["by"] = doubled
    try:
        cases.run_steps(engine, 1)
    except MismatchError as error:
        engine.close()
        return str(error)
    return ""


def test_and_so_are_those_that_are_set_later(pools: Pools) -> None:
    for said in pools(2).run(differing_later):
        assert "by of optimizer group 1 is" in said and "halved" in said and "doubled" in said


@pytest.mark.parametrize(("option", "value"), [("weight_decay", None), ("eps", "small"), ("betas", (0.9,))])
def test_an_option_that_is_no_number_is_said_at_the_start_and_in_a_step(option: str, value: Any) -> None:
    network = cases.make_mlp()
    optimizer = torch.optim.AdamW(network.parameters())
    good = optimizer.param_groups[0][option]
    said = f"optimizer group 0: AdamW cannot be stepped with .*{option}"
    optimizer.param_groups[0][option] = value
    with pytest.raises(UsageError, match=said):
        shardengine.initialize(network, cases.config_of("1"), optimizer=optimizer)
    optimizer.param_groups[0][option] = good
    engine = shardengine.initialize(network, cases.config_of("1"), optimizer=optimizer)
    assert engine.optimizer is not None
    engine.optimizer.param_groups[0][option] = value
    with pytest.raises(UsageError, match=said):
        cases.run_micro_batch(engine, cases.loss_of, 0, 0)
    engine.optimizer.param_groups[0][option] = good
    engine.step()
    engine.close()


def differ_in(what: str, stage: str) -> str:
    """What the step after says where rank 1 alone has clipped, or frozen a parameter."""
    engine = cases.make_engine(cases.make_mlp(), cases.config_of(stage, gradient_clipping=0.0))
    said = ""
    try:
        for step in range(3):
            engine.backward(cases.loss_of(engine, step, engine.rank, 0))
            if step == 1 and engine.rank == 1:
                if what == "clipped":
                    engine.clip_grad_norm_(0.01)
                else:
                    next(engine.module.parameters()).requires_grad_(False)
            engine.step()
    except MismatchError as error:
        said = str(error)
    engine.reset()
    for parameter in engine.module.parameters():
        parameter.requires_grad_(True)
    assert cases.run_micro_batch(engine, cases.loss_of, 5, 0) > 0
    engine.close()
    return said


@pytest.mark.parametrize("stage", ["0", "2", "3"])
@pytest.mark.parametrize("what", ["clipped", "frozen"])
def test_what_one_rank_alone_does_is_told(pools: Pools, what: str, stage: str) -> None:
    told = {"clipped": "parameter.grad was changed on", "frozen": "frozen on rank"}[what]
    for said in pools(2).run(differ_in, what, stage):
        assert told in said, said
