"""Adafactor, as the engine is given it and as the oracle has it; shared by its tests."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from transformers.optimization import Adafactor as Transformers

import shardengine
from tests import oracle
from tests.support import cases

STEPS = 5
NAMES = {
    "torch": ("row_var", "col_var", "variance"),
    "transformers": ("exp_avg_sq_row", "exp_avg_sq_col", "exp_avg_sq"),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "torch": {"lr": 0.05, "weight_decay": 0.1},
    "transformers": {"lr": 0.02, "relative_step": False, "weight_decay": 0.1},
}
MORE: dict[str, list[dict[str, Any]]] = {
    "torch": [
        {"lr": 0.3, "eps": (0.02, 0.2), "d": 2.0, "beta2_decay": -0.5},
        {"lr": 1e-3, "eps": (0.0, 0.0), "maximize": True},
        {"lr": 0.8, "weight_decay": 0.2},
    ],
    "transformers": [
        {"warmup_init": True},
        {"lr": 0.01, "relative_step": False, "scale_parameter": False, "beta1": 0.9, "clip_threshold": 0.5,
         "weight_decay": 0.01},
        {"eps": (1e-4, 0.1), "decay_rate": -0.6},
    ],
}  # fmt: skip


def make(form: str, groups: list[Any], **options: Any) -> torch.optim.Optimizer:
    """The user's own."""
    return (torch.optim.Adafactor if form == "torch" else Transformers)(groups, **(options or OPTIONS[form]))


def made(form: str, **options: Any) -> oracle.Made:
    """The same with exact sums."""

    def exactly(groups: list[Any]) -> torch.optim.Optimizer:
        return oracle.Adafactor(make(form, groups, **options).param_groups, NAMES[form])

    def names(parameter: Tensor) -> tuple[str, ...]:
        average = ("exp_avg",) if options.get("beta1") is not None else ()
        return (*(NAMES[form][:2] if parameter.dim() > 1 else NAMES[form][2:]), *average)

    return exactly, names


def engine_of(form: str, config: dict[str, Any], model: str = "mlp", **options: Any) -> shardengine.Engine:
    network = MODELS[model]()
    optimizer = make(form, [p for p in network.parameters() if p.requires_grad], **options)
    return shardengine.initialize(network, config, optimizer=optimizer, mesh=cases.mesh_of_this_process())


@functools.lru_cache(maxsize=64)
def truth(form: str, ranks: int, micros: int, order: str, steps: int = STEPS, **options: Any) -> oracle.Trace:
    network = cases.make_mlp()
    return oracle.train(
        network, cases.loss_of, ranks=ranks, micros=micros, steps=steps, made=made(form),
        groups=[{"params": [p for p in network.parameters() if p.requires_grad]}],
        order=order if micros > 1 else "full", clip=cases.CLIP,
        **cases.groups_told(order), **options,
    )  # fmt: skip


class Odd(nn.Module):
    """Matrices whose columns lie together in memory, many small ones in a convolution's weight, which lies by channels,
    one of three dimensions that is larger than many buckets, one number, one that is not used in some steps, a row, a
    column, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.turned = nn.Parameter(torch.randn(40, 23).t() / 6)
        self.experts = nn.Parameter(torch.randn(3, 40, 31) / 6)
        self.conv = nn.Conv2d(5, 4, 3)
        self.sometimes = nn.Linear(31, 31)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.row = nn.Parameter(torch.randn(1, 31))
        self.column = nn.Parameter(torch.randn(31, 1))
        self.frozen = nn.Linear(31, 11).requires_grad_(False)
        self.conv.weight.data = self.conv.weight.data.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor, *, branch: bool) -> Tensor:
        x = (x @ self.turned @ self.experts).sum(0) + self.row + (x @ self.turned @ self.experts[0] @ self.column)
        x = self.sometimes(x).tanh() if branch else x.tanh()
        image = x.reshape(1, 5, 1, 31).expand(1, 5, 5, 31)
        return self.frozen(x) * self.scale + self.conv(image).mean()


def make_odd() -> nn.Module:
    torch.manual_seed(21)
    return Odd()


def odd_loss(model: Any, step: int, rank: int, micro: int) -> Tensor:
    """Its gradient is not finite in step 3, and rank 0 alone uses the branch in step 4."""
    torch.manual_seed(cases.seed_of(step, rank, micro))
    bare: Any = getattr(model, "module", model)
    x = torch.randn(5, 23).to(bare.turned.dtype)
    loss = model(x, branch=step in (1, 5) or (step == 4 and rank == 0)).square().mean()
    return loss * float("inf") if step == 3 else loss


MODELS = {"mlp": cases.make_mlp, "odd": make_odd}
