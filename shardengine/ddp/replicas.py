"""Shard groups whose replicas diverge for a while: post-local SGD, and gossip.

Owns: the accumulation windows with diverged replicas, when replicas are averaged, whether they differ now, which groups
exchange. Integers only. Must not know: gradients, weights, how anything is averaged.

[Note: Diverged replicas] On a hybrid mesh shard groups are replicas of each other, because gradients are added up
inside the groups and then across. If the config requests it ("comm_hook"), from step ``start_step`` on

    post_local_sgd   nothing goes across: each group steps with the mean over its own ranks
    gossip           each group steps with the mean of its gradient and of one other group's, another one in each step

and after every ``period`` steps the weights that optimizers step, and their states, become the mean over the groups.
Between two averages the replicas diverge. Then a rank has its own group's weights, gradient and norm, and values of
different groups must not be mixed. So calls that return weights or states, or write rank 0's everywhere, require
``engine.average_replicas()`` first (step_state: ``NEEDS``).

States are averaged as well, because otherwise groups would continue from the same weights with different moments: they
would not be replicas, and a checkpoint would have the states of one group. All ranks skip the same steps: if the norm
over all of them is not finite, all of them use it.

Source: Lin et al., "Don't Use Large Mini-Batches, Use Local SGD", arXiv 1808.07217 (post-local SGD); Daily et al.,
"GossipGraD", arXiv 1803.05880 (partners by dissemination).
"""

from __future__ import annotations

from dataclasses import dataclass

from shardengine.config import STEPPING_APART, CommHookConfig
from shardengine.errors import InternalError


@dataclass(frozen=True)
class ReplicaStep:
    """How the shard groups make a step.

    averaged: the groups are averaged after it · exchanges: a group's gradient is the mean of its own and another one's.
    """

    apart: bool = False
    """Replicas diverge: each group steps with its own gradient."""
    averaged: bool = False
    exchanges: bool = False


class Replicas:
    """The shard groups of a mesh, seen from the one that this rank is in.

    step: how the window's step will be made · last: how the last one was made · since: the number of steps since the
    groups were the same; 0: they are.
    """

    def __init__(self, hook: CommHookConfig | None = None, rank: int = 0, ranks: int = 1, groups: int = 1) -> None:
        """groups: the number of shard groups of the ``ranks``."""
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
        """Set ``step`` for the accumulation window that begins after ``steps`` steps."""
        self._steps = steps
        apart = bool(self.name) and steps >= self._start
        averaged = apart and self._period > 0 and (steps + 1 - self._start) % self._period == 0
        self.step = ReplicaStep(apart, averaged, apart and self.name == "gossip")

    @property
    def apart(self) -> bool:
        """Whether each group steps with a gradient of its own in this accumulation window."""
        return self.step.apart

    @property
    def part(self) -> tuple[int, int]:
        """With diverged replicas: how many groups' gradients each step averages, and the number of all groups."""
        return 2 if self.name == "gossip" else 1, self._groups

    @property
    def rows(self) -> slice:
        """The slice, of rows by rank, of the ranks that share this one's gradient."""
        return slice(self._group * self._size, (self._group + 1) * self._size) if self.apart else slice(None)

    @property
    def partners(self) -> tuple[int, int]:
        """The group that gets this one's gradient, and the one that sends its own, in this accumulation window.

        They are this group's number plus and minus a power of 2, which changes in each step.
        """
        if self._groups < 2:
            raise InternalError("a group exchanges gradients, and there is no other")
        distance = 2 ** (self._steps % (self._groups - 1).bit_length())
        return (self._group + distance) % self._groups, (self._group - distance) % self._groups

    def note_step(self, steps: int) -> None:
        """Note that the window's step was made, which is number ``steps`` of all; the next window begins."""
        self.last = self.step
        self.since = (
            self.since + 1 if self.apart and not self.step.averaged else 0 if self.step.averaged else self.since
        )
        self.foresee(steps)

    def note_alike(self) -> None:
        """Note that all groups have the same weights and states."""
        self.since = 0
