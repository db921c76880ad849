"""The rank processes of ``step.py``: a group for some variants, what every rank measures, and which variants fit.

Owns: starting and pinning ranks (``checkpoint.py``'s, too), the measuring loop, peak memory, and the division of
variants into groups. Knows nothing of ratios and reports.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from benchmarks.peers import import_deepspeed
from benchmarks.phases import BlockedClock, StepTimes
from benchmarks.variants import BASE, LIMIT, VARIANTS, Entry
from benchmarks.workload import Setting, Variant, batch_of, make_model

RANK_BYTES = 2**30
"""What a rank needs besides model state: libraries, activations, buffers."""
SLACK = 1.2
"""Model state as measured over the formula: padding, reduce and gather buffers."""


@dataclass(frozen=True)
class Plan:
    """What one group of ranks does: ``variants`` in turn, ``warmup`` steps each and then ``rounds`` measured rounds."""

    setting: Setting
    variants: tuple[str, ...]
    rounds: int
    warmup: int
    folder: str


def available_bytes() -> int:
    """Memory that new processes may take without swapping."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("the kernel reports no MemAvailable in /proc/meminfo")


def groups_of(
    setting: Setting,
    variants: Sequence[str],
    available: int,
    *,
    entries: Mapping[str, Entry] = VARIANTS,
    references: Sequence[str] = (LIMIT, BASE),
    rank_bytes: float = RANK_BYTES,
) -> list[list[str]]:
    """``variants`` in groups that run one after the other, each with the ``references`` if these are among them.

    A group is one library's (its changes to torch reach no other) and fits into ``available`` bytes, of which each rank
    takes ``rank_bytes`` beside model state. Raises SystemExit if one variant alone does not.
    """
    reference = [name for name in variants if name in references]
    rest = [name for name in variants if name not in reference]
    groups: list[list[str]] = []

    def needed(names: Sequence[str]) -> float:
        """An upper estimate of the memory that all ranks of a group take together."""
        states = sum(entries[name].state_bytes(setting) for name in names)
        return setting.ranks * (SLACK * states + rank_bytes)

    for name in rest or reference[:1]:
        last = groups[-1] if groups else []
        new = list(dict.fromkeys([*reference, name]))
        same = bool(last) and entries[last[-1]].family == entries[name].family
        if same and needed([*last, name]) <= available:
            last.append(name)
        elif needed(new) <= available:
            groups.append(new)
        else:
            raise SystemExit(
                f"{', '.join(new)} on {setting.ranks} ranks need about {needed(new) / 2**30:.1f} GiB and "
                f"{available / 2**30:.1f} GiB are free: choose fewer with --variants, or a smaller model"
            )
    return groups


def pin(rank: int) -> None:
    """One thread on one core of its own (ranks wrap around where there are fewer cores)."""
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})


def rss_bytes(*, peak: bool) -> int:
    """The resident size of this process now or at its peak (``ru_maxrss`` inherits the parent's peak across exec)."""
    key = "VmHWM:" if peak else "VmRSS:"
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"the kernel reports no {key[:-1]} in /proc/self/status; memory cannot be measured here")


def forget_peak() -> None:
    """Start the peak of the resident size anew (the kernel's "5" in clear_refs)."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def timed_step(variant: Variant, plan: Plan, number: int, clock: BlockedClock) -> tuple[StepTimes, float]:
    """One step of ``variant`` on all ranks at once: its times here, and the loss. The clock starts after the batch."""
    batch = batch_of(plan.setting, dist.get_rank(), number)
    dist.barrier()
    marks = [(time.perf_counter(), clock.seconds)]
    loss = variant.forward(batch)
    marks.append((time.perf_counter(), clock.seconds))
    variant.backward(loss)
    marks.append((time.perf_counter(), clock.seconds))
    variant.update()
    marks.append((time.perf_counter(), clock.seconds))
    steps = list(pairwise(marks))
    spent = (*(after[0] - before[0] for before, after in steps),)
    blocked = (*(after[1] - before[1] for before, after in steps),)
    return StepTimes(spent, blocked), float(loss.detach())  # type: ignore[arg-type]


def measure(plan: Plan, clock: BlockedClock) -> dict[str, Any]:
    """Build all variants, warm up, run the rounds. Times per variant and round, all losses, wire bytes, peaks."""
    rank = dist.get_rank()
    for package in {VARIANTS[name].package for name in plan.variants} - {None}:
        {"deepspeed": import_deepspeed}[str(package)]()
    make_model(Setting(1, 1, 64, 8, 1, 8))  # imports what building a model imports
    before = rss_bytes(peak=False)
    built = {name: VARIANTS[name].build(make_model(plan.setting), plan.setting) for name in plan.variants}
    built_peak = rss_bytes(peak=True)
    forget_peak()
    times: dict[str, list[StepTimes]] = {name: [] for name in built}
    losses: dict[str, list[float]] = {name: [] for name in built}
    names = list(built)
    for number in range(plan.warmup + plan.rounds):
        first = number % len(names)
        for name in [*names[first:], *names[:first]]:
            taken, loss = timed_step(built[name], plan, number, clock)
            losses[name].append(loss)
            if number >= plan.warmup:
                times[name].append(taken)
        if rank == 0:
            end = "\n" if number + 1 == plan.warmup + plan.rounds else ""
            print(f"\rround {number + 1} of {plan.warmup + plan.rounds}", end=end, file=sys.stderr, flush=True)
    outcome = {
        "times": {name: [asdict(step) for step in steps] for name, steps in times.items()},
        "losses": losses,
        "traffic": {name: variant.traffic() for name, variant in built.items()},
        "rss": {"before": before, "building": built_peak, "steps": rss_bytes(peak=True)},
    }
    for variant in built.values():
        variant.close()
    return outcome


@contextmanager
def joined(rank: int, ranks: int, folder: str, device: str = "cpu", *, cuda_backend: str = "nccl") -> Iterator[None]:
    """This process as one rank of a group that meets in ``folder``, silent on stdout.

    On CPU it speaks gloo and is pinned to a core; on CUDA NCCL, on a GPU of its own, with all cores for its threads.
    """
    os.dup2(2, 1)  # libraries that print: standard output is the report's
    warnings.simplefilter("ignore", FutureWarning)  # the peers' use of torch
    if device == "cuda":
        torch.cuda.set_device(rank)
    else:
        pin(rank)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    backend = cuda_backend if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    yield
    dist.barrier()
    dist.destroy_process_group()


def leave(rank: int, folder: str, outcome: dict[str, Any]) -> None:
    """Put what a rank found where ``collected`` looks for it."""
    Path(folder, f"rank{rank}.json").write_text(json.dumps(outcome), encoding="utf-8")


def collected(main: Callable[[int, Any], None], plan: Any, ranks: int, folder: str) -> list[dict[str, Any]]:
    """Run ``main(rank, plan)`` in a process per rank; what each left in ``folder``, in rank order."""
    spawn(main, args=(plan,), nprocs=ranks)
    return [json.loads(Path(folder, f"rank{rank}.json").read_text(encoding="utf-8")) for rank in range(ranks)]


def rank_main(rank: int, plan: Plan) -> None:
    """One rank from start to end: join the group, measure, leave what it found in ``plan.folder``."""
    clock = BlockedClock()
    with joined(rank, plan.setting.ranks, plan.folder), clock.watching():
        leave(rank, plan.folder, measure(plan, clock))


def run_group(setting: Setting, variants: Sequence[str], rounds: int, warmup: int) -> list[dict[str, Any]]:
    """Start a group of ranks for ``variants`` and return what each rank found, in rank order."""
    with tempfile.TemporaryDirectory(prefix="shardengine-bench-") as folder:
        found = collected(rank_main, Plan(setting, tuple(variants), rounds, warmup, folder), setting.ranks, folder)
    for rank in found:
        rank["times"] = {
            name: [StepTimes(tuple(step["spent"]), tuple(step["blocked"])) for step in steps]
            for name, steps in rank["times"].items()
        }
    return found
