"""The declared arithmetic of optimizer updates, in torch: one elementwise frame for Adam, AdamW, SGD and Lion.

Must not know: groups, step counts (``rules.py`` has made numbers of them), buckets.

[Note: One update] Per element, in fp32, in this order. Every line is one or more operations that are each rounded on
their own: no fused multiply-add, correctly rounded division and square root. The letters are the fields of
``rules.Rule``.

    g = gradient · factor                            (without a factor: the gradient), negated if maximize
    w = weight · decay                               if decay is not 1
    g = g + w · l2                                   if l2 is not 0

    Adam, AdamW   m = m · keep + g · take
                  v = v · keep_square + (g · take_square) · g
                  w = w - (m / (sqrt(v) + epsilon)) · rate
    SGD           m = m · keep + g · take            (m = g if first); g = g + m · keep if nesterov, else g = m
                  w = w - g · rate                   (without momentum: the gradient)
    Lion          w = w - sign(m · keep + g · take) · rate
                  m = m · keep_square + g · take_square

    weight = w, low = w rounded to low's dtype

A bf16 weight is widened when it is read, and rounded when it is written: to nearest, or with ``noise`` stochastically:
the 16 low bits of a random word (random_bits: [Note: Random bits]) are added to the 32 bits of w, and the upper 16 are
kept; a value that is not finite is rounded to nearest. A state that is not fp32 is widened when it is read, and
narrowed when it is written (``moments``), stochastically with ``state_noise``; so is a bf16 weight with a remainder.

[Note: Square roots] On a CPU torch computes fp32 roots with a vector library, which returns a neighbour of the
correctly rounded root for one number in six. A root computed in fp64 and rounded to fp32 is correctly rounded: no root
of an fp32 number lies near enough to the midpoint between two fp32 numbers.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from shardengine.kernels import moments
from shardengine.kernels.random_bits import Noise, random_bits
from shardengine.kernels.reference import chunks
from shardengine.kernels.rules import Rule
from shardengine.kernels.spans import Spans


def update(
    flats: Mapping[str, Tensor],
    spans: Spans,
    rule: Rule,
    *,
    factor: Tensor | None = None,
    skip: Tensor | None = None,
    noise: Noise | None = None,
    state_noise: Noise | None = None,
) -> None:
    """See ``operations.update``."""
    if skip is not None and bool(skip):
        return
    scale = None if factor is None else factor.item()
    for span in spans:
        for part in chunks(span.end - span.start):
            at = moments.cut(flats, span.start + part.start, span.start + part.stop)
            first = span.first + part.start
            narrow = [name for name in rule.states if at[name].dtype is not torch.float32]
            wide = {name: moments.widened_state(at, name) for name in narrow}
            remainder = at.get(moments.REMAINDER)
            if remainder is not None:
                wide["weight"] = moments.joined(at["weight"], remainder)
            _update({**at, **wide}, rule, scale, noise, first)
            words = moments.words_of(rule.states, state_noise if wide else None, first, at["weight"])
            for name in narrow:
                moments.narrow_state(wide[name], at, name, words[name])
            if remainder is not None:
                moments.split(wide["weight"], at["weight"], remainder, words[moments.REMAINDER])


def _update(at: dict[str, Tensor], rule: Rule, scale: float | None, noise: Noise | None, first: int) -> None:
    """Update one chunk. first: the number of its first element."""
    gradient, stored = at["gradient"], at["weight"]
    scratch = torch.empty(stored.shape, dtype=torch.float32, device=stored.device)
    weight = stored if stored.dtype is torch.float32 else stored.float()
    if scale is not None or gradient.dtype is not torch.float32:
        gradient = gradient.float() if scale is None else torch.mul(gradient.float(), scale)
    if rule.maximize:
        gradient = -gradient
    if rule.decay != 1:
        weight.mul_(rule.decay)
    if rule.l2:
        gradient = gradient + torch.mul(weight, rule.l2, out=scratch)
    if rule.kind == "SGD":
        weight.sub_(torch.mul(_momentum(at, gradient, rule, scratch), rule.rate, out=scratch))
    elif rule.kind == "Lion":
        average = at["exp_avg"]
        direction = torch.mul(average, rule.keep).add_(torch.mul(gradient, rule.take, out=scratch)).sign_()
        weight.sub_(direction.mul_(rule.rate))
        average.mul_(rule.keep_square).add_(torch.mul(gradient, rule.take_square, out=scratch))
    else:
        average, square = at["exp_avg"], at["exp_avg_sq"]
        average.mul_(rule.keep).add_(torch.mul(gradient, rule.take, out=scratch))
        square.mul_(rule.keep_square).add_(torch.mul(gradient, rule.take_square, out=scratch).mul_(gradient))
        scratch.copy_(square.double().sqrt_()).add_(rule.epsilon)  # [Note: Square roots]
        weight.sub_(torch.div(average, scratch, out=scratch).mul_(rule.rate))
    if stored is not weight:
        stored.copy_(weight if noise is None else round_stochastically(weight, noise, first))
    if "low" in at:
        at["low"].copy_(weight)


def _momentum(at: dict[str, Tensor], gradient: Tensor, rule: Rule, scratch: Tensor) -> Tensor:
    if not rule.keep:
        return gradient
    buffer = at["momentum_buffer"]
    if rule.first:
        buffer.copy_(gradient)
    else:
        buffer.mul_(rule.keep).add_(torch.mul(gradient, rule.take, out=scratch))
    return gradient + torch.mul(buffer, rule.keep, out=scratch) if rule.nesterov else buffer


def round_stochastically(values: Tensor, noise: Noise, first: int) -> Tensor:
    """Return fp32 values as bf16, rounded up or down with probabilities that keep the mean.

    first: the number of the first element.
    """
    return moments.rounded(values, random_bits(noise, first, values.numel(), values.device) & 0xFFFF)
