"""Makes a new layout between two steps: parameters were unfrozen, joined the optimizer, or come in another order.

All values keep their bits.

Owns: the conditions for that, the agreement of the ranks, and moving weights, master weights and optimizer states into
the new buckets. Must not know: forward, backward, the step.

[Note: Moving by intervals] State moves unit by unit, old bucket by old bucket, tensor by tensor. A sharded tensor is
gathered into one buffer, and each flat slice of it is copied to the place of the same elements in the new layout on
this rank. A parameter stays in its unit, so a unit's old memory is freed before the next unit begins. So the memory
beside the model state never exceeds one unit's weights and the buckets at work. If weights are kept replicated, the one
unit is the whole model.

A file holds both layouts until the end. The room for the new one is reserved before anything moves, so that a full disk
loses nothing, and the room of the old one is reused afterwards. A parameter that no optimizer stepped before has no
state: its master weights are its weights, and its states are zero.

[Note: Recut buckets] A layout expects gradients in the reverse order of registration. After its first step their
order of arrival on rank 0 is known. A layout in that order replaces it once, at the end of ``step()``, if that sends at
least half a bucket more behind computation (``sharding/readiness.py``). At that point gradients and activations are
freed, and the tensors that exist twice for a moment use their memory. The layout stays if the device has no room for
the weights once more, or if states are in a file, which would be written twice and stay twice as large. It also stays
if weights are gathered unit by unit: parameters can move only within their unit, whose buckets are sent behind the
backward of the next unit in any order, so nothing is gained (docs/decisions.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from shardengine.budget import tell_choice
from shardengine.comm import Purpose, compare, run_on_all_ranks
from shardengine.config import Config
from shardengine.core import formulas
from shardengine.core.assembly import lay_out, sent, succeed
from shardengine.core.gathering import gathered
from shardengine.core.parts import Core
from shardengine.ddp import comm_hooks
from shardengine.errors import UsageError
from shardengine.offload import Forms, Homes, Tier
from shardengine.optim import ShardedOptimizer, check_groups, check_not_ignored, check_owned, lr_schedules
from shardengine.runtime import Unit, placing
from shardengine.sharding import (
    MASTER,
    SHARD,
    WEIGHT,
    Bucket,
    FlatSlice,
    Layout,
    Partition,
    Targets,
    in_memory_order,
    is_worth_moving,
    partition,
    slices_of,
)
from shardengine.stages import Placement


def follow(core: Core, model: nn.Module, config: Config, optimizer: ShardedOptimizer | None) -> Core:
    """Before a forward: return ``core``, or the core of a new layout if parameters of the optimizer were unfrozen.

    Collective if the accumulation window is empty, autograd records, and the optimizer has frozen parameters.
    """
    if not torch.is_grad_enabled():
        return core
    unfrozen = core.unfrozen()
    grouped = _group_of(optimizer)
    if unfrozen:
        core.step_state.require("a call of every rank", f"unfreezing parameter {next(iter(unfrozen))!r}")
    may_join = len(grouped) > sum(spec.is_stepped for spec in core.layout.parameters)
    if core.window.is_first and may_join and not core.step_state.join.is_open:
        compare(core.collectives, {"set of unfrozen parameters": list(unfrozen)})
    for name, parameter in unfrozen.items():
        if id(parameter) not in grouped:
            raise UsageError(
                f"parameter {name!r} was unfrozen after initialize, and no optimizer group holds it (rank "
                f"{core.mesh.rank}): call engine.optimizer.add_param_group({{'params': [...]}}) on every rank before "
                "the next forward, or freeze it again",
                code="weights-unfrozen-without-group",
            )
    if not unfrozen or optimizer is None:
        return core
    core.step_state.require("unfreezing", f"unfreezing parameter {next(iter(unfrozen))!r}")
    return rebuild(core, model, config, optimizer)


@dataclass(frozen=True)
class _Planned:
    """A new layout that all ranks agree on, with room reserved for it. homes: as in ``FlatBuffer``."""

    partition: Partition
    layout: Layout
    homes: Homes


@dataclass(frozen=True)
class _Past:
    """The old layout. inside: ids of the parameters in its flat buffers · stepped: names of those with states."""

    inside: set[int]
    stepped: set[str]


def add_group(
    core: Core,
    model: nn.Module,
    config: Config,
    optimizer: ShardedOptimizer,
    group: dict[str, Any],
    scheduler: Any,
) -> Core:
    """Append ``group`` to the optimizer's groups on all ranks, then rebuild; collective.

    After an error it is appended on no rank.
    """
    core.schedule.finish_open_backward()
    core.step_state.require("a call of every rank", "add_param_group()")
    optimizer.settle()
    groups = optimizer.param_groups
    before = dict(group) if isinstance(group, dict) else {}
    count = len(groups)

    def append() -> Partition:
        core.step_state.require("add_param_group()")
        core.verify_parameters()
        _append(core, model, optimizer, group)
        lr_schedules.check_extended(scheduler, optimizer)
        return partition.renew(model, core.partition, _group_of(optimizer), scaled=core.precision.trains_fp16)

    try:
        found = run_on_all_ranks(core.collectives, "add_param_group()", append)
        names = core.partition.first_names()
        new = [names[id(parameter)] for parameter in group["params"]]
        compare(core.collectives, {"parameters of the new optimizer group": new, **partition.plan_facts(found, groups)})
        planned = _plan(core, model, config, optimizer)
    except BaseException:
        if len(groups) > count:
            groups.pop()
        if isinstance(group, dict):
            group.clear()
            group.update(before)
        raise
    return _carry_out(core, model, config, planned, optimizer)


def _append(core: Core, model: nn.Module, optimizer: ShardedOptimizer, group: dict[str, Any]) -> None:
    if not isinstance(group, dict) or "params" not in group:
        came = f"a dict with {sorted(group)}" if isinstance(group, dict) else type(group).__name__
        raise UsageError(
            f'add_param_group: expected a dict with "params" and options, got {came}', code="param-group-not-a-dict"
        )
    groups = optimizer.param_groups
    if not isinstance(group["params"], (Tensor, set)):
        group["params"] = list(group["params"])
        if not group["params"]:
            raise UsageError(
                "add_param_group: expected at least one parameter in the group, got none", code="param-group-empty"
            )
        _refuse_known(core, groups, group["params"])
    elif isinstance(group["params"], Tensor):
        _refuse_known(core, groups, [group["params"]])
    optimizer.arithmetic.complete(group)
    torch.optim.Optimizer.add_param_group(optimizer, group)
    check_not_ignored(core.partition.ignored, groups)
    check_owned(model, groups)
    check_groups(groups, "add_param_group", len(groups) - 1)
    optimizer.arithmetic.check_extended(groups)


def _refuse_known(core: Core, groups: list[dict[str, Any]], given: list[Any]) -> None:
    """Raise ``UsageError`` for a parameter that is given twice, or is already in a group."""
    number_of = {id(parameter): number for number, old in enumerate(groups) for parameter in old["params"]}
    names = core.partition.first_names()
    tensors = [item[1] if isinstance(item, tuple) else item for item in given]
    for parameter in tensors:
        if id(parameter) in number_of:
            raise UsageError(
                f"add_param_group: parameter {names.get(id(parameter))!r} is in optimizer group "
                f"{number_of[id(parameter)]} already (rank {core.mesh.rank}): expected parameters that are in no group",
                code="param-group-parameter-twice",
            )
        number_of[id(parameter)] = len(groups)


def _group_of(optimizer: ShardedOptimizer | None) -> dict[int, int]:
    """id(parameter) → optimizer group, of the parameters that have elements."""
    groups = [] if optimizer is None else optimizer.param_groups
    with torch._C.DisableTorchFunctionSubclass():  # hidden parameters answer as fast as other tensors
        return {id(p): number for number, group in enumerate(groups) for p in group["params"] if p.numel()}


def rebuild(core: Core, model: nn.Module, config: Config, optimizer: ShardedOptimizer) -> Core:
    """Return the core of a new layout for the parameters that are trainable now; collective.

    ``core`` is not usable any more. If planning fails on one rank, or ranks differ, ``core`` stays as it is.
    """
    return _carry_out(core, model, config, _plan(core, model, config, optimizer), optimizer)


def _plan(core: Core, model: nn.Module, config: Config, optimizer: ShardedOptimizer) -> _Planned:
    """Do the part of a rebuild that may fail on one rank, or differ between ranks. Changes nothing; collective."""
    optimizer.settle()
    found = run_on_all_ranks(
        core.collectives,
        "making a new layout",
        lambda: partition.renew(model, core.partition, _group_of(optimizer), scaled=core.precision.trains_fp16),
    )
    compare(core.collectives, partition.plan_facts(found, optimizer.param_groups))
    return _take_room(core, config, optimizer, found, lay_out(config, core.mesh, found, optimizer.needs))


def _take_room(core: Core, config: Config, optimizer: ShardedOptimizer, found: Partition, plan: Layout) -> _Planned:
    """Reserve the room for ``plan``. A failure on one rank fails on all, and changes nothing; collective."""
    footprint = formulas.footprint_of(core, config, optimizer.needs, found, plan)
    # with a ratio "auto" the memory stays the same
    homes = core.tiers.homes([bucket.length for bucket in plan.buckets], footprint.on_device)
    planned = _Planned(found, plan, homes)

    def take_room() -> None:
        for tier, forms in _forms(core, planned, optimizer):
            tier.reserve(forms)

    try:
        run_on_all_ranks(core.collectives, "taking room for a new layout", take_room)
        core.collectives.prepare(sent(footprint.rules, plan))
    except BaseException:
        core.tiers.free_reserved()
        raise
    return planned


def recut(core: Core, model: nn.Module, config: Config, optimizer: ShardedOptimizer) -> Core:
    """After a step: return ``core``, or the core whose layout follows the order of arriving gradients; collective.

    See the last note of this file. Every rank decides the same, by rank 0's order.
    """
    order, zero = core.reducer.arrival, config.zero_optimization
    state, in_files = core.step_state, zero.offload_optimizer.device == "nvme"
    if core.is_recut or core.mesh.ranks == 1 or not order or not zero.recut_buckets:
        return core
    if in_files or not gains_by_order(core) or isinstance(core.reducer.hook, comm_hooks.WholeGradients):
        return core  # a user's function may know buckets by their numbers
    if state.summoned or state.edited or state.averaged:
        return core  # after the next step
    core = replace(core, is_recut=True)
    plan = lay_out(config, core.mesh, core.partition, optimizer.needs, order)
    if not is_worth_moving(core.layout, plan, order):
        return core
    optimizer.settle()
    optimizer.await_reader()
    core.pool.clear()
    if not _has_room(core):
        return core
    planned = _take_room(core, config, optimizer, core.partition, plan)
    return replace(_carry_out(core, model, config, planned, optimizer), is_recut=True)


def gains_by_order(core: Core) -> bool:
    """Whether the place of a parameter in the layout affects when its gradient is sent."""
    return not core.stage.moves_weights


def _has_room(core: Core) -> bool:
    """Whether every rank's device can hold the weights of the largest unit twice more, and the hook's errors once more.

    Collective on a device with memory of its own.
    """
    platform = core.mesh.platform
    if not platform.has_own_memory:
        return True
    platform.free_cached()
    largest = max(sum(flat.layout.length * flat.layout.itemsize for flat in unit.flat_buffers) for unit in core.units)
    needed = 2 * largest + comm_hooks.kept_bytes(core.reducer.hook, core.layout)
    return min(core.collectives.exchange_objects(platform.free_bytes(), "free memory for a new layout")) > needed


def _forms(core: Core, planned: _Planned, optimizer: ShardedOptimizer) -> Iterator[tuple[Tier, Forms]]:
    """The tensors that ``_move`` adds to stores in tiers other than the device."""
    homes, specs, needs = planned.homes, planned.layout.parameters, optimizer.needs
    for flat_buffer in planned.layout.flat_buffers:
        dtype = getattr(torch, flat_buffer.dtype)
        stepped = any(specs[slot.parameter].is_stepped for slot in flat_buffer.slots)
        for bucket in flat_buffer.buckets:
            length = bucket.sizes[core.stage.state]
            tier = homes.state.get(bucket.index)
            master = core.precision.master_dtype(dtype, copied=homes.needs_copy(bucket.index))
            if tier is not None and stepped and master is not None:
                yield tier, {MASTER: (length, master)}
            if tier is not None and (forms := needs.forms.get(flat_buffer.family)):
                yield tier, {name: (form.length(length), form.dtype) for name, form in forms.items()}
            if homes.weights is not None and core.stage.moves_weights:
                yield homes.weights, {SHARD: (bucket.sizes[core.stage.weights_after_backward], dtype)}


def _carry_out(core: Core, model: nn.Module, config: Config, planned: _Planned, optimizer: ShardedOptimizer) -> Core:
    """Move everything into the planned layout and return its core; collective. A failure here is not undone."""
    found, plan = planned.partition, planned.layout
    core.await_weights()
    core.schedule.reshard_all()
    core.schedule.detach()
    core.reducer.discard()
    core.attachments.unhook()
    with torch.no_grad():
        past = _Past(
            {id(parameter) for parameter in core.partition.inside},
            {spec.name for spec in core.layout.parameters if spec.is_stepped},
        )
        units = [_move(core, unit, planned, optimizer, past) for unit in core.units]
    core.collectives.forget_transfers()
    core.tiers.free_reserved()
    counts = zip(core.layout.parameters, optimizer.steps, strict=True)
    steps = {spec.name: count for spec, count in counts if spec.is_stepped}
    new = replace(succeed(core, model, config, found, plan, units), is_recut=False)
    optimizer.lay_out(plan, new.reducer, [steps.get(spec.name, 0) for spec in plan.parameters])
    new.pool.clear()
    new.note_stepped()
    if core.mesh.rank == 0:
        footprint = formulas.footprint_of(new, config, optimizer.needs)
        tell_choice(new.tiers, footprint, planned.homes)
    return new


def _move(core: Core, old: Unit, planned: _Planned, optimizer: ShardedOptimizer, past: _Past) -> Unit:
    """``old`` in the new layout ([Note: Moving by intervals]). ``old`` is empty afterwards."""
    found, plan, homes = planned.partition, planned.layout, planned.homes
    flat_buffers, members = [], []
    for flat_buffer_layout in plan.flat_buffers_of.get(old.index, ()):
        flat_buffer, shown = placing.new_flat_buffer(
            *(found, plan, flat_buffer_layout, core.mesh),
            (core.stage.weights_after_backward, core.stage.state),
            homes,
        )
        flat_buffers.append(flat_buffer)
        members += shown
    buckets = [bucket for flat_buffer in flat_buffers for bucket in flat_buffer.buckets]
    weights = Targets(s for b in buckets for s in slices_of(plan, b.layout, b.interval, {WEIGHT: b.full}))
    for member in members:
        if id(member.parameter) not in past.inside:
            spec = plan.parameters[member.index]
            weights.receive(FlatSlice(spec.name, WEIGHT, 0, in_memory_order(member.parameter, spec).reshape(-1)))
    for bucket in old.buckets():
        _carry(core, bucket, {WEIGHT: bucket.weights()}, bucket.placement, weights, past)
    unit = Unit(old.index, old.name, flat_buffers, members, plan)
    for member in members:
        member.parameter.grad = None
        member.show(member.view)
    if core.stage.moves_weights:
        for bucket in buckets:
            placing.begin_master(bucket, bucket.full, core.precision)
        unit.detach_shards()
    else:
        for flat_buffer in old.flat_buffers:
            flat_buffer.let_go()
    _move_states(core, old, buckets, planned, optimizer, past)
    for flat_buffer in old.flat_buffers:
        flat_buffer.forsake()
    return unit


def _move_states(
    core: Core, old: Unit, buckets: list[Bucket], planned: _Planned, optimizer: ShardedOptimizer, past: _Past
) -> None:
    """Move the old unit's states and master weights into ``buckets``.

    Only the buckets at work have memory for them at a time.
    """
    plan, begun = planned.layout, set[Bucket]()
    holding: dict[str, list[Bucket]] = {}
    for bucket in buckets:
        for name in bucket.layout.names:
            holding.setdefault(name, []).append(bucket)

    def begin(bucket: Bucket) -> None:
        if bucket not in begun:
            begun.add(bucket)
            if not core.stage.moves_weights:
                placing.begin_master(bucket, bucket.full, core.precision)
            if bucket.layout.index >= 0:
                bucket.begin_states(optimizer.forms_in(bucket))

    for given in old.buckets():
        taking = dict.fromkeys(bucket for name in given.layout.names for bucket in holding[name])
        for bucket in taking:
            begin(bucket)
        kept = Targets(
            s for b in taking for s in slices_of(plan, b.layout, b.state_interval, b.state_store.tensors(writable=True))
        )
        _carry(core, given, given.state_store.tensors(), given.state_placement, kept, past)
        given.state_store.drop()
    for bucket in buckets:
        begin(bucket)


def _carry(
    core: Core, bucket: Bucket, tensors: dict[str, Tensor], placement: Placement, target: Targets, past: _Past
) -> None:
    """Give ``target`` all elements of an old bucket's ``tensors``. Sharded tensors are gathered first."""
    for key, held in tensors.items():
        with gathered(core, bucket, {key: held}, placement, Purpose.REBUILD, held.dtype) as slices:
            for part in slices:
                if key == WEIGHT or part.name in past.stepped:
                    target.receive(part)
