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
        order=order if micros > 1 else "full", clip=cases.CLIP, **options,
    )  # fmt: skip
