"""Optimizers that the kernels do not have: torch's, and classes as other libraries and users write them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class Plain(torch.optim.Optimizer):
    """As users write them: it keeps no count, changes gradients, and takes new tensors instead of writing in place."""

    def __init__(self, params: Any, lr: float = 1e-2, weight_decay: float = 0.0, power: float = 0.5) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "power": power})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                p.grad.add_(p, alpha=group["weight_decay"])
                state = self.state[p]
                if "mean" not in state:
                    state["mean"] = p.grad.abs()
                state["mean"] = state["mean"] * 0.5 + p.grad.abs() * 0.5
                p.data = p - group["lr"] * p.grad.sign() * state["mean"] ** group["power"]


class ScheduleFree(torch.optim.Optimizer):
    """Schedule-free SGD (Defazio et al., 2024, arXiv 2405.15682): evaluated at an average of its weights. It counts in
    the options of its groups, begins a state with the weights, and exchanges weights in ``train()`` and ``eval()``."""

    def __init__(self, params: Any, lr: float = 0.05, beta: float = 0.9, weight_decay: float = 0.0) -> None:
        options = {"lr": lr, "beta": beta, "weight_decay": weight_decay, "k": 0, "weight_sum": 0.0, "train_mode": False}
        super().__init__(params, options)

    @torch.no_grad()
    def train(self) -> None:
        self._exchange(to_training=True)

    @torch.no_grad()
    def eval(self) -> None:
        self._exchange(to_training=False)

    def _exchange(self, *, to_training: bool) -> None:
        for group in self.param_groups:
            if group["train_mode"] is to_training:
                continue
            for p in group["params"]:
                if "z" in self.state[p]:
                    p.lerp_(self.state[p]["z"], 1 - group["beta"] if to_training else 1 - 1 / group["beta"])
            group["train_mode"] = to_training

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if not group["train_mode"]:
                raise RuntimeError("optimizer.train() was not called")
            weight = group["lr"] ** 2
            group["weight_sum"] += weight
            part = weight / group["weight_sum"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "z" not in state:
                    state["z"] = torch.clone(p)
                z, grad = state["z"], p.grad
                if group["weight_decay"]:
                    grad = grad + p * group["weight_decay"]
                p.lerp_(z, part)
                p.add_(grad, alpha=group["lr"] * (group["beta"] * (1 - part) - 1))
                z.sub_(grad, alpha=group["lr"])
            group["k"] += 1


class Halves(torch.optim.Optimizer):
    """Keeps its state in bf16."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    old = self.state[p].get("moment", torch.zeros_like(p, dtype=torch.bfloat16))
                    self.state[p]["moment"] = (old.float() * 0.9 + p.grad * 0.1).bfloat16()
                    p.sub_(self.state[p]["moment"].float(), alpha=group["lr"])


Row = tuple[Callable[..., torch.optim.Optimizer], dict[str, Any], tuple[str, ...]]
ROWS: dict[str, Row] = {
    "NAdam": (torch.optim.NAdam, {"lr": 1e-2, "weight_decay": 0.1, "momentum_decay": 4e-3}, ("exp_avg", "exp_avg_sq")),
    "RAdam": (torch.optim.RAdam, {"lr": 1e-2, "betas": (0.8, 0.9)}, ("exp_avg", "exp_avg_sq")),
    "Adagrad": (torch.optim.Adagrad, {"lr": 1e-2, "lr_decay": 0.1, "initial_accumulator_value": 0.1}, ("sum",)),
    "RMSprop": (
        torch.optim.RMSprop,
        {"lr": 1e-3, "centered": True, "momentum": 0.9},
        ("square_avg", "momentum_buffer", "grad_avg"),
    ),
    "Adamax": (torch.optim.Adamax, {"lr": 1e-2, "weight_decay": 0.1}, ("exp_avg", "exp_inf")),
    "Adadelta": (torch.optim.Adadelta, {"lr": 1.0}, ("square_avg", "acc_delta")),
    "Rprop": (torch.optim.Rprop, {"lr": 1e-2}, ("prev", "step_size")),
    "ASGD": (torch.optim.ASGD, {"lr": 1e-2, "lambd": 1e-2, "t0": 3}, ("ax",)),
    "AMSGrad": (
        torch.optim.AdamW,
        {"lr": 1e-2, "amsgrad": True, "foreach": True},
        ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    ),
    "fused": (torch.optim.Adagrad, {"lr": 1e-2, "fused": True}, ("sum",)),
    "Plain": (Plain, {"lr": 1e-2, "weight_decay": 0.1}, ("mean",)),
    "Halves": (Halves, {"lr": 1e-2}, ("moment",)),
    "ScheduleFree": (ScheduleFree, {"lr": 0.05, "weight_decay": 0.1}, ("z",)),
}
"""Name → class, options, the names of what it keeps of each element."""


def groups_of(model: nn.Module, name: str) -> list[dict[str, Any]]:
    """Two groups with other learning rates."""
    options = ROWS[name][1]
    matrices = [p for p in model.parameters() if p.requires_grad and p.dim() >= 2]
    rest = [p for p in model.parameters() if p.requires_grad and p.dim() < 2]
    return [{"params": matrices, **options}, {"params": rest, **options, "lr": options["lr"] / 5}]


def make(name: str, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Over groups; ready to step."""
    made_by, options, _ = ROWS[name]
    made = made_by(groups, **options)
    if isinstance(made, ScheduleFree):
        made.train()
    return made
