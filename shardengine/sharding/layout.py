"""The places of parameters in memory. Owns every offset, every padding and every rank slice; integers only.

Must not know: devices, tensors, process groups. No other file computes an offset.

    flat buffer   one storage per unit and bucket key (dtype, trainable, family: the optimizer's states per element)
    bucket        a range of a flat buffer that is communicated together; its length is a multiple of ranks * alignment
    slot          the place of one parameter in its flat buffer
    slice         rank r's part of a bucket: [start + r * length / ranks, start + (r + 1) * length / ranks)

On a hybrid mesh of M shard groups with L ranks each, the slices of ranks with the same place p in their groups lie
together. The slices of groups 0, 1, … one after the other make slice p of L. This is a group's slice, the same for all
groups. So rank r = g · L + p has slice number p · M + g.

Example: two parameters of 20 and 7 fp32 elements, 2 ranks, buckets of 32 elements (alignment 16):

    flat     0               16              32              48              64
    buffer   |a a a a a a a a|a a a a . . . .|b b b b b b b .|. . . . . . . .|
    slots    a: [0, 20) padded to 32          b: [32, 39) padded to 48
    buckets  bucket 0: [0, 32)                bucket 1: [32, 64)
    slices   rank 0: [0, 16)  rank 1: [16,32) rank 0: [32,48) rank 1: [48, 64)

[Note: Alignment] Every parameter, slice and bucket starts at a multiple of 16 elements, and at a multiple of the bytes
that the device's libraries align to (``Platform.alignment``: 64 on a CPU). Alignment makes results independent of the
layout: fused CPU optimizer kernels and small matrix products give other bits in their scalar tails and at other
offsets, and cuBLAS may choose another algorithm. If states are kept in blocks of 256 elements with a scale each,
trainable parameters start at multiples of 256, so that no cut goes through a block. Padding is zero, belongs to the
layout, and is counted in every formula.

[Note: Tiny buckets] A bucket size far below the size of a parameter would split it into hundreds of collectives. So if
a parameter of a flat buffer has more than ``MOST_PIECES`` times as many elements as a bucket, the buckets of that flat
buffer may be as large as the parameter, up to ``FIRST_BUCKET_ELEMENTS``.

[Note: Rows] A parameter with sparse gradients has a flat buffer of its own, so that its buckets hold nothing else. Its
slices are cut between rows, so that each row has one owner. If the padding for that might exceed a quarter of the
parameter, it lies among the other parameters.
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
"""The alignment of a CPU."""
ALIGN_ELEMENTS = 16
FIRST_BUCKET_ELEMENTS = 262_144
MOST_PIECES = 8


@dataclass(frozen=True)
class ParameterSpec:
    """The facts about one parameter that the layout needs.

    - names: all names of a tied parameter, in the order of registration.
    - group: the index of its optimizer group, -1 if no optimizer steps it.
    - unit: the index of its unit; 0 is the root.
    - order: its dimensions from the outermost in memory to the innermost; () for its own order. Offsets in a flat
      buffer count elements in memory order, so channels_last weights keep their strides.
    - number: the number of its first element among the elements of all parameters of the model, the same in every
      layout.
    - came: its place in the order of gradients.
    - sparse: few rows of its gradient are not zero.
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
        """Elements of a row, which are contiguous in memory; 0 if rows are not used ([Note: Rows])."""
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
    """Elements [start, start + numel) of a flat buffer belong to ``parameter``; its padding ends at ``padded_end``."""

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
    """Elements [start, end) of a flat buffer. ``index`` numbers the trainable buckets in launch order; -1: frozen.

    names: of the parameters that overlap it · replicas: shard groups of the ranks · row: elements of a row, if the
    bucket consists of rows of one parameter and few of them have a gradient; else 0.
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
        """A name for error messages."""
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
        """The whole bucket, in coordinates of the flat buffer."""
        return self.start, self.end

    def interval_of_rank(self, placement: Placement, rank: int) -> tuple[int, int]:
        """The elements that ``rank`` holds of a tensor with ``placement``, in coordinates of the flat buffer."""
        return self.slice_at(placement, self.slice_number_of_rank(placement, rank))

    def slice_at(self, placement: Placement, number: int) -> tuple[int, int]:
        """Slice ``number``, counted in the order of the elements, in coordinates of the flat buffer."""
        length = self.sizes[placement]
        first = self.start + number * length
        return first, first + length

    def slice_number_of_rank(self, placement: Placement, rank: int) -> int:
        """The number of the slice that ``rank`` holds, counted in the order of the elements."""
        group, place = divmod(rank, self.ranks // self.replicas)
        return {Axis.ALL: place * self.replicas + group, Axis.INSIDE: place, None: 0}[placement.sharded_over]

    @cached_property
    def sizes(self) -> dict[Placement, int]:
        """Elements that one rank holds of a tensor with each placement."""
        return {each: self.length // each.slices(self.ranks, self.replicas) for each in Placement}


@dataclass(frozen=True)
class FlatBufferLayout:
    """One flat storage: the slots of a unit's parameters that share a bucket key, cut into buckets.

    family: a number for the kind of optimizer state of each element.
    """

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
        """The starts of all slots, ascending."""
        return tuple(slot.start for slot in self.slots)

    def slots_within(self, start: int, end: int) -> tuple[Slot, ...]:
        """The slots whose elements or padding overlap [start, end), found by bisection."""
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
        """The parts of parameters in ``bucket``, without padding, in order. They are cached for every step."""
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
        """Cut ``interval`` (coordinates of the flat buffer) at changes of ``label(parameter)``; label None is left out.

        Neighbours with equal labels are merged across their padding, so a whole bucket of one optimizer group is one
        segment. Starts and ends are multiples of the alignment ([Note: Alignment]); padding belongs to its parameter's
        segment.
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
        """Elements of the trainable, or of the frozen, flat buffers, padding included."""
        return sum(flat_buffer.length for flat_buffer in self.flat_buffers if flat_buffer.trainable is trainable)


@dataclass(frozen=True)
class Cuts:
    """The places at which buckets of trainable parameters may be cut.

    elements: multiples of this number, if states or messages are made in blocks · whole: never inside a parameter.
    """

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

    families: of each optimizer group; if empty, all groups are one family · replicas: shard groups of the ranks.

    Only two rules exceed the cap: a bucket has at least one aligned slice per rank (or one parameter, see ``Cuts``),
    and is not far smaller than a parameter ([Note: Tiny buckets]). Flat buffers come in the order that backward is
    expected to fill them: last unit first, the root last. Inside, parameters come in the order of their gradients
    (``came``), or in reverse registration order if that is not known.
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
    """Sorts such flat buffers last: they hold embeddings, which backward reaches last."""
    return item[0][-1] >= 0


def _place(specs: list[ParameterSpec], order: list[int], align: int, bucket_elements: int) -> list[Slot]:
    """Make slots in ``order``.

    Among parameters that fill about one bucket, those of one optimizer group lie together.
    """
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
    """``cap``, or more if a parameter has ``largest`` elements ([Note: Tiny buckets])."""
    return max(cap, min(largest, FIRST_BUCKET_ELEMENTS)) if largest > MOST_PIECES * max(cap, quantum) else cap


def _caps(quantum: int, cap: int) -> tuple[int, int]:
    """The largest numbers of elements of the first bucket and of the others, as multiples of ``quantum``.

    The first bucket is short, so that its collective starts early.
    """
    cap = max(cap // quantum, 1) * quantum
    return min(cap, max(FIRST_BUCKET_ELEMENTS // quantum, 1) * quantum), cap


def _cut(length: int, quantum: int, first: int, cap: int) -> Iterator[tuple[int, int]]:
    """Cut [0, length) at multiples of ``quantum``.

    The first bucket has at most ``first`` elements, the others at most ``cap``. The last one is rounded up to
    ``quantum``.
    """
    start, size = 0, first
    while start < length:
        end = min(start + size, -(-length // quantum) * quantum)
        yield start, end
        start, size = end, cap


def _place_whole(slots: Sequence[Slot], quantum: int, first: int, cap: int) -> tuple[list[Slot], list[tuple[int, int]]]:
    """Move ``slots`` so that no bucket ends inside one. Returns them and the buckets.

    Buckets have at most ``first`` and ``cap`` elements, except one that holds a single slot.
    """
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
