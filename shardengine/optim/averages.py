"""An exponential moving average of the weights, kept by element beside the optimizer's state.

Owns: its arithmetic. Must not know: buckets, where it is kept, when it is shown.

[Note: Averages] Averaged is what is stepped: the master weight where there is one. Per element, in fp32, each operation
rounded on its own:

    before a parameter's first step     e = w
    after every step that is applied    e = e + (w - e) · (1 - decay)

of every parameter that was ever stepped, used in this step or not. So the average of a weight that does not change any
more ends as that weight, and nothing is kept of one that was never stepped: its average is the weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from shardengine.kernels import Spans

AVERAGE = "ema"
"""The name of averages among what is kept of each element."""
_AT_ONCE = 2**20
"""Elements for which scratch memory is taken."""


class Begin:
    """The average of elements becomes their weight."""

    def __call__(
        self, flats: Mapping[str, Tensor], spans: Spans, *, factor: Tensor | None = None, skip: Tensor | None = None
    ) -> None:
        """See ``Action``. Where the step is skipped it does so, too: a parameter's first one is still to come."""
        for span in spans:
            flats[AVERAGE][span.start : span.end].copy_(flats["weight"][span.start : span.end])


@dataclass(frozen=True)
class Advance:
    """A step was taken: averages follow the weights."""

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
    """Averages and weights change places."""

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
