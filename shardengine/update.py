"""The update of one bucket, on whichever device its tier has it stepped. Owns: how far an update is.

Must not know: param_groups, the norm, the order of buckets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardengine import kernels
from shardengine.bucket import MASTER
from shardengine.ddp import GradientBucket
from shardengine.errors import InternalError
from shardengine.kernels import Noise, Rule, Spans
from shardengine.transit import Transit

_UNDER_WAY = 2
"""Buckets whose weights are on their way while the next one is stepped."""


@dataclass
class Update:
    """The update of the window's step: how far it is on this rank, so that ``engine.reset()`` can finish it.

    max_norm: to clip this one to, None for the configured value · scalars, on the device: "factor", what gradients are
    multiplied with, and "skip", whether it is left out because the norm is not finite; None: nothing, no · begun: the
    step counts of what was ``touched`` have advanced · stepped: whole buckets that are done · torn: inside of a
    bucket's kernels · applied: what ``conclude`` found · lost: cannot be finished, a checkpoint must be loaded ·
    quiet: ``reset()`` could not finish it; no collective is under way, so that either may be tried
    """

    max_norm: float | None = None
    scalars: dict[str, Tensor | None] = field(default_factory=lambda: {"factor": None, "skip": None})
    begun: bool = False
    touched: frozenset[int] = frozenset()
    applied: bool | None = None
    stepped: int = 0
    torn: bool = False
    lost: bool = False
    quiet: bool = False


def step_bucket(
    state: GradientBucket,
    parts: Sequence[tuple[Rule, Noise | None, Spans]],
    update: Update,
    way: Transit,
    *,
    whole: bool,
) -> None:
    """Step what rests of a bucket, part by part, where its shelf is taken; then its weights are where they rest.

    parts: the spans of one group and step count each · way: of weights that rest on another device than the shelf is
    stepped on · whole: every rank steps all of it.
    """
    bucket, gradient = state.bucket, state.gradient
    if gradient is None:
        raise InternalError(f"the bucket of {state.names} is stepped before its gradient is complete")
    device = bucket.shelf.device
    flats = dict(bucket.shelf.take())
    flats["weight"] = flats.pop(MASTER) if bucket.has_master else bucket.take_weights(whole=whole).to(device)
    flats["gradient"] = gradient.to(device)
    target = bucket.begin_weights() if bucket.has_master else None
    low = way.buffer(target, device) if target is not None and bucket.is_stepped_apart else target
    copied = low is not None and flats["weight"].dtype is not torch.float32
    if low is not None and not copied:
        flats["low"] = low
    scalars = {name: None if value is None else value.to(device) for name, value in update.scalars.items()}
    for rule, noise, spans in parts:
        update.torn = True
        kernels.update(flats, spans, rule, noise=noise, **scalars)
    if low is not None and copied:  # what was rounded at random must not be rounded again
        low.copy_(flats["weight"])
    if target is not None and low is not None and (low is not target or bucket.rest is not None):
        changed = not is_set(scalars["skip"])  # only here does the host look at it
        if low is not target:
            written = [span for _, _, spans in parts for span in spans] if changed else []
            ends = way.send([(low[s.start : s.end], target[s.start : s.end]) for s in written], low)
            for end in ends:
                (end.wait if bucket.shelf.away else end.wait_on_host)()
            way.settle(_UNDER_WAY)
        bucket.end_weights(changed=changed)
    if target is None:
        bucket.put_weights(flats["weight"])
    bucket.shelf.put()


def is_set(flag: Tensor | None) -> bool:
    """Whether a flag on a device is set; None: no."""
    return flag is not None and bool(flag)
