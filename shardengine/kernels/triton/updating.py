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

from shardengine.kernels.moments import REMAINDER, SCALE
from shardengine.kernels.random_bits import Noise
from shardengine.kernels.rules import Rule
from shardengine.kernels.spans import Spans
from shardengine.kernels.triton.launching import GRANULE, is_finite, launch, nearest, random_words, signed, wide
from shardengine.kernels.triton.states import joined, read_state, split, words_in_rows, write_state

BLOCK, WARPS = 1024, 8
"""Four elements per thread: 16 bytes of every fp32 tensor. With more, a bf16 tensor needs eight neighbours in a thread,
and the other tensors are shuffled through shared memory."""


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
    """See ``operations.update``. Its numbers are arguments of the kernel: a new step compiles nothing."""
    weight = flats["weight"]
    rows, blocks = spans.table(weight.device, BLOCK)
    states = [flats[name] for name in rule.states]
    first, second = [*states, None, None][:2]
    first_scale, second_scale = [*(flats.get(name + SCALE) for name in rule.states), None, None][:2]
    keys = [signed(word) for each in (noise, state_noise) for word in ((0, 0) if each is None else each.key)]
    launch(_update_kernel, len(blocks), weight, weight, flats["gradient"], first, second, first_scale, second_scale,
           flats.get(REMAINDER), flats.get("low"), rows, blocks, factor,
           None if skip is None else skip.view(torch.uint8), *rule[1:9], *keys,
           KIND="Adam" if rule.kind == "AdamW" else rule.kind, L2=rule.l2 != 0, MAXIMIZE=rule.maximize,
           NESTEROV=rule.nesterov, FIRST=rule.first, NOISE=noise is not None, STATE_NOISE=state_noise is not None,
           ALIGNED=spans.aligned, BLOCK=BLOCK, num_warps=WARPS)  # fmt: skip


@triton.jit
def _momentum(
    gradient: Value, buffer: Value, scale: Value, place: Value, mask: Value, words: Value, keep: Value, take: Value,
    FIRST: constexpr, NESTEROV: constexpr,
) -> Value:  # fmt: skip
    """Return SGD's direction; its buffer is read and written. ``buffer`` is None without momentum."""
    if buffer is None:
        return gradient
    else:
        if FIRST:
            average = gradient
        else:
            average = read_state(buffer, scale, place, mask, True) * keep + gradient * take
        write_state(buffer, scale, place, mask, average, words, True)
        if NESTEROV:
            return gradient + average * keep
        else:
            return average


@triton.jit
def _lion(
    gradient: Value, first: Value, scale: Value, place: Value, mask: Value, words: Value, keep: Value, take: Value,
    keep_square: Value, take_square: Value,
) -> Value:  # fmt: skip
    """Return Lion's direction, a sign; its average is read and written."""
    average = read_state(first, scale, place, mask, True)
    mean = average * keep + gradient * take
    write_state(first, scale, place, mask, average * keep_square + gradient * take_square, words, True)
    return (mean > 0).to(tl.float32) - (mean < 0).to(tl.float32)


@triton.jit
def _adam(
    gradient: Value, first: Value, second: Value, first_scale: Value, second_scale: Value, place: Value, mask: Value,
    words: Value, keep: Value, take: Value, keep_square: Value, take_square: Value, epsilon: Value,
) -> Value:  # fmt: skip
    """Return Adam's direction; both averages are read and written."""
    average = read_state(first, first_scale, place, mask, True) * keep + gradient * take
    square = read_state(second, second_scale, place, mask, False) * keep_square + (gradient * take_square) * gradient
    write_state(first, first_scale, place, mask, average, words, True)
    write_state(second, second_scale, place, mask, square, None if words is None else words >> 16, False)
    return tl.div_rn(average, tl.sqrt_rn(square) + epsilon)


@triton.jit
def _stochastically(values: Value, numbers: Value, k0: Value, k1: Value) -> Value:
    """Round up or down to bf16 numbers: [Note: One update]."""
    words = (random_words(numbers, k0, k1) & 0xFFFF) + values.to(tl.uint32, bitcast=True)
    moved = (words & 0xFFFF0000).to(tl.float32, bitcast=True)
    return tl.where(is_finite(values), moved, wide(nearest(values, tl.bfloat16)))


@triton.jit(do_not_specialize=["k0", "k1", "state_k0", "state_k1"])
def _update_kernel(
    weight: Value, gradient: Value, first: Value, second: Value, first_scale: Value, second_scale: Value,
    remainder: Value, low: Value, spans: Value, blocks: Value, factor: Value, skip: Value, rate: Value, decay: Value,
    l2: Value, keep: Value, take: Value, keep_square: Value, take_square: Value, epsilon: Value, k0: Value, k1: Value,
    state_k0: Value, state_k1: Value, KIND: constexpr, L2: constexpr, MAXIMIZE: constexpr, NESTEROV: constexpr,
    FIRST: constexpr, NOISE: constexpr, STATE_NOISE: constexpr, ALIGNED: constexpr, BLOCK: constexpr,
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
    w = tl.load(weight + place, mask=mask)
    w = wide(w) if remainder is None else joined(w, tl.load(remainder + place, mask=mask))
    w = w * decay  # 1 changes nothing, and comes and goes with the rate
    if L2:
        g = g + w * l2
    words = words_in_rows(tl.load(span + 2) + within, state_k0, state_k1) if STATE_NOISE else None
    if KIND == "SGD":
        g = _momentum(g, first, first_scale, place, mask, words, keep, take, FIRST, NESTEROV)
    elif KIND == "Lion":
        g = _lion(g, first, first_scale, place, mask, words, keep, take, keep_square, take_square)
    else:
        g = _adam(g, first, second, first_scale, second_scale, place, mask, words, keep, take, keep_square,
                  take_square, epsilon)  # fmt: skip
    w = w - g * rate

    if low is not None:
        tl.store(low + place, nearest(w, low.dtype.element_ty), mask=mask)
    if remainder is not None:
        split(w, words, weight + place, remainder + place, mask)
        return
    if NOISE and weight.dtype.element_ty != tl.float32:
        w = _stochastically(w, tl.load(span + 2) + within, k0, k1)
    tl.store(weight + place, nearest(w, weight.dtype.element_ty), mask=mask)
