"""engine.optimizer.state_dict() is torch's: structure, keys, dtypes, shapes; plain torch and engines take each other's.

What does not fit is refused, and then nothing has changed.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardengine
from shardengine import Engine
from shardengine.errors import MismatchError, UsageError
from shardengine.lion import Lion
from tests.support import cases
from tests.support.raising import raises
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]
STAGES = list(cases.STAGES)
CLASSES: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {"lr": 1e-2}),
    "Adam": (torch.optim.Adam, {"lr": 1e-2, "weight_decay": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}),
    "SGD": (torch.optim.SGD, {"lr": 0.05}),
    "Lion": (Lion, {"lr": 1e-3, "weight_decay": 0.1}),
}


class Net(nn.Module):
    """Tied, frozen and never used parameters, one without elements, one in another order in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(5, 7, bias=False)
        self.frozen = nn.Linear(7, 7)
        self.unused = nn.Linear(7, 7)
        self.conv = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.head = nn.Linear(7, 5)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.head_again = self.head
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head_again(self.frozen(self.embed(x))) * self.scale + self.conv.weight.sum() + self.conv.bias.sum()


def make_net() -> Net:
    torch.manual_seed(5)
    return Net()


def optimizer_of(model: nn.Module, name: str, *, named: bool = False) -> torch.optim.Optimizer:
    """Two groups; the first has options of its own, and a frozen parameter."""
    made, options = CLASSES[name]
    pairs = [(key, p) if named else p for key, p in model.named_parameters() if p.numel()]
    own = {"momentum": 0.0} if name == "momentum" else {}
    return made([{"params": pairs[:4], "lr": 1e-3, **own}, {"params": pairs[4:]}], **options)


def loss_of(model: Any, step: int) -> Tensor:
    torch.manual_seed(step)
    return model(torch.randn(4, 5)).square().mean()


def plain(name: str, steps: int, *, named: bool = False) -> tuple[Net, torch.optim.Optimizer]:
    model = make_net()
    optimizer = optimizer_of(model, name, named=named)
    go_on(model, optimizer, 0, steps)
    return model, optimizer


def go_on(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


def sharded(name: str, steps: int, stage: str = "2", *, named: bool = False, **options: Any) -> Engine:
    model = make_net()
    config = {**cases.config_of(stage, zero={"reduce_bucket_size": 64}), "gradient_clipping": 0.0, **options}
    engine = shardengine.initialize(model, config, optimizer=optimizer_of(model, name, named=named))
    run(engine, 0, steps)
    return engine


def run(engine: Engine, first: int, last: int) -> None:
    for step in range(first, last):
        engine.backward(loss_of(engine, step))
        engine.step()


def states_of(engine: Engine) -> dict[str, Any]:
    assert engine.optimizer is not None
    return engine.optimizer.state_dict()


def load(engine: Engine, given: Any) -> None:
    assert engine.optimizer is not None
    engine.optimizer.load_state_dict(given)


def assert_alike(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """All but the values of states; these within rounding."""
    assert list(ours) == list(theirs)
    assert ours["param_groups"] == theirs["param_groups"]
    assert [list(group) for group in ours["param_groups"]] == [list(group) for group in theirs["param_groups"]]
    assert list(ours["state"]) == sorted(theirs["state"])
    for number, entry in theirs["state"].items():
        assert list(ours["state"][number]) == list(entry), number
        for key, value in entry.items():
            found = ours["state"][number][key]
            assert (found.dtype, found.shape, found.device) == (value.dtype, value.shape, value.device), (number, key)
            assert found.stride() == value.stride() or found.numel() < 2, (number, key)
            torch.testing.assert_close(found, value)


@pytest.mark.parametrize("named", [False, True], ids=["", "named"])
@pytest.mark.parametrize("name", list(CLASSES))
def test_it_is_what_plain_torch_returns(name: str, named: bool) -> None:
    if name == "Lion" and named:
        named = False  # made with parameters alone
    _, optimizer = plain(name, 3, named=named)
    expected = optimizer.state_dict()
    assert expected["state"] or name == "SGD"
    for stage in STAGES:
        engine = sharded(name, 3, stage, named=named)
        assert_alike(states_of(engine), expected)
        engine.close()


@pytest.mark.parametrize("name", list(CLASSES))
def test_plain_torch_goes_on_from_an_engine_and_an_engine_from_plain_torch(name: str) -> None:
    """Fed with the same weights and states, they differ by rounding alone; masters are passed over by torch."""
    engine, (model, optimizer) = sharded(name, 2, "3"), plain(name, 2)
    weights, states = engine.state_dict(), copy.deepcopy(states_of(engine))
    run(engine, 2, 4)
    mine = make_net()
    mine.load_state_dict(weights)
    other = optimizer_of(mine, name)
    other.load_state_dict(states)
    go_on(mine, other, 2, 4)
    for key, value in engine.state_dict().items():
        torch.testing.assert_close(value, mine.state_dict()[key])
    engine.close()
    for stage in STAGES:
        engine = sharded(name, 1, stage)
        engine.load_state_dict(model.state_dict())
        load(engine, optimizer.state_dict())
        assert_alike(states_of(engine), optimizer.state_dict())
        run(engine, 2, 4)
        taken = engine.state_dict()
        engine.close()
        for key, value in mine.state_dict().items():
            torch.testing.assert_close(taken[key], value)


def test_masters_are_in_it_and_what_was_never_stepped_keeps_them() -> None:
    model = make_net()
    exact = {key: value.clone() for key, value in model.state_dict().items()}
    config = {**cases.config_of("2"), "bf16": {"enabled": True}}
    engine = shardengine.initialize(model, config, optimizer=optimizer_of(model, "AdamW"))
    number = 4  # the first of the second group
    assert engine.optimizer is not None
    own = [p for group in engine.optimizer.param_groups for p in group["params"]][number]
    name = next(key for key, parameter in model.named_parameters() if parameter is own)
    states, weights = states_of(engine), engine.state_dict()
    assert name == "unused.weight" and torch.equal(states["state"][number]["master"], exact[name])
    assert states["state"][number]["step"] == 0 and not torch.equal(weights[name].float(), exact[name])
    engine.close()
    for stage in ("3", "0"):
        for first in ("weights", "states"):
            other = make_net()
            again = shardengine.initialize(other, {**config, "zero_optimization": cases.STAGES[stage]},
                                           optimizer=optimizer_of(other, "AdamW"))  # fmt: skip
            with again.full_params(writable=True), torch.no_grad():
                for parameter in other.parameters():
                    parameter.zero_()
            for what in (first, *({"weights", "states"} - {first})):
                again.load_state_dict(weights) if what == "weights" else load(again, states)
            found = states_of(again)
            for index, entry in states["state"].items():
                assert all(torch.equal(entry[key], found["state"][index][key]) for key in entry)
            assert all(torch.equal(value, weights[key]) for key, value in again.state_dict().items())
            again.close()


def test_the_users_own_optimizer_and_its_groups() -> None:
    """Options go into the same dicts, also those of a scheduler; a tensor stays one; the user's has the calls."""
    model = make_net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.125), betas=(0.5, 0.75))
    group = optimizer.param_groups[0]
    engine = shardengine.initialize(model, cases.config_of("2"), optimizer=optimizer)
    run(engine, 0, 1)
    saved = optimizer.state_dict()
    assert torch.equal(saved["param_groups"][0]["lr"], torch.tensor(0.125))
    saved["param_groups"][0] |= {"betas": [0.25, 0.5], "initial_lr": 0.5, "lr": torch.tensor(0.75)}
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0] is group and engine.optimizer and engine.optimizer.param_groups[0] is group
    assert (group["betas"], group["initial_lr"], float(group["lr"])) == ([0.25, 0.5], 0.5, 0.75)
    assert isinstance(group["lr"], Tensor)
    engine.close()
    assert optimizer.state_dict()["state"] == {}, "it is the user's own again"


def test_names_in_the_place_of_numbers() -> None:
    """As torch.distributed.checkpoint has them: found by name, in any order."""
    engine = sharded("AdamW", 2)
    saved, names = states_of(engine), dict[int, str]()
    order = [p for group in engine.optimizer.param_groups for p in group["params"]] if engine.optimizer else []
    for key, parameter in engine.module.named_parameters():
        names |= {number: key for number, each in enumerate(order) if each is parameter}
    named: dict[str, Any] = {
        "state": {names[number]: entry for number, entry in saved["state"].items()},
        "param_groups": [
            {**group, "params": [names[number] for number in reversed(group["params"])]}
            for group in saved["param_groups"]
        ],
    }
    run(engine, 2, 3)
    load(engine, named)
    found = states_of(engine)
    assert all(torch.equal(found["state"][n][key], entry[key]) for n, entry in saved["state"].items() for key in entry)
    named["param_groups"][0]["params"][0] = names[saved["param_groups"][1]["params"][0]]
    with raises("optimizer-state-does-not-fit", "group 0 holds other parameters than the engine's, for example"):
        load(engine, named)
    engine.close()


def edited(change: Callable[[dict[str, Any]], Any]) -> Callable[[], dict[str, Any]]:
    def make() -> dict[str, Any]:
        _, optimizer = plain("AdamW", 2)
        saved = optimizer.state_dict()
        change(saved)
        return saved

    return make


def other(name: str, steps: int = 2) -> Callable[[], dict[str, Any]]:
    return lambda: plain(name, steps)[1].state_dict()


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "no dict": (lambda: None, "expected \"state\" and \"param_groups\".* got NoneType"),
    "a model's": (lambda: make_net().state_dict(), "got a dict with"),
    "empty": (dict, r"expected the whole dict on rank 0, or on every rank, got \{\}"),
    "groups": (edited(lambda saved: saved["param_groups"].pop()), r"expected 2 parameter group\(s\).* got 1"),
    "size": (edited(lambda saved: saved["param_groups"][1]["params"].pop()), "group 1: expected 6 parameters, got 5"),
    "shape": (edited(lambda saved: saved["state"][0].update(exp_avg=torch.zeros(3))),
              r"'exp_avg' of 'scale': expected a tensor of shape \(\), as the parameter's, got \(3,\)"),
    "missing": (edited(lambda saved: saved["state"][0].pop("exp_avg_sq")), "'scale' lacks the state 'exp_avg_sq'"),
    "unknown": (edited(lambda saved: saved["state"][0].update(max_exp_avg_sq=torch.zeros(()))),
                "'scale' has the state 'max_exp_avg_sq', which AdamW has not here"),
    "no step": (edited(lambda saved: saved["state"][0].pop("step")), "'scale' has no 'step'"),
    "NaN": (edited(lambda saved: saved["state"][0].update(step=torch.tensor(math.nan))), "the step of 'scale'"),
    "half a step": (edited(lambda saved: saved["state"][0].update(step=1.5)), "the step of 'scale': expected a whole"),
    "whose": (edited(lambda saved: saved["state"].update({77: {}})), "it has states of parameter 77"),
    "SGD": (other("momentum"), "has the option 'betas'.*another optimizer's"),
    "Lion": (other("Lion"), "group 0 of the engine's optimizer has the option 'eps'"),
    "Adam": (other("Adam"), "decoupled_weight_decay is False in the dict, True here"),
    "amsgrad": (edited(lambda saved: saved["param_groups"][1].update(amsgrad=True)), "amsgrad=True in group 1"),
    "an option": (edited(lambda saved: saved["param_groups"][0].update(lr="fast")), "expected 'lr' to be a number"),
    "a thing": (edited(lambda saved: saved["param_groups"][0].update(mine=object())), "option 'mine'"),
}  # fmt: skip


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_does_not_fit_is_refused_and_changes_nothing(name: str) -> None:
    given, sentence = REFUSED[name]
    engine = sharded("AdamW", 1, "3")
    before, weights = copy.deepcopy(states_of(engine)), engine.state_dict()
    with pytest.raises(UsageError, match=sentence):
        load(engine, given())
    assert_alike(states_of(engine), before)
    for number, entry in before["state"].items():
        assert all(torch.equal(value, states_of(engine)["state"][number][key]) for key, value in entry.items())
    assert all(torch.equal(value, weights[key]) for key, value in engine.state_dict().items())
    run(engine, 1, 2)
    engine.close()


def test_momentum_that_the_engine_has_no_memory_for_is_refused() -> None:
    engine = sharded("SGD", 1)
    saved = states_of(engine)
    saved["param_groups"][1]["momentum"] = 0.9
    with raises("optimizer-state-does-not-fit", "group 1 keeps 'momentum_buffer'", "momentum from the start"):
        load(engine, saved)
    engine.close()


def test_states_of_frozen_parameters_are_told(caplog: pytest.LogCaptureFixture) -> None:
    model = make_net().requires_grad_(True)
    optimizer = optimizer_of(model, "AdamW")
    go_on(model, optimizer, 0, 1)
    engine = sharded("AdamW", 0)
    load(engine, optimizer.state_dict())
    assert "frozen) are left out: frozen.weight, frozen.bias" in caplog.text
    engine.close()


def test_when_it_may_be_called() -> None:
    engine = sharded("AdamW", 1)
    saved = states_of(engine)
    engine.backward(loss_of(engine, 1))
    assert_alike(states_of(engine), saved)
    with pytest.raises(UsageError, match=r"optimizer\.load_state_dict\(\) in the middle of a step"):
        load(engine, saved)
    engine.step()
    with engine.full_params(), pytest.raises(UsageError, match="inside full_params"):
        load(engine, saved)
    optimizer = engine.optimizer
    engine.close()
    with raises("engine-closed"):
        assert optimizer is not None
        optimizer.state_dict()


def test_the_state_of_one_parameter_is_elsewhere() -> None:
    engine = sharded("AdamW", 1)
    assert engine.optimizer is not None
    assert list(engine.optimizer.state.items()) == []
    entry = engine.optimizer.state[engine.optimizer.param_groups[0]["params"][0]]
    assert list(entry) == ["step", "exp_avg", "exp_avg_sq"]
    for look in (lambda: entry["exp_avg"], lambda: entry.get("exp_avg")):
        with raises("optimizer-state-read-sharded"):
            look()
    engine.close()


def test_a_look_at_the_state_counts_until_the_next_step_or_load() -> None:
    """``torch.distributed.checkpoint.state_dict`` looks whether there is any before it asks for all of it; other code
    looks, too, and later dicts have only what was stepped."""
    engine = sharded("AdamW", 1)
    optimizer = engine.optimizer
    assert optimizer is not None
    usual = states_of(engine)
    assert optimizer.state and len(states_of(engine)["state"]) > len(usual["state"])
    assert_alike(states_of(engine), usual)
    assert optimizer.state
    run(engine, 1, 2)
    assert list(states_of(engine)["state"]) == list(usual["state"])
    assert optimizer.state
    load(engine, usual)
    assert_alike(states_of(engine), usual)
    assert optimizer.state
    with pytest.raises(UsageError):
        load(engine, {})
    assert_alike(states_of(engine), usual)
    assert optimizer.state
    engine.zero_grad()
    assert_alike(states_of(engine), usual)
    engine.close()


def test_hooks_of_both_dicts() -> None:
    """Registered on either object, before or after initialize; as torch calls them."""
    model, said = make_net(), list[str]()
    given = optimizer_of(model, "AdamW")
    given.register_state_dict_pre_hook(lambda each: said.append(f"before {each is given}"))
    engine = shardengine.initialize(model, cases.config_of("2"), optimizer=given)
    assert engine.optimizer is not None

    def add(_: Any, found: dict[str, Any]) -> None:
        found["mine"] = 1

    def strip(_: Any, found: dict[str, Any]) -> dict[str, Any]:
        said.append("load")
        return {key: value for key, value in found.items() if key != "mine"}

    engine.optimizer.register_state_dict_post_hook(add)
    given.register_load_state_dict_pre_hook(strip)
    engine.optimizer.register_load_state_dict_post_hook(lambda each: said.append("loaded"))
    saved = given.state_dict()
    assert saved["mine"] == 1 and said == ["before True"]
    given.load_state_dict(saved)
    assert said == ["before True", "load", "loaded"] and "mine" in saved
    engine.close()


# Several ranks


def one_rank_calls() -> None:
    engine = cases.make_engine(cases.make_mlp(), cases.config_of("2"))
    assert engine.optimizer is not None
    if engine.rank == 0:
        engine.optimizer.state_dict()
    engine.backward(cases.loss_of(engine, 0, engine.rank, 0))


def test_a_rank_that_calls_it_alone_is_named(pools: Pools) -> None:
    """``if rank == 0: torch.save(optimizer.state_dict(), file)``."""
    errors = pools(2).run_expecting_errors(one_rank_calls)
    assert any("optimizer.state_dict" in text and "can end" in text for text in errors.values()), errors


def differing() -> list[str]:
    """What only one rank has is an error of both; the engine goes on."""
    engine = cases.make_engine(cases.make_mlp(), cases.config_of("3"))
    optimizer, said = engine.optimizer, []
    assert optimizer is not None
    engine.backward(cases.loss_of(engine, 0, engine.rank, 0))
    engine.step()
    saved = optimizer.state_dict()
    other = copy.deepcopy(saved) if engine.rank == 0 else torch.optim.AdamW(cases.make_mlp().parameters()).state_dict()
    broken = copy.deepcopy(saved)
    if engine.rank == 0:
        del broken["state"][0]["exp_avg"]
    slower = {**saved, "param_groups": [{**g, "lr": 9.0} for g in saved["param_groups"]]} if saved else {}
    for given in (other, broken, slower if engine.rank == 0 else {}):
        try:
            optimizer.load_state_dict(given)
            said.append(f"{[group['lr'] for group in optimizer.param_groups]}")
        except (UsageError, MismatchError) as error:
            said.append(str(error))
    engine.backward(cases.loss_of(engine, 1, engine.rank, 0))
    engine.step()
    engine.close()
    return said


def test_ranks_with_different_dicts(pools: Pools) -> None:
    first, second = pools(2).run(differing)
    assert "optimizer.load_state_dict() failed on rank 1" in first[0] and "(rank 1): expected 2 parameter" in second[0]
    assert "lacks the state 'exp_avg'" in first[1] and "failed on rank 0" in second[1]
    assert first[2] == second[2] == "[9.0, 9.0]", "rank 0's count where others have {}"
