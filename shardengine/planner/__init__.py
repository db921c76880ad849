"""Bytes of an engine from integers alone, before anything exists (memory). Must not know: values, ranks at work."""

from __future__ import annotations

from shardengine.planner.memory import Footprint, outside_bytes, tell_choice, tell_window, wire_of

__all__ = [
    "Footprint",
    "outside_bytes",
    "tell_choice",
    "tell_window",
    "wire_of",
]
