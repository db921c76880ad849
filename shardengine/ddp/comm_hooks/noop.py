"""Sends nothing, to measure a step without the communication of gradients. Ranks train on their own gradients."""

from __future__ import annotations

from shardengine.ddp.comm_hooks.hook import CommHook


class NoopHook(CommHook):
    """For measurements only; each slice has its owner rank's gradient, not the mean."""

    name = "noop"
    sends = False

    def bytes_of(self, elements: int) -> int:
        """Return 0."""
        return 0
