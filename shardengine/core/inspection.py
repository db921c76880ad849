"""The engine's reports about itself (learning rates, bytes in memory and on the wire), and its side of checkpoints.

The reports change nothing. The private methods below them let ``checkpoint/`` read the engine's counters and set them.

Must not know: forward, backward, the step. Every call here is local; none is collective.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from shardengine.comm import STEP, Purpose
from shardengine.config import Config
from shardengine.core import formulas
from shardengine.core.parts import Core
from shardengine.ddp import Window
from shardengine.errors import UsageError
from shardengine.optim import Needs, ShardedOptimizer, Verdict, lr_schedules

attached: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""The modules that belong to an open engine."""


def check_free(model: nn.Module) -> None:
    """Raise ``UsageError`` if ``model``, or a parameter that it trains, belongs to an open engine."""
    if model in attached:
        raise UsageError(
            "this model already belongs to an engine: expected one engine per model; call engine.close() "
            "first (or build the model anew, if that engine is gone)",
            code="model-already-in-engine",
        )
    held = {id(parameter): other for other in attached for parameter in other.parameters()}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) in held:
            raise UsageError(
                f"parameter {name!r} already belongs to an engine, that of a {type(held[id(parameter)]).__name__}: "
                "expected one engine for each parameter that is trained; call initialize with one module that holds "
                "both models, or that engine's close() first",
                code="model-parameter-in-engine",
            )


class StepReport:
    """Bytes that the last step sent, and the size of the model state, for ``memory()`` and ``traffic()``."""

    def __init__(self) -> None:
        self.model_state_bytes: Counter[str] = Counter()
        self.micro_batches = 0
        self.last_step: Counter[Purpose] = Counter()
        self.waited_s = 0.0
        self._before: Counter[Purpose] = Counter()
        self._waited_before = 0

    def observe(self, live_bytes: Counter[str]) -> None:
        """Record the model state at rest, by tier, with complete gradients."""
        self.model_state_bytes = live_bytes

    def close_step(self, sent: Counter[Purpose], waited_ns: int, micro_batches: int) -> None:
        """Record the end of a step.

        sent: all bytes so far, by purpose · waited_ns: all waiting for collectives so far.
        """
        self.waited_s, self._waited_before = (waited_ns - self._waited_before) / 1e9, waited_ns
        self.last_step = sent - self._before
        self._before, self.micro_batches = sent, micro_batches

    def leave_out(self, sent: Counter[Purpose]) -> None:
        """Count the bytes since the last step for no step. sent: as in ``close_step``."""
        self._before = sent

    def data_bytes(self) -> int:
        """Bytes of weights and gradients in the last step, without control messages and buffers."""
        return sum(self.last_step[purpose] for purpose in STEP)


class Inspection:
    """The read-only half of the engine's public methods."""

    module: nn.Module
    global_steps: int
    config: Config
    optimizer: ShardedOptimizer | None
    global_samples: int
    _core: Core
    _window: Window
    _report: StepReport
    _verdict: Verdict | None
    _lr_scheduler: Any
    _owns_scheduler: bool
    _buffers_sent: bool
    _is_open: bool = False
    _saves: Any = None
    """The writer of asynchronous saves (checkpoint.background.Background), from the first save on."""

    @property
    def is_open(self) -> bool:
        """Whether ``close()`` has not been called yet."""
        return self._is_open

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return self._core.mesh.device

    @property
    def rank(self) -> int:
        """This rank's number."""
        return self._core.mesh.rank

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self._core.mesh.ranks

    @property
    def micro_steps(self) -> int:
        """The number of micro-batches whose backward has run and was counted, over all steps."""
        return self._window.total

    def train_batch_size(self) -> int:
        """Samples per optimizer step over all ranks."""
        return self.config.train_batch_size or 0

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples per rank and micro-batch."""
        return self.config.train_micro_batch_size_per_gpu or 0

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per optimizer step."""
        return self.config.gradient_accumulation_steps or 1

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the current micro-batch is the last of its optimizer step."""
        return self._window.is_boundary

    def was_step_applied(self) -> bool:
        """Return whether the last ``step()`` changed the weights. On a GPU the host waits for the result."""
        self._settle()
        return self._verdict is not None and self._verdict.applied

    def get_loss_scale(self) -> float:
        """Return the factor that ``backward`` multiplies the next losses with; 1 if the loss is not scaled."""
        return 1.0 if self.optimizer is None else self.optimizer.loss_scale

    @property
    def skipped_steps(self) -> int:
        """The number of ``global_steps`` that were skipped because gradients were not finite.

        Waits for the device as ``was_step_applied`` does.
        """
        self._settle()
        scaler = None if self.optimizer is None else self.optimizer.settings.scaler
        return 0 if scaler is None else scaler.skipped

    @property
    def lr_scheduler(self) -> Any:
        """The scheduler that the engine steps with the optimizer, or None if there is none and you step your own.

        May be set to another torch LRScheduler over the engine's optimizer, or to None. Raises ``UsageError`` for a
        scheduler of another optimizer.
        """
        self._settle()
        return self._lr_scheduler

    @lr_scheduler.setter
    def lr_scheduler(self, scheduler: Any) -> None:
        """Set the scheduler. ``UsageError`` if it does not drive the engine's optimizer."""
        self._settle()
        if scheduler is not None:
            lr_schedules.check_attached(scheduler, self._need_optimizer("engine.lr_scheduler"))
        self._lr_scheduler, self._owns_scheduler = scheduler, scheduler is None

    def zero_optimization_stage(self) -> int:
        """The configured stage, 0 to 3."""
        return self.config.zero_optimization.stage

    def get_lr(self) -> list[float]:
        """Return the learning rate of each parameter group; NaN if the optimizer computes the rate itself in each step.

        Waits for the device as ``was_step_applied`` does.
        """
        self._open_core()
        self._settle()
        return self._rates(self._need_optimizer("get_lr()"))

    @property
    def _needs(self) -> Needs:
        return Needs() if self.optimizer is None else self.optimizer.needs

    def memory(self) -> dict[str, float]:
        """Return the bytes of model state per rank: the stage's formula (``predicted_*``) and the measured bytes.

        ``*_model_state_bytes`` and ``live_*`` count the device, ``*_host_bytes`` host memory, ``*_disk_bytes`` files.
        ``measured_*`` is taken before each update, when gradients are complete and weights are at rest. ``live_*`` is
        the current state.

        - ``buffer_bytes``: the buffer pool on the device (transient gradient and receive buffers).
        - ``host_buffer_bytes``: the pool in host memory, for transfers between host and device; 0 if the device is the
          host.
        - ``predicted_buffer_bytes``: the most that the device holds beside model state (docs/limits.md).
        - ``tier_buffer_bytes``: buffers in host memory between a disk and the step.
        - ``offload_ratio``: no number of bytes, but the offloaded part of the optimizer, as given or as ``"ratio":
          "auto"`` chose it.
        - ``shard_group_ranks``: the number of ranks in a shard group; all ranks if the mesh is not hybrid.
        - ``units``: the number of modules that are gathered as one.
        - ``largest_unit_bytes``, ``smallest_unit_bytes``, ``root_bytes``: their weights when they are whole.
        - ``live_window_bytes``: the most weights that are whole at one moment of a pass.

        If weights are kept whole (stages 0 to 2), there are no units, and the root holds all weights.
        """
        pool = self._core.pool
        buffer_bytes = pool.device_bytes
        footprint, homes = formulas.footprint_of(self._core, self.config, self._needs), formulas.homes_of(self._core)
        predicted = footprint.at_rest(homes)
        window = footprint.live_window()
        measured = self._report.model_state_bytes or self._live_bytes()
        return {
            "predicted_model_state_bytes": predicted["device"],
            "measured_model_state_bytes": measured["device"],
            "predicted_host_bytes": predicted["cpu"],
            "measured_host_bytes": measured["cpu"],
            "predicted_disk_bytes": predicted["nvme"],
            "measured_disk_bytes": measured["nvme"],
            "live_weight_bytes": self._core.weight_bytes()["device"],
            "live_gradient_bytes": self._core.reducer.gradient_bytes()["device"],
            "live_state_bytes": 0 if self.optimizer is None else self.optimizer.state_bytes()["device"],
            "buffer_bytes": buffer_bytes,
            "host_buffer_bytes": pool.allocated_bytes - buffer_bytes,
            "predicted_buffer_bytes": footprint.buffers(homes),
            "tier_buffer_bytes": self._core.tiers.buffer_bytes,
            "offload_ratio": footprint.part_away(homes),
            "shard_group_ranks": self._core.mesh.ranks // self._core.mesh.replicas,
            "units": window.count,
            "root_bytes": window.root,
            "largest_unit_bytes": window.largest,
            "smallest_unit_bytes": window.smallest,
            "live_window_bytes": window.bytes,
        }

    def tuning(self) -> list[str]:
        """Return a sentence per bucket size that is "auto" in the config: the chosen size and the measured fit."""
        return self._core.sizes.sentences()

    def traffic(self) -> dict[str, Any]:
        """Return the bytes sent per rank: the stage's formula for the last step, and the counted bytes by purpose.

        Gradients that travel as rows (``sparse_gradients``) are counted, but are in no formula.

        - ``formula_bytes_by_axis``: bytes of gradients and weights inside this rank's shard group, and across the
          groups. A mesh that is not hybrid has one group; its gradients may be added node by node.
        - ``exposed_s_*``: seconds that this rank waited for collectives. On a GPU they are counted when the device has
          reached them. This call does not wait for that, so they may belong to an earlier step.
        """
        return {
            "formula_bytes_per_step": formulas.predicted_traffic(
                self._core, self._needs, self._report.micro_batches or self._window.size
            ),
            "formula_bytes_by_axis": formulas.predicted_by_axis(
                self._core, self._needs, self._report.micro_batches or self._window.size
            ),
            "measured_bytes_last_step": self._report.data_bytes(),
            "by_purpose_last_step": {purpose.value: count for purpose, count in self._report.last_step.items()},
            "exposed_s_last_step": self._report.waited_s,
            "exposed_s_total": self._core.collectives.trace.waited_ns / 1e9,
            "by_purpose_total": {purpose.value: count for purpose, count in self._core.sent().items()},
        }

    def _go_on_from(self, counters: Mapping[str, int] | None) -> None:
        """Begin an accumulation window with the ``counters`` of a loaded checkpoint; None: with the current ones."""
        self._core.step_state.restart(None if counters is None else counters["micro_steps"])
        self._buffers_sent = False
        if counters is not None:
            self.global_steps, self.global_samples = counters["global_steps"], counters["global_samples"]
            self._core.reducer.begin_step(self.global_steps)
            self._core.step_state.replicas.foresee(self.global_steps)

    def _save_behind(self, make: Callable[[], Any]) -> Any:
        """The writer of asynchronous saves. The first save that asks for it makes it."""
        if self._saves is None:
            self._saves = make()
        return self._saves

    def _settle(self) -> None:
        """Take in whether the last step was applied, before anything depends on it."""
        if self.optimizer is not None:
            self.optimizer.settle()

    @staticmethod
    def _rates(optimizer: ShardedOptimizer) -> list[float]:
        rates = [(group["lr"], group.get("relative_step")) for group in optimizer.param_groups]
        return [math.nan if rate is None or own else float(rate) for rate, own in rates]

    def _live_bytes(self) -> Counter[str]:
        """The current bytes of model state, by tier."""
        states = Counter() if self.optimizer is None else self.optimizer.state_bytes()
        return self._core.weight_bytes() + self._core.reducer.gradient_bytes() + states

    def _open_core(self) -> Core:
        if not self.is_open:
            raise UsageError(
                "this engine was closed: expected an open one; call shardengine.initialize again", code="engine-closed"
            )
        return self._core

    def _need_optimizer(self, call: str) -> ShardedOptimizer:
        if self.optimizer is None:
            raise UsageError(
                f"{call} needs an optimizer and this engine has none: pass optimizer= to initialize, or put "
                '"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}} into the config',
                code="optimizer-missing",
            )
        return self.optimizer
