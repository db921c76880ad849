"""What a checkpoint consists of: every tensor in flat slices. The seam to any layout.

Owns: which rank writes which elements, and which views take them back. Must not know: files, JSON.

A part is a flat slice of a parameter's weights or optimizer state, or a whole buffer (key "buffer"), which alone keeps
its shape. Over all ranks the written parts cover every element once: sharded tensors by the rank that owns the slice,
replicated ones (stage 0) cut by the same slices, what is kept of parameters as a whole by one rank each, frozen
parameters outside of the flat buffers in equal shares, buffers by rank 0. Where every rank has buffers of its own
(``broadcast_buffers`` is off) each writes and takes back its own. What a rank's messages have not said yet (error
feedback of a communication hook) has a key of its own for each rank, which takes it back. What a hook goes on with
(PowerSGD's factors) is kept of a parameter as a whole.

[Note: Errors of other ranks] Only the mean of the ranks' errors reaches the weights. So on another number of ranks than
saved them rank r takes those of the saved ranks r, r + ranks, r + 2 ranks, …, added up in this order in fp32, times new
by saved ranks (by nothing where sums are not divided by the number of ranks): what was not said is said all the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from shardengine.core import Core
from shardengine.ddp import ERROR, FACTOR
from shardengine.optim import ShardedOptimizer
from shardengine.sharding import BUFFER, WEIGHT, FlatSlice, memory_order, slices_of
from shardengine.stages import Placement


def name_in_file(name: str, key: str, first: int, end: int) -> str:
    """The name that elements [first, end) have in a file."""
    return f"{name}/{key}[{first}:{end}]"


def error_key(rank: int) -> str:
    """The key of what the messages of ``rank`` have not said yet (error feedback): every rank has its own."""
    return f"{ERROR}.{rank}"


def is_error(key: str) -> bool:
    """Whether it is one of these."""
    return key.startswith(f"{ERROR}.")


def is_of_hook(key: str) -> bool:
    """Whether a communication hook keeps what has this key."""
    return key == FACTOR or is_error(key)


def held(core: Core, optimizer: ShardedOptimizer | None, *, writable: bool = False) -> Iterator[FlatSlice]:
    """Everything that this rank holds, as views. writable: to load a checkpoint is to write all of them."""
    if optimizer is not None:
        yield from optimizer.parameter_state(writable=writable)
    for unit in core.units:
        for bucket in unit.buckets():
            if bucket.layout.index >= 0 and optimizer is not None:
                continue
            weights = {WEIGHT: bucket.weights(writable=writable)}
            yield from slices_of(core.layout, bucket.layout, bucket.interval, weights)
    for part in core.reducer.hook_states(core.layout):
        yield part if part.key == FACTOR else part._replace(key=error_key(core.mesh.rank))
    for name, outside in core.partition.named_outside():
        order = memory_order(outside) or tuple(range(outside.dim()))
        yield FlatSlice(name, WEIGHT, 0, outside.data.permute(order).view(-1))
    for name, buffer in core.buffers.named(persistent_only=True).items():
        yield FlatSlice(name, BUFFER, 0, buffer.detach())


def owned(core: Core, optimizer: ShardedOptimizer | None, *, own_buffers: bool) -> Iterator[FlatSlice]:
    """What this rank writes: ``held``, cut to its slices, or to its share of what has none; buffers on rank 0 alone.

    own_buffers: every rank writes its own.
    """
    rank, ranks = core.mesh.rank, core.mesh.ranks
    slices: dict[str, list[tuple[int, int]]] = {}
    number_of = {spec.name: number for number, spec in enumerate(core.layout.parameters)}
    for flat_buffer in core.layout.flat_buffers:
        for bucket in flat_buffer.buckets:
            interval = bucket.interval(Placement.SHARDED, rank)
            for name in bucket.names:
                slices.setdefault(name, [])
            for piece in core.layout.pieces_within(bucket, interval):
                name = core.layout.parameters[piece.parameter].name
                slices[name].append((piece.offset, piece.offset_end))
    for part in held(core, optimizer):
        if part.key == BUFFER:
            if rank == 0 or own_buffers:
                yield part
            continue
        if is_error(part.key):
            yield part
            continue
        if part.per == 0:  # every rank has all of it
            if number_of[part.name] % ranks == rank:
                yield part
            continue
        count = part.values.numel() * part.per
        shares = slices.get(part.name, [(count * rank // ranks, count * (rank + 1) // ranks)])
        for own in (part.share(*share) for share in shares):
            if own.values.numel() or (count == 0 and rank == 0):
                yield own


def sizes(core: Core) -> dict[str, int]:
    """First name of each parameter → its elements."""
    return {row["names"][0]: math.prod(row["shape"]) for row in parameter_table(core)}


def parameter_table(core: Core) -> list[dict[str, Any]]:
    """Every parameter of the model, in registration order: all its names, shape, dtype, optimizer group.

    order: its dimensions from the outermost in memory to the innermost, [] where that is their own order; the elements
    of its weight and states are counted in that order.
    """
    specs = {id(p): spec for p, spec in zip(core.partition.inside, core.layout.parameters, strict=True)}
    rows: dict[int, dict[str, Any]] = {}
    for name, parameter in core.partition.names.items():
        spec = specs.get(id(parameter))
        row = rows.setdefault(
            id(parameter),
            {
                "names": [],
                "shape": list(parameter.shape),
                "order": list(memory_order(parameter) if spec is None else spec.order),
                "dtype": str(parameter.dtype).removeprefix("torch."),
                "trainable": spec is not None and spec.trainable,
                "group": -1 if spec is None else spec.group,
            },
        )
        row["names"].append(name)
    return list(rows.values())


def buffer_table(core: Core) -> list[dict[str, Any]]:
    """Every persistent buffer: name, shape, dtype."""
    return [
        {"name": name, "shape": list(buffer.shape), "dtype": str(buffer.dtype).removeprefix("torch.")}
        for name, buffer in core.buffers.named(persistent_only=True).items()
    ]
