"""engine.load_state_dict: as torch's module, at any stage and number of ranks; rank 0's values are everybody's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import shardengine
from shardengine.errors import UsageError
from tests.engine.test_full_state import MODELS
from tests.support import cases
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]
STAGES = list(cases.STAGES)
KINDS = ["mlp", "tied", "frozen", "odd", "strides", "dtypes"]


def other_values(model: nn.Module, scale: float) -> dict[str, Tensor]:
    torch.manual_seed(3)
    return {key: torch.randn_like(value) * scale for key, value in model.state_dict().items()}


def loads() -> None:
    """Every model at every stage: the same tensors as in a plain module, tied ones included; trains on."""
    for kind in KINDS:
        for stage in STAGES:
            plain = MODELS[kind][0]()
            values = other_values(plain, 1.0)
            answer = plain.load_state_dict(values)
            expected = plain.state_dict()
            engine = cases.make_engine(MODELS[kind][0](), cases.config_of(stage, zero={"reduce_bucket_size": 300}))
            given = values if engine.rank == 0 else other_values(plain, 7.0) if kind == "mlp" else {}
            found = engine.load_state_dict(given)
            assert (found.missing_keys, found.unexpected_keys) == (answer.missing_keys, answer.unexpected_keys)
            for name, value in engine.state_dict().items():
                assert torch.equal(value, expected[name]) and value.dtype == expected[name].dtype, (kind, stage, name)
            with engine.full_params():
                for name, parameter in engine.module.named_parameters():
                    assert torch.equal(parameter, dict(plain.named_parameters())[name]), (kind, stage, name)
            engine.backward(MODELS[kind][1](engine, 0, engine.rank, 0))
            engine.step()
            engine.close()


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_weights_are_those_of_a_plain_module(pools: Pools, ranks: int) -> None:
    pools(ranks).run(loads)


class Norm(nn.Module):
    """Buffers, one of which is not saved; extra state; a child that translates the keys of an older version."""

    class Old(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(3, 3))

        def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
            if f"{prefix}kernel" in state:
                state[f"{prefix}weight"] = state.pop(f"{prefix}kernel")
            super()._load_from_state_dict(state, prefix, *rest)

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.old = Norm.Old()
        self.register_buffer("cache", torch.zeros(2), persistent=False)
        self.note = "new"

    def get_extra_state(self) -> Any:
        return {"note": self.note}

    def set_extra_state(self, state: Any) -> None:
        self.note = state["note"]


def special(stage: str) -> None:
    engine = cases.make_engine(Norm(), cases.config_of(stage))
    given = engine.state_dict()
    if engine.rank:
        given = Norm().state_dict()
    given["old.kernel"] = given.pop("old.weight") + 5
    given["norm.running_mean"] = torch.ones(3)
    given["_extra_state"] = {"note": "loaded"}
    before = engine.load_state_dict(given)
    assert before.missing_keys == before.unexpected_keys == []
    assert isinstance(engine.module, Norm) and engine.module.note == "loaded"
    mean = engine.module.norm.running_mean
    assert mean is not None and torch.equal(mean, torch.ones(3))
    with engine.full_params():
        assert torch.equal(engine.module.old.weight, torch.full((3, 3), 5.0))
    try:
        engine.load_state_dict(given if engine.rank == 0 else {})
    except (UsageError, shardengine.errors.MismatchError) as error:
        assert "has '_extra_state'" in str(error) or engine.world_size == 1
    engine.close()


@pytest.mark.parametrize("ranks", [1, 2])
def test_buffers_extra_state_and_modules_with_their_own_way(pools: Pools, ranks: int) -> None:
    for stage in ("1", "3"):
        pools(ranks).run(special, stage)


def without(*names: str) -> dict[str, Tensor]:
    return {key: value for key, value in cases.make_mlp().state_dict().items() if key not in names}


REFUSED: dict[str, tuple[Callable[[], Any], dict[str, Any], str]] = {
    "missing": (lambda: without("out.bias"), {}, r"it lacks 'out.bias' \(strict=False loads what fits\)"),
    "unexpected": (lambda: {**without(), "more": torch.zeros(1)}, {}, "the model has not 'more'"),
    "DDP's": (lambda: {f"module.{key}": value for key, value in without().items()}, {}, "take 'module.' off the keys"),
    "shape": (lambda: {**without(), "out.bias": torch.zeros(4)}, {"strict": False},
              r"size mismatch for out.bias: .*\[4\].*\[3\]\); nothing was loaded"),
    "nothing": (dict, {}, r"on rank 0, or on every rank, got \{\}"),
    "no dict": (lambda: [1], {}, "expected a model's state dict, got list"),
    "assign": (without, {"assign": True}, "expected assign=False"),
}  # fmt: skip


@pytest.mark.parametrize("name", list(REFUSED))
@pytest.mark.parametrize("stage", ["0", "3"])
def test_what_does_not_fit_changes_nothing(stage: str, name: str) -> None:
    make, options, sentence = REFUSED[name]
    engine = cases.make_engine(cases.make_mlp(), cases.config_of(stage))
    before = engine.state_dict()
    with pytest.raises(UsageError, match=sentence):
        engine.load_state_dict(make(), **options)
    assert all(torch.equal(value, before[key]) for key, value in engine.state_dict().items())
    engine.close()


def test_not_strict_returns_what_only_one_side_has() -> None:
    engine = cases.make_engine(cases.make_mlp(), cases.config_of("3"))
    given = {**other_values(cases.make_mlp(), 1.0), "more": torch.zeros(1)}
    del given["out.bias"], given["blocks.1.0.weight"]
    before = engine.state_dict()
    found = engine.load_state_dict(given, strict=False)
    assert found.missing_keys == ["blocks.1.0.weight", "out.bias"] and found.unexpected_keys == ["more"]
    for key, value in engine.state_dict().items():
        assert torch.equal(value, given.get(key, before[key])), key
    engine.close()


def test_masters_follow_and_keep_the_bits_that_fit() -> None:
    engine = cases.make_engine(cases.make_mlp(), cases.config_of("2", bf16={"enabled": True}))
    name = "inp.weight"
    with engine.full_optimizer_state(name) as states:
        exact = states[name]["weight"].clone()  # type: ignore[index]
    engine.load_state_dict(engine.state_dict())
    with engine.full_optimizer_state(name) as states:
        assert torch.equal(states[name]["weight"], exact)  # type: ignore[index]
    engine.load_state_dict({key: torch.full_like(value, 0.3) for key, value in engine.state_dict().items()})
    with engine.full_optimizer_state(name) as states:
        assert torch.equal(states[name]["weight"], torch.full_like(exact, 0.3).bfloat16().float())  # type: ignore[index]
    engine.close()


def test_one_unit_is_whole_at_a_time() -> None:
    """At stage 3 the units are filled one after the other."""
    engine = cases.make_engine(cases.make_mlp(), cases.config_of("3", zero={"reduce_bucket_size": 64}))
    opened: list[int] = []
    original = type(engine._core.units[0]).summon

    def summon(unit: Any, *args: Any, **kwargs: Any) -> Any:
        opened.append(unit.index)
        return original(unit, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(engine._core.units[0]), "summon", summon)
        engine.load_state_dict(engine.state_dict())
    assert len(opened) >= len(engine._core.units) > 2 and sorted(set(opened)) == list(range(len(engine._core.units)))
    engine.close()


# Modules that load in a way of their own ([Note: Read, then written])


class Renamed(nn.Module):
    """Children in torch's wrapper, whose hook renames keys for what is inside; a hook and a module of the user's."""

    class Kernel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(4, 3))
            self.register_buffer("count", torch.zeros(()))
            self.versions: list[Any] = []
            self.note = ""
            self.register_load_state_dict_pre_hook(_transpose)

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight.t()

        def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *rest: Any) -> None:
            self.versions.append(metadata.get("version"))
            old = {f"{prefix}kernel": f"{prefix}weight"}
            state = {old.get(key, key): value for key, value in state.items()}  # a copy, as some have it
            super()._load_from_state_dict(state, prefix, metadata, *rest)

        def get_extra_state(self) -> Any:
            return self.note

        def set_extra_state(self, state: Any) -> None:
            self.note = state

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        blocks = [nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)) for _ in range(2)]
        self.blocks = nn.ModuleList(checkpoint_wrapper(block) for block in blocks)
        self.kernel = Renamed.Kernel()
        self.again = self.kernel
        self.told: list[Any] = []
        self.register_load_state_dict_post_hook(lambda _module, keys: self.told.append(list(keys.missing_keys)))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.kernel(x)


def _transpose(_module: nn.Module, state: Any, prefix: str, *_rest: Any) -> None:
    """Older files have it the other way round."""
    for name in ("weight", "kernel"):
        if (value := state.get(f"{prefix}{name}")) is not None and value.shape == (3, 4):
            state[f"{prefix}{name}"] = value.t()


def renamed(factor: float = 1.0) -> dict[str, Any]:
    model = Renamed()
    state = model.state_dict()
    state = {key: value * factor + 1 if isinstance(value, Tensor) else "loaded" for key, value in state.items()}
    for name in ("kernel", "again"):
        state[f"{name}.kernel"] = state.pop(f"{name}.weight").t()
    return state


def loads_by_itself(stage: str) -> None:
    plain = Renamed()
    plain.load_state_dict(renamed())
    for strict in (True, False):
        engine = cases.make_engine(Renamed(), cases.config_of(stage))
        model: Any = engine.module
        found = engine.load_state_dict(renamed(1.0 if engine.rank == 0 else 3.0), strict=strict)
        assert found.missing_keys == found.unexpected_keys == []
        assert model.kernel.versions == [None, None] and model.told == [[]] and model.kernel.note == "loaded"
        for name, value in engine.state_dict().items():
            assert value == "loaded" or torch.equal(value, plain.state_dict()[name]), (stage, name)
        assert all(torch.equal(b, dict(plain.named_buffers())[name]) for name, b in model.named_buffers())
        engine.close()


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_hooks_and_modules_of_the_users_load_as_in_torch(pools: Pools, stage: str, ranks: int) -> None:
    pools(ranks).run(loads_by_itself, stage)


def refused_loads(stage: str) -> None:
    """Whatever is found wrong, and however late: weights, masters, buffers and extra states stay on every rank."""
    engine = cases.make_engine(Renamed(), cases.config_of(stage, bf16={"enabled": True}) if stage != "1" else
                               cases.config_of(stage))  # fmt: skip
    model: Any = engine.module

    def look() -> tuple[Any, ...]:
        return engine.state_dict(), cases.local_state(engine), [b.clone() for b in model.buffers()], model.kernel.note

    def boom(*_args: Any) -> None:
        raise ArithmeticError("on purpose")

    def reading(part: Any, *_args: Any) -> None:
        part.weight.sum()

    state, before = renamed(), look()
    missing = {key: value for key, value in state.items() if key != "blocks.1.1.running_var"}
    shape = {**state, "again.kernel": torch.zeros(5, 5)}
    tries: list[tuple[Any, Any, str]] = [
        (missing, None, "it lacks 'blocks.1._checkpoint_wrapped_module.1.running_var'.*nothing was loaded"),
        (shape, None, "size mismatch for again.weight.*nothing was loaded"),
        ({**state, "more": torch.zeros(1)}, None, "the model has not 'more'"),
        (state, boom, "on purpose"),
        (state, reading, r"'kernel' \(Kernel\) reads a weight while it loads it \(sum\).*full_params"),
    ]
    for given, hook, sentence in tries:
        handle = None if hook is None else model.kernel.register_load_state_dict_pre_hook(hook)
        with pytest.raises((UsageError, ArithmeticError, shardengine.errors.MismatchError), match=sentence):
            engine.load_state_dict(given)
        if handle is not None:
            handle.remove()
        for ours, theirs in zip(look(), before, strict=True):
            assert repr(ours) == repr(theirs)
    passes = model.register_load_state_dict_post_hook(lambda _module, keys: keys.missing_keys.clear())
    assert engine.load_state_dict(missing).missing_keys == []
    passes.remove()
    engine.close()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stage", ["1", "2", "3"])
def test_a_refused_load_changes_nothing(pools: Pools, stage: str, ranks: int) -> None:
    pools(ranks).run(refused_loads, stage)
