"""What the stage's formulas say of one engine: bytes of model state and bytes on the wire, padding included.

Must not know: what is measured.
"""

from __future__ import annotations

from collections import defaultdict

import torch

from shardengine import stages
from shardengine.bucket import MASTER
from shardengine.core import Core
from shardengine.layout import ArenaLayout


def predicted_bytes(core: Core, state_bytes_per_element: int, micro_batches: int) -> defaultdict[str, float]:
    """The stage's formula for model state per rank, by tier, padding included, at the end of a window of micro-batches.

    Weights that rest sharded in another tier are counted there. What of the optimizer is away: the state of what this
    rank steps, in its tier, and its complete gradient, in the host's memory (where every rank steps everything the
    gradient is gathered, and stays on the device).
    """
    predicted = defaultdict(float, device=float(sum(p.nbytes for p in core.partition.outside)))
    weights_place = core.tiers.weights_place if core.stage.moves_weights else "device"
    shelves = {state.bucket.layout.index: state.bucket.shelf for state in core.reducer.buckets}
    for arena, bucket in ((its, bucket) for its in core.layout.arenas for bucket in its.buckets):
        shelf = shelves.get(bucket.index)
        away = shelf is not None and shelf.away
        state = state_bytes_per_element + (_master_bytes(core, arena, away) if shelf and MASTER in shelf.sizes else 0)
        gradient = _resting_bytes(core, arena, micro_batches, away=away)
        gathers = core.stage.gathers_gradients
        predicted["device"] += core.stage.model_state_bytes(
            bucket.length if arena.trainable else 0,
            core.mesh.ranks,
            weight=arena.itemsize if weights_place == "device" else 0,
            gradient=0 if away and not gathers else gradient,
            state=0 if away else state,
            frozen=0 if arena.trainable else bucket.length,
        )
        predicted[weights_place] += 0 if weights_place == "device" else bucket.slice_length * arena.itemsize
        if shelf is not None and away:
            stepped = bucket.length if gathers else bucket.slice_length
            predicted[shelf.place] += stepped * state
            predicted["cpu"] += 0 if gathers else stepped * gradient
    return predicted


def _master_bytes(core: Core, arena: ArenaLayout, away: bool) -> int:
    """Bytes per element of master weights: fp32, or a copy of weights that are stepped themselves, but elsewhere."""
    return arena.itemsize if away and not core.precision.master_of(getattr(torch, arena.dtype)) else 4


def _resting_bytes(core: Core, arena: ArenaLayout, micro_batches: int, *, away: bool) -> int:
    """Bytes per element of a gradient that is complete, or waits on the device for more micro-batches."""
    wire, accumulate = _wire_of(core, arena), core.reducer.rules.accumulate
    fits = accumulate in (torch.float32, wire)
    waits_there = not away or core.reducer.rules.sharded
    return accumulate.itemsize if micro_batches > 1 and fits and waits_there else wire.itemsize


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
