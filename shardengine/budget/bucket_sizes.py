"""Sizes of buckets if the config says "auto": one formula each, of a fit of the group (docs/limits.md).

Must not know: how a group is measured. Sizes change time and memory, but no bit of a result.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal

from shardengine.comm import GroupSpeed
from shardengine.config import Config, Source
from shardengine.errors import InternalError

HOST_S = 1e-4
"""Seconds that a bucket costs in Python around its collectives and kernels, as measured (docs/limits.md, "Host
time")."""
HIDDEN_BY_CPU = 0.125
"""Part of a reduction's time that computation hides if the same processors do both (benchmarks/ddp.py, overlap)."""
LEAST_ELEMENTS, MOST_ELEMENTS = 262_144, 50_000_000
"""Limits for a bucket. Three are in flight at once, so the largest take 3·(2·g + 8/N)·50e6 bytes (docs/limits.md)."""
ALONE = 12_500_000
"""The default, for one rank, because nothing can be measured."""
_STEP = 65_536
_REDUCE, _PREFETCH = "reduce_bucket_size", "stage3_prefetch_bucket_size"


@dataclass(frozen=True)
class BucketSizes:
    """The sizes that replace "auto", in elements; None: the config has a number.

    reduction, gather: the fits that they were computed from, None: there is one rank, and the default is used.
    """

    reduce: int | None = None
    prefetch: int | None = None
    reduction: GroupSpeed | None = None
    gather: GroupSpeed | None = None

    def put_into(self, config: Config) -> Config:
        """Return ``config`` with numbers in the place of "auto"."""
        found = {_REDUCE: self.reduce, _PREFETCH: self.prefetch}
        sizes = {name: size for name, size in found.items() if size is not None}
        if not sizes:
            return config
        sources: dict[str, Source] = {f"zero_optimization.{name}": "derived" for name in sizes}
        zero = dataclasses.replace(config.zero_optimization, **sizes)  # type: ignore[arg-type]
        return dataclasses.replace(config, zero_optimization=zero, sources={**config.sources, **sources})

    def sentences(self) -> list[str]:
        """Return the chosen sizes and the reasons, as sentences for people."""
        rows = (
            (_REDUCE, self.reduce, "reductions", self.reduction),
            (_PREFETCH, self.prefetch, "gathers", self.gather),
        )
        return [
            f"{name} auto: {size:,} elements ({f'{what} take {speed}' if speed else 'the default, of one rank'})"
            for name, size, what, speed in rows
            if size is not None
        ]


def bucket_elements(speed: GroupSpeed, elements: int, itemsize: int, *, apart: bool = True) -> int:
    """Return the cheapest bucket size for ``elements`` whose gradients are sent in ``itemsize`` bytes each.

    n = S / B buckets cost n latencies. Computation hides the part f of the transfers, except that of the last bucket,
    so f·β·B are lost: the sum is smallest at B = √(S·α/(f·β)). The flag is True if other processors send than compute,
    which hides all.
    """
    latency, hidden = speed.latency_s + HOST_S, 1.0 if apart else HIDDEN_BY_CPU
    best = math.sqrt(elements * itemsize * latency / (hidden * speed.s_per_byte)) / itemsize
    return _rounded(min(max(best, LEAST_ELEMENTS), MOST_ELEMENTS, max(elements, LEAST_ELEMENTS)))


def prefetch_elements(speed: GroupSpeed, itemsize: int) -> int:
    """Return as many elements of weights, of ``itemsize`` bytes, as the group transfers during one latency: α/β bytes.

    One unit is gathered ahead in any case; several are if units are so small that latencies would follow each other.
    """
    return min(_rounded((speed.latency_s + HOST_S) / speed.s_per_byte / itemsize), MOST_ELEMENTS)


def settled(size: int | Literal["auto"]) -> int:
    """Return a size after "auto" was replaced."""
    if size == "auto":
        raise InternalError('a bucket size is still "auto" after initialize')
    return size


def _rounded(elements: float) -> int:
    """Return a multiple of 65,536, so that fits which differ little choose the same."""
    return max(round(elements / _STEP), 1) * _STEP
