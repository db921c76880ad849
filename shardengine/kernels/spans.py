"""The parts of flat tensors that an operation works on: ``Spans``. Integers only; a device's copy is made once.

Must not know: buckets, layouts, the operation.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor


class Span(NamedTuple):
    """Elements [start, end) of a flat tensor. first: the number of its first element, which keys random bits."""

    start: int
    end: int
    first: int = 0


class Spans(tuple[Span, ...]):
    """Ascending spans that do not overlap. Made once per layout and used every step; ``table`` keeps its tensors."""

    aligned: bool
    """Whether each begins and ends at a multiple of 16 elements."""
    _tables: dict[tuple[torch.device, int], tuple[Tensor, Tensor]]

    def __new__(cls, spans: Iterable[tuple[int, int] | tuple[int, int, int]]) -> Spans:
        """spans: (start, end) or (start, end, first). Raises ValueError if they do not ascend."""
        made = super().__new__(cls, (Span(*span) for span in spans))
        edges = [edge for span in made for edge in span[:2]]
        if any(after < before for before, after in itertools.pairwise([0, *edges])):
            raise ValueError(f"Spans: expected ascending ones that do not overlap, got {list(made)}")
        made.aligned = all(edge % 16 == 0 for edge in edges)
        made._tables = {}
        return made

    @classmethod
    def whole(cls, count: int) -> Spans:
        """Return the span of a whole tensor, cached, so that its tables are made once per length."""
        return _whole(count)

    def table(self, device: torch.device, block: int) -> tuple[Tensor, Tensor]:
        """Return the tables for one launch over all spans: int64 [spans, 3] and int32 [blocks, 2] on ``device``.

        The first has a row (start, end, first) per span. The second has a row (span, block of the span) per ``block``
        elements; the last block of a span may have fewer.
        """
        found = self._tables.get((device, block))
        if found is None:
            rows = torch.tensor([tuple(span) for span in self], dtype=torch.int64, device="cpu").view(-1, 3)
            counts = (rows[:, 1] - rows[:, 0] + block - 1) // block
            owners = torch.repeat_interleave(torch.arange(len(self), device="cpu"), counts)
            within = torch.arange(len(owners), device="cpu") - (counts.cumsum(0) - counts)[owners]
            blocks = torch.stack([owners, within], dim=1).to(torch.int32)
            if device.type == "cuda":  # the host does not wait for a copy from pinned memory
                rows, blocks = rows.pin_memory(), blocks.pin_memory()
            found = (rows.to(device, non_blocking=True), blocks.to(device, non_blocking=True))
            self._tables[device, block] = found
        return found

    @property
    def elements(self) -> int:
        """The number of elements of all spans."""
        return sum(span.end - span.start for span in self)


@functools.lru_cache(maxsize=4096)
def _whole(count: int) -> Spans:
    return Spans([(0, count)])
