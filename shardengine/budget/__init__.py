"""Bytes of an engine from layout, dtypes and letters (memory), sizes of buckets from a fit of the group (bucket_sizes).

Must not know: the values of tensors, ranks at work.
"""

from __future__ import annotations

from shardengine.budget.bucket_sizes import (
    ALONE,
    HIDDEN_BY_CPU,
    BucketSizes,
    bucket_elements,
    prefetch_elements,
    settled,
)
from shardengine.budget.memory import Footprint, outside_bytes, tell_choice, tell_window, wire_of

__all__ = [
    "ALONE",
    "HIDDEN_BY_CPU",
    "BucketSizes",
    "Footprint",
    "bucket_elements",
    "outside_bytes",
    "prefetch_elements",
    "settled",
    "tell_choice",
    "tell_window",
    "wire_of",
]
