"""An exponential moving average of the weights, kept by element with the optimizer's state.

Owns: its arithmetic. Must not know: buckets, where the averages are kept, when they are shown.

[Note: Averages] The average is of the tensor that is stepped: the master weight w if there is one, otherwise the
weight. Per element, in fp32, each operation rounded separately:

    before a parameter's first step     e = w
    after every step that is applied    e = e + (w - e) · (1 - decay)

This holds for every parameter that was ever stepped, used in this step or not. So the average of a weight that no
longer changes converges to that weight. Nothing is kept of a parameter that was never stepped: its average is its
weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from shardengine.kernels import Spans

AVERAGE = "ema"
"""The name of averages among the states of an element."""
_AT_ONCE = 2**20
"""Elements per chunk; bounds the scratch memory."""


class BeginAverage:
    """Set the average of elements to their weights."""

    def __call__(
        self, flats: Mapping[str, Tensor], spans: Spans, *, factor: Tensor | None = None, skip: Tensor | None = None
    ) -> None:
        """See ``Action``. It ignores ``skip``: if the step is skipped, the parameter's first step is still to come."""
        for span in spans:
            flats[AVERAGE][span.start : span.end].copy_(flats["weight"][span.start : span.end])


@dataclass(frozen=True)
class Advance:
    """Move the averages towards the weights after a step."""

    decay: float

    def __call__(
        self, flats: Mapping[str, Tensor], spans: Spans, *, factor: Tensor | None = None, skip: Tensor | None = None
    ) -> None:
        """See ``Action``."""
        part = torch.tensor(1 - self.decay, dtype=torch.float32).item()
        for span in spans:
            cuts = (flat[span.start : span.end].split(_AT_ONCE) for flat in (flats[AVERAGE], flats["weight"]))
            for average, weight in zip(*cuts, strict=True):
                way = (weight - average).mul_(part)
                if skip is not None:  # the device decides
                    way = way.masked_fill_(skip, 0.0)
                average.add_(way)


class Swap:
    """Exchange averages and weights."""

    def __call__(
        self, flats: Mapping[str, Tensor], spans: Spans, *, factor: Tensor | None = None, skip: Tensor | None = None
    ) -> None:
        """See ``Action``."""
        for span in spans:
            cuts = (flat[span.start : span.end].split(_AT_ONCE) for flat in (flats[AVERAGE], flats["weight"]))
            for average, weight in zip(*cuts, strict=True):
                before = average.clone()
                average.copy_(weight)
                weight.copy_(before)
            if "low" in flats:
                flats["low"][span.start : span.end].copy_(flats["weight"][span.start : span.end])
