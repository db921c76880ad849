"""The engine: the library's surface, wired to the parts below. Nothing is computed here.

Life of one step: ``engine(batch)`` runs the module, its hooks gather and reshard units (schedule) · ``engine.backward``
divides the loss, autograd hands each gradient to the reducer, whose end closes the micro-batch · on the boundary
``engine.step`` clips, steps the shards (optimizer) and gathers the stepped weights where they rest replicated.
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
    """Trains one module. Not an ``nn.Module``: names have no prefix; unknown attributes are read from the module."""

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
        """As ``initialize``; auto: as for ``load_config``."""
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
        """Everything that can fail on one rank alone goes through ``run_on_all_ranks``, so that it fails on all."""
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
        """Run the module's forward; its output comes back as it is."""
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
        """Of the first batch rank 0 says whether it is as large as the config, and as short as the model, has it."""
        self._has_seen_batch = True
        of_batch = notices.about_batch(self.train_micro_batch_size_per_gpu(), args, kwargs)
        for notice in filter(None, (of_batch, notices.about_length(self.module, args, kwargs))):
            _log.warning("%s", notice)

    def _send_buffers(self) -> None:
        """Once in a window of training: those of rank 0, or of a rank that has data, to all. A rank without data does
        as in its last window: its loop may have ended with ``eval()``."""
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
        """Backward of ``loss`` divided by the accumulation steps; returns that quotient.

        divide: False where ``loss`` is this micro-batch's share of the step's loss already.

        gradient: what the gradient of a ``loss`` that is no scalar is multiplied with, as in ``Tensor.backward``.
        A window that is ended early keeps the divisor, so that every sample weighs the same. In the window's last
        micro-batch this may be called several times: each call's gradients are completed and added.
        ``loss.backward()`` works as well, and divides by nothing but the ranks; where the loss is scaled it is refused.
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
        if self.optimizer is not None and steps > 1:  # a single micro-batch is the same either way
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
        """``loss`` with the loss scale of fp16, for a ``backward()`` of its own, which comes next; else ``loss``."""
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
        """Micro-batches inside are accumulated full-size on this rank and neither communicate nor end the window."""
        return ForWith("no_sync", self._window.no_sync)

    @reports_failure("register_comm_hook")
    def register_comm_hook(self, state: Any, hook: Callable[[Any, Any], Any]) -> None:
        """Let ``hook(state, bucket)`` bring the gradients of all ranks, as torch's DDP does; between two steps, on
        every rank; collective.

        bucket: this rank's gradients, see ``comm_hooks.GradBucket``. hook: returns the mean over ranks, a flat tensor
        as long as ``bucket.buffer()``, or a future of it; it is not divided any more. Hooks of
        ``torch.distributed.algorithms.ddp_comm_hooks`` are such functions. Where a rank keeps a slice alone, it takes
        that of the result, so that more is sent than without. What the hook sends is not in ``traffic()``.
        """
        comm_hooks.register(self._need_core(), hook, state)

    @reports_failure_with("join")
    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> AbstractContextManager[None]:
        """Inside of ``with engine.join():`` ranks may have unequal numbers of batches; collective.

        A rank whose loop has ended takes part with zeros in the micro-batches and steps of the others until all have
        ended; then all leave, with the same weights, states and steps. A step that a rank began takes what it had. One
        window without data follows the last one, in which the ranks learn that all have ended.

        divide_by_initial_world_size: gradients are divided by all ranks; False: by those that had a micro-batch in the
        step · enable: False does nothing · throw_on_early_termination: EarlyTerminationError on every rank in the first
        step for which one has run out of data; that step is dropped. Inside, nothing that needs every rank's call but
        the training itself: not ``clip_grad_norm_``, evaluation at stage 3, ``full_params``, ``state_dict`` and the
        like, nor ``save_checkpoint`` once a rank has run out. At stage 3 such a rank gathers weights in the order of
        its last step, or of the modules where it had none: every step runs the same modules in the same order.
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
        """Say whether the current micro-batch ends the window; forgotten when the step is applied."""
        self._core.step_state.require("a call of every rank", "set_gradient_accumulation_boundary()")
        self._window.set_boundary(bool(is_boundary))

    @reports_failure("set_train_batch_size")
    def set_train_batch_size(self, train_batch_size: int) -> None:
        """From the next step on, ``train_batch_size`` samples make one: in more or fewer micro-batches; collective.

        Between two steps. Micro-batches stay as large as they are, so that ``gradient_accumulation_steps()``, and what
        ``backward`` divides losses by, follow. UsageError where that many samples do not divide, MismatchError where
        ranks disagree; nothing has changed then. A checkpoint does not set it: call this after ``load_checkpoint``.
        """
        self.config = settings_between_steps.set_batch(
            self._need_core(), self.config, "set_train_batch_size", total=train_batch_size
        )

    @reports_failure("set_train_micro_batch_size")
    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """From the next step on, micro-batches of a rank have ``micro_batch_size`` samples; collective.

        As ``set_train_batch_size``, but the number of micro-batches stays. Nothing is computed from it: it is what
        counters and ``train_batch_size()`` say.
        """
        self.config = settings_between_steps.set_batch(
            self._need_core(), self.config, "set_train_micro_batch_size", micro=micro_batch_size
        )

    @reports_failure("set_gradient_divide_factor")
    def set_gradient_divide_factor(self, factor: float) -> None:
        """From the next step on, sums of gradients over ranks are divided by ``factor``; collective, between two steps.

        As ``gradient_divide_factor`` in the config, whose default is the number of ranks.
        """
        self.config = settings_between_steps.set_divide_factor(
            self._need_core(), self.config, "set_gradient_divide_factor", factor
        )

    @reports_failure("step")
    def step(self, *, flush: bool = False) -> None:
        """On the boundary: clip, step, publish, step the scheduler, forget gradients. Off the boundary it only counts.

        flush: end the window here, although its last backward was not on the boundary. Where gradients are not finite
        on any rank, every rank skips the step: weights, states and scheduler stay, the window counts
        (``was_step_applied``, ``skipped_steps``). NonfiniteGradientError with "nonfinite_gradients": "raise", or after
        "max_nonfinite_steps" in a row, names the parameters; LossScaleError where a loss scale cannot fall any further.
        After another exception in the middle of the update ``reset()`` finishes it; on one rank so does another call.
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
        """What follows the update. reports: a step that was skipped may be told, or be an error.

        Whether it was skipped may be known later ([Note: Settled a step later]); at once where an error or the loss
        scale depends on it, or a scheduler of the user's, which cannot be taken back.
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
            finally:  # what monitors do may settle
                if self._monitors:
                    values = {"lr": rates[0], "samples": self.global_samples}
                    late = {"skipped_steps": lambda: before + (not verdict.applied)}
                    self._monitors.note(step, values, late, optimizer.norm, micro_batches)

    def _close_window(self, core: Core, optimizer: ShardedOptimizer) -> int:
        """Gradients are forgotten, the step counts. Returns its micro-batches on this rank."""
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
        """Forget the gradients of the window; it starts anew.

        Also the way on after a forward or backward that raised *on every rank, at the same place*; after a failure of
        one rank alone, call ``reset()`` on every rank instead.
        """
        self._need_core().step_state.require("zero_grad()")
        self._core.schedule.finish_open_backward()
        self._drop_window()

    def _drop_window(self, total: int | None = None) -> None:
        """total: as ``StepState.restart``; what was sent is of no step then."""
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
        """``engine.optimizer.zero_grad()``: nothing in the middle of a window, after a ``step()`` that counted, nor
        where there are no gradients yet: a forward may have run, whose backward needs what it has gathered."""
        if not self._window.only_counted and self._core.step_state.phase is not Phase.EMPTY:
            self.zero_grad()

    def reset(self) -> None:
        """After a failure: every rank returns to the last completed step, over new process groups; collective.

        The window is dropped, unless some rank had begun to update weights: then all ranks finish that step (see
        ``global_steps``). UsageError where a rank stopped inside of an update: load a checkpoint; or where what a
        registered communication hook has begun itself may be out of step: start the ranks again. CommunicationError
        names the ranks that do not call it within ``timeout_s``. A Mesh of the caller's is no longer used afterwards.
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
        """Where comm_hook post_local_sgd or gossip lets shard groups step apart, average them now; collective.

        The weights that are stepped and the optimizer's states become the mean over the groups. Between two steps.
        Nothing happens where they are the same, as after every ``period`` steps. What gives weights or states away
        (``save_checkpoint``, ``state_dict``, …) asks for it where they are not.
        """
        core = self._need_core()
        if self.optimizer is not None and core.step_state.replicas.since:
            replicas.average(core, self.optimizer)
            self._report.leave_out(core.sent())

    def get_global_grad_norm(self) -> float | None:
        """Norm of the complete gradient before clipping, of the last finished window; None before the first.

        The 2-norm, or of the order that ``gradient_clipping_norm_type`` or ``clip_grad_norm_`` said.
        In fp16 one that is not finite is inf: an overflow, also where it made NaNs.
        """
        self._need_core().schedule.finish_open_backward()
        norm = None if self.optimizer is None else self.optimizer.norm
        return None if norm is None else norm.item()

    def clip_grad_norm_(self, max_norm: float, norm_type: float | None = None) -> float:
        """Clip the coming step to ``max_norm`` (instead of the config's value); returns the norm before clipping.

        norm_type: its order, ``math.inf`` for the largest magnitude; None for the config's. With another one than that
        the call is collective.
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
        """Parameters (all, or ``names``) are full inside the ``with``; collective.

        Gathered are the buckets that hold some of ``names`` which no outer ``full_params`` shows.
        writable: what rank 0 wrote is what every rank has afterwards. Otherwise each rank's writes count, which must be
        the same on all (MismatchError in the next step).
        """
        return full_access.full_params(self._need_core(), names, writable=writable)

    @reports_failure_with("full_grads")
    def full_grads(
        self, names: Iterable[str] | None = None, *, writable: bool = False
    ) -> AbstractContextManager[dict[str, Tensor | None]]:
        """``with`` this: name → the full gradient of the step, before clipping, on every rank; collective.

        For every name asked for (None: all); None where no rank used the parameter, or it is frozen or has no elements.
        Tied names share a tensor. Complete: between the backward on the boundary and ``step()``. The dtype is the one
        in which gradients are sent; they were rounded to it. Where the loss is scaled they are shown in fp32, without
        the scale. writable: what rank 0 wrote is what every rank steps with,
        and the norm is taken again. An exception inside, on any rank, then leaves all as it was and raises on all.
        """
        scale = 1.0 if self.optimizer is None else self.optimizer.loss_scale
        return full_access.full_grads(self._need_core(), names, writable=writable, scale=scale)

    @reports_failure_with("full_optimizer_state")
    def full_optimizer_state(
        self, names: Iterable[str] | None = None, *, writable: bool = False
    ) -> AbstractContextManager[dict[str, dict[str, Any] | None]]:
        """``with`` this: name → {"weight", the states, "step"} of the parameter, full, on every rank; collective.

        "weight" is what is stepped, in fp32: the master weight, or the weight itself where it has none (what is written
        to a bf16 one is rounded to nearest); None for parameters that the optimizer does not step. writable: as in
        ``full_grads``; the weights follow, and a graph from before refuses backward as it does after a step.
        """
        optimizer = self._need_optimizer("full_optimizer_state()")
        return full_access.full_optimizer_state(self._need_core(), optimizer, names, writable=writable)

    @reports_failure_with("ema")
    def ema(self) -> AbstractContextManager[None]:
        """The weights are their moving averages inside the ``with``, to evaluate, export or save them; collective.

        Needs ``"ema": {"decay": …}`` in the config, and stands between two steps. Inside nothing can be trained, saved
        as a checkpoint or loaded; ``state_dict`` and ``save_pretrained`` give the averages. Afterwards the weights have
        their bits again. Buffers are not averaged.
        """
        return exchanging.averaged(self._need_core(), self._need_optimizer("ema()"))

    @reports_failure("state_dict")
    def state_dict(self, *, trainable_only: bool = False) -> dict[str, Any]:
        """The full state dict on the CPU of rank 0, {} elsewhere; collective.

        trainable_only: without frozen parameters, which are then not gathered (adapters without their base model);
        what peft saves of an adapter is in it, trained or not.
        """
        return export.full_state_dict(self._need_core(), self.module, trainable_only=trainable_only)

    @reports_failure("load_state_dict")
    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Weights and buffers from a whole state dict, as ``torch.nn.Module.load_state_dict``; collective, any stage.

        state_dict: whole on rank 0, whose values count; there or {} elsewhere. Hooks and modules that load in a way of
        their own run on every rank that has it. Master weights follow, and keep their bits where the weights still fit.
        Returns missing_keys and unexpected_keys; UsageError where there are any and ``strict``, or another shape:
        nothing has changed then, except in a model with quantised modules, which load last. assign: False, the
        engine's buckets hold the weights.
        """
        return loading_weights.load(self._need_core(), self.module, state_dict, strict=strict, assign=assign)

    @reports_failure("save_pretrained")
    def save_pretrained(self, directory: str | Path, *, trainable_only: bool = False) -> None:
        """Write the full model to ``directory`` as safetensors, a Hugging Face model its own way; collective.

        trainable_only: as ``state_dict``. A PEFT model writes its adapters either way.
        """
        export.save_pretrained(self._need_core(), self.module, directory, trainable_only=trainable_only)

    @reports_failure_with("trace")
    def trace(self, path: str | Path) -> AbstractContextManager[None]:
        """What happens inside the ``with`` on all ranks → a Chrome trace (chrome://tracing, Perfetto); collective.

        Lanes: compute, communication, waiting. On a GPU all of them show when the device did it, which the host asks
        for when the ``with`` block ends: there it waits for the device.
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
        """Write weights, optimizer, scheduler, counters and random states to ``directory/tag``; collective.

        Of the steps that are complete: those micro-batches of the next one that were run are left out, which is told.
        tag: default ``step-`` and the steps so far in 8 digits; one that is there is replaced once the new one is
        whole. client_state: JSON, rank 0's is kept. frozen: False leaves frozen parameters out (adapters without their
        base model, but with all that peft saves of them); it is loaded into engines that have the same ones. latest:
        False (rank 0's counts) leaves the file ``latest`` as it is. A failure raises on every rank and leaves the
        previous one intact. With ``"checkpoint": {"async_save": true}`` it returns when weights and buffers are copied
        to host memory, and the next step waits until the optimizer's states are; a failure is then raised by the next
        call that saves (when its own is under way), loads or waits, or by ``close()``.
        """
        self._need_core()
        self._settle()
        return checkpoint.save(self, directory, tag, client_state, frozen=frozen, latest=latest)

    @reports_failure("wait_for_checkpoint")
    def wait_for_checkpoint(self) -> None:
        """Return when everything that was saved is on disk; CheckpointError if it is not; collective."""
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
        """Go on from a checkpoint of any number of ranks, stage and precision; collective.

        tag: default what ``latest`` names; where that one is damaged, the newest that is whole, with a warning.
        At the same number of ranks training goes on bit for bit; at another one weights and states are the same bits.
        strict: UsageError lists everything that the model and the checkpoint do not have in common. False takes what
        fits, the rest keeps its values, and states of what was not stepped before begin at zero; another shape, kind of
        dtype or optimizer is refused all the same. weights_only: no optimizer, scheduler, counters and random states.
        without: "scheduler", "optimizer" (its states and options, learning rates included, and the random states), or
        both, keep what they have; all else goes on.

        CheckpointError: damaged. An engine that has trained is not changed by either; one that has not may be partly
        loaded by a damaged checkpoint, and refuses to train until a whole one is. Also the way on where ``reset()``
        says that it has none.
        """
        self._need_core()
        self._settle()
        return checkpoint.load(self, directory, tag, strict=strict, weights_only=weights_only, without=without)

    # Freeing the device between two phases of a program

    @reports_failure("offload_states")
    def offload_states(self, include: Iterable[str] = offload_states.STATES, *, pin_memory: bool = True) -> None:
        """Move what rests on the device to host memory until ``reload_states``, and free transient buffers. Local.

        include: "optimizer" (master weights and optimizer state), "weights", or both. Between two steps. The engine
        refuses to work meanwhile; so does the module where the weights are away, whose parameters have no values. What
        rests in another tier stays there; module buffers and frozen parameters that are not sharded stay on the device,
        and so does memory that somebody else holds a view of (``module.state_dict()``). On a GPU what was freed is
        given back to the system. pin_memory: page-locked, so that a GPU copies it fast.
        """
        core = self._open_core()
        core.schedule.finish_open_backward()
        offload_states.offload(core, self.optimizer, self.module, include, pinned=pin_memory)

    def reload_states(self) -> None:
        """Everything that ``offload_states`` moved is back where it rests. Local; nothing happens where it is there."""
        offload_states.reload(self._open_core())

    def _need_core(self) -> Core:
        core = self._open_core()
        core.step_state.require("any")
        core.attachments.end_passing()
        return core

    # Mode, end

    def train(self, mode: bool = True) -> Engine:
        """Put the module into training mode."""
        self.module.train(mode)
        return self

    def eval(self) -> Engine:
        """Put the module into evaluation mode."""
        return self.train(False)

    def close(self, *, restore: bool = True) -> None:
        """Detach: the module is an ordinary one again, with whole weights; its process groups end; collective.

        restore: False gathers nothing. Weights that are sharded stay so, in their tiers, without the optimizer's
        states, and the module refuses to be used until ``initialize`` is called with it on the same ranks, with any
        config: that engine begins with the same bits, those of master weights included. CommunicationError where
        weights are sharded and another rank does not close its engine at this place. In a ``finally`` or an ``except``
        an error of this call is logged, and the first one is seen.
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
                self._monitors.close()  # they may ask the engine
                attached.discard(self.module)
                self._is_open = False
                self.optimizer = None
                self._give_back()
                if self._saves is not None:
                    self._saves.close()

    @property
    def _non_persistent_buffers_set(self) -> set[str]:
        """What ``torch.distributed.checkpoint.state_dict`` asks of what it is given as a model."""
        return self.module._non_persistent_buffers_set

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or "module" not in self.__dict__:
            raise AttributeError(f"Engine has no attribute {name!r}")
        return other_engines.read_from_module(self, self.__dict__["module"], name)

    def __copy__(self) -> Engine:
        """Another name for the same engine, as frameworks make one: it shares everything."""
        same = object.__new__(type(self))
        same.__dict__ = self.__dict__
        return same

    def __reduce_ex__(self, _protocol: Any) -> NoReturn:
        """An engine holds process groups, files and hooks."""
        raise UsageError(
            "an engine cannot be copied or pickled: expected engine.save_checkpoint(dir), engine.state_dict() or "
            "engine.save_pretrained(dir), or a copy of the model before initialize",
            code="engine-copied",
        )

    def __iter__(self) -> NoReturn:
        """An engine is no tuple."""
        raise TypeError(
            "initialize returns the engine alone, got an assignment to several names: expected engine = "
            "shardengine.initialize(...); then engine.optimizer and engine.lr_scheduler"
        )

    def to(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: the engine owns where and in which dtype the weights live."""
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
