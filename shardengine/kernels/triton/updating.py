"""The optimizer update, one launch over all spans: reference_update: [Note: One update].

Must not know: groups, step counts, buckets.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr
from triton.language import tensor as Value

from shardengine.kernels.random_bits import Noise
from shardengine.kernels.rules import Rule
from shardengine.kernels.spans import Spans
from shardengine.kernels.triton.launching import GRANULE, is_finite, launch, nearest, random_words, signed, wide

BLOCK, WARPS = 1024, 8
"""Four elements per thread: 16 bytes of every fp32 tensor. With more, a bf16 one would want eight neighbours in a
thread, and the others would be shuffled through shared memory."""


def update(
    flats: Mapping[str, Tensor],
    spans: Spans,
    rule: Rule,
    *,
    factor: Tensor | None = None,
    skip: Tensor | None = None,
    noise: Noise | None = None,
) -> None:
    """See ``operations.update``. Its numbers are arguments of the kernel: a new step compiles nothing."""
    weight = flats["weight"]
    rows, blocks = spans.table(weight.device, BLOCK)
    states = [flats[name] for name in rule.states]
    first, second = [*states, None, None][:2]
    k0, k1 = (signed(word) for word in noise.key) if noise is not None else (0, 0)
    launch(_update_kernel, len(blocks), weight, weight, flats["gradient"], first, second, flats.get("low"), rows,
           blocks, factor, None if skip is None else skip.view(torch.uint8), rule.rate, rule.decay, rule.l2, rule.keep,
           rule.take, rule.keep_square, rule.take_square, rule.epsilon, k0, k1,
           KIND="Adam" if rule.kind == "AdamW" else rule.kind, L2=rule.l2 != 0, MAXIMIZE=rule.maximize,
           NESTEROV=rule.nesterov, FIRST=rule.first, NOISE=noise is not None, ALIGNED=spans.aligned, BLOCK=BLOCK,
           num_warps=WARPS)  # fmt: skip


@triton.jit
def _momentum(
    gradient: Value,
    buffer: Value,
    mask: Value,
    keep: Value,
    take: Value,
    FIRST: constexpr,
    NESTEROV: constexpr,
) -> Value:
    """SGD's direction; its buffer is read and written. ``buffer`` is None without momentum."""
    if buffer is None:
        return gradient
    else:
        if FIRST:
            average = gradient
        else:
            average = tl.load(buffer, mask=mask) * keep + gradient * take
        tl.store(buffer, average, mask=mask)
        if NESTEROV:
            return gradient + average * keep
        else:
            return average


@triton.jit
def _lion(
    gradient: Value, first: Value, mask: Value, keep: Value, take: Value, keep_square: Value, take_square: Value
) -> Value:  # fmt: skip
    """Lion's direction, a sign; its average is read and written."""
    average = tl.load(first, mask=mask)
    mean = average * keep + gradient * take
    tl.store(first, average * keep_square + gradient * take_square, mask=mask)
    return (mean > 0).to(tl.float32) - (mean < 0).to(tl.float32)


@triton.jit
def _adam(
    gradient: Value, first: Value, second: Value, mask: Value, keep: Value, take: Value,
    keep_square: Value, take_square: Value, epsilon: Value,
) -> Value:  # fmt: skip
    """Adam's direction; both averages are read and written."""
    average = tl.load(first, mask=mask) * keep + gradient * take
    square = tl.load(second, mask=mask) * keep_square + (gradient * take_square) * gradient
    tl.store(first, average, mask=mask)
    tl.store(second, square, mask=mask)
    return tl.div_rn(average, tl.sqrt_rn(square) + epsilon)


@triton.jit
def _stochastically(values: Value, numbers: Value, k0: Value, k1: Value) -> Value:
    """To what bf16 holds, up or down: [Note: One update]."""
    words = (random_words(numbers, k0, k1) & 0xFFFF) + values.to(tl.uint32, bitcast=True)
    moved = (words & 0xFFFF0000).to(tl.float32, bitcast=True)
    return tl.where(is_finite(values), moved, wide(nearest(values, tl.bfloat16)))


@triton.jit(do_not_specialize=["k0", "k1"])
def _update_kernel(
    weight: Value, gradient: Value, first: Value, second: Value, low: Value, spans: Value, blocks: Value,
    factor: Value, skip: Value, rate: Value, decay: Value, l2: Value, keep: Value, take: Value,
    keep_square: Value, take_square: Value, epsilon: Value, k0: Value, k1: Value,
    KIND: constexpr, L2: constexpr, MAXIMIZE: constexpr, NESTEROV: constexpr, FIRST: constexpr, NOISE: constexpr,
    ALIGNED: constexpr, BLOCK: constexpr,
) -> None:  # fmt: skip
    if skip is not None:  # noqa: SIM102  the first is known when the kernel is compiled, the second when it runs
        if tl.load(skip) != 0:
            return
    owner = blocks + tl.program_id(0).to(tl.int64) * 2
    span = spans + tl.load(owner).to(tl.int64) * 3
    within = tl.load(owner + 1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    start, end = tl.load(span), tl.load(span + 1)
    if ALIGNED:
        start, end = tl.multiple_of(start, GRANULE), tl.multiple_of(end, GRANULE)
    place = start + within
    mask = place < end

    g = wide(tl.load(gradient + place, mask=mask))
    if factor is not None:
        g = g * tl.load(factor)
    if MAXIMIZE:
        g = g * -1.0
    w = wide(tl.load(weight + place, mask=mask)) * decay  # 1 changes nothing, and comes and goes with the rate
    if L2:
        g = g + w * l2
    if KIND == "SGD":
        g = _momentum(g, first if first is None else first + place, mask, keep, take, FIRST, NESTEROV)
    elif KIND == "Lion":
        g = _lion(g, first + place, mask, keep, take, keep_square, take_square)
    else:
        g = _adam(g, first + place, second + place, mask, keep, take, keep_square, take_square, epsilon)
    w = w - g * rate

    if low is not None:
        tl.store(low + place, nearest(w, low.dtype.element_ty), mask=mask)
    if NOISE and weight.dtype.element_ty != tl.float32:
        w = _stochastically(w, tl.load(span + 2) + within, k0, k1)
    tl.store(weight + place, nearest(w, weight.dtype.element_ty), mask=mask)
