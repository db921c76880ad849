"""Bytes of an engine from layout, dtypes and letters (memory). Must not know: the values of tensors, ranks at work."""

from __future__ import annotations

from shardengine.planner.memory import Footprint, outside_bytes, tell_choice, tell_window, wire_of

__all__ = [
    "Footprint",
    "outside_bytes",
    "tell_choice",
    "tell_window",
    "wire_of",
]
