"""From each parameter's gradient to the complete gradient of the step, bucket by bucket, for every stage.

Owns: readiness counting, launching reductions in one order on all ranks, the end of a backward, agreeing on the used
parameters. Must not know: stages by name, modules, weights, the optimizer. The places of gradients and their dtypes are
``gradient_bucket.py``'s ([Note: Gradients of a window], [Note: Late gradients]).

[Note: Static graph] If the config promises that a rank always uses the same parameters (``Rules.static``), the first
accumulation window determines them, those of this rank and those of any rank. From then on a bucket does not wait for
gradients that never come. In the message at the end of a window ranks send one bit instead of the used parameters:
whether this rank used others. If so, every rank raises. Additional backwards at the end of a window are agreed on as
without this setting.

If every rank needs the whole gradient (``Rules.gathers``), complete slices are gathered as soon as they are divided.

[Note: Launch order] Bucket i is launched only after bucket i-1 of one fixed order, so collectives match on all ranks
even if ranks finish parameters in different orders or do not use some. The order is the layout's in the first backward,
and afterwards the one that rank 0's buckets became ready in. Rank 0 also sends the order of its gradients, which the
engine may use to cut the buckets again (core/rebuild.py).

[Note: Units] If units are gathered in backward, a rank may be in a gather that others join only after they have waited
for a reduction. So a bucket is launched only when its unit was admitted, that is when this rank's gathers up to it are
issued. A unit that is closed is launched with zeros for missing gradients. The root has no fixed place in backward: its
buckets are launched last, when backward ends.
"""

from __future__ import annotations

import functools
import logging
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy
import torch
from torch import Tensor, nn

from shardengine.comm import Chunks, Collectives, OnComplete, Purpose, TransferOptions, Work
from shardengine.ddp.comm_hooks import CommHook, FutureWork, GradBucket, HookMessages, HookPiece, WholeGradients
from shardengine.ddp.early_use import Consumer, EarlyUse
from shardengine.ddp.gradient_bucket import GradientBucket, Rules, flat_gradient
from shardengine.ddp.gradient_views import GradientViews
from shardengine.ddp.sparse_rows import SparseRows
from shardengine.ddp.step_state import Phase, StepState
from shardengine.errors import InternalError, UsageError
from shardengine.kernels import flatten, join_powers, ordered_sum
from shardengine.offload import BufferPool, CopyQueue
from shardengine.sharding import Bucket, BucketLayout, FlatSlice, Layout, ParameterSpec, Targets, shaped, slices_of
from shardengine.stages import Axis, Placement

_log = logging.getLogger(__name__)
ERROR, FACTOR = "comm_error", "comm_factor"
"""Keys of flat slices: of errors, which messages have not sent yet, and of factors that a hook keeps between steps."""
MAX_IN_FLIGHT = 3
"""The most buckets whose reduction is in flight at one moment."""


class Payload(NamedTuple):
    """The message that ranks exchange when their gradients are complete.

    host: uint8 on the CPU · values: fp64 on the device.
    """

    host: Tensor
    values: Tensor


def no_payload() -> Payload:
    """Return an empty payload: only the used parameters are exchanged."""
    return Payload(torch.zeros(0, dtype=torch.uint8), torch.zeros(0, dtype=torch.float64))


@dataclass(frozen=True)
class _Flight:
    """A collective in flight, and the function to call when it is complete (which may start another one)."""

    work: Work
    then: Callable[[], Work | _Flight | None] | None = None


@dataclass(frozen=True)
class _BackwardMode:
    """The purpose of the running backward, or of the last one.

    synchronise: its gradients are reduced · final: the accumulation window ends with it.
    """

    synchronise: bool = True
    final: bool = False


@dataclass(frozen=True)
class _Static:
    """The parameters that this rank uses in every window (None: it had no data yet), and those that some rank uses.

    See [Note: Static graph].
    """

    here: frozenset[int] | None
    anywhere: frozenset[int]


def _nothing() -> None: ...


class _Order:
    """The launch order of buckets ([Note: Launch order]). units: of each bucket, or () if units do not matter."""

    def __init__(self, count: int, units: Sequence[int] = ()) -> None:
        self.units = units
        self._of_unit: dict[int, list[int]] = {}
        for index, unit in enumerate(units):
            self._of_unit.setdefault(unit, []).append(index)
        self._order = self._root_last(list(range(count)))
        self._seen: list[int] | None = []
        self._position = 0
        self._admitted: set[int] = set()

    def _root_last(self, order: list[int]) -> list[int]:
        return sorted(order, key=lambda index: self.units[index] == 0) if self.units else order

    def of_unit(self, unit: int) -> list[int]:
        """Return the buckets of ``unit``."""
        return self._of_unit.get(unit, [])

    def admit(self, unit: int) -> None:
        """Allow the launch of the buckets of ``unit``."""
        self._admitted.add(unit)

    def admits_unit(self, unit: int) -> bool:
        """Return whether ``unit`` was admitted, or no bucket waits for that."""
        return not self.units or unit in self._admitted

    def admits(self, index: int) -> bool:
        """Return whether bucket ``index`` may be launched before backward is over."""
        return not self.units or self.units[index] in self._admitted

    def note_ready(self, index: int) -> None:
        """Note that bucket ``index`` is ready and may be launched."""
        if self._seen is not None:
            self._seen.append(index)

    def left(self) -> list[int]:
        """Return the buckets that are still to be launched, in order."""
        return self._order[self._position :]

    def next(self) -> int | None:
        """Return the first of ``left``."""
        return self._order[self._position] if self._position < len(self._order) else None

    def advance(self) -> None:
        """The first of ``left`` was launched."""
        self._position += 1

    def place_of(self, index: int) -> int:
        """Return the position of bucket ``index`` in the order."""
        return self._order.index(index)

    def after(self, index: int) -> list[int]:
        """Return the buckets that are launched after bucket ``index``."""
        return self._order[self._order.index(index) + 1 :]

    def restart(self) -> None:
        """Begin the order again, for a new backward."""
        self._position = 0
        self._admitted.clear()
        if self._seen is not None:
            self._seen = []

    def adopt(self, collectives: Collectives, came: list[int]) -> list[int]:
        """After the first reduced backward: take over rank 0's order of ready buckets; collective.

        came: the parameters, in the order of their gradients on this rank. Returns rank 0's.
        """
        mine = torch.tensor([*dict.fromkeys([*(self._seen or ()), *self._order]), *came], dtype=torch.int64)
        rank0 = collectives.hear(mine.view(torch.uint8), "the order of buckets").view(torch.int64).tolist()
        self._order, self._seen = self._root_last(rank0[: len(self._order)]), None
        return rank0[len(self._order) :]


class Reducer:
    """Reduces gradients of the trainable ``buckets`` (in layout order).

    step_state: of the accumulation window, moved here as far as AGREED · parameters: of ``layout``, which show the
    gradients · hook: determines the messages of a reduction · arrival: the trainable parameters in the order of their
    gradients in rank 0's first reduced backward, () before that.
    """

    def __init__(
        self,
        layout: Layout,
        buckets: list[Bucket],
        collectives: Collectives,
        pool: BufferPool,
        rules: Rules,
        step_state: StepState,
        parameters: Sequence[nn.Parameter] = (),
    ) -> None:
        self.hook: CommHook | None = None
        self._step_number = 0
        self.step_state = step_state
        self.follow(rules)
        self.platform = collectives.mesh.platform
        self._spill = CopyQueue(self.platform, pool)
        self.way_back = CopyQueue(self.platform, pool)
        self.buckets = [self._new_state(bucket, layout, pool) for bucket in buckets]
        self.views = GradientViews(
            layout,
            self.buckets,
            parameters,
            collectives.mesh.rank,
            lambda error, what: collectives.failures.report_outside(error, what),
        )
        self.used: set[int] = set()
        self.touched: frozenset[int] = frozenset()
        self._collectives = collectives
        self._rows = SparseRows(collectives, pool)
        self._pool = pool
        self._parameters = len(layout.parameters)
        self._of_parameter: dict[int, list[GradientBucket]] = {}
        for bucket_grad in self.buckets:
            for parameter in bucket_grad.pieces:
                self._of_parameter.setdefault(parameter, []).append(bucket_grad)
        self._order = _Order(len(self.buckets))
        self._came: dict[int, None] | None = {}
        self.arrival: Sequence[int] = ()
        self._mode = _BackwardMode()
        self._told_unused = False
        self._static: _Static | None = None
        self.early_use = EarlyUse(step_state)
        self._consumer: Consumer | None = None
        self._in_flight: deque[_Flight] = deque()

    def _new_state(self, bucket: Bucket, layout: Layout, pool: BufferPool) -> GradientBucket:
        away = bucket.state_store.away
        leaves, spill = away and not self.rules.gathers, self._spill if away and self.platform.has_own_memory else None
        return GradientBucket(bucket, layout, pool, self.rules.wire or bucket.full.dtype, leaves=leaves, spill=spill)

    def follow(self, rules: Rules) -> None:
        """Reduce gradients by ``rules`` from now on; called between two accumulation windows."""
        self.rules = replace(rules, divisor=1) if isinstance(self.hook, WholeGradients) else rules
        self._apart = rules.apart_with(*self.step_state.replicas.part)
        self._rounds_before_sending = not rules.sharded and rules.accumulate is not torch.float32

    @property
    def _today(self) -> Rules:
        """The rules of this accumulation window."""
        return self._apart if self.step_state.replicas.step.apart else self.rules

    @property
    def collectives(self) -> Collectives:
        """The operations between the ranks that share the buckets."""
        return self._collectives

    def serve(self, consumer: Consumer) -> None:
        """From now on ``consumer`` steps with complete gradients."""
        self._consumer = consumer
        self.early_use.serve(consumer if consumer.steps_early else None)

    def finish_gradients(self) -> None:
        """Agree with the other ranks on the gradients, which are complete on this rank; collective.

        Called again if gradients were changed since.
        """
        self.step_state.require("agreement")
        self.step_state.move(Phase.REDUCED)
        if self._consumer is not None:
            self._consumer.finish_gradients()
        else:
            self.agree(no_payload)
            self.views.show(self.touched, None, powers=self.powers)
        self.step_state.move(Phase.AGREED)

    def following(self, index: int) -> list[GradientBucket]:
        """Return the buckets whose gradients are complete after that of bucket ``index``, in order."""
        return [self.buckets[each] for each in self._order.after(index)]

    def begin_backward(self, *, synchronise: bool, final: bool) -> None:
        """Begin a backward. synchronise: reduce in this micro-batch · final: the accumulation window ends with it.

        After a final one, complete gradients are set aside, and ``agree`` adds the new backward's gradient to them.
        """
        again = self.step_state.phase is Phase.AGREED
        self.step_state.begin_backward(steps_early=final and self.early_use.is_foreseen)
        self.views.hide()
        if again:
            for bucket_grad in self.buckets:
                bucket_grad.set_aside()
            self.used.clear()
        elif self._static is not None and self._static.here is not None:
            for bucket_grad in self.buckets:
                bucket_grad.expect_only(self._static.here)
        if self.hook is not None:
            self.hook.begin_step(self._step_number)
        self._mode = _BackwardMode(synchronise, final)
        if self._came is not None:
            self._came.clear()

    def on_gradient(self, parameter: int, gradient: Tensor) -> None:
        """Take ``gradient`` of ``parameter`` in the running backward; the caller may drop it afterwards."""
        states = self._of_parameter[parameter]
        if gradient.layout is not torch.strided and not self.rules.steps_everything:
            name = states[0].name_of(parameter)
            raise UsageError(
                f"parameter {name!r} has a sparse gradient: expected a dense one at every stage but 0; use "
                "sparse=False",
                code="grad-sparse-beyond-stage-0",
            )
        self.used.add(parameter)
        if self._came is not None:
            self._came[parameter] = None
        gradient = flat_gradient(gradient, self.views.layout.parameters[parameter])
        again, synchronise = states[0].has_delivered(parameter), self._mode.synchronise
        for bucket_grad in states:
            if again and synchronise:
                bucket_grad.late.add(parameter, gradient, torch.float32)
                continue
            if not bucket_grad.add_gradient(parameter, gradient, self._dtype_of_partial(bucket_grad)):
                continue
            if not synchronise:
                bucket_grad.partial.flush(self._dtype_of_partial(bucket_grad))
            elif not again:
                self._note_ready(bucket_grad.bucket.layout.index)
                self._launch_ready()

    def divide(self, unit_of: Mapping[int, int]) -> None:
        """Launch by units, because weights are gathered in backward unit by unit.

        unit_of: the unit of each parameter; the root's is 0. From now on a unit's buckets are launched when it was
        admitted, and the root's when backward ends.
        """
        units = [unit_of[next(iter(bucket_grad.pieces))] for bucket_grad in self.buckets]
        self._order = _Order(len(self.buckets), units if any(units) else ())

    def admit(self, unit: int) -> None:
        """Allow the launch of the ready buckets of ``unit``.

        Every rank at this point of the backward has gathered the unit for the last time in it, or is about to.
        """
        if self.step_state.phase is not Phase.BACKWARD or self._order.admits_unit(unit):
            return
        self._order.admit(unit)
        if self._mode.synchronise:
            for index in self._order.of_unit(unit):
                if self.buckets[index].is_ready:
                    self._note_ready(index)
            self._launch_ready()

    def end_unit(self, unit: int) -> None:
        """End ``unit`` in this backward on this rank: missing gradients are zero."""
        if self.step_state.phase is not Phase.BACKWARD or not self._mode.synchronise:
            return
        incomplete = [index for index in self._order.of_unit(unit) if not self.buckets[index].is_ready]
        for index in incomplete:
            self.buckets[index].expect_no_more()
        if self._order.admits_unit(unit):
            for index in incomplete:
                self._note_ready(index)
            self._launch_ready()
        else:
            self.admit(unit)

    def _note_ready(self, index: int) -> None:
        if self._order.admits(index):
            self._order.note_ready(index)

    def finalize_backward(self) -> None:
        """End a backward: launch the remaining buckets (zeros for parameters that this rank did not use), and wait.

        If the accumulation window ends here without another reduction, its total is completed. Collective in the first
        backward that reduces: ranks adopt rank 0's order of buckets.
        """
        mode, rules = self._mode, self._today
        if mode.synchronise:
            for index in self._order.left():
                self._launch(self.buckets[index])
            self._complete_flights(0)
            self._adopt_order()
        self._order.restart()
        for bucket_grad in self.buckets:
            bucket_grad.end_backward(rules.accumulate)
            if mode.final and bucket_grad.complete is None and bucket_grad.total is not None:
                if rules.ends_across:
                    self._reduce_across(bucket_grad)
                    continue
                if self.step_state.replicas.step.exchanges:
                    self._exchange_total(bucket_grad)
                    continue
                bucket_grad.complete_from_total(rules)
                if rules.gathers:
                    self._fly(self._gather(bucket_grad, bucket_grad.make_whole()))
        self._complete_flights(0)
        self.step_state.move(Phase.REDUCED if mode.final and self.buckets else Phase.ACCUMULATED)

    def _adopt_order(self) -> None:
        if self._came is None:
            return
        came = list(dict.fromkeys([*self._came, *self._of_parameter]))
        self.arrival, self._came = self._order.adopt(self._collectives, came), None

    def flush(self) -> None:
        """Complete the accumulation window now, although its last backward was not final: reduce unsent gradients."""
        unsent = not self._mode.synchronise
        self.begin_backward(synchronise=unsent, final=True)
        self.finalize_backward()

    def discard(self) -> None:
        """Drop the window's gradients, also after a backward that raised; buffers stay allocated for the next one."""
        self.views.hide()
        self.early_use.wait()
        self.step_state.drop_gradients()
        self._complete_flights(
            0
        )  # with the continuation of each reduction, so every rank has issued the same collectives
        self._mode = _BackwardMode()
        self._order.restart()
        for bucket_grad in self.buckets:
            bucket_grad.discard()
        self.used.clear()
        self.touched = frozenset()

    def abandon(self) -> None:
        """After a failure: drop the accumulation window, the launch order and everything in flight.

        The pool must forget its buffers as well.
        """
        self._in_flight.clear()
        self._spill.drop()
        self.way_back.drop()
        self._order = _Order(len(self.buckets), self._order.units)
        self._static = None
        self._came = {}
        self.views.take_digest()  # some ranks may have failed before they did what others have done
        self.early_use.forget()
        if self.hook is not None:
            self.hook.start_again()
        self.discard()

    def gradient_bytes(self) -> Counter[str]:
        """Return the bytes that hold gradients now, by place; transient buffers of the pool are not included."""
        found = {key: bytes_at for bucket_grad in self.buckets for key, bytes_at in bucket_grad.storages().items()}
        total: Counter[str] = Counter()
        for place, size in found.values():
            total[place] += size
        return total

    def agree(self, payload: Callable[[], Payload]) -> tuple[Tensor, Tensor]:
        """Agree on the used parameters (``touched``) of a complete accumulation window; collective.

        payload: makes the rest of the message from the complete gradient. Returns every rank's values and host bytes,
        [ranks, …]. The message also has the ranks' reports about their data (joining: [Note: Uneven inputs]). If a rank
        has late gradients, or an earlier backward was final, those gradients are added first.
        """
        late = {parameter for bucket_grad in self.buckets for parameter in bucket_grad.late.filled}
        reopened = any(bucket_grad.earlier is not None for bucket_grad in self.buckets)
        known = None if reopened else self._static
        here, serves = frozenset(self.used), self.step_state.join.serves
        if known is None:
            values, rows, found = self._exchange_all(payload, here | ({self._parameters} if late else set()))
        else:
            flags = {0} if late else set[int]()
            if known.here is None and here <= known.anywhere and not serves:
                known = self._static = replace(known, here=here)
            flags |= {1} if here != known.here and not serves else set[int]()
            values, rows, found = self._exchange_all(payload, flags, 2)
            if 1 in found:
                self._refuse_change(known)
            found = known.anywhere | ({self._parameters} if 0 in found else set())
        used = found - {self._parameters}
        self.early_use.note(late=self._parameters in found, again=reopened)
        if reopened or self._parameters in found:
            *_, late_anywhere = self._exchange(None, late)
            for bucket_grad in self.buckets:
                self._join(bucket_grad, late_anywhere, used)
            self._complete_flights(0)
            self.used |= self.touched
            values, rows, used = self._exchange_all(payload, self.used)
        self.touched = self._stepped(used)
        self.step_state.join.hear(rows[:, 0].tolist())
        if self.rules.static and not reopened and self._static is None:
            self._static = _Static(None if serves else here, used)
        return values, rows[:, 1:]

    def _stepped(self, used: frozenset[int]) -> frozenset[int]:
        """Return the parameters to step, from those that some rank has ``used``."""
        unused = sorted(self._of_parameter.keys() - used) if self.rules.steps_unused else []
        if unused and not self._told_unused and self._collectives.mesh.rank == 0:
            more = f" and {len(unused) - 1} more" if len(unused) > 1 else ""
            name = self.views.layout.parameters[unused[0]].name
            _log.warning("no rank had a gradient of %r%s: stepped with zeros (step_unused_parameters)", name, more)
        self._told_unused |= bool(unused)
        return used.union(unused)

    def _exchange_all(
        self, payload: Callable[[], Payload], numbers: Collection[int], count: int | None = None
    ) -> tuple[Tensor, Tensor, frozenset[int]]:
        """As ``_exchange``, with the byte of ``Join`` in front of each rank's message."""
        host, values = payload()
        attends = torch.tensor([self.step_state.join.byte], dtype=torch.uint8)
        return self._exchange(Payload(torch.cat([attends, host]), values), numbers, count)

    def _refuse_change(self, known: _Static) -> None:
        """Raise ``UsageError`` on every rank: some rank uses other parameters than in the first window; collective."""
        before = known.here if known.here is not None else known.anywhere if self.used else frozenset[int]()
        new, gone = sorted(self.used - before), sorted(before - self.used) if known.here is not None else []
        name = [self.views.layout.parameters[index].name for index in (*new, *gone)][:1]
        told = [name[0], bool(new), len(new) + len(gone)] if name else None
        places = self._collectives.exchange_objects(told, "a change of the static graph")
        rank, (first, added, count) = next((r, place) for r, place in enumerate(places) if place is not None)
        more = f", and {count - 1} more" if count > 1 else ""
        raise UsageError(
            f"static_graph: parameter {first!r} has {'a' if added else 'no'} gradient on rank {rank}, and had "
            f"{'none' if added else 'one'} in the first window{more} (this is rank {self._collectives.mesh.rank}): "
            "expected every window of a rank to use the same parameters; set that key to false, and call engine."
            f"{'reset' if self.step_state.must_be_stepped else 'zero_grad'}() on every rank to go on without this one",
            code="static-graph-changed",
        )

    def powers_here(self, order: float) -> dict[int, Tensor]:
        """Return parameter → ``power_sum`` of this rank's part of its complete gradient: 0-dim fp64, on its device."""
        found: dict[int, Tensor] = {}
        for parameter, power in (pair for bucket_grad in self.buckets for pair in bucket_grad.powers(order).items()):
            before = found.get(parameter)
            found[parameter] = power if before is None else join_powers(torch.stack([before, power]), order)
        return found

    def powers(self, order: float) -> Tensor:
        """Return ``power_sum`` of each parameter's complete gradient, fp64 [parameters] on the device; collective."""
        values = torch.zeros(self._parameters, dtype=torch.float64, device=self._collectives.mesh.device)
        for parameter, power in self.powers_here(order).items():
            values[parameter] = power
        nothing = torch.zeros(1, dtype=torch.uint8)
        rows = self._collectives.exchange_values(values, nothing, "norms of gradients")[0]
        return join_powers(rows[self.step_state.replicas.rows], order)

    def _exchange(
        self, payload: Payload | None, numbers: Collection[int], count: int | None = None
    ) -> tuple[Tensor, Tensor, frozenset[int]]:
        """Return every rank's ``payload``, and the union of the ranks' sets of ``numbers``.

        count: all numbers are below it; default: the number of parameters plus 1.
        """
        host, values = payload or no_payload()
        flags = torch.zeros(self._parameters + 1 if count is None else count, dtype=torch.bool)
        flags[list(numbers)] = True
        sent = torch.cat([self._collectives.flight_recorder.digest(), host, _pack(flags)])
        all_values, rows = self._collectives.exchange_values(values, sent, "the gradient norm and used parameters")
        digests, payloads, packed = rows.split([8, host.numel(), sent.numel() - 8 - host.numel()], dim=1)
        self._collectives.require_same(digests)
        return all_values, payloads, frozenset(_union(packed, len(flags)))

    def _join(self, bucket_grad: GradientBucket, late: frozenset[int], used: frozenset[int]) -> None:
        """Add the bucket's late gradients, completed separately, then the gradient from before this backward."""
        parameters = late.intersection(bucket_grad.pieces)
        if parameters:
            rules = self._today
            summed = self._pool.acquire(bucket_grad.bucket.layout.sizes[rules.complete], torch.float32)

            def on_complete(terms: Sequence[Tensor]) -> None:
                ordered_sum(terms, summed, divisor=rules.divisor, rounded=bucket_grad.wire, reduce_dtype=rules.reduce)

            local = bucket_grad.late.flush(torch.float32)
            sent = self._to_wire(bucket_grad, local)
            self._reduce_late(bucket_grad, sent, on_complete).wait()
            bucket_grad.add(parameters, summed)
            self._pool.release(summed)
            if sent is not local:
                self._pool.release(sent)
            bucket_grad.late.discard()
        if bucket_grad.earlier is not None:
            bucket_grad.restore_earlier(self.touched, used)
        if bucket_grad.whole is not None:
            self._fly(self._gather(bucket_grad, bucket_grad.whole))

    def _reduce_late(self, bucket_grad: GradientBucket, sent: Tensor, on_complete: OnComplete) -> Work:
        if not self.step_state.replicas.step.exchanges:
            return self._reduce(
                bucket_grad, sent, on_complete, TransferOptions(self._messages(None)), self._today.summed
            )
        work, second = self._reduce_with_partner(bucket_grad, sent, on_complete)
        work.wait()
        return second()

    def _launch_ready(self) -> None:
        while (index := self._order.next()) is not None:
            if not self.buckets[index].is_ready or not self._order.admits(index):
                return
            self._launch(self.buckets[index])
            self._order.advance()

    def _launch(self, bucket_grad: GradientBucket) -> None:
        """Start the reduction of ``partial`` after finishing the oldest ones; one by rows is also finished here."""
        by_rows = self.sends_rows(bucket_grad.bucket.layout)
        self._complete_flights(0 if by_rows else MAX_IN_FLIGHT - 1)
        final, rules = self._mode.final, self._today
        partial = bucket_grad.partial.flush(self._dtype_of_partial(bucket_grad))
        sent = self._to_wire(bucket_grad, partial)
        if self._in_rounds:
            self._in_flight.append(self._begin_rounds(bucket_grad, sent))
            return
        brought = isinstance(self.hook, WholeGradients) and not rules.sharded  # all of it, not this rank's slice alone

        offer = functools.partial(self.early_use.offer, bucket_grad) if self.early_use.enabled else _nothing

        def on_complete(terms: Sequence[Tensor]) -> None:
            if final:
                bucket_grad.set_complete(terms, rules, offer)
            else:
                bucket_grad.accumulate(terms, rules)

        def then() -> Work | None:
            whole = bucket_grad.make_whole() if final and rules.gathers else None
            if brought and whole is not None:
                whole.copy_(sent)
            if sent is not partial:
                self._pool.release(sent)
            return self._gather(bucket_grad, whole) if whole is not None and not brought else None

        if final and self.step_state.replicas.step.exchanges:
            self._in_flight.append(_Flight(*self._reduce_with_partner(bucket_grad, sent, on_complete, then)))
            return
        earlier = bucket_grad.detach_total() if final and rules.ends_across else None
        target = rules.summed if final else rules.gradients
        way = TransferOptions(self._messages(bucket_grad), earlier)
        self._in_flight.append(_Flight(self._reduce(bucket_grad, sent, on_complete, way, target), then))
        if by_rows:
            self._complete_flights(0)  # [Note: Sparse gradients]

    def _messages(self, bucket_grad: GradientBucket | None) -> HookMessages | None:
        """Return the hook's coding for the sum that ``bucket_grad`` sends first.

        None as bucket: another sum, without kept errors.
        """
        if self.hook is None or not self.hook.makes_messages:
            return None
        return HookMessages(
            self.hook,
            *(
                (None,)
                if bucket_grad is None
                else (bucket_grad.bucket.layout.index, self._filled_intervals(bucket_grad))
            ),
        )

    def _filled_intervals(self, bucket_grad: GradientBucket) -> list[tuple[int, int]]:
        """Return the intervals of ``partial`` with gradients of this rank, including the padding between parameters."""
        start, found, goes_on = bucket_grad.bucket.layout.start, list[tuple[int, int]](), False
        for piece in bucket_grad.pieces.values():
            used = piece.parameter in bucket_grad.partial.filled
            if used:
                first = found.pop()[0] if goes_on else piece.start - start
                found.append((first, piece.end - start))
            goes_on = used
        return found

    def _begin_rounds(self, bucket_grad: GradientBucket, full: Tensor) -> _Flight:
        """As ``_launch``, for a hook that brings the sum to every rank in rounds.

        full: fp32, ``partial`` or a buffer. Rounds of one bucket go between those of others, in an order that depends
        only on launches.
        """
        hook, final = self.hook, self._mode.final
        if hook is None:
            raise InternalError("rounds are a hook's")
        layout, autocast = bucket_grad.bucket.layout, self._collectives.mesh.platform.autocast_type
        rounds = hook.rounds(layout.index, full, self._filled_intervals(bucket_grad))

        def go_on() -> _Flight | Work | None:
            with torch.autocast(autocast, enabled=False):
                said = next(rounds, None)
            if said is not None:
                return self._add_up(said, layout, go_on)
            return self._end_rounds(bucket_grad, full, final=final)

        first = go_on()
        return first if isinstance(first, _Flight) else _Flight(first or Work())

    def _add_up(self, said: Tensor, what: BucketLayout, then: Callable[[], _Flight | Work | None]) -> _Flight:
        """Replace the tensor on every rank by its sum over ranks.

        Both operations use one group, which gathers of weights do not use.
        """
        collectives, ranks = self._collectives, self._collectives.mesh.ranks
        own = said.chunk(ranks)[collectives.mesh.rank]

        def on_complete(terms: Sequence[Tensor]) -> None:
            ordered_sum(terms, own, reduce_dtype=self.rules.reduce)

        def share() -> _Flight:
            return _Flight(collectives.share(said, [own.numel()] * ranks, what, Purpose.GRADIENTS), then)

        moved = said, Placement.PARTIAL, Placement.SHARDED, what, Purpose.GRADIENTS
        return _Flight(collectives.move(*moved, on_complete), share)

    def _end_rounds(self, bucket_grad: GradientBucket, full: Tensor, *, final: bool) -> Work | None:
        """Use ``full``, the ranks' sum; return the remaining work, if any."""
        rules, partial, wire = self.rules, bucket_grad.partial.tensor, bucket_grad.wire
        taken = [] if full is partial else [full]

        def offer() -> None:
            self.early_use.offer(bucket_grad)

        if not final:
            bucket_grad.accumulate([bucket_grad.bucket.own_slice(full, rules.gradients)], rules)
        elif not rules.gathers or rules.sharded:
            bucket_grad.set_complete([bucket_grad.bucket.own_slice(full, Placement.SHARDED)], rules, offer)
        else:  # all of it is complete, not this rank's slice alone
            divided = full if full.dtype is wire else self._pool.acquire(full.numel(), wire)
            taken += [divided] if divided is not full else []
            ordered_sum([full], divided, divisor=rules.divisor, rounded=wire)
            bucket_grad.set_complete(
                [bucket_grad.bucket.own_slice(divided, Placement.SHARDED)], replace(rules, divisor=1), offer
            )
            whole = bucket_grad.make_whole()
            if whole.data_ptr() != divided.data_ptr():
                whole.copy_(divided)
        for buffer in taken:
            self._pool.release(buffer)
        return (
            self._gather(bucket_grad, bucket_grad.make_whole()) if final and rules.gathers and rules.sharded else None
        )

    def _reduce_across(self, bucket_grad: GradientBucket) -> None:
        """Add up the sums of the shard groups, for a window that ends without another reduction inside them."""
        self._complete_flights(MAX_IN_FLIGHT - 1)
        rules, total = self.rules, bucket_grad.detach_total(self.rules.reduce)
        if total is None:
            return

        def on_complete(terms: Sequence[Tensor]) -> None:
            bucket_grad.set_complete(terms, rules, lambda: None)

        def then() -> Work:
            self._pool.release(total)
            return self._gather(bucket_grad, bucket_grad.make_whole())

        moved = total, Placement.PARTIAL_ACROSS, Placement.SHARDED, bucket_grad.bucket.layout, Purpose.GRADIENTS
        work = self._collectives.move(*moved, on_complete, TransferOptions(self._messages(None)))
        self._in_flight.append(_Flight(work, then))

    def _reduce_with_partner(
        self,
        bucket_grad: GradientBucket,
        sent: Tensor,
        on_complete: OnComplete,
        then: Callable[[], object] = lambda: None,
    ) -> tuple[Work, Callable[[], Work]]:
        """Add up ``sent`` and the waiting ``total`` inside the group; return this work and its continuation.

        The continuation starts to bring another group's sum, and passes both to ``on_complete``. then: called when
        ``sent`` is not used any more.
        """
        rules, earlier = self._today, bucket_grad.detach_total()
        summed = self._pool.acquire(bucket_grad.bucket.layout.sizes[rules.complete], rules.reduce)

        def add_up(terms: Sequence[Tensor]) -> None:
            ordered_sum(terms, summed, total=earlier, reduce_dtype=rules.reduce)
            if earlier is not None:
                self._pool.release(earlier)

        def second() -> Work:
            then()
            return self._exchange_sums(bucket_grad, summed, on_complete)

        return self._reduce(bucket_grad, sent, add_up, TransferOptions(), rules.summed), second

    def _exchange_total(self, bucket_grad: GradientBucket) -> None:
        """Exchange ``total`` in a window that ends without another reduction inside the shard groups."""
        self._complete_flights(MAX_IN_FLIGHT - 1)
        rules, total = self._today, bucket_grad.detach_total(self.rules.reduce)
        if total is not None:
            self._fly(
                self._exchange_sums(
                    bucket_grad, total, lambda terms: bucket_grad.set_complete(terms, rules, lambda: None)
                )
            )

    def _exchange_sums(self, bucket_grad: GradientBucket, summed: Tensor, on_complete: OnComplete) -> Work:
        """Begin to bring another group's sum, and pass both to ``on_complete``.

        summed: a buffer of the pool, which the caller no longer owns.
        """
        to, source = self.step_state.replicas.partners
        count, groups = summed.numel(), range(self._collectives.mesh.replicas)
        received = self._pool.acquire(count, summed.dtype)
        to_each, from_each = ([count * (group == other) for group in groups] for other in (to, source))
        parts = Chunks(summed, to_each, received, from_each, summed.nbytes * len(groups))

        def end() -> None:
            on_complete([summed, received])
            self._pool.release(summed)
            self._pool.release(received)

        work = self._collectives.deliver(parts, bucket_grad.bucket.layout, Purpose.GRADIENTS, Axis.ACROSS)
        return work.ending_with(end)

    def _dtype_of_partial(self, bucket_grad: GradientBucket) -> torch.dtype:
        """Return the dtype of a sum that begins now: the wire's if it is sent at once, else that of waiting gradients.

        It is fp32 for a hook that makes messages or rounds from it.
        """
        if (self._makes_messages or self._in_rounds) and self._mode.synchronise and not self._rounds_before_sending:
            return torch.float32
        waits = not self._mode.synchronise or self._rounds_before_sending
        return self.rules.accumulate if waits else bucket_grad.wire

    @property
    def _in_rounds(self) -> bool:
        return self.hook is not None and self.hook.in_rounds and self._collectives.mesh.ranks > 1

    @property
    def _makes_messages(self) -> bool:
        return self.hook is not None and self.hook.makes_messages

    def _to_wire(self, bucket_grad: GradientBucket, full: Tensor) -> Tensor:
        """Return ``full`` in the dtype that is sent, fp32 for a hook: itself, or a copy in a buffer of the pool."""
        dtype = torch.float32 if self._makes_messages or self._in_rounds else bucket_grad.wire
        if full.dtype is dtype:
            return full
        sent = self._pool.acquire(full.numel(), dtype)
        flatten([full], [0], sent)
        return sent

    def _reduce(
        self,
        bucket_grad: GradientBucket,
        full: Tensor,
        on_complete: OnComplete,
        way: TransferOptions,
        target: Placement,
    ) -> Work:
        bucket, hook = bucket_grad.bucket, self.hook
        if isinstance(hook, WholeGradients):
            return self._reduce_by(hook, bucket_grad, full, on_complete, target)
        if hook is not None and not hook.sends:
            return Work(on_complete=lambda: on_complete([bucket.own_slice(full, target)]))
        if self.sends_rows(bucket.layout):
            return self._rows.reduce(full, bucket.layout, on_complete)
        return self._collectives.move(
            full, Placement.PARTIAL, target, bucket.layout, Purpose.GRADIENTS, on_complete, way
        )

    def _reduce_by(
        self,
        hook: WholeGradients,
        bucket_grad: GradientBucket,
        full: Tensor,
        on_complete: OnComplete,
        target: Placement,
    ) -> Work:
        """Let a function of the user's bring the mean over ranks.

        On gloo one call runs at a time, because it may hold both of gloo's threads: torch's PowerSGD waits for a
        collective in the callback of another one.
        """
        if self._collectives.may_poll:
            self._complete_flights(0)
        layout, parameters = bucket_grad.bucket.layout, self.views.parameters
        pieces = list(bucket_grad.pieces.values())
        gradients = []
        for piece in pieces:
            flat, spec = full[piece.start - layout.start : piece.end - layout.start], self._spec(piece.parameter)
            gradients.append(shaped(flat, spec) if spec.shape and flat.numel() == spec.numel else flat)
        number, last = self._order.place_of(layout.index), len(self.buckets) - 1
        those = [parameters[piece.parameter] for piece in pieces]
        bucket, elements = GradBucket(layout.index, number == last, full, gradients, those), full.numel()
        with self.step_state.in_hook():
            future = hook.begin(bucket)
        hook.require_whole(full, elements)

        def take() -> None:
            full.copy_(hook.result(future, full))
            on_complete([bucket_grad.bucket.own_slice(full, target)])

        return self._collectives.follow(FutureWork(future), layout, Purpose.GRADIENTS, take)

    def sends_rows(self, layout: BucketLayout) -> bool:
        """Return whether only this bucket's rows that are not zero travel ([Note: Sparse gradients]).

        With a hook all rows do.
        """
        return layout.row > 0 and self.hook is None and self._collectives.mesh.ranks > 1

    def _spec(self, parameter: int) -> ParameterSpec:
        return self.views.layout.parameters[parameter]

    def use(self, hook: CommHook | None) -> None:
        """From the start on, ``hook`` determines the messages of a reduction."""
        self.hook, mesh = hook, self._collectives.mesh
        if hook is not None and mesh.ranks > 1:
            for bucket_grad in self.buckets:
                layout = bucket_grad.bucket.layout
                hook.allocate(layout.index, layout.length, self._parts(bucket_grad), mesh.ranks, mesh.device)

    def _parts(self, bucket_grad: GradientBucket) -> list[HookPiece]:
        start = bucket_grad.bucket.layout.start
        return [
            HookPiece(piece.parameter, piece.start - start, piece.end - piece.start, spec.shape_in_memory, spec.number)
            for piece in bucket_grad.pieces.values()
            for spec in [self._spec(piece.parameter)]
        ]

    def begin_step(self, number: int) -> None:
        """Note the number of updates that were made before the accumulation window that begins."""
        self._step_number = number

    def note_scale(self, scale: float) -> None:
        """Note that the running backward's loss is multiplied with ``scale``."""
        if self.hook is not None:
            self.hook.note_scale(scale)

    def register(self, hook: WholeGradients) -> None:
        """Replace the reductions, and their divisor, by ``hook``."""
        self.hook, self.rules = hook, replace(self.rules, divisor=1)

    @property
    def hook_label(self) -> str:
        """The name of the user's function that is the hook; "" without one."""
        return self.hook.label if isinstance(self.hook, WholeGradients) else ""

    def hook_calls(self, wait_s: float) -> int | None:
        """Return the number of calls of that function; None if it has failed, or does not end within ``wait_s``."""
        alone = self._collectives.mesh.ranks == 1
        return 0 if alone or not isinstance(self.hook, WholeGradients) else self.hook.calls(wait_s)

    def take_over(self, old: Reducer, before: Layout) -> None:
        """Take over the hook of ``old``, whose layout is ``before``: a function of the user's, errors that wait."""
        if isinstance(old.hook, WholeGradients):
            self.register(old.hook)
        self.begin_step(old._step_number)
        targets = Targets(self.hook_states(self.views.layout))
        for part in old.hook_states(before):
            targets.receive(part)

    def hook_states(self, layout: Layout) -> Iterator[FlatSlice]:
        """Yield the state that a hook keeps from step to step.

        Errors: the parts of gradients that this rank's messages have not sent yet, of every whole parameter. Factors:
        the same on all ranks, of parameters as a whole.
        """
        if self.hook is None:
            return
        for each in (
            bucket_grad.bucket.layout
            for bucket_grad in self.buckets
            if bucket_grad.bucket.layout.index in self.hook.errors
        ):
            yield from slices_of(layout, each, (each.start, each.end), {ERROR: self.hook.errors[each.index]})
        for parameter, factor in self.hook.factors.items():
            yield FlatSlice(layout.parameters[parameter].name, FACTOR, 0, factor.view(-1), per=0)

    def _gather(self, bucket_grad: GradientBucket, whole: Tensor) -> Work:
        layout = bucket_grad.bucket.layout
        if self.sends_rows(layout):
            return self._rows.gather(whole, layout)
        return self._collectives.move(whole, Placement.SHARDED, self.rules.state, layout, Purpose.WHOLE_GRADIENTS)

    def _fly(self, next_: Work | _Flight | None) -> None:
        if next_ is not None:
            self._in_flight.append(next_ if isinstance(next_, _Flight) else _Flight(next_))

    def finish_what_is_there(self) -> None:
        """Finish the reductions that are complete, from the oldest on, without blocking.

        If a reduction has two steps, other ranks may wait for this one to begin the second.
        """
        self._complete_flights(len(self._in_flight))

    def _complete_flights(self, leave: int) -> None:
        """Finish reductions from the oldest on: those that are complete, and more until ``leave`` are in flight.

        With rounds, complete ones are not finished early: rounds use one group, in the same order on every rank.
        """
        poll = self._collectives.may_poll and not self._in_rounds
        while self._in_flight and (len(self._in_flight) > leave or (poll and self._in_flight[0].work.done())):
            flight = self._in_flight.popleft()
            flight.work.wait()
            self._fly(flight.then() if flight.then is not None else None)
        self._spill.settle(leave)


def _pack(flags: Tensor) -> Tensor:
    """Return booleans as bits, eight to a byte."""
    padded = torch.cat([flags, flags.new_zeros(-len(flags) % 8)]).view(-1, 8).to(torch.uint8)
    return (padded << torch.arange(8, dtype=torch.uint8)).sum(dim=1, dtype=torch.uint8)


def _union(packed: Tensor, count: int) -> list[int]:
    """Return the numbers below ``count`` whose bit some rank has set. packed: bits, a row per rank."""
    found = numpy.bitwise_or.reduce(packed.numpy(), axis=0)
    numbers: list[int] = numpy.flatnonzero(numpy.unpackbits(found, count=count, bitorder="little")).tolist()
    return numbers
