"""The step: norm, clipping and the update of this rank's shards, with the user's own ``param_groups``.

Owns: master weights' optimizer state, step counts per parameter, which parameters are stepped. Must not know: hooks,
modules, how gradients came to be complete.

[Note: Settled a step later] The device decides whether a step is applied: it is not if its gradients are not finite.
The host needs the verdict for step counts, the loss scale and the scheduler, but waiting for it in ``step()`` would
leave the device idle. So the host goes on as if the step had been applied. It asks for the verdict in the first
``step()`` of the next window, or when that window's gradients are complete (``settle``), or earlier if a value that
depends on it is read. If the step was skipped, counts and the config's schedule are taken back. Whether the host waits
at once is the same on every rank, and every rank has settled before options and counts are compared between ranks.

The three parts of a step, repeated as comments below:
  1. norm     every rank's sum of squares and used-flags are exchanged (one message), the norm is the same everywhere
  2. update   per bucket: the segments of one group and step count in one kernel call, which unscales, clips, steps the
              master weights and writes the weights
  3. publish  the caller gathers each stepped bucket if weights are replicated
"""

from __future__ import annotations

import itertools
import logging
import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from shardengine import kernels
from shardengine.comm import describe
from shardengine.ddp import GradientBucket, Payload, Phase, Reducer
from shardengine.errors import InternalError, MismatchError, UsageError
from shardengine.kernels import Spans, StateForm, misfit, narrow_state, widened_state
from shardengine.offload import HOST
from shardengine.optim import agreed_facts, matrices, sums, torch_hooks
from shardengine.optim.arithmetic import Action, Arithmetic
from shardengine.optim.averages import AVERAGE, Advance, BeginAverage, Swap
from shardengine.optim.in_backward import StepsInBackward
from shardengine.optim.needs import Forms, Needs, stored_forms
from shardengine.optim.options import rate_of
from shardengine.optim.torch_hooks import StatesElsewhere
from shardengine.optim.update import (
    BucketWork,
    Label,
    Part,
    Segments,
    StepSettings,
    Update,
    Verdict,
    rewrite_bucket,
    step_bucket,
)
from shardengine.other_engines import read_from_optimizer
from shardengine.sharding import MASTER, WEIGHT, Bucket, FlatSlice, Layout, ParameterSpec, slices_of
from shardengine.stages import Placement

_log = logging.getLogger(__name__)
_RATES = (
    "learning rates changed inside an accumulation window, from %s to %s; a step uses those of the last micro-batch. "
    "To step a scheduler once per step, call its step() only if engine.was_step_applied(), or pass it to initialize as "
    "lr_scheduler"
)
_AHEAD = 2
"""Buckets that are prefetched while one is stepped."""


def _no_states(_given: Any) -> Any:
    raise UsageError(
        "engine.optimizer: expected the optimizer of an open engine, got one without an engine",
        code="optimizer-without-engine",
    )


@dataclass(frozen=True)
class EngineCalls:
    """The engine's functions for an optimizer.

    forget: drop the window's gradients · extend: add a parameter group · step: clip, step and publish, or only count ·
    exchange: exchange weights, as the class's method of that name does · save, load: states in torch's format; the
    argument of ``save`` is the result of ``StatesElsewhere.take_request``.
    """

    forget: Callable[[], None]
    extend: Callable[[dict[str, Any]], None]
    step: Callable[[], None]
    exchange: Callable[[str], None]
    save: Callable[[bool], dict[str, Any]] = _no_states
    load: Callable[[Mapping[str, Any]], None] = _no_states


class OptimizerForm(NamedTuple):
    """The optimizer that a user wants: its arithmetic (None: there is no optimizer), parameter groups and defaults.
    notice: a sentence about differences from the user's optimizer."""

    arithmetic: Arithmetic | None
    groups: list[dict[str, Any]]
    defaults: dict[str, Any]
    notice: str = ""

    @property
    def kind(self) -> str | None:
        """The name of its arithmetic."""
        return None if self.arithmetic is None else self.arithmetic.kind

    def needs(self, *, scheduled: bool, averages: bool) -> Needs:
        """Return its requirements on a layout. scheduled: there is a learning-rate scheduler · averages: averages of
        the weights are kept."""
        if self.arithmetic is None:
            return Needs()
        return Needs.of(self.arithmetic, self.groups, averages=averages, scheduled=scheduled)


class ShardedOptimizer(torch.optim.Optimizer):
    """Steps this rank's shards.

    ``param_groups`` are the user's groups themselves (the same dicts, the user's parameters), so a learning-rate
    scheduler made for either optimizer works.

    If the reducer gathers gradients (state replicated), every rank steps whole buckets instead of its slices.
    """

    _calls: EngineCalls | None = None
    state: StatesElsewhere

    def __init__(
        self,
        form: OptimizerForm,
        layout: Layout,
        reducer: Reducer,
        settings: StepSettings,
        calls: EngineCalls | None = None,
    ) -> None:
        if form.arithmetic is None:
            raise InternalError("a sharded optimizer is made for none")
        if settings.in_backward and form.arithmetic.waits:
            raise UsageError(
                f"offload_optimizer.step_in_backward: expected AdamW, Adam, SGD or Lion, got {form.kind}, which is "
                "stepped after the backward; set that key to false",
                code="optimizer-not-in-backward",
            )
        self.arithmetic = form.arithmetic
        super().__init__(form.groups, form.defaults)
        self.state = StatesElsewhere(lambda parameter: self._names_of(parameter))
        self.param_groups = form.groups  # the user's list itself, so that both optimizers see an added group
        self._calls = calls or EngineCalls(reducer.discard, _no_engine, _no_step, lambda method: None)
        self._lent: list[torch.optim.Optimizer] = []  # the user's own; schedulers may have been made for them
        self._reading: Future[None] | None = None
        self.norm: Tensor | None = None
        self.update: Update | None = None
        self._open: tuple[Update, Callable[[Verdict], None]] | None = None
        self.stepped_early = StepsInBackward(reducer.step_state)
        self.settings = settings
        self._rates: list[Any] = []
        self.divisors: set[int] = set()
        """The divisors of this window's losses, which must be the same on every rank."""
        self._told_of_rates = False
        self.lay_out(layout, reducer, [0] * len(layout.parameters))

    def begin(self) -> None:
        """Make the state. Call it after the scheduler was made, which may have raised SGD's momentum from 0."""
        for bucket_grad in self._reducer.buckets:
            bucket_grad.bucket.begin_states(self.forms_in(bucket_grad.bucket))

    def lay_out(self, layout: Layout, reducer: Reducer, steps: list[int]) -> None:
        """Step the buckets of ``reducer`` from now on. steps: taken so far, per parameter of ``layout``."""
        self._layout = layout
        self._reducer = reducer
        self._step_state = reducer.step_state
        self._steps = steps
        buckets = [bucket_grad.bucket for bucket_grad in reducer.buckets]
        self._ahead: tuple[list[int], list[dict[Label, Spans]]] | None = None
        numbered = self.rounds_at_random or self.arithmetic.by_parameter
        self._segments = Segments(layout, buckets, numbered=numbered)
        self.arithmetic.lay_out(layout, self.begun, reducer.collectives.mesh.device)
        placement = buckets[0].state_placement if buckets else Placement.REPLICATED
        self._families = self.needs.families
        if self.arithmetic.by_sums:
            self._plan = sums.plan_of(layout, len(self.param_groups), placement)
        else:
            self._plan = matrices.MatrixPlan(layout, self.needs.whole, placement)
        reducer.serve(self)

    @property
    def kind(self) -> str:
        """The name of its arithmetic."""
        return self.arithmetic.kind

    @property
    def steps(self) -> list[int]:
        """Steps taken so far, per parameter of the layout."""
        self.settle()
        return self._steps

    @property
    def begun(self) -> set[str]:
        """First names of the parameters that were stepped at least once."""
        counted = zip(self._layout.parameters, self._steps, strict=True)
        return {spec.name for spec, count in counted if count}

    @property
    def steps_early(self) -> bool:
        """Whether buckets are stepped in backward (``step_in_backward``)."""
        return self.settings.in_backward and any(
            self.stepped_early.can_be(bucket_grad) for bucket_grad in self._reducer.buckets
        )

    def wait_early(self) -> None:
        """Wait until no bucket is being stepped in backward."""
        self.stepped_early.wait()

    def stand_in_for(self, lent: torch.optim.Optimizer) -> None:
        """Step instead of the user's own optimizer ``lent``; schedulers may have been made for it."""
        self._lent.append(lent)

    def let_read(self, reading: Future[None]) -> None:
        """Register ``reading``, a reader of the states that runs until the future is done; see ``await_reader``."""
        self._reading = reading

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of the states that an element of some group has."""
        return self.names_for(*self.param_groups)

    @property
    def needs(self) -> Needs:
        """Its requirements on a layout."""
        return Needs.of(self.arithmetic, self.param_groups, averages=self.averages)

    def forms_in(self, bucket: Bucket) -> Forms:
        """Return the stored form of each state of an element of ``bucket``, by name."""
        return self.needs.forms.get(bucket.flat_buffer.layout.family, {})

    def names_for(self, *groups: dict[str, Any]) -> tuple[str, ...]:
        """Return the names of the states of an element with the options of ``groups``."""
        return (*self.arithmetic.state_names(list(groups)), *([AVERAGE] if self.averages else []))

    def finish_gradients(self) -> None:
        """Exchange the norm and which parameters were used, once the gradients are complete; collective."""
        self.settle()
        if not self.stepped_early:
            self.prefetch(0)
        # 1. norm
        sums, options = self._reducer.agree(self._payload)
        if not bool((options == options[0]).all()):
            self._refuse_disagreement()
        self._step_state.writes.agreed()
        norm, squares = self._norm_of(sums[(replicas := self._step_state.replicas).rows])
        if replicas.apart:  # a norm that is not finite anywhere is that of all ranks
            of_all, squares_of_all = self._norm_of(sums)
            norm = torch.where(of_all.isfinite(), norm, of_all)
            squares = torch.where(of_all.isfinite(), squares, squares_of_all)
        self.norm = norm
        self.update = Update() if self.update is None else Update(self.update.max_norm, self.update.norm_type)
        self._reducer.views.show(
            self._reducer.touched,
            squares,
            self._reducer.finish_gradients,
            powers=self._reducer.powers,
            scale=self.gradient_scale,
            by_squares=self.norm_type == 2,
            fixed=_JOINED if self._step_state.join.is_open else self._stepped_with,
        )

    def _refuse_disagreement(self) -> None:
        """Raise MismatchError that names the facts of this step that differ between ranks; collective.

        Returns if only written weights differ, and raises if these cannot be the same.
        """
        collectives = self._reducer.collectives
        rank = collectives.mesh.rank
        facts = collectives.exchange_objects(self._facts_of_step(), "the optimizer's options")
        self._step_state.writes.settle(rank, collectives.exchange_objects)
        if not (different := agreed_facts.difference(facts)):
            return
        self._reducer.views.take_digest()
        way = "reset()" if self._step_state.must_be_stepped else "zero_grad()"
        raise MismatchError(
            f"ranks disagree about this step: {different} (this is rank {rank}). Make them equal on all ranks, and "
            f"call engine.{way}{agreed_facts.advice(facts)}{self._told_of_gone()}",
            code="step-differs-between-ranks",
        )

    def _facts_of_step(self) -> agreed_facts.Facts:
        """Return this rank's facts of the step."""
        divisors = () if self._step_state.join.is_open else self.divisors  # a rank without data has divided nothing
        with torch._C.DisableTorchFunctionSubclass():  # poison is asked as fast as any other tensor
            pairs = zip(self._layout.parameters, self._reducer.views.parameters, strict=True)
            frozen = [spec.name for spec, parameter in pairs if not parameter.requires_grad]
        options = {
            f"{key} of optimizer group {number}": describe(value)
            for number, group in enumerate(self.param_groups)
            for key, value in group.items()
            if key != "params"
        }
        changes = self._reducer.views.digest
        scale = str(self.scaling or "1")
        return agreed_facts.facts_of(options, frozen, changes=changes, divisors=sorted(divisors), scale=scale)

    def _norm_of(self, sums: Tensor) -> tuple[Tensor, Tensor]:
        """Return the norm of the complete gradient and each parameter's squares, from the ``sums`` of some ranks."""
        known = 1 + len(self._layout.parameters)
        if self.norm_type == 2:
            norm = kernels.norm_from_squares(sums[:, 0].contiguous(), self.gradient_scale)
        else:
            power = kernels.join_powers(sums[:, known], self.norm_type)
            norm = kernels.norm_from_powers(power, self.norm_type, self.gradient_scale)
        if self.settings.fp16:  # inf - inf in the reduction is an overflow as well
            norm = norm.nan_to_num(nan=math.inf, posinf=math.inf)
        return norm, sums[:, 1:known].sum(dim=0)

    def _told_of_gone(self) -> str:
        gone = self._step_state.join.gone
        return _GONE.format(gone) if gone else ""

    @property
    def _stepped_with(self) -> str:
        """Why gradients may not be changed after backward; "" if they may."""
        if self._step_state.replicas.apart:
            return _APART
        return _STEPPED_WITH if self._step_state.must_be_stepped else ""

    @property
    def norm_type(self) -> float:
        """The order of the norm that is computed and used for clipping."""
        chosen = None if self.update is None else self.update.norm_type
        return self.settings.norm_type if chosen is None else chosen

    @property
    def is_exhausted(self) -> bool:
        """Whether another overflow is an error."""
        return self.settings.scaler is not None and self.settings.scaler.is_exhausted

    @property
    def loss_scale(self) -> float:
        """The factor of this window's loss; a dynamic one is settled in each step."""
        return 1.0 if self.settings.scaler is None else self.settings.scaler.scale

    @property
    def gradient_scale(self) -> float:
        """The factor of the complete gradient: the loss scale, times the share of the ranks that had data.

        The share differs from 1 only if the mean is over the ranks with data.
        """
        return self.loss_scale * self._step_state.join.share

    @property
    def scaling(self) -> dict[str, Any]:
        """The state of the loss scale, which must be the same on every rank; {} if there is none."""
        self.settle()
        return {} if self.settings.scaler is None else self.settings.scaler.state_dict()

    def _payload(self) -> Payload:
        """Return this rank's message for the exchange of the norm.

        It has this rank's part of the squared norm, in total and of each parameter; its part of another norm than the
        2-norm, if the step uses one; and a digest of the optimizer's options and loss scale, 4 bytes.
        """
        found = [pair for bucket_grad in self._reducer.buckets for pair in bucket_grad.take_squares().items()]
        device = self._reducer.buckets[0].bucket.full.device
        if found and all(square.device == HOST for _, square in found):
            device = HOST  # added up on the host, and moved together
        zero = torch.zeros((), dtype=torch.float64, device=device)
        total, squares = zero.clone(), [zero] * len(self._layout.parameters)
        for parameter, square in found:
            near = square.to(device)
            squares[parameter] = near if squares[parameter] is zero else squares[parameter] + near
            if self._layout.parameters[parameter].is_stepped:
                total += near
        text = repr(self._facts_of_step()) + self._step_state.writes.text
        digest = torch.tensor([zlib.crc32(text.encode())], dtype=torch.int64).to(torch.uint32)
        values = torch.stack([total, *squares, *self._powers(device)])
        return Payload(digest.view(torch.uint8), values.to(self._reducer.buckets[0].bucket.full.device))

    def _powers(self, device: torch.device) -> list[Tensor]:
        """Return this rank's part of a norm other than the 2-norm, over all stepped parameters; [] for the 2-norm."""
        if self.norm_type == 2:
            return []
        found = self._reducer.powers_here(self.norm_type).items()
        counted = [power.to(device) for number, power in found if self._counted(number) is not None]
        return [kernels.join_powers(torch.stack([torch.zeros((), dtype=torch.float64, device=device), *counted]),
                                    self.norm_type)]  # fmt: skip

    def step_buckets(self) -> Iterator[Bucket]:
        """Step the buckets in layout order, lazily: each one when the caller (``Core.publish``) asks for the next.

        The norm is known before (``finish_gradients``, phase 1). The update is phase 2; the caller publishes each
        bucket, phase 3. An update that was interrupted between two buckets continues.
        """
        # 2. update
        update = self.update = self.update or Update()
        step = self._step_state
        step.require("update")
        begun = step.phase is Phase.UPDATING
        if self.stepped_early and not begun:
            self.stepped_early.require_same(
                lambda index: [self._action(label) for label in self._segments_ahead()[index]]
            )
        self._require_known_options()
        for each in self.hooked:  # torch's schedulers warn if the optimizer was not stepped before them
            each.__dict__["_opt_called"] = True
        self.await_reader()
        if not begun:
            self.settle()
            verdict = self.verdict_now()
            if self.arithmetic.waits and verdict.applied:
                self.arithmetic.begin_step(self.param_groups, self._named(self._reducer.touched))
            for bucket_grad in self._reducer.buckets if self.settings.max_value else ():
                bucket_grad.clamp(self.settings.max_value * self.gradient_scale)
            update.begin(self._reducer.touched, factor=self._clip_factor(update), skip=self._skip(), verdict=verdict)
            if self.arithmetic.waits and verdict.applied:
                self._exchange_whole(update)
            step.move(Phase.UPDATING)
            for parameter in update.touched:
                self._steps[parameter] += 1
        way, segments = self._reducer.way_back, self._segments.of(self._labels())
        fetches = any(bucket_grad.bucket.state_store.away for bucket_grad in self._reducer.buckets)
        early = self.settings.in_backward
        left = self._reducer.buckets[update.stepped :]
        for bucket_grad, work in zip(left, self._works(segments, update.stepped), strict=True):
            index = bucket_grad.bucket.layout.index
            if early and index in self.stepped_early:
                self.stepped_early.deliver(bucket_grad, way)
            else:
                if early:
                    self.stepped_early.wait()  # a tier serves one thread
                self._bring(index, prefetches=fetches)
                step_bucket(bucket_grad, work, update, way, lambda: step.move(Phase.TORN))
            step.move(Phase.UPDATING)
            update.bucket_stepped()
            # 3. publish
            yield bucket_grad.bucket

    def _require_known_options(self) -> None:
        """Raise UsageError if options were changed in a way without memory for it in the engine."""
        if tuple(map(self.arithmetic.family, self.param_groups)) != self._families:
            raise UsageError(
                "optimizer: use_muon of a group was changed after initialize, expected it to stay",
                code="optimizer-use-muon-changed",
            )
        forms = self.needs.forms
        if any(self._missing_states(bucket_grad.bucket, forms) for bucket_grad in self._reducer.buckets):
            raise UsageError(
                "SGD: momentum was raised from 0 after initialize; expected momentum from the start"
                if self.kind == "SGD"
                else f"{self.kind}: with an option that was changed after initialize it keeps more of each element; "
                "expected that option from the start",
                code="optimizer-option-adds-state",
            )

    def _bring(self, index: int, *, prefetches: bool) -> None:
        """Before bucket number ``index`` is stepped: bring its states, its gradient and the next bucket's gradient."""
        buckets = self._reducer.buckets
        buckets[index].bucket.state_store.check_out()  # takes its buffer before the next ones are prefetched
        if prefetches:
            self.prefetch(index + 1)
        for soon in buckets[index : index + 2]:
            if soon.is_fetched:
                soon.fetch()

    def _exchange_whole(self, update: Update) -> None:
        """Compute the parts of the step that need whole matrices or sums over whole parameters, if any; collective.

        The owners of the matrices compute them. No state is written, and the exchange happens once per update, even if
        the update is resumed.
        """
        if update.returned is not None:
            return
        specs, touched = self._layout.parameters, [number for number in self._plan.specs if number in update.touched]
        of_group = [self.arithmetic.on_matrix(group) for group in self.param_groups]
        tasks = {n: task for n in touched if (task := of_group[specs[n].group]) is not None}
        returned: dict[int, Tensor] = {}
        if self.arithmetic.by_sums:
            whole = sums.Sums(self._plan, self._reducer.collectives, touched, self._read)
            self.arithmetic.begin_sums(self.param_groups, {n: self._steps[n] + 1 for n in touched}, whole)
        elif tasks:
            exchange = matrices.Exchange(self._plan, self._reducer.collectives, tasks, self._read)
            returned = exchange.run(self._place_for_returned)
        else:
            return
        update.take_returned(returned)
        self._reducer.collectives.barrier()  # matrices: [Note: Nothing is written before all is there]

    @contextmanager
    def _read(self, index: int, weights: bool = False) -> Iterator[matrices.Flats]:
        """Lend this rank's tensors of bucket number ``index``, gradient included, and the gradient's factor.

        weights: include the weights.
        """
        state = self._reducer.buckets[index]
        bucket, update = state.bucket, self.update
        if update is None:
            raise InternalError("a bucket is read for a step that has not begun")
        store = bucket.state_store
        held = dict(store.check_out())
        if weights:
            stepped = held[MASTER] if bucket.has_master else bucket.stepped_weights(writable=False)
            held[WEIGHT] = stepped.to(store.device)
        with state.gradient_to_step() as gradient:
            yield {**held, "gradient": gradient}, update.scalars_on(store.device)["factor"]
        store.check_in(changed=False)

    def _place_for_returned(self, index: int) -> Tensor:
        bucket = self._reducer.buckets[index].bucket
        length = bucket.layout.sizes[bucket.state_placement]
        return torch.empty(length, dtype=matrices.DTYPE, device=bucket.state_store.device)

    def step_early(self, bucket_grad: GradientBucket) -> None:
        """Begin to step the bucket of ``bucket_grad`` in backward, if it can be; its gradient is complete.

        The bucket must be offloaded, and this rank must have used all of its parameters, so that it knows what will be
        stepped.
        """
        index = bucket_grad.bucket.layout.index
        stepped = {parameter for parameter in bucket_grad.pieces if self._counted(parameter) is not None}
        may = self.stepped_early.may(bucket_grad) and stepped <= self._reducer.used
        if not may or self._missing_states(bucket_grad.bucket, self.needs.forms):
            return
        if (
            self.settings.scaler is not None
            and bucket_grad.complete is not None
            and not math.isfinite(bucket_grad.complete.sum())
        ):
            return  # it is left to the step, which then raises
        parts = self._parts(self._segments_ahead()[index])
        then = [each.bucket.state_store for each in self._reducer.following(index)[:_AHEAD]]
        self.stepped_early.begin(bucket_grad, parts, self._reducer.way_back, self._reading, then)

    def _missing_states(self, bucket: Bucket, forms: Mapping[int, Forms]) -> set[str]:
        """Return the states that ``bucket`` lacks: SGD's momentum, if it was raised from 0. forms: as in ``Needs``."""
        return forms.get(bucket.flat_buffer.layout.family, {}).keys() - bucket.state_store.sizes.keys()

    def _parts(self, spans_of: dict[Label, Spans]) -> list[Part]:
        return [(self._action(label), spans) for label, spans in spans_of.items()]

    def _action(self, label: Label) -> Action:
        """Return the step of the elements of one group and step count."""
        group, step = label
        return self.arithmetic.action(self.param_groups[group], group, step, self.settings.seed)

    def _named(self, parameters: Iterable[int]) -> list[tuple[str, int]]:
        """Return first names and groups of the stepped ones among ``parameters``, in their order in the layout."""
        specs = [self._layout.parameters[index] for index in sorted(parameters)]
        return [(spec.name, spec.group) for spec in specs if spec.is_stepped]

    def prefetch(self, first: int) -> None:
        """Prefetch the states of bucket ``first`` and of those after it, as far as there is room."""
        for bucket_grad in self._reducer.buckets[first : first + _AHEAD]:
            if bucket_grad.bucket.layout.index not in self.stepped_early:
                bucket_grad.bucket.state_store.prefetch()

    def begin_exchange(self, method: str) -> bool:
        """Begin the class's ``method``, "train" or "eval", which exchanges weights; return whether any weight moves.

        If so, ``exchange_buckets`` must follow. Otherwise the weights are the right ones already, and the call is done.
        """
        self.settle()
        self.arithmetic.begin_step(self.param_groups, self._named(range(len(self._layout.parameters))), method)
        if not self.arithmetic.moves_weights:
            self.arithmetic.end_step(self.param_groups)
        return self.arithmetic.moves_weights

    def exchange_buckets(self) -> Iterator[Bucket]:
        """Exchange the weights of one bucket after the other, and yield each."""
        specs = self._layout.parameters
        labels = [(spec.group, self._steps[n]) if spec.is_stepped else None for n, spec in enumerate(specs)]
        yield from self._rewrite([BucketWork(self._parts(spans_of)) for spans_of in self._segments.of(labels)])
        self.arithmetic.end_step(self.param_groups)

    @property
    def averages(self) -> bool:
        """Whether moving averages of the weights are kept."""
        return self.settings.decay is not None

    def swap_averages(self) -> Iterator[Bucket]:
        """Exchange weights and their averages, one bucket after the other, and yield each."""
        yield from self._rewrite([BucketWork(self._to_all(Swap(), spans_of)) for spans_of in self._averaged()])

    def begin_averages(self, numbers: Iterable[int]) -> None:
        """Set the averages of parameters ``numbers`` to their weights, after these were written."""
        chosen = set(numbers) if self.averages else set()
        labels = [(0, 0) if index in chosen else None for index in range(len(self._layout.parameters))]
        works = [BucketWork((), self._to_all(BeginAverage(), spans_of)) for spans_of in self._segments.of(labels)]
        for _ in self._rewrite(works) if chosen else ():
            pass

    def _averaged(self, *, first: bool = False) -> list[dict[Label, Spans]]:
        """Return the spans that have an average, per bucket: all that was ever stepped. first: those in their first
        step now."""
        touched = self._reducer.touched
        counted = [count == 1 and index in touched if first else count > 0 for index, count in enumerate(self._steps)]
        specs = self._layout.parameters
        return self._segments.of([(0, 0) if found and specs[n].is_stepped else None for n, found in enumerate(counted)])

    @staticmethod
    def _to_all(action: Action, spans_of: dict[Label, Spans]) -> list[Part]:
        return [(action, spans) for spans in spans_of.values()]

    def _works(self, segments: list[dict[Label, Spans]], begin: int) -> Iterator[BucketWork]:
        """Yield the work of the step on each bucket, from number ``begin`` on."""
        actions: dict[Label, Action] = {}
        firsts = self._averaged(first=True) if self.averages else [{}] * len(segments)
        averaged = self._averaged() if self.averages else firsts
        advance = Advance(self.settings.decay or 0.0)
        each = enumerate(zip(segments, firsts, averaged, strict=True))
        for index, (spans_of, first, all_of) in itertools.islice(each, begin, None):
            for label in spans_of.keys() - actions.keys():
                actions[label] = self._action(label)
            parts = [(actions[label], spans) for label, spans in spans_of.items()]
            given = self.update.given(index) if self.update is not None and self.update.returned else {}
            yield BucketWork(parts, self._to_all(BeginAverage(), first), self._to_all(advance, all_of), given)

    def _rewrite(self, works: list[BucketWork]) -> Iterator[Bucket]:
        """Do ``works`` (one per bucket) on weights and states without a gradient, and yield each bucket."""
        self.await_reader()
        nothing: dict[str, Tensor | None] = {"factor": None, "skip": None}
        for bucket_grad, work in zip(self._reducer.buckets, works, strict=True):
            rewrite_bucket(bucket_grad.bucket, work, {}, lambda device: nothing, self._reducer.way_back)
            yield bucket_grad.bucket

    def end_update(self, if_skipped: Callable[[Verdict], None]) -> Verdict:
        """End the update: all buckets are done. Counts stay as if applied until ``settle``, which may call
        ``if_skipped``.

        See [Note: Settled a step later].
        """
        update = self.update or Update()
        if self.arithmetic.waits and update.verdict.applied:
            self.arithmetic.end_step(self.param_groups)
        self._open = None if update.settled else (update, if_skipped)
        return update.verdict

    def settle(self) -> None:
        """Get the last step's verdict and, if the step was skipped, take back counts that assumed it was applied.

        The host may have to wait. Does nothing if the step is settled already.
        """
        if self._open is None:
            return
        (update, if_skipped), scaler = self._open, self.settings.scaler
        applied = update.settle()
        self._open = None
        for parameter in () if applied else update.touched:
            self._steps[parameter] -= 1
        if scaler is not None:
            scaler.update(not applied)
        if not applied:
            if_skipped(update.verdict)

    def await_reader(self) -> None:
        """Wait until nothing else reads or steps the states. Call it before they are changed."""
        self.stepped_early.wait()
        if self._reading is not None:
            self._reading.exception()
            self._reading = None

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """``engine.step()``: steps on the accumulation boundary, otherwise only counts.

        closure: as in torch, called first; its value is returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._calls is not None:
            self._calls.step()
        return loss

    step.hooked = True  # type: ignore[attr-defined]  # torch would call hooks at each call, and not for engine.step()

    def train(self) -> None:
        """Switch to the weights for training, if the class exchanges weights (schedule-free does); collective.

        Does nothing for other classes, or if the weights are those already.
        """
        self._exchange("train")

    def eval(self) -> None:
        """Switch to the weights for evaluation; see ``train``."""
        self._exchange("eval")

    def _exchange(self, method: str) -> None:
        if self._calls is not None and method in self.arithmetic.modes:
            self._calls.exchange(method)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the accumulated gradients, as ``engine.zero_grad()``.

        Does nothing if the last call was a ``step()`` that only counted a micro-batch, so a loop may call both after
        every backward.
        """
        if self._calls is not None:
            self._calls.forget()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Step the parameters of ``param_group`` as well, from the next step on; collective, between two steps.

        The parameters must belong to the model and to no group yet: unfrozen before this call, or trainable all along.
        Frozen ones join when they are unfrozen. The group is a dict with "params" and options, as in torch. Weights and
        states move to a new layout and keep their bits. After an error everything is as before, except if memory runs
        out or a rank is lost while the weights are moved.
        """
        if self._calls is None:
            super().add_param_group(param_group)
        else:
            self._calls.extend(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict of torch's own optimizer, whole, on the CPU of rank 0, and {} elsewhere; collective.

        Plain torch can load it. In addition to torch's entries it has "master", the fp32 master weights of bf16 and
        fp16 parameters. Together with ``engine.state_dict()`` it resumes bit for bit, at any stage.
        """
        return torch_hooks.around_state_dict(self.hooked, lambda: self._calls_of_engine.save(self.state.take_request()))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the result of ``state_dict()`` of this or of torch's optimizer; collective.

        Options go into the same groups, states to their present device. state_dict: whole on rank 0; the same or {}
        elsewhere. With "master" the weights become those, rounded. Raises UsageError if it does not fit; nothing has
        changed then.
        """
        self.state.take_request()
        torch_hooks.around_load(self.hooked, state_dict, self._calls_of_engine.load)

    @property
    def hooked(self) -> list[torch.optim.Optimizer]:
        """The optimizers whose hooks are called: this one, and the user's own that it replaces."""
        return [self, *self._lent]

    @property
    def has_post_hooks(self) -> bool:
        """Whether there are hooks to call after updates that are applied."""
        return any(True for _ in torch_hooks.post_hooks(self.hooked))

    def call_pre_hooks(self) -> None:
        """Call the pre hooks: the gradients are complete, the update follows. See [Note: Once per step]."""
        self.refuse_late_hooks()
        if self._step_state.phase is not Phase.UPDATING:
            self._reducer.views.fix(self._stepped_with)  # every rank calls hooks, also one without data
            torch_hooks.before_update(self.hooked)

    def call_post_hooks(self) -> None:
        """Call the post hooks: the update was applied."""
        torch_hooks.after_update(self.hooked)

    def refuse_late_hooks(self) -> None:
        """Raise ``UsageError`` if pre hooks would be called too late."""
        if self.steps_early:
            torch_hooks.refuse_pre_hooks(self.hooked)

    @property
    def _calls_of_engine(self) -> EngineCalls:
        return self._calls or EngineCalls(lambda: None, _no_engine, _no_step, lambda method: None)

    def _names_of(self, parameter: Any) -> tuple[str, ...]:
        """Return the names of the states of ``parameter`` in torch's state dict."""
        for group in self.param_groups if isinstance(parameter, Tensor) and parameter.requires_grad else ():
            if any(parameter is each for each in group["params"]):
                counted = ("step",) if self.arithmetic.counts_steps(group) else self.arithmetic.fact_names
                return (*counted, *self.arithmetic.whole_shapes(parameter.shape), *self.names_for(group))
        return ()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Raise AttributeError; for names of another engine's optimizer it says what to call instead."""
            return read_from_optimizer(self, name)

    @property
    def rounds_at_random(self) -> bool:
        """Whether a step of a parameter draws random bits; their key includes its step count."""
        return self.settings.seed is not None or self.arithmetic.draws

    @property
    def forms(self) -> dict[str, StateForm]:
        """The stored form of each of ``state_names``, by the names under which they are stored."""
        return stored_forms(self.arithmetic, self.state_names)

    def state_bytes(self) -> Counter[str]:
        """Return the bytes of optimizer state and master weights on this rank, by tier ("device", "cpu", "nvme")."""
        found = Counter(device=sum(tensor.nbytes for _, tensors in self.whole_states() for tensor in tensors.values()))
        for bucket_grad in self._reducer.buckets:
            found[bucket_grad.bucket.state_store.tier_now] += sum(bucket_grad.bucket.state_store.sizes.values())
        return found

    def clip_next_step(self, max_norm: float, norm_type: float | None = None) -> float:
        """Clip the coming step to ``max_norm``; later ones to the configured value again. Return the present norm.

        norm_type: its order, None for the configured one; another one makes the call collective.
        """
        if self.settings.max_value:
            raise UsageError(
                "clip_grad_norm_: expected no gradient_clipping_value in the config, which clips every element of the "
                "step's gradients already; leave one of them out",
                code="clip-by-value-in-config",
            )
        if self._reducer.early_use.enabled:
            raise UsageError(
                "clip_grad_norm_: expected offload_optimizer.step_in_backward to be false: with it buckets are stepped "
                "before the norm is known",
                code="clip-step-in-backward",
            )
        if not 0 < max_norm < math.inf:
            raise UsageError(
                f"clip_grad_norm_: expected a finite max_norm above 0, got {max_norm}", code="clip-max-norm-invalid"
            )
        if self.update is None or self.norm is None:
            raise InternalError("the norm is to be clipped before it is known")
        order = self.settings.norm_type if norm_type is None else norm_type
        if not order > 0:
            raise UsageError(
                f"clip_grad_norm_: expected a norm_type above 0, or inf, got {norm_type!r}",
                code="clip-norm-type-invalid",
            )
        if order != self.norm_type:
            self.update.clip_by(order)
            self._reducer.views.adopt()
            self._reducer.finish_gradients()
        self.update.clip_to(max_norm)
        self._reducer.views.note("clip_grad_norm_", max_norm, order)
        return self.norm.item()

    def watch_rates(self) -> None:
        """Warn once if learning rates change between micro-batches of a window. Call it at each micro-batch.

        Raises UsageError for a rate that is not a number.
        """
        rates = [rate_of(group, number, "step") for number, group in enumerate(self.param_groups)]
        before, self._rates = self._rates, rates
        if before and before != self._rates and not self._told_of_rates:
            self._told_of_rates = True
            if self._reducer.buckets[0].bucket.rank == 0:
                _log.warning(_RATES, before, self._rates)

    def end_window(self) -> None:
        """Forget the window, which was stepped, dropped or lost, and the argument of ``clip_next_step``."""
        self.divisors.clear()
        self.state.take_request()
        self._rates = []
        self.stepped_early.forget(self._reducer.way_back)
        self.update = None

    def take_back(self, norm: Tensor | None) -> None:
        """Restore ``norm``, that of the step before: a window was dropped after its norm was known."""
        self.norm = norm

    def note_if_spoiled(self) -> bool:
        """Whether gradients are not finite although buckets may have been stepped in backward.

        The window's step can then not be skipped any more: it is an error, and nothing more of it may be done.
        """
        state = self._step_state
        decided = state.phase in {Phase.AGREED, Phase.SPOILED} and state.must_be_stepped
        if not decided or self.settings.scaler is None or self.norm is None or bool(torch.isfinite(self.norm)):
            return False
        state.move(Phase.SPOILED)
        return True

    def mark_stepped(self, scheduler: Any) -> None:
        """Mark the optimizer of torch's ``scheduler`` as stepped; otherwise torch warns about the order of calls."""
        scheduler.optimizer._opt_called = True

    def held(self, bucket: Bucket, *, writable: bool = False) -> dict[str, Tensor]:
        """Return the tensors of ``bucket`` that this rank steps, in fp32.

        They are "weight" (the master, if there is one) and the states. writable: they may be written to, and must then
        be passed to ``keep``; otherwise writes may be lost.
        """
        stored = self.stored(bucket, writable=writable)
        return {
            name: flat if name in (WEIGHT, AVERAGE) else widened_state(stored, name)
            for name, flat in stored.items()
            if name in (WEIGHT, *self.state_names)
        }

    def keep(self, bucket: Bucket, held: Mapping[str, Tensor]) -> None:
        """Store writes to a bucket's ``held``; states that are not kept in fp32 are rounded to nearest."""
        stored = self.stored(bucket, writable=True)
        for name in held.keys() - {WEIGHT, AVERAGE}:
            if stored[name] is not held[name]:
                narrow_state(held[name], stored, name)

    def misfit(self, states: Mapping[str, Any]) -> str:
        """Return which of ``states`` (by name) cannot be stored in this optimizer's format, and why; "" if all can."""
        forms = self.forms
        for name in forms.keys() & states.keys():
            if problem := misfit(states[name], name, forms[name].dtype):
                return f"{name!r}: {problem}"
        return ""

    def stored(self, bucket: Bucket, *, writable: bool = False) -> dict[str, Tensor]:
        """Return the tensors of ``held``, but states in their stored format, by the names in ``forms``."""
        states = dict(bucket.state_store.tensors(writable=writable))
        if bucket.has_master:
            return {WEIGHT: states.pop(MASTER), **states}
        return {WEIGHT: bucket.stepped_weights(writable=writable), **states}

    def whole_states(self) -> Iterator[tuple[ParameterSpec, dict[str, Tensor]]]:
        """Yield the states that every rank keeps of parameters as a whole, as ``Arithmetic.whole_states``."""
        for spec in self._layout.parameters:
            if spec.is_stepped and (tensors := self.arithmetic.whole_states(spec)):
                yield spec, tensors

    def parameter_state(self, *, writable: bool = False) -> Iterator[FlatSlice]:
        """Yield this rank's part of every bucket, as ``stored``, and of the states of parameters as a whole."""
        for spec, tensors in self.whole_states():
            yield from (FlatSlice(spec.name, key, 0, tensor.view(-1), per=0) for key, tensor in tensors.items())
        for bucket in (bucket_grad.bucket for bucket_grad in self._reducer.buckets):
            held = self.stored(bucket, writable=writable)
            yield from slices_of(self._layout, bucket.layout, bucket.state_interval, held)

    def _counted(self, parameter: int) -> int | None:
        """Return the parameter's label for the norm: 0 if some optimizer group steps it, otherwise None."""
        return 0 if self._layout.parameters[parameter].is_stepped else None

    def _clip_factor(self, update: Update) -> Tensor | None:
        max_norm = self.settings.max_norm if update.max_norm is None else update.max_norm
        if self.norm is None or (not max_norm and self.gradient_scale == 1):
            return None
        return kernels.gradient_factor(self._norm_now(self.norm), max_norm, self.gradient_scale)

    def verdict_now(self) -> Verdict:
        """Return the verdict on a step with the present gradients."""
        platform, skip = self._reducer.platform, self._skip()
        if skip is None:
            return Verdict(None, self._reducer.views.squares)
        is_late = platform.has_own_memory and not self.arithmetic.waits
        return Verdict(platform.fetch(skip), self._reducer.views.squares, is_late=is_late)

    def _skip(self) -> Tensor | None:
        unknown = self.norm is None or self.settings.scaler is None
        return None if unknown or self.norm is None else ~torch.isfinite(self._norm_now(self.norm))

    def _norm_now(self, norm: Tensor) -> Tensor:
        """Return the norm of the present gradients: ``norm``, or a new one if the user has multiplied them since."""
        if not self._reducer.views.multiplied:
            return norm
        stepped = [index for index in self._reducer.touched if self._counted(index) is not None]
        return kernels.norm_from_squares(self._reducer.views.square(sorted(stepped)), self.gradient_scale)

    def _segments_ahead(self) -> list[dict[Label, Spans]]:
        """Return the spans of the coming step per bucket, if it touches everything; computed once per step."""
        if self._ahead is None or self._ahead[0] != self.steps:
            self._ahead = list(self.steps), self._segments.of(self._labels(ahead=True))
        return self._ahead[1]

    def _labels(self, *, ahead: bool = False) -> list[Label | None]:
        """Return the label of each parameter. ahead: in the coming step, if it touches everything."""
        touched, steps = self._reducer.touched, self.steps
        return [
            (spec.group, steps[index] + ahead) if spec.is_stepped and (ahead or index in touched) else None
            for index, spec in enumerate(self._layout.parameters)
        ]


_GONE = (
    ". Ranks {} have run out of data inside engine.join(), where they do not do what the loop does to the optimizer: "
    "give a scheduler to initialize as lr_scheduler"
)
_JOINED = (
    'inside engine.join() ranks that have run out of data would not change theirs; expected "gradient_clipping" or '
    '"gradient_clipping_value" in the config, or a hook before the step'
)
_APART = (
    'shard groups step apart, each with its own gradient: expected "gradient_clipping" in the config, '
    "engine.clip_grad_norm_(...), or changes before the window's last backward ends"
)
_STEPPED_WITH = (
    "buckets are stepped with it in backward already: expected offload_optimizer.step_in_backward to be false"
)


def _no_step() -> None:
    raise UsageError(
        "engine.optimizer.step(): expected the optimizer of an open engine, got one without an engine",
        code="optimizer-without-engine",
    )


def _no_engine(_group: dict[str, Any]) -> None:
    raise UsageError(
        "add_param_group: expected the optimizer of an open engine, got one without an engine",
        code="optimizer-without-engine",
    )
