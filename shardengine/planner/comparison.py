"""Compares a plan with its run: the memory that the run takes, and the excess over the plan.

Owns: the measurement, the sentence on an excess. Must not know: the content of a run, who prints.

[Note: Measured peaks] On a GPU, the peak is that of CUDA's allocator. On a CPU there is no such number: the allocator
reports none, and resident memory also holds libraries and blocks that were freed and kept. So on a CPU, one step may be
``watched``: storages are counted from outside, as in a dry run, and the pool's buffers count in full. This costs some
microseconds per operation, in that step alone. If no peak is known, the memory between steps is compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from shardengine.engine import Engine
from shardengine.planner.dry_engine import (
    ACTIVATIONS,
    BACKWARD,
    BUFFERS,
    FORWARD,
    MODEL,
    STATES,
    STEP,
    WEIGHTS,
    bytes_by_kind,
)
from shardengine.planner.hardware import show_bytes
from shardengine.planner.ledger import MemoryLedger, highest
from shardengine.planner.memory_plan import Plan

TOLERANCE = 0.03
"""A run may exceed its plan by this part without a notice."""
SETTLED_STEPS = 12
"""After so many steps a rank has waited for the others everywhere, and makes no further buffers."""
_POOLED = "pooled"
_UNNAMED = {FORWARD: ACTIVATIONS, BACKWARD: ACTIVATIONS, STEP: BUFFERS}
"""Phase → the kind of storages that were made in it without a name."""


def line_of(found: Plan | str) -> str:
    """Return one line: the most that a plan needs of each tier, or the reason that there is no plan."""
    if isinstance(found, str):
        return f"none: {found}"
    tiers = []
    for tier in found.tiers:
        has = "" if tier.has is None else f" of {show_bytes(tier.has)}"
        tiers.append(f"{tier.name} {show_bytes(tier.need)}{has}{'' if tier.fits else ' (does not fit)'}")
    return f"{', '.join(tiers)} at most per rank"


@dataclass
class Taken:
    """The memory that a run takes of this rank's device.

    peak: bytes at most; None if not counted · at_peak: by kind, if counted · rests: between steps, by kind.
    """

    peak: int | None = None
    at_peak: Mapping[str, int] = field(default_factory=dict)
    rests: Mapping[str, int] = field(default_factory=dict)


@contextmanager
def watched(engine: Engine) -> Iterator[Taken]:
    """Count the memory of the step inside, on a CPU; read the result after the block.

    See the note at the top of the file.
    """
    ledger, pool, found = MemoryLedger(), engine._core.pool, Taken()

    def in_phase(phase: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def inside(*args: Any, **kwargs: Any) -> Any:
            ledger.begin(phase)
            try:
                return call(*args, **kwargs)
            finally:
                ledger.begin(FORWARD)

        return inside

    def take(*args: Any, **kwargs: Any) -> Tensor:
        return ledger.name(taken(*args, **kwargs), _POOLED)

    taken = pool.acquire
    ledger.begin(FORWARD)
    with (
        patch.object(engine, "backward", in_phase(BACKWARD, engine.backward)),
        patch.object(engine, "step", in_phase(STEP, engine.step)),
        patch.object(pool, "acquire", take),
        ledger,
    ):
        for what, _, tensor in engine._core.kept():
            ledger.name(tensor, what)
        yield found
        for what, _, tensor in engine._core.kept():
            ledger.name(tensor, what)
        moments, _ = ledger.moments(lambda kind: kind != _POOLED, _UNNAMED)
    parts = bytes_by_kind(highest(moments, tuple(_UNNAMED)))
    parts[BUFFERS] += pool.device_bytes + engine._core.tiers.buffer_bytes
    found.peak, found.at_peak, found.rests = parts.total(), parts, rests_of(engine)


def taken_by(engine: Engine, watched: Taken | None = None) -> Taken:
    """Return the memory that the run of ``engine`` has taken up to now. watched: a step of it, if one was counted."""
    if watched is not None and watched.peak is not None:
        return watched
    on_gpu = engine.device.type == "cuda"
    return Taken(torch.cuda.max_memory_allocated(engine.device) if on_gpu else None, {}, rests_of(engine))


def rests_of(engine: Engine) -> Counter[str]:
    """Return the bytes on the device between two steps, by kind; on a CPU, all bytes in memory."""
    core = engine._core
    states = Counter() if engine.optimizer is None else engine.optimizer.state_bytes()
    found = {WEIGHTS: core.weight_bytes(), STATES: states, BUFFERS: core.reducer.gradient_bytes()}
    tiers = ("device",) if core.mesh.platform.has_own_memory else ("device", "cpu")
    parts = Counter({kind: sum(bytes_[tier] for tier in tiers) for kind, bytes_ in found.items()})
    parts[BUFFERS] += core.pool.device_bytes + (0 if core.mesh.platform.has_own_memory else core.tiers.buffer_bytes)
    return parts


@dataclass(frozen=True)
class Comparison:
    """``planned`` and ``measured`` bytes of a rank's device.

    when: "at most" or "between steps" · beyond: measured minus planned, by kind.
    """

    when: str
    planned: int
    measured: int
    beyond: Mapping[str, int]

    @property
    def exceeds(self) -> bool:
        """Whether the excess is more than ``TOLERANCE``."""
        return self.measured > self.planned * (1 + TOLERANCE)

    def line(self) -> str:
        """Return both numbers, for people."""
        more = round(self.measured / max(1, self.planned) - 1, 3) + 0.0
        return f"{show_bytes(self.planned)} planned, {show_bytes(self.measured)} measured {self.when} ({more:+.1%})"

    def sentence(self) -> str:
        """Return the excess and the kind that contributes most to it; "" if the plan was kept."""
        if not self.exceeds:
            return ""
        part, more = max(self.beyond, key=lambda kind: self.beyond[kind]), self.measured - self.planned
        why = "; a plan is of micro-batches of the shape that it was given" if part == ACTIVATIONS else ""
        return (
            f"the plan was exceeded by {show_bytes(more)} ({more / max(1, self.planned):.0%}): {part} have "
            f"{show_bytes(self.beyond[part])} more than planned{why}"
        )


def compare(found: Plan, taken: Taken) -> Comparison:
    """Compare the planned bytes of a rank's device with those of its run; without a peak, the bytes between steps.

    If the peak is known but not its kinds, the excess that other kinds do not explain counts as activations.
    """
    rests = _more(taken.rests, found.device.at_rest)
    if taken.peak is None:
        kinds = (WEIGHTS, STATES, BUFFERS)
        planned = sum(found.device.at_rest.get(kind, 0) for kind in kinds)
        return Comparison("between steps", planned, sum(taken.rests[kind] for kind in kinds), rests)
    planned = found.device.peak
    if taken.at_peak:
        return Comparison("at most", planned, taken.peak, _more(taken.at_peak, found.device.at_peak))
    planned = found.device.need  # an allocator's peak covers the whole run
    others = sum(rests.values())
    return Comparison("at most", planned, taken.peak, {**rests, ACTIVATIONS: taken.peak - planned - others})


def _more(taken: Mapping[str, int], planned: Mapping[str, int]) -> dict[str, int]:
    """Return measured minus planned, by kind.

    Storages that exist before a step and are not kept, such as a batch, count as activations.
    """
    both = [Counter(each) for each in (taken, planned)]
    for each in both:
        each[ACTIVATIONS] += each[MODEL]
    kinds = [kind for kind in (WEIGHTS, STATES, BUFFERS, ACTIVATIONS) if kind != ACTIVATIONS or kind in taken]
    return {kind: both[0][kind] - both[1][kind] for kind in kinds}
