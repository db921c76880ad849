"""What a checkpoint consists of: every tensor as (name, state, first element, values). The seam to any layout.

Owns: which rank writes which elements, and which views take them back. Must not know: files, JSON.

A part is a flat interval of one parameter (state "weight", or the optimizer's name for it) or a whole buffer (state
"buffer"). Over all ranks the written parts cover every element once: sharded tensors by the rank that owns the slice,
replicated ones (stage 0) cut by the same slices, frozen parameters outside of the flat buffers in equal shares, buffers
by rank 0. Where every rank has buffers of its own (``broadcast_buffers`` is off) each writes and takes back its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from shardengine.engine import Core
from shardengine.optim import ShardedOptimizer
from shardengine.sharding import Piece, memory_order
from shardengine.stages import Placement

WEIGHT, BUFFER = "weight", "buffer"


@dataclass(frozen=True)
class Part:
    """Elements [first, end) of a tensor. ``values``: a view of what the engine holds, flat but for buffers."""

    name: str
    state: str
    first: int
    values: Tensor

    @property
    def end(self) -> int:
        """One past the last element."""
        return self.first + self.values.numel()

    @property
    def key(self) -> str:
        """Its name in a file."""
        return key_of(self.name, self.state, self.first, self.end)


def key_of(name: str, state: str, first: int, end: int) -> str:
    """The name that elements [first, end) have in a file."""
    return f"{name}/{state}[{first}:{end}]"


def held(core: Core, optimizer: ShardedOptimizer | None, *, writable: bool = False) -> Iterator[Part]:
    """Everything that this rank holds, as views. writable: to load a checkpoint is to write all of them."""
    names = [spec.name for spec in core.layout.parameters]
    if optimizer is not None:
        for parameter, state, first, values in optimizer.parameter_state(writable=writable):
            yield Part(names[parameter], state, first, values)
    for unit in core.units:
        for bucket in unit.buckets():
            if bucket.layout.index >= 0 and optimizer is not None:
                continue
            flat, (start, end) = bucket.weights(writable=writable), bucket.interval
            for cut in core.layout.pieces_within(bucket.layout, (start, end)):
                yield Part(names[cut.parameter], WEIGHT, cut.offset, flat[cut.start - start : cut.end - start])
    for name, outside in core.partition.named_outside():
        order = memory_order(outside) or tuple(range(outside.dim()))
        yield Part(name, WEIGHT, 0, outside.data.permute(order).view(-1))
    for name, buffer in core.buffers.named(persistent_only=True).items():
        yield Part(name, BUFFER, 0, buffer.detach())


def owned(core: Core, optimizer: ShardedOptimizer | None, *, own_buffers: bool) -> Iterator[Part]:
    """What this rank writes: ``held``, cut to its slices, or to its share of what has none; buffers on rank 0 alone.

    own_buffers: every rank writes its own.
    """
    rank, ranks = core.mesh.rank, core.mesh.ranks
    slices: dict[str, list[Piece]] = {}
    for flat_buffer in core.layout.flat_buffers:
        for bucket in flat_buffer.buckets:
            interval = bucket.interval(Placement.SHARDED, rank)
            for name in bucket.names:
                slices.setdefault(name, [])
            for piece in core.layout.pieces_within(bucket, interval):
                slices[core.layout.parameters[piece.parameter].name].append(piece)
    for part in held(core, optimizer):
        if part.state == BUFFER:
            if rank == 0 or own_buffers:
                yield part
            continue
        count = part.values.numel()
        shares = [(cut.offset, cut.offset + cut.end - cut.start) for cut in slices.get(part.name, ())]
        if part.name not in slices:
            shares = [(count * rank // ranks, count * (rank + 1) // ranks)]
        for start, stop in shares:
            first, end = max(part.first, start), min(part.end, stop)
            if first < end or (count == 0 and rank == 0):
                yield Part(part.name, part.state, first, part.values[first - part.first : end - part.first])


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
