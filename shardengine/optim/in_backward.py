"""Stepping in backward: a bucket that rests away takes the step as soon as its gradient is complete.

Owns: the thread that does it. Must not know: groups, which buckets may go, when the step comes.

[Note: Steps in backward] States and master weights are stepped where they rest, which backward never reads. The
weights, which it may still read, are kept in memory of their own until the step, which only has to send them on. What
has taken the step cannot be taken back: from then on the window can only be stepped.
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
from shardengine.optim.update import Part, Work, compute, send, written
from shardengine.sharding import MASTER


@dataclass(frozen=True)
class _Early:
    """A bucket on its way. low: its new weights, once ``done`` has no error."""

    parts: Sequence[Part]
    low: Tensor
    done: Future[None]


class StepsInBackward:
    """The buckets of this window that have taken the step, or are about to, by index."""

    def __init__(self, step_state: StepState) -> None:
        self._step_state = step_state
        self._thread: ThreadPoolExecutor | None = None
        self._early: dict[int, _Early] = {}
        self._handed_over: set[int] = set()  # the buffer is the copy queue's
        self._delivered: set[int] = set()

    def __len__(self) -> int:
        return len(self._early)

    def __contains__(self, index: int) -> bool:
        return index in self._early

    @staticmethod
    def can_be(state: GradientBucket) -> bool:
        """Whether gradient and master weights rest away: a bucket is never stepped here otherwise."""
        return state.leaves and state.bucket.has_master

    def may(self, state: GradientBucket) -> bool:
        """Whether that is so, and no late gradient has come yet."""
        return self.can_be(state) and not (state.late.filled or state.late.waiting)

    def begin(
        self,
        state: GradientBucket,
        parts: Sequence[Part],
        way: CopyQueue,
        after: Future[None] | None,
        then: list[ShardStore],
    ) -> None:
        """Step a bucket of which this rank has a slice. after: what else reads the states · then: probably the next."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "step-in-backward")
        bucket = state.bucket
        low = way.buffer(bucket.layout.slice_length, bucket.flat_buffer.dtype, on_host=True)
        self._step_state.note_early()
        done = self._thread.submit(self._step, state, parts, low, after, then)
        self._early[bucket.layout.index] = _Early(parts, low, done)

    def _step(
        self,
        state: GradientBucket,
        parts: Sequence[Part],
        low: Tensor,
        after: Future[None] | None,
        then: list[ShardStore],
    ) -> None:
        if after is not None:
            after.exception()
        bucket, store, gradient = state.bucket, state.bucket.state_store, state.gradient
        if gradient is None:
            raise InternalError(f"the bucket of {state.names} is stepped in backward before its gradient is complete")
        with torch.no_grad():
            flats = dict(store.check_out())
            for next_one in then:
                next_one.prefetch()
            flats["weight"], flats["gradient"] = flats.pop(MASTER), gradient
            try:
                compute(flats, Work(parts), low, {})
                if bucket.writes_file:  # as a whole
                    low.copy_(flats["weight"])
                store.check_in()
            except BaseException:
                self._step_state.note_early(torn=True)
                raise

    def deliver(self, state: GradientBucket, way: CopyQueue) -> None:
        """The weights of a bucket go where they are kept, once. An error of its step is raised; what has not been
        stepped is stepped like others then, in the next try."""
        bucket, index = state.bucket, state.bucket.layout.index
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
            self._step_state.note_early(torn=True)  # what was in ``low`` may be gone
            raise
        self._delivered.add(index)

    def require_same(self, actions_of: Callable[[int], list[Action]]) -> None:
        """``UsageError`` where a bucket was stepped with other actions than it has now."""
        for index, early in self._early.items():
            if [action for action, _ in early.parts] != actions_of(index):
                raise UsageError(
                    "the optimizer's options (learning rates and the like) were changed between backward and step(), "
                    "and offload_optimizer.step_in_backward has used the old ones: change them before backward, or "
                    "set that key to false. To go on, set them back and call step() again"
                )

    def wait(self) -> None:
        """Return when nothing is being stepped. Errors wait for ``deliver``."""
        for early in self._early.values():
            early.done.exception()

    def forget(self, way: CopyQueue) -> None:
        """The window is over. way: as in ``begin``."""
        self.wait()
        for index in self._early.keys() - self._handed_over:
            way.give(self._early[index].low)
        self._early.clear()
        self._handed_over.clear()
        self._delivered.clear()
