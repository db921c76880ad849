"""flatten and unflatten under Triton's interpreter, bit for bit with the reference."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardengine import kernels
from shardengine.kernels import Spans, triton
from shardengine.kernels.triton import copies
from shardengine.kernels.triton.copies import BLOCK
from tests.kernels import kernel_cases as cases
from tests.kernels.kernel_cases import BF16, FP16, FP32

CPU = torch.device("cpu")
SIZES = [0, 1, 15, 16, 17, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 33]
property_test = settings(max_examples=25, deadline=None, derandomize=True)


@pytest.mark.parametrize("options", [{}, {"scale": 0.3}, {"add": True}, {"scale": 0.3, "add": True}], ids=str)
@pytest.mark.parametrize(("source", "out"), [*itertools.product((FP32, BF16, FP16), repeat=2)])
def test_flatten_in_every_dtype(source: torch.dtype, out: torch.dtype, options: dict[str, Any]) -> None:
    cases.check_flatten(CPU, [17, 0, 300, 48], [3, 2, 0, 16, 9], source, out, **options)


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("size", SIZES)
def test_flatten_of_every_size(size: int, offset: int) -> None:
    cases.check_flatten(CPU, [size], [0, 0], offset=offset)
    cases.check_flatten(CPU, [size, size, 5], [16, 0, 11, 40], out=BF16, offset=offset)
    cases.check_flatten(CPU, [size, 32], [0, -size % 16, 0], BF16, offset=offset, add=True)


def test_flatten_covers_gaps_longer_than_a_block() -> None:
    cases.check_flatten(CPU, [5, 5], [BLOCK + 3, 2 * BLOCK, BLOCK])


def test_flatten_of_nothing_is_zeros_and_adds_nothing() -> None:
    cases.check_flatten(CPU, [], [40])
    cases.check_flatten(CPU, [0, 0], [7, 8, 9], BF16)
    cases.check_flatten(CPU, [], [40], add=True)
    cases.check_flatten(CPU, [], [0])


def test_flatten_finds_every_tensor_of_many() -> None:
    lengths = [1 + 7 * i % 50 for i in range(61)]
    cases.check_flatten(CPU, lengths, [-length % 16 for length in [0, *lengths]])


def test_rows_are_made_once_and_addresses_for_every_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    tables: list[torch.Tensor] = []

    def noting(kernel: object, programs: int, on: torch.Tensor, *arguments: Any, **options: Any) -> None:
        tables.append(arguments[0])
        launch(kernel, programs, on, *arguments, **options)

    launch = vars(copies)["launch"]
    monkeypatch.setattr(copies, "launch", noting)
    copies._plan.cache_clear()
    starts, out = [3, 16, 16], torch.empty(60)
    for seed in range(4):
        tensors = [cases.numbers(length, seed, special=False) for length in (5, 0, 40)]
        triton.flatten(tensors, starts, out)
        expected = torch.zeros(60)
        expected[3:8], expected[16:56] = tensors[0], tensors[2]
        assert torch.equal(out, expected)
        backs = [torch.empty(length) for length in (5, 0, 40)]
        triton.unflatten(out, starts, backs)
        assert all(torch.equal(back, tensor) for back, tensor in zip(backs, tensors, strict=True))
    assert len({table.data_ptr() for table in tables}) == 8, "the copy of an earlier table may be under way"
    found = copies._plan.cache_info()
    assert (found.misses, found.hits) == (2, 6) and found.maxsize is not None


def test_tables_are_the_hosts_whatever_the_default_device_is() -> None:
    out = torch.ones(20)
    with torch.device("meta"):
        copies._plan.cache_clear()
        triton.flatten([out[:5] * 2], [8], out)
        assert Spans([(0, 5)]).table(CPU, 4)[1].tolist() == [[0, 0], [0, 1]]
    assert out.tolist() == [0.0] * 8 + [2.0] * 5 + [0.0] * 7


def test_a_scale_that_is_a_denormal_is_one() -> None:
    cases.check_flatten(CPU, [100], [0, 0], scale=1e-42)


@pytest.mark.parametrize("offset", [0, 3])
@pytest.mark.parametrize("size", SIZES)
def test_unflatten_of_every_size(size: int, offset: int) -> None:
    cases.check_unflatten(CPU, [size], [0, 0], [FP32], offset=offset)
    cases.check_unflatten(CPU, [size, 16, size], [16, 5, 0, 7], [FP32, BF16], offset=offset)


@pytest.mark.parametrize("flat", [FP32, BF16, FP16])
def test_unflatten_into_several_dtypes(flat: torch.dtype) -> None:
    cases.check_unflatten(CPU, [40, 0, 33, 16, 64, 100], [0, 8, 1, 0, 16, 3, 2], [FP32, BF16, FP16], flat)


def test_negative_zeros_stay_negative() -> None:
    zeros = torch.full((20,), -0.0)
    for options in ({}, {"scale": 0.5}, {"add": True}):
        out = zeros.clone()
        triton.flatten([zeros], [0], out, **options)
        cases.assert_same(out, zeros)


def test_unflatten_into_nothing() -> None:
    cases.check_unflatten(CPU, [], [5], [FP32])


@given(st.lists(st.tuples(st.integers(0, 90), st.integers(0, 20)), max_size=6), st.sampled_from([FP32, BF16, FP16]))
@property_test
def test_unflatten_undoes_flatten(pieces: list[tuple[int, int]], dtype: torch.dtype) -> None:
    tensors = [cases.numbers(length, seed, dtype) for seed, (length, _) in enumerate(pieces)]
    ends = list(itertools.accumulate((length + gap for length, gap in pieces), initial=0))
    flat = torch.full((ends[-1],), 7.0, dtype=dtype)
    triton.flatten(tensors, ends[:-1], flat)
    back = [torch.full_like(tensor, 7.0) for tensor in tensors]
    triton.unflatten(flat, ends[:-1], back)
    assert all(cases.same(found, tensor) for found, tensor in zip(back, tensors, strict=True))
    for (length, gap), start in zip(pieces, ends, strict=False):
        assert cases.same(flat[start + length : start + length + gap], torch.zeros(gap, dtype=dtype))


def test_the_declared_operations_reach_these_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kernels.operations.implementation(CPU) is triton
    calls: list[str] = []
    monkeypatch.setattr(triton, "flatten", lambda *arguments, **options: calls.append("flatten"))
    kernels.flatten([], [], torch.ones(3))
    monkeypatch.undo()
    out = torch.ones(20)
    kernels.flatten([torch.full((5,), 2.0)], [8], out)
    assert calls == ["flatten"] and out.tolist() == [0.0] * 8 + [2.0] * 5 + [0.0] * 7
    assert kernels.sum_of_squares(out).item() == 20.0
