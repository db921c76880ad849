"""The rank processes of ``checkpoint.py``: what every rank does in a round, and how long it takes.

Owns: the order of a round, the clock, the cold cache, and the proof that what was loaded is what was saved. Knows
nothing of ratios and reports.

A measurement has a key: ``write WAY`` and ``read WAY`` (``disk.py``), ``copy``, ``block NAME`` (the call of an
asynchronous save), ``save NAME`` (until it is on the disk on all ranks), ``load NAME``.
"""

from __future__ import annotations

import copy
import ctypes
import gc
import math
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from benchmarks.disk import KEPT_STATES, PlainFile, Way, bytes_in, drop_cache, resident
from benchmarks.peers import import_deepspeed
from benchmarks.ranks import collected, forget_peak, joined, leave, rss_bytes
from benchmarks.savers import READERS, SAVERS
from benchmarks.workload import Setting, Variant, batch_of, make_model

STATE_BYTES = 12
"""Per parameter: a weight and two moments in fp32."""
LOSS_TOLERANCE = 1e-5
"""A weight that lies elsewhere in memory may give another last bit; a lost optimizer state is far above this."""
PROOF_STEPS = 2
KEPT_WAYS = 3
"""How many plain ways of writing, and of reading, are measured in every round after the warm-up."""
T = TypeVar("T")


@dataclass(frozen=True)
class Plan:
    """What one group of ranks does: ``warmup`` and then ``rounds`` measured rounds of all ``savers``.

    ways: how to write and read plainly · folder: where the ranks meet and leave results · place: where they write what
    is measured.
    """

    setting: Setting
    savers: tuple[str, ...]
    ways: tuple[Way, ...]
    rounds: int
    warmup: int
    folder: str
    place: str


def state_bytes(setting: Setting) -> int:
    """What all ranks together must save."""
    return STATE_BYTES * setting.parameters()


def give_back_freed() -> None:
    """Return freed memory, which glibc keeps: a peak is then what was needed, and a load as in a new process."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class HostCopy:
    """A rank's share of the state and warm host buffers of its size; the copy is the limit of an asynchronous save."""

    def __init__(self, setting: Setting) -> None:
        shapes = [parameter.numel() // setting.ranks for parameter in make_model(setting).parameters()]
        self.state = [torch.randn(count) for count in shapes for _ in range(STATE_BYTES // 4)]
        self.buffers = [torch.zeros_like(tensor) for tensor in self.state]

    def run(self) -> None:
        """Copy all of it."""
        for buffer, tensor in zip(self.buffers, self.state, strict=True):
            buffer.copy_(tensor)


class Rounds:
    """One rank's measurements. ``seconds`` and ``peaks`` by key, one entry per round."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.rank, self.place = plan, dist.get_rank(), Path(plan.place)
        self.seconds: dict[str, list[float]] = {}
        self.peaks: dict[str, list[int]] = {}
        self.written: dict[str, int] = {}
        self.warm, self.started, self.before = 0.0, 0.0, 0
        self.old: list[tuple[Path, int]] = []
        self.writes = self.reads = list(plan.ways)
        self.template = make_model(plan.setting)
        self.states: dict[Any, Variant] = {}
        for name in plan.savers:
            build = SAVERS[name].build
            if build not in self.states:
                self.states[build] = build(copy.deepcopy(self.template), plan.setting)
                self.train(self.states[build], 0)
        self.plain = PlainFile(self.place / "plain", state_bytes(plan.setting), self.rank)
        self.host = HostCopy(plan.setting) if any(SAVERS[name].asynchronous for name in plan.savers) else None

    def run(self) -> None:
        """All rounds; the order of what runs in a round rotates."""
        units: list[Callable[[bool], None]] = [self.disk, *(partial(self.saver, name) for name in self.plan.savers)]
        if self.host is not None:
            units.insert(1, self.copy)
        total = self.plan.warmup + self.plan.rounds
        gc.collect()
        gc.freeze()  # what lives to the end needs no looking at in every round
        for number in range(total):
            if number == self.plan.warmup:
                self.narrow()
                self.seconds, self.peaks = {}, {}
            first = number % len(units)
            for unit in [*units[first:], *units[:first]]:
                unit(number == 0)
            if self.rank == 0:
                end = "\n" if number + 1 == total else ""
                print(f"\rround {number + 1} of {total}", end=end, file=sys.stderr, flush=True)
        self.remove_old(0)

    def timed(self, key: str, action: Callable[[], T]) -> T:
        """Run ``action`` on all ranks at once and keep what it took."""
        gc.collect()
        give_back_freed()
        if self.rank == 0:
            os.sync()  # nothing that was removed or written before is still on its way
        forget_peak()
        self.before = rss_bytes(peak=False)
        dist.barrier()
        self.started = time.perf_counter()
        result = action()
        self.keep(key)
        return result

    def keep(self, key: str) -> None:
        """The time since the start of what is timed, and how far the peak of memory rose above what was held before."""
        self.seconds.setdefault(key, []).append(time.perf_counter() - self.started)
        self.peaks.setdefault(key, []).append(max(0, rss_bytes(peak=True) - self.before))

    def fresh(self, name: str) -> Path:
        """An empty name in ``place``; what was there goes later (disk: [Note: What was removed])."""
        dist.barrier()
        target = self.place / name
        if self.rank == 0 and target.exists():
            old = self.place / f"old-{time.perf_counter_ns()}"
            target.rename(old)
            self.old.append((old, bytes_in(old)))
            self.remove_old(KEPT_STATES * state_bytes(self.plan.setting))
        dist.barrier()
        return target

    def remove_old(self, kept: int) -> None:
        """Remove what has at least ``kept`` bytes of younger ones."""
        while self.old and sum(size for _, size in self.old[1:]) >= kept:
            shutil.rmtree(self.old.pop(0)[0], ignore_errors=True)

    def cool(self, folder: Path) -> None:
        """Drop ``folder`` from the page cache and remember how much of it stayed."""
        dist.barrier()
        if self.rank == 0:
            gc.collect()
            drop_cache(folder)
            self.warm = max(self.warm, resident(folder))
        dist.barrier()

    def disk(self, _: bool) -> None:
        """The plain ways of writing the same bytes, then of reading them."""
        folder = self.fresh("plain")
        folder.mkdir(exist_ok=True)
        for way in dict.fromkeys([*self.writes, *self.reads]):
            self.timed(f"write {way}", partial(self.plain.write, way))
        for way in self.reads:
            self.cool(folder)
            self.timed(f"read {way}", partial(self.plain.read, way))
        self.fresh("plain")

    def narrow(self) -> None:
        """Go on with the ways that were fastest while warming up, the same on every rank.

        And, to see what huge pages do, with the fastest one that has none.
        """
        told: list[Any] = [None] * self.plan.setting.ranks
        dist.all_gather_object(told, self.seconds)

        def fastest(verb: str) -> list[Way]:
            best = {
                way: min(map(max, zip(*(rank[f"{verb} {way}"] for rank in told), strict=True)))
                for way in self.plan.ways
            }
            ranked = sorted(best, key=best.__getitem__)
            return [*ranked[:KEPT_WAYS], *[way for way in ranked[KEPT_WAYS:] if not way.huge][:1]]

        self.writes, self.reads = fastest("write"), fastest("read")

    def copy(self, _: bool) -> None:
        """The copy to host."""
        if self.host is not None:
            self.timed("copy", self.host.run)

    def saver(self, name: str, first: bool) -> None:
        """Save, and load what was saved; what is written behind is loaded in the first round only, as a proof."""
        entry, place = SAVERS[name], self.fresh("saved")
        variant = self.states[entry.build]
        wait = self.timed(f"{'block' if entry.asynchronous else 'save'} {name}", partial(entry.save, variant, place))
        if wait is not None:
            wait()
            self.keep(f"save {name}")
        dist.barrier()
        self.written[name] = bytes_in(place)
        expected = [self.train(variant, 1 + step) for step in range(PROOF_STEPS)] if first else []
        if first or not entry.asynchronous:
            for reader in entry.loads:
                self.load(reader, place, expected)
        self.fresh("saved")

    def load(self, name: str, place: Path, expected: list[float]) -> None:
        """Load into a new competitor. expected: the losses that it must show if it is the one that was saved."""
        reader = READERS[name]
        takes_part = self.rank == 0 or not reader.alone
        variant = reader.build(copy.deepcopy(self.template), self.plan.setting) if takes_part else None
        self.cool(place)
        self.timed(f"load {name}", partial(reader.load, variant, place) if takes_part else lambda: None)
        if variant is None:
            return
        for step, loss in enumerate(expected[:1] if reader.alone else expected):
            found = self.train(variant, 1 + step)
            if not math.isclose(found, loss, rel_tol=LOSS_TOLERANCE):
                raise RuntimeError(f"{name}: step {step + 1} after the load has loss {found}, the saved one has {loss}")
        variant.close()

    def train(self, variant: Variant, number: int) -> float:
        """One step; the loss before it."""
        loss = variant.forward(batch_of(self.plan.setting, self.rank, number))
        variant.backward(loss)
        variant.update()
        return float(loss.detach())


def measure(plan: Plan) -> dict[str, Any]:
    """All rounds on this rank of the group that is there: times, peaks, bytes written, what the cache kept."""
    if any(SAVERS[name].package == "deepspeed" for name in plan.savers):
        import_deepspeed()
    rounds = Rounds(plan)
    try:
        rounds.run()
    finally:
        gc.unfreeze()
    for variant in rounds.states.values():
        variant.close()
    return {name: vars(rounds)[name] for name in ("seconds", "peaks", "written", "warm")}


def rank_main(rank: int, plan: Plan) -> None:
    """One rank from start to end."""
    with joined(rank, plan.setting.ranks, plan.folder):
        leave(rank, plan.folder, measure(plan))


def run_group(
    setting: Setting, savers: Sequence[str], ways: Sequence[Way], rounds: int, warmup: int, place: Path
) -> list[dict[str, Any]]:
    """Start a group of ranks for ``savers`` and return what each found, in rank order; ``place`` is left empty."""
    with tempfile.TemporaryDirectory(prefix="shardengine-bench-") as folder:
        plan = Plan(setting, tuple(savers), tuple(ways), rounds, warmup, folder, str(place))
        return collected(rank_main, plan, setting.ranks, folder)
