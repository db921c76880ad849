"""The parts of one engine, put together in order, and the formulas beside what is measured of them.

Owns: building (analyse → agree → place → reducer → schedule → hooks) and accounting.
Must not know: steps, the user's loop.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from shardengine import hooks, layout, partition, stages
from shardengine.agreement import compare, describe, together
from shardengine.bucket import Bucket, BufferPool, restore_poison
from shardengine.collectives import STEP, Collectives, Pending, Purpose
from shardengine.config import Config, load_config
from shardengine.ddp import BufferSync, Reducer
from shardengine.errors import ConfigError, UsageError
from shardengine.layout import Layout
from shardengine.mesh import Mesh
from shardengine.partition import Partition
from shardengine.schedule import Schedule
from shardengine.unit import Unit, weight_bytes


@dataclass
class Guard:
    """What the engine changes on the module while it is attached.

    open: whether ``module.state_dict()`` may be called; only from inside the engine where weights are sharded.
    marked: the Hugging Face module that was told to keep ``generate()`` in step on all ranks.
    """

    open: bool = False
    marked: Any = None


@dataclass(frozen=True)
class Core:
    """Everything below the engine's surface, wired."""

    stage: stages.Stage
    mesh: Mesh
    collectives: Collectives
    pool: BufferPool
    partition: Partition
    layout: Layout
    units: list[Unit]
    reducer: Reducer
    schedule: Schedule
    buffers: BufferSync
    guard: Guard
    handles: list[RemovableHandle] = field(default_factory=list)

    def volume(self) -> stages.Volume:
        """What travels, in fp32 elements, padding included."""
        words = {unit.index: sum(a.layout.length * a.layout.itemsize for a in unit.arenas) / 4 for unit in self.units}
        return stages.Volume(
            trainable=self.layout.elements(trainable=True), root=int(words[0]), unit=int(sum(words.values()) - words[0])
        )

    def verify_parameters(self) -> None:
        """``UsageError`` for the first parameter that was moved, cast or replaced behind the engine's back."""
        for name, holder, key, value in self.partition.places:
            if holder.get(key) is not value:
                kind = "module" if isinstance(value, nn.Module) else "parameter"
                raise UsageError(
                    f"{kind} {name!r} was replaced after initialize (rank {self.mesh.rank}): expected the one that "
                    "initialize saw; change the model first, then call initialize"
                )
        if sum(len(m._parameters) + len(m._modules) for m in self.partition.modules) != len(self.partition.places):
            raise UsageError(
                f"a parameter or module was added or removed after initialize (rank {self.mesh.rank}): expected the "
                "ones that initialize saw; change the model first, then call initialize"
            )
        dtypes = {arena.dtype for unit in self.units for arena in unit.arenas} if self.stage.moves_weights else ()
        for dtype in dtypes:
            if restore_poison(dtype, self.mesh.device):
                raise UsageError(
                    f"a parameter was written while its weights were sharded (rank {self.mesh.rank}); the write is "
                    "lost. Write inside `with engine.full_params(writable=True):`"
                )
        for parameter in self.partition.outside:
            if parameter.requires_grad and parameter.numel():
                raise UsageError(
                    f"a frozen parameter of shape {tuple(parameter.shape)} was unfrozen after initialize (rank "
                    f"{self.mesh.rank}): not available yet; set requires_grad before initialize"
                )
        for unit in self.units:
            if unit.pinned:
                continue
            for member in unit.members:
                if member.parameter.requires_grad is not self.layout.parameters[member.index].trainable:
                    raise UsageError(
                        f"parameter {self.layout.parameters[member.index].name!r} was frozen or unfrozen after "
                        f"initialize (rank {self.mesh.rank}): not available yet; set requires_grad before initialize"
                    )
                if not member.is_shown(unit.state):
                    raise UsageError(
                        f"parameter {self.layout.parameters[member.index].name!r} was moved or cast after initialize "
                        f"(rank {self.mesh.rank}): it is now {member.parameter.dtype} on {member.parameter.device}, in "
                        "memory that the engine does not own; call .to(), .half() and the like before initialize"
                    )

    def weight_bytes(self) -> int:
        """Bytes that hold weights at this moment, frozen ones outside of arenas included."""
        return weight_bytes(self.units) + sum(p.nbytes for p in self.partition.outside)

    def predicted_bytes(self, state_bytes_per_element: int) -> float:
        """The stage's formula for model state per rank, padding included."""
        arenas = self.layout.arenas
        frozen = sum(a.length * a.itemsize for a in arenas if not a.trainable) / 4
        predicted = self.stage.model_state_bytes(
            self.layout.elements(trainable=True), self.mesh.ranks, state=state_bytes_per_element, frozen=frozen
        )
        return predicted + sum(p.nbytes for p in self.partition.outside)

    def predicted_traffic(self, micro_batches: int) -> float:
        """The stage's formula for bytes sent per rank and step, padding included."""
        return self.stage.bytes_sent(self.volume(), self.mesh.ranks, micro_batches=micro_batches)

    def sent(self) -> Counter[Purpose]:
        """Bytes sent so far, by purpose."""
        return Counter(self.collectives.sent)

    def publish(self, bucket: Bucket) -> Pending | None:
        """Start gathering a stepped bucket, where weights rest replicated and masters do not."""
        if not self.stage.publishes_after_step:
            return None
        return self.collectives.all_gather(bucket.full, self.layout.names_in(bucket.layout), Purpose.WEIGHTS)

    def adopt_weights(self) -> None:
        """The shards were written (a checkpoint was loaded): full weights that rest replicated follow; collective."""
        with torch.no_grad():
            for state in self.reducer.buckets:
                if (pending := self.publish(state.bucket)) is not None:
                    pending.wait()

    @property
    def pinned(self) -> bool:
        """Whether a ``full_params`` is open."""
        return any(unit.pinned for unit in self.units)

    def dissolve(self) -> None:
        """Take the hooks off and give every parameter whole weights in memory of its own; collective."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        self.schedule.rest()
        for unit in self.units:
            if self.stage.moves_weights:
                unit.gather(self.collectives)
                unit.await_full()
            for member in unit.members:
                member.show(member.view.clone())
            for arena in unit.arenas:
                arena.release()
        self.reducer.release()
        self.pool.clear()
        if self.guard.marked is not None:
            self.guard.marked._is_fsdp_managed_module = False


class Report:
    """What the last step moved, and the model state's size, for ``memory()`` and ``traffic()``."""

    def __init__(self) -> None:
        self.model_state_bytes = 0
        self.micro_batches = 0
        self.last_step: Counter[Purpose] = Counter()
        self._before: Counter[Purpose] = Counter()

    def observe(self, live_bytes: int) -> None:
        """Model state at rest, with complete gradients."""
        self.model_state_bytes = live_bytes

    def close_step(self, sent: Counter[Purpose], micro_batches: int) -> None:
        """A step ended; ``sent``: all bytes so far, by purpose."""
        self.last_step = sent - self._before
        self._before, self.micro_batches = sent, micro_batches

    def data_bytes(self) -> int:
        """Bytes of weights and gradients in the last step; control and buffers are not in the formula."""
        return sum(self.last_step[purpose] for purpose in STEP)


def build(model: nn.Module, config: Config, mesh: Mesh, groups: list[dict[str, Any]]) -> Core:
    """Partition ``model`` as ``config`` says and attach to it. ``groups``: the optimizer's, over its parameters."""
    zero = config.zero_optimization
    stage = stages.select(
        zero.stage,
        reshard_after_forward=zero.stage3_reshard_after_forward,
        gradient_accumulation=config.gradient_accumulation,
    )
    pool = BufferPool()
    direct = config.reproducible if config.reproducible is not None else mesh.backend != "nccl"
    collectives = Collectives(mesh, pool, overlap=config.overlap_comm, direct=direct, debug=config.debug)

    def analyse() -> Partition:
        group_of = {id(p): number for number, group in enumerate(groups) for p in group["params"]}
        return partition.analyse(model, zero.units, group_of, shards_weights=stage.moves_weights)

    found = together(collectives, "looking at the model", analyse)
    compare(collectives, _facts(model, found, config, groups))
    plan = layout.build(found.specs, mesh.ranks, zero.reduce_bucket_size)
    units = partition.place(found, plan, collectives, shards_weights=stage.moves_weights)
    buffers = BufferSync(model, collectives)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(mesh.device).contiguous()
    buffers.broadcast(persistent_only=False)
    by_index = {b.layout.index: b for unit in units for a in unit.arenas for b in a.buckets}
    reducer = Reducer(
        plan,
        [by_index[index] for index in range(len(plan.buckets))],
        collectives,
        pool,
        sharded=stage.reduces_every_micro_batch,
        gathers=stage.gathers_gradients,
        divisor=mesh.ranks if config.gradient_allreduce_op == "mean" else 1,
    )
    schedule = Schedule(units, stage, collectives, reducer, zero.stage3_prefetch_bucket_size)
    core = Core(stage, mesh, collectives, pool, found, plan, units, reducer, schedule, buffers, Guard())
    _attach(core, model)
    return core


def _attach(core: Core, model: nn.Module) -> None:
    trainable = [(i, p) for i, p in enumerate(core.partition.inside) if core.layout.parameters[i].trainable]
    core.handles.extend(hooks.attach_gradients(core.schedule, trainable))
    if not core.stage.moves_weights:
        return
    if core.mesh.ranks > 1 and "generate" in dir(model):
        # transformers then keeps ranks in step whose texts end at different lengths; each forward gathers from all
        core.guard.marked = model
        model._is_fsdp_managed_module = True  # type: ignore[assignment]
    modules = {module: index for index, (_, module) in enumerate(core.partition.units, start=1)}
    core.handles.extend(hooks.attach_weights(core.schedule, model, modules))

    def refuse() -> None:
        if not core.guard.open and not all(unit.pinned for unit in core.units):
            raise UsageError(
                "model.state_dict() while the weights are sharded would hold NaN: use engine.state_dict(), "
                "engine.save_pretrained(dir), or call it inside `with engine.full_params():`"
            )

    core.handles.extend(hooks.attach_state_dict_guard(model, refuse))


def _facts(model: nn.Module, found: Partition, config: Config, groups: list[dict[str, Any]]) -> dict[str, list[str]]:
    outside = {id(p) for p in found.outside}
    parameters = [
        f"{name}: shape {tuple(p.shape)}, {p.dtype}, {'trainable' if p.requires_grad else 'frozen'}"
        + (", outside" if id(p) in outside else "")
        for name, p in found.names.items()
    ]
    buffers = [f"{name}: shape {tuple(b.shape)}, {b.dtype}" for name, b in model.named_buffers()]
    options = [describe({key: value for key, value in group.items() if key != "params"}) for group in groups]
    plan = [f"{spec.name}: optimizer group {spec.group}, unit {spec.unit}" for spec in found.specs]
    settings = [f"{key} = {describe(value)}" for key, value in sorted(config.to_dict().items())]
    return {
        "config": settings,
        "model (parameters)": parameters,
        "model (buffers)": buffers,
        "optimizer": options,
        "model (units and optimizer groups)": plan,
        "version of torch": [str(torch.__version__)],
    }


def timeout_of(config: Any) -> float:
    """The config's timeout; the default where the config is wrong, which is said a moment later on every rank."""
    try:
        return load_config(config).timeout_s
    except ConfigError:
        return Config().timeout_s
