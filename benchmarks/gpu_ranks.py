"""The process of ``gpu_step.py``: one rank on one device, what it measures of every competitor.

Owns: the measuring of a group. First every competitor is built and trained alone, for its peak memory and its CUDA
calls; then all are built, and take turns. Knows nothing of ratios and reports; ``ranks.py`` starts the process.
"""

from __future__ import annotations

import gc
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.device import counted, peak_flops, synchronise, take_turns, why_not_counted
from benchmarks.gpu_variants import COMPETITORS
from benchmarks.ranks import collected, joined, leave
from benchmarks.workload import Batch, Setting, Variant, batch_of, make_model

WARMUP = 2
"""Rounds before the measured ones, all competitors being there."""
ALONE_STEPS = 3


@dataclass(frozen=True)
class GpuPlan:
    """What the process does. own: the model of ``gpt2.py`` · steps: of a round, between two synchronisations ·
    product: rows of the matrices of the bf16 product · until: what ``time.monotonic`` says when rounds are to end.
    """

    setting: Setting
    variants: tuple[str, ...]
    device: str
    own: bool
    rounds: int
    steps: int
    product: int
    until: float
    folder: str


def build(name: str, plan: GpuPlan) -> Variant:
    """The competitor on a fresh model, which is made on the device: the same weights for everyone."""
    with torch.device(plan.device):
        model = make_model(plan.setting, own=plan.own)
    return COMPETITORS[name].build(model, plan.setting)


def batches_of(plan: GpuPlan, round_number: int) -> list[Batch]:
    """The batches of a round, on the device; the same for everyone."""
    first = round_number * plan.steps
    found = [batch_of(plan.setting, 0, number) for number in range(first, first + plan.steps)]
    return [{key: tokens.to(plan.device) for key, tokens in batch.items()} for batch in found]


def train(variant: Variant, batches: Sequence[Batch]) -> Tensor:
    """One step on each batch; the last loss, which stays on the device."""
    for batch in batches:
        loss = variant.forward(batch)
        variant.backward(loss)
        variant.update()
    return loss.detach()


def alone(name: str, plan: GpuPlan) -> dict[str, Any]:
    """What one competitor takes while no other is there: peak memory of its steps, CUDA calls of its last one.

    Bytes count from what the process held before it was built; None and no calls on a CPU.
    """
    device, cuda = torch.device(plan.device), plan.device == "cuda"
    forget(plan)
    before = (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) if cuda else (0, 0)
    variant = build(name, plan)
    batches = batches_of(plan, 0)[:1]
    if cuda:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    loss = train(variant, batches * ALONE_STEPS)
    synchronise(device)
    found: dict[str, Any] = {"peak_allocated_bytes": None, "peak_reserved_bytes": None}
    if cuda:
        found["peak_allocated_bytes"] = torch.cuda.max_memory_allocated() - before[0]
        found["peak_reserved_bytes"] = torch.cuda.max_memory_reserved() - before[1]
    calls = counted(lambda: train(variant, batches), device)
    found["kernels"] = None if calls is None else calls.kernels
    found["waits"] = None if calls is None else dict(calls.waits)
    found["loss_alone"] = float(loss)
    variant.close()
    return found


def forget(plan: GpuPlan) -> None:
    """Give back the memory of what was dropped."""
    gc.collect()
    if plan.device == "cuda":
        torch.cuda.empty_cache()


def trying(name: str, failed: dict[str, str], action: Any) -> Any:
    """What ``action`` gives, or None with the error under ``failed``: one library's error ends no other's run."""
    try:
        return action()
    except Exception as error:
        failed[name] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        print(f"{name} failed: {failed[name]}", file=sys.stderr)
        return None


def measure(plan: GpuPlan) -> dict[str, Any]:
    """Everything of one group: the device's FLOP/s, each competitor alone, seconds per step and losses by round."""
    device = torch.device(plan.device)
    failed: dict[str, str] = {}
    flops = peak_flops(device, plan.product)
    found = {name: trying(name, failed, partial(alone, name, plan)) for name in plan.variants}
    forget(plan)
    built = {}
    for name in (name for name in plan.variants if name not in failed):
        variant = trying(name, failed, partial(build, name, plan))
        if variant is not None:
            built[name] = variant
    losses: dict[str, list[float]] = {name: [] for name in built}
    batches: dict[int, list[Batch]] = {}

    def timed(name: str, number: int) -> float:
        if number not in batches:
            batches.clear()
            batches[number] = batches_of(plan, number)
        synchronise(device)
        start = time.perf_counter()
        loss = train(built[name], batches[number])
        synchronise(device)
        seconds = (time.perf_counter() - start) / plan.steps
        losses[name].append(float(loss))
        return seconds

    turns = {name: partial(timed, name) for name in built}
    take_turns({name: partial(_later, turn, 0) for name, turn in turns.items()}, WARMUP, float("inf"))
    seconds = take_turns({name: partial(_later, turn, WARMUP) for name, turn in turns.items()}, plan.rounds, plan.until)
    while built:
        name, variant = built.popitem()
        trying(name, {}, variant.close)  # may need memory that is not there; the measurements are done
    return {
        "peak_flops": flops,
        "alone": {name: row for name, row in found.items() if row is not None},
        "seconds": seconds,
        "losses": losses,
        "failed": failed,
        "why_not_counted": why_not_counted(device),
    }


def _later(turn: Any, rounds: int, number: int) -> float:
    """The same turn ``rounds`` rounds later: measured rounds go on with the data where the warm-up ended."""
    seconds: float = turn(number + rounds)
    return seconds


def rank_main(rank: int, plan: GpuPlan) -> None:
    """The process from start to end."""
    with joined(rank, 1, plan.folder, plan.device):
        leave(rank, plan.folder, measure(plan))


def run_group(plan: GpuPlan) -> dict[str, Any]:
    """Start a process for ``plan`` and return what it found."""
    with tempfile.TemporaryDirectory(prefix="shardengine-bench-") as folder:
        (found,) = collected(rank_main, replace(plan, folder=folder), 1, folder)
    return found
