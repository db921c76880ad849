"""The engine: the public class, connected to the parts below it. Nothing is computed here.

One step: ``engine(batch)`` runs the module, and its hooks gather and reshard units (schedule). ``engine.backward``
divides the loss. Autograd passes each gradient to the reducer; the end of the backward ends the micro-batch. On the
boundary ``engine.step`` steps the shards (optimizer; clipping is a factor there), and gathers stepped weights if they
are kept replicated.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from contextlib import closing as closing_of
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from shardengine import checkpoint, other_engines
from shardengine.checkpoint import Checkpoint
from shardengine.comm import Collectives, Mesh, run_on_all_ranks
from shardengine.config import Config, load_config, load_or_default
from shardengine.core import (
    Core,
    ForWith,
    Inspection,
    StepReport,
    assembly,
    attached,
    check_beside,
    check_clips,
    check_free,
    closing,
    comm_hooks,
    exchanging,
    export,
    full_access,
    group_size,
    in_shard_groups,
    loading_weights,
    mesh_of,
    offload_states,
    optimizer_dict,
    overflow,
    rebuild,
    recovery,
    replicas,
    reports_failure,
    reports_failure_with,
)
from shardengine.ddp import Phase
from shardengine.engine import arguments, joining, monitors, notices, settings_between_steps
from shardengine.engine.monitors import Monitor, Monitors
from shardengine.engine.tracing import traced
from shardengine.errors import UsageError
from shardengine.loading import Source, Weights
from shardengine.offload import BufferPool
from shardengine.optim import (
    EngineCalls,
    OptimizerForm,
    ShardedOptimizer,
    StepSettings,
    Verdict,
    groups_for,
    lend,
    lr_schedules,
)
from shardengine.runtime import casting, hooks, transforms

_log = logging.getLogger(__name__)


class Engine(Inspection):
    """Trains one module. It is not an ``nn.Module``.

    Names of parameters have no prefix, and unknown attributes are read from the module.
    """

    def __init__(
        self,
        model: nn.Module,
        config: Mapping[str, Any] | str | Path | Config,
        optimizer: arguments.OptimizerLike = None,
        model_parameters: Iterable[Any] | None = None,
        lr_scheduler: Any = None,
        mesh: Mesh | DeviceMesh | ProcessGroup | None = None,
        monitors: Sequence[Monitor] = (),
        weights: Weights = None,
        auto: Mapping[str, Any] | None = None,
    ) -> None:
        """The arguments are those of ``initialize``. auto: as for ``load_config``."""
        self.module = model
        self._give_back: Callable[[], None] = lambda: None
        auto = {**arguments.said_by(optimizer), **(auto or {})}
        mesh = mesh_of(mesh, load_or_default(config, auto).timeout_s)
        reads = lambda ranks: load_config(config, auto).resolve_batch(ranks)  # noqa: E731
        try:
            self._build(mesh, reads, optimizer, model_parameters, lr_scheduler, monitors, weights)
        except BaseException:
            mesh.abandon()
            raise
        self.global_steps = 0
        self.global_samples = 0
        self._window = self._core.window
        self._verdict: Verdict | None = None
        self._buffers_sent, self._buffers_travel = False, True
        self._has_seen_batch = mesh.rank > 0
        self._report = StepReport()
        self._monitors = Monitors(self.config.monitor, monitors, mesh.rank, mesh.platform)
        attached.add(model)
        self._is_open = True
        recovery.tell_other_ranks(self._core.collectives)

    def _build(
        self,
        mesh: Mesh,
        reads: Callable[[int], Config],
        optimizer: arguments.OptimizerLike,
        parameters: Any,
        lr_scheduler: Any,
        user_monitors: Sequence[Monitor],
        weights: Weights,
    ) -> None:
        """Build the parts. A failure on one rank fails on all ranks (``run_on_all_ranks``)."""
        start = Collectives(mesh, BufferPool(mesh.platform))

        def read() -> tuple[Config, OptimizerForm, Source | None]:
            check_free(self.module)
            monitors.check(user_monitors)
            resolved = reads(mesh.ranks)
            group_size(resolved, mesh)
            check_beside(resolved, mesh)
            form = groups_for(self.module, resolved, optimizer, parameters)
            return resolved, form, Source.of(self.module, weights, f" (rank {mesh.rank})")

        self.config, form, source = run_on_all_ranks(start, "reading config and optimizer", read)
        mesh = in_shard_groups(self.config, mesh, start)
        notices.tell(self.config, form.notice, optimizer, lr_scheduler, mesh)
        scheduled = lr_scheduler is not None or self.config.scheduler is not None
        needs = form.needs(scheduled=scheduled, averages=self.config.ema.decay is not None)
        with nullcontext() if source is None else closing_of(source):
            self._core = core = assembly.build(self.module, self.config, mesh, form.groups, needs, form.kind, source)
        self.config = core.sizes.put_into(self.config)
        self.optimizer: ShardedOptimizer | None = None

        def equip() -> None:
            if form.kind is not None:
                settings = StepSettings.of(self.config, core.precision)
                calls = EngineCalls(
                    self._begin_window,
                    self._add_param_group,
                    self.step,
                    self._exchange_weights,
                    self._save_optimizer,
                    self._load_optimizer,
                )
                self.optimizer = ShardedOptimizer(form, core.layout, core.reducer, settings, calls)
                if isinstance(optimizer, torch.optim.Optimizer | list | tuple):
                    self._give_back = lend(optimizer, self.optimizer)
            self._lr_scheduler = self._make_scheduler(lr_scheduler)
            self._owns_scheduler = lr_scheduler is None and lr_schedules.is_named(self._lr_scheduler)
            if self.optimizer is not None:
                self.optimizer.begin()

        try:
            run_on_all_ranks(start, "making the optimizer and the scheduler", equip)
        except BaseException:
            self._give_back()
            closing.dissolve(core, self.module, restore=core.partition.left is None, ends_groups=False)
            raise

    # Forward and backward

    @reports_failure("forward")
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward and return its output unchanged."""
        with transforms.outside():
            self._need_core().verify_parameters()
            core = self._core = rebuild.follow(self._core, self.module, self.config, self.optimizer)
            core.schedule.restart()
            if torch.is_grad_enabled():
                self._send_buffers()
                if not self._has_seen_batch:
                    self._look_at_batch(args, kwargs)
            elif core.stage.moves_weights:
                core.step_state.require("a call of every rank", "a forward without grad")
        try:
            with core.precision.forward(core.mesh.platform.autocast_type):
                return self.module(*args, **kwargs)
        except BaseException as error:
            core.schedule.restart()
            self._buffers_sent = False
            casting.explain(error, core.precision.cast, inputs=core.precision.inputs is not None)
            notices.explain(error, self.module, args, kwargs, self.device, self.rank)
            raise

    forward = __call__

    def _look_at_batch(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """On rank 0, warn once if the first batch does not fit the config's size or the model's length."""
        self._has_seen_batch = True
        of_batch = notices.about_batch(self.train_micro_batch_size_per_gpu(), args, kwargs)
        for notice in filter(None, (of_batch, notices.about_length(self.module, args, kwargs))):
            _log.warning("%s", notice)

    def _send_buffers(self) -> None:
        """Broadcast the module's buffers once per accumulation window of a training.

        They come from rank 0, or from a rank with data. A rank without data does as in its last window, because its
        loop may have ended with ``eval()``.
        """
        join = self._core.step_state.join
        trains = self._buffers_travel if join.serves else self.module.training
        self._buffers_travel = trains
        if self.config.broadcast_buffers and trains and self._window.is_first and not self._buffers_sent:
            self._core.buffers.broadcast(persistent_only=True, source=join.source)
            self._buffers_sent = True

    @reports_failure("backward")
    def backward(
        self, loss: Tensor, gradient: Tensor | None = None, *, retain_graph: bool = False, divide: bool = True
    ) -> Tensor:
        """Run the backward of ``loss``, divided by the number of accumulation steps, and return that quotient.

        loss: a scalar of one micro-batch, with a graph.

        gradient: required if ``loss`` is no scalar: the tensor that its gradient is multiplied with, as in
        ``Tensor.backward``.

        divide: False if ``loss`` is already this micro-batch's share of the step's loss.

        ``UsageError`` for any other argument. If a step ends early, the divisor stays the same, so every sample has the
        same weight. In the last micro-batch of a step this may be called several times; the gradients of all calls are
        completed and added. ``loss.backward()`` works as well. It does not divide by the accumulation steps, only by
        the ranks, and raises ``UsageError`` if the loss is scaled (see ``scale``).
        """
        if not isinstance(divide, bool) or not isinstance(gradient, Tensor | None):
            raise UsageError(
                f"backward: expected gradient= as a tensor and divide= as True or False, got {type(gradient).__name__} "
                f"and {divide!r}; retain_graph is passed by name",
                code="backward-wrong-argument",
            )
        if not isinstance(loss, Tensor) or not loss.requires_grad or (loss.numel() != 1 and gradient is None):
            shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise UsageError(
                f"backward: expected a scalar loss with a graph, or gradient= for one that is no scalar, got {shape}"
                + (" without requires_grad" if isinstance(loss, Tensor) and not loss.requires_grad else ""),
                code="loss-not-scalar-with-graph",
            )
        schedule = self._need_core().schedule
        schedule.finish_open_backward()
        self._core.step_state.require("backward")
        if self.optimizer is not None:
            self.optimizer.refuse_late_hooks()
        steps = self.gradient_accumulation_steps()
        count = steps if divide else 1
        if self.optimizer is not None and steps > 1:  # with one micro-batch there is no difference
            self.optimizer.divisors.add(count)
        scaled = loss if count == 1 else loss / count
        schedule.begin_backward()
        scale = 1.0 if self.optimizer is None else self.optimizer.loss_scale
        self._core.reducer.note_scale(scale)
        try:
            (scaled if scale == 1 else scaled.float() * scale).backward(gradient, retain_graph=retain_graph)
            schedule.finalize_backward()
        except BaseException:
            schedule.backward_failed()
            self._buffers_sent = False
            raise
        self._monitors.add_loss(loss, scale, divided=not divide)
        return scaled.detach()

    def scale(self, loss: Tensor) -> Tensor:
        """Return ``loss`` multiplied with the loss scale of fp16, for a ``backward()`` of your own.

        That backward must come next. Returns ``loss`` itself if the loss is not scaled. ``UsageError`` if it is no
        scalar with a graph.
        """
        schedule, optimizer = self._need_core().schedule, self._need_optimizer("scale()")
        if not isinstance(loss, Tensor) or not loss.requires_grad or loss.numel() != 1:
            shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise UsageError(
                f"scale: expected a scalar loss with a graph, got {shape}", code="loss-not-scalar-with-graph"
            )
        scale = optimizer.loss_scale
        self._core.reducer.note_scale(scale)
        if not self._core.reducer.rules.scaled:
            return loss
        scaled = loss.float() * scale
        hooks.attach_scale(schedule, scaled)
        return scaled

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate the micro-batches inside the ``with`` without communication.

        Their gradients are kept full-size on this rank, and none of them ends the optimizer step.
        """
        return ForWith("no_sync", self._window.no_sync)

    @reports_failure("register_comm_hook")
    def register_comm_hook(self, state: Any, hook: Callable[[Any, Any], Any]) -> None:
        """Let ``hook(state, bucket)`` combine the gradients of all ranks, as in torch's DDP; collective.

        Call it between two steps, with the same function and the same type of ``state`` on every rank.

        bucket: this rank's gradients, see ``comm_hooks.GradBucket``.

        hook: returns the mean over ranks as a flat tensor of the length of ``bucket.buffer()``, or a future of it. The
        engine does not divide it. The hooks of ``torch.distributed.algorithms.ddp_comm_hooks`` are such functions.

        If a rank keeps only a slice of the gradients, it takes that slice of the result, so more bytes are sent than
        without a hook. ``traffic()`` does not include the bytes that the hook sends. ``UsageError`` if this engine
        cannot use the hook, ``MismatchError`` if ranks pass different functions or types.
        """
        comm_hooks.register(self._need_core(), hook, state)

    @reports_failure_with("join")
    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> AbstractContextManager[None]:
        """Inside ``with engine.join():`` ranks may have different numbers of batches; collective.

        When the loop of a rank has ended, that rank takes part with zeros in the micro-batches and steps of the others,
        until all loops have ended. Then all ranks leave the ``with``, with the same weights, states and steps. A step
        that a rank has begun uses the micro-batches that it had. After the last step the ranks run one accumulation
        window without data, to learn that all have ended.

        divide_by_initial_world_size: True divides gradients by the number of all ranks, False by the number of ranks
        that had a micro-batch in the step.

        enable: False makes this call do nothing.

        throw_on_early_termination: raise ``EarlyTerminationError`` on every rank in the first step that a rank has no
        data for. That step is dropped.

        Inside, make no other call that every rank has to make: not ``clip_grad_norm_``, ``full_params``, ``state_dict``
        and the like, no evaluation at stage 3, and no ``save_checkpoint`` after a rank has run out of data. At stage 3
        a rank without data gathers weights in the order of its last step, or of the modules if it had none. So every
        step must run the same modules in the same order.
        """
        for name, value in (
            ("divide_by_initial_world_size", divide_by_initial_world_size),
            ("enable", enable),
            ("throw_on_early_termination", throw_on_early_termination),
        ):
            if not isinstance(value, bool):
                raise UsageError(
                    f"engine.join: expected {name}= as True or False, got {value!r}", code="join-wrong-argument"
                )
        optimizer = self._need_optimizer("join()")
        if not enable:
            return nullcontext()
        loop = joining.Loop(self._need_core, self._send_buffers, self.step, self._drop_window, lambda: self.is_open)
        return joining.joined(
            optimizer, loop, by_active=not divide_by_initial_world_size, throws=throw_on_early_termination
        )

    # The step

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Set whether the current micro-batch is the last one of its optimizer step.

        The setting ends when a step is applied.
        """
        self._core.step_state.require("a call of every rank", "set_gradient_accumulation_boundary()")
        self._window.set_boundary(bool(is_boundary))

    @reports_failure("set_train_batch_size")
    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the number of samples per optimizer step, over all ranks, from the next step on; collective.

        Call it between two steps. The size of micro-batches stays. ``gradient_accumulation_steps()`` changes, and so
        does the divisor of losses in ``backward``. ``UsageError`` if the number of samples is not divisible by ranks
        times micro-batch size, ``MismatchError`` if ranks disagree; then nothing has changed. Checkpoints do not set
        it: call it again after ``load_checkpoint``.
        """
        self.config = settings_between_steps.set_batch(
            self._need_core(), self.config, "set_train_batch_size", total=train_batch_size
        )

    @reports_failure("set_train_micro_batch_size")
    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the number of samples per rank and micro-batch from the next step on; collective, between two steps.

        The number of micro-batches stays. This changes only the counters and ``train_batch_size()``, and no
        computation. Errors are those of ``set_train_batch_size``.
        """
        self.config = settings_between_steps.set_batch(
            self._need_core(), self.config, "set_train_micro_batch_size", micro=micro_batch_size
        )

    @reports_failure("set_gradient_divide_factor")
    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide sums of gradients over ranks by ``factor`` from the next step on; collective, between two steps.

        It replaces ``gradient_divide_factor`` of the config, whose default is the number of ranks. ``UsageError``
        unless it is a finite number above 0, or if a communication hook returns means. ``MismatchError`` if ranks
        disagree. After an error nothing has changed.
        """
        self.config = settings_between_steps.set_divide_factor(
            self._need_core(), self.config, "set_gradient_divide_factor", factor
        )

    @reports_failure("step")
    def step(self, *, flush: bool = False) -> None:
        """Apply the optimizer step on the boundary; on other micro-batches only count.

        The boundary is the last micro-batch of an optimizer step. An applied step clips the gradients, updates the
        weights, gathers them if they are kept whole, steps the scheduler, and frees the gradients.

        flush: True ends the optimizer step here, although its last backward was not on the boundary.

        If gradients are not finite on any rank, every rank skips the step: weights, states and scheduler stay, and the
        step counts (``was_step_applied``, ``skipped_steps``). ``NonfiniteGradientError`` names the parameters; it is
        raised with "nonfinite_gradients": "raise", or after "max_nonfinite_steps" skipped steps in a row.
        ``LossScaleError`` is raised if a loss scale cannot fall any further. After another exception in the middle of
        the update, call ``reset()`` on every rank, which finishes it; with a single rank another ``step()`` does so as
        well.
        """
        core, optimizer, window = self._need_core(), self._need_optimizer("step()"), self._window
        flush = flush or not window.managed
        core.schedule.finish_open_backward()
        core.step_state.require("step()")
        if flush:
            core.step_state.require("step(flush=True)")
        optimizer.settle()
        self._verdict = None
        optimizer.watch_rates()
        if not window.is_boundary and not flush:
            window.count()
            return
        if not core.step_state.is_agreed:
            if core.step_state.phase is not Phase.REDUCED:
                core.reducer.flush()
            core.schedule.complete_gradients()
        optimizer.call_pre_hooks()
        core.reducer.views.adopt()
        if core.reducer.views.changed:
            core.reducer.views.exchange_again()
        if optimizer.note_if_spoiled() and optimizer.settings.scaler is not None:
            overflow.report(core, optimizer.settings.scaler, optimizer.verdict_now(), taken=True)
        self._report.observe(self._live_bytes())
        core.schedule.reshard_all()
        core.await_weights()
        core.adopt_written_weights()
        replicas.step_buckets(core, optimizer)
        self._end_step()
        self._core = rebuild.recut(self._core, self.module, self.config, optimizer)

    def _end_step(self, *, reports: bool = True) -> None:
        """Do the work after the update. reports: a skipped step may be logged, or be an error.

        Whether the step was skipped may become known later ([Note: Settled a step later]). It is found out at once if
        an error, the loss scale, or a scheduler of the user, which cannot be undone, depends on it.
        """
        core, optimizer, scheduler = self._core, self._need_optimizer("step()"), self._lr_scheduler
        core.note_stepped()
        step, scaler, exhausted = self.global_steps + 1, optimizer.settings.scaler, optimizer.is_exhausted
        before = 0 if scaler is None else scaler.skipped
        undo: list[Callable[[], None]] = []

        def if_skipped(verdict: Verdict) -> None:
            for each in undo:
                each()
            if reports and scaler is not None and exhausted:
                overflow.report(core, scaler, verdict)
            if reports and scaler is not None and scaler.skipped == 1 and not scaler.policy.dynamic:
                overflow.tell(core, verdict, step, scaler.policy.limit)

        verdict = self._verdict = optimizer.end_update(if_skipped)
        depends = scaler is not None and (scaler.policy.dynamic or exhausted or not reports)
        later = verdict.is_late and not depends and (scheduler is None or self._owns_scheduler)
        later = later and not optimizer.has_post_hooks
        applied = later or verdict.applied
        try:
            if not later:
                optimizer.settle()
        finally:
            micro_batches, rates = self._close_window(core, optimizer), self._rates(optimizer)
            try:
                if applied:
                    optimizer.call_post_hooks()
                if scheduler is not None and applied and not lr_schedules.needs_metric(scheduler):
                    optimizer.mark_stepped(scheduler)
                    if later:
                        undo.append(lr_schedules.step_for_now(scheduler))
                    else:
                        scheduler.step()
            finally:  # a monitor may call settle()
                if self._monitors:
                    values = {"lr": rates[0], "samples": self.global_samples}
                    late = {"skipped_steps": lambda: before + (not verdict.applied)}
                    self._monitors.note(step, values, late, optimizer.norm, micro_batches)

    def _close_window(self, core: Core, optimizer: ShardedOptimizer) -> int:
        """Drop the gradients and count the step. Returns its micro-batches on this rank."""
        core.reducer.discard()
        optimizer.end_window()
        core.schedule.recorded.end_window(regular=not self._window.is_overridden)
        self._buffers_sent = False
        heard = core.step_state.join.heard
        micro_batches = core.step_state.close()
        self.global_steps += 1
        core.reducer.begin_step(self.global_steps)
        core.step_state.replicas.note_step(self.global_steps)
        of_all = micro_batches * self.world_size if heard is None else heard.micro_batches(micro_batches)
        self.global_samples += of_all * self.train_micro_batch_size_per_gpu()
        own = micro_batches if heard is None else heard.micro_batches_of(self.rank, micro_batches)
        self._report.close_step(core.sent(), core.collectives.trace.waited_ns, micro_batches)
        return own

    def zero_grad(self) -> None:
        """Drop the gradients of the current optimizer step; it starts again.

        Also call this after a forward or backward that raised *on every rank, at the same place*. After a failure of
        one rank alone, call ``reset()`` on every rank instead.
        """
        self._need_core().step_state.require("zero_grad()")
        self._core.schedule.finish_open_backward()
        self._drop_window()

    def _drop_window(self, total: int | None = None) -> None:
        """Drop the accumulation window.

        total: as in ``StepState.restart``. If it is given, the bytes sent so far are counted for no step.
        """
        self._core.schedule.reshard_all()
        self._core.schedule.recorded.drop()
        self._core.reducer.discard()
        self._buffers_sent = False
        if self.optimizer is not None:
            self.optimizer.end_window()
        self._monitors.forget()
        self._core.step_state.restart(total)
        if total is not None:
            self._report.leave_out(self._core.sent())

    def _begin_window(self) -> None:
        """Serve ``engine.optimizer.zero_grad()``.

        Does nothing in the middle of an accumulation window, after a ``step()`` that only counted, or if there are no
        gradients yet: a forward may have run, and its backward needs the weights that it has gathered.
        """
        if not self._window.only_counted and self._core.step_state.phase is not Phase.EMPTY:
            self.zero_grad()

    def reset(self) -> None:
        """After a failure, return every rank to the last completed step, with new process groups; collective.

        The gradients of the current step are dropped. If some rank had begun to update weights, all ranks finish that
        step instead (see ``global_steps``). Errors:

        - ``UsageError`` if a rank stopped inside an update: load a checkpoint.
        - ``UsageError`` if collectives of a registered communication hook may be out of step: start the ranks again.
        - ``CommunicationError`` names the ranks that do not call this within ``timeout_s``.

        The engine does not use a Mesh of the caller any more afterwards.
        """
        core, optimizer = self._need_core(), self.optimizer
        core.step_state.require("reset()")
        self._settle()
        found = recovery.reset(core, optimizer, self.global_steps)
        if found.finished:
            self._end_step(reports=False)
        found.check()
        self.zero_grad()
        recovery.compare_options(core, optimizer)
        found.check_hook()

    @reports_failure("average_replicas")
    def average_replicas(self) -> None:
        """Average shard groups that step on their own (comm_hook post_local_sgd or gossip); collective.

        Call it between two steps. The stepped weights and the optimizer's states become the mean over the groups.
        Nothing happens if the groups are the same, as after every ``period`` steps. Calls that return or save weights
        or states (``save_checkpoint``, ``state_dict``, …) require this call if the groups differ.
        """
        core = self._need_core()
        if self.optimizer is not None and core.step_state.replicas.since:
            replicas.average(core, self.optimizer)
            self._report.leave_out(core.sent())

    def get_global_grad_norm(self) -> float | None:
        """Return the norm of the last finished step's complete gradient before clipping; None before the first step.

        It is the 2-norm, or the norm of the order set by ``gradient_clipping_norm_type`` or ``clip_grad_norm_``. In
        fp16 a norm that is not finite is returned as inf: an overflow, even if it made NaNs.
        """
        self._need_core().schedule.finish_open_backward()
        norm = None if self.optimizer is None else self.optimizer.norm
        return None if norm is None else norm.item()

    def clip_grad_norm_(self, max_norm: float, norm_type: float | None = None) -> float:
        """Clip the coming step's gradients to ``max_norm``, not the config's value; return the norm before clipping.

        norm_type: the order of the norm, ``math.inf`` for the largest magnitude; None for the config's. The call is
        collective if the order differs from the config's.
        """
        core, optimizer = self._need_core(), self._need_optimizer("clip_grad_norm_()")
        core.schedule.finish_open_backward()
        core.step_state.require("clip_grad_norm_")
        check_clips(core.mesh)
        return optimizer.clip_next_step(float(max_norm), None if norm_type is None else float(norm_type))

    # Whole parameters

    @reports_failure_with("full_params")
    def full_params(
        self, names: Iterable[str] | None = None, *, writable: bool = False
    ) -> AbstractContextManager[None]:
        """Make parameters (all, or ``names``) full inside the ``with``; collective.

        It gathers the buckets that hold some of ``names``, except parameters that an outer ``full_params`` shows
        already.

        writable: True copies rank 0's writes to every rank at the end. Otherwise each rank keeps its own writes, which
        must be the same on all ranks (``MismatchError`` in the next step).
        """
        return full_access.full_params(self._need_core(), names, writable=writable)

    @reports_failure_with("full_grads")
    def full_grads(
        self, names: Iterable[str] | None = None, *, writable: bool = False
    ) -> AbstractContextManager[dict[str, Tensor | None]]:
        """Return a context manager that yields name → the full gradient of the step, on every rank; collective.

        The gradients are those before clipping. Call it between the backward on the boundary and ``step()``, when
        gradients are complete. The dict has every name asked for (None: all). The value is None if no rank used the
        parameter, or if it is frozen or has no elements. Tied names share a tensor. Gradients have the dtype that they
        are sent in, and were rounded to it. If the loss is scaled they are in fp32, without the scale.

        writable: True makes every rank step with rank 0's writes, and the norm is computed again. An exception inside
        the ``with``, on any rank, then leaves all gradients unchanged and raises on all ranks.
        """
        scale = 1.0 if self.optimizer is None else self.optimizer.loss_scale
        return full_access.full_grads(self._need_core(), names, writable=writable, scale=scale)

    @reports_failure_with("full_optimizer_state")
    def full_optimizer_state(
        self, names: Iterable[str] | None = None, *, writable: bool = False
    ) -> AbstractContextManager[dict[str, dict[str, Any] | None]]:
        """Return a context manager that yields name → {"weight", the states, "step"}, full, on every rank; collective.

        "weight" is the fp32 master weight, or the weight itself if it has none, in fp32; a written bf16 weight is
        rounded to nearest. The value is None for parameters that the optimizer does not step.

        writable: as in ``full_grads``. The weights follow, and a graph from before rejects backward, as it does after a
        step.
        """
        optimizer = self._need_optimizer("full_optimizer_state()")
        return full_access.full_optimizer_state(self._need_core(), optimizer, names, writable=writable)

    @reports_failure_with("ema")
    def ema(self) -> AbstractContextManager[None]:
        """Replace the weights by their moving averages inside the ``with``, to evaluate or save these; collective.

        Requires ``"ema": {"decay": …}`` in the config. Call it between two steps. Inside, training, saving a checkpoint
        and loading raise ``UsageError``; ``state_dict`` and ``save_pretrained`` return the averages. Afterwards the
        weights have their bits again. Buffers are not averaged.
        """
        return exchanging.averaged(self._need_core(), self._need_optimizer("ema()"))

    @reports_failure("state_dict")
    def state_dict(self, *, trainable_only: bool = False) -> dict[str, Any]:
        """Return the full state dict on the CPU of rank 0, {} on other ranks; collective.

        trainable_only: True leaves out frozen parameters, which are then not gathered (adapters without their base
        model). Parameters that peft saves of an adapter are included, trained or not.
        """
        return export.full_state_dict(self._need_core(), self.module, trainable_only=trainable_only)

    @reports_failure("load_state_dict")
    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load weights and buffers from a whole state dict, as ``torch.nn.Module.load_state_dict``; collective.

        state_dict: the whole dict on rank 0, whose values are used; the same or {} on other ranks. Hooks and modules
        with their own way of loading run on every rank that has the dict.

        strict: True raises ``UsageError`` if there are missing or unexpected keys.

        assign: must be False, because the engine's buckets hold the weights.

        Works at every stage. Returns missing_keys and unexpected_keys. A tensor of another shape raises ``UsageError``.
        After an error nothing has changed, except in a model with quantised modules, which load last. Master weights
        follow, and keep their bits if they still round to the weights.
        """
        return loading_weights.load(self._need_core(), self.module, state_dict, strict=strict, assign=assign)

    @reports_failure("save_pretrained")
    def save_pretrained(self, directory: str | Path, *, trainable_only: bool = False) -> None:
        """Write the full model to ``directory`` as safetensors, a Hugging Face model in its own form; collective.

        trainable_only: as in ``state_dict``. A PEFT model writes its adapters either way. ``CheckpointError`` on every
        rank if it cannot be written; an existing directory is then unchanged.
        """
        export.save_pretrained(self._need_core(), self.module, directory, trainable_only=trainable_only)

    @reports_failure_with("trace")
    def trace(self, path: str | Path) -> AbstractContextManager[None]:
        """Record the events inside the ``with`` on all ranks to ``path``, as a Chrome trace (Perfetto); collective.

        The lanes are compute, communication and waiting. On a GPU all times are those of the device. The host asks for
        them at the end of the ``with``, and waits for the device there.
        """
        core = self._need_core()
        core.step_state.require("a call of every rank", "trace")
        return traced(core.collectives, path)

    # Checkpoints: nothing is read or written here

    @reports_failure("save_checkpoint")
    def save_checkpoint(
        self,
        directory: str | Path,
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        *,
        frozen: bool = True,
        latest: bool = True,
    ) -> Path:
        """Write a checkpoint to ``directory/tag`` and return that path; collective.

        It contains weights, optimizer, scheduler, counters and random states, after completed steps only. Micro-batches
        of the next step that have run already are left out, with a warning.

        tag: default ``step-`` and the number of completed steps in 8 digits. An existing checkpoint of that name is
        replaced once the new one is complete.

        client_state: JSON values; rank 0's are kept.

        frozen: False leaves out frozen parameters (adapters without their base model), except those that peft saves.
        Such a checkpoint can be loaded into engines that have the same frozen parameters.

        latest: False leaves the file ``latest`` unchanged. Rank 0's value is used.

        A failure raises on every rank and leaves the previous checkpoint intact. With ``"checkpoint": {"async_save":
        true}`` the call returns when weights and buffers are copied to host memory. The next step waits until the
        optimizer's states are copied as well. A failure is then raised by the next call that saves (after it has
        started its own save), loads or waits, or by ``close()``.
        """
        self._need_core()
        self._settle()
        return checkpoint.save(self, directory, tag, client_state, frozen=frozen, latest=latest)

    @reports_failure("wait_for_checkpoint")
    def wait_for_checkpoint(self) -> None:
        """Wait until all saved checkpoints are on disk; collective. ``CheckpointError`` if one could not be written."""
        if self._saves is not None:
            self._need_core().step_state.require("a call of every rank", "wait_for_checkpoint")
            checkpoint.finish(self)

    @reports_failure("load_checkpoint")
    def load_checkpoint(
        self,
        directory: str | Path,
        tag: str | None = None,
        *,
        strict: bool = True,
        weights_only: bool = False,
        without: Collection[str] = (),
    ) -> Checkpoint:
        """Continue from a checkpoint of any number of ranks, stage and precision; collective.

        With the same number of ranks training continues bit for bit. With another number, weights and states have the
        same bits.

        tag: default the checkpoint that ``latest`` names. If it is damaged, the newest complete one is loaded, with a
        warning.

        strict: True raises ``UsageError`` with a list of all differences between model and checkpoint. False loads the
        entries that fit; the others keep their values, and states of parameters that were not stepped before begin at
        zero. Another shape, kind of dtype or optimizer raises ``UsageError`` in both cases.

        weights_only: True loads no optimizer, scheduler, counters and random states.

        without: "scheduler", "optimizer" (its states and options, learning rates included, and the random states), or
        both: these keep their current state.

        ``CheckpointError`` if the checkpoint is damaged. After either error an engine that has trained is unchanged.
        One that has not trained may be partly loaded by a damaged checkpoint, and then rejects training until a
        complete one is loaded. Also call this if ``reset()`` raises that it cannot bring the ranks to one step.
        """
        self._need_core()
        self._settle()
        return checkpoint.load(self, directory, tag, strict=strict, weights_only=weights_only, without=without)

    # Freeing the device between two phases of a program

    @reports_failure("offload_states")
    def offload_states(self, include: Iterable[str] = offload_states.STATES, *, pin_memory: bool = True) -> None:
        """Move state from the device to host memory until ``reload_states``, and free transient buffers; local.

        include: "optimizer" (master weights and optimizer state), "weights", or both.

        pin_memory: True uses page-locked memory, which a GPU copies faster.

        Call it between two steps. Until ``reload_states`` the engine rejects other work, and so does the module if its
        weights are offloaded; its parameters have no values then. State that is offloaded by the config stays in its
        place. Module buffers, frozen parameters that are not sharded, and memory that another tensor views
        (``module.state_dict()``) stay on the device. On a GPU the freed memory is returned to the system.
        ``UsageError`` for another name in ``include``.
        """
        core = self._open_core()
        core.schedule.finish_open_backward()
        offload_states.offload(core, self.optimizer, self.module, include, pinned=pin_memory)

    def reload_states(self) -> None:
        """Move everything back that ``offload_states`` moved; local. Does nothing if nothing was moved."""
        offload_states.reload(self._open_core())

    def _need_core(self) -> Core:
        core = self._open_core()
        core.step_state.require("any")
        core.attachments.end_passing()
        return core

    # Mode, end

    def train(self, mode: bool = True) -> Engine:
        """Put the module into training mode; return the engine."""
        self.module.train(mode)
        return self

    def eval(self) -> Engine:
        """Put the module into evaluation mode; return the engine."""
        return self.train(False)

    def close(self, *, restore: bool = True) -> None:
        """Detach the engine and end its process groups; collective.

        The module is an ordinary one again, with whole weights.

        restore: False gathers nothing. Sharded weights stay sharded, in their tiers (device, CPU, NVMe), without the
        optimizer's states. The module then rejects use until ``initialize`` is called with it on the same ranks, with
        any config. That engine begins with the same bits, including those of master weights.

        ``CommunicationError`` if weights are sharded and another rank does not close its engine at this place. In a
        ``finally`` or an ``except`` an error of this call is logged, and the first error stays visible. A second call
        does nothing.
        """
        if self.is_open:
            with closing.behind_the_first_error():
                self._close(restore=restore)

    def _close(self, *, restore: bool) -> None:
        with self._core.collectives.failures.reports_failure("close", lambda _: "at its start"):
            self._core.step_state.require("close()" if restore else "close(restore=False)")
        alone = closing.part(self._core, saves=self._saves is not None)
        try:
            offload_states.reload(self._core)
            with suppress(RuntimeError) if alone else nullcontext():
                self._settle()
            if not alone:
                self.wait_for_checkpoint()
        finally:
            try:
                closing.dissolve(self._core, self.module, restore=restore, alone=alone)
            finally:
                self._monitors.close()  # they may call the engine
                attached.discard(self.module)
                self._is_open = False
                self.optimizer = None
                self._give_back()
                if self._saves is not None:
                    self._saves.close()

    @property
    def _non_persistent_buffers_set(self) -> set[str]:
        """The module's set of buffers outside its state dict; ``torch.distributed.checkpoint.state_dict`` reads it."""
        return self.module._non_persistent_buffers_set

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or "module" not in self.__dict__:
            raise AttributeError(f"Engine has no attribute {name!r}")
        return other_engines.read_from_module(self, self.__dict__["module"], name)

    def __copy__(self) -> Engine:
        """Return another object for the same engine, as frameworks request it: it shares everything."""
        same = object.__new__(type(self))
        same.__dict__ = self.__dict__
        return same

    def __reduce_ex__(self, _protocol: Any) -> NoReturn:
        """Raise ``UsageError``: an engine holds process groups, files and hooks."""
        raise UsageError(
            "an engine cannot be copied or pickled: expected engine.save_checkpoint(dir), engine.state_dict() or "
            "engine.save_pretrained(dir), or a copy of the model before initialize",
            code="engine-copied",
        )

    def __iter__(self) -> NoReturn:
        """Raise ``TypeError``: an engine is no tuple."""
        raise TypeError(
            "initialize returns the engine alone, got an assignment to several names: expected engine = "
            "shardengine.initialize(...); then engine.optimizer and engine.lr_scheduler"
        )

    def to(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise ``UsageError``: the engine determines the device and the dtype of the weights."""
        raise UsageError(
            "the engine cannot be moved or cast after initialize, its buckets hold the weights: call .to(), .half(), "
            ".cuda() and the like on the model before initialize",
            code="weights-moved-after-initialize",
        )

    half = float = double = bfloat16 = cuda = cpu = to

    @reports_failure("optimizer.state_dict")
    def _save_optimizer(self, begun: bool) -> dict[str, Any]:
        core, optimizer = self._need_core(), self._need_optimizer("optimizer.state_dict()")
        return optimizer_dict.state_dict(core, optimizer, begun=begun)

    @reports_failure("optimizer.load_state_dict")
    def _load_optimizer(self, state_dict: Mapping[str, Any]) -> None:
        core, optimizer = self._need_core(), self._need_optimizer("optimizer.load_state_dict()")
        core = self._core = rebuild.follow(core, self.module, self.config, optimizer)
        optimizer_dict.load(core, optimizer, state_dict)

    @reports_failure("add_param_group")
    def _add_param_group(self, group: dict[str, Any]) -> None:
        optimizer, core = self._need_optimizer("add_param_group()"), self._need_core()
        self._core = rebuild.add_group(core, self.module, self.config, optimizer, group, self._lr_scheduler)

    @reports_failure("optimizer.train() or eval()")
    def _exchange_weights(self, method: str) -> None:
        exchanging.call_class(self._need_core(), self._need_optimizer(f"optimizer.{method}()"), method)

    def _make_scheduler(self, given: Any) -> Any:
        if given is None and self.config.scheduler is None:
            return None
        return lr_schedules.make(given, self.config.scheduler, self._need_optimizer("a learning-rate scheduler"))
