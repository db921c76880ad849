"""From each parameter's gradient to the complete gradient of the step, bucket by bucket, for every stage.

Owns: readiness counting, accumulation over micro-batches, launching reductions in one order on all ranks, the sweep at
the end of backward. Must not know: stages by name, modules, weights, the optimizer.

[Note: Gradients of a window] A window is the micro-batches of one optimizer step. Per bucket there are two places:

    partial   full size, this rank's sum over micro-batches that were not sent yet (taken from the pool when needed)
    total     one slice, the sum over ranks of what was sent

                       sharded=False (letter P)                 sharded=True (letter S)
    micro-batch 1..k-1 partial += gradient                      partial = gradient → reduce-scatter → total += sum
    micro-batch k      … → reduce-scatter in place → divide     … → total += sum → divide
    complete gradient  this rank's slice of ``partial``         ``total``

``no_sync`` is "partial += gradient, do not send" for as long as it lasts, whatever the letter.
Where every rank needs the whole gradient (``gathers``), complete slices are gathered as soon as they are divided.

[Note: Launch order] Bucket i is launched only after bucket i-1 of one fixed order, so collectives match on all ranks
even where ranks finish parameters in different orders or do not use some. The order is the layout's in the first
backward, and afterwards the order in which rank 0's buckets became ready.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from shardengine.bucket import Bucket, BufferPool
from shardengine.collectives import Collectives, Pending, Purpose
from shardengine.errors import InternalError, UsageError
from shardengine.kernels import divide, store_gradient
from shardengine.layout import Layout, Piece

_MAX_IN_FLIGHT = 3


class GradientBucket:
    """The gradients of one bucket during a window ([Note: Gradients of a window])."""

    def __init__(self, bucket: Bucket, layout: Layout) -> None:
        self.bucket = bucket
        self.names = layout.names_in(bucket.layout)
        self.pieces = {piece.parameter: piece for piece in layout.pieces(bucket.layout)}
        self.partial: Tensor | None = None
        self.filled: set[int] = set()
        self.ready: set[int] = set()
        self.sent = False
        self.total: Tensor | None = None
        self.total_filled = False
        self.complete: Tensor | None = None
        self.whole: Tensor | None = None

    def name_of(self, parameter: int) -> str:
        """The name of one of the bucket's parameters."""
        return self.names[list(self.pieces).index(parameter)]

    def store(self, parameter: int, gradient: Tensor, pool: BufferPool) -> None:
        """Add this micro-batch's gradient of ``parameter`` to its piece of ``partial``."""
        piece = self.pieces[parameter]
        part = gradient if piece.end - piece.start == gradient.numel() else self._cut(piece, gradient)
        destination = self._open(pool)[piece.start - self.bucket.layout.start : piece.end - self.bucket.layout.start]
        store_gradient(destination.view(part.shape), part, first=parameter not in self.filled)
        self.filled.add(parameter)
        self.ready.add(parameter)

    def fill_missing(self, pool: BufferPool) -> Tensor:
        """``partial`` with zeros where this rank has no gradient."""
        partial = self._open(pool)
        start = self.bucket.layout.start
        for parameter, piece in self.pieces.items():
            if parameter not in self.filled:
                partial[piece.start - start : piece.end - start].zero_()
        return partial

    def drop_partial(self, pool: BufferPool) -> None:
        """Forget what was not sent."""
        if self.partial is not None:
            pool.give(self.partial)
        self.partial = None
        self.filled.clear()

    def _open(self, pool: BufferPool) -> Tensor:
        if self.partial is None:
            full = self.bucket.full
            self.partial = pool.take(self.bucket.layout.length, full.dtype, full.device)
            self.bucket.arena.clear_gaps(self.partial, self.bucket.layout.start, self.bucket.layout.end)
        return self.partial

    @staticmethod
    def _cut(piece: Piece, gradient: Tensor) -> Tensor:
        return gradient.reshape(-1)[piece.offset : piece.offset + piece.end - piece.start]


@dataclass(frozen=True)
class _Flight:
    """A collective on its way, and what to do when it has arrived (which may start another one)."""

    pending: Pending
    land: Callable[[], Pending | None] | None = None


@dataclass(frozen=True)
class _Mode:
    """What the running backward is for. armed: from ``arm`` to the end of the sweep, so also after one that raised."""

    armed: bool
    synchronise: bool = False
    final: bool = False


class Reducer:
    """Reduces gradients of the trainable ``buckets`` (in layout order). ``divisor``: 1, or the ranks for a mean."""

    def __init__(
        self,
        layout: Layout,
        buckets: list[Bucket],
        collectives: Collectives,
        pool: BufferPool,
        *,
        sharded: bool,
        gathers: bool,
        divisor: int,
    ) -> None:
        self.buckets = [GradientBucket(bucket, layout) for bucket in buckets]
        self.used: set[int] = set()
        self._collectives = collectives
        self._pool = pool
        self.sharded = sharded
        self.gathers = gathers
        self._divisor = divisor
        self._of_parameter: dict[int, list[GradientBucket]] = {}
        for state in self.buckets:
            for parameter in state.pieces:
                self._of_parameter.setdefault(parameter, []).append(state)
        self._order = list(range(len(self.buckets)))
        self._seen: list[int] | None = []
        self._next = 0
        self._mode = _Mode(armed=False)
        self._unsent = False
        self._in_flight: deque[_Flight] = deque()

    @property
    def window_complete(self) -> bool:
        """Whether the window's gradients are complete and wait for the step."""
        return bool(self.buckets) and all(state.complete is not None for state in self.buckets)

    def arm(self, *, synchronise: bool, final: bool) -> None:
        """Before a backward. synchronise: reduce in this micro-batch; final: the window ends with it."""
        if self._mode.armed:
            raise UsageError(
                "the last backward raised, its gradients are incomplete: call engine.zero_grad() on every rank and "
                "begin the window anew"
            )
        if self.window_complete:
            raise UsageError(
                "backward after the window's last micro-batch: its gradients are complete and waiting; "
                "call engine.step() or engine.zero_grad() first"
            )
        self._mode = _Mode(True, synchronise, final)

    def on_gradient(self, parameter: int, gradient: Tensor) -> None:
        """``gradient`` of ``parameter`` is final for this micro-batch; the caller may drop it afterwards."""
        states = self._of_parameter[parameter]
        name = states[0].name_of(parameter)
        if not self._mode.armed:
            raise UsageError(
                f"parameter {name!r} received a gradient outside of engine.backward(loss): loss.backward() without the "
                "engine is not available yet"
            )
        if gradient.layout is not torch.strided:
            raise UsageError(f"parameter {name!r} has a sparse gradient: expected a dense one; use sparse=False")
        self.used.add(parameter)
        for state in states:
            if state.sent or parameter in state.ready:
                raise UsageError(
                    f"parameter {name!r} received a second gradient in one backward: re-entrant checkpointing of a "
                    "module called twice is not available yet; use use_reentrant=False"
                )
            state.store(parameter, gradient, self._pool)
            if len(state.ready) == len(state.pieces):
                if self._seen is not None and self._mode.synchronise:
                    self._seen.append(state.bucket.layout.index)
                self._launch_ready()

    def sweep(self) -> None:
        """After a backward: launch what is left (zeros for what this rank did not use), wait, close the window."""
        mode = self._mode
        if mode.synchronise:
            for index in self._order[self._next :]:
                self._launch(self.buckets[index])
            self._finish(0)
            self._adopt_order()
        self._unsent = not mode.synchronise
        self._next = 0
        for state in self.buckets:
            state.ready.clear()
            state.sent = False
        if mode.final:
            gathers = (self._complete(state) for state in self.buckets)
            self._in_flight.extend(_Flight(pending) for pending in gathers if pending is not None)
            self._finish(0)
        self._mode = _Mode(armed=False)

    def flush(self) -> None:
        """Close the window now, although its last backward was not the final one."""
        self.arm(synchronise=self._unsent, final=True)
        self.sweep()

    def release(self) -> None:
        """Forget the window's gradients, also after a backward that raised; buffers stay allocated for the next one."""
        self._finish(0)  # with what follows each reduction, so that every rank has issued the same collectives
        self._mode = _Mode(armed=False)
        self._next = 0
        if self._seen is not None:
            self._seen = []
        for state in self.buckets:
            state.ready.clear()
            state.sent = False
            if state.whole is not None and state.whole is not state.partial:
                self._pool.give(state.whole)
            state.drop_partial(self._pool)
            state.complete = state.whole = None
            state.total_filled = False
        self.used.clear()
        self._unsent = False

    def gradient_bytes(self) -> int:
        """Bytes that hold gradients at this moment, transient buffers of the pool not included."""
        tensors = [t for s in self.buckets for t in (s.partial, s.total, s.whole) if t is not None]
        return sum({t.data_ptr(): t.nbytes for t in tensors}.values())

    def _launch_ready(self) -> None:
        while self._mode.synchronise and self._next < len(self._order):
            state = self.buckets[self._order[self._next]]
            if len(state.ready) < len(state.pieces):
                return
            self._launch(state)
            self._next += 1

    def _launch(self, state: GradientBucket) -> None:
        """Start the reduction of ``partial``, having finished the oldest ones."""
        self._finish(_MAX_IN_FLIGHT - 1)
        partial = state.fill_missing(self._pool)
        if not self.sharded:
            out = state.bucket.own_slice(partial)
        elif state.total_filled:
            out = self._pool.take(state.bucket.layout.slice_length, partial.dtype, partial.device)
        else:
            if state.total is None:
                state.total = torch.empty_like(state.bucket.own_slice(partial))
            out = state.total
        state.sent = True
        pending = self._collectives.reduce_scatter(partial, out, state.names)
        final = self._mode.final
        self._in_flight.append(_Flight(pending, lambda: self._land(state, out, final)))

    def _land(self, state: GradientBucket, out: Tensor, final: bool) -> Pending | None:
        """``out`` holds the sum over ranks of this micro-batch (or, unsharded, of the window)."""
        if self.sharded:
            if state.total_filled:
                if state.total is None:
                    raise InternalError(f"bucket of {state.names} was filled before it had a total")
                state.total.add_(out)
                self._pool.give(out)
            state.total_filled = True
            state.drop_partial(self._pool)
        return self._complete(state) if final else None

    def _complete(self, state: GradientBucket) -> Pending | None:
        """Divide the sum; start gathering it where every rank needs all of it."""
        if state.complete is not None:
            return None
        total = state.total if self.sharded else state.partial
        if total is None:
            raise InternalError(f"bucket of {state.names} has no gradient to complete")
        state.complete = total if self.sharded else state.bucket.own_slice(total)
        divide(state.complete, self._divisor)
        if not self.gathers:
            return None
        if self.sharded:
            total = self._pool.take(state.bucket.layout.length, total.dtype, total.device)
            state.bucket.own_slice(total).copy_(state.complete)
        state.whole = total
        return self._collectives.all_gather(total, state.names, Purpose.WHOLE_GRADIENTS)

    def _finish(self, leave: int) -> None:
        """Finish reductions from the oldest on: those that have arrived, and more until ``leave`` are in flight."""
        poll = self._collectives.may_poll
        while self._in_flight and (len(self._in_flight) > leave or (poll and self._in_flight[0].pending.done())):
            flight = self._in_flight.popleft()
            flight.pending.wait()
            following = flight.land() if flight.land is not None else None
            if following is not None:
                self._in_flight.append(_Flight(following))

    def _adopt_order(self) -> None:
        """After the first reduced backward every rank takes over the order in which rank 0's buckets became ready."""
        if self._seen is None:
            return
        mine = torch.tensor(list(dict.fromkeys(self._seen + self._order)), dtype=torch.int64)
        rank0 = self._collectives.exchange(mine.view(torch.uint8))[0]
        self._order = rank0.contiguous().view(torch.int64).tolist()
        self._seen = None
