"""Random bits that depend on (seed, step, global element index) alone, so not on the cuts and places of the data.

A counter-based generator without state: every element computes its own 32 bits. [Note: Random bits]

    mix(x)          the finaliser of MurmurHash3 (Appleby, 2011): xor-shift 16, · 0x85EBCA6B, xor-shift 13,
                    · 0xC2B2AE35, xor-shift 16, modulo 2^32; a bijection of 32-bit words
    key(seed, step) two words: a = mix(mix(low(seed) + GOLDEN) ^ high(seed)), then k0 = mix(a ^ mix(step + GOLDEN)) and
                    k1 = mix(k0 + GOLDEN)
    bits(i)         mix(mix(low(i) ^ k0) + high(i) · GOLDEN + k1)

[Note: Random bits in a row] If every element needs bits in every step, half of the work is enough: elements are
numbered in rows of 256, and bits_in_row(i) = mix(bits(i // 256) + (i modulo 256) · GOLDEN).

GOLDEN = 0x9E3779B9; low and high are the 32-bit halves of a 64-bit number; all sums and products are modulo 2^32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

GOLDEN, MIX_1, MIX_2 = 0x9E3779B9, 0x85EBCA6B, 0xC2B2AE35
_MASK = 0xFFFFFFFF
ROW = 256


class Noise(NamedTuple):
    """The key of the random bits of one tensor in one step. Both numbers are not negative and below 2^63."""

    seed: int
    step: int

    @property
    def key(self) -> tuple[int, int]:
        """The two 32-bit words (k0, k1) of [Note: Random bits]."""
        seed = _mix(_mix((self.seed & _MASK) + GOLDEN) ^ (self.seed >> 32 & _MASK))
        k0 = _mix(seed ^ _mix(self.step + GOLDEN))
        return k0, _mix(k0 + GOLDEN)


def random_bits(noise: Noise, first: int, count: int, device: torch.device | None = None) -> Tensor:
    """Return 32 random bits for each of the elements first, first + 1, …: int32 [count]."""
    k0, k1 = (signed_word(word) for word in noise.key)
    index = torch.arange(first, first + count, dtype=torch.int64, device=device)
    low = index.to(torch.int32)  # modulo 2^32
    high = (index >> 32).to(torch.int32)
    return mix_words(mix_words(low ^ k0) + high * signed_word(GOLDEN) + k1)


def random_bits_in_rows(noise: Noise, first: int, count: int, device: torch.device | None = None) -> Tensor:
    """Return random bits as ``random_bits`` does, by [Note: Random bits in a row]."""
    begin = first % ROW
    rows = random_bits(noise, first // ROW, -(-(begin + count) // ROW), device)
    steps = torch.arange(ROW, dtype=torch.int32, device=device) * signed_word(GOLDEN)
    return mix_words((rows.unsqueeze(1) + steps).view(-1)[begin : begin + count].clone())


def _mix(word: int) -> int:
    word &= _MASK
    word = (word ^ word >> 16) * MIX_1 & _MASK
    word = (word ^ word >> 13) * MIX_2 & _MASK
    return word ^ word >> 16


def mix_words(words: Tensor) -> Tensor:
    """Apply the mix of [Note: Random bits] to int32 words in place.

    A right shift keeps the sign, so its result is masked.
    """
    words ^= (words >> 16) & 0xFFFF
    words *= signed_word(MIX_1)
    words ^= (words >> 13) & 0x7FFFF
    words *= signed_word(MIX_2)
    words ^= (words >> 16) & 0xFFFF
    return words


def signed_word(word: int) -> int:
    """Return a 32-bit word as the signed number with the same bits."""
    return word - (1 << 32) if word >= 1 << 31 else word
