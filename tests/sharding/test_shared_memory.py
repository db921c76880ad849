"""Parameters in the memory of something else: refused by name where one would no longer follow the other."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter

from shardengine.errors import UsageError
from shardengine.sharding import partition
from tests import oracle
from tests.support import cases
from tests.support.comparing import assert_equal_to_truth
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]


class Net(nn.Module):
    """A layer, and two matrices of 6 rows that ``make`` gives: parameters "w", "v", buffers or frozen ones by name."""

    w: Tensor

    def __init__(self, make: Callable[[Any], None]) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layer = nn.Linear(6, 6)
        make(self)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layer(x) @ self.w)
        other: Any = getattr(self, "v", None)
        return x if other is None else x @ other


def as_w(parameter: Parameter) -> Callable[[Any], None]:
    return lambda net: setattr(net, "w", parameter)


def frozen(tensor: Tensor) -> Parameter:
    return Parameter(tensor, requires_grad=False)


def by_data(net: Any) -> None:
    net.w, net.v = Parameter(torch.randn(6, 6)), Parameter(torch.zeros(6, 6))
    net.v.data = net.w.data


def columns(first: int) -> Callable[[Any], None]:
    def make(net: Any) -> None:
        both = torch.randn(6, 12)
        net.w, net.v = Parameter(both[:, :6]), Parameter(both[:, first : first + 6])

    return make


def beside(make: Callable[[Tensor], Tensor], w: Callable[[Tensor], Parameter] = Parameter) -> Callable[[Any], None]:
    def add(net: Any) -> None:
        net.w = w(torch.randn(6, 6))
        other = make(net.w.detach())
        if isinstance(other, Parameter):
            net.v = other
        else:
            net.register_buffer("v", other)

    return add


def from_numpy(net: Any) -> None:
    array = torch.randn(6, 6).numpy()
    net.w, net.v = Parameter(torch.from_numpy(array)), Parameter(torch.from_numpy(array))


REFUSED: dict[str, Callable[[Any], None]] = {
    "detached": beside(Parameter),
    "by .data": by_data,
    "transposed": beside(lambda w: Parameter(w.t())),
    "a slice": beside(lambda w: Parameter(w[2:4])),
    "columns": columns(5),
    "two storages": from_numpy,
    "one frozen": beside(frozen),
    "the other frozen": beside(Parameter, frozen),
    "a buffer": beside(lambda w: w),
    "a row as a buffer": beside(lambda w: w[1]),
    "bytes as a buffer": beside(lambda w: w.view(torch.uint8)[:, 1::4]),
}


def one_column_apart(net: Any) -> None:
    both = torch.randn(12, 6)
    net.w, net.v = Parameter(both[::2]), Parameter(both[1::2])


def tied(net: Any) -> None:
    net.w = net.v = Parameter(torch.randn(6, 6))


ALLOWED: dict[str, Callable[[Any], None]] = {
    "columns side by side": columns(6),
    "every other row": one_column_apart,
    "one object": tied,
    "both frozen": beside(frozen, frozen),
    "a frozen one and a buffer": beside(lambda w: w, frozen),
    "an expanded one that is frozen": as_w(frozen(torch.randn(1, 6).expand(6, 6))),
    "transposed": as_w(Parameter(torch.randn(6, 6).t())),
}


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_two_objects_over_one_memory_are_refused_by_name(kind: str, device: str) -> None:
    if (kind, device) == ("two storages", "meta"):
        return
    with torch.device(device):
        model = Net(REFUSED[kind])
    name, other = ("v", "w") if kind == "the other frozen" else ("w", "v")
    with pytest.raises(UsageError, match=f"^parameter '{name}' is trained and lies in the same memory as '{other}'"):
        partition.analyse(model, "auto", {}, shards_weights=False)
    if device == "cpu" and "v" in dict(model.named_parameters()):
        with pytest.raises(UsageError, match=f"'{name}' is trained and lies in the same memory as '{other}'"):
            partition.analyse(model, "auto", {}, shards_weights=False, ignored=["v"])


def test_elements_that_share_memory_are_refused_by_name() -> None:
    shapes = {"(0, 1)": torch.randn(1, 6).expand(6, 6), "(1, 1)": torch.as_strided(torch.randn(8), (6, 3), (1, 1))}
    for strides, tensor in shapes.items():
        model = Net(as_w(Parameter(tensor)))
        with pytest.raises(UsageError, match=rf"'w'.*several of its elements.*strides {re.escape(strides)}"):
            partition.analyse(model, "auto", {}, shards_weights=False)


def test_what_shares_no_element_is_none_of_it() -> None:
    for name, make in ALLOWED.items():
        partition.analyse(Net(make), "auto", {}, shards_weights=False)
        with torch.device("meta"):
            partition.analyse(Net(make), "auto", {}, shards_weights=False)
        assert name
    partition.analyse(nn.LSTM(3, 4, 2, bidirectional=True), "auto", {}, shards_weights=False)


def loss_of(model: Any, step: int, rank: int, micro: int) -> Tensor:
    torch.manual_seed(cases.seed_of(step, rank, micro))
    return model(torch.randn(4, 6)).square().mean()


def refuse_and_train(stage: str, kind: str) -> dict[str, Any]:
    for make in (REFUSED["detached"], REFUSED["a buffer"]):
        model = Net(make)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with pytest.raises(UsageError, match="lies in the same memory as"):
            cases.make_engine(model, cases.config_of(stage))
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    engine = cases.make_engine(Net(ALLOWED["both frozen"]), cases.config_of(stage))
    assert engine.optimizer is not None
    engine.module.w.requires_grad_(True)
    with pytest.raises(UsageError, match="'w' is trained and lies in the same memory as 'v'"):
        engine.optimizer.add_param_group({"params": [engine.module.w]})
    engine.module.w.requires_grad_(False)
    engine.close()
    engine = cases.make_engine(Net(ALLOWED[kind]), cases.config_of(stage))
    result = cases.run_steps(engine, 3, loss_of)
    engine.close()
    return result


@pytest.mark.parametrize(("ranks", "kind"), [(1, "columns side by side"), (2, "every other row"), (3, "one object")])
@pytest.mark.parametrize("stage", cases.STAGES)
def test_every_rank_refuses_and_others_train(pools: Pools, stage: str, ranks: int, kind: str) -> None:
    results = pools(ranks).run(refuse_and_train, stage, kind)
    model = Net(ALLOWED[kind])
    groups = cases.groups_of(model, "AdamW")
    truth = oracle.train(model, loss_of, ranks=ranks, steps=3, groups=groups, clip=cases.CLIP)
    assert_equal_to_truth(results, truth, stage)


class Cached(nn.Module):
    """Tensors of a parameter's memory under names that nobody registers."""

    def __init__(self, make: Callable[[Any], None]) -> None:
        super().__init__()
        self.inside = Net(as_w(Parameter(torch.randn(6, 6))))
        self.last = torch.nn.utils.spectral_norm(nn.Linear(6, 6))
        make(self.inside)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inside(x)
        assert isinstance(y, Tensor)
        return y + self.last(x)


LEFT: dict[str, tuple[Callable[[Any], None], list[str]]] = {
    "nothing": (lambda net: None, []),
    "detached": (lambda net: setattr(net, "cache", net.w.detach()), ["'inside.cache' of 'inside.w'"]),
    "a view": (lambda net: setattr(net, "flat", net.w.view(-1)), ["'inside.flat' of 'inside.w'"]),
    "in a list": (
        lambda net: setattr(net, "all", [net.w, net.layer.weight[:2]]),
        ["'inside.all' of 'inside.layer"],
    ),
    "the parameters themselves": (lambda net: setattr(net, "all", [net.w, net.layer.weight]), []),
    "a copy": (lambda net: setattr(net, "cache", net.w.detach().clone()), []),
    "of a frozen one": (lambda net: setattr(net, "cache", net.w.requires_grad_(False).detach()), []),
}


@pytest.mark.parametrize("stage", ["0", "3"])
@pytest.mark.parametrize("name", list(LEFT))
def test_attributes_that_will_not_follow_are_told_once(caplog: pytest.LogCaptureFixture, stage: str, name: str) -> None:
    make, told = LEFT[name]
    model = Cached(make)
    engine = cases.make_engine(model, cases.config_of(stage), "SGD")
    engine.backward(engine(torch.ones(4, 6)).sum())
    engine.step()
    engine.close()
    found = [each.getMessage() for each in caplog.records if "plain tensor attributes" in each.getMessage()]
    assert len(found) == len(told) and all(part in each for part, each in zip(told, found, strict=True)), found
