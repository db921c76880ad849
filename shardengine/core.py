"""The parts of one engine, put together in order.

Owns: building (analyse → agree → place → reducer → schedule → hooks). The formulas are ``formulas.py``'s.
Must not know: steps, the user's loop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from shardengine import activations, hooks, kernels, layout, partition, placing, precision, stages
from shardengine.accumulation import Window
from shardengine.activation_offload import Offload
from shardengine.agreement import compare, settle_kernels, together
from shardengine.arrivals import Arrivals
from shardengine.bucket import Bucket, BufferPool, restore_poison
from shardengine.collectives import Collectives, Pending
from shardengine.config import Config
from shardengine.ddp import BufferSync, Reducer, Rules, no_payload
from shardengine.errors import UsageError
from shardengine.guard import Guard
from shardengine.layout import Layout
from shardengine.mesh import Mesh
from shardengine.offload import Tiers
from shardengine.partition import Partition
from shardengine.precision import Precision
from shardengine.record import Purpose
from shardengine.schedule import Schedule
from shardengine.streams import is_apart
from shardengine.unit import Unit, Weights, weight_bytes


@dataclass(frozen=True)
class Core:
    """Everything below the engine's surface, wired."""

    stage: stages.Stage
    collectives: Collectives
    pool: BufferPool
    partition: Partition
    layout: Layout
    units: list[Unit]
    reducer: Reducer
    schedule: Schedule
    window: Window
    buffers: BufferSync
    arrivals: Arrivals | None
    guard: Guard
    precision: Precision
    tiers: Tiers

    @property
    def mesh(self) -> Mesh:
        """The ranks and today's groups; ``reset()`` replaces them."""
        return self.collectives.mesh

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
        hides = self.stage.moves_weights or self.arrivals is not None
        dtypes = {arena.dtype for unit in self.units for arena in unit.arenas} if hides else ()
        for dtype in dtypes:
            if restore_poison(dtype, self.mesh.device):
                raise UsageError(
                    f"a parameter was written while its weights were elsewhere (rank {self.mesh.rank}); the write is "
                    "lost. Write inside `with engine.full_params(writable=True):`"
                )
        self.adopt_written_weights()
        for unit in self.units:
            if unit.pinned:
                continue
            for member in unit.members:
                hidden = self.arrivals is not None and self.arrivals.is_hidden(member.index)
                if not member.is_shown(Weights.SHARDED if hidden else unit.state):
                    raise UsageError(
                        f"parameter {self.layout.parameters[member.index].name!r} was moved or cast after initialize "
                        f"(rank {self.mesh.rank}): it is now {member.parameter.dtype} on {member.parameter.device}, in "
                        "memory that the engine does not own; call .to(), .half() and the like before initialize"
                    )

    def unfrozen(self) -> dict[str, nn.Parameter]:
        """The parameters that were frozen when the layout was made and are not now, by name."""
        pairs = zip(self.partition.specs, self.partition.inside, strict=True)
        found = {spec.name: p for spec, p in pairs if p.requires_grad and not spec.trainable}
        if any(p.requires_grad and p.numel() for p in self.partition.outside):
            found |= {name: p for name, p in self.partition.named_outside() if p.requires_grad and p.numel()}
        return found

    def note_stepped(self) -> None:
        """The weights are new: a graph from before the step refuses backward, as after any torch optimizer's step."""
        torch.autograd.graph.increment_version(self.partition.inside)
        self.guard.versions[:] = [parameter._version for parameter in self.partition.inside]

    def adopt_written_weights(self) -> None:
        """Master weights follow where somebody wrote into a low-precision parameter (``module.load_state_dict``)."""
        versions = [parameter._version for parameter in self.partition.inside]
        if versions == self.guard.versions:
            return
        self.reducer.early.require_none("a parameter was written")
        self.guard.versions[:] = versions
        for bucket in (b for unit in self.units for b, _ in unit.buckets() if unit.state is Weights.FULL):
            bucket.adopt_weights()

    def weight_bytes(self) -> Counter[str]:
        """Bytes that hold weights at this moment, by tier; frozen ones outside of arenas are included."""
        return weight_bytes(self.units) + Counter(device=sum(p.nbytes for p in self.partition.outside))

    def weight_storages(self) -> set[int]:
        """Identities (``_cdata``) of the storages of weights, frozen ones outside of arenas and buffers included."""
        pins = [pin for unit in self.units for pin in unit.pins]
        others = [*pins, *self.partition.outside, *self.buffers.named(persistent_only=False).values()]
        arenas = {arena.storage_key for unit in self.units for arena in unit.arenas}
        return arenas | {tensor.untyped_storage()._cdata for tensor in others}

    def sent(self) -> Counter[Purpose]:
        """Bytes sent so far, by purpose."""
        return Counter(self.collectives.sent)

    def publish(self, stepped: Iterable[Bucket]) -> None:
        """Gather each bucket as soon as it is stepped, where weights rest replicated and masters do not.

        Returns when all have landed, or with ``overlap_param_gather`` at once (``arrivals``).
        """
        pending: list[Pending] = []
        for bucket in stepped:
            if not self.stage.publishes_after_step:
                continue
            pending.append(self._gather(bucket))
            if self.arrivals is not None:
                self.arrivals.depart(bucket, pending.pop())
        for each in pending:
            each.wait()
        if self.arrivals is not None:
            self.arrivals.hide()

    def await_weights(self) -> None:
        """Nothing is in flight afterwards that a step or a read of whole buckets could meet."""
        if self.arrivals is not None:
            self.arrivals.await_all()

    @contextmanager
    def adopting_masters(self) -> Iterator[None]:
        """What optimizers step was written (a checkpoint was loaded): the weights follow everywhere; collective.

        They are on their way while the body runs, which must not touch them.
        """
        pending: list[Pending] = []
        with torch.no_grad():
            for state in self.reducer.buckets:
                state.bucket.adopt_master()
                if self.stage.publishes_after_step:
                    pending.append(self._gather(state.bucket))
        try:
            yield
        finally:
            for each in pending:
                each.wait()
        self.note_stepped()

    def _gather(self, bucket: Bucket) -> Pending:
        names = self.layout.names_in(bucket.layout)
        return self.collectives.all_gather(bucket.full, names, Purpose.WEIGHTS, bucket.layout.label)

    @property
    def pinned(self) -> bool:
        """Whether a ``full_params`` is open."""
        return any(unit.pinned for unit in self.units)

    def require_hidden(self) -> None:
        """``UsageError`` inside ``full_params``, whose end needs the engine."""
        if self.guard.shown:
            raise UsageError(
                f"close() inside `with engine.full_params():` (rank {self.mesh.rank}): expected it after the block"
            )

    def dissolve(self, *, owned: bool = False) -> None:
        """Take the hooks off and give every parameter whole weights in memory of its own; collective.

        Who holds a view of the old memory keeps it. Where weights cannot be read or gathered, those parameters stay
        without, and everything else is let go of before the error is raised. owned: the process groups end, too.
        """
        self.guard.unhook()
        gathered = False
        try:
            with self.collectives.faults.announced("close", lambda error: "gathering the weights"):
                self._leave_weights()
            gathered = True
        finally:
            self.reducer.release()
            self.pool.clear()
            self.tiers.close()
            self.collectives.faults.close()
            if self.guard.marked is not None:
                self.guard.marked._is_fsdp_managed_module = False
            if owned:
                self.mesh.destroy(orderly=gathered)

    def _leave_weights(self) -> None:
        self.await_weights()
        self.schedule.rest()
        for unit in self.units:
            if self.stage.moves_weights:
                unit.gather(self.collectives)
                unit.await_full()
            for member in unit.members:
                member.show(member.view.clone())
            for arena in unit.arenas:
                arena.forsake()


def _look(
    model: nn.Module, config: Config, groups: list[dict[str, Any]], shards_weights: bool, which: Precision
) -> tuple[Partition, kernels.Offer]:
    """What one rank alone finds out about the model and the machine, or refuses."""
    units = config.zero_optimization.units
    if config.activation_checkpointing.enabled:
        activations.check(model, partition.find_units(model, units))
    group_of = {id(p): number for number, group in enumerate(groups) for p in group["params"]}
    found = partition.analyse(model, units, group_of, shards_weights=shards_weights, which=which)
    return found, kernels.offer()


def build(model: nn.Module, config: Config, mesh: Mesh, groups: list[dict[str, Any]]) -> Core:
    """Partition ``model`` as ``config`` says and attach to it. ``groups``: the optimizer's, over its parameters."""
    zero = config.zero_optimization
    stage = stages.select(
        zero.stage,
        reshard_after_forward=zero.stage3_reshard_after_forward,
        gradient_accumulation=config.gradient_accumulation,
    )
    which = precision.of(config)
    pool = BufferPool(pins=is_apart(mesh.device) and zero.offload_optimizer.pin_memory)
    direct = config.reproducible if config.reproducible is not None else mesh.backend != "nccl"
    direct |= which.reduce is not torch.float32  # the backend would round no sum
    collectives = Collectives(mesh, pool, overlap=config.overlap_comm, direct=direct, debug=config.debug)

    found, offer = together(
        collectives, "looking at the model", lambda: _look(model, config, groups, stage.moves_weights, which)
    )
    offers = compare(collectives, partition.facts(model, found, config.to_dict(), groups), offer)
    settle_kernels(offers, mesh.rank)
    plan = layout.build(found.specs, mesh.ranks, zero.reduce_bucket_size)
    tiers = together(collectives, "opening the tiers", lambda: Tiers(zero, config.aio, mesh.rank))
    homes = tiers.homes([bucket.length for bucket in plan.buckets])
    with collectives.faults.announced("initialize", lambda error: "placing the weights"):
        units = placing.place(
            found,
            plan,
            collectives,
            shards_weights=stage.moves_weights,
            whole_masters=stage.gathers_gradients,
            which=which,
            homes=homes,
        )
        buffers = BufferSync(model, collectives)
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = buffer.to(mesh.device).contiguous()
        buffers.broadcast(persistent_only=False)
    window = Window(config.gradient_accumulation_steps or 1)
    reducer, schedule = _drive(config, stage, collectives, pool, plan, units, window)
    arrivals, blocks = _expect(config, stage, collectives, model, found, units)
    core = Core(
        stage,
        collectives,
        pool,
        found,
        plan,
        units,
        reducer,
        schedule,
        window,
        buffers,
        arrivals,
        Guard(),
        which,
        tiers,
    )
    _attach(core, model, blocks)
    _checkpoint_activations(core, model, config)
    return core


def succeed(core: Core, model: nn.Module, config: Config, found: Partition, plan: Layout, units: list[Unit]) -> Core:
    """The core that takes the place of ``core``, whose hooks are off, with a new layout and ``units`` made for it."""
    reducer, schedule = _drive(config, core.stage, core.collectives, core.pool, plan, units, core.window)
    arrivals, blocks = _expect(config, core.stage, core.collectives, model, found, units)
    new = replace(
        core,
        partition=found,
        layout=plan,
        units=units,
        reducer=reducer,
        schedule=schedule,
        arrivals=arrivals,
    )
    _attach(new, model, blocks)
    _checkpoint_activations(new, model, config)
    return new


def _drive(
    config: Config,
    stage: stages.Stage,
    collectives: Collectives,
    pool: BufferPool,
    plan: Layout,
    units: list[Unit],
    window: Window,
) -> tuple[Reducer, Schedule]:
    """What moves the gradients and the weights of ``units``."""
    which = precision.of(config)
    divisor = collectives.mesh.ranks if config.gradient_allreduce_op == "mean" else 1
    accumulate = which.accumulate if window.size > 1 else torch.float32
    rules = Rules(
        sharded=stage.reduces_every_micro_batch,
        gathers=stage.gathers_gradients,
        divisor=divisor,
        wire=which.wire,
        reduce=which.reduce,
        accumulate=accumulate,
        scaled=which.scales_loss,
    )
    by_index = {b.layout.index: b for unit in units for a in unit.arenas for b in a.buckets}
    buckets = [by_index[index] for index in range(len(plan.buckets))]
    reducer = Reducer(plan, buckets, collectives, pool, rules)
    prefetch = config.zero_optimization.stage3_prefetch_bucket_size
    schedule = Schedule(units, stage, collectives, reducer, window, prefetch)
    schedule.on_complete = lambda: reducer.agree(no_payload)
    return reducer, schedule


def _expect(
    config: Config,
    stage: stages.Stage,
    collectives: Collectives,
    model: nn.Module,
    found: Partition,
    units: list[Unit],
) -> tuple[Arrivals | None, list[tuple[str, nn.Module]]]:
    """What waits for stepped weights (``overlap_param_gather``), and the modules that are hooked one by one."""
    if not config.overlap_param_gather or not stage.publishes_after_step or collectives.mesh.ranks == 1:
        return None, found.units
    blocks, block_of = partition.find_blocks(model, config.zero_optimization.units)
    numbers = [block_of.get(id(parameter), 0) for parameter in found.inside]
    members_of = [[i for i, n in enumerate(numbers) if n == group] for group in range(len(blocks) + 1)]
    return Arrivals(units[0].members, members_of), blocks


def _attach(core: Core, model: nn.Module, units: list[tuple[str, nn.Module]]) -> None:
    core.guard.versions[:] = [parameter._version for parameter in core.partition.inside]
    modules = {module: index for index, (_, module) in enumerate(units, start=1)}
    trainable = [(i, p) for i, p in enumerate(core.partition.inside) if core.layout.parameters[i].trainable]
    core.guard.handles.extend(hooks.attach_gradients(core.schedule, trainable))
    if not core.stage.moves_weights:
        core.guard.handles.extend(hooks.attach_settle(core.schedule, model))
        if core.arrivals is not None:
            core.guard.handles.extend(hooks.attach_arrivals(core.arrivals, model, modules))
        return
    if core.mesh.ranks > 1 and "generate" in dir(model):
        # transformers then keeps ranks in step whose texts end at different lengths; each forward gathers from all
        core.guard.marked = model
        model._is_fsdp_managed_module = True  # type: ignore[assignment]
    core.guard.handles.extend(hooks.attach_weights(core.schedule, model, modules))

    def refuse() -> None:
        if not core.guard.open and not all(unit.pinned for unit in core.units):
            raise UsageError(
                "model.state_dict() while the weights are sharded would hold NaN: use engine.state_dict(), "
                "engine.save_pretrained(dir), or call it inside `with engine.full_params():`"
            )

    core.guard.handles.extend(hooks.attach_state_dict_guard(model, refuse))


def _checkpoint_activations(core: Core, model: nn.Module, config: Config) -> None:
    if config.activation_checkpointing.enabled:
        offload = config.activation_checkpointing.cpu_offload
        saving = Offload(core.mesh.device, core.weight_storages).saving if offload else nullcontext
        blocks = partition.find_units(model, config.zero_optimization.units)
        core.guard.handles.extend(activations.attach(blocks, saving))
