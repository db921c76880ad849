"""How ``offload_gpu.py`` spends its time: who runs beside whom, whose turn it is, and how large a model may become.

Owns: groups by memory, rounds that end in time and go on without those that fail, the search for the largest model.
Knows nothing of ratios and reports.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.device import LEAST_ROUNDS
from benchmarks.offload_variants import BASES, COMPETITORS
from benchmarks.offload_workers import RATES, Failed, Job, OutOfTime, Worker
from benchmarks.workload import Setting

WARMUP = 2
PROCESS_BYTES = 4 << 30
"""What a process takes beside model state: libraries, the driver, buffers."""
ATTEMPT_STEPS = 2


@dataclass(frozen=True)
class Conditions:
    """What all processes of a run have in common. end: of ``time.monotonic``; nothing runs beyond it."""

    device: str
    threads: int
    floor: float
    end: float

    def start(self, name: str, setting: Setting) -> Worker:
        """A process for a competitor."""
        return Worker(Job(name, setting, self.device, self.threads, self.floor))

    def rates(self, setting: Setting) -> dict[str, float]:
        """What the machine can do, by a process of its own."""
        worker = self.start(RATES, setting)
        try:
            return worker.ask(RATES, self.end)
        finally:
            worker.close()


def groups_of(names: Sequence[str], setting: Setting, free: float) -> list[list[str]]:
    """Who is alive at the same time, in ``free`` bytes of host memory: as many as fit, with the base of their ratio.

    Those with their weights in host memory are groups of their own. Who does not fit beside another is alone.
    """

    def fits(group: Sequence[str]) -> bool:
        needed = sum(COMPETITORS[name].host_bytes * setting.parameters() + PROCESS_BYTES for name in group)
        return needed <= free

    groups = []
    for away, base in BASES.items():
        side = [name for name in names if COMPETITORS[name].weights_away is away]
        first = [base] if base in side else []
        group: list[str] = list(first)
        for name in (name for name in side if name != base):
            if fits([*group, name]):
                group.append(name)
                continue
            groups += [group] if group else []
            group = [*first, name] if fits([*first, name]) else [name]
        groups += [group] if group else []
    return groups


@dataclass(frozen=True)
class Found:
    """What came of a group. seconds: by name and round, whole rounds that pair up · answers: each one's last."""

    seconds: dict[str, list[float]]
    losses: dict[str, list[float]]
    answers: dict[str, dict[str, Any]]
    failed: dict[str, str]


def run_group(names: Sequence[str], setting: Setting, conditions: Conditions, rounds: int, until: float) -> Found:
    """Start a process for each, have them built one after the other, and let them take turns.

    Rounds end after ``rounds``, or past ``until`` once there are three; past the run's end they just end.
    """
    found = Found({}, {}, {}, {})
    alive = {name: conditions.start(name, setting) for name in names}
    try:
        for name, worker in list(alive.items()):
            try:
                found.answers[name] = worker.ask("build", conditions.end)
                found.seconds[name], found.losses[name] = [], []
            except Failed as error:
                found.failed[name] = str(error)
                alive.pop(name)
        for number in range(WARMUP + rounds):
            if not alive or not _round(number, alive, found, conditions.end):
                break
            if time.monotonic() > until and number + 1 >= WARMUP + LEAST_ROUNDS:
                break
    finally:
        for worker in alive.values():
            worker.close()
    whole = min((len(found.seconds[name]) for name in found.seconds if name not in found.failed), default=0)
    kept = {name: taken[:whole] for name, taken in found.seconds.items() if name not in found.failed and whole}
    late = {name: "the time was over" for name in found.seconds if name not in found.failed and not whole}
    return replace(found, seconds=kept, failed=found.failed | late)


def _round(number: int, alive: dict[str, Worker], found: Found, end: float) -> bool:
    """A step of each, beginning with another one than the round before. Whether there is time for more."""
    names = list(alive)
    first = number % len(names)
    for name in [*names[first:], *names[:first]]:
        try:
            answer = alive[name].ask("step", end)
        except OutOfTime:
            return False
        except Failed as error:
            found.failed[name] = str(error)
            alive.pop(name)
            continue
        found.losses[name].append(answer["loss"])
        found.answers[name] |= answer["memory"]
        if number >= WARMUP:
            found.seconds[name].append(answer["seconds"])
    return True


def attempt(name: str, setting: Setting, conditions: Conditions) -> dict[str, Any]:
    """Whether a competitor trains a model of ``setting``, in a process of its own: a row. OutOfTime: nobody knows."""
    row: dict[str, Any] = {"layers": setting.layers, "parameters": setting.parameters(), "trains": False}
    worker = conditions.start(name, setting)
    try:
        row |= worker.ask("build", conditions.end)
        losses = []
        for _ in range(ATTEMPT_STEPS):
            answer = worker.ask("step", conditions.end)
            losses.append(answer["loss"])
            row |= {"last_step_s": answer["seconds"], "losses": losses, **answer["memory"]}
        row["trains"] = all(map(math.isfinite, losses)) and losses[-1] != losses[0]
        if not row["trains"]:
            row["failed"] = f"expected finite losses that change on one batch, got {losses}"
    except OutOfTime:
        raise
    except Failed as error:
        row["failed"] = str(error)
    finally:
        worker.close()
    return row


def largest(try_layers: Callable[[int], dict[str, Any]], first: int, most: int, until: float) -> dict[str, Any]:
    """Double the layers from ``first`` until a model does not train, then look halfway, to a quarter of what does.

    Ends past ``until`` or above ``most``: the result then has no ``limit``, the least number of layers that failed.
    """
    best, limit, layers = 0, 0, first
    tried: list[dict[str, Any]] = []
    ended = "the limit was found"
    while layers <= most and time.monotonic() <= until:
        try:
            row = try_layers(layers)
        except OutOfTime as error:
            ended = f"{layers} layers: {error}"
            break
        tried.append(row)
        if row["trains"]:
            best = layers
        else:
            limit = layers
        if limit and limit - best <= max(1, best // 4):
            break
        layers = (best + limit) // 2 if limit else 2 * layers
    else:
        ended = "the time was over" if layers <= most else f"more than {most} layers were not tried"
    found = [row for row in tried if row["trains"]]
    return {
        "largest": max(found, key=lambda row: int(row["layers"]), default=None),
        "limit": limit or None,
        "ended": ended,
        "tried": tried,
    }
