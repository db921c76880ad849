"""Floating-point inputs under bf16 and fp16: cast as if by hand, wherever they are, and nothing else is."""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import types
from collections import UserDict
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from shardengine.config.load import load_config
from shardengine.runtime.casting import cast_inputs
from shardengine.sharding import precision
from tests import oracle
from tests.support import cases
from tests.support.comparing import assert_equal_to_truth
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]
BF16, FP16 = torch.bfloat16, torch.float16
STEPS = 4
SCALING = (2.0**17, 2, 1, 1.0)
PRECISIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "bf16": ({"bf16": {"enabled": True}}, {"low": BF16}),
    "fp16": (
        {"fp16": {"enabled": True, "initial_scale_power": 17, "loss_scale_window": 2, "hysteresis": 1}},
        {"low": FP16, "scaling": SCALING},
    ),
    "bf16, no masters": ({"bf16": {"enabled": True, "master_weights": False}}, {"low": BF16, "keeps_masters": False}),
}
"""What the config says → what the oracle is told."""


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass(frozen=True)
class Batch:
    rows: Any
    weights: Any
    name: str = "batch"


class Nested(nn.Module):
    """Takes tensors from every kind of container; integers above 256, which bf16 does not hold, decide rows."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(600, 5)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 5)) for _ in range(3))
        self.register_buffer("shift", torch.full((5,), 0.1))

    def forward(self, given: dict[str, Any], pair: Pair, *, batch: Batch, more: Any) -> Tensor:
        x = given["x"] + self.table(given["ids"][0]) + pair.left * pair.right["bias"]
        for block, item in zip(self.blocks, batch.rows, strict=True):
            x = x + block(item + x)
        return torch.where(given["mask"], x, more["fill"]) * batch.weights[0]


def make_nested() -> nn.Module:
    torch.manual_seed(5)
    return Nested()


def inputs_of(seed: int, by_hand: torch.dtype | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Everything as a user has it, in fp32 and fp64; or with each tensor cast by hand."""
    torch.manual_seed(seed)

    def tensor(dtype: torch.dtype = torch.float32) -> Tensor:
        made = torch.randn(4, 5, dtype=dtype)
        return made if by_hand is None else made.to(by_hand)

    given = {"x": tensor(), "ids": [torch.randint(257, 600, (4,))], "mask": torch.rand(4, 5) > 0.3}
    pair = Pair(tensor(), {"bias": tensor(torch.float64)})
    batch = Batch([tensor(), tensor().t().contiguous().t(), tensor()[:, :]], (tensor(),))
    return (given, pair), {"batch": batch, "more": UserDict(fill=tensor())}


def nested_loss(model: Any, step: int, rank: int, micro: int, *, low: torch.dtype) -> Tensor:
    """The oracle gets a module and inputs that are cast by hand; the engine what the user has."""
    by_hand = low if isinstance(model, nn.Module) else None
    args, kwargs = inputs_of(cases.seed_of(step, rank, micro), by_hand)
    return model(*args, **kwargs).float().square().mean()


def train_nested(name: str, micros: int) -> dict[str, dict[str, Any]]:
    said, told = PRECISIONS[name]
    results = {}
    for stage in cases.STAGES:
        engine = cases.make_engine(make_nested(), cases.config_of(stage, micros, **said), "AdamW")
        results[stage] = cases.run_steps(engine, STEPS, functools.partial(nested_loss, low=told["low"]))
        engine.close()
    return results


@functools.cache
def truth(name: str, ranks: int, micros: int, order: str) -> oracle.Trace:
    network, options = make_nested(), dict(PRECISIONS[name][1])
    if (scaling := options.pop("scaling", None)) is not None:
        options["scaler"] = oracle.Scaler(*scaling)
    return oracle.train(
        network, functools.partial(nested_loss, low=options["low"]), ranks=ranks, micros=micros, steps=STEPS,
        kind="AdamW", groups=cases.groups_of(network, "AdamW"), order=order, clip=cases.CLIP, **options,
    )  # fmt: skip


@pytest.mark.parametrize("name", list(PRECISIONS))
@pytest.mark.parametrize(("ranks", "micros"), [(1, 1), (2, 1), (2, 3), (3, 1)])
def test_nested_inputs_train_as_if_they_were_cast_by_hand(pools: Pools, name: str, ranks: int, micros: int) -> None:
    results = pools(ranks).run(train_nested, name, micros)
    for stage in cases.STAGES:
        order = cases.LETTER[stage] if micros > 1 else "full"
        assert_equal_to_truth([result[stage] for result in results], truth(name, ranks, micros, order), stage)


# Which calls


def call_everywhere(stage: str, options: dict[str, Any]) -> dict[str, Any]:
    """Outputs of the engine and of its module, in training and in evaluation, beside those of inputs cast by hand; the
    gradients of inputs; and what is left of it after close()."""
    model = cases.make_mlp()
    engine = cases.make_engine(model, cases.config_of(stage, **options), "SGD")
    low = torch.bfloat16
    torch.manual_seed(1)
    x = torch.randn(5, 7)
    found: dict[str, Any] = {}
    for mode in (True, False):
        engine.train(mode)
        with torch.set_grad_enabled(mode):
            found[f"engine {mode}"] = torch.equal(engine(x), engine(x.to(low)))
            found[f"module {mode}"] = torch.equal(engine.module(x), model(x.to(low)))
    engine.train()
    gradients: list[Tensor] = []
    for given in (x.clone().requires_grad_(), x.clone().requires_grad_()):
        engine.backward(engine(given if not gradients else given.to(low)).float().square().mean())
        engine.zero_grad()
        assert given.grad is not None and given.grad.dtype is torch.float32
        gradients.append(given.grad)
    found["gradient"] = torch.equal(*gradients) and bool(gradients[0].abs().sum() > 0)
    engine.close()
    with pytest.raises(RuntimeError, match="dtype"):
        model(x)
    return found


@pytest.mark.parametrize("stage", list(cases.STAGES))
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_call_of_the_model_is_cast_until_close(pools: Pools, ranks: int, stage: str) -> None:
    for found in pools(ranks).run(call_everywhere, stage, {"bf16": {"enabled": True}}):
        assert all(found.values()) and len(found) == 5, found


class Recorder(nn.Module):
    """Keeps what its forward was given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("memory", torch.zeros(3))
        self.seen: Any = None

    def forward(self, *args: Any) -> Tensor:
        self.seen = args
        return self.linear(torch.ones(2, 3, dtype=self.linear.weight.dtype)).sum()


def engine_of(model: Any, **options: Any) -> Any:
    """At stage 0, at one rank."""
    return cases.make_engine(model, cases.config_of("0", **options), "SGD")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"torch_autocast": {"enabled": True}},
        {"bf16": {"enabled": True}, "torch_autocast": {"enabled": True}},
        {"bf16": {"enabled": True, "auto_cast": False}},
        {"fp16": {"enabled": True, "auto_cast": False}},
        {"bf16": {"auto_cast": True}, "fp16": {"auto_cast": True}},
    ],
)
def test_nothing_is_cast_and_nothing_hooked_otherwise(options: dict[str, Any]) -> None:
    assert precision.of(load_config(cases.config_of("0", **options))).inputs is None
    engine = engine_of(Recorder(), **options)
    x = torch.ones(2, 3)
    engine(x)
    assert engine.module.seen[0] is x
    assert not engine.module._forward_pre_hooks_with_kwargs
    engine.close()


def test_a_region_of_autocast_casts_by_itself() -> None:
    engine = engine_of(Recorder(), bf16={"enabled": True})
    x = torch.ones(2, 3)
    with torch.autocast("cpu", torch.bfloat16):
        engine(x)
    assert engine.module.seen[0] is x
    engine(x)
    assert engine.module.seen[0].dtype is BF16
    engine.close()


def test_a_buffer_of_the_model_that_is_an_input_stays_the_buffer() -> None:
    engine = engine_of(Recorder(), bf16={"enabled": True})
    engine(engine.module.memory, torch.ones(2, 3))
    assert engine.module.memory.dtype is torch.float32
    assert engine.module.seen[0] is engine.module.memory and engine.module.seen[1].dtype is BF16
    engine.close()


def test_a_copy_of_the_model_takes_its_inputs_as_they_are() -> None:
    engine = engine_of(Recorder(), bf16={"enabled": True})
    twin = copy.deepcopy(engine.module)
    engine.close()
    x = torch.ones(2, 3)
    twin(x)
    assert twin.seen[0] is x


def test_a_layout_that_is_made_anew_casts_once_more() -> None:
    model: Any = cases.make_mlp()
    model.out.weight.requires_grad_(False)
    engine: Any = cases.make_engine(model, cases.config_of("3", bf16={"enabled": True}), "SGD")
    model.out.weight.requires_grad_(True)
    before = engine._core
    engine.optimizer.add_param_group({"params": [model.out.weight], "lr": 0.1})
    assert engine._core is not before
    engine(torch.ones(5, 7))
    assert sum(model._forward_pre_hooks_with_kwargs.values()) == 1
    engine.close()
    assert not model._forward_pre_hooks_with_kwargs


def test_a_compiled_model_gets_cast_inputs() -> None:
    x = torch.randn(5, 7)
    for compile_it in (lambda m: torch.compile(m, backend="eager"), lambda m: m.compile(backend="eager") or m):
        engine = engine_of(compile_it(cases.make_mlp()), bf16={"enabled": True})
        assert torch.equal(engine(x), engine(x.bfloat16()))
        engine.close()


class MakesItsOwn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.float())


@pytest.mark.parametrize(
    ("model", "section", "words"),
    [
        (MakesItsOwn(), {"enabled": True}, ["the weights are in bfloat16", "what the forward makes itself"]),
        (nn.Linear(3, 3), {"enabled": True, "auto_cast": False}, ["in bfloat16", "the inputs, which auto_cast"]),
    ],
)
def test_what_is_not_cast_keeps_torchs_error_and_gets_a_note(
    model: nn.Module, section: dict[str, Any], words: list[str]
) -> None:
    engine = engine_of(copy.deepcopy(model), bf16=section)
    with pytest.raises(RuntimeError, match="must have the same dtype") as caught:
        engine(torch.ones(2, 3))
    (note,) = caught.value.__notes__
    assert all(word in note for word in words), note
    engine.close()


def test_an_error_about_something_else_gets_no_note() -> None:
    engine = engine_of(nn.Linear(3, 3), bf16={"enabled": True})
    with pytest.raises(RuntimeError, match="shapes") as caught:
        engine(torch.ones(2, 4))
    assert not getattr(caught.value, "__notes__", [])
    engine.close()


# Containers


class Attributed(dict[str, Any]):
    """A dict with a state beside it."""

    def __init__(self, items: dict[str, Any], extra: int) -> None:
        super().__init__(items)
        self.extra = extra


class Stored(MutableMapping[str, Any]):
    """A mapping that keeps its items in a dict of its own, which a shallow copy shares."""

    def __init__(self, extra: int, **items: Any) -> None:
        self._items, self.extra = items, extra

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._items[key] = value

    def __delitem__(self, key: str) -> None:
        del self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


class Sealed(dict[str, Any]):
    """A dict that takes nothing new."""

    def __setitem__(self, key: str, value: Any) -> None:
        raise TypeError("sealed")


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    first: Any
    second: Any = 7


class Items(list[Any]):
    extra = 0


def x32() -> Tensor:
    return torch.tensor([1.0, 2.0])


def encoding(items: dict[str, Any]) -> Any:
    from transformers import BatchEncoding

    return BatchEncoding(items)


def output(items: dict[str, Any]) -> Any:
    from transformers.modeling_outputs import BaseModelOutput

    return BaseModelOutput(last_hidden_state=items["a"])


CONTAINERS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "tuple": (lambda x: (1, x), lambda v: v[1]),
    "list": (lambda x: [x, None], lambda v: v[0]),
    "list class": (lambda x: Items([x]), lambda v: v[0]),
    "named tuple": (lambda x: Pair(3, x), lambda v: v.right),
    "packed": (
        lambda x: nn.utils.rnn.pack_padded_sequence(x[:, None, None], torch.tensor([2])),
        lambda v: v.data[:, 0],
    ),
    "torch's sequence": (lambda x: torch.max(x[:, None], dim=1), lambda v: v.values),
    "dict": (lambda x: {"a": x, "b": "text"}, lambda v: v["a"]),
    "OrderedDict": (lambda x: collections.OrderedDict(b=1, a=x), lambda v: v["a"]),
    "defaultdict": (lambda x: collections.defaultdict(list, a=x), lambda v: v["a"]),
    "UserDict": (lambda x: UserDict(a=x), lambda v: v["a"]),
    "BatchEncoding": (lambda x: encoding({"a": x}), lambda v: v["a"]),
    "ModelOutput": (lambda x: output({"a": x}), lambda v: v.last_hidden_state),
    "dict class": (lambda x: Attributed({"a": x}, 3), lambda v: v["a"]),
    "mapping class": (lambda x: Stored(3, a=x), lambda v: v["a"]),
    "read-only": (lambda x: types.MappingProxyType({"a": x}), lambda v: v["a"]),
    "frozen dataclass": (lambda x: Batch(x, ()), lambda v: v.rows),
    "slotted": (lambda x: Slotted(x), lambda v: v.first),
    "deep": (lambda x: {"a": [Slotted(1, (UserDict(k=x),))]}, lambda v: v["a"][0].second[0]["k"]),
}


@pytest.mark.parametrize("kind", list(CONTAINERS))
def test_a_container_is_copied_and_keeps_its_class(kind: str) -> None:
    make, read = CONTAINERS[kind]
    original = make(x32())
    before = read(original)
    new = cast_inputs(original, BF16)
    assert type(new) is type(original) and new is not original
    assert read(new).dtype is BF16 and torch.equal(read(new).float(), x32())
    assert read(original) is before or kind == "packed"
    assert read(original).dtype is torch.float32
    assert getattr(new, "extra", 0) == getattr(original, "extra", 0)


@pytest.mark.parametrize("kind", list(CONTAINERS))
def test_where_nothing_changes_the_very_objects_are_passed_on(kind: str) -> None:
    make, _ = CONTAINERS[kind]
    for dtype in (BF16, torch.int64):
        original = make(x32().to(dtype))
        assert cast_inputs(original, BF16) is original


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(300), torch.tensor([True]), torch.tensor([1j]), torch.ones(2).to(torch.float8_e4m3fn),
        torch.ones(2, dtype=torch.uint8),
    ],
)  # fmt: skip
def test_what_is_no_floating_point_number_stays(tensor: Tensor) -> None:
    given = {"a": tensor, "b": x32()}
    cast = cast_inputs(given, BF16)
    assert cast["a"] is tensor and cast["b"].dtype is BF16


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, FP16, BF16])
@pytest.mark.parametrize("to", [FP16, BF16])
def test_every_other_precision_is_cast(dtype: torch.dtype, to: torch.dtype) -> None:
    value = torch.tensor([1.0009765625, -3.5], dtype=dtype)
    assert torch.equal(cast_inputs(value, to), value.to(to)) and cast_inputs(value, to).dtype is to


def test_what_is_given_twice_is_one_object_afterwards() -> None:
    x, inner = x32(), [x32()]
    cast = cast_inputs((x, inner, {"again": x, "inner": inner}), BF16)
    assert cast[2]["again"] is cast[0] and cast[2]["inner"] is cast[1]


def test_what_holds_itself_ends() -> None:
    ring: list[Any] = [x32()]
    ring.append(ring)
    assert cast_inputs(ring, BF16)[0].dtype is BF16 and ring[0].dtype is torch.float32


def test_a_container_that_takes_nothing_new_is_passed_on() -> None:
    sealed = Sealed(a=x32())
    assert cast_inputs((sealed, x32()), BF16)[0] is sealed


def test_modules_and_other_objects_are_not_looked_into() -> None:
    holder, module = types.SimpleNamespace(x=x32()), nn.Linear(2, 2)
    cast = cast_inputs([holder, module, Batch, x32()], BF16)
    assert cast[0] is holder and cast[1] is module and cast[2] is Batch and module.weight.dtype is torch.float32


def test_subclasses_and_views_are_cast() -> None:
    base, soft = torch.randn(4, 4), nn.Parameter(torch.randn(3))
    view, learnt = cast_inputs((base.t()[1:, ::2], soft), BF16)
    assert torch.equal(view, base.t()[1:, ::2].bfloat16())
    learnt.float().sum().backward()
    assert soft.grad is not None and torch.equal(soft.grad, torch.ones(3))
