"""The speed of a group: the latency of a collective and its time per byte, measured in some milliseconds.

Owns: the measurement and the fit. Must not know: how the result is used (``budget/bucket_sizes.py``).

[Note: Fit] The model is that a collective of B bytes lasts α + β·B. Two sizes are timed in turn; the first time of each
does not count. A collective lasts as long as its slowest rank, so each time is the longest of all ranks. Of these the
shortest counts, because any disturbance of a machine makes a time longer. The line through both sizes is the fit. Every
rank exchanges its times with every other one, so all of them have the same fit to the last bit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shardengine.comm.collectives import Collectives
from shardengine.comm.flight_recorder import Purpose
from shardengine.comm.work import Work
from shardengine.stages import Placement

LARGE_BYTES = 4 * 2**20
TRIES = 6
LEAST_LATENCY_S, LEAST_S_PER_BYTE = 1e-6, 1e-12
"""Lower limits: smaller results come from the clock's resolution or an interruption between the two sizes."""
_WHAT = "measuring the group"


class _Measured:
    """The label of the measured collectives: one object, so that their transfers are compiled once, as in training."""

    label = _WHAT
    names: Sequence[str] = ()


_LABEL = _Measured()


class GroupSpeed(NamedTuple):
    """A collective of B bytes (of the whole bucket) lasts ``latency_s + s_per_byte * B``."""

    latency_s: float
    s_per_byte: float

    def __str__(self) -> str:
        return f"{self.latency_s * 1e6:.0f} µs + {1e-9 / self.s_per_byte:.2f} GB/s"


def measure_reduction(collectives: Collectives, dtype: torch.dtype) -> GroupSpeed:
    """Measure reductions of buckets whose gradients travel in ``dtype``; collective, for several ranks."""

    def reduce(full: Tensor) -> Work:
        return collectives.move(full, Placement.PARTIAL, Placement.SHARDED, _LABEL, Purpose.CONTROL, _drop)

    return _measure(collectives, dtype, reduce)


def measure_gathers(collectives: Collectives, dtype: torch.dtype) -> GroupSpeed:
    """Measure gathers of weights in ``dtype``; collective, for several ranks."""

    def gather(full: Tensor) -> Work:
        return collectives.move(full, Placement.SHARDED, Placement.REPLICATED, _LABEL, Purpose.CONTROL)

    return _measure(collectives, dtype, gather)


def fit(times: Sequence[Sequence[float]], sizes: tuple[int, int]) -> GroupSpeed:
    """Return the fit of every rank's seconds, of the smaller and the larger size in turn ([Note: Fit])."""
    slowest = [max(each) for each in zip(*times, strict=True)]
    small, large = min(slowest[::2]), min(slowest[1::2])
    s_per_byte = max((large - small) / (sizes[1] - sizes[0]), LEAST_S_PER_BYTE)
    return GroupSpeed(max(small - s_per_byte * sizes[0], LEAST_LATENCY_S), s_per_byte)


def _measure(collectives: Collectives, dtype: torch.dtype, begin: Callable[[Tensor], Work]) -> GroupSpeed:
    mesh = collectives.mesh
    least = mesh.ranks * mesh.platform.alignment // dtype.itemsize
    counts = (least, max(LARGE_BYTES // dtype.itemsize // least, 2) * least)
    tensors = [torch.zeros(count, dtype=dtype, device=mesh.device) for count in counts]
    seconds: list[float] = []
    for attempt in range(TRIES + 1):
        for full in tensors:
            mesh.platform.synchronize()
            start = time.perf_counter()
            begin(full).wait()
            mesh.platform.synchronize()
            if attempt:
                seconds.append(time.perf_counter() - start)
    rows = collectives.exchange(torch.tensor(seconds, dtype=torch.float64).view(torch.uint8), _WHAT)
    times = rows.contiguous().view(torch.float64).view(mesh.ranks, -1).tolist()
    return fit(times, (counts[0] * dtype.itemsize, counts[1] * dtype.itemsize))


def _drop(terms: Sequence[Tensor]) -> None:
    """Drop the measured sum."""
