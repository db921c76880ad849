"""``shardengine.monitors.Monitor``, the class of `engine/monitors.py`."""

from shardengine.engine import Monitor

__all__ = ["Monitor"]
