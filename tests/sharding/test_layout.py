"""layout.py: where everything lies."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardengine.errors import InternalError
from shardengine.sharding import layout
from shardengine.sharding.layout import FIRST_BUCKET_ELEMENTS, FlatBufferLayout, Layout, ParameterSpec, alignment
from tests.support.parts import ITEMSIZES, SHARDED, spec

RANKS = st.integers(1, 5)
CAPS = st.integers(1, 600)


@st.composite
def specs(draw: Callable[..., object]) -> list[ParameterSpec]:
    one = st.builds(
        lambda shape, dtype, trainable, group, unit: spec(
            "p", *shape, dtype=dtype, trainable=trainable, group=group if trainable else -1, unit=unit
        ),
        st.lists(st.integers(1, 20), max_size=3).filter(lambda shape: len(shape) < 3 or shape[0] * shape[1] < 60),
        st.sampled_from(sorted(ITEMSIZES)), st.booleans(), st.integers(-1, 2), st.integers(0, 3),
    )  # fmt: skip
    drawn = draw(st.lists(one, min_size=1, max_size=12))
    assert isinstance(drawn, list)
    return [replace(one, names=(f"p{i}",)) for i, one in enumerate(drawn)]


def elements(flat_buffer: FlatBufferLayout) -> int:
    return alignment(flat_buffer.itemsize)


property_test = settings(max_examples=25, deadline=None, derandomize=True)


@given(specs(), RANKS, CAPS)
@property_test
def test_every_parameter_has_one_slot_and_no_two_overlap(listed: list[ParameterSpec], ranks: int, cap: int) -> None:
    plan = layout.build(listed, ranks, cap)
    placed = [slot.parameter for flat_buffer in plan.flat_buffers for slot in flat_buffer.slots]
    assert sorted(placed) == list(range(len(listed)))
    for flat_buffer in plan.flat_buffers:
        end = 0
        for slot in flat_buffer.slots:
            mine = listed[slot.parameter]
            assert (mine.unit, mine.dtype, mine.trainable) == (
                flat_buffer.unit,
                flat_buffer.dtype,
                flat_buffer.trainable,
            )
            assert slot.start == end and slot.numel == mine.numel and slot.end == slot.start + mine.numel
            assert 0 <= slot.padded_end - slot.end < elements(flat_buffer)
            end = slot.padded_end
        assert end <= flat_buffer.length < end + ranks * elements(flat_buffer)


@given(st.integers(1, 400), st.integers(1, 40), RANKS, CAPS, st.sampled_from([16, 256]))
@property_test
def test_slices_of_sparse_gradients_are_cut_between_rows(
    rows: int, width: int, ranks: int, cap: int, block: int
) -> None:
    """Where that pads no more than a quarter; such a parameter is alone and comes last, where backward ends."""
    few = replace(spec("few", rows, width), sparse=True)
    plan = layout.build([few, spec("dense", 7, 3)], ranks, cap, cuts=layout.Cuts(block))
    buckets = [bucket for bucket in plan.buckets if bucket.row]
    step = math.lcm(block, width)
    assert bool(buckets) == (4 * ranks * step <= rows * width)
    for bucket in buckets:
        assert bucket.row == width and bucket.names == ("few",) and bucket.slice_length % step == 0
        most = min(rows * width, layout.FIRST_BUCKET_ELEMENTS) if rows * width > 8 * max(cap, ranks * step) else cap
        assert bucket.start % step == 0 and bucket.index > 0 and bucket.length <= max(most, ranks * step)
    if buckets:
        assert sum(bucket.length for bucket in buckets) - rows * width < rows * width / 4
    frozen = layout.build([replace(few, trainable=False, group=-1)], ranks, cap)
    turned = layout.build([replace(few, order=(1, 0))], ranks, cap)
    assert not any(bucket.row for plan in (frozen, turned) for flat in plan.flat_buffers for bucket in flat.buckets)


@given(specs(), RANKS, CAPS, st.sampled_from([64, 256]))
@property_test
def test_everything_starts_at_aligned_bytes_and_at_16_elements(
    listed: list[ParameterSpec], ranks: int, cap: int, align: int
) -> None:
    for flat_buffer in layout.build(listed, ranks, cap, align).flat_buffers:
        starts = [slot.start for slot in flat_buffer.slots]
        starts += [bucket.interval_of_rank(SHARDED, rank)[0] for bucket in flat_buffer.buckets for rank in range(ranks)]
        starts += [edge for bucket in flat_buffer.buckets for edge in (bucket.start, bucket.end)]
        assert all(start % 16 == 0 and start * flat_buffer.itemsize % align == 0 for start in starts)


@given(specs(), RANKS, CAPS)
@property_test
def test_buckets_tile_their_flat_buffer_within_the_cap(listed: list[ParameterSpec], ranks: int, cap: int) -> None:
    for flat_buffer in layout.build(listed, ranks, cap).flat_buffers:
        edges = [0, *(bucket.end for bucket in flat_buffer.buckets)]
        assert [bucket.start for bucket in flat_buffer.buckets] == edges[:-1] and edges[-1] == flat_buffer.length
        quantum = ranks * elements(flat_buffer)
        assert all(
            0 < bucket.length <= max(cap, quantum) and bucket.length % quantum == 0 for bucket in flat_buffer.buckets
        )
        assert len({bucket.length for bucket in flat_buffer.buckets[:-1]}) <= 1


@given(specs(), RANKS, CAPS)
@property_test
def test_slices_tile_their_bucket(listed: list[ParameterSpec], ranks: int, cap: int) -> None:
    for flat_buffer in layout.build(listed, ranks, cap).flat_buffers:
        for bucket in flat_buffer.buckets:
            slices = [bucket.interval_of_rank(SHARDED, rank) for rank in range(ranks)]
            assert slices[0][0] == bucket.start and slices[-1][1] == bucket.end
            assert all(a[1] == b[0] for a, b in itertools.pairwise(slices))
            assert {end - start for start, end in slices} == {bucket.slice_length}


@given(specs(), RANKS, CAPS)
@property_test
def test_pieces_tile_every_parameter(listed: list[ParameterSpec], ranks: int, cap: int) -> None:
    plan = layout.build(listed, ranks, cap)
    for flat_buffer in plan.flat_buffers:
        covered: dict[int, int] = {slot.parameter: 0 for slot in flat_buffer.slots}
        for bucket in flat_buffer.buckets:
            for piece in plan.pieces(bucket):
                assert bucket.start <= piece.start < piece.end <= bucket.end
                assert piece.offset == covered[piece.parameter]
                covered[piece.parameter] += piece.end - piece.start
            assert bucket.names == tuple(listed[p.parameter].name for p in plan.pieces(bucket))
        assert covered == {slot.parameter: slot.numel for slot in flat_buffer.slots}


@given(specs(), RANKS, CAPS)
@property_test
def test_gaps_are_what_no_parameter_covers(listed: list[ParameterSpec], ranks: int, cap: int) -> None:
    for flat_buffer in layout.build(listed, ranks, cap).flat_buffers:
        covered = {i for slot in flat_buffer.slots for i in range(slot.start, slot.end)}
        gaps = [i for start, end in flat_buffer.gaps for i in range(start, end)]
        assert gaps == [i for i in range(flat_buffer.length) if i not in covered]


@given(specs(), RANKS, CAPS, st.lists(st.sampled_from([None, 0, 1]), min_size=12, max_size=12))
@property_test
def test_segments_cut_a_slice_exactly_where_the_label_changes(
    listed: list[ParameterSpec], ranks: int, cap: int, labels: list[int | None]
) -> None:
    plan = layout.build(listed, ranks, cap)
    for flat_buffer in plan.flat_buffers:
        label_of = {i: labels[slot.parameter] for slot in flat_buffer.slots for i in range(slot.start, slot.padded_end)}
        for bucket in flat_buffer.buckets:
            for interval in [bucket.interval_of_rank(SHARDED, rank) for rank in range(ranks)] + [
                (bucket.start, bucket.end)
            ]:
                expected = []
                for label, run in itertools.groupby(range(*interval), label_of.get):
                    members = list(run)
                    if label is not None:
                        expected.append((label, members[0], members[-1] + 1))
                found = plan.segments(bucket, interval, labels.__getitem__)
                assert found == expected
                assert all(edge % elements(flat_buffer) == 0 for _, start, end in found for edge in (start, end))


@given(specs(), RANKS, CAPS)
@property_test
def test_trainable_buckets_are_numbered_in_launch_order(listed: list[ParameterSpec], ranks: int, cap: int) -> None:
    plan = layout.build(listed, ranks, cap)
    assert [bucket.index for bucket in plan.buckets] == list(range(len(plan.buckets)))
    assert [flat_buffer.index for flat_buffer in plan.flat_buffers] == list(range(len(plan.flat_buffers)))
    for flat_buffer in plan.flat_buffers:
        assert all(bucket.flat_buffer == flat_buffer.index and bucket.ranks == ranks for bucket in flat_buffer.buckets)
        assert all((bucket.index >= 0) is flat_buffer.trainable for bucket in flat_buffer.buckets)
    assert [flat_buffer.unit for flat_buffer in plan.flat_buffers] == sorted(
        (flat_buffer.unit for flat_buffer in plan.flat_buffers), reverse=True
    )


def worked_example() -> Layout:
    return layout.build([spec("b", 7), spec("a", 20)], ranks=2, bucket_elements=32)


def test_the_worked_example_of_the_docstring_is_true() -> None:
    plan = worked_example()
    (flat_buffer,) = plan.flat_buffers
    slots = {
        plan.parameters[slot.parameter].name: (slot.start, slot.end, slot.padded_end) for slot in flat_buffer.slots
    }
    assert alignment(4) == 16 and flat_buffer.length == 64
    assert slots == {"a": (0, 20, 32), "b": (32, 39, 48)}
    assert [(bucket.start, bucket.end) for bucket in plan.buckets] == [(0, 32), (32, 64)]
    slices = [[bucket.interval_of_rank(SHARDED, rank) for rank in (0, 1)] for bucket in plan.buckets]
    assert slices == [[(0, 16), (16, 32)], [(32, 48), (48, 64)]]
    for line in (
        "slots    a: [0, 20) padded to 32          b: [32, 39) padded to 48",
        "buckets  bucket 0: [0, 32)                bucket 1: [32, 64)",
        "slices   rank 0: [0, 16)  rank 1: [16,32) rank 0: [32,48) rank 1: [48, 64)",
    ):
        assert line in (layout.__doc__ or "")


def test_a_whole_bucket_of_one_group_is_one_segment_across_padding() -> None:
    plan = layout.build([spec("a", 3), spec("b", 5), spec("c", 16)], 1, 1000)
    assert plan.segments(plan.buckets[0], (0, 48), lambda _: 0) == [(0, 0, 48)]


def test_equal_labels_with_another_one_between_stay_two_segments() -> None:
    plan = layout.build([spec("c", 16), spec("b", 16), spec("a", 16)], 1, 1000)
    assert plan.segments(plan.buckets[0], (0, 48), [0, 1, 0].__getitem__) == [(0, 0, 16), (1, 16, 32), (0, 32, 48)]
    assert plan.segments(plan.buckets[0], (0, 48), [0, None, 0].__getitem__) == [(0, 0, 16), (0, 32, 48)]


def test_parameters_of_one_optimizer_group_lie_together_within_a_bucket() -> None:
    plan = layout.build([spec(f"p{i}", 16, group=i % 2) for i in range(8)], 1, 128)
    assert [plan.parameters[slot.parameter].group for slot in plan.flat_buffers[0].slots] == [0] * 4 + [1] * 4
    assert [slot.parameter for slot in plan.flat_buffers[0].slots] == [6, 4, 2, 0, 7, 5, 3, 1]


def test_groups_are_not_sorted_over_more_than_about_a_bucket() -> None:
    plan = layout.build([spec(f"p{i}", 16, group=i % 2) for i in range(8)], 1, 64)
    assert [slot.parameter for slot in plan.flat_buffers[0].slots] == [6, 4, 7, 5, 2, 0, 3, 1]


def test_parameters_of_a_unit_lie_in_reverse_order_and_the_root_comes_last() -> None:
    plan = layout.build([spec("root", 4), spec("a", 4, unit=1), spec("b", 4, unit=1), spec("c", 4, unit=2)], 1, 100)
    names = [[plan.parameters[slot.parameter].name for slot in flat_buffer.slots] for flat_buffer in plan.flat_buffers]
    assert names == [["c"], ["b", "a"], ["root"]]


def test_dtypes_and_frozen_parameters_have_flat_buffers_of_their_own() -> None:
    plan = layout.build([spec("a", 4), spec("b", 4, dtype="float64"), spec("c", 4, trainable=False)], 1, 100)
    found = sorted((each.dtype, each.trainable, len(each.slots)) for each in plan.flat_buffers)
    assert found == [("float32", False, 1), ("float32", True, 1), ("float64", True, 1)]


def test_what_an_optimizer_steps_has_a_group() -> None:
    assert [spec("p", 4, group=group).is_stepped for group in (-1, 0, 1)] == [False, True, True]


def test_a_large_parameter_is_cut_across_buckets() -> None:
    plan = layout.build([spec("big", 100)], 2, 64)
    pieces = [[(p.start, p.end, p.offset) for p in plan.pieces(bucket)] for bucket in plan.buckets]
    assert pieces == [[(0, 64, 0)], [(64, 100, 64)]]


def test_the_first_bucket_is_short_so_that_reducing_starts_early() -> None:
    plan = layout.build([spec("big", 3 * FIRST_BUCKET_ELEMENTS)], 2, 2 * FIRST_BUCKET_ELEMENTS)
    lengths = [bucket.length for bucket in plan.buckets]
    assert lengths == [FIRST_BUCKET_ELEMENTS, 2 * FIRST_BUCKET_ELEMENTS]


@pytest.mark.parametrize(("itemsize", "expected"), [(1, 64), (2, 32), (4, 16), (8, 16), (16, 16)])
def test_alignment_is_the_larger_of_64_bytes_and_16_elements(itemsize: int, expected: int) -> None:
    assert alignment(itemsize) == expected


def test_a_parameter_without_dimensions_has_one_element() -> None:
    assert spec("scale").numel == 1
    assert spec("matrix", 3, 5).numel == 15


def test_elements_are_counted_with_padding_by_what_is_asked_for() -> None:
    plan = layout.build([spec("root", 3), spec("a", 20, unit=1), spec("f", 40, unit=1, trainable=False)], 2, 1000)
    assert plan.elements(trainable=True) == 64
    assert plan.elements(trainable=False) == 64


def test_parameters_without_elements_are_refused_by_name() -> None:
    with pytest.raises(InternalError, match="empty"):
        layout.build([spec("empty", 0)], 1, 100)


@pytest.mark.parametrize(
    ("numel", "cap", "longest"),
    [
        (65536, 20, 65536),
        (65536, 4096, 65536),
        (65536, 8192, 8192),
        (4_000_000, 20, layout.FIRST_BUCKET_ELEMENTS),
        (4_000_000, 500_000, 500_000),
        (60, 16, 32),
    ],
)
@pytest.mark.parametrize("trainable", [True, False])
def test_no_bucket_is_far_below_a_parameter(numel: int, cap: int, longest: int, trainable: bool) -> None:
    """More than eight times as large as the bucket: it is cut no finer than a first bucket. Alignment stays."""
    listed = [spec("small", 5, trainable=trainable), spec("large", numel, trainable=trainable)]
    plan = layout.build(listed, 2, cap)
    (flat_buffer,) = plan.flat_buffers
    assert max(bucket.length for bucket in flat_buffer.buckets) == -(-longest // 32) * 32
    assert all(bucket.length % 32 == 0 and bucket.start % 32 == 0 for bucket in flat_buffer.buckets)


@given(st.lists(st.integers(1, 900), min_size=1, max_size=9), RANKS, CAPS)
@property_test
def test_no_bucket_ends_inside_of_a_parameter_where_that_is_asked_for(sizes: list[int], ranks: int, cap: int) -> None:
    """Buckets follow each other, each a multiple of what all must be, and longer than the cap with one parameter."""
    plan = layout.build([spec(f"p{n}", size) for n, size in enumerate(sizes)], ranks, cap, cuts=layout.Cuts(whole=True))
    quantum, (flat_buffer,) = ranks * 16, plan.flat_buffers
    edges = [bucket.start for bucket in plan.buckets] + [flat_buffer.length]
    assert edges[0] == 0 and edges == sorted(edges) and all(edge % quantum == 0 for edge in edges)
    assert sorted(slot.parameter for slot in flat_buffer.slots) == list(range(len(sizes)))
    for bucket in plan.buckets:
        pieces = plan.pieces(bucket)
        assert pieces and all(piece.offset == 0 and piece.offset_end == sizes[piece.parameter] for piece in pieces)
        assert len(pieces) == 1 or bucket.length <= max(cap // quantum, 1) * quantum
