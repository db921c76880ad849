"""Why a unit's weights may not be given back now. Owns: what is remembered of its calls within a pass.

Must not know: units, when anything is gathered.
"""

from __future__ import annotations

import torch


class Hold:
    """Why a unit may not be resharded now ([Note: Holds])."""

    def __init__(self) -> None:
        self.depth = 0
        self.calls: set[int] = set()
        self.silent: set[int] = set()
        self.over: set[tuple[int, int]] = set()
        self.fired: set[int] = set()
        self.kept = False
        self.lent = False
        self.since = 0

    def finish(self, calls: set[int]) -> None:
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
