"""What the stage's formulas say of one engine: bytes of model state and bytes on the wire, padding included.

Must not know: what is measured.
"""

from __future__ import annotations

import torch

from shardengine import stages
from shardengine.bucket import Bucket
from shardengine.core import Core
from shardengine.layout import ArenaLayout


def predicted_bytes(core: Core, state_bytes_per_element: int, micro_batches: int) -> float:
    """The stage's formula for model state per rank, padding included, at the end of a window of micro-batches."""
    predicted = 0.0
    for arena in core.layout.arenas:
        predicted += core.stage.model_state_bytes(
            arena.length if arena.trainable else 0,
            core.mesh.ranks,
            weight=arena.itemsize,
            gradient=_resting_bytes(core, arena, micro_batches),
            state=state_bytes_per_element + (4 if _has_masters(core, arena) else 0),
            frozen=0 if arena.trainable else arena.length,
        )
    return predicted + sum(p.nbytes for p in core.partition.outside)


def _has_masters(core: Core, arena: ArenaLayout) -> bool:
    """Whether an optimizer steps fp32 master weights of ``arena``."""
    return any(bucket.master is not None for bucket in _buckets_of(core, arena))


def _buckets_of(core: Core, arena: ArenaLayout) -> list[Bucket]:
    indices = {bucket.index for bucket in arena.buckets}
    return [state.bucket for state in core.reducer.buckets if state.bucket.layout.index in indices]


def _resting_bytes(core: Core, arena: ArenaLayout, micro_batches: int) -> int:
    """Bytes per element of a gradient that is complete, or waits for more micro-batches."""
    wire, accumulate = _wire_of(core, arena), core.reducer.rules.accumulate
    fits = accumulate in (torch.float32, wire)
    return accumulate.itemsize if micro_batches > 1 and fits else wire.itemsize


def predicted_traffic(core: Core, micro_batches: int) -> float:
    """The stage's formula for bytes sent per rank and step, padding included."""
    sent = 0.0
    for arena in core.layout.arenas:
        volume = stages.Volume(
            trainable=arena.length if arena.trainable else 0,
            unit=arena.length if arena.unit else 0,
            root=0 if arena.unit else arena.length,
        )
        sent += core.stage.bytes_sent(
            volume,
            core.mesh.ranks,
            micro_batches=micro_batches,
            weight=arena.itemsize,
            gradient=_wire_of(core, arena).itemsize,
        )
    return sent


def _wire_of(core: Core, arena: ArenaLayout) -> torch.dtype:
    """The dtype in which gradients of ``arena`` are sent."""
    wire = core.reducer.rules.wire
    own: torch.dtype = getattr(torch, arena.dtype)
    return wire or own
