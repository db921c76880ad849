"""Using gradients before the backward that completes them is over.

[Note: Final gradients] Whether a complete gradient is final is known only after the backward: a parameter may get a
late one, and another backward may follow. So gradients are used early only if the previous accumulation window had
neither, on any rank. If a late one still comes, no rank can continue with the window: some ranks may have used the
gradient that it should have been added to.

Which buckets are used depends on the parts of the model that a rank has used and, after a failure, on the moment of the
failure. The calls that are allowed must not depend on that, or one rank would reject a call that another accepts. So
from the beginning of a backward whose gradients may be used, the window can only be stepped, whether or not some are
used. If that backward fails, ``engine.reset()`` knows how far it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from shardengine.ddp.gradient_bucket import GradientBucket
from shardengine.ddp.step_state import Phase, StepState
from shardengine.errors import UsageError


class Consumer(Protocol):
    """Steps with complete gradients: an optimizer."""

    @property
    def steps_early(self) -> bool:
        """Whether the reducer should call ``step_early``."""

    def finish_gradients(self) -> None:
        """The gradients of the accumulation window are complete on this rank; collective."""

    def step_early(self, bucket_grad: GradientBucket) -> None:
        """Step with the gradient of ``bucket_grad``, which is complete although backward is not over.

        The parts of it that are used do not change any more.
        """

    def wait_early(self) -> None:
        """Return when no bucket is being stepped in backward any more, so nobody reads a gradient."""


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
        """Offer the gradient of ``bucket_grad``, which is complete, to the consumer."""
        runs = self._step_state.phase is Phase.BACKWARD and self._step_state.must_be_stepped
        if runs and self._consumer is not None and bucket_grad.earlier is None:
            self._consumer.step_early(bucket_grad)

    def wait(self) -> None:
        """Return when nobody reads a gradient any more."""
        if self._consumer is not None:
            self._consumer.wait_early()

    def forget(self) -> None:
        """After a failure: forget whether the previous accumulation window was predictable."""
        self._predictable = False

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Offer nothing in a backward that begins inside."""
        consumer = self._consumer
        self.serve(None)
        try:
            yield
        finally:
            self.serve(consumer)

    def note(self, *, late: bool, again: bool) -> None:
        """Note whether some rank had late gradients, and whether the window had an earlier last backward.

        ``UsageError``, on all ranks, if a late one was not foreseen and gradients may have been used.
        """
        self._predictable = not (late or again)
        if late and self._step_state.must_be_stepped:
            raise UsageError(
                "a parameter received two gradients in one backward for the first time, after "
                "offload_optimizer.step_in_backward may have applied the first one: modules that run twice under "
                "re-entrant checkpointing must do so from the first step. Set that key to false, and call "
                "engine.reset() "
                "on every rank, which says whether a checkpoint must be loaded",
                code="step-in-backward-late-gradient",
            )
