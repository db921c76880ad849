"""flat_slices.py: elements by name and position, cut, and copied from one layout into another."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shardengine.sharding import FlatSlice, Layout, Targets, layout, slices_of
from shardengine.stages import Placement
from tests.support.parts import REPLICATED, SHARDED, contents, spec


def numbers(first: int, end: int) -> Tensor:
    return torch.arange(first, end, dtype=torch.float32)


@pytest.mark.parametrize(
    ("first", "end", "left"),
    [(0, 99, (5, 12)), (5, 12, (5, 12)), (7, 9, (7, 9)), (0, 7, (5, 7)), (9, 99, (9, 12)), (0, 5, ()), (12, 99, ()),
     (0, 2, ()), (50, 99, ())],
)  # fmt: skip
def test_a_cut_is_what_both_have(first: int, end: int, left: tuple[int, ...]) -> None:
    cut = FlatSlice("p", "weight", 5, numbers(5, 12)).cut(first, end)
    assert (cut.name, cut.key, cut.end - cut.first) == ("p", "weight", cut.values.numel())
    assert torch.equal(cut.values, numbers(*left) if left else numbers(0, 0))
    assert not left or (cut.first, cut.end) == left


def test_what_has_no_place_is_not_copied() -> None:
    own = FlatSlice("p", "weight", 4, torch.zeros(4))
    targets = Targets([own])
    for source in (
        FlatSlice("q", "weight", 4, torch.ones(4)), FlatSlice("p", "exp_avg", 4, torch.ones(4)),
        FlatSlice("p", "weight", 0, torch.ones(4)), FlatSlice("p", "weight", 8, torch.ones(4)),
    ):  # fmt: skip
        targets.receive(source)
    assert not own.values.any()
    targets.receive(FlatSlice("p", "weight", 0, numbers(0, 6)))
    assert own.values.tolist() == [4, 5, 0, 0]


def held(plan: Layout, rank: int, placement: Placement, *, filled: bool) -> list[FlatSlice]:
    """All that ``rank`` has of two tensors of each parameter, zeros where not ``filled``."""
    found: list[FlatSlice] = []
    for flat_buffer in plan.flat_buffers:
        flat = torch.zeros(flat_buffer.length)
        for slot in flat_buffer.slots if filled else ():
            flat[slot.start : slot.end] = contents(plan.parameters[slot.parameter], slot.parameter).view(-1)
        for bucket in flat_buffer.buckets:
            first, end = bucket.interval_of_rank(placement, rank)
            tensors = {"weight": flat[first:end], "exp_avg": -flat[first:end]}
            found += slices_of(plan, bucket, (first, end), tensors)
    return found


SIDES = st.tuples(st.integers(1, 4), st.integers(1, 300), st.sampled_from([REPLICATED, SHARDED]))


@given(st.lists(st.integers(1, 90), min_size=1, max_size=6), SIDES, SIDES)
@settings(max_examples=25, deadline=None, derandomize=True)
def test_what_all_ranks_hold_fills_every_other_layout(
    sizes: list[int], before: tuple[int, int, Placement], after: tuple[int, int, Placement]
) -> None:
    specs = [spec(f"p{i}", size, group=i % 2, unit=i % 3) for i, size in enumerate(sizes)]
    old, new = (layout.build(specs, ranks, cap) for ranks, cap, _ in (before, after))
    sources = [part for rank in range(before[0]) for part in held(old, rank, before[2], filled=True)]
    for rank in range(after[0]):
        own = held(new, rank, after[2], filled=False)
        targets = Targets(own)
        for source in sources:
            targets.receive(source)
        for part, expected in zip(own, held(new, rank, after[2], filled=True), strict=True):
            assert part[:3] == expected[:3] and torch.equal(part.values, expected.values), part
