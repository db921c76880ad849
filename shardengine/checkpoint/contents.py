"""The contents of a checkpoint: every tensor as flat slices, independent of the layout.

Owns: which rank writes which elements, and the views that loading fills. Must not know: files, JSON.

A part is a flat slice of a parameter's weights or optimizer state, or a whole buffer (key "buffer"). Only buffers keep
their shape. Over all ranks the written parts cover every element once:
- sharded tensors: each slice by its owner rank
- replicated tensors (stage 0): cut into the same slices
- state that is kept per whole parameter: by one rank for each parameter
- frozen parameters outside of the flat buffers: in equal shares
- buffers: by rank 0; with ``broadcast_buffers`` off each rank writes and loads its own

The error feedback of a communication hook (the part of a rank's gradients that its messages have not carried yet) has
one key per rank, and that rank loads it. The other state of a hook (PowerSGD's factors) is kept per whole parameter.

[Note: Errors of other ranks] Only the mean of the ranks' errors reaches the weights. If the world size differs from the
one that saved, rank r loads the errors of the saved ranks r, r + ranks, r + 2 ranks, … and adds them up in this order
in fp32. The sum is multiplied by (new ranks / saved ranks), or not at all if gradient sums are not divided by the
number of ranks. So no error is lost.
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
    """Return the name in a file of elements [first, end) of tensor ``key`` of parameter ``name``."""
    return f"{name}/{key}[{first}:{end}]"


def error_key(rank: int) -> str:
    """Return the key of the error feedback of ``rank``: every rank has its own."""
    return f"{ERROR}.{rank}"


def is_error(key: str) -> bool:
    """Whether ``key`` is an ``error_key``."""
    return key.startswith(f"{ERROR}.")


def is_of_hook(key: str) -> bool:
    """Whether ``key`` is a state of a communication hook."""
    return key == FACTOR or is_error(key)


def held(core: Core, optimizer: ShardedOptimizer | None, *, writable: bool = False) -> Iterator[FlatSlice]:
    """Yield all tensors that this rank holds, as views. writable: the caller (a load) writes all of them."""
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
    """Yield the parts that this rank writes: ``held``, cut to its slices.

    Tensors without slices are cut into equal shares. Rank 0 alone writes buffers. own_buffers: every rank does.
    """
    rank, ranks = core.mesh.rank, core.mesh.ranks
    slices: dict[str, list[tuple[int, int]]] = {}
    number_of = {spec.name: number for number, spec in enumerate(core.layout.parameters)}
    for flat_buffer in core.layout.flat_buffers:
        for bucket in flat_buffer.buckets:
            interval = bucket.interval_of_rank(Placement.SHARDED, rank)
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
    """Return the number of elements of each parameter, by its first name."""
    return {row["names"][0]: math.prod(row["shape"]) for row in parameter_table(core)}


def parameter_table(core: Core) -> list[dict[str, Any]]:
    """Return a row per parameter of the model, in registration order: its names, shape, order, dtype, trainable, group.

    order: the dimensions from the outermost in memory to the innermost; [] for the ordinary order. The elements of its
    weight and states are counted in that order.
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
    """Return a row per persistent buffer: name, shape, dtype."""
    return [
        {"name": name, "shape": list(buffer.shape), "dtype": str(buffer.dtype).removeprefix("torch.")}
        for name, buffer in core.buffers.named(persistent_only=True).items()
    ]
