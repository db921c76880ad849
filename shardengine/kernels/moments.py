"""Optimizer states and master weights in fewer bytes than fp32: the declared arithmetic.

Owns: how they are widened for an update and narrowed after it. Must not know: the update itself, buckets.

[Note: States of 8 bits] A parameter's elements are cut into blocks of 256, from its first one on. Each block has an
fp32 scale, the block's largest magnitude. Each element has a code: a size, in steps that grow with it like those of a
floating-point number with 4 bits of mantissa, plus a sign for a signed state (momentum and first moments). With the
bits of an fp32 number read as an integer, per element,

    value of a code     ((number with the bits base + (size << 19)) - cut) · unit · scale
    size of a value     ((bits of (|value| · (top / scale) + cut)) + noise - base) >> 19, from 0 to ``most``

Every operation is fp32 and rounded on its own, top is the largest code's number and unit = 1 / top. A signed state has
cut = 2^-8 and sizes from 0 to 127: 8 octaves, below them equal steps of 2^-12 of the scale. A second moment, which is
never negative, has cut = 2^-16 and sizes from 0 to 255: 16 octaves, then steps of 2^-20. Its size 0 is not zero but the
first step, because an update divides by its root: a value rounded to zero would make the next update very large.

noise = 2^18 rounds to nearest. In an update it is (r << 3) + 4 with 16 random bits r: up or down with probabilities
that keep the mean, because the second moment of AdamW moves by a thousandth per step, a fiftieth of the distance
between two codes, and with rounding to nearest would never move. r is the lower half of the element's random word
(random_bits: [Note: Random bits in a row]) for a rule's first state, the upper half for its second. The largest element
of a block always has the largest code. So widening a state and narrowing it to nearest gives the same codes and the
same scale.

A block whose largest magnitude is below 2^-100 has scale 0 and is zero. A block with a value that is not finite has
scale NaN and is widened to NaN; its codes are 0.

[Note: States in bf16] They are widened exactly, and narrowed like weights that are rounded stochastically
(``reference_update``), with the same halves of the random word.

[Note: Remainders] Instead of an fp32 master, 8 more bits of the mantissa may be kept beside a bf16 weight. They are an
int8 that is added to the upper 24 bits of the fp32 number: these bits are weight · 2^8 + remainder, as integers. After
an update the fp32 weight is rounded to 24 bits, with 8 random bits that keep the mean: the lower ones of mix(word +
GOLDEN), where word is that of the states. The weight is this number rounded to nearest even, and the remainder is the
difference. A tie that is rounded down would leave 128, which an int8 does not hold; 127 is stored. If the weight is not
finite, or is zero and the remainder is negative, the remainder counts as 0. So code that writes weights and leaves the
remainders gets the weights that it wrote, with these remainders.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shardengine.kernels.random_bits import GOLDEN, Noise, mix_words, random_bits_in_rows, signed_word

BLOCK = 256
"""The number of elements that share one scale."""
SCALE = "_scale"
"""The suffix in the name of a state's scales."""
SHIFT = 19
REMAINDER = "remainder"
"""The name of the bits of master weights that are kept beside bf16 weights."""
_NEVER_NEGATIVE = frozenset({"exp_avg_sq"})
_INFINITE, _NEAREST = 0x7F800000, 1 << (SHIFT - 1)


def _bits(value: float) -> int:
    found: int = struct.unpack("<I", struct.pack("<f", value))[0]
    return found


def _fp32(value: float) -> float:
    found: float = struct.unpack("<f", struct.pack("<f", value))[0]
    return found


_LEAST = _bits(2.0**-100)


class StateForm(NamedTuple):
    """The form that a value per element is stored in. per: elements of a parameter that share one value."""

    dtype: torch.dtype = torch.float32
    per: int = 1

    def length(self, elements: int) -> int:
        """Return the number of values for ``elements`` elements, a multiple of ``per``."""
        return elements // self.per


REMAINDER_FORM = StateForm(torch.int8)
KEPT_IN = {"fp32": torch.float32, "bf16": torch.bfloat16, "8bit": torch.uint8}
"""The dtypes that states may be kept in."""


def state_forms(states: Iterable[str], kept_in: str) -> dict[str, StateForm]:
    """Return the stored tensors of ``states``, by name, scales included. kept_in: a key of ``KEPT_IN``."""
    dtype = KEPT_IN[kept_in]
    stored = {name: StateForm(dtype) for name in states}
    return stored | {name + SCALE: StateForm(per=BLOCK) for name in stored if dtype is torch.uint8}


def bytes_per_element(forms: Mapping[str, StateForm]) -> float:
    """Return the bytes per element of these forms; exact, because a power of two of elements share a value."""
    return sum(form.dtype.itemsize / form.per for form in forms.values())


def block_of(forms: Mapping[str, StateForm]) -> int:
    """Return the number of elements at whose multiples tensors of these forms may be cut."""
    return max((form.per for form in forms.values()), default=1)


class Code(NamedTuple):
    """One of the two codes of [Note: States of 8 bits]; its fields have the names used there."""

    signed: bool
    base: int
    cut: float
    top: float
    unit: float
    most: int

    def widened(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Return the values of codes: uint8 [n], fp32 [⌈n / 256⌉] → fp32 [n]."""
        sizes = torch.arange(self.most + 1, dtype=torch.int32, device=codes.device)
        numbers = ((sizes << SHIFT) + self.base).view(torch.float32)
        values = ((numbers - self.cut) * self.unit)[(codes & self.most).to(torch.int32)]
        values *= scales.repeat_interleave(BLOCK)[: values.numel()]
        return torch.where(codes > self.most, -values, values) if self.signed else values

    def narrowed(self, values: Tensor, words: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the codes and scales of values.

        words: 16 random bits of each element, int32 [n]; None: round to nearest.
        """
        count = values.numel()
        padded = torch.cat([values, values.new_zeros(-count % BLOCK)]).view(-1, BLOCK)
        bits = padded.view(torch.int32)
        largest = (bits & 0x7FFFFFFF).amax(dim=1)
        empty, finite = largest < _LEAST, largest < _INFINITE
        scales = largest.view(torch.float32).masked_fill(empty, 0.0)
        parts = torch.full((), self.top, dtype=torch.float32, device=values.device) / scales
        numbers = (padded.abs() * parts.unsqueeze(1)).add_(self.cut).view(-1)[:count].view(torch.int32)
        noise = _NEAREST if words is None else (words << 3) + 4
        sizes = ((numbers + noise - self.base) >> SHIFT).clamp_(0, self.most)
        if self.signed:
            sizes |= (bits.view(-1)[:count] >> 24) & 128
        void = (empty | ~finite).repeat_interleave(BLOCK)[:count]
        return sizes.masked_fill_(void, 0).to(torch.uint8), scales.masked_fill(~finite, torch.nan)


_SIGNED = Code(True, _bits(2.0**-8), 2.0**-8, 247 / 256, _fp32(256 / 247), 127)
_UNSIGNED = Code(False, _bits(2.0**-16) + (1 << SHIFT), 2.0**-16, 65535 / 65536, _fp32(65536 / 65535), 255)


def code_of(state: str) -> Code:
    """Return the code of state ``state`` in 8 bits."""
    return _UNSIGNED if state in _NEVER_NEGATIVE else _SIGNED


def widened_state(flats: Mapping[str, Tensor], state: str) -> Tensor:
    """Return state ``state`` in fp32; the stored tensor itself if it is fp32. Codes must begin at a block."""
    stored = flats[state]
    if stored.dtype is torch.uint8:
        return code_of(state).widened(stored, flats[state + SCALE])
    return stored.float()


def misfit(values: Tensor, state: str, dtype: torch.dtype) -> str:
    """Return why ``values`` do not fit state ``state`` in ``dtype``, with the first value that does not; "" if all fit.

    NaN does not fit an int8. It fits a dtype that keeps it visible.
    """
    if dtype is torch.int8:
        bad, expected = (values != values.round()) | (values < -128) | (values > 127), "whole numbers from -128 to 127"
    elif dtype is torch.uint8 and state in _NEVER_NEGATIVE:
        bad, expected = values < 0, "numbers that are not negative"
    else:
        return ""
    if not bool(bad.any()):
        return ""
    return f"expected {expected}, as 8 bits hold them, got {values[bad].reshape(-1)[0].item():g}"


def narrow_state(values: Tensor, flats: Mapping[str, Tensor], state: str, words: Tensor | None = None) -> None:
    """Set state ``state`` to ``values`` (fp32, without a ``misfit``), rounded. words: as in ``Code.narrowed``."""
    stored = flats[state]
    if stored.dtype is torch.uint8:
        codes, scales = code_of(state).narrowed(values, words)
        stored.copy_(codes)
        flats[state + SCALE].copy_(scales)
    elif stored is not values:
        stored.copy_(values if words is None or stored.dtype is not torch.bfloat16 else rounded(values, words))


def rounded(values: Tensor, words: Tensor) -> Tensor:
    """Return fp32 values as bf16, rounded up or down with probabilities that keep the mean.

    words: 16 random bits of each, int32.
    """
    bits = (words + values.view(torch.int32)) & -0x10000
    return torch.where(torch.isfinite(values), bits.view(torch.float32), values).bfloat16()


def words_of(states: Sequence[str], noise: Noise | None, first: int, like: Tensor) -> dict[str, Tensor | None]:
    """Return the random bits of a rule's ``states`` and of remainders, for elements from number ``first`` on.

    like: a tensor with as many elements.
    """
    if noise is None:
        return dict.fromkeys((*states, REMAINDER))
    words = random_bits_in_rows(noise, first, like.numel(), like.device)
    halves = (words & 0xFFFF, (words >> 16) & 0xFFFF)
    return {**dict(zip(states, halves, strict=False)), REMAINDER: mix_words(words + signed_word(GOLDEN)) & 0xFF}


def joined(weight: Tensor, remainder: Tensor) -> Tensor:
    """Return the fp32 values of bf16 weights and their remainders, int8."""
    bits = weight.view(torch.int16).to(torch.int32)
    size = bits & 0x7FFF
    kept = remainder.to(torch.int32)
    kept = kept.masked_fill((size >= 0x7F80) | ((size == 0) & (kept < 0)), 0)
    return (((bits << 8) + kept) << 8).view(torch.float32)


def split(values: Tensor, weight: Tensor, remainder: Tensor, words: Tensor | None) -> None:
    """Store fp32 values as weights and remainders, rounded.

    words: 8 random bits of each element, int32; None: to nearest.
    """
    bits = values.view(torch.int32)
    rounded_up = bits + (0x7F + ((bits >> 8) & 1) if words is None else words)
    upper = (rounded_up >> 8) & 0xFFFFFF
    high = (upper + 0x7F + ((upper >> 8) & 1)) >> 8
    left = (upper - (high << 8)).clamp_(max=127)
    finite = torch.isfinite(values)
    high = torch.where(high >= 0x8000, high - 0x10000, high).to(torch.int16).view(torch.bfloat16)
    weight.copy_(torch.where(finite, high, values.bfloat16()))
    remainder.copy_(left.masked_fill_(~finite, 0))


def cut(flats: Mapping[str, Tensor], start: int, end: int) -> dict[str, Tensor]:
    """Return elements [start, end) of an update's tensors. Raises ValueError if that cuts a block of a state."""
    scales = {name for name in flats if name.endswith(SCALE)}
    if scales and start % BLOCK:
        raise ValueError(f"update: expected spans that begin at multiples of {BLOCK} elements, got {start}")
    blocks = slice(start // BLOCK, -(-end // BLOCK))
    return {name: flat[blocks if name in scales else slice(start, end)] for name, flat in flats.items()}
