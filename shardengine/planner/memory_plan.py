"""``shardengine.plan``: the memory that a run needs of every tier, whether it fits, and the time of a step.

Owns: the result, its sentences. Must not know: how bytes are counted (dry_engine), command lines.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardengine.budget import ALONE
from shardengine.config import Config, MonitorConfig, load_config
from shardengine.engine import Engine
from shardengine.errors import UsageError
from shardengine.loading import is_in_slices
from shardengine.planner import batches
from shardengine.planner.deep_model import deep_run, quick_run
from shardengine.planner.dry_engine import (
    BACKWARD,
    FORWARD,
    FORWARD_ALONE,
    INITIALIZE,
    STATES,
    STEP,
    STEPS,
    WEIGHTS,
    DryRun,
    ModelPlace,
    bytes_by_kind,
    dry_run,
)
from shardengine.planner.hardware import Hardware, show_bytes, table
from shardengine.planner.layers import Layers, layers_of, shorter
from shardengine.planner.ledger import MemoryMoment, highest
from shardengine.planner.no_values import NoValues, without_values, without_weights
from shardengine.planner.rates import Rates
from shardengine.planner.replay import Times, carried_times, simulate
from shardengine.planner.tape import Tape

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PlannedTier:
    """The bytes that one rank needs of one tier.

    peak: at most, in a step · at_peak: the peak by kind · phase: of the peak · at_rest: between steps, by kind ·
    initialize: at most while the engine is made; on a GPU the model comes from the host · has: bytes that exist; None:
    not checked.
    """

    name: str
    peak: int
    at_peak: Mapping[str, int]
    phase: str
    at_rest: Mapping[str, int]
    initialize: int
    has: int | None

    @property
    def rests(self) -> int:
        """Bytes between steps."""
        return sum(self.at_rest.values())

    @property
    def need(self) -> int:
        """Bytes at most, in initialize and in steps."""
        return max(self.peak, self.initialize)

    @property
    def fits(self) -> bool:
        """Whether the tier has the bytes that are needed."""
        return self.has is None or self.need <= self.has


@dataclass(frozen=True)
class Plan:
    """The needs of one rank of a run.

    ``host`` is None unless the device has a memory of its own; ``disk`` is None unless the config uses the tier nvme.

    config: with defaults, for this number of ranks · parameters: of the model · shape: of a micro-batch's first tensor
    · timeline: the device's highest moment of each phase and block · seconds: the time of planning · time: of a step,
    if speeds of the hardware are known · depths: the layers of the shorter models that the plan was derived from; empty
    if all layers ran.
    """

    hardware: Hardware
    config: Config
    rank: int
    parameters: int
    shape: tuple[int, ...]
    device: PlannedTier
    host: PlannedTier | None
    disk: PlannedTier | None
    timeline: list[MemoryMoment]
    seconds: float
    time: Times | None = None
    depths: tuple[int, ...] = ()

    @property
    def tiers(self) -> list[PlannedTier]:
        """The tiers that a rank uses."""
        return [tier for tier in (self.device, self.host, self.disk) if tier is not None]

    @property
    def fits(self) -> bool:
        """Whether every tier fits."""
        return all(tier.fits for tier in self.tiers)

    def sentences(self) -> list[str]:
        """Return a verdict for each tier, for people."""
        said = []
        for tier in self.tiers:
            need = tier.need
            if tier.has is None:
                said.append(f"{tier.name}: {show_bytes(need)} per rank")
            elif tier.fits:
                said.append(f"{tier.name}: fits, {show_bytes(need)} of {show_bytes(tier.has)} per rank")
            else:
                said.append(
                    f"{tier.name}: does not fit, {show_bytes(need)} per rank, {show_bytes(need - tier.has)} more than "
                    f"the {show_bytes(tier.has)} there are"
                )
        return said

    def as_dict(self) -> dict[str, Any]:
        """Return the plan for JSON, without the timeline.

        ``reserved_bytes`` come on top of ``has_bytes``: no tensor gets them.
        """
        return {
            "fits": self.fits,
            "ranks": self.hardware.ranks,
            "rank": self.rank,
            "parameters": self.parameters,
            "batch": list(self.shape),
            "tiers": {
                tier.name: {
                    "peak_bytes": tier.peak, "at_peak": dict(tier.at_peak), "phase": tier.phase,
                    "rests_bytes": tier.rests, "initialize_bytes": tier.initialize, "has_bytes": tier.has,
                    "reserved_bytes": self.hardware.reserved_bytes if tier is self.device else 0,
                }
                for tier in self.tiers
            },
            "seconds": self.seconds,
            "time": None if self.time is None else self.time.as_dict(),
        }  # fmt: skip


def plan(
    model: nn.Module | Callable[[], nn.Module],
    config: Mapping[str, Any] | str | Path | Config,
    hardware: Hardware | str,
    *,
    batch: Mapping[str, Any] | None = None,
    length: int | None = None,
    loss: Callable[[Any], Tensor] = batches.loss_of,
    exact: bool = False,
    rates: Rates | None = None,
    trains: bool = False,
    in_slices: bool = False,
    **options: Any,
) -> Plan:
    """Return the needs of one rank of a run with ``initialize(model, config)``, without a GPU, weights or other ranks.

    model: stays unchanged, with or without weights; or a function that makes one · hardware: "4x24GB", or a
    ``Hardware`` · batch: a micro-batch, as for ``engine(**batch)``; default: zeros for a model of transformers, of
    ``train_micro_batch_size_per_gpu`` samples and ``length`` tokens · loss: a function of forward's output · exact: run
    all layers; otherwise three shorter models may be enough · rates: speeds; default ``Rates.given`` if ``hardware``
    gives any · trains: plan in training mode, whatever mode the model is in · in_slices: each rank reads only its part
    of the weights; implied by a model that was made in ``meta_init`` · options: ``optimizer``, as for ``initialize``.

    The engine runs some steps dry (docs/decisions.md), so everything that the model's own code makes is counted. The
    rank is one in the middle. ``UsageError`` if that code asks for values that only data has.
    """
    where, options = hardware_of(hardware, "plan"), options_of(options, "plan")
    resolved = load_config(config).resolve_batch(where.ranks)
    given = None if batch is None else batches.on_host(batch)
    with without_values():
        found = made(model)
    micro = resolved.train_micro_batch_size_per_gpu or 1
    used = given or batches.example(found, micro, length)
    sizes = [len(each) for each in used.values() if isinstance(each, Tensor) and each.dim()]
    if sizes and micro not in sizes:
        _log.warning("a micro-batch of %d is planned, as batch= has it; the config says %d samples", sizes[0], micro)
    task = Task(found, used, resolved, where, loss, options, trains, in_slices)
    return task.plan(task.run_all(exact), rates or (Rates.given(where) if where.has_speeds else None))


def hardware_of(hardware: Any, what: str) -> Hardware:
    """Return ``hardware``, parsed if it is a text. ``UsageError``, naming ``what``, for anything else."""
    where = Hardware.parse(hardware) if isinstance(hardware, str) else hardware
    if not isinstance(where, Hardware):
        raise UsageError(
            f'{what}: expected hardware to be a text, as "4x24GB", or a Hardware, got {where!r}',
            code="plan-hardware-wrong-type",
        )
    return where


def options_of(options: Mapping[str, Any], what: str) -> dict[str, Any]:
    """Return the arguments of ``initialize`` that a plan can use. ``UsageError``, naming ``what``, for others.

    A scheduler is left out: it takes no memory, and belongs to an optimizer that is not the copy.
    """
    unknown = sorted(options.keys() - {"optimizer", "lr_scheduler"})
    if unknown:
        raise UsageError(
            f"{what}: expected only `optimizer` of initialize()'s arguments, got {', '.join(unknown)}: the ranks come "
            "from `hardware`, and all parameters with requires_grad are trained",
            code="plan-option-unsupported",
        )
    return {name: value for name, value in options.items() if name == "optimizer"}


def _times(run: DryRun, rates: Rates, ranks: int, config: Config) -> Times:
    """Return the times of a step with all its micro-batches, although at most two of them ran."""
    more = max(0, (config.gradient_accumulation_steps or 1) - _RUN)

    def of(tape: Tape) -> Times:
        found = simulate(tape, rates, ranks)
        return found.with_more(simulate(tape.first_micro_batch(), rates, ranks), more) if more else found

    found = of(run.tape)
    if run.tape_before is None:
        return found
    return carried_times((of(run.tape_before), found), run.depths[-2:], run.layers)


_RUN = 2
"""Micro-batches of a step that run dry, at most. Each later one finds in memory what the second found, and lasts as
long as the first."""


def _batch_of(config: Config, steps: int | None = None) -> dict[str, Any]:
    """Return the config's three batch sizes, with ``steps`` micro-batches per step if given."""
    micro, whole, now = (
        config.train_micro_batch_size_per_gpu, config.train_batch_size, config.gradient_accumulation_steps
    )  # fmt: skip
    if steps is not None and whole is not None and now:
        whole = whole // now * steps
    return {"train_micro_batch_size_per_gpu": micro, "train_batch_size": whole,
            "gradient_accumulation_steps": now if steps is None else steps}  # fmt: skip


@dataclass(frozen=True)
class Task:
    """A dry run and the plan that is made of it, of the whole model or of fewer layers.

    Fields as the arguments of ``plan``.
    """

    model: nn.Module
    batch: Mapping[str, Any]
    config: Config
    where: Hardware
    loss: Callable[[Any], Tensor]
    options: Mapping[str, Any]
    trains: bool = False
    in_slices: bool = False

    @property
    def place(self) -> ModelPlace:
        """The place of a rank in the middle."""
        where = self.where
        of_node = where.node_ranks or 0
        return ModelPlace(
            where.ranks, where.ranks // 2, where.is_gpu, where.usable_bytes,
            node_ranks=of_node, in_slices=self.in_slices or is_in_slices(self.model),
        )  # fmt: skip

    def plan(self, run: DryRun, rates: Rates | None) -> Plan:
        """Make the plan from ``run``. It has times only if ``rates`` are given."""
        time = None if rates is None else _times(run, rates, self.where.ranks, self.config)
        found = _plan_of(run, self.where, self.place.rank, self.batch)
        config = replace(
            found.config, monitor=self.config.monitor, notices=self.config.notices, **_batch_of(self.config)
        )
        return replace(found, time=time, config=config)

    def run_all(self, exact: bool) -> DryRun:
        """Run shorter models if they give the same result, otherwise the whole one.

        An optimizer that exists already holds the parameters of all layers, so then the whole model runs.
        """
        layers = None if exact or self._optimizer_exists or self._is_parted else layers_of(self.model)
        run = lambda depth: self._run(layers, depth)  # noqa: E731
        found = None if layers is None else deep_run(layers, run, lambda: self._run(steps=FORWARD_ALONE), self._bucket)
        return found or self._run()

    def run_quickly(self, steps: int = STEPS) -> DryRun:
        """Run two shorter models without checks; the result has no moments of initialize."""
        layers = None if self._optimizer_exists or self._is_parted else layers_of(self.model)
        run = lambda depth: self._run(layers, depth, steps)  # noqa: E731
        return (quick_run(layers, run) if layers is not None else None) or self._run(steps=steps)

    def plan_of_kept(self) -> Plan:
        """Plan only the weights and states that a rank keeps from the start, as a lower bound of a step's need.

        The engine makes no step, so this is faster than a quick plan.
        """
        found = _plan_of(self.run_quickly(steps=0), self.where, self.place.rank, self.batch)

        def kept(tier: PlannedTier | None) -> PlannedTier | None:
            if tier is None:
                return None
            stay = {kind: tier.at_rest[kind] for kind in (WEIGHTS, STATES) if kind in tier.at_rest}
            return replace(tier, peak=sum(stay.values()), at_peak=stay, at_rest=stay, initialize=0)

        device = kept(found.device)
        assert device is not None
        return replace(found, device=device, host=kept(found.host), disk=kept(found.disk))

    @property
    def _is_parted(self) -> bool:
        """Whether a part of the states is offloaded.

        Only whole buckets are, so needs do not grow linearly with the layers.
        """
        place = self.config.zero_optimization.offload_optimizer
        return place.device != "none" and place.ratio != 1

    @property
    def _bucket(self) -> int:
        size = self.config.zero_optimization.reduce_bucket_size
        return size if isinstance(size, int) else ALONE

    @property
    def _optimizer_exists(self) -> bool:
        return isinstance(self.options.get("optimizer"), torch.optim.Optimizer)

    def _run(self, layers: Layers | None = None, depth: int = 0, steps: int = STEPS) -> DryRun:
        options = dict(self.options)

        def make(mode: NoValues) -> nn.Module:
            if layers is not None:
                found = shorter(self.model, layers, depth, lambda gone: without_weights(self.model, mode, instead=gone))
            else:
                found, options["optimizer"] = without_weights(self.model, mode, options.get("optimizer"))
            return found.train() if self.trains else found

        sizes = _batch_of(self.config, min(_RUN, self.config.gradient_accumulation_steps or 1))
        config = replace(self.config, **sizes, monitor=MonitorConfig(), notices=())  # nothing is written or logged
        return dry_run(make, lambda: self.batch, config, self.place, self.loss, options, steps)


def made(model: Any) -> nn.Module:
    """Return ``model``, or the module that it makes. ``UsageError`` if it is neither a module nor makes one."""
    wrong = isinstance(model, (Engine, type)) or not callable(model)
    found = model if isinstance(model, nn.Module) or wrong else model()
    if not isinstance(found, nn.Module):
        came = f"the class {found.__name__}" if isinstance(found, type) else f"a {type(found).__name__}"
        raise UsageError(
            f"plan: expected model to be a torch module, or a function without arguments that makes one, got {came}",
            code="plan-model-wrong-type",
        )
    return found


def _plan_of(run: DryRun, where: Hardware, rank: int, batch: Mapping[str, Any]) -> Plan:
    shapes = next((tuple(each.shape) for each in batch.values() if isinstance(each, Tensor)), ())
    name = "GPU" if where.is_gpu else "memory"
    peak, host = run.peak, highest(run.host, (FORWARD, BACKWARD, STEP))
    device = PlannedTier(
        name, peak.bytes, dict(bytes_by_kind(peak)), peak.phase, dict(bytes_by_kind(run.at_rest)),
        run.peak_in(INITIALIZE).bytes, where.usable_bytes,
    )  # fmt: skip
    on_host = PlannedTier(
        "host", host.bytes, dict(bytes_by_kind(host)), host.phase, dict(bytes_by_kind(run.host_at_rest)),
        highest(run.host, (INITIALIZE,)).bytes, where.per_rank(where.host_bytes),
    )  # fmt: skip
    kept = round(run.memory["measured_disk_bytes"])
    on_disk = PlannedTier("disk", kept, {STATES: kept}, STEP, {STATES: kept}, kept, where.per_rank(where.disk_bytes))
    has_host = where.is_gpu and bool(run.host or run.host_at_rest.bytes)
    return Plan(
        where, run.config, rank, run.parameters, shapes, device, on_host if has_host else None,
        on_disk if kept else None, _of_one_step(run.device), run.seconds, depths=run.depths,
    )  # fmt: skip


def _of_one_step(moments: Iterable[MemoryMoment]) -> list[MemoryMoment]:
    """Return the moment with the most bytes of each phase and block, in order."""
    found: dict[tuple[str, str], MemoryMoment] = {}
    for each in moments:
        if each.bytes >= (found[each.phase, each.unit].bytes if (each.phase, each.unit) in found else 0):
            found[each.phase, each.unit] = each
    return list(found.values())


def summary_of(found: Plan) -> str:
    """Return a table of tiers, with the kinds of bytes at each one's peak."""
    kinds = list(dict.fromkeys(kind for tier in found.tiers for kind in tier.at_peak))
    head = ["per rank", "peak", *kinds, "in", "at rest", "initialize"]
    rows = [head]
    for tier in found.tiers:
        rows.append(
            [tier.name, show_bytes(tier.peak), *(show_bytes(tier.at_peak.get(kind, 0)) for kind in kinds),
             tier.phase or FORWARD, show_bytes(tier.rests), show_bytes(tier.initialize)]
        )  # fmt: skip
    return table(rows)
