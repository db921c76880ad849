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

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from shardengine.ddp.gradient_bucket import GradientBucket
from shardengine.ddp.step_state import Phase, StepState
from shardengine.errors import UsageError


class Consumer(Protocol):
    """Who steps with complete gradients: an optimizer."""

    @property
    def steps_early(self) -> bool:
        """Whether ``step_early`` is to be called."""

    def finish_gradients(self) -> None:
        """The window's gradients are complete on this rank; collective."""

    def step_early(self, bucket_grad: GradientBucket) -> None:
        """The gradient of ``bucket_grad`` is complete, backward is not over; what is used of it stays as it is."""

    def wait_early(self) -> None:
        """Return when no bucket is being stepped in backward any more, so that no gradient is read."""


class EarlyUse:
    """When gradients may be used before backward is over."""

    def __init__(self, step_state: StepState) -> None:
        self._step_state = step_state
        self._consumer: Consumer | None = None
        self._predictable = False  # the window before had no late gradient, no second backward at its end, on any rank
        self.enabled = False
        """Whether somebody uses gradients early."""

    def serve(self, consumer: Consumer | None) -> None:
        """Offer gradients to ``consumer`` from now on."""
        self._consumer, self.enabled = consumer, consumer is not None

    @property
    def is_foreseen(self) -> bool:
        """Whether gradients of a last backward that begins now may be used in it."""
        return self._predictable and self._consumer is not None

    def offer(self, bucket_grad: GradientBucket) -> None:
        """The gradient of ``bucket_grad`` is complete."""
        runs = self._step_state.phase is Phase.BACKWARD and self._step_state.must_be_stepped
        if runs and self._consumer is not None and bucket_grad.earlier is None:
            self._consumer.step_early(bucket_grad)

    def wait(self) -> None:
        """Return when nobody reads a gradient any more."""
        if self._consumer is not None:
            self._consumer.wait_early()

    def forget(self) -> None:
        """After a failure: nothing is known of the window before."""
        self._predictable = False

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Nothing is offered in a backward that begins inside."""
        consumer = self._consumer
        self.serve(None)
        try:
            yield
        finally:
            self.serve(consumer)

    def note(self, *, late: bool, again: bool) -> None:
        """Whether some rank had late gradients, and whether this was not the window's first last backward.

        ``UsageError``, on all ranks, where a late one could not be foreseen and gradients may have been used.
        """
        self._predictable = not (late or again)
        if late and self._step_state.must_be_stepped:
            raise UsageError(
                "a parameter got a second gradient in one backward, for the first time in this run, and "
                "offload_optimizer.step_in_backward may have stepped with what came before: expected a module that is "
                "called twice under re-entrant checkpointing to be so from the first step on. Set that key to false, "
                "and call engine.reset() on every rank, which says whether a checkpoint must be loaded",
                code="step-in-backward-late-gradient",
            )
