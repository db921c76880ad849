"""Nothing is sent: what a step takes without the communication of gradients. Ranks train on their own gradients."""

from __future__ import annotations

from shardengine.ddp.comm_hooks.hook import CommHook


class NoopHook(CommHook):
    """To measure with; each slice has its owner's gradient, not the mean."""

    name = "noop"
    sends = False

    def bytes_of(self, elements: int) -> int:
        """None."""
        return 0
