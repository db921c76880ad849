"""Where in flat tensors an operation works: ``Spans``. Integers only; a device's copy is made once.

Must not know: buckets, layouts, what is computed.
"""

from __future__ import annotations

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

    _tables: dict[tuple[torch.device, int], tuple[Tensor, Tensor]]

    def __new__(cls, spans: Iterable[tuple[int, int] | tuple[int, int, int]]) -> Spans:
        """spans: (start, end) or (start, end, first)."""
        made = super().__new__(cls, (Span(*span) for span in spans))
        made._tables = {}
        return made

    def table(self, device: torch.device, block: int) -> tuple[Tensor, Tensor]:
        """For one launch over all spans, cut into blocks: int64 [spans, 3] and int32 [blocks, 2] on ``device``.

        The first has a row (start, end, first) per span, the second a row (span, block of the span) per ``block``
        elements, the last ones of a span being fewer.
        """
        found = self._tables.get((device, block))
        if found is None:
            rows = torch.tensor([tuple(span) for span in self], dtype=torch.int64).view(-1, 3)
            counts = (rows[:, 1] - rows[:, 0] + block - 1) // block
            owners = torch.repeat_interleave(torch.arange(len(self)), counts)
            within = torch.arange(len(owners)) - (counts.cumsum(0) - counts)[owners]
            found = (rows.to(device), torch.stack([owners, within], dim=1).to(torch.int32).to(device))
            self._tables[device, block] = found
        return found

    @property
    def elements(self) -> int:
        """Elements in all spans."""
        return sum(span.end - span.start for span in self)
