"""Whole matrices, assembled from the slices of all ranks, for the optimizers whose step needs them; and the way back.

Owns: which rank owns a matrix, which matrices travel together, and the messages. Must not know: the computation on a
matrix, weights, which parameters have a gradient.

[Note: Owners] Each matrix is solved by one rank, its owner, so that its elements meet as they would in one process: the
bits depend neither on how it is sliced nor on the number of ranks. Matrices travel in batches, in the order of their
buckets: one message to the owners, one back, of 2 bytes per element each. A batch is at least as large as the largest
bucket, and large enough that its largest matrix is no more than a rank's share. The work is estimated as shorter² ·
longer side. Inside a batch the matrices are assigned, the largest first, to the rank that has the least work so far.
While a batch is solved, the next one is on its way to its owners and the last one on its way back. If every rank steps
everything, an owner already has the whole matrix: only the way back is sent, to all.

[Note: Nothing is written before all is there] Owners see states as they were before the step. Nothing of the step is
written before every rank has received all results for its elements (2 bytes per element that it steps). So a failure of
a message changes nothing, and the rest of an update depends on no other rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from shardengine.comm import Chunks, Collectives, Named, Purpose, Work
from shardengine.kernels import Span
from shardengine.optim.arithmetic import OnMatrix
from shardengine.sharding import Layout, ParameterSpec, in_memory_order, shaped
from shardengine.stages import Axis, Placement

DTYPE = torch.bfloat16
"""The dtype of the messages."""


class Cut(NamedTuple):
    """Elements of a matrix that one rank steps. [start, end) counts the elements of bucket number ``bucket`` that the
    rank steps; the first of them is the matrix's element ``offset``."""

    bucket: int
    start: int
    end: int
    offset: int

    @property
    def length(self) -> int:
        """The number of elements."""
        return self.end - self.start


Effort = Callable[[ParameterSpec], int]
"""The cost of solving a parameter, up to a factor."""


def work_of(spec: ParameterSpec) -> int:
    """Return the cost of a matrix, in products per iteration."""
    return min(spec.shape) ** 2 * max(spec.shape)


def batches_of(specs: Mapping[int, ParameterSpec], ranks: int, least: int) -> list[list[int]]:
    """Return ``specs``, by number, split into batches in their order ([Note: Owners]). least: elements of a batch."""
    found: list[list[int]] = []
    total = largest = 0
    open_batch: list[int] = []
    for number, spec in specs.items():
        open_batch.append(number)
        total, largest = total + spec.numel, max(largest, spec.numel)
        if total >= max(least, ranks * largest):
            found.append(open_batch)
            open_batch, total, largest = [], 0, 0
    return [*found, open_batch] if open_batch else found


def owners_of(
    batches: Sequence[Sequence[int]], specs: Mapping[int, ParameterSpec], ranks: int, work: Effort = work_of
) -> dict[int, int]:
    """Return number of each matrix → the rank that owns it ([Note: Owners])."""
    found, load = dict[int, int](), [0] * ranks
    for batch in batches:
        for number in sorted(batch, key=lambda each: -work(specs[each])):
            owner = min(range(ranks), key=lambda rank: load[rank])
            load[owner] += work(specs[number])
            found[number] = owner
    return found


class MatrixPlan:
    """Batches and owners of the matrices of a layout, and the slices of each matrix that each rank steps.

    whole: per optimizer group, whether it is stepped by whole matrices · state: the placement of states · work: the
    cost of a matrix to its owner. Ranks are numbered along ``axis``: on a hybrid mesh each shard group does all of the
    work, with the same results.
    """

    def __init__(self, layout: Layout, whole: Sequence[bool], state: Placement, work: Effort = work_of) -> None:
        self.axis = state.sharded_over or Axis.ALL
        self.replicated = state is Placement.REPLICATED
        self.ranks = layout.ranks if self.replicated else state.slices(layout.ranks, layout.replicas)
        chosen = {number for number, spec in enumerate(layout.parameters) if spec.is_stepped and whole[spec.group]}
        self._cuts = dict[tuple[int, int], list[Cut]]()
        in_order: dict[int, ParameterSpec] = {}
        for bucket in layout.buckets:
            for rank in range(1 if self.replicated else self.ranks) if chosen else ():
                first, last = bucket.interval_of_rank(state, rank)
                for piece in layout.pieces_within(bucket, (first, last)):
                    if piece.parameter in chosen:
                        in_order.setdefault(piece.parameter, layout.parameters[piece.parameter])
                        cut = Cut(bucket.index, piece.start - first, piece.end - first, piece.offset)
                        self._cuts.setdefault((piece.parameter, rank), []).append(cut)
        self.specs = in_order
        self.batches = batches_of(in_order, self.ranks, max((bucket.length for bucket in layout.buckets), default=0))
        self.owners = owners_of(self.batches, in_order, self.ranks, work)

    def place_of(self, rank: int) -> int:
        """Return the number along ``axis`` of a global rank."""
        return rank % self.ranks

    def cuts(self, number: int, rank: int) -> list[Cut]:
        """Return the slices of matrix ``number`` that ``rank`` steps."""
        return self._cuts.get((number, 0 if self.replicated else rank), [])

    def messages(self, batch: Sequence[int], rank: int, *, owned: bool) -> list[list[tuple[int, Cut]]]:
        """Return the cuts in the messages between ``rank`` and each rank, in the order of ``batch``.

        owned: the slices that the other ranks step of the matrices of ``rank``; otherwise the slices that ``rank``
        steps of the matrices of each owner.
        """
        of_owner: list[list[int]] = [[] for _ in range(self.ranks)]
        for number in batch:
            of_owner[self.owners[number]].append(number)
        if not owned:
            return [[(m, cut) for m in numbers for cut in self.cuts(m, rank)] for numbers in of_owner]
        holders = [rank] if self.replicated else range(self.ranks)
        return [[(m, cut) for m in of_owner[rank] for cut in self.cuts(m, holder)] for holder in holders]

    def bytes_on_way(self, rank: int) -> int:
        """Return the peak bytes of the messages of ``rank``.

        These are the messages of three batches, and a matrix before and after it is solved.
        """
        sizes = []
        for batch in self.batches:
            kinds = (False,) if self.replicated else (False, True)
            parts = [part for owned in kinds for part in self.messages(batch, rank, owned=owned)]
            sizes.append(sum(cut.length for part in parts for _, cut in part))
        largest = max((spec.numel for spec in self.specs.values()), default=0)
        at_work = max((sum(sizes[first : first + 3]) for first in range(len(sizes))), default=0)
        return DTYPE.itemsize * (at_work + 2 * largest)

    def bytes_beside(self, rank: int) -> int:
        """Return the peak bytes that a step of ``rank`` needs in addition to its state.

        These are the messages and the results received.
        """
        stepped = sum(cut.length for number in self.specs for cut in self.cuts(number, rank))
        return self.bytes_on_way(rank) + DTYPE.itemsize * stepped

    def bytes_sent(self, rank: int) -> int:
        """Return the bytes that ``rank`` sends in a step if all matrices have a gradient."""
        elements = 0
        for batch in self.batches:
            if self.replicated:
                elements += sum(self.specs[m].numel for m in batch if self.owners[m] == rank) * (self.ranks - 1)
                continue
            for owned in (False, True):
                parts = self.messages(batch, rank, owned=owned)
                elements += sum(cut.length for other, part in enumerate(parts) if other != rank for _, cut in part)
        return DTYPE.itemsize * elements


Flats = tuple[Mapping[str, Tensor], Tensor | None]
"""A rank's tensors of a bucket, gradient included, and the gradient's factor."""
Read = Callable[[int], AbstractContextManager[Flats]]
"""Lends the ``Flats`` of a bucket, by its number, for reading."""


@dataclass
class _Batch:
    """Matrices in flight. here: the slices that this rank steps, by owner · owned: the slices that others step of this
    rank's matrices, by rank. Results replace inputs in both."""

    numbers: list[int]
    here: Tensor
    owned: Tensor
    work: Work


class Exchange:
    """Sends the matrices of one step to their owners and back. tasks: by number of the matrix."""

    def __init__(self, plan: MatrixPlan, collectives: Collectives, tasks: Mapping[int, OnMatrix], read: Read) -> None:
        self._plan = plan
        self._collectives = collectives
        self._rank, self._ranks = collectives.mesh.place_on(plan.axis)
        self._tasks = tasks
        self._read = read

    def run(self, new: Callable[[int], Tensor]) -> dict[int, Tensor]:
        """Return number of each bucket with matrices → the results for its elements; collective. new: makes that
        tensor."""
        found: dict[int, Tensor] = {}
        batches = [[m for m in batch if m in self._tasks] for batch in self._plan.batches]
        batches = [batch for batch in batches if batch]
        asked: _Batch | None = None
        answered: _Batch | None = None
        for batch in [*batches, None, None]:  # three are in flight ([Note: Owners])
            soon = None if batch is None else self._ask(batch)
            if asked is not None:
                self._answer(asked)
            if answered is not None:
                self._take(answered, found, new)
            asked, answered = soon, asked
        return found

    def _lengths(self, batch: Sequence[int], *, owned: bool) -> list[int]:
        """Return the elements of the message with each rank. owned: for matrices of this rank; otherwise for those of
        that rank."""
        return [
            sum(cut.length for _, cut in message) for message in self._plan.messages(batch, self._rank, owned=owned)
        ]

    def _places(self, batch: Sequence[int], *, owned: bool) -> Iterator[tuple[int, Cut, slice]]:
        """Yield matrix and cut of each part of such messages, and its place in the tensor of the messages."""
        start = 0
        for message in self._plan.messages(batch, self._rank, owned=owned):
            for number, cut in message:
                yield number, cut, slice(start, start + cut.length)
                start += cut.length

    def _ask(self, numbers: list[int]) -> _Batch:
        device, replicated = self._collectives.mesh.device, self._plan.replicated
        to_each = self._lengths(numbers, owned=False)
        here = torch.empty(sum(to_each), dtype=DTYPE, device=device)
        by_bucket: dict[int, list[tuple[int, Cut, slice]]] = {}
        for number, cut, place in self._places(numbers, owned=False):
            if not replicated or self._plan.owners[number] == self._rank:
                by_bucket.setdefault(cut.bucket, []).append((number, cut, place))
        for bucket, parts in sorted(by_bucket.items()):
            with self._read(bucket) as (flats, factor):
                for number, cut, place in parts:
                    entered = self._tasks[number].enter(flats, Span(cut.start, cut.end, cut.offset), factor=factor)
                    here[place].copy_(entered)
        if replicated:
            return _Batch(numbers, here, here.split(to_each)[self._rank], Work())
        from_each = self._lengths(numbers, owned=True)
        owned = torch.empty(sum(from_each), dtype=DTYPE, device=device)
        return _Batch(numbers, here, owned, self._deliver(numbers, here, to_each, owned, from_each))

    def _deliver(
        self, numbers: Sequence[int], full: Tensor, to_each: list[int], received: Tensor, from_each: list[int]
    ) -> Work:
        of_all = sum(self._plan.specs[m].numel for m in numbers) * DTYPE.itemsize
        parts = Chunks(full, to_each, received, from_each, of_all)
        return self._collectives.deliver(parts, self._named(numbers), Purpose.MATRICES, self._plan.axis)

    def _named(self, numbers: Sequence[int]) -> Named:
        return Named([self._plan.specs[m].name for m in numbers], "matrices")

    def _answer(self, batch: _Batch) -> None:
        batch.work.wait()
        parts: dict[int, list[tuple[int, Tensor]]] = {}
        for number, cut, place in self._places(batch.numbers, owned=True):
            parts.setdefault(number, []).append((cut.offset, batch.owned[place]))
        for number, pieces in parts.items():
            spec = self._plan.specs[number]
            whole = torch.empty(spec.numel, dtype=DTYPE, device=batch.owned.device)
            for offset, piece in pieces:
                whole[offset : offset + piece.numel()].copy_(piece)
            solved = self._tasks[number].solve(shaped(whole, spec))
            answer = in_memory_order(solved, spec).reshape(-1)
            for offset, piece in pieces:
                piece.copy_(answer[offset : offset + piece.numel()])
        lengths = [self._lengths(batch.numbers, owned=owned) for owned in (True, False)]
        if self._plan.replicated:
            work = self._collectives.share(batch.here, lengths[1], self._named(batch.numbers), Purpose.MATRICES)
        else:
            work = self._deliver(batch.numbers, batch.owned, lengths[0], batch.here, lengths[1])
        batch.work = work

    def _take(self, batch: _Batch, found: dict[int, Tensor], new: Callable[[int], Tensor]) -> None:
        batch.work.wait()
        for _, cut, place in self._places(batch.numbers, owned=False):
            if cut.bucket not in found:
                found[cut.bucket] = new(cut.bucket)
            found[cut.bucket][cut.start : cut.end].copy_(batch.here[place])
