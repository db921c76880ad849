"""Weights that the model or the loop writes are kept as one process keeps them, at every stage and tier: equal to the
oracle bit for bit."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests import oracle
from tests.support import cases
from tests.support.comparing import assert_equal_to_truth
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]
FORMS = ("in place", "data in place", "data =", "copy_", "a view", "in hooks")


def write(form: str, parameter: Tensor, new: Callable[[Tensor], Tensor]) -> None:
    """``parameter`` becomes ``new`` of itself, the same in every form."""
    with torch.no_grad():
        values = new(parameter.detach())
        if form == "data in place":
            parameter.data.mul_(0).add_(values)
        elif form == "data =":
            parameter.data = values.clone()
        elif form == "a view":
            parameter.detach().view(-1).mul_(0).add_(values.reshape(-1))
        elif form == "in place":
            parameter.mul_(0).add_(values)
        else:
            parameter.copy_(values)


class Block(nn.Module):
    """A frozen book of averages, a clamped temperature of one element, a matrix of bounded norm; a teacher of it."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.inside = nn.Linear(13, 13)
        self.teacher = nn.Linear(13, 13).requires_grad_(False)
        self.book = nn.Parameter(torch.ones(9, 13), requires_grad=False)
        self.temperature = nn.Parameter(torch.tensor(1.5))
        if form == "in hooks":
            self.register_forward_pre_hook(lambda module, args: self.bound())
            self.inside.register_forward_hook(lambda module, args, output: self.average())

    def bound(self) -> None:
        write(self.form, self.inside.weight, lambda w: w * (1.4 / w.float().norm()).clamp(max=1.0).to(w.dtype))
        write(self.form, self.temperature, lambda t: t.clamp(max=1.25))

    def average(self) -> None:
        write(self.form, self.book, lambda b: b * 0.875)
        write(self.form, self.teacher.weight, lambda w: w * 0.5 + self.inside.weight.detach() * 0.5)

    def forward(self, x: Tensor) -> Tensor:
        if self.form != "in hooks":
            self.bound()
        h = self.inside(x).tanh()
        if self.form != "in hooks":
            self.average()
        return x + (h + self.teacher(x) * 0.1 + self.book.mean(0)) * self.temperature


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(7, 13)
        self.blocks = nn.ModuleList(Block(form) for form in FORMS)
        self.root = nn.Parameter(torch.full((70,), 0.025))
        self.out = nn.Linear(13, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        write("copy_", self.root, lambda r: r.clamp(max=0.02))
        return self.out(x) * self.root.sum()


def make() -> Net:
    torch.manual_seed(5)
    return Net()


def loss_of(model: Any, step: int, rank: int, micro: int) -> Tensor:
    net: Any = getattr(model, "module", model)
    torch.manual_seed(cases.seed_of(step, rank, micro))
    x, y = torch.randn(5, 7), torch.randn(5, 3)
    if micro == 0:
        between(model, net)
    loss = (model(x.to(net.inp.weight.dtype)).float() - y).square().mean()
    return loss


def between(model: Any, net: Net) -> None:
    """A loop that clamps between two steps, in a way that torch does not count."""

    def clamp() -> None:
        net.out.weight.data.clamp_(-0.125, 0.125)
        write("in place", net.inp.weight, lambda w: w.clamp(-0.25, 0.25))

    if model is net or not model._core.stage.moves_weights:
        clamp()
    else:
        with model.full_params(["out.weight", "inp.weight"]):
            clamp()


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    return [group for group in cases.groups_of(model, "AdamW") if group["params"]]


LOW: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fp32": ({}, {}),
    "bf16": ({"bf16": {"enabled": True}}, {"low": torch.bfloat16}),
    "fp16": (
        {"fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2, "hysteresis": 1}},
        {"low": torch.float16, "scaling": (2.0**8, 2, 1, 1.0)},
    ),
}


@functools.cache
def truth(ranks: int, micros: int, order: str, precision: str, steps: int) -> oracle.Trace:
    model, told = make(), dict(LOW[precision][1])
    if (scaling := told.pop("scaling", None)) is not None:
        told["scaler"] = oracle.Scaler(*scaling)
    return oracle.train(
        model, loss_of, ranks=ranks, micros=micros, steps=steps, groups=groups_of(model),
        order=order if micros > 1 else "full", clip=cases.CLIP, **told, **cases.groups_told(order),
    )  # fmt: skip


def train(config: dict[str, Any], steps: int) -> dict[str, Any]:
    engine = cases.make_engine(make(), config)
    result = cases.run_steps(engine, steps, loss_of)
    engine.close()
    return result


def train_each(configs: dict[str, dict[str, Any]], steps: int) -> dict[str, dict[str, Any]]:
    return {name: train(config, steps) for name, config in configs.items()}


def compare(pools: Pools, ranks: int, micros: int, precision: str, configs: dict[str, dict[str, Any]]) -> None:
    steps = 4
    results = pools(ranks).run(train_each, configs, steps)
    for name in configs:
        stage = name.split(",")[0]
        wanted = truth(ranks, micros, cases.LETTER[stage], precision, steps)
        assert_equal_to_truth([result[name] for result in results], wanted, f"{name}, {precision}, {ranks} ranks")


def config_of(stage: str, micros: int, precision: str, **zero: Any) -> dict[str, Any]:
    return cases.config_of(stage, micros, zero={"reduce_bucket_size": 300, **zero}, **LOW[precision][0])


@pytest.mark.core
@pytest.mark.parametrize(("ranks", "micros"), [(1, 1), (2, 2), (3, 1)])
@pytest.mark.parametrize("precision", list(LOW))
def test_what_is_written_is_kept(pools: Pools, precision: str, ranks: int, micros: int) -> None:
    compare(pools, ranks, micros, precision, {stage: config_of(stage, micros, precision) for stage in cases.STAGES})


CPU: dict[str, Any] = {"device": "cpu"}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_on_every_tier(pools: Pools, tmp_path: Path, precision: str) -> None:
    disk = {"device": "nvme", "nvme_path": str(tmp_path), "buffer_count": 3}
    places: dict[str, dict[str, Any]] = {
        "0, states on the host": {"offload_optimizer": CPU},
        "1, states on the host": {"offload_optimizer": CPU},
        "2, states on disk": {"offload_optimizer": disk},
        "3, states on the host": {"offload_optimizer": CPU},
        "3, weights on the host": {"offload_param": CPU},
        "3k, all on the host": {"offload_param": CPU, "offload_optimizer": CPU},
        "3, all on disk": {"offload_param": disk, "offload_optimizer": disk},
    }
    configs = {name: config_of(name.split(",")[0], 1, precision, **zero) for name, zero in places.items()}
    compare(pools, 2, 1, precision, configs)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_in_shard_groups(pools: Pools, precision: str) -> None:
    configs = {name: config_of(name, 2, precision) for name in ("2 hybrid", "3 hybrid", "3 hpZ")}
    compare(pools, 4, 2, precision, configs)
