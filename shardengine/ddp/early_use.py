"""Using gradients before the backward that completes them is over.

[Note: Final gradients] Whether a complete gradient is the last word is known after the backward: a parameter may get
a late one. So the window before must have had none, on any rank. If one comes in spite of that, no rank can go on with
the window: some may have used what it should have been added to. From the first use on no other backward may follow.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shardengine.ddp.gradient_bucket import GradientBucket
from shardengine.errors import UsageError


@dataclass
class EarlyUse:
    """Who uses gradients early, and whether somebody has, in this window.

    user: called with each bucket whose gradient is complete; says whether it uses that, which must then stay as it is ·
    finish: returns when the user reads no gradient any more · predictable: there was no late gradient in the window
    before, on any rank.
    """

    user: Callable[[GradientBucket], bool] | None = None
    finish: Callable[[], None] = lambda: None
    used: bool = False
    predictable: bool = False

    def offer(self, state: GradientBucket) -> None:
        """The gradient of ``state`` is complete."""
        if self.user is not None and self.predictable and state.earlier is None:
            self.used |= self.user(state)

    def require_none(self, what: str) -> None:
        """``UsageError`` where some gradients of the window are used already. what: came too late."""
        if self.used:
            raise UsageError(
                f"{what} after the window's last backward, in which some buckets were stepped "
                "(offload_optimizer.step_in_backward): expected engine.step() first; or set that key to false"
            )

    def note(self, *, late: bool) -> None:
        """Whether some rank had late gradients; ``UsageError``, on all ranks, where that could not be foreseen."""
        predicted, self.predictable = self.predictable, not late
        if late and predicted and self.user is not None:
            raise UsageError(
                "a parameter got a second gradient in one backward, for the first time in this run, and "
                "offload_optimizer.step_in_backward had stepped with what came before: expected a module that is "
                "called twice under re-entrant checkpointing to be so from the first step on. Set that key to false, "
                "and load a checkpoint"
            )
