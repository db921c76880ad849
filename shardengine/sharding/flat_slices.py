"""Elements of parameters' tensors by name and position, independent of layouts: found in buckets, cut, copied, joined.

Must not know: the ranks that hold them, files, collectives.

Two layouts have only the names of parameters and the order of their elements in memory in common. So a flat slice does
not mention buckets. State moves between layouts, into checkpoints and to the user as flat slices.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from shardengine.sharding.layout import BucketLayout, Layout, ParameterSpec

WEIGHT, BUFFER = "weight", "buffer"
"""Keys of flat slices other than optimizer states."""


class FlatSlice(NamedTuple):
    """Elements [first, end) of a tensor of parameter ``name``, in memory order. values: a flat view of them.

    key: "weight", "gradient", "master", the name of an optimizer state, or "buffer". A module's buffer keeps its shape
    and is never cut. per: the number of parameter elements for each element of this tensor, more than 1 for the scales
    of blocks; 0 for a tensor that is kept of the parameter as a whole, which is never cut.
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
        """Its elements in [first, end); there may be none."""
        first, end = max(first, self.first), min(end, self.end)
        values = self.values[first - self.first : max(end - self.first, 0)]
        return FlatSlice(self.name, self.key, first, values, self.per)

    def share(self, first: int, end: int) -> FlatSlice:
        """The elements that belong to elements [first, end) of the parameter; these bounds must not cut a block."""
        return self.cut(first // self.per, -(-end // self.per))


def slices_of(
    layout: Layout, bucket: BucketLayout, interval: tuple[int, int], tensors: Mapping[str, Tensor]
) -> Iterator[FlatSlice]:
    """Yield the contents of ``tensors``, by key, as flat slices.

    Each tensor holds ``interval`` (coordinates of the flat buffer) of ``bucket``. If a tensor has fewer elements than
    the interval, each of them belongs to several elements of the parameter.
    """
    whole = interval[1] - interval[0]
    pers = {key: whole // max(flat.numel(), 1) for key, flat in tensors.items()}
    for piece in layout.pieces_within(bucket, interval):
        start, end = piece.start - interval[0], piece.end - interval[0]
        name = layout.parameters[piece.parameter].name
        for key, flat in tensors.items():
            per = pers[key]
            yield FlatSlice(name, key, piece.offset // per, flat[start // per : -(-end // per)], per)


class Targets:
    """Flat slices to copy into."""

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
    """Copy the slices of parameters in ``specs``, by name, into ``full``. Missing tensors are created on ``device``."""
    for part in slices:
        if part.name in specs:
            tensors = full.setdefault(part.name, {})
            if part.key not in tensors:
                tensors[part.key] = torch.empty(specs[part.name].numel, dtype=part.values.dtype, device=device)
            tensors[part.key][part.first : part.end].copy_(part.values)
