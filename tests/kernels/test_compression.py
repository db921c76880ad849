"""kernels.compress and decompress."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardengine import kernels
from shardengine.kernels import Noise
from tests.kernels.test_operations import property_test, random, same


@pytest.mark.parametrize(("kind", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_floats_saturate_and_are_counted(kind: str, dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    values = torch.tensor([1.0, 3.3999e38, -3.3999e38, math.inf, -math.inf, math.nan, largest, -0.0, 1e-45])
    count = torch.zeros((), dtype=torch.int64)
    compressed = kernels.compress(values, kind, saturated=count)
    assert compressed.values.dtype is dtype and compressed.scales is None
    assert count.item() == 2
    out = torch.empty(9)
    kernels.decompress(compressed, out)
    expected = torch.tensor([1.0, largest, -largest, math.inf, -math.inf, math.nan, largest, -0.0, 0.0])
    assert same(out.nan_to_num(5.0, math.inf, -math.inf), expected.nan_to_num(5.0, math.inf, -math.inf))


@given(st.sampled_from([("int8", 127), ("int4", 7)]), st.integers(0, 700), st.booleans(), st.integers(0, 5))
@property_test
def test_integers_come_back_within_their_step(kind: tuple[str, int], length: int, noisy: bool, seed: int) -> None:
    (values,) = random(1, length, seed)
    compressed = kernels.compress(values, kind[0], block=64, noise=Noise(1, seed) if noisy else None)
    assert compressed.scales is not None and len(compressed.scales) == (length + 63) // 64
    assert compressed.values.nbytes == (length if kind[0] == "int8" else (length + 1) // 2)
    out = torch.empty(length)
    kernels.decompress(compressed, out)
    for start in range(0, length, 64):
        block = values[start : start + 64]
        step = block.abs().max() / kind[1]
        # to nearest: half a step; at random: a whole one; the division and the product round by 2^-24 each
        assert (out[start : start + 64] - block).abs().max() <= step * ((1.0 if noisy else 0.5) + 1e-5)


def test_stochastic_integers_keep_the_mean() -> None:
    values = torch.full((64_000,), 0.3)
    values[::64] = 7.0  # the scale of every block is 1
    out = torch.empty(64_000)
    kernels.decompress(kernels.compress(values, "int4", block=64, noise=Noise(0, 0)), out)
    drawn = out[torch.arange(64_000) % 64 != 0]
    assert set(drawn.unique().tolist()) == {0.0, 1.0}
    assert drawn.mean().item() == pytest.approx(0.3, abs=0.0092)  # 5 sigma of 63 000 draws


def test_shards_are_compressed_as_the_whole_is() -> None:
    (values,) = random(1, 1024)
    whole = kernels.compress(values, "int8", block=128, noise=Noise(7, 3), first=1000)
    parts = [
        kernels.compress(values[a:b], "int8", block=128, noise=Noise(7, 3), first=1000 + a)
        for a, b in ((0, 384), (384, 1024))
    ]
    assert torch.equal(whole.values, torch.cat([part.values for part in parts]))
    assert whole.scales is not None and same(whole.scales, torch.cat([p.scales for p in parts if p.scales is not None]))


def test_a_block_that_is_not_finite_comes_back_as_nan_and_zeros_as_zeros() -> None:
    values = torch.ones(16)
    values[5], values[8:12], values[12:] = math.inf, 0.0, 1e-45
    out = torch.empty(16)
    kernels.decompress(kernels.compress(values, "int8", block=4), out)
    assert out[:4].tolist() == [1.0] * 4 and out[4:8].isnan().all() and not out[8:].any()


@pytest.mark.parametrize(("kind", "block", "text"), [("int3", 64, "'int3'"), ("int8", 7, "even"), ("int4", 0, "0")])
def test_an_unknown_format_is_refused(kind: str, block: int, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        kernels.compress(torch.ones(4), kind, block=block)
