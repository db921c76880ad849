"""Elements of parameters' tensors, by name and position in whatever layout: found in buckets, cut, copied, joined.

Must not know: which rank holds what, files, collectives.

Two layouts have nothing in common but the names of parameters and the order of their elements in memory. So a flat
slice says nothing of buckets: what moves between layouts, into checkpoints and to the user are flat slices.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from shardengine.sharding.layout import BucketLayout, Layout, ParameterSpec

WEIGHT, BUFFER = "weight", "buffer"
"""Keys of flat slices that are no optimizer state."""


class FlatSlice(NamedTuple):
    """Elements [first, end) of a tensor of parameter ``name``, in memory order. values: a view of them, flat.

    key: which of its tensors, "weight", "gradient", "master" or the name of an optimizer state; "buffer" for one of a
    module's, which alone keeps its shape and is never cut · per: elements of the parameter for each of these elements,
    which is more than 1 for the scales of blocks; 0: it is a tensor of its own, kept of the parameter as a whole, and
    never cut.
    """

    name: str
    key: str
    first: int
    values: Tensor
    per: int = 1

    @property
    def end(self) -> int:
        """One past the last element."""
        return self.first + self.values.numel()

    def cut(self, first: int, end: int) -> FlatSlice:
        """Those of its elements that lie in [first, end): there may be none."""
        first, end = max(first, self.first), min(end, self.end)
        values = self.values[first - self.first : max(end - self.first, 0)]
        return FlatSlice(self.name, self.key, first, values, self.per)

    def share(self, first: int, end: int) -> FlatSlice:
        """What belongs to elements [first, end) of the parameter, of which no block is cut."""
        return self.cut(first // self.per, -(-end // self.per))


def slices_of(
    layout: Layout, bucket: BucketLayout, interval: tuple[int, int], tensors: Mapping[str, Tensor]
) -> Iterator[FlatSlice]:
    """What ``tensors`` by key hold, each of which lies in ``interval`` (flat buffer coordinates) of ``bucket``; of one
    that has fewer elements, each is for so many of them."""
    whole = interval[1] - interval[0]
    pers = {key: whole // max(flat.numel(), 1) for key, flat in tensors.items()}
    for piece in layout.pieces_within(bucket, interval):
        start, end = piece.start - interval[0], piece.end - interval[0]
        name = layout.parameters[piece.parameter].name
        for key, flat in tensors.items():
            per = pers[key]
            yield FlatSlice(name, key, piece.offset // per, flat[start // per : -(-end // per)], per)


class Targets:
    """Flat slices that are written to."""

    def __init__(self, slices: Iterable[FlatSlice]) -> None:
        self._slices: dict[tuple[str, str], list[FlatSlice]] = {}
        for target in slices:
            self._slices.setdefault((target.name, target.key), []).append(target)

    def receive(self, source: FlatSlice) -> None:
        """Copy the elements of ``source`` that have a place here."""
        for target in self._slices.get((source.name, source.key), ()):
            common = target.cut(source.first, source.end)
            if common.values.numel():
                common.values.copy_(source.cut(common.first, common.end).values)


FullTensors = dict[str, dict[str, Tensor]]
"""Parameter's name → key → all elements of that tensor, in memory order."""


def join(
    slices: Iterable[FlatSlice], full: FullTensors, specs: Mapping[str, ParameterSpec], device: torch.device
) -> None:
    """Copy the slices of ``specs``' parameters, by name, into ``full``. A tensor is made on ``device`` at its first."""
    for part in slices:
        if part.name in specs:
            tensors = full.setdefault(part.name, {})
            if part.key not in tensors:
                tensors[part.key] = torch.empty(specs[part.name].numel, dtype=part.values.dtype, device=device)
            tensors[part.key][part.first : part.end].copy_(part.values)
