"""Shard groups that step apart from each other for a while: post-local SGD, and gossip.

Owns: in which windows they do, when they are averaged, whether they differ now, who exchanges with whom. Integers only.
Must not know: gradients, weights, how anything is averaged.

[Note: Stepping apart] On a hybrid mesh shard groups are replicas of each other, because gradients are added up inside
of the groups and then across. Where the config says so ("comm_hook"), from step ``start_step`` on

    post_local_sgd   nothing goes across: each group steps with the mean over its own ranks
    gossip           each group steps with the mean of its gradient and of one other group's, another one in each step

and after every ``period`` steps the weights that optimizers step, and their states, become the mean over the groups.
Between two averages the groups differ. Then a rank has its own group's weights, gradient and norm, and nothing may
bring together what is of different groups: calls that give weights or states to the outside, or write rank 0's
everywhere, ask for ``engine.average_replicas()`` first (step_state: ``NEEDS``).

States are averaged as well, because otherwise groups would go on from one place with different moments: they would
not be replicas, and what a checkpoint has of the states would be one group's. Whether a step is skipped is the same on
all ranks: where the norm over all of them is not finite, it is everybody's.

Source: Lin et al., "Don't Use Large Mini-Batches, Use Local SGD", arXiv 1808.07217 (post-local SGD); Daily et al.,
"GossipGraD", arXiv 1803.05880 (partners by dissemination).
"""

from __future__ import annotations

from dataclasses import dataclass

from shardengine.config import STEPPING_APART, CommHookConfig
from shardengine.errors import InternalError


@dataclass(frozen=True)
class ReplicaStep:
    """How a step is made. apart: each group steps with its own gradient · averaged: the groups are averaged after it ·
    exchanges: a group's gradient is its own and another one's."""

    apart: bool = False
    averaged: bool = False
    exchanges: bool = False


class Replicas:
    """The shard groups of a mesh, seen from the one that this rank is in.

    step: how the window's step will be made · last: how the last one was · since: steps since the groups were the same,
    0: they are.
    """

    def __init__(self, hook: CommHookConfig | None = None, rank: int = 0, ranks: int = 1, groups: int = 1) -> None:
        """groups: of the ``ranks``."""
        self.name = hook.name if hook is not None and hook.name in STEPPING_APART and groups > 1 else ""
        params = hook.filled if hook is not None and self.name else {"start_step": 0, "period": 0}
        self._start, self._period = params["start_step"], params["period"]
        self._size = ranks // groups
        self._group, self._groups = rank // self._size, groups
        self.since = 0
        self._steps = 0
        self.last: ReplicaStep | None = None
        self.foresee(0)

    def foresee(self, steps: int) -> None:
        """A window begins after so many steps."""
        self._steps = steps
        apart = bool(self.name) and steps >= self._start
        averaged = apart and self._period > 0 and (steps + 1 - self._start) % self._period == 0
        self.step = ReplicaStep(apart, averaged, apart and self.name == "gossip")

    @property
    def apart(self) -> bool:
        """Whether each group steps with a gradient of its own in this window."""
        return self.step.apart

    @property
    def part(self) -> tuple[int, int]:
        """Where groups step apart: of how many groups each one steps with the mean gradient, and how many there are."""
        return 2 if self.name == "gossip" else 1, self._groups

    @property
    def rows(self) -> slice:
        """Of something that every rank has sent, in rank order: that of the ranks that share this one's gradient."""
        return slice(self._group * self._size, (self._group + 1) * self._size) if self.apart else slice(None)

    @property
    def partners(self) -> tuple[int, int]:
        """The group that is sent this one's gradient, and the one whose gradient comes, in this window: as many groups
        further, or before, as the power of 2 whose turn it is."""
        if self._groups < 2:
            raise InternalError("a group exchanges gradients, and there is no other")
        distance = 2 ** (self._steps % (self._groups - 1).bit_length())
        return (self._group + distance) % self._groups, (self._group - distance) % self._groups

    def note_step(self, steps: int) -> None:
        """The window's step was made, the number ``steps`` of all; the next window begins."""
        self.last = self.step
        self.since = (
            self.since + 1 if self.apart and not self.step.averaged else 0 if self.step.averaged else self.since
        )
        self.foresee(steps)

    def note_alike(self) -> None:
        """Weights and states are the same in all groups."""
        self.since = 0
