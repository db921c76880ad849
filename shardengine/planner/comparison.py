"""A plan beside the run for which it was made: what that takes, and what was not foreseen.

Owns: what is measured, the sentence on what was exceeded. Must not know: what a run does, who prints.

[Note: What is measured] On a GPU the peak is that of CUDA's allocator. A CPU's allocator tells none, and resident
memory has in it what libraries take and what was freed and kept. So there one step may be ``watched``: counted from
outside as a dry run is, with the pool's buffers in full. That costs some microseconds per operation, in this step
alone. Where no peak is known, what rests between steps is compared.
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
from shardengine.planner.ledger import Ledger, highest
from shardengine.planner.memory_plan import Plan

TOLERANCE = 0.03
"""The part of a plan by which a run may exceed it without a word."""
SETTLED_STEPS = 12
"""Steps by which a rank has waited for others everywhere, so that no buffer is made any more."""
_POOLED = "pooled"
_UNNAMED = {FORWARD: ACTIVATIONS, BACKWARD: ACTIVATIONS, STEP: BUFFERS}
"""What was made in a phase, and nobody has named, is."""


def line_of(found: Plan | str) -> str:
    """Of a plan, or of why there is none, in one line: what each tier needs at most."""
    if isinstance(found, str):
        return f"none: {found}"
    tiers = []
    for tier in found.tiers:
        has = "" if tier.has is None else f" of {show_bytes(tier.has)}"
        tiers.append(f"{tier.name} {show_bytes(tier.need)}{has}{'' if tier.fits else ' (does not fit)'}")
    return f"{', '.join(tiers)} at most per rank"


@dataclass
class Taken:
    """What a run takes of this rank's device. peak: in bytes, at most; None: nobody has counted · at_peak: of what it
    consists, by kind, where that was counted · rests: between steps, by kind."""

    peak: int | None = None
    at_peak: Mapping[str, int] = field(default_factory=dict)
    rests: Mapping[str, int] = field(default_factory=dict)


@contextmanager
def watched(engine: Engine) -> Iterator[Taken]:
    """Count what the step inside takes, on a CPU ([Note: What is measured]); read it afterwards."""
    ledger, pool, found = Ledger(), engine._core.pool, Taken()

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
    """What the run of ``engine`` has taken up to now. watched: a step of it, where one was counted."""
    if watched is not None and watched.peak is not None:
        return watched
    on_gpu = engine.device.type == "cuda"
    return Taken(torch.cuda.max_memory_allocated(engine.device) if on_gpu else None, {}, rests_of(engine))


def rests_of(engine: Engine) -> Counter[str]:
    """What is on the device between two steps, by kind; on a CPU all that is in memory."""
    core = engine._core
    states = Counter() if engine.optimizer is None else engine.optimizer.state_bytes()
    found = {WEIGHTS: core.weight_bytes(), STATES: states, BUFFERS: core.reducer.gradient_bytes()}
    tiers = ("device",) if core.mesh.platform.has_own_memory else ("device", "cpu")
    parts = Counter({kind: sum(bytes_[tier] for tier in tiers) for kind, bytes_ in found.items()})
    parts[BUFFERS] += core.pool.device_bytes + (0 if core.mesh.platform.has_own_memory else core.tiers.buffer_bytes)
    return parts


@dataclass(frozen=True)
class Comparison:
    """``planned`` and ``measured`` bytes of a rank's device. when: these are there · beyond: measured less planned, by
    kind."""

    when: str
    planned: int
    measured: int
    beyond: Mapping[str, int]

    @property
    def exceeds(self) -> bool:
        """By more than ``TOLERANCE``."""
        return self.measured > self.planned * (1 + TOLERANCE)

    def line(self) -> str:
        """Both, for people."""
        more = round(self.measured / max(1, self.planned) - 1, 3) + 0.0
        return f"{show_bytes(self.planned)} planned, {show_bytes(self.measured)} measured {self.when} ({more:+.1%})"

    def sentence(self) -> str:
        """By how much the plan was exceeded, and which part has the most more; "" where it was kept."""
        if not self.exceeds:
            return ""
        part, more = max(self.beyond, key=lambda kind: self.beyond[kind]), self.measured - self.planned
        why = "; a plan is of micro-batches of the shape that it was given" if part == ACTIVATIONS else ""
        return (
            f"the plan was exceeded by {show_bytes(more)} ({more / max(1, self.planned):.0%}): {part} have "
            f"{show_bytes(self.beyond[part])} more than planned{why}"
        )


def compare(found: Plan, taken: Taken) -> Comparison:
    """What was planned for a rank's device beside what its run took; where no peak is known, what rests.

    Where a peak is known and not of what it consists, activations are what the other kinds do not explain.
    """
    rests = _more(taken.rests, found.device.at_rest)
    if taken.peak is None:
        kinds = (WEIGHTS, STATES, BUFFERS)
        planned = sum(found.device.at_rest.get(kind, 0) for kind in kinds)
        return Comparison("between steps", planned, sum(taken.rests[kind] for kind in kinds), rests)
    planned = found.device.peak
    if taken.at_peak:
        return Comparison("at most", planned, taken.peak, _more(taken.at_peak, found.device.at_peak))
    planned = found.device.need  # an allocator's peak is that of a whole life
    others = sum(rests.values())
    return Comparison("at most", planned, taken.peak, {**rests, ACTIVATIONS: taken.peak - planned - others})


def _more(taken: Mapping[str, int], planned: Mapping[str, int]) -> dict[str, int]:
    """By kind. What is there before a step and nobody keeps, as a batch, is with the activations."""
    both = [Counter(each) for each in (taken, planned)]
    for each in both:
        each[ACTIVATIONS] += each[MODEL]
    kinds = [kind for kind in (WEIGHTS, STATES, BUFFERS, ACTIVATIONS) if kind != ACTIVATIONS or kind in taken]
    return {kind: both[0][kind] - both[1][kind] for kind in kinds}
