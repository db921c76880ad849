"""The declared arithmetic in torch. This file *is* invariant 1: one order of summation, one rounding, one update.

Owns the order over ranks, where sums are divided and rounded, the norm, clipping and the optimizer updates.
Must not know: process groups, stages, buckets.

[Note: One arithmetic]
- ranks are added in a balanced tree over rank numbers, ((0+1)+(2+3)), in fp32, whatever carried them here
- micro-batches are added first to last; the first contribution is a copy (0 + -0.0 would be +0.0)
- a gradient is rounded to the wire's dtype when it is sent, sums are fp32, the complete sum is divided once and rounded
  once more to the wire's dtype; optimizers step fp32 weights (masters where the parameter has another dtype) with it
- squares are added in fp64, the root is rounded once to fp32. The fp64 partial sums do depend on the rank slices: two
  layouts agree unless the exact root lies within ~1e-15 (relative) of a rounding boundary of fp32: one step in ~1e8
- clipping divides by max(1, (norm + 1e-6) / max_norm) inside the update
- until native kernels exist the update is torch's fused CPU kernel on aligned segments, whose vector body is the same
  everywhere and whose scalar tail is never reached
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_SQUARES_CHUNK = 65_536


def store_gradient(destination: Tensor, gradient: Tensor, *, first: bool) -> None:
    """The first contribution of a window is copied into ``destination``, later ones are added, first to last."""
    if first:
        destination.copy_(gradient)
    else:
        destination.add_(gradient)


def tree_sum(terms: Sequence[Tensor], out: Tensor) -> None:
    """``out`` (fp32) = the terms added in fp32 in the order ((0+1)+(2+3))+...; ``out`` may be one of the terms.

    terms: one tensor per rank, equal shapes, any floating dtype. They are used as scratch space for inner sums.
    """
    level = [term if term.dtype is torch.float32 else term.float() for term in terms]
    if len(level) == 1:
        if out.data_ptr() != level[0].data_ptr():
            out.copy_(level[0])
        return
    while len(level) > 2:
        pairs = [torch.add(a, b, out=a) for a, b in zip(level[0::2], level[1::2], strict=False)]
        level = pairs + level[2 * len(pairs) :]
    torch.add(level[0], level[1], out=out)


def divide(total: Tensor, divisor: int) -> None:
    """In place, correctly rounded. The divisor is a tensor on CUDA, where a host scalar would become a reciprocal."""
    if divisor != 1:
        total.div_(divisor if total.device.type == "cpu" else torch.full((), divisor, device=total.device))


def round_to(tensor: Tensor, dtype: torch.dtype) -> None:
    """In place: the values of a fp32 ``tensor`` become those that ``dtype`` can hold."""
    if dtype is not tensor.dtype:
        tensor.copy_(tensor.to(dtype))


def sum_of_squares(tensor: Tensor) -> Tensor:
    """fp64 sum of squares of a flat tensor, 0-dim, on its device. Chunked, so that it stays in cache."""
    total = torch.zeros((), dtype=torch.float64, device=tensor.device)
    for chunk in tensor.split(_SQUARES_CHUNK):
        wide = chunk.double()
        total += torch.dot(wide, wide)
    return total


def norm_from_squares(partials: Tensor) -> Tensor:
    """fp64 partial sums of squares (one per rank, added in rank order) → the norm, rounded once to fp32 (0-dim)."""
    total = torch.zeros((), dtype=torch.float64)
    for partial in partials.unbind():
        total = total + partial
    return total.sqrt().float()


def clip_divisor(norm: Tensor, max_norm: float) -> Tensor:
    """What gradients are divided by so that their norm is at most ``max_norm``: 0-dim fp32, at least 1."""
    return ((norm + 1e-6) / max_norm).clamp(min=1.0)


def adam_step(
    tensors: Mapping[str, list[Tensor]], group: Mapping[str, Any], step: int, divisor: Tensor | None, *, decoupled: bool
) -> None:
    """Adam (Kingma & Ba, 2015) or, ``decoupled``, AdamW (Loshchilov & Hutter, 2019), in place on flat segments.

    tensors: lists "weight", "gradient", "exp_avg", "exp_avg_sq" of equal lengths. step: counted from 1.
    divisor: 0-dim, gradients are divided by it first (and left divided); None for 1.
    """
    kernel = torch._fused_adamw_ if decoupled else torch._fused_adam_
    count = len(tensors["weight"])
    device = tensors["weight"][0].device
    beta1, beta2 = group["betas"]
    kernel(
        tensors["weight"],
        tensors["gradient"],
        tensors["exp_avg"],
        tensors["exp_avg_sq"],
        [],
        [torch.full((), float(step), device=device)] * count,
        lr=float(group["lr"]),
        beta1=float(beta1),
        beta2=float(beta2),
        weight_decay=float(group["weight_decay"]),
        eps=float(group["eps"]),
        amsgrad=False,
        maximize=bool(group.get("maximize", False)),
        grad_scale=divisor,
    )


def sgd_step(tensors: Mapping[str, list[Tensor]], group: Mapping[str, Any], step: int, divisor: Tensor | None) -> None:
    """SGD with momentum, dampening, Nesterov and weight decay, in place on flat segments (as ``torch.optim.SGD``).

    tensors: lists "weight", "gradient" and, with momentum, "momentum_buffer". step, divisor: as in ``adam_step``.
    """
    torch._fused_sgd_(
        tensors["weight"],
        tensors["gradient"],
        tensors.get("momentum_buffer", []),
        weight_decay=float(group["weight_decay"]),
        momentum=float(group["momentum"]),
        lr=float(group["lr"]),
        dampening=float(group["dampening"]),
        nesterov=bool(group["nesterov"]),
        maximize=bool(group.get("maximize", False)),
        is_first_step=step == 1,
        grad_scale=divisor,
    )


def lion_step(tensors: Mapping[str, list[Tensor]], group: Mapping[str, Any], step: int, divisor: Tensor | None) -> None:
    """Lion (Chen et al., 2023, arXiv 2302.06675, algorithm 2), decoupled weight decay, in place on flat segments.

    tensors: lists "weight", "gradient", "exp_avg". step: not used. divisor: as in ``adam_step``. Every product and sum
    is rounded on its own (no fused multiply-add), so that the bits depend on no offset.
    """
    (beta1, beta2), rate = group["betas"], float(group["lr"])
    decay, sign = 1 - rate * float(group["weight_decay"]), -1.0 if group.get("maximize", False) else 1.0
    for weight, gradient, average in zip(tensors["weight"], tensors["gradient"], tensors["exp_avg"], strict=True):
        if divisor is not None:
            gradient.div_(divisor)
        signed = gradient if sign > 0 else gradient.neg()
        direction = (average * beta1).add_(signed * (1 - beta1)).sign_()
        weight.mul_(decay).sub_(direction.mul_(rate))
        average.mul_(beta2).add_(signed * (1 - beta2))
