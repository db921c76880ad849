"""Which elements of a bucket are stepped together: those of one parameter group and step count.

Owns: spans by label, and their memory. Must not know: what a label means, who is stepped when.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardengine.kernels import Span, Spans
from shardengine.sharding import Bucket, Layout

Label = tuple[int, int]
"""A parameter group and a step count."""
_PATTERNS = 2
"""Ways to cut that are remembered: of what was stepped last, and of everything (``step_in_backward``)."""


class Segments:
    """Cuts what this rank steps of ``buckets`` into spans of one label. numbered: each element has a number of its own,
    so that spans are of single parameters."""

    def __init__(self, layout: Layout, buckets: Sequence[Bucket], *, numbered: bool) -> None:
        self._layout = layout
        self._buckets = buckets
        self._numbered = numbered
        self._made: dict[tuple[Label | None, ...], list[dict[Label, Spans]]] = {}

    def of(self, labels: Sequence[Label | None]) -> list[dict[Label, Spans]]:
        """Per bucket, its spans by label. labels: per parameter of the layout, None for what is not stepped.

        Labels change every step, the differences between their counts, and so the spans, almost never.
        """
        base = min((label[1] for label in labels if label is not None), default=0)
        pattern = tuple(None if label is None else (label[0], label[1] - base) for label in labels)
        if pattern not in self._made:
            if len(self._made) == _PATTERNS:
                self._made.clear()
            self._made[pattern] = [self._cut(bucket, pattern) for bucket in self._buckets]
        return [{(group, lag + base): spans for (group, lag), spans in cut.items()} for cut in self._made[pattern]]

    def _cut(self, bucket: Bucket, pattern: Sequence[Label | None]) -> dict[Label, Spans]:
        layout, (first, last) = bucket.layout, bucket.state_interval
        found: dict[Any, list[Span]] = {}
        if self._numbered:
            for piece in self._layout.pieces_within(layout, (first, last)):
                if (own := pattern[piece.parameter]) is not None:
                    number = self._layout.parameters[piece.parameter].number + piece.offset
                    found.setdefault(own, []).append(Span(piece.start - first, piece.end - first, number))
        else:
            for label, start, end in self._layout.segments(layout, (first, last), pattern.__getitem__):
                found.setdefault(label, []).append(Span(start - first, end - first))
        return {label: Spans(spans) for label, spans in found.items()}
