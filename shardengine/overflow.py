"""What to say where gradients still overflow and the loss scale cannot fall any further. Must not know: its policy."""

from __future__ import annotations

import torch

from shardengine.core import Core
from shardengine.errors import LossScaleError

_SHOWN = 5


def report(core: Core, scale: float) -> None:
    """Raise ``LossScaleError`` on every rank, with the first parameters whose complete gradient is not finite."""
    mine = []
    for state in core.reducer.buckets:
        first, last = state.bucket.layout.slice_interval(state.bucket.rank)
        for piece in core.layout.pieces_within(state.bucket.layout, (first, last)):
            values = None if state.complete is None else state.complete[piece.start - first : piece.end - first]
            if values is not None and not bool(torch.isfinite(values).all()):
                mine.append(piece.parameter)
    found = sorted({index for rank in core.collectives.exchange_objects(mine) for index in rank})
    names = ", ".join(repr(core.layout.parameters[index].name) for index in found[:_SHOWN])
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    raise LossScaleError(
        f"gradients are not finite although the loss scale is at its minimum ({scale:g}), rank {core.mesh.rank}: "
        f"expected finite ones, came Inf or NaN in {names}{more}. The step was left out, the weights are those of the "
        "last one: look for a division by zero or a learning rate that is too high, or compute in bf16"
    )
