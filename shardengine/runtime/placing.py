"""Giving the weights of a model their places: flat buffers and units in the mesh's memory, filled with rank 0's values.

Owns: who gets master weights, and what they begin with. Must not know: stages, the optimizer, later moves.

[Note: Peak] A flat buffer is filled bucket by bucket, and what a parameter came with is let go of with its last bucket.
So beside the model state there is never more than one bucket in fp32 and those parameters that are not in yet. These
count only where the model came in the same memory.

[Note: No values] Ranks other than 0 take its values and read none of their own, which may be on the meta device. torch
lets no parameter move from there by ``.data``, so it is exchanged in place for one with a single element behind its
shape, until it shows its part of a flat buffer.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from shardengine.comm import Collectives, Mesh, Named, Purpose
from shardengine.offload import Homes
from shardengine.runtime.unit import Member, Unit
from shardengine.sharding import (
    Bucket,
    FlatBuffer,
    FlatBufferLayout,
    Layout,
    LeftShards,
    Partition,
    Precision,
    Targets,
    dtype_of,
    in_memory_order,
    memory_order,
    reveal,
    slices_of,
)
from shardengine.stages import Placement


def place(
    partition: Partition,
    layout: Layout,
    collectives: Collectives,
    *,
    weights: Placement,
    state: Placement,
    which: Precision = Precision(),  # noqa: B008  (frozen)
    homes: Homes = Homes(),  # noqa: B008  (frozen)
) -> list[Unit]:
    """Move every parameter to the mesh's device, one flat buffer at a time, with rank 0's values; build the units.

    Where parameters that an optimizer steps are not fp32, the values they came with become fp32 master weights, if
    there are to be any. weights: where they rest · which: as in ``analyse`` · state, homes: as in ``FlatBuffer``.
    """
    mesh, left = collectives.mesh, partition.left
    with torch.no_grad():
        if left is not None:
            _show_outside(left, partition.outside, collectives)
        for name, parameter in partition.named_outside():
            dtype = dtype_of(parameter, which)
            order = memory_order(parameter) or tuple(range(parameter.dim()))
            moved = _on(mesh, parameter.data.permute(order), dtype)
            _leave_meta(parameter, mesh)
            collectives.broadcast(moved, Named([name]), Purpose.START)
            reveal(parameter, moved.permute([order.index(dimension) for dimension in range(len(order))]))
        named = [("the root", None), *partition.units]
        units = []
        for index, (name, _) in enumerate(named):
            flat_buffers, members = [], []
            for flat_buffer_layout in layout.flat_buffers_of.get(index, ()):
                flat_buffer, found = new_flat_buffer(partition, layout, flat_buffer_layout, mesh, state, homes)
                for member in found:
                    _leave_meta(member.parameter, mesh)
                _fill(flat_buffer, found, layout, collectives, which, left)
                members += found
                flat_buffers.append(flat_buffer)
            unit = Unit(index, name, flat_buffers, members, layout)
            if weights is Placement.SHARDED:
                unit.detach_shards()
            units.append(unit)
    return units


def place_buffers(model: nn.Module, mesh: Mesh) -> None:
    """Move every buffer to the mesh's device. One without values ([Note: No values]) gets memory, with any values."""
    placed: dict[int, Tensor] = {}  # one that several modules share stays one
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            if id(buffer) not in placed:
                placed[id(buffer)] = _on(mesh, buffer, buffer.dtype)
            module._buffers[name] = placed[id(buffer)]


def _on(mesh: Mesh, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """``tensor`` on the mesh's device, contiguous; with any values if it has none."""
    if tensor.is_meta and mesh.device.type != "meta":
        return torch.empty(tensor.shape, dtype=dtype, device=mesh.device)
    return tensor.to(mesh.device, dtype).contiguous()


def _leave_meta(parameter: nn.Parameter, mesh: Mesh) -> None:
    """``parameter`` may show memory of the mesh's device from now on ([Note: No values])."""
    if not parameter.is_meta or mesh.device.type == "meta":
        return
    shape_alone = torch.empty(1, dtype=parameter.dtype, device=mesh.device).expand(parameter.shape)
    other = nn.Parameter(shape_alone, requires_grad=parameter.requires_grad)
    vars(other).update(vars(parameter))
    other.__class__ = type(parameter)
    torch.utils.swap_tensors(parameter, other)


def new_flat_buffer(
    partition: Partition, layout: Layout, which: FlatBufferLayout, mesh: Mesh, state: Placement, homes: Homes
) -> tuple[FlatBuffer, list[Member]]:
    """A flat buffer of zeros, and the members that will show it."""
    specs = [layout.parameters[slot.parameter] for slot in which.slots]
    flat_buffer = FlatBuffer(which, specs, getattr(torch, which.dtype), mesh.platform, mesh.rank, state, homes)
    return flat_buffer, [
        Member(slot.parameter, partition.inside[slot.parameter], flat_buffer, number)
        for number, slot in enumerate(which.slots)
    ]


def _fill(
    flat_buffer: FlatBuffer,
    members: list[Member],
    layout: Layout,
    collectives: Collectives,
    which: Precision,
    left: LeftShards | None,
) -> None:
    """Rank 0's values into ``flat_buffer``, and unrounded into master weights where it gets some ([Note: Peak]). What a
    closed engine has left comes from where that is."""
    masters = flat_buffer.is_stepped and which.master_dtype(flat_buffer.dtype) is not None
    by_index = {member.index: member for member in members}
    for bucket in flat_buffer.buckets:
        full = torch.zeros_like(bucket.full, dtype=torch.float32) if masters else bucket.full
        complete, parts = [], []
        for piece in layout.pieces(bucket.layout):
            member, spec = by_index[piece.parameter], layout.parameters[piece.parameter]
            target = full[piece.start - bucket.layout.start : piece.end - bucket.layout.start]
            if collectives.mesh.rank == 0 and (left is None or not left.hides(member.parameter)):
                target.copy_(in_memory_order(member.parameter, spec).reshape(-1)[piece.offset : piece.offset_end])
            parts.append((member.parameter, piece.offset, target))
            complete += [member] if piece.offset_end == spec.numel else []
        collectives.broadcast(full, bucket.layout, Purpose.START)
        if left is not None:
            _take_over(left, parts, collectives)
        if masters:
            bucket.full.copy_(full)
        begin_master(bucket, full, which)
        for member in complete:
            member.parameter.grad = None
            member.show(member.view)


def _take_over(left: LeftShards, wanted: Iterable[tuple[nn.Parameter, int, Tensor]], collectives: Collectives) -> None:
    """Elements of parameters, each from a first one on, into the flat tensors beside them. Collective.

    Where a parameter showed weights, which these tensors hold, only values from which those were rounded.
    """
    targets, checked = [], []
    for parameter, first, values in wanted:
        target = left.slice_of(parameter, first, values if left.hides(parameter) else values.clone())
        if target is not None:
            targets.append(target)
            checked += [] if left.hides(parameter) else [(left.dtype_of(parameter), values, target.values)]
    received = Targets(targets)
    for bucket in left.holding(targets):
        layout, values = bucket.layout, bucket.values
        whole = torch.empty(layout.length, dtype=values.dtype, device=collectives.mesh.device)
        start, end = (edge - layout.start for edge in layout.interval(bucket.placement, left.rank))
        whole[start:end].copy_(values)
        collectives.move(whole, bucket.placement, Placement.REPLICATED, layout, Purpose.START).wait()
        for part in slices_of(left.layout, layout, (layout.start, layout.end), {targets[0].key: whole}):
            received.receive(part)
    for dtype, values, unrounded in checked:
        values.copy_(torch.where(unrounded.to(dtype).to(values.dtype) == values, unrounded, values))


def _show_outside(left: LeftShards, outside: Iterable[nn.Parameter], collectives: Collectives) -> None:
    """Parameters that are in no flat buffer any more have their weights, whole. Collective."""
    hidden = [
        (p, torch.empty(p.numel(), dtype=p.dtype, device=collectives.mesh.device)) for p in outside if left.hides(p)
    ]
    _take_over(left, [(parameter, 0, flat) for parameter, flat in hidden], collectives)
    for parameter, flat in hidden:
        order = left.order_of(parameter) or tuple(range(parameter.dim()))
        in_memory = flat.view([parameter.shape[dimension] for dimension in order])
        parameter.data = in_memory.permute([order.index(dimension) for dimension in range(len(order))])


def begin_master(bucket: Bucket, values: Tensor, which: Precision) -> None:
    """Master weights of ``bucket`` with ``values``, where an optimizer steps it and not its weights themselves."""
    flat_buffer = bucket.flat_buffer
    dtype = which.master_dtype(flat_buffer.dtype, copied=flat_buffer.homes.needs_copy(bucket.layout.index))
    if flat_buffer.is_stepped and dtype is not None:
        bucket.begin_master(values, dtype)
