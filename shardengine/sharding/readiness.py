"""The time when buckets are full, for a given order of gradients, and so the gain of another layout. Integers only.

Must not know: how a gradient is delivered, launched or sent.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardengine.sharding.layout import FIRST_BUCKET_ELEMENTS, BucketLayout, Layout


def elements_earlier(old: Layout, new: Layout, arrival: Sequence[int]) -> int:
    """How much earlier, on average, an element is sent in ``new`` than in ``old``.

    The unit is the number of elements that arrive meanwhile. arrival: the trainable parameters in the order of their
    gradients.
    """
    came: dict[int, int] = {}
    total = 0
    for parameter in arrival:
        total += old.parameters[parameter].numel
        came[parameter] = total
    waited = [_waited(layout, came, total) for layout in (old, new)]
    return (waited[0] - waited[1]) // max(total, 1)


def is_worth_moving(old: Layout, new: Layout, arrival: Sequence[int]) -> bool:
    """Whether ``new`` sends at least half a bucket more behind computation. Changes within a bucket gain nothing."""
    longest = max((_elements(old, bucket) for bucket in old.buckets), default=0)
    least = max(longest, FIRST_BUCKET_ELEMENTS) // 2
    return elements_earlier(old, new, arrival) >= least


def _waited(layout: Layout, came: dict[int, int], total: int) -> int:
    """The sum over all elements of the number of elements that had arrived when they were sent."""
    waited = 0
    for bucket in layout.buckets:
        pieces = layout.pieces(bucket)
        ready = max((came.get(piece.parameter, total) for piece in pieces), default=total)
        waited += ready * _elements(layout, bucket)
    return waited


def _elements(layout: Layout, bucket: BucketLayout) -> int:
    """The elements of ``bucket`` without padding."""
    return sum(piece.end - piece.start for piece in layout.pieces(bucket))
