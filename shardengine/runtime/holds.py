"""Why a unit's weights may not be given back now. Owns: what is remembered of its calls within a pass.

Must not know: units, when anything is gathered.
"""

from __future__ import annotations

import torch

from shardengine.runtime.calls import Call


class Hold:
    """Why a unit may not be resharded now (schedule: [Note: Holds]).

    depth: forwards of it that are open · calls: those whose backward has begun and is not over · silent: those of them
    whose end nobody will announce · over: whose backward is over, with the run of autograd in which it was · fired: its
    parameters that got their gradient since it is held in backward · kept: until the window ends · lent: a view of its
    weights was handed out · since: when the open forward or backward began, for the trace · forward_only: its backward
    does not read its weights, always (an embedding's).
    """

    def __init__(self) -> None:
        self.depth = 0
        self.calls: set[Call] = set()
        self.silent: set[Call] = set()
        self.over: set[tuple[Call, int]] = set()
        self.fired: set[int] = set()
        self.kept = False
        self.lent = False
        self.since = 0
        self.forward_only = False

    def finish(self, calls: set[Call]) -> None:
        """The backwards of ``calls`` are over; a late announcement in the same run of autograd means nothing."""
        self.over |= {(call, torch._C._current_graph_task_id()) for call in calls}
        self.calls -= calls

    def clear(self) -> None:
        """The pass is over."""
        self.depth = 0
        self.calls.clear()
        self.silent.clear()
        self.over.clear()
        self.fired.clear()
        self.kept = self.lent = False


class Turn:
    """The unit whose forward ended last, which waits for what comes: another unit's turn, or its own backward.

    waiting: it, while it waits · last: the one with which the last pass turned from forward to backward.
    """

    def __init__(self) -> None:
        self.waiting: int | None = None
        self.last: int | None = None

    def take(self) -> int | None:
        """What has waited, and does so no longer."""
        waiting, self.waiting = self.waiting, None
        return waiting
