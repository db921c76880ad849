"""Plans a deep model by dry runs of three models with fewer layers (layers: [Note: Fewer layers]).

Must not know: how a run is counted, the content of a plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from shardengine.planner.dry_engine import ACTIVATIONS, BACKWARD, FORWARD, INITIALIZE, STEP, DryRun
from shardengine.planner.layers import TOLERANCE, Layers, carried_on, line
from shardengine.planner.ledger import MemoryMoment, highest

_STEP = (FORWARD, BACKWARD, STEP)
_DISK = "measured_disk_bytes"
_BUCKETS = 8
"""A layer must fill at least so many buckets. Then parameters fill buckets alike at each depth, and the pool has the
same buffers."""


def deep_run(layers: Layers, run: Callable[[int], DryRun], begin: Callable[[], DryRun], bucket: int) -> DryRun | None:
    """Derive the run of a model with all ``layers`` from runs of shorter ones. None: the whole model has to run.

    The result is None if the shorter models do not run or do not lie on a line, or if the whole model's forward keeps
    something else. run: runs a depth · begin: runs a forward of the whole model and no step · bucket: elements.
    """
    depths = layers.depths()
    if depths is None or layers.parameters < _BUCKETS * bucket:
        return None
    try:
        first, second, third = (run(depth) for depth in depths)
    except Exception:  # its code may count on all layers; other errors come up in the whole model
        return None
    if not _on_a_line(_carried((first, second), depths[:2], layers, depths[2]), third, layers, depths):
        return None
    found = _carried((second, third), depths[1:], layers, layers.count)
    begun = begin()
    if abs(_kept(begun) - _kept(found)) > TOLERANCE * found.peak.bytes:
        return None
    return replace(
        found,
        device=_with_start(begun.device, found.device),
        host=_with_start(begun.host, found.host),
        parameters=begun.parameters,
        seconds=first.seconds + second.seconds + third.seconds + begun.seconds,
        depths=depths,
        layers=layers.count,
        tape_before=second.tape,
    )


def quick_run(layers: Layers, run: Callable[[int], DryRun]) -> DryRun | None:
    """Derive the run from two shorter models alone, without checks. The result has no moments of initialize."""
    depths = layers.depths()
    if depths is None:
        return None
    try:
        first, second = run(depths[0]), run(depths[1])
    except Exception:  # as in ``deep_run``
        return None
    found = _carried((first, second), depths[:2], layers, layers.count)
    seconds = first.seconds + second.seconds
    return replace(
        found,
        device=_with_start([], found.device),
        host=_with_start([], found.host),
        seconds=seconds,
        depths=depths[:2],
        layers=layers.count,
        tape_before=first.tape,
    )


def _kept(run: DryRun) -> int:
    """Return the largest number of bytes in forward that the model's own code holds."""
    return max((each.alive.get(ACTIVATIONS, 0) for each in run.device if each.phase == FORWARD), default=0)


def _with_start(begun: Sequence[MemoryMoment], found: Sequence[MemoryMoment]) -> list[MemoryMoment]:
    return [*(each for each in begun if each.phase == INITIALIZE), *(each for each in found if each.phase in _STEP)]


def _carried(runs: Sequence[DryRun], at: Sequence[int], layers: Layers, depth: int) -> DryRun:
    early, late = runs
    near = (at[0], at[1])

    def moments(lists: tuple[Sequence[MemoryMoment], Sequence[MemoryMoment]]) -> list[MemoryMoment]:
        return carried_on(lists, near, layers, depth)

    memory = dict(late.memory)
    memory[_DISK] = line(near, (early.memory[_DISK], late.memory[_DISK]), depth)
    return replace(
        late,
        device=moments((early.device, late.device)),
        host=moments((early.host, late.host)),
        at_rest=moments(([early.at_rest], [late.at_rest]))[0],
        host_at_rest=moments(([early.host_at_rest], [late.host_at_rest]))[0],
        memory=memory,
    )


def _on_a_line(said: DryRun, found: DryRun, layers: Layers, depths: Sequence[int]) -> bool:
    """Whether the moments predicted for the third depth are close enough to those of its run to hold for all layers."""
    farther = (layers.count - depths[2]) / (depths[2] - depths[1])
    grown = layers.count / depths[2]

    def off(mine: MemoryMoment, real: MemoryMoment) -> float:
        return abs(mine.bytes - real.bytes) * farther

    pairs = [(said.at_rest, found.at_rest), (said.host_at_rest, found.host_at_rest)]
    for mine, real in ((said.device, found.device), (said.host, found.host)):
        pairs += [(highest(mine, (phase,)), highest(real, (phase,))) for phase in _STEP]
    return all(off(mine, real) <= TOLERANCE * grown * real.bytes for mine, real in pairs)
