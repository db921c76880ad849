"""What a device is asked for by ``kernels.py`` and ``gpu_step.py``: time, turns, and what it was told to do.

Owns: timing on CUDA or CPU, rounds in rotating order under a deadline, and the count of CUDA calls inside of a region.
Knows nothing of what is measured, and nothing of reports.

[Note: Counting CUDA calls] torch's profiler records every call of CUDA's runtime and driver on the host, in whatever
thread, and every kernel on the device. Calls count if they start inside of the labelled region, so that the profiler's
own synchronisation at its end does not. A profiler that may not look (no CUPTI, no permission) finds nothing, which
would read like "no synchronisation": so it first has to find one kernel and one synchronisation that are known to be
there, and otherwise nothing is counted at all.
"""

from __future__ import annotations

import functools
import re
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.profiler import ProfilerActivity, profile, record_function

REGION = "shardengine-bench-region"
SYNCHRONISES = re.compile(
    r"cuda(Device|Stream|Event)Synchronize|cu(Ctx|Stream|Event)Synchronize|cudaMemcpy(2D|3D|ToSymbol|FromSymbol)?"
    r"|cuMemcpy(DtoH|HtoD|DtoD)?"
)
"""Calls after which the host has waited for the device (the asynchronous copies end in ``Async``)."""
VERSION = re.compile(r"(_v\d+)?(_pts[zd]s?)?$")
NOT_A_KERNEL = re.compile(r"Memcpy|Memset|(Context|Stream|Event) (Sync|Wait)", re.IGNORECASE)
LEAST_ROUNDS = 3
"""Rounds that are run whatever the deadline says."""


def synchronise(device: torch.device) -> None:
    """Return when everything that ``device`` was told is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_per_call(call: Callable[[], object], device: torch.device, repeats: int = 1) -> float:
    """The mean time of ``repeats`` calls in a row, the device being idle before: by events on CUDA, else by the clock.

    Where the host cannot keep ahead of the device (small tensors), this is the host's time.
    """
    synchronise(device)
    if device.type != "cuda":
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        return (time.perf_counter() - start) / repeats
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    for _ in range(repeats):
        call()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / 1e3 / repeats


def repeats_for(call: Callable[[], object], device: torch.device, least_s: float, most: int) -> int:
    """How often ``call``, which must be warm, goes into a measurement of ``least_s``; ``most`` at most."""
    return max(1, min(most, round(least_s / max(seconds_per_call(call, device), 1e-9))))


def take_turns(calls: Mapping[str, Callable[[int], float]], rounds: int, until: float) -> dict[str, list[float]]:
    """Every round asks each of ``calls`` for its seconds once, beginning with another one than the round before.

    Ends after ``rounds``, or once ``time.monotonic()`` is past ``until`` and ``LEAST_ROUNDS`` are done; always with
    whole rounds, which pair up. The calls are told the number of the round.
    """
    names = list(calls)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        first = number % len(names)
        for name in [*names[first:], *names[:first]]:
            seconds[name].append(calls[name](number))
        if time.monotonic() > until and number + 1 >= LEAST_ROUNDS:
            break
    return seconds


@dataclass(frozen=True)
class CudaCalls:
    """What a region told the device: kernels that ran, and calls for which the host waited, by name."""

    kernels: int
    waits: Mapping[str, int]

    @property
    def synchronisations(self) -> int:
        """How often the host waited."""
        return sum(self.waits.values())


class ProfilerEvent(Protocol):
    """What is read of an event of torch's profiler."""

    name: str
    device_type: Any
    time_range: Any
    is_user_annotation: bool


def calls_in(events: Iterable[ProfilerEvent]) -> CudaCalls:
    """Those of the labelled region; [Note: Counting CUDA calls]."""
    every = list(events)
    on_host = [event for event in every if event.device_type.name == "CPU"]
    region = next(event.time_range for event in on_host if event.name == REGION)
    waits: dict[str, int] = {}
    for event in on_host:
        name = VERSION.sub("", event.name, count=1)
        if SYNCHRONISES.fullmatch(name) and region.start <= event.time_range.start <= region.end:
            waits[name] = waits.get(name, 0) + 1
    on_device = [event for event in every if event.device_type.name == "CUDA" and not event.is_user_annotation]
    return CudaCalls(sum(event.name != REGION and not NOT_A_KERNEL.match(event.name) for event in on_device), waits)


def profiled(call: Callable[[], object], device: torch.device) -> CudaCalls:
    """The CUDA calls of ``call``, which must be warm; on a CPU there are none."""
    synchronise(device)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(activities=activities) as profiler:
        with record_function(REGION):
            call()
        synchronise(device)
    events: Any = profiler.events()
    return calls_in(events)


@functools.cache
def why_not_counted(device: torch.device) -> str | None:
    """Why CUDA calls cannot be counted on ``device``, None where they can; [Note: Counting CUDA calls]."""
    if device.type != "cuda":
        return "not on CPU"
    ones = torch.ones(4, device=device)

    def known() -> float:
        return torch.neg(ones)[0].item()

    known()
    found = profiled(known, device)
    if found.kernels != 1 or found.synchronisations < 1:
        return f"the profiler saw {found.kernels} kernels and {found.synchronisations} waits where one of each was"
    return None


def counted(call: Callable[[], object], device: torch.device) -> CudaCalls | None:
    """The CUDA calls of ``call``, which must be warm; None where ``why_not_counted`` has a reason."""
    return None if why_not_counted(device) else profiled(call, device)


def peak_flops(device: torch.device, size: int, rounds: int = 20) -> float:
    """FLOP/s of a large bf16 matrix product on random data, the median of ``rounds``: what MFU is a fraction of."""
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)

    def product(_: int = 0) -> float:
        return seconds_per_call(lambda: torch.mm(a, b, out=out), device)

    for _ in range(LEAST_ROUNDS):
        product()
    seconds = take_turns({"product": product}, rounds, float("inf"))["product"]
    return 2.0 * size**3 / statistics.median(seconds)
