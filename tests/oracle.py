"""The truth: what every stage on every number of ranks must compute, bit for bit.

One process, plain torch, nothing from shardengine. It plays all ranks and all micro-batches one after the other on one
set of parameters and adds their gradients up in the declared order:

- order over ranks: balanced tree over rank numbers, ((0+1)+(2+3)), in fp32; a rank that did not use it adds zeros
- order over micro-batches: first to last; the first contribution is a copy
- "full": micro-batches first, then ranks. "sharded": ranks first, then micro-batches. Equal for one micro-batch
- the loss is divided by the number of micro-batches before backward, the complete sum by the number of ranks (mean)
- norm: squares added in fp64, the root rounded once to fp32; clipping divides by max(1, (norm + 1e-6) / max_norm)
- a parameter that no rank used in the window is not touched by the optimizer
- the optimizer's arithmetic: torch's fused CPU kernels on tensors padded with zeros to a multiple of 16 elements
- buffers: before the first micro-batch of a step every rank has rank 0's
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


def tree_sum(terms: list[Tensor]) -> Tensor:
    """Sum in the order ((0+1)+(2+3))+...; an odd one out moves up a level unchanged."""
    while len(terms) > 1:
        pairs = [a + b for a, b in zip(terms[0::2], terms[1::2], strict=False)]
        terms = pairs + terms[2 * len(pairs) :]
    return terms[0]


def ordered_sum(terms: list[Tensor]) -> Tensor:
    """Sum first to last, beginning with a copy of the first."""
    total = terms[0].clone()
    for term in terms[1:]:
        total = total + term
    return total


def complete_gradient(grads: list[list[Tensor | None]], like: Tensor, order: str) -> Tensor | None:
    """``grads[rank][micro]`` of one parameter → the sum, or None where no rank used it."""
    if all(g is None for row in grads for g in row):
        return None
    zeros = torch.zeros_like(like)
    if order == "full":
        used = [[g for g in row if g is not None] for row in grads]
        return tree_sum([ordered_sum(row) if row else zeros for row in used])
    micros = range(len(grads[0]))
    return ordered_sum([tree_sum([zeros if (g := row[m]) is None else g for row in grads]) for m in micros])


@dataclass
class Trace:
    """What the engine is compared with. ``losses[step][rank][micro]``; norms per step; the rest after the last step."""

    losses: list[list[list[float]]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    states: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)


class PaddedOptimizer:
    """AdamW, Adam or SGD through torch's fused kernels, each tensor padded to a multiple of 16 elements."""

    def __init__(self, kind: str, groups: list[dict[str, Any]]) -> None:
        self.kind, self.groups = kind, groups
        self.state: dict[Tensor, dict[str, Any]] = {}

    def step(self, grads: dict[Tensor, Tensor], divisor: Tensor | None) -> None:
        for group in self.groups:
            for p in group["params"]:
                if p in grads:
                    self._step_one(p, grads[p], group, divisor)

    def _step_one(self, p: Tensor, grad: Tensor, group: dict[str, Any], divisor: Tensor | None) -> None:
        def pad(t: Tensor) -> Tensor:
            return torch.cat([t.reshape(-1), t.new_zeros(-t.numel() % 16)])

        state = self.state.setdefault(p, {"step": 0})
        flat, g = pad(p.detach()), pad(grad)
        names = ("momentum_buffer",) if self.kind == "SGD" else ("exp_avg", "exp_avg_sq")
        buffers = [state.setdefault(name, torch.zeros_like(flat)) for name in names]
        state["step"] += 1
        if self.kind == "SGD":
            torch._fused_sgd_(
                [flat], [g], buffers if group["momentum"] else [], weight_decay=group["weight_decay"],
                momentum=group["momentum"], lr=group["lr"], dampening=group["dampening"], nesterov=group["nesterov"],
                maximize=False, is_first_step=state["step"] == 1, grad_scale=divisor,
            )  # fmt: skip
        else:
            kernel = torch._fused_adamw_ if self.kind == "AdamW" else torch._fused_adam_
            kernel(
                [flat], [g], [buffers[0]], [buffers[1]], [], [torch.tensor(float(state["step"]))], lr=group["lr"],
                beta1=group["betas"][0], beta2=group["betas"][1], weight_decay=group["weight_decay"], eps=group["eps"],
                amsgrad=False, maximize=False, grad_scale=divisor,
            )  # fmt: skip
        p.detach().copy_(flat[: p.numel()].view_as(p))


def train(
    model: nn.Module,
    loss_of: Callable[[nn.Module, int, int, int], Tensor],
    *,
    ranks: int,
    micros: int = 1,
    steps: int = 10,
    kind: str = "AdamW",
    groups: list[dict[str, Any]],
    order: str = "full",
    clip: float = 0.0,
    mean: bool = True,
) -> Trace:
    """Train ``model`` in place as ``ranks`` data-parallel ranks would.

    ``loss_of(model, step, rank, micro)`` seeds its own randomness and returns a scalar loss.
    """
    trace, optimizer = Trace(), PaddedOptimizer(kind, groups)
    trained: list[Tensor] = [p for p in model.parameters() if p.requires_grad]
    buffers = list(model.buffers())
    for step in range(steps):
        grads: dict[Tensor, list[list[Tensor | None]]] = {p: [[None] * micros for _ in range(ranks)] for p in trained}
        losses = [[0.0] * micros for _ in range(ranks)]
        before = [b.clone() for b in buffers]
        after_rank0: list[Tensor] = []
        for rank in range(ranks):
            for b, old in zip(buffers, before, strict=True):
                b.copy_(old)
            for micro in range(micros):
                loss = loss_of(model, step, rank, micro)
                (loss / micros).backward()
                losses[rank][micro] = loss.item()
                for p in trained:
                    grads[p][rank][micro], p.grad = p.grad, None
            if rank == 0:
                after_rank0 = [b.clone() for b in buffers]
        for b, new in zip(buffers, after_rank0, strict=True):
            b.copy_(new)
        sums = {p: complete_gradient(grads[p], p.detach(), order) for p in trained}
        complete = {p: total / ranks if mean else total for p, total in sums.items() if total is not None}
        norm = sum((g.double().square().sum() for g in complete.values()), torch.zeros((), dtype=torch.float64))
        norm = norm.sqrt().float()
        trace.losses.append(losses)
        trace.norms.append(norm.item())
        optimizer.step(complete, ((norm + 1e-6) / clip).clamp(min=1.0) if clip else None)
    trace.parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    trace.buffers = {name: b.clone() for name, b in model.named_buffers()}
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    for p, state in optimizer.state.items():
        flat = {key: t[: p.numel()].view_as(p) for key, t in state.items() if isinstance(t, Tensor)}
        trace.states[names[p]] = flat
    return trace
