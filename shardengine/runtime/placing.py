"""The initial placement of a model's weights: flat buffers and units in the mesh's memory, filled with their values.

Owns: which weights get master weights, and their initial values. Must not know: stages, the optimizer, later moves.

[Note: Peak] A flat buffer is filled bucket by bucket, and a parameter's original values are released with its last
bucket. So in addition to the model state there is never more than one bucket in fp32, and the original values of
parameters that are not placed yet. These count only if the model came in the same memory.

[Note: No values] Ranks other than 0 take rank 0's values and read none of their own, which may be on the meta device.
torch does not let a parameter leave the meta device by ``.data``. So it is replaced in place by one with a single
element behind its shape, until it shows its part of a flat buffer.

[Note: From a source] If a ``Source`` gives values, no rank has them. Each rank requests its own slice of every bucket
and writes it to its place; slices are gathered only if weights rest replicated. A bucket that also holds parameters
with values is filled and sent by rank 0. Parameters outside of the flat buffers, and buffers, are whole on every rank;
rank 0 requests and sends them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from shardengine.comm import Collectives, Mesh, Named, Purpose
from shardengine.loading import Source
from shardengine.offload import Homes
from shardengine.runtime.unit import Member, Unit
from shardengine.sharding import (
    Bucket,
    FlatBuffer,
    FlatBufferLayout,
    Layout,
    LeftBucket,
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
    """Move every parameter to the mesh's device, one flat buffer at a time; return the units.

    Parameters that the partition's source does not give begin with rank 0's values. If parameters that an optimizer
    steps are not fp32 and there are to be master weights, their original values become fp32 master weights. weights:
    their placement at rest · which: as in ``analyse`` · state, homes: as in ``FlatBuffer``.
    """
    mesh, left, source = collectives.mesh, partition.left, partition.source
    with torch.no_grad():
        if left is not None:
            _show_outside(left, partition.outside, collectives)
        for name, parameter in partition.named_outside():
            dtype = dtype_of(parameter, which)
            order = memory_order(parameter) or tuple(range(parameter.dim()))
            moved = _on(mesh, parameter.data.permute(order), dtype)
            if source is not None and source.gives(parameter) and mesh.rank == 0 and parameter.numel():
                source.fill(parameter, order, 0, moved.view(-1))
            _leave_meta(parameter, mesh)
            collectives.broadcast(moved, Named([name]), Purpose.START)
            reveal(parameter, moved.permute([order.index(dimension) for dimension in range(len(order))]))
        named = [("the root", None), *partition.units]
        units = []
        for index, (name, _) in enumerate(named):
            flat_buffers, members = [], []
            for flat_buffer_layout in layout.flat_buffers_of.get(index, ()):
                flat_buffer, found = new_flat_buffer(
                    partition, layout, flat_buffer_layout, mesh, (weights, state), homes
                )
                given = {m.index: m.parameter for m in found if source is not None and source.gives(m.parameter)}
                fill = _BufferFilling(flat_buffer, found, layout, collectives, which, weights)
                for bucket in flat_buffer.buckets:
                    if source is not None and given.keys() >= {p.parameter for p in layout.pieces(bucket.layout)}:
                        fill.from_source(bucket, source)
                    else:
                        fill.from_rank_0(bucket, left, source)
                members += found
                flat_buffers.append(flat_buffer)
            unit = Unit(index, name, flat_buffers, members, layout)
            if weights.sharded_over is not None:
                unit.detach_shards()
                if source is not None and not mesh.platform.has_own_memory:
                    mesh.platform.free_cached()  # malloc would leave holes between the shards, one per unit
            units.append(unit)
        if source is not None:
            source.finish()
    return units


def place_buffers(model: nn.Module, mesh: Mesh, source: Source | None = None) -> None:
    """Move every buffer to the mesh's device.

    A buffer without values ([Note: No values]) gets memory. On rank 0 ``source`` fills the buffers that it gives, if
    any; on other ranks the values are undefined.
    """
    placed: dict[int, Tensor] = {}  # a buffer that several modules share stays one
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            if id(buffer) not in placed:
                placed[id(buffer)] = moved = _on(mesh, buffer, buffer.dtype)
                if source is not None and source.gives(buffer) and mesh.rank == 0 and buffer.numel():
                    source.fill(buffer, (), 0, moved.view(-1))
            module._buffers[name] = placed[id(buffer)]


def _on(mesh: Mesh, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``tensor`` on the mesh's device, contiguous; with undefined values if it has none."""
    if tensor.is_meta and mesh.device.type != "meta":
        return torch.empty(tensor.shape, dtype=dtype, device=mesh.device)
    return tensor.to(mesh.device, dtype).contiguous()


def _leave_meta(parameter: nn.Parameter, mesh: Mesh) -> None:
    """Make ``parameter`` able to show memory of the mesh's device ([Note: No values])."""
    if not parameter.is_meta or mesh.device.type == "meta":
        return
    shape_alone = torch.empty(1, dtype=parameter.dtype, device=mesh.device).expand(parameter.shape)
    other = nn.Parameter(shape_alone, requires_grad=parameter.requires_grad)
    vars(other).update(vars(parameter))
    other.__class__ = type(parameter)
    torch.utils.swap_tensors(parameter, other)


def new_flat_buffer(
    partition: Partition,
    layout: Layout,
    which: FlatBufferLayout,
    mesh: Mesh,
    placements: tuple[Placement, Placement],
    homes: Homes,
) -> tuple[FlatBuffer, list[Member]]:
    """Return a flat buffer without values, and its members. placements: of weights and of states at rest."""
    specs = [layout.parameters[slot.parameter] for slot in which.slots]
    flat_buffer = FlatBuffer(which, specs, getattr(torch, which.dtype), mesh.platform, mesh.rank, placements, homes)
    return flat_buffer, [
        Member(slot.parameter, partition.inside[slot.parameter], flat_buffer, number)
        for number, slot in enumerate(which.slots)
    ]


class _BufferFilling:
    """Fills one flat buffer, bucket by bucket ([Note: Peak]). weights: their placement at rest."""

    def __init__(
        self,
        flat_buffer: FlatBuffer,
        members: list[Member],
        layout: Layout,
        collectives: Collectives,
        which: Precision,
        weights: Placement,
    ) -> None:
        self._layout, self._collectives, self._which, self._weights = layout, collectives, which, weights
        self._masters = flat_buffer.is_stepped and which.master_dtype(flat_buffer.dtype) is not None
        self._by_index = {member.index: member for member in members}

    def from_rank_0(self, bucket: Bucket, left: LeftShards | None, source: Source | None) -> None:
        """Fill a bucket with rank 0's values, unrounded in its master weights if it has some.

        Parameters that a closed engine has left sharded get their values from those shards.
        """
        full = self._values_of(bucket)
        parts = []
        for piece in self._layout.pieces(bucket.layout):
            member, spec = self._by_index[piece.parameter], self._layout.parameters[piece.parameter]
            target = full[piece.start - bucket.layout.start : piece.end - bucket.layout.start]
            if self._collectives.mesh.rank == 0 and (left is None or not left.hides(member.parameter)):
                if source is not None and source.gives(member.parameter):
                    source.fill(member.parameter, spec.order, piece.offset, target)
                else:
                    values = in_memory_order(member.parameter, spec).reshape(-1)
                    target.copy_(values[piece.offset : piece.offset_end])
            parts.append((member.parameter, piece.offset, target))
        self._collectives.broadcast(full, bucket.layout, Purpose.START)
        if left is not None:
            _take_over(left, parts, self._collectives)
        if self._masters:
            bucket.full.copy_(full)
        self._end(bucket, full)

    def from_source(self, bucket: Bucket, source: Source) -> None:
        """Fill a bucket with this rank's slice of the source's values; with all slices if weights rest replicated.

        See [Note: From a source].
        """
        if self._weights.sharded_over is not None and bucket.has_own_shard:
            self._shard_from(bucket, source)
            return
        full, layout = self._values_of(bucket), bucket.layout
        interval = layout.interval_of_rank(Placement.SHARDED, bucket.rank)
        for piece in self._layout.pieces_within(layout, interval):
            parameter, spec = self._by_index[piece.parameter].parameter, self._layout.parameters[piece.parameter]
            target = full[piece.start - layout.start : piece.end - layout.start]
            source.fill(parameter, spec.order, piece.offset, target)
        if self._masters:
            own = bucket.own_slice(bucket.full, Placement.SHARDED)
            own.copy_(bucket.own_slice(full, Placement.SHARDED))
        sent = [(full, bucket.state_placement if self._masters else self._weights)]
        sent += [(bucket.full, self._weights)] if self._masters else []
        for values, resting in sent:
            part = bucket.own_slice(values, resting)
            self._collectives.move(part, Placement.SHARDED, resting, layout, Purpose.START).wait()
        self._end(bucket, full)

    def _shard_from(self, bucket: Bucket, source: Source) -> None:
        """Fill this rank's part of a bucket in its place at rest, without touching the bucket's full length."""
        layout, flat_buffer = bucket.layout, bucket.flat_buffer
        first, last = layout.interval_of_rank(self._weights, bucket.rank)
        dtype = torch.float32 if self._masters else bucket.full.dtype
        own, end = torch.empty(last - first, dtype=dtype, device=bucket.full.device), first
        master = master_dtype_of(bucket, self._which)
        waits = master is not None or dtype != bucket.full.dtype or flat_buffer.homes.weights is not None
        for piece in self._layout.pieces_within(layout, (first, last)):
            parameter, spec = self._by_index[piece.parameter].parameter, self._layout.parameters[piece.parameter]
            own[end - first : piece.start - first].zero_()
            end = piece.end
            source.fill(parameter, spec.order, piece.offset, own[piece.start - first : end - first], later=True)
        own[end - first :].zero_()
        if waits:
            source.finish()
        bucket.adopt_slice(own, master, flat_buffer.homes.weights)
        self._show(bucket)

    def _values_of(self, bucket: Bucket) -> Tensor:
        """Return memory for the values of ``bucket``: its own, or fp32 if master weights will keep them unrounded."""
        if not self._masters:
            return bucket.full
        values, end = torch.empty_like(bucket.full, dtype=torch.float32), 0
        for piece in self._layout.pieces(bucket.layout):
            start = piece.start - bucket.layout.start
            values[end:start].zero_()
            end = start + piece.end - piece.start
        values[end:].zero_()
        return values

    def _end(self, bucket: Bucket, full: Tensor) -> None:
        """Set the master weights of ``bucket``, which has its values, and show the parameters that end in it."""
        begin_master(bucket, full, self._which)
        self._show(bucket)

    def _show(self, bucket: Bucket) -> None:
        """Let the parameters that end in ``bucket`` show their place in it."""
        for piece in self._layout.pieces(bucket.layout):
            if piece.offset_end == self._layout.parameters[piece.parameter].numel:
                member = self._by_index[piece.parameter]
                _leave_meta(member.parameter, self._collectives.mesh)
                member.parameter.grad = None
                member.show(member.view)


def _take_over(left: LeftShards, wanted: Iterable[tuple[nn.Parameter, int, Tensor]], collectives: Collectives) -> None:
    """Copy elements of parameters, each from a first one on, into the flat tensors ``wanted``. Collective.

    If a parameter showed weights, which its tensor holds already, an element is replaced only by its unrounded value.
    """
    targets, checked = [], []
    for parameter, first, values in wanted:
        target = left.slice_of(parameter, first, values if left.hides(parameter) else values.clone())
        if target is not None:
            targets.append(target)
            checked += [] if left.hides(parameter) else [(left.dtype_of(parameter), values, target.values)]
    received = Targets(targets)
    for bucket in left.holding(targets):
        layout, whole = bucket.layout, _gathered(bucket, left.rank, collectives)
        for part in slices_of(left.layout, layout, (layout.start, layout.end), {targets[0].key: whole}):
            received.receive(part)
    for dtype, values, unrounded in checked:
        values.copy_(torch.where(unrounded.to(dtype).to(values.dtype) == values, unrounded, values))


def _gathered(bucket: LeftBucket, rank: int, collectives: Collectives) -> Tensor:
    """Return all values of ``bucket``. Collective.

    Slices lie in the order of the mesh on which they were left. If the present mesh has other shard groups, each rank's
    own slice is gathered in the present order.
    """
    left, placement, values, replicas = bucket.layout, bucket.placement, bucket.values, collectives.mesh.replicas
    layout = left
    if placement.sharded_over is not None and left.replicas != replicas:
        first, (start, end) = left.interval_of_rank(placement, rank)[0], left.interval_of_rank(Placement.SHARDED, rank)
        layout, placement = replace(left, replicas=replicas), Placement.SHARDED
        values = values[start - first : end - first]
    whole = torch.empty(layout.length, dtype=values.dtype, device=collectives.mesh.device)
    start, end = (edge - layout.start for edge in layout.interval_of_rank(placement, rank))
    whole[start:end].copy_(values)
    collectives.move(whole, placement, Placement.REPLICATED, layout, Purpose.START).wait()
    if layout is left:
        return whole
    slices = whole.split(layout.slice_length)
    order = sorted(range(layout.ranks), key=partial(left.slice_number_of_rank, Placement.SHARDED))
    return torch.cat([slices[layout.slice_number_of_rank(Placement.SHARDED, each)] for each in order])


def _show_outside(left: LeftShards, outside: Iterable[nn.Parameter], collectives: Collectives) -> None:
    """Give parameters that are no longer in a flat buffer their weights, whole. Collective."""
    hidden = [
        (p, torch.empty(p.numel(), dtype=p.dtype, device=collectives.mesh.device)) for p in outside if left.hides(p)
    ]
    _take_over(left, [(parameter, 0, flat) for parameter, flat in hidden], collectives)
    for parameter, flat in hidden:
        order = left.order_of(parameter) or tuple(range(parameter.dim()))
        in_memory = flat.view([parameter.shape[dimension] for dimension in order])
        parameter.data = in_memory.permute([order.index(dimension) for dimension in range(len(order))])


def begin_master(bucket: Bucket, values: Tensor, which: Precision) -> None:
    """Begin master weights of ``bucket`` with ``values``, if an optimizer steps them and not the weights themselves."""
    if (dtype := master_dtype_of(bucket, which)) is not None:
        bucket.begin_master(values, dtype)


def master_dtype_of(bucket: Bucket, which: Precision) -> torch.dtype | None:
    """Return the dtype of the master weights of ``bucket``; None if it has none."""
    flat_buffer = bucket.flat_buffer
    copied = flat_buffer.homes.needs_copy(bucket.layout.index)
    return which.master_dtype(flat_buffer.dtype, copied=copied) if flat_buffer.is_stepped else None
