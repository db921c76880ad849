"""Which parameter lies where. Owns every offset, every padding and every rank slice; integers only.

Must not know: devices, tensors, process groups. Everything else asks here instead of computing an offset.

    flat buffer   one storage per unit and bucket key (dtype, trainable, family: what its optimizer keeps of an element)
    bucket        a range of a flat buffer that is communicated together; its length is a multiple of ranks * alignment
    slot          the place of one parameter in its flat buffer
    slice         rank r's part of a bucket: [start + r * length / ranks, start + (r + 1) * length / ranks)

On a hybrid mesh of M shard groups with L ranks each the slices of the ranks that have the same place p in their groups
lie together: those of group 0, 1, … one after the other make slice p of L, which is the group's slice, the same in all
groups. So rank r = g · L + p has slice number p · M + g.

Example: two parameters of 20 and 7 fp32 elements, 2 ranks, buckets of 32 elements (alignment 16):

    flat     0               16              32              48              64
    buffer   |a a a a a a a a|a a a a . . . .|b b b b b b b .|. . . . . . . .|
    slots    a: [0, 20) padded to 32          b: [32, 39) padded to 48
    buckets  bucket 0: [0, 32)                bucket 1: [32, 64)
    slices   rank 0: [0, 16)  rank 1: [16,32) rank 0: [32,48) rank 1: [48, 64)

[Note: Alignment] Every parameter, slice and bucket starts at a multiple of 16 elements, and of as many bytes as the
device's libraries look at in an address (``Platform.alignment``: 64 on a CPU). Fused CPU optimizer kernels and small
matrix products give other bits in their scalar tails and at other offsets, and cuBLAS may choose another algorithm, so
alignment is what makes results independent of the layout. Where states are kept in blocks of 256 elements with a scale
each, what is trainable starts at multiples of 256, so that no cut goes through a block. Padding is zero, belongs to the
layout, and is counted in every formula.

[Note: Tiny buckets] A bucket size that is far below a parameter would make hundreds of collectives of it. So where a
parameter of a flat buffer has more than ``MOST_PIECES`` times as many elements, the buckets there may be as large as it
is, up to ``FIRST_BUCKET_ELEMENTS``.

[Note: Rows] A parameter whose gradient is sparse has a flat buffer of its own, so that its buckets hold nothing else.
Its slices are cut between rows as well, so that each row has one owner; where that might pad more than a quarter of
what the parameter has, it lies among the others.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from shardengine.errors import InternalError
from shardengine.stages import Axis, Placement

ALIGN_BYTES = 64
"""A CPU's."""
ALIGN_ELEMENTS = 16
FIRST_BUCKET_ELEMENTS = 262_144
MOST_PIECES = 8


@dataclass(frozen=True)
class ParameterSpec:
    """What the layout needs to know of one parameter. ``names``: all names of a tied parameter, first registered first.

    group: index of its optimizer group, or -1 where no optimizer steps it. unit: index of its unit, 0 is the root.
    order: its dimensions from the outermost in memory to the innermost, () where that is their own order. Offsets in a
    flat buffer count elements in memory order, so that channels_last weights keep their strides. number: of its first
    element among all elements of all of the model's parameters, which no layout changes. came: its place in the order
    of gradients. sparse: few rows of its gradient are not zero.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    trainable: bool
    group: int
    unit: int
    order: tuple[int, ...] = ()
    number: int = 0
    came: int = 0
    sparse: bool = False

    @property
    def row(self) -> int:
        """Elements of a row, which lie together in memory; 0 where rows are of no use ([Note: Rows])."""
        rows = self.sparse and self.trainable and len(self.shape) > 1 and not self.order
        return self.numel // self.shape[0] if rows else 0

    @cached_property
    def is_stepped(self) -> bool:
        """Whether an optimizer steps it."""
        return self.group >= 0

    @cached_property
    def numel(self) -> int:
        """Number of elements (1 for a 0-dim parameter)."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    @cached_property
    def shape_in_memory(self) -> tuple[int, ...]:
        """The sizes of its dimensions in memory order."""
        return tuple(self.shape[dimension] for dimension in self.order) if self.order else self.shape

    @cached_property
    def order_back(self) -> tuple[int, ...]:
        """The permutation from memory order to the parameter's own order of dimensions."""
        return tuple(self.order.index(dimension) for dimension in range(len(self.order)))

    @property
    def name(self) -> str:
        """The first registered name."""
        return self.names[0]


@dataclass(frozen=True)
class Slot:
    """Elements [start, start + numel) of a flat buffer belong to ``parameter``; up to ``padded_end`` is its padding."""

    parameter: int
    start: int
    numel: int
    padded_end: int

    @property
    def end(self) -> int:
        """One past the last element."""
        return self.start + self.numel


@dataclass(frozen=True)
class BucketLayout:
    """Elements [start, end) of a flat buffer. ``index`` numbers the trainable buckets in launch order, -1: frozen.

    names: of the parameters that overlap it · replicas: shard groups of the ranks · row: elements of a row, where it
    consists of rows of one parameter, few of which have a gradient; else 0.
    """

    index: int
    flat_buffer: int
    start: int
    end: int
    ranks: int
    names: tuple[str, ...] = ()
    replicas: int = 1
    row: int = 0

    @cached_property
    def label(self) -> str:
        """For errors."""
        return (
            f"bucket {self.index}"
            if self.index >= 0
            else f"frozen bucket {self.start} of flat buffer {self.flat_buffer}"
        )

    @cached_property
    def length(self) -> int:
        """Elements, padding included."""
        return self.end - self.start

    @cached_property
    def slice_length(self) -> int:
        """Elements of one rank's slice."""
        return self.length // self.ranks

    @property
    def whole_interval(self) -> tuple[int, int]:
        """All of it, in coordinates of the flat buffer."""
        return self.start, self.end

    def interval(self, placement: Placement, rank: int) -> tuple[int, int]:
        """What ``rank`` holds of a tensor that is placed so, in coordinates of the flat buffer."""
        return self.slice_at(placement, self.slice_number(placement, rank))

    def slice_at(self, placement: Placement, number: int) -> tuple[int, int]:
        """Slice ``number``, counted in the order of the elements, in coordinates of the flat buffer."""
        length = self.sizes[placement]
        first = self.start + number * length
        return first, first + length

    def slice_number(self, placement: Placement, rank: int) -> int:
        """Which of its slices ``rank`` holds, counted in the order of the elements."""
        group, place = divmod(rank, self.ranks // self.replicas)
        return {Axis.ALL: place * self.replicas + group, Axis.INSIDE: place, None: 0}[placement.sharded_over]

    @cached_property
    def sizes(self) -> dict[Placement, int]:
        """Elements that one rank holds of a tensor with each placement."""
        return {each: self.length // each.slices(self.ranks, self.replicas) for each in Placement}


@dataclass(frozen=True)
class FlatBufferLayout:
    """One flat storage: the slots of a unit's parameters that share a bucket key, cut into buckets. family: a number
    for what an optimizer keeps of each element."""

    index: int
    unit: int
    dtype: str
    itemsize: int
    trainable: bool
    slots: tuple[Slot, ...]
    buckets: tuple[BucketLayout, ...]
    family: int = 0

    @cached_property
    def length(self) -> int:
        """Elements, padding included."""
        return self.buckets[-1].end

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Where each slot starts, ascending."""
        return tuple(slot.start for slot in self.slots)

    def slots_within(self, start: int, end: int) -> tuple[Slot, ...]:
        """The slots whose elements or padding lie in [start, end): found by bisection, so others cost nothing."""
        first = max(bisect_right(self.starts, start) - 1, 0)
        return self.slots[first : bisect_left(self.starts, end)]

    def buckets_within(self, start: int, end: int) -> tuple[BucketLayout, ...]:
        """The buckets that overlap [start, end)."""
        edges = self._edges
        return self.buckets[max(bisect_right(edges, start) - 1, 0) : bisect_left(edges, end)]

    @cached_property
    def _edges(self) -> tuple[int, ...]:
        return tuple(bucket.start for bucket in self.buckets)

    @cached_property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """The intervals that hold padding."""
        ends = [slot.end for slot in self.slots]
        starts = [slot.start for slot in self.slots[1:]] + [self.length]
        return tuple((end, start) for end, start in zip(ends, starts, strict=True) if end < start)


@dataclass(frozen=True)
class Piece:
    """Elements [start, end) of a flat buffer, all of one parameter, starting at its element ``offset``."""

    parameter: int
    start: int
    end: int
    offset: int

    @property
    def offset_end(self) -> int:
        """One past the parameter's last element in it."""
        return self.offset + self.end - self.start


@dataclass(frozen=True)
class Layout:
    """The layout of a model: flat buffers in launch order of their buckets, and the trainable buckets by index.

    replicas: shard groups of the ``ranks``.
    """

    parameters: tuple[ParameterSpec, ...]
    flat_buffers: tuple[FlatBufferLayout, ...]
    ranks: int
    replicas: int = 1
    _pieces: dict[tuple[int, int], tuple[Piece, ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @cached_property
    def buckets(self) -> tuple[BucketLayout, ...]:
        """The trainable buckets; ``buckets[i].index == i``."""
        return tuple(bucket for flat_buffer in self.flat_buffers for bucket in flat_buffer.buckets if bucket.index >= 0)

    @cached_property
    def flat_buffers_of(self) -> Mapping[int, tuple[FlatBufferLayout, ...]]:
        """The flat buffers of each unit that has some, in order."""
        found: dict[int, tuple[FlatBufferLayout, ...]] = {}
        for flat_buffer in self.flat_buffers:
            found[flat_buffer.unit] = (*found.get(flat_buffer.unit, ()), flat_buffer)
        return found

    def pieces(self, bucket: BucketLayout) -> tuple[Piece, ...]:
        """The parts of parameters in ``bucket``, without padding, in order: found once, every step asks for them."""
        key = bucket.flat_buffer, bucket.start
        if key not in self._pieces:
            slots = self.flat_buffers[bucket.flat_buffer].slots_within(bucket.start, bucket.end)
            self._pieces[key] = tuple(_pieces(slots, bucket.start, bucket.end))
        return self._pieces[key]

    def pieces_within(self, bucket: BucketLayout, interval: tuple[int, int]) -> Iterator[Piece]:
        """The parts of ``pieces`` that lie in ``interval`` (flat buffer coordinates)."""
        pieces = self.pieces(bucket)
        for number in range(bisect_right(pieces, interval[0], key=_end_of), len(pieces)):
            piece = pieces[number]
            start, end = max(piece.start, interval[0]), min(piece.end, interval[1])
            if start >= end:
                return
            yield Piece(piece.parameter, start, end, piece.offset + start - piece.start)

    def segments(
        self, bucket: BucketLayout, interval: tuple[int, int], label: Callable[[int], Hashable | None]
    ) -> list[tuple[Hashable, int, int]]:
        """``interval`` (flat buffer coordinates) cut where ``label(parameter)`` changes; None is left out.

        Neighbours with equal labels are merged across their padding, so a whole bucket of one optimizer group is one
        segment. Starts and ends are multiples of the alignment ([Note: Alignment]), padding rides with its parameter.
        """
        found: list[tuple[Hashable, int, int]] = []
        for slot in self.flat_buffers[bucket.flat_buffer].slots_within(*interval):
            start, end = max(slot.start, interval[0]), min(slot.padded_end, interval[1])
            key = label(slot.parameter) if start < end else None
            if key is None:
                continue
            if found and found[-1][0] == key and found[-1][2] == start:
                found[-1] = (key, found[-1][1], end)
            else:
                found.append((key, start, end))
        return found

    def elements(self, *, trainable: bool) -> int:
        """Elements with padding of the trainable, or of the frozen, flat buffers."""
        return sum(flat_buffer.length for flat_buffer in self.flat_buffers if flat_buffer.trainable is trainable)


@dataclass(frozen=True)
class Cuts:
    """Where buckets of what is trainable may be cut. elements: at multiples of so many, where states or messages are
    made in blocks · whole: never inside of a parameter."""

    elements: int = ALIGN_ELEMENTS
    whole: bool = False


def _end_of(piece: Piece) -> int:
    return piece.end


def _pieces(slots: Iterable[Slot], start: int, end: int) -> Iterator[Piece]:
    """The elements of ``slots`` in [start, end), without padding."""
    for slot in slots:
        first, last = max(slot.start, start), min(slot.end, end)
        if first < last:
            yield Piece(slot.parameter, first, last, first - slot.start)


def alignment(itemsize: int, align_bytes: int = ALIGN_BYTES) -> int:
    """Elements of ``itemsize`` bytes to which everything is aligned ([Note: Alignment])."""
    return max(ALIGN_ELEMENTS, -(-align_bytes // itemsize))


def build(
    specs: list[ParameterSpec],
    ranks: int,
    bucket_elements: int,
    align_bytes: int = ALIGN_BYTES,
    cuts: Cuts = Cuts(),
    families: Sequence[int] = (),
    replicas: int = 1,
) -> Layout:
    """Lay out ``specs`` (in registration order) for ``ranks`` ranks with buckets of at most ``bucket_elements``.

    families: of each optimizer group; where nothing is said all are one.

    The cap is a true cap, but never below one aligned slice per rank (or one parameter, see ``Cuts``), nor far below a
    parameter ([Note: Tiny buckets]). Flat buffers come in the order in which backward is expected to fill them: last
    unit first, the root last; inside, parameters as their gradients ``came``, and in reverse registration order where
    that was not seen.
    replicas: shard groups of the ranks.
    """
    flat_buffers: list[FlatBufferLayout] = []
    next_bucket = 0
    members_of: dict[int, list[int]] = {}
    for index, spec in enumerate(specs):
        members_of.setdefault(spec.unit, []).append(index)
    for unit, members in sorted(members_of.items(), reverse=True):
        by_key: dict[tuple[str, int, bool, int, int], list[int]] = {}
        for i in members:
            family = families[specs[i].group] if families and specs[i].is_stepped else 0
            align = max(alignment(specs[i].itemsize, align_bytes), cuts.elements)
            alone = i if _cut_into_rows(specs[i], ranks, align) else -1
            by_key.setdefault((specs[i].dtype, specs[i].itemsize, specs[i].trainable, family, alone), []).append(i)
        for (dtype, itemsize, trainable, family, alone), chosen in sorted(by_key.items(), key=_is_alone):
            align = max(alignment(itemsize, align_bytes), cuts.elements if trainable else 1)
            row = specs[alone].row if alone >= 0 else 0
            align = math.lcm(align, row) if row else align
            filled = sorted(chosen, key=lambda i: (specs[i].came, -i))
            whole = cuts.whole and trainable
            largest = 0 if whole else max(specs[i].numel for i in chosen)
            most = _not_tiny(bucket_elements, ranks * align, largest)
            slots = _place(specs, filled, align, most)
            buckets: list[BucketLayout] = []
            cap = _caps(ranks * align, most)
            if whole:
                slots, edges = _place_whole(slots, ranks * align, *cap)
            else:
                edges = list(_cut(slots[-1].padded_end, ranks * align, *cap))
            starts = [slot.start for slot in slots]
            for start, end in edges:
                within = slots[max(bisect_right(starts, start) - 1, 0) : bisect_left(starts, end)]
                names = tuple(specs[piece.parameter].name for piece in _pieces(within, start, end))
                index = next_bucket if trainable else -1
                buckets.append(BucketLayout(index, len(flat_buffers), start, end, ranks, names, replicas, row))
                next_bucket += trainable
            flat_buffers.append(
                FlatBufferLayout(
                    len(flat_buffers), unit, dtype, itemsize, trainable, tuple(slots), tuple(buckets), family
                )
            )
    return Layout(tuple(specs), tuple(flat_buffers), ranks, replicas)


def _cut_into_rows(spec: ParameterSpec, ranks: int, align: int) -> bool:
    """Whether slices are cut between rows of ``spec`` ([Note: Rows])."""
    return bool(spec.row) and 4 * ranks * math.lcm(align, spec.row) <= spec.numel


def _is_alone(item: tuple[tuple[str, int, bool, int, int], list[int]]) -> bool:
    """Embeddings are where backward ends."""
    return item[0][-1] >= 0


def _place(specs: list[ParameterSpec], order: list[int], align: int, bucket_elements: int) -> list[Slot]:
    """Slots in ``order``; among parameters that fill about one bucket, those of one optimizer group lie together."""
    slots: list[Slot] = []
    chunk: list[int] = []
    filled, cursor = 0, 0
    for position, index in enumerate(order):
        chunk.append(index)
        filled += specs[index].numel
        if filled < bucket_elements and position + 1 < len(order):
            continue
        for member in sorted(chunk, key=lambda i: specs[i].group):
            numel = specs[member].numel
            padded_end = cursor + -(-numel // align) * align
            slots.append(Slot(member, cursor, numel, padded_end))
            cursor = padded_end
        chunk, filled = [], 0
    if cursor == 0:
        raise InternalError(f"parameters without elements cannot be laid out alone: {[specs[i].name for i in order]}")
    return slots


def _not_tiny(cap: int, quantum: int, largest: int) -> int:
    """``cap``, or more where a parameter has ``largest`` elements ([Note: Tiny buckets])."""
    return max(cap, min(largest, FIRST_BUCKET_ELEMENTS)) if largest > MOST_PIECES * max(cap, quantum) else cap


def _caps(quantum: int, cap: int) -> tuple[int, int]:
    """Elements of the first bucket, short to start early, and of the others, at most: multiples of ``quantum``."""
    cap = max(cap // quantum, 1) * quantum
    return min(cap, max(FIRST_BUCKET_ELEMENTS // quantum, 1) * quantum), cap


def _cut(length: int, quantum: int, first: int, cap: int) -> Iterator[tuple[int, int]]:
    """Cut [0, length) at multiples of ``quantum``, no longer than ``first`` and ``cap``.

    The last bucket is rounded up to ``quantum``.
    """
    start, size = 0, first
    while start < length:
        end = min(start + size, -(-length // quantum) * quantum)
        yield start, end
        start, size = end, cap


def _place_whole(slots: Sequence[Slot], quantum: int, first: int, cap: int) -> tuple[list[Slot], list[tuple[int, int]]]:
    """``slots`` moved so that no bucket ends inside of one, and the buckets: no longer than ``first`` and ``cap``, but
    for one slot alone."""
    placed: list[Slot] = []
    edges: list[tuple[int, int]] = []
    start, size = 0, first
    for slot in slots:
        begin, padded = placed[-1].padded_end if placed else 0, slot.padded_end - slot.start
        if begin > start and begin + padded > start + size:
            end = -(-begin // quantum) * quantum
            placed[-1] = replace(placed[-1], padded_end=end)
            edges.append((start, end))
            start, size, begin = end, cap, end
        placed.append(replace(slot, start=begin, padded_end=begin + padded))
    edges.append((start, -(-placed[-1].padded_end // quantum) * quantum))
    return placed, edges
