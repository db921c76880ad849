"""compress and decompress under Triton's interpreter, bit for bit with the reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardengine.kernels import triton
from shardengine.kernels.compression import LEVELS
from shardengine.kernels.triton.compressing import BLOCK
from tests.kernels import kernel_cases as cases
from tests.kernels.kernel_cases import BF16, FIRST, FP16, FP32

CPU = torch.device("cpu")
KINDS = ("fp16", "bf16", "int8", "int4")
SIZES = [0, 1, 2, 15, 16, 17, 255, 256, 257, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 300]
property_test = settings(max_examples=25, deadline=None, derandomize=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES)
def test_every_size(kind: str, size: int) -> None:
    cases.check_compress(CPU, cases.numbers(size, 1, special=False), kind)
    cases.check_compress(CPU, cases.numbers(size, 2, special=False), kind, noise=cases.ONE, first=FIRST)


@pytest.mark.parametrize("noise", [None, cases.ONE])
@pytest.mark.parametrize("block", [2, 6, 16, 250, 256, 4096])
@pytest.mark.parametrize("kind", list(LEVELS))
def test_every_block(kind: str, block: int, noise: object) -> None:
    sparse = cases.numbers(777, 4)
    sparse[torch.arange(777) % 50 > 2] = 0.0
    cases.check_compress(CPU, sparse, kind, block, noise, first=FIRST)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("kind", KINDS)
def test_every_dtype(kind: str, dtype: torch.dtype) -> None:
    cases.check_compress(CPU, cases.numbers(777, 3, dtype), kind, backs=(FP32, BF16, FP16))


@pytest.mark.parametrize("kind", KINDS)
def test_every_special_number_in_blocks_of_its_own(kind: str) -> None:
    alone = torch.stack([torch.tensor([value, 0.0, -0.0, 1e-3] * 4) for value in cases.SPECIAL])
    many = cases.SPECIAL.repeat_interleave(16)
    cases.check_compress(CPU, alone.view(-1), kind, block=16)
    cases.check_compress(CPU, many, kind, block=16, noise=cases.ONE)


@pytest.mark.parametrize("kind", list(LEVELS))
def test_ties_go_to_even(kind: str) -> None:
    level = LEVELS[kind]
    values = torch.arange(-2 * level, 2 * level + 1) / 2  # the scale is 1
    cases.check_compress(CPU, values, kind, block=4 * level + 2)


@pytest.mark.parametrize("kind", list(LEVELS))
def test_blocks_whose_scale_is_a_denormal_or_rounds_to_zero(kind: str) -> None:
    rows = [[size, -size / 2, size / 3, 0.0] for size in (1e-45, 4e-45, 1.4e-44, 2.66e-43, 1e-40, 1e-38, 2e-36)]
    values = torch.tensor(rows).view(-1)
    cases.check_compress(CPU, values, kind, block=4)
    cases.check_compress(CPU, values, kind, block=4, noise=cases.ONE)


@pytest.mark.parametrize(("kind", "dtype"), [("fp16", FP16), ("bf16", BF16)])
def test_saturation_is_counted_over_all_programs(kind: str, dtype: torch.dtype) -> None:
    values = torch.zeros(3 * BLOCK)
    values[::BLOCK], values[-1] = 3.4e38, -3.4e38
    values[1] = float("inf")
    counter = torch.tensor(10)
    found = triton.compress(values, kind, saturated=counter).values
    largest = torch.finfo(dtype).max
    assert counter.item() == 14
    assert found[::BLOCK].tolist() == [largest] * 3 and found[-1] == -largest and found[1] == float("inf")


FLOATS = st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=80)


@given(FLOATS, st.sampled_from(list(LEVELS)), st.booleans())
@property_test
def test_an_integer_is_off_by_at_most_half_a_step_or_a_whole_one_with_noise(
    drawn: list[float], kind: str, noisy: bool
) -> None:
    values = torch.tensor(drawn, dtype=FP32)
    made = triton.compress(values, kind, block=16, noise=cases.ONE if noisy else None)
    back = torch.empty_like(values)
    triton.decompress(made, back)
    assert made.scales is not None
    steps = made.scales.double().repeat_interleave(16)[: len(values)]
    bound = steps * (1.0 if noisy else 0.5) * (1 + 1e-5) + 2.0**-149 * 2 * LEVELS[kind]  # scales may be denormal
    assert ((back.double() - values.double()).abs() <= bound).all()


@given(FLOATS, st.integers(0, 5))
@property_test
def test_shards_cut_at_blocks_are_compressed_as_the_whole(drawn: list[float], cut: int) -> None:
    values, at = torch.tensor(drawn, dtype=FP32), min(16 * cut, len(drawn))
    for kind in LEVELS:
        whole = triton.compress(values, kind, block=16, noise=cases.ONE, first=FIRST)
        parts = [
            triton.compress(part, kind, block=16, noise=cases.ONE, first=FIRST + start)
            for part, start in ((values[:at], 0), (values[at:], at))
        ]
        assert cases.same(torch.cat([part.values for part in parts]), whole.values)
