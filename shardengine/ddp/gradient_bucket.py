"""The gradients of one bucket during an accumulation window: their places, their dtypes, and who owns the memory.

Must not know: collectives, when something is sent, stages.

[Note: Gradients of a window] An accumulation window is the micro-batches of one optimizer step. Per bucket there are
these places:

    partial    full size, this rank's sum over micro-batches that were not sent yet
    total      one slice in fp32, the sum over ranks of the micro-batches that were sent
    complete   one slice: the sum over ranks and micro-batches, divided, rounded to the wire's dtype
    whole      the gradient of everything that this rank steps, full size or its shard group's slice, if that is more
               than ``complete``; gathered from the ranks' ``complete``

For diverged replicas (``replicas.py``) ``complete`` is the group's slice of the group's own sum, divided and rounded,
and everything that a rank steps.

                       letter P                                 letter S
    micro-batch 1..k-1 partial += gradient                      partial = gradient → reduce-scatter → total += sum
    micro-batch k      … → reduce-scatter → complete            … → total += sum → complete

    dtypes             k = 1                                    k > 1
    partial            the wire's                               letter P: fp32, rounded when sent · letter S: the wire's
    complete           the wire's                               fp32 memory that holds rounded values

If ``grad_accum_dtype`` is not fp32, letter P's partial and letter S's total have that dtype instead (k > 1), and
``complete`` has memory of its own unless that dtype is also the wire's.

Letters SP, on a hybrid mesh: as S, but ``total`` is the group's slice of the sum over the group's ranks. The last
micro-batch is added to it inside the group, before sums go across.

``no_sync`` is "partial += gradient, do not send" while it lasts, whatever the letter.

[Note: Away] If the optimizer's state is offloaded, ``total`` and ``complete`` are in host memory, unless every rank
needs the whole gradient. A micro-batch's sum over ranks on another device is copied there as soon as it is made, in the
wire's dtype if that loses nothing, and added on the host when it has arrived. The last sum is squared for the norm as
soon as it is made (``take_squares``), so nobody reads it again for that. If every rank needs the whole gradient, it
stays on the device and is copied for its step, one bucket ahead (``fetch``).

[Note: Late gradients] Autograd may deliver a parameter's gradient again in one backward (re-entrant checkpointing of a
module that is called twice), when its bucket may be in flight already. The result must not depend on buckets. So the
second and later gradients of a parameter in a backward that communicates always go to ``late``, which is completed
separately at the end of the window and added. A backward after the window's last one is treated in the same way: the
gradient that was complete before it waits in ``earlier``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from shardengine.errors import InternalError, UsageError
from shardengine.kernels import flatten, ordered_sum, power_sum, sum_of_squares
from shardengine.offload import BufferPool, CopyQueue, Done
from shardengine.sharding import Bucket, Layout, ParameterSpec, in_memory_order
from shardengine.stages import Placement

_Then = Callable[[], None]


def _nothing() -> None: ...


@dataclass(frozen=True)
class Rules:
    """The rules of stage and config for gradients.

    gradients: their placement between micro-batches · state: that of optimizer state, and so of the complete gradient ·
    divisor: of sums over ranks, their number for a mean · wire: the dtype of gradients while they are sent, None for
    each bucket's own · reduce: the dtype that sums over ranks are rounded to · accumulate: the dtype of gradients that
    wait for later micro-batches · scaled: the loss is scaled, so a bare backward raises an error · static: in every
    accumulation window a rank uses the same parameters as in the first · steps_unused: parameters that no rank has used
    are stepped with a gradient of zeros.
    """

    gradients: Placement
    state: Placement
    divisor: float
    wire: torch.dtype | None = None
    reduce: torch.dtype = torch.float32
    accumulate: torch.dtype = torch.float32
    scaled: bool = False
    static: bool = False
    apart: bool = False
    """Replicas diverge: each shard group steps with its own gradient."""
    steps_unused: bool = False

    def apart_with(self, count: int, groups: int) -> Rules:
        """Return the rules of an accumulation window after which each shard group steps with its own gradient.

        count: the number of groups in that gradient · groups: the number of all groups.
        """
        return replace(self, apart=True, divisor=self.divisor * count / groups)

    @cached_property
    def complete(self) -> Placement:
        """The placement that the complete gradient is made in."""
        return Placement.SHARDED_INSIDE if self.apart else Placement.SHARDED

    @cached_property
    def summed(self) -> Placement:
        """The placement that the window's last reduction brings gradients to."""
        return Placement.PARTIAL_ACROSS if self.apart else Placement.SHARDED

    @cached_property
    def sharded(self) -> bool:
        """Whether each micro-batch is reduced at once (the letters S and SP)."""
        return self.gradients.sharded_over is not None

    @cached_property
    def gathers(self) -> bool:
        """Whether a rank needs more of the complete gradient than it makes itself."""
        return self.state is not self.complete

    @cached_property
    def steps_everything(self) -> bool:
        """Whether every rank steps all weights."""
        return self.state is Placement.REPLICATED

    @cached_property
    def ends_across(self) -> bool:
        """Whether sums of shard groups wait for the last micro-batch, after which they are added up (SP)."""
        return self.gradients is Placement.PARTIAL_ACROSS and not self.apart


class LocalSum:
    """A full-size sum on this rank. ``filled``: the parameters that have a contribution.

    Gradients wait until ``flush`` moves all of them at once, so a bucket costs one launch.
    """

    def __init__(self, bucket: Bucket, layout: Layout, pool: BufferPool) -> None:
        self.tensor: Tensor | None = None
        self.filled: set[int] = set()
        self._waiting: dict[int, Tensor] = {}
        self._versions: dict[int, int] = {}
        self._bucket = bucket
        self._layout = layout
        self._pool = pool
        pieces, start = layout.pieces(bucket.layout), bucket.layout.start
        self._parts = {piece.parameter: (piece.offset, piece.offset_end) for piece in pieces}
        self._places = {piece.parameter: piece.start - start for piece in pieces}  # ascending

    def add(self, parameter: int, gradient: Tensor, dtype: torch.dtype) -> None:
        """Keep ``gradient`` until it is added, or copied if it is the first.

        gradient: a whole one, from ``flat_gradient`` · dtype: of a sum that begins now.
        """
        if parameter in self._waiting:
            self.flush(dtype)
        first, end = self._parts[parameter]
        part = gradient if end - first == gradient.numel() else gradient[first:end]
        self._waiting[parameter], self._versions[parameter] = part, part._version

    def flush(self, dtype: torch.dtype) -> Tensor:
        """Move the waiting gradients into the sum, with zeros if this rank has no gradient.

        dtype: of a sum that begins here.
        """
        waiting, self._waiting = self._waiting, {}
        self._require_unchanged(waiting)
        tensor, place = self.tensor, self._places
        order = [parameter for parameter in place if parameter in waiting]
        if tensor is None:
            tensor = self.tensor = self._pool.acquire(self._bucket.layout.length, dtype)
            flatten(_of_one_dtype([waiting[p] for p in order]), [place[p] for p in order], tensor)
        elif waiting:
            for parameter in waiting.keys() - self.filled:  # its first contribution comes later than others'
                count = waiting[parameter].numel()
                flatten([waiting[parameter]], [0], tensor[place[parameter] : place[parameter] + count])
            order = [parameter for parameter in order if parameter in self.filled]
            flatten(_of_one_dtype([waiting[p] for p in order]), [place[p] for p in order], tensor, add=True)
        self.filled |= waiting.keys()
        return tensor

    def _require_unchanged(self, waiting: dict[int, Tensor]) -> None:
        for parameter, part in waiting.items():
            if part._version != self._versions[parameter]:
                name = self._layout.parameters[parameter].name
                raise UsageError(
                    f"the gradient of {name!r} was changed in place after the engine took it (rank "
                    f"{self._bucket.rank}): a hook must clone what it changes or keeps, gradient.clone()",
                    code="grad-changed-after-taken",
                )

    @property
    def waiting(self) -> list[Tensor]:
        """The gradients that wait for ``flush``."""
        return list(self._waiting.values())

    def detach(self) -> Tensor | None:
        """Return the sum, which the caller owns from now on."""
        tensor, self.tensor = self.tensor, None
        self.filled.clear()
        return tensor

    def discard(self) -> None:
        """Drop the sum and the waiting gradients."""
        if (tensor := self.detach()) is not None:
            self._pool.release(tensor)
        self._waiting.clear()


def flat_gradient(gradient: Tensor, spec: ParameterSpec) -> Tensor:
    """Return a parameter's gradient in memory order: 1-D, contiguous; ``gradient``'s own memory if possible.

    Repeated elements of a sparse gradient are added up as torch's ``coalesce`` does.
    """
    gradient = gradient.detach()
    if gradient.layout is not torch.strided:
        gradient = (gradient.coalesce() if gradient.is_sparse else gradient).to_dense()
    return in_memory_order(gradient, spec).contiguous().view(-1)


def _of_one_dtype(tensors: list[Tensor]) -> list[Tensor]:
    """Return ``tensors`` in one dtype, for one launch.

    Autograd may deliver another dtype than the parameter's (``grad_dtype``).
    """
    return tensors if len({tensor.dtype for tensor in tensors}) <= 1 else [tensor.float() for tensor in tensors]


class GradientBucket:
    """One bucket's places ([Note: Gradients of a window]). ``wire``: the dtype that its gradients are sent in.

    placed: the placement of the complete gradient · own: parameter → the start and end of its elements in
    this rank's part of it, if it has any · leaves: sums over ranks are kept with the optimizer's state, which is
    offloaded · spill: copies gradients to the device that steps them, if that is another one ([Note: Away]).
    """

    def __init__(
        self,
        bucket: Bucket,
        layout: Layout,
        pool: BufferPool,
        wire: torch.dtype,
        *,
        leaves: bool = False,
        spill: CopyQueue | None = None,
    ) -> None:
        self.bucket = bucket
        self.wire = wire
        self.names = bucket.layout.names
        self.pieces = {piece.parameter: piece for piece in layout.pieces(bucket.layout)}
        self.placed = Placement.SHARDED
        self._own_in: dict[Placement, dict[int, tuple[int, int]]] = {}
        self._layout = layout
        self.partial = LocalSum(bucket, layout, pool)
        self.late = LocalSum(bucket, layout, pool)
        self._delivered: set[int] = set()
        self.is_ready = False
        """Whether the running backward has delivered a gradient of every parameter, or will deliver no more."""
        self.total: Tensor | None = None
        self.complete: Tensor | None = None
        self.whole: Tensor | None = None
        self.earlier: Tensor | None = None
        self.leaves = leaves
        self._pool = pool
        self._spill = spill if leaves else None
        self._to_step = spill
        self.is_fetched = spill is not None and not leaves
        """Whether the gradient is copied to the device that steps it (``fetch``)."""
        self._fetched: tuple[Tensor, Done] | None = None
        self._squares: Tensor | None = None

    @property
    def own(self) -> dict[int, tuple[int, int]]:
        """Parameter → start and end of its elements in ``complete``, if it has any there."""
        if self.placed not in self._own_in:
            first, last = self.bucket.own[self.placed]
            own = self._layout.pieces_within(self.bucket.layout, (first, last))
            self._own_in[self.placed] = {piece.parameter: (piece.start - first, piece.end - first) for piece in own}
        return self._own_in[self.placed]

    def has_delivered(self, parameter: int) -> bool:
        """Return whether the running backward has delivered a gradient of ``parameter``."""
        return parameter in self._delivered

    def add_gradient(self, parameter: int, gradient: Tensor, dtype: torch.dtype) -> bool:
        """Add ``gradient``, as in ``LocalSum.add``, to the partial sum; return whether the bucket is ready now."""
        self.partial.add(parameter, gradient, dtype)
        self._deliver({parameter})
        return self.is_ready

    def _deliver(self, parameters: Collection[int]) -> None:
        self._delivered.update(parameters)
        self.is_ready = len(self._delivered) == len(self.pieces)

    def _restart_delivery(self) -> None:
        self._delivered.clear()
        self.is_ready = False

    def expect_no_more(self) -> None:
        """The running backward brings nothing more: missing gradients are zero."""
        self._deliver(self.pieces.keys())

    def expect_only(self, parameters: Collection[int]) -> None:
        """The backward that begins brings only ``parameters``: the bucket's other gradients are zero."""
        self._deliver(self.pieces.keys() - parameters)

    @property
    def gradient(self) -> Tensor | None:
        """The gradient that the optimizer steps with: ``whole`` if there is one, else this rank's slice."""
        return self.complete if self.whole is None else self.whole

    def fetch(self) -> None:
        """Begin to copy the gradient to the device of its step, if that is another one.

        Until then nothing changes it.
        """
        gradient = None if self.leaves else self.gradient
        if self._to_step is not None and gradient is not None and self._fetched is None:
            self._fetched = self._to_step.bring(gradient)

    @contextmanager
    def gradient_to_step(self) -> Iterator[Tensor]:
        """Yield ``gradient`` on the device that steps it."""
        if (gradient := self.gradient) is None:
            raise InternalError(f"the bucket of {self.names} is stepped before its gradient is complete")
        self.fetch()
        if self._fetched is not None:
            gradient, end = self._fetched
            end.wait_on_host()
        try:
            yield gradient
        finally:
            self._give_fetched()

    def _give_fetched(self) -> None:
        if self._fetched is not None and self._to_step is not None:
            there, end = self._fetched
            end.wait_on_host()
            self._to_step.give(there)
            self._fetched = None

    @property
    def gradient_interval(self) -> tuple[int, int]:
        """The interval of ``gradient`` in the flat buffer."""
        placement = self.placed if self.whole is None else self.bucket.state_placement
        return self.bucket.own[placement]

    def name_of(self, parameter: int) -> str:
        """The name of one of the bucket's parameters."""
        return self.names[list(self.pieces).index(parameter)]

    def end_backward(self, dtype: torch.dtype) -> None:
        """End a backward: move the waiting gradients; nothing is ready for the next one.

        dtype: of a sum that begins here.
        """
        self._restart_delivery()
        for place, begun_in in ((self.partial, dtype), (self.late, torch.float32)):
            if place.waiting:
                place.flush(begun_in)

    def take_slice(self, dtype: torch.dtype, placement: Placement = Placement.SHARDED) -> Tensor:
        """Return memory from the pool for a rank's part, on the host if it is offloaded."""
        return self._pool.acquire(self.bucket.layout.sizes[placement], dtype, on_host=self._spill is not None)

    def detach_total(self, dtype: torch.dtype | None = None) -> Tensor | None:
        """Return ``total`` in ``dtype`` (None: unchanged), in a buffer of the pool that the caller owns from now on."""
        total, self.total = self.total, None
        if total is None or dtype is None or total.dtype is dtype:
            return total
        converted = self._pool.acquire(total.numel(), dtype)
        converted.copy_(total)
        self._pool.release(total)
        return converted

    def _sum(
        self, terms: Sequence[Tensor], out: Tensor, old: Tensor | None, rules: Rules, then: _Then | None = None
    ) -> None:
        """Set ``out`` to ``old`` + the sum of ``terms``; if it is offloaded, the copy is in flight afterwards.

        then: called when the result is there. Only the window's last sum has one; it is also divided and rounded.
        """
        final, then = then is not None, then or _nothing
        end: dict[str, Any] = {"divisor": rules.divisor, "rounded": self.wire} if final else {}
        if self._spill is None:
            ordered_sum(terms, out, total=old, reduce_dtype=rules.reduce, **end)
            then()
            return
        if old is None and (final or (out.dtype is torch.float32 and len(terms) > 1)):
            here = self._pool.acquire(out.numel(), out.dtype)
            ordered_sum(terms, here, reduce_dtype=rules.reduce, **end)
            if final:
                self._keep_squares(here, on_host=False)
            self._spill.send([(here, out)], here, then)
            return
        dtype = torch.float32 if len(terms) > 1 else terms[0].dtype
        here, staged = self._pool.acquire(out.numel(), dtype), self.take_slice(dtype)
        ordered_sum(terms, here, reduce_dtype=rules.reduce)

        def join() -> None:
            ordered_sum([staged], out, total=old, **end)
            if final:
                self._keep_squares(out, on_host=True)
            for spent in (staged, old):
                if spent is not None and spent is not out:
                    self._pool.release(spent)
            then()

        self._spill.send([(here, staged)], here, join)

    def accumulate(self, terms: Sequence[Tensor], rules: Rules) -> None:
        """Letters S and SP, not the last micro-batch: add all ranks' terms for this slice to ``total``."""
        alone = len(terms) == 1 and terms[0] is self.partial.tensor and not self.leaves
        if self.total is None and alone and self.wire is rules.accumulate:
            self.total = self.partial.detach()  # at one rank it is the total already
            return
        old = self.total
        if self.total is None:
            self.total = self.take_slice(rules.accumulate, rules.gradients)
        self._sum(terms, self.total, old, rules)
        self.partial.discard()

    def set_complete(self, terms: Sequence[Tensor], rules: Rules, then: _Then) -> None:
        """Add up the window's last terms; the sum is divided and rounded to become ``complete``; then call ``then``."""
        place, old = self._place_for_complete(rules), self.total
        self.complete, self.placed = place, rules.complete
        self._sum(terms, place, old, rules, then)
        if old is not None and old is not place and self._spill is None:
            self._pool.release(old)
        self.total = None
        partial = self.partial.tensor
        if partial is not None and partial.untyped_storage()._cdata != place.untyped_storage()._cdata:
            self.partial.discard()

    def complete_from_total(self, rules: Rules) -> None:
        """End the window without another reduction: ``total`` becomes ``complete``."""
        total, self.total = self.total, None
        if total is None:
            return
        fits = total.dtype in (torch.float32, self.wire)
        self.complete, self.placed = total if fits else self.take_slice(self.wire, rules.complete), rules.complete
        ordered_sum([total], self.complete, divisor=rules.divisor, rounded=self.wire)
        if not fits:
            self._pool.release(total)

    def _squares_of(self, complete: Tensor) -> list[Tensor]:
        return [sum_of_squares(complete[start:end]) for start, end in self.own.values()]

    def _keep_squares(self, complete: Tensor, *, on_host: bool) -> None:
        """Keep the squares in memory of the pool, because a hook's stream is not the one that reads them."""
        if self.own:
            self._squares = self._pool.acquire(len(self.own), torch.float64, on_host=on_host)
            torch.stack(self._squares_of(complete), out=self._squares)

    def _drop_squares(self) -> None:
        if self._squares is not None:
            self._pool.release(self._squares)
            self._squares = None

    def take_squares(self) -> dict[int, Tensor]:
        """Return parameter → the sum of squares of this rank's part of it in ``complete``, fp64 0-dim.

        An offloaded gradient was squared when it was made. These squares are returned once, because ``complete`` may
        change afterwards.
        """
        if self._squares is not None:
            found = list(self._squares.clone().unbind())
            self._drop_squares()
        elif self.complete is not None:
            found = self._squares_of(self.complete)
        else:
            return {}
        return dict(zip(self.own, found, strict=True))

    def powers(self, order: float) -> dict[int, Tensor]:
        """Return parameter → ``power_sum`` of this rank's part of it in ``complete``."""
        complete = self.complete
        if complete is None:
            return {}
        return {parameter: power_sum(complete[start:end], order) for parameter, (start, end) in self.own.items()}

    def clamp(self, limit: float) -> None:
        """Clamp the gradient to [-limit, limit], rounded to the wire's dtype."""
        if (gradient := self.gradient) is not None:
            bound = torch.tensor(limit, dtype=self.wire).item()
            gradient.clamp_(-bound, bound)

    def _place_for_complete(self, rules: Rules) -> Tensor:
        """Return ``total`` or this rank's slice of ``partial`` if it can hold the wire's dtype, else new memory."""
        partial, candidates, layout = self.partial.tensor, [self.total], self.bucket.layout
        sized = not rules.sharded or layout.sizes[rules.complete] == layout.length  # else all of it is kept alive
        if partial is not None and sized and not self.leaves:
            candidates.append(self.bucket.own_slice(partial, rules.complete))
        for memory in candidates:
            if memory is not None and memory.dtype in (torch.float32, self.wire):
                return memory
        return self.take_slice(self.wire, rules.complete)

    def make_whole(self) -> Tensor:
        """Return memory for everything that this rank steps, in the wire's dtype, with ``complete`` in its slice.

        It is ready to be gathered.
        """
        whole, complete, state = self.partial.tensor, self.complete, self.bucket.state_placement
        if complete is None:
            raise InternalError(f"bucket of {self.names}: its gradient is gathered before it is complete")
        if whole is not None and whole.dtype is self.wire:
            whole = self.bucket.own_slice(whole, state)
        else:
            whole = self._pool.acquire(self.bucket.layout.sizes[state], self.wire)
            own = self.bucket.own_slice(whole, Placement.SHARDED, of=state)
            own.copy_(complete)
            self.drop_complete()
            self.complete = own
        self.whole = whole
        return whole

    def set_aside(self) -> None:
        """Move ``complete`` to memory of its own, because another backward follows the final one."""
        if self.complete is not None:
            self.earlier = self.complete.float().clone()
        self.drop_complete()

    def add(self, parameters: Collection[int], summed: Tensor) -> None:
        """Add a slice that was completed separately to the elements of ``parameters``."""
        for complete, late in self._own_parts(parameters, summed):
            complete.copy_((complete.float() + late).to(self.wire))

    def restore_earlier(self, before: Collection[int], now: Collection[int]) -> None:
        """Add the gradient that ``set_aside`` kept.

        before, now: the parameters that some rank used before, and in this backward.
        """
        if self.earlier is not None:
            self.add([p for p in self.pieces if p in before and p in now], self.earlier)
            for complete, earlier in self._own_parts([p for p in before if p not in now], self.earlier):
                complete.copy_(earlier)
        self.earlier = None

    def _own_parts(self, parameters: Collection[int], other: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the elements of ``parameters`` in this rank's slice, of ``complete`` and of ``other``."""
        if (complete := self.complete) is not None:
            for start, end in (self.own[parameter] for parameter in self.own.keys() & parameters):
                yield complete[start:end], other[start:end].to(complete.device)

    def drop_complete(self) -> None:
        """Release the memory of the complete gradient, each storage once: some tensors are views of others."""
        given = {t.untyped_storage()._cdata for t in (self.partial.tensor,) if t is not None}
        for tensor in (self.whole, self.complete, self.total):
            if tensor is not None and tensor.untyped_storage()._cdata not in given:
                given.add(tensor.untyped_storage()._cdata)
                self._pool.release(tensor)
        self.complete = self.whole = self.total = None
        self._drop_squares()
        self.partial.discard()

    def discard(self) -> None:
        """Drop all gradients of the accumulation window."""
        self._restart_delivery()
        self._give_fetched()
        self.drop_complete()
        self.late.discard()
        self.earlier = None

    def storages(self) -> dict[int, tuple[str, int]]:
        """Return the storages that hold gradients now: identity of the storage → (place, bytes)."""
        here = (self.partial.tensor, self.late.tensor, self.whole, *self.partial.waiting, *self.late.waiting)
        found: dict[int, tuple[str, int]] = {}
        for tensors, place in (((self.total, self.complete, self.earlier), "cpu" if self.leaves else "device"),
                               (here, "device")):  # fmt: skip
            for tensor in tensors:
                if tensor is not None:
                    storage = tensor.untyped_storage()
                    found[storage._cdata] = place, storage.nbytes()
        return found
