"""Digests of written weights: what differs between ranks must not look alike."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shardengine.ddp.writes import digest

VALUES = torch.arange(1.0, 13.0).reshape(4, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8], ids=str)
@pytest.mark.parametrize(
    "other",
    [
        VALUES[[1, 0, 2, 3]],
        VALUES[:, [0, 2, 1]],
        VALUES * 2,
        torch.full((4, 3), 7.0),
        VALUES.index_fill(0, torch.tensor(3), 0),
    ],
    ids=["rows in another order", "columns in another order", "scaled", "filled", "a row cleared"],
)
def test_other_values_have_another_digest(dtype: torch.dtype, other: Tensor) -> None:
    values = VALUES.to(dtype)
    kept = values.clone()
    assert not torch.equal(digest(values), digest(other.to(dtype)))
    assert torch.equal(digest(values), digest(kept)) and torch.equal(values, kept)


def test_a_value_behind_the_first_piece_counts() -> None:
    values = torch.zeros((1 << 20) + 3)
    before = digest(values)
    values[-1] = 1
    assert not torch.equal(digest(values), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.complex128], ids=str)
def test_the_digests_of_slices_add_up_to_that_of_the_whole_in_memory_order(dtype: torch.dtype) -> None:
    flat = torch.randn(4 * 3 * 5, generator=torch.Generator().manual_seed(1)).to(dtype)
    whole = digest(flat.view(4, 3, 5).permute(0, 2, 1))
    assert torch.equal(whole, digest(flat))
    assert torch.equal(whole, digest(flat[:7]) + digest(flat[7:29], 7) + digest(flat[29:], 29))
