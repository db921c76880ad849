"""``shardengine.monitors.Monitor``, which is `engine/monitors.py`'s."""

from shardengine.engine import Monitor

__all__ = ["Monitor"]
