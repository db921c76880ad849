"""Steps during backward: an offloaded bucket is stepped as soon as its gradient is complete.

Owns: the thread that steps. Must not know: groups, which buckets may be stepped, when the step comes.

[Note: Steps in backward] States and master weights are stepped in place; backward never reads them. Backward may still
read the weights, so the new weights are kept in a separate buffer until the step, which only has to copy them. A
bucket's step cannot be undone: from then on the accumulation window can only be stepped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from shardengine.ddp import GradientBucket, StepState
from shardengine.errors import InternalError, UsageError
from shardengine.offload import CopyQueue, ShardStore
from shardengine.optim.arithmetic import Action
from shardengine.optim.update import BucketWork, Part, compute, send, written
from shardengine.sharding import MASTER


@dataclass(frozen=True)
class _Early:
    """A bucket whose step has begun. low: its new weights, valid once ``done`` has ended without an error."""

    parts: Sequence[Part]
    low: Tensor
    done: Future[None]


class StepsInBackward:
    """The buckets that were stepped in this window's backward or are about to be, by index."""

    def __init__(self, step_state: StepState) -> None:
        self._step_state = step_state
        self._thread: ThreadPoolExecutor | None = None
        self._early: dict[int, _Early] = {}
        self._handed_over: set[int] = set()  # the copy queue owns the buffer
        self._delivered: set[int] = set()

    def __len__(self) -> int:
        return len(self._early)

    def __contains__(self, index: int) -> bool:
        return index in self._early

    @staticmethod
    def can_be(bucket_grad: GradientBucket) -> bool:
        """Whether gradient and master weights of the bucket are offloaded; others are never stepped in backward."""
        return bucket_grad.leaves and bucket_grad.bucket.has_master

    def may(self, bucket_grad: GradientBucket) -> bool:
        """Whether the bucket can be stepped in backward and has no late gradient yet."""
        return self.can_be(bucket_grad) and not (bucket_grad.late.filled or bucket_grad.late.waiting)

    def begin(
        self,
        bucket_grad: GradientBucket,
        parts: Sequence[Part],
        way: CopyQueue,
        after: Future[None] | None,
        then: list[ShardStore],
    ) -> None:
        """Begin to step a bucket that has a slice on this rank.

        way: the copy queue that lends the buffer of the new weights · after: another reader of the states, awaited
        first · then: the stores that are probably needed next, to prefetch.
        """
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "step-in-backward")
        bucket = bucket_grad.bucket
        low = way.buffer(bucket.layout.slice_length, bucket.flat_buffer.dtype, on_host=True)
        self._step_state.note_early()
        done = self._thread.submit(self._step, bucket_grad, parts, low, after, then)
        self._early[bucket.layout.index] = _Early(parts, low, done)

    def _step(
        self,
        bucket_grad: GradientBucket,
        parts: Sequence[Part],
        low: Tensor,
        after: Future[None] | None,
        then: list[ShardStore],
    ) -> None:
        if after is not None:
            after.exception()
        bucket, store, gradient = bucket_grad.bucket, bucket_grad.bucket.state_store, bucket_grad.gradient
        if gradient is None:
            raise InternalError(
                f"the bucket of {bucket_grad.names} is stepped in backward before its gradient is complete"
            )
        with torch.no_grad():
            flats = dict(store.check_out())
            for next_one in then:
                next_one.prefetch()
            flats["weight"], flats["gradient"] = flats.pop(MASTER), gradient
            try:
                compute(flats, BucketWork(parts), low, {})
                if bucket.writes_file:  # the whole slice is written
                    low.copy_(flats["weight"])
                store.check_in()
            except BaseException:
                self._step_state.note_early(torn=True)
                raise

    def deliver(self, bucket_grad: GradientBucket, way: CopyQueue) -> None:
        """Copy the new weights of a bucket to their place, once. Raise the error of its step, if any.

        After an error, the buckets whose steps failed are stepped like all others in the next try.
        """
        bucket, index = bucket_grad.bucket, bucket_grad.bucket.layout.index
        early = self._early[index]
        if index in self._delivered:
            return
        try:
            early.done.result()
        except BaseException:
            self.wait()
            failed = [number for number, each in self._early.items() if each.done.exception() is not None]
            for number in failed:
                way.give(self._early.pop(number).low)
            raise
        weights = bucket.begin_weights(blank=True)
        pairs = [(early.low, weights)] if bucket.writes_file else written(early.low, weights, early.parts)
        self._handed_over.add(index)
        try:
            bucket.end_weights(changed=True, after=send(pairs, early.low, way, from_host=True))
        except BaseException:
            self._step_state.note_early(torn=True)  # the contents of ``low`` may be lost
            raise
        self._delivered.add(index)

    def require_same(self, actions_of: Callable[[int], list[Action]]) -> None:
        """Raise ``UsageError`` if a bucket was stepped with other actions than it has now."""
        for index, early in self._early.items():
            if [action for action, _ in early.parts] != actions_of(index):
                raise UsageError(
                    "the optimizer's options (learning rates and the like) were changed between backward and step(), "
                    "and offload_optimizer.step_in_backward has used the old ones: change them before backward, or "
                    "set that key to false. To go on, set them back and call step() again",
                    code="optimizer-changed-after-backward",
                )

    def wait(self) -> None:
        """Wait until no bucket is being stepped. Errors are raised by ``deliver``."""
        for early in self._early.values():
            early.done.exception()

    def forget(self, way: CopyQueue) -> None:
        """End the window. way: as in ``begin``."""
        self.wait()
        for index in self._early.keys() - self._handed_over:
            way.give(self._early[index].low)
        self._early.clear()
        self._handed_over.clear()
        self._delivered.clear()
