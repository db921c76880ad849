"""From each parameter's gradient to the complete gradient of the step, bucket by bucket, for every stage.

Owns: readiness counting, launching reductions in one order on all ranks, the end of a backward, agreeing on
what was used. Must not know: stages by name, modules, weights, the optimizer. Where gradients rest, and in which dtype,
is ``gradient_bucket.py``'s ([Note: Gradients of a window], [Note: Late gradients]).

[Note: Static graph] Where the config says that a rank's used parameters stay the same (``Rules.static``), the first
window tells which they are, on this rank and on some. From then on a bucket is not waited with for what never comes,
and in the message at the end of a window ranks do not send which were used, but one bit: whether that is something else
on this rank. Then it is an error on every rank. Other backwards at the end of a window are agreed on as ever.

Where every rank needs the whole gradient (``Rules.gathers``), complete slices are gathered as soon as they are divided.

[Note: Launch order] Bucket i is launched only after bucket i-1 of one fixed order, so collectives match on all ranks
even where ranks finish parameters in different orders or do not use some. The order is the layout's in the first
backward, and afterwards the order in which rank 0's buckets became ready. With that goes the order in which rank 0's
gradients came, by which the engine may cut the buckets anew (core/rebuild.py, [Note: Buckets cut anew]).

[Note: Units] Where units are gathered in backward, a rank may stand in a gather that others join only after they have
waited for a reduction. So a bucket is launched only when its unit was admitted: this rank's gathers up to it are
issued. And a unit that is closed is launched with zeros for what did not come. The root belongs to no place in
backward: its buckets are launched last, when backward ends.
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
"""Keys of flat slices of what messages have not said yet, and of what a hook goes on with from step to step."""
MAX_IN_FLIGHT = 3
"""Buckets whose reduction is under way at one moment."""


class Payload(NamedTuple):
    """What ranks exchange when their gradients are complete. host: uint8 on the CPU · values: fp64 on the device."""

    host: Tensor
    values: Tensor


def no_payload() -> Payload:
    """Nothing is exchanged but the used parameters."""
    return Payload(torch.zeros(0, dtype=torch.uint8), torch.zeros(0, dtype=torch.float64))


@dataclass(frozen=True)
class _Flight:
    """A collective in flight, and what to do when it is complete (which may start another one)."""

    work: Work
    then: Callable[[], Work | _Flight | None] | None = None


@dataclass(frozen=True)
class _BackwardMode:
    """What the running backward is for, or the last one was. synchronise: what it brings is reduced · final: the window
    ends with it."""

    synchronise: bool = True
    final: bool = False


@dataclass(frozen=True)
class _Static:
    """The parameters that this rank uses in every window (None: it had no data yet), and those that some rank does
    ([Note: Static graph])."""

    here: frozenset[int] | None
    anywhere: frozenset[int]


def _nothing() -> None: ...


class _Order:
    """The order in which buckets are launched ([Note: Launch order]). units: of each bucket, or () for no matter."""

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
        """The buckets of ``unit``."""
        return self._of_unit.get(unit, [])

    def admit(self, unit: int) -> None:
        """The buckets of ``unit`` may be launched."""
        self._admitted.add(unit)

    def admits_unit(self, unit: int) -> bool:
        """Whether ``unit`` was admitted, or nothing waits for that."""
        return not self.units or unit in self._admitted

    def admits(self, index: int) -> bool:
        """Whether bucket ``index`` may be launched before backward is over."""
        return not self.units or self.units[index] in self._admitted

    def note_ready(self, index: int) -> None:
        """Bucket ``index`` is ready and may be launched."""
        if self._seen is not None:
            self._seen.append(index)

    def left(self) -> list[int]:
        """What is still to be launched, in order."""
        return self._order[self._position :]

    def next(self) -> int | None:
        """The first of ``left``."""
        return self._order[self._position] if self._position < len(self._order) else None

    def advance(self) -> None:
        """The first of ``left`` was launched."""
        self._position += 1

    def place_of(self, index: int) -> int:
        """Which one bucket ``index`` is."""
        return self._order.index(index)

    def after(self, index: int) -> list[int]:
        """What is launched after bucket ``index``."""
        return self._order[self._order.index(index) + 1 :]

    def restart(self) -> None:
        """A new backward begins."""
        self._position = 0
        self._admitted.clear()
        if self._seen is not None:
            self._seen = []

    def adopt(self, collectives: Collectives, came: list[int]) -> list[int]:
        """After the first reduced backward: take over the order in which rank 0's buckets became ready; collective.

        came: the parameters, in the order in which gradients came here → rank 0's.
        """
        mine = torch.tensor([*dict.fromkeys([*(self._seen or ()), *self._order]), *came], dtype=torch.int64)
        rank0 = collectives.hear(mine.view(torch.uint8), "the order of buckets").view(torch.int64).tolist()
        self._order, self._seen = self._root_last(rank0[: len(self._order)]), None
        return rank0[len(self._order) :]


class Reducer:
    """Reduces gradients of the trainable ``buckets`` (in layout order).

    step_state: the window's, moved here as far as AGREED · parameters: of ``layout``, which show the gradients · hook:
    says what travels when they are reduced · arrival: the trainable ones in the order in which gradients came in rank
    0's first reduced backward, () before that.
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
        """Gradients are reduced by ``rules`` from now on; between two windows."""
        self.rules = replace(rules, divisor=1) if isinstance(self.hook, WholeGradients) else rules
        self._apart = rules.apart_with(*self.step_state.replicas.part)
        self._rounds_before_sending = not rules.sharded and rules.accumulate is not torch.float32

    @property
    def _today(self) -> Rules:
        """Those of this window."""
        return self._apart if self.step_state.replicas.step.apart else self.rules

    @property
    def collectives(self) -> Collectives:
        """The operations between the ranks that share the buckets."""
        return self._collectives

    def serve(self, consumer: Consumer) -> None:
        """``consumer`` steps with what is complete, from now on."""
        self._consumer = consumer
        self.early_use.serve(consumer if consumer.steps_early else None)

    def finish_gradients(self) -> None:
        """The window's gradients are complete on this rank: agree with the others on what they are; collective.

        Again, where they were changed since.
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
        """The buckets whose gradients are complete after that of bucket ``index``, in order."""
        return [self.buckets[each] for each in self._order.after(index)]

    def begin_backward(self, *, synchronise: bool, final: bool) -> None:
        """Before a backward. synchronise: reduce in this micro-batch; final: the window ends with it.

        After a final one: what is complete is set aside, and the new backward's gradient is added to it in ``agree``.
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
        """``gradient`` of ``parameter`` in the running backward; the caller may drop it afterwards."""
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
        """Weights are gathered in backward, unit by unit: ``unit_of`` each parameter, the root's is 0.

        From now on a unit's buckets are launched when it was admitted, the root's when backward ends.
        """
        units = [unit_of[next(iter(bucket_grad.pieces))] for bucket_grad in self.buckets]
        self._order = _Order(len(self.buckets), units if any(units) else ())

    def admit(self, unit: int) -> None:
        """Every rank that is where this one is has gathered ``unit`` for the last time in this backward, or is about
        to: what is ready of it may be launched."""
        if self.step_state.phase is not Phase.BACKWARD or self._order.admits_unit(unit):
            return
        self._order.admit(unit)
        if self._mode.synchronise:
            for index in self._order.of_unit(unit):
                if self.buckets[index].is_ready:
                    self._note_ready(index)
            self._launch_ready()

    def end_unit(self, unit: int) -> None:
        """This backward brings no more gradients of ``unit`` on this rank: what did not come is zero."""
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
        """After a backward: launch what is left (zeros for what this rank did not use) and wait."""
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
        """Complete the window now, although its last backward was not the final one: reduce what was not."""
        unsent = not self._mode.synchronise
        self.begin_backward(synchronise=unsent, final=True)
        self.finalize_backward()

    def discard(self) -> None:
        """Forget the window's gradients, also after a backward that raised; buffers stay allocated for the next one."""
        self.views.hide()
        self.early_use.wait()
        self.step_state.drop_gradients()
        self._complete_flights(
            0
        )  # with what follows each reduction, so that every rank has issued the same collectives
        self._mode = _BackwardMode()
        self._order.restart()
        for bucket_grad in self.buckets:
            bucket_grad.discard()
        self.used.clear()
        self.touched = frozenset()

    def abandon(self) -> None:
        """After a failure: forget the window, the order of launches and what is in flight. The pool must, too."""
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
        """Bytes that hold gradients at this moment, by where; transient buffers of the pool are not included."""
        found = {key: bytes_at for bucket_grad in self.buckets for key, bytes_at in bucket_grad.storages().items()}
        total: Counter[str] = Counter()
        for place, size in found.values():
            total[place] += size
        return total

    def agree(self, payload: Callable[[], Payload]) -> tuple[Tensor, Tensor]:
        """The window is complete: agree on which parameters were used (``touched``); collective.

        payload: what else is exchanged, made of the complete gradient → every rank's values and host bytes, [ranks, …].
        With it goes what ranks say of their data (joining: [Note: Uneven inputs]). Where a rank has late gradients, or
        a backward was final before this one, those are added first.
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
        """What is stepped, of the parameters that some rank has ``used``."""
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
        """As ``_exchange``, behind a byte of every rank."""
        host, values = payload()
        attends = torch.tensor([self.step_state.join.byte], dtype=torch.uint8)
        return self._exchange(Payload(torch.cat([attends, host]), values), numbers, count)

    def _refuse_change(self, known: _Static) -> None:
        """``UsageError`` on every rank: on some, the used parameters are not those of the first window; collective."""
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
        """Parameter → ``power_sum`` of what this rank has of its complete gradient: 0-dim fp64, where that lies."""
        found: dict[int, Tensor] = {}
        for parameter, power in (pair for bucket_grad in self.buckets for pair in bucket_grad.powers(order).items()):
            before = found.get(parameter)
            found[parameter] = power if before is None else join_powers(torch.stack([before, power]), order)
        return found

    def powers(self, order: float) -> Tensor:
        """``power_sum`` of each parameter's complete gradient, fp64 [parameters] on the device; collective."""
        values = torch.zeros(self._parameters, dtype=torch.float64, device=self._collectives.mesh.device)
        for parameter, power in self.powers_here(order).items():
            values[parameter] = power
        nothing = torch.zeros(1, dtype=torch.uint8)
        rows = self._collectives.exchange_values(values, nothing, "norms of gradients")[0]
        return join_powers(rows[self.step_state.replicas.rows], order)

    def _exchange(
        self, payload: Payload | None, numbers: Collection[int], count: int | None = None
    ) -> tuple[Tensor, Tensor, frozenset[int]]:
        """Every rank's ``payload``, and the union of the ranks' sets of ``numbers``, all below ``count`` (default: one
        above the parameters' count)."""
        host, values = payload or no_payload()
        flags = torch.zeros(self._parameters + 1 if count is None else count, dtype=torch.bool)
        flags[list(numbers)] = True
        sent = torch.cat([self._collectives.flight_recorder.digest(), host, _pack(flags)])
        all_values, rows = self._collectives.exchange_values(values, sent, "the gradient norm and used parameters")
        digests, payloads, packed = rows.split([8, host.numel(), sent.numel() - 8 - host.numel()], dim=1)
        self._collectives.require_same(digests)
        return all_values, payloads, frozenset(_union(packed, len(flags)))

    def _join(self, bucket_grad: GradientBucket, late: frozenset[int], used: frozenset[int]) -> None:
        """Add the bucket's late gradients, completed on their own, then what was complete before this backward."""
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
        """Start the reduction of ``partial``, having finished the oldest ones; of rows alone, finish it, too."""
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
        """What the hook makes of the sum that ``bucket_grad`` sends for the first time; None: of another one, of whose
        errors nothing is known."""
        if self.hook is None or not self.hook.makes_messages:
            return None
        return HookMessages(
            self.hook, *((None,) if bucket_grad is None else (bucket_grad.bucket.layout.index, self._used(bucket_grad)))
        )

    def _used(self, bucket_grad: GradientBucket) -> list[tuple[int, int]]:
        """Where ``partial`` has gradients of this rank: intervals with the padding between parameters."""
        start, found, goes_on = bucket_grad.bucket.layout.start, list[tuple[int, int]](), False
        for piece in bucket_grad.pieces.values():
            used = piece.parameter in bucket_grad.partial.filled
            if used:
                first = found.pop()[0] if goes_on else piece.start - start
                found.append((first, piece.end - start))
            goes_on = used
        return found

    def _begin_rounds(self, bucket_grad: GradientBucket, full: Tensor) -> _Flight:
        """As ``_launch``, of what a hook brings to every rank in rounds; ``full`` is fp32, ``partial`` or a buffer.

        Rounds of one bucket go between those of others, in an order that depends on launches alone.
        """
        hook, final = self.hook, self._mode.final
        if hook is None:
            raise InternalError("rounds are a hook's")
        layout, autocast = bucket_grad.bucket.layout, self._collectives.mesh.platform.autocast_type
        rounds = hook.rounds(layout.index, full, self._used(bucket_grad))

        def go_on() -> _Flight | Work | None:
            with torch.autocast(autocast, enabled=False):
                said = next(rounds, None)
            if said is not None:
                return self._add_up(said, layout, go_on)
            return self._end_rounds(bucket_grad, full, final=final)

        first = go_on()
        return first if isinstance(first, _Flight) else _Flight(first or Work())

    def _add_up(self, said: Tensor, what: BucketLayout, then: Callable[[], _Flight | Work | None]) -> _Flight:
        """``said`` of all ranks, added up in its place on every rank. Both operations are on one group, where the
        gathers of weights are not."""
        collectives, ranks = self._collectives, self._collectives.mesh.ranks
        own = said.chunk(ranks)[collectives.mesh.rank]

        def on_complete(terms: Sequence[Tensor]) -> None:
            ordered_sum(terms, own, reduce_dtype=self.rules.reduce)

        def share() -> _Flight:
            return _Flight(collectives.share(said, [own.numel()] * ranks, what, Purpose.GRADIENTS), then)

        moved = said, Placement.PARTIAL, Placement.SHARDED, what, Purpose.GRADIENTS
        return _Flight(collectives.move(*moved, on_complete), share)

    def _end_rounds(self, bucket_grad: GradientBucket, full: Tensor, *, final: bool) -> Work | None:
        """``full`` is the ranks' sum. What is left to do, if anything."""
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
        """The window ends without another reduction inside of the shard groups: add up what these have."""
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
        """``sent`` is added up inside of the group, what waits in ``total`` joins; what then begins brings another
        group's sum beside it, and hands both to ``on_complete``. then: ``sent`` is not used any more."""
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
        """The window ends without another reduction inside of the shard groups."""
        self._complete_flights(MAX_IN_FLIGHT - 1)
        rules, total = self._today, bucket_grad.detach_total(self.rules.reduce)
        if total is not None:
            self._fly(
                self._exchange_sums(
                    bucket_grad, total, lambda terms: bucket_grad.set_complete(terms, rules, lambda: None)
                )
            )

    def _exchange_sums(self, bucket_grad: GradientBucket, summed: Tensor, on_complete: OnComplete) -> Work:
        """Begin to bring another group's sum; ``on_complete`` is given both. summed: a buffer of the pool, which is
        the caller's no longer."""
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
        """Of a sum that is begun now: the wire's where it is sent at once, else what gradients wait in; fp32 for a
        hook that makes something else of it."""
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
        """``full`` in the dtype that is sent, fp32 for a hook: itself, or a copy in a buffer of the pool."""
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
        """A function of the user's brings the mean over ranks. One at a time on gloo, whose two threads it may hold:
        torch's PowerSGD waits for a collective in what follows another one."""
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
        """Whether of this bucket's gradients only rows that are not zero travel ([Note: Sparse gradients]); a hook is
        given all of them."""
        return layout.row > 0 and self.hook is None and self._collectives.mesh.ranks > 1

    def _spec(self, parameter: int) -> ParameterSpec:
        return self.views.layout.parameters[parameter]

    def use(self, hook: CommHook | None) -> None:
        """``hook`` says what travels when gradients are reduced, from the start on."""
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
        """So many updates were made before the window that begins."""
        self._step_number = number

    def note_scale(self, scale: float) -> None:
        """The running backward's loss is multiplied with ``scale``."""
        if self.hook is not None:
            self.hook.note_scale(scale)

    def register(self, hook: WholeGradients) -> None:
        """``hook`` takes the place of the reductions, and of their divisor."""
        self.hook, self.rules = hook, replace(self.rules, divisor=1)

    @property
    def hook_label(self) -> str:
        """What a function of the user's is called; "" without one."""
        return self.hook.label if isinstance(self.hook, WholeGradients) else ""

    def hook_calls(self, wait_s: float) -> int | None:
        """How often that was called; None where it has failed, or what is under way does not end within ``wait_s``."""
        alone = self._collectives.mesh.ranks == 1
        return 0 if alone or not isinstance(self.hook, WholeGradients) else self.hook.calls(wait_s)

    def take_over(self, old: Reducer, before: Layout) -> None:
        """What ``old``, of the layout ``before``, knows of its hook: a function of the user's, errors that wait."""
        if isinstance(old.hook, WholeGradients):
            self.register(old.hook)
        self.begin_step(old._step_number)
        targets = Targets(self.hook_states(self.views.layout))
        for part in old.hook_states(before):
            targets.receive(part)

    def hook_states(self, layout: Layout) -> Iterator[FlatSlice]:
        """What a hook keeps from step to step: errors, what this rank's messages have not said yet of all of every
        parameter, and factors, the same on all ranks, of parameters as a whole."""
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
        """Finish the reductions that are complete, from the oldest on; blocks for none. Where a reduction has two
        steps, other ranks may wait for this one to begin the second."""
        self._complete_flights(len(self._in_flight))

    def _complete_flights(self, leave: int) -> None:
        """Finish reductions from the oldest on: those that are complete, and more until ``leave`` are in flight.

        Not those that are complete where rounds follow: these go on one group, in the same order on every rank.
        """
        poll = self._collectives.may_poll and not self._in_rounds
        while self._in_flight and (len(self._in_flight) > leave or (poll and self._in_flight[0].work.done())):
            flight = self._in_flight.popleft()
            flight.work.wait()
            self._fly(flight.then() if flight.then is not None else None)
        self._spill.settle(leave)


def _pack(flags: Tensor) -> Tensor:
    """Booleans → bits, eight to a byte."""
    padded = torch.cat([flags, flags.new_zeros(-len(flags) % 8)]).view(-1, 8).to(torch.uint8)
    return (padded << torch.arange(8, dtype=torch.uint8)).sum(dim=1, dtype=torch.uint8)


def _union(packed: Tensor, count: int) -> list[int]:
    """Bits, a row per rank → the numbers below ``count`` whose bit some rank has set."""
    found = numpy.bitwise_or.reduce(packed.numpy(), axis=0)
    numbers: list[int] = numpy.flatnonzero(numpy.unpackbits(found, count=count, bitorder="little")).tolist()
    return numbers
