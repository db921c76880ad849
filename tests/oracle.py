"""The truth: what every stage on every number of ranks must compute, bit for bit.

One process, plain torch, nothing from shardengine. It plays all ranks and all micro-batches one after the other on one
set of parameters and adds their gradients up in the declared order:

- order over ranks: balanced tree over rank numbers, ((0+1)+(2+3)), in fp32; a rank that did not use it adds zeros
- order over micro-batches: first to last; the first contribution is a copy
- roundings: what is sent has the wire's dtype (the parameter's, unless told), all sums are fp32, the complete gradient
  is rounded once to the wire's dtype. Parameters that are not fp32 have an fp32 master weight, which is what is stepped
- late gradients: autograd may deliver a parameter's gradient several times in one backward (re-entrant checkpointing).
  What comes after the first, in a backward that communicates, is summed apart, completed on its own and added. Several
  backwards in the window's last micro-batch: each is completed on its own and added, first to last
- "full": micro-batches first, then ranks. "sharded": ranks first, then micro-batches. Equal for one micro-batch
- the loss is divided by the number of micro-batches before backward, the complete sum by the number of ranks (mean)
- norm: squares added in fp64, the root rounded once to fp32; clipping divides by max(1, (norm + 1e-6) / max_norm)
- a parameter that no rank used in the window is not touched by the optimizer
- the optimizer's arithmetic: torch's fused CPU kernels on tensors padded with zeros to a multiple of 16 elements
- buffers: before the first micro-batch of a step every rank has rank 0's (or keeps its own, where told)
"""

from __future__ import annotations

import itertools
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
    """Sum in fp32, first to last."""
    total = terms[0].float()
    for term in terms[1:]:
        total = total + term.float()
    return total


Fires = list[Tensor]
"""The gradients of one parameter in one backward, in the order in which autograd delivered them (nearly always one)."""


def complete_gradient(
    grads: list[list[Fires]], like: Tensor, order: str, wire: torch.dtype, divisor: int
) -> Tensor | None:
    """``grads[rank][micro]`` of one parameter → the complete gradient (fp32), or None where no rank used it."""
    if not any(fires for row in grads for fires in row):
        return None
    zeros = torch.zeros_like(like, dtype=torch.float32)

    def over_ranks(rows: list[Fires]) -> Tensor:
        return tree_sum([(ordered_sum(row) if row else zeros).to(wire).float() for row in rows])

    if order == "full":
        total = over_ranks([[g for fires in row[:-1] for g in fires] + row[-1][:1] for row in grads])
        late = [row[-1][1:] for row in grads]
    else:
        total = ordered_sum([over_ranks([row[m][:1] for row in grads]) for m in range(len(grads[0]))])
        late = [[g for fires in row for g in fires[1:]] for row in grads]
    complete = (total / divisor).to(wire).float()
    return add_late(complete, (over_ranks(late) / divisor).to(wire).float(), wire) if any(late) else complete


def add_late(complete: Tensor, late: Tensor, wire: torch.dtype) -> Tensor:
    """A gradient that was completed on its own joins the ones before it."""
    return (complete + late).to(wire).float()


@dataclass
class Trace:
    """What the engine is compared with. ``losses[step][rank][micro]``; norms per step; the rest after the last step.

    shown: rank 0's state dict, so with tied names and buffers. trained: what the optimizer steps, used or not.
    """

    losses: list[list[list[float]]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    states: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    shown: dict[str, Tensor] = field(default_factory=dict)
    trained: list[str] = field(default_factory=list)
    optimizer: PaddedOptimizer | None = None
    gradients: dict[str, Tensor] = field(default_factory=dict)


def pad(t: Tensor) -> Tensor:
    """Flat fp32, a copy, with zeros up to a multiple of 16 elements."""
    return torch.cat([t.reshape(-1).float(), torch.zeros(-t.numel() % 16)])


class PaddedOptimizer:
    """AdamW, Adam, SGD (torch's fused kernels) or Lion; fp32 tensors padded to a multiple of 16 elements."""

    def __init__(self, kind: str, groups: list[dict[str, Any]], masters: dict[Tensor, Tensor]) -> None:
        self.kind, self.groups = kind, groups
        self.state: dict[Tensor, dict[str, Any]] = {p: {"step": 0, "master": pad(m)} for p, m in masters.items()}
        self.state_names = {"SGD": ("momentum_buffer",), "Lion": ("exp_avg",)}.get(kind, ("exp_avg", "exp_avg_sq"))

    def step(self, grads: dict[Tensor, Tensor], divisor: Tensor | None) -> None:
        for group in self.groups:
            for p in group["params"]:
                if p in grads:
                    self._step_one(p, grads[p], group, divisor)

    def _step_one(self, p: Tensor, grad: Tensor, group: dict[str, Any], divisor: Tensor | None) -> None:
        state = self.state.setdefault(p, {"step": 0})
        flat, g = state.get("master", pad(p.detach())), pad(grad)
        buffers = [state.setdefault(name, torch.zeros_like(flat)) for name in self.state_names]
        state["step"] += 1
        if self.kind == "SGD":
            torch._fused_sgd_(
                [flat], [g], buffers if group["momentum"] else [], weight_decay=group["weight_decay"],
                momentum=group["momentum"], lr=group["lr"], dampening=group["dampening"], nesterov=group["nesterov"],
                maximize=False, is_first_step=state["step"] == 1, grad_scale=divisor,
            )  # fmt: skip
        elif self.kind == "Lion":
            (beta1, beta2), lr = group["betas"], group["lr"]
            g = g if divisor is None else g / divisor
            direction = (buffers[0] * beta1 + g * (1 - beta1)).sign()
            flat.copy_(flat * (1 - lr * group["weight_decay"]) - direction * lr)
            buffers[0].copy_(buffers[0] * beta2 + g * (1 - beta2))
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
    loss_of: Callable[[nn.Module, int, int, int], Tensor | list[Tensor]],
    *,
    ranks: int,
    micros: int = 1,
    steps: int = 10,
    kind: str = "AdamW",
    groups: list[dict[str, Any]],
    order: str = "full",
    clip: float = 0.0,
    mean: bool = True,
    wire: torch.dtype | None = None,
    low: torch.dtype | None = None,
    own_buffers: bool = False,
    earlier: Trace | None = None,
) -> Trace:
    """Train ``model`` in place as ``ranks`` data-parallel ranks would.

    ``loss_of(model, step, rank, micro)`` seeds its own randomness and returns a scalar loss, or, where micros is 1, a
    list of losses: a backward each. wire: what is sent, by default each parameter's dtype. low: parameters are cast to
    it and the given values become their master weights. own_buffers: rank 0's are not sent. earlier: training goes on
    from there up to ``steps``, with ``groups`` and trainable parameters as they are now; masters of those that join are
    the weights.
    """
    stepped = {p for group in groups for p in group["params"]}
    trained: list[Tensor] = [p for p in model.parameters() if p.requires_grad and p in stepped]
    masters = {p: p.detach().float().clone() for p in trained if (low or p.dtype) != torch.float32}
    for parameter in model.parameters() if low else ():
        parameter.data = parameter.data.to(low)
    trace, optimizer = earlier or Trace(), PaddedOptimizer(kind, groups, masters)
    if trace.optimizer is not None:
        optimizer.state |= trace.optimizer.state
    trace.optimizer = optimizer
    buffers = list(model.buffers())
    held = [[b.clone() for b in buffers] for _ in range(ranks)]
    fires: dict[Tensor, Fires] = {}

    def collect(p: Tensor) -> None:
        fires.setdefault(p, []).append(p.grad)  # type: ignore[arg-type]  # it was just accumulated
        p.grad = None

    model.zero_grad()
    handles = [p.register_post_accumulate_grad_hook(collect) for p in trained]
    for step in range(len(trace.losses), steps):
        windows: list[list[list[dict[Tensor, Fires]]]] = []  # backward of the micro-batch, rank, micro-batch
        losses = [[0.0] * micros for _ in range(ranks)]
        rank0s = held[0]
        for rank in range(ranks):
            for b, old in zip(buffers, held[rank] if own_buffers else rank0s, strict=True):
                b.copy_(old)
            for micro in range(micros):
                found = loss_of(model, step, rank, micro)
                for number, loss in enumerate(found if isinstance(found, list) else [found]):
                    (loss / micros).backward()
                    losses[rank][micro] += loss.item()
                    if len(windows) == number:
                        windows.append([[{} for _ in range(micros)] for _ in range(ranks)])
                    windows[number][rank][micro].update(fires)
                    fires.clear()
            held[rank] = [b.clone() for b in buffers]
        for b, new in zip(buffers, held[0], strict=True):
            b.copy_(new)
        complete: dict[Tensor, Tensor] = {}
        for p, window in itertools.product(trained, windows):
            sent = [[by_parameter.get(p, []) for by_parameter in row] for row in window]
            g = complete_gradient(sent, p.detach(), order, wire or p.dtype, ranks if mean else 1)
            if g is not None:
                complete[p] = add_late(complete[p], g, wire or p.dtype) if p in complete else g
        norm = sum((g.double().square().sum() for g in complete.values()), torch.zeros((), dtype=torch.float64))
        norm = norm.sqrt().float()
        trace.losses.append(losses)
        trace.norms.append(norm.item())
        optimizer.step(complete, ((norm + 1e-6) / clip).clamp(min=1.0) if clip else None)
    for handle in handles:
        handle.remove()
    trace.parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    trace.shown = {name: value.detach().clone() for name, value in model.state_dict().items()}
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    trace.trained = [names[p] for p in trained]
    trace.gradients = {names[p]: g for p, g in complete.items()} if steps else {}
    for p, state in optimizer.state.items():
        flat = {
            key: torch.empty_like(p, dtype=t.dtype).copy_(t[: p.numel()].view_as(p))
            for key, t in state.items()
            if key != "step"
        }
        trace.states[names[p]] = flat
    return trace
