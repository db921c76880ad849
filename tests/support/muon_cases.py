"""Muon with AdamW for the rest, as the engine is given it and as plain torch has it; shared by the tests of Muon."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

import shardengine
from shardengine.muon import MuonWithAdamW
from tests import oracle
from tests.support import cases

MUON: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9}
ADAMW: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.05, "betas": (0.9, 0.95), "eps": 1e-8}
STEPS = 5


def split(network: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """What each of the two steps."""
    trained = [p for p in network.parameters() if p.requires_grad]
    return [p for p in trained if p.dim() == 2], [p for p in trained if p.dim() != 2]


def make_muon(groups: list[Any]) -> torch.optim.Optimizer:
    return torch.optim.Muon(groups, **MUON)


MADE: list[oracle.Made | str] = [(make_muon, ("momentum_buffer",)), "AdamW"]


def make_both(network: nn.Module) -> MuonWithAdamW:
    matrices, rest = split(network)
    return MuonWithAdamW([{"params": matrices, "use_muon": True, **MUON}, {"params": rest, "use_muon": False, **ADAMW}])


def alone(network: nn.Module) -> nn.Module:
    """``network`` with nothing trainable but matrices."""
    for parameter in network.parameters():
        parameter.requires_grad_(parameter.dim() == 2)
    return network


def engine_of(form: str, config: dict[str, Any]) -> shardengine.Engine:
    """form: "both" (one optimizer), "alone" (torch's, over matrices)."""
    network, mesh = cases.make_mlp(), cases.mesh_of_this_process()
    optimizer = make_muon(split(alone(network))[0]) if form == "alone" else make_both(network)
    return shardengine.initialize(network, config, optimizer=optimizer, mesh=mesh)


@functools.lru_cache(maxsize=64)
def truth(form: str, ranks: int, micros: int, order: str, steps: int = STEPS, **options: Any) -> oracle.Trace:
    network = cases.make_mlp()
    matrices, rest = split(alone(network) if form == "alone" else network)
    groups, made = [{"params": matrices}, {"params": rest, **ADAMW}], MADE
    if form == "alone":
        groups, made = groups[:1], MADE[:1]
    return oracle.train(
        network, cases.loss_of, ranks=ranks, micros=micros, steps=steps, made=made, groups=groups,
        order=order if micros > 1 else "full", clip=cases.CLIP,
        **cases.groups_told(order), **options,
    )  # fmt: skip


class Odd(nn.Module):
    """A matrix whose columns lie together in memory, one that is larger than many buckets, one that is not used in
    some steps, and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.turned = nn.Parameter(torch.randn(40, 23).t() / 6)
        self.large = nn.Linear(40, 67)
        self.sometimes = nn.Linear(67, 67, bias=False)
        self.frozen = nn.Linear(67, 11).requires_grad_(False)

    def forward(self, x: torch.Tensor, *, branch: bool) -> torch.Tensor:
        x = self.large(x @ self.turned)
        return self.frozen(self.sometimes(x).tanh() if branch else x.tanh())


def make_odd() -> nn.Module:
    torch.manual_seed(21)
    return Odd()


def odd_loss(model: Any, step: int, rank: int, micro: int) -> torch.Tensor:
    """Its gradient is not finite in step 3, and rank 0 alone uses the branch in step 4."""
    torch.manual_seed(cases.seed_of(step, rank, micro))
    bare: Any = getattr(model, "module", model)
    x = torch.randn(5, 23).to(bare.turned.dtype)
    loss = model(x, branch=step in (0, 1, 5) or (step == 4 and rank == 0)).square().mean()
    return loss * float("inf") if step == 3 else loss
