"""Using gradients before the backward that completes them is over.

[Note: Final gradients] Whether a complete gradient is the last word is known after the backward: a parameter may get
a late one, another backward may follow. So the window before must have had neither, on any rank. If a late one comes in
spite of that, no rank can go on with the window: some may have used what it should have been added to.

Which buckets are used depends on what a rank has used of the model, and after a failure on when it came. What a user
may do must not, or one rank would refuse what another does. So from the beginning of a backward whose gradients may be
used, the window can only be stepped, whether some are or not; if that backward fails, ``engine.reset()`` knows how far
it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from shardengine.ddp.gradient_bucket import GradientBucket
from shardengine.errors import UsageError


@dataclass
class EarlyUse:
    """Who uses gradients early, and when they may be used.

    user: called with each bucket whose gradient is complete; what it uses must stay as it is · finish: returns when the
    user reads no gradient any more · begun: the window's last backward has begun, and gradients of it may be used ·
    predictable: the window before had no late gradient and no second backward at its end, on any rank.
    """

    user: Callable[[GradientBucket], None] | None = None
    finish: Callable[[], None] = lambda: None
    begun: bool = False
    predictable: bool = False

    def begin(self, *, final: bool) -> None:
        """A backward begins. final: the window ends with it."""
        self.require_none("another backward")
        self.begun = final and self.predictable and self.user is not None

    def offer(self, state: GradientBucket) -> None:
        """The gradient of ``state`` is complete."""
        if self.begun and self.user is not None and state.earlier is None:
            self.user(state)

    def end(self) -> None:
        """The window is stepped or dropped: nothing is offered, and nobody reads a gradient, any more."""
        self.begun = False
        self.finish()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Nothing is offered in a backward that begins inside."""
        user, self.user = self.user, None
        try:
            yield
        finally:
            self.user = user

    def require_none(self, what: str) -> None:
        """``UsageError`` where gradients of the window may have been used. what: came too late."""
        if self.begun:
            raise UsageError(
                f"{what} after the window's last backward, in which buckets are stepped "
                "(offload_optimizer.step_in_backward): expected engine.step() first, or, where that backward raised, "
                "engine.reset() on every rank; or set that key to false"
            )

    def note(self, *, late: bool, again: bool) -> None:
        """Whether some rank had late gradients, and whether this was not the window's first last backward.

        ``UsageError``, on all ranks, where a late one could not be foreseen and gradients may have been used.
        """
        self.predictable = not (late or again)
        if late and self.begun:
            raise UsageError(
                "a parameter got a second gradient in one backward, for the first time in this run, and "
                "offload_optimizer.step_in_backward may have stepped with what came before: expected a module that is "
                "called twice under re-entrant checkpointing to be so from the first step on. Set that key to false, "
                "and call engine.reset() on every rank, which says whether a checkpoint must be loaded"
            )
