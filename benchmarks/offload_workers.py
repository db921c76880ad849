"""The processes of ``offload_gpu.py``: a fresh one for each competitor, which steps when it is told to.

Owns: building and stepping one competitor, its peaks of memory, starting, asking and ending its process. Knows nothing
of turns, ratios and reports.

[Note: Memory of a process] Peaks belong to a process, so everyone has its own; several take turns by waiting for a
message. Page-locked memory is the driver's, which not every system counts as resident: a first block says whether this
one does, and where it does not, what torch has page-locked at most is added (both peaks, maybe of two moments).

[Note: Out of host memory] The system would end some process, perhaps not the one that asks for too much. So that one
offers itself (``oom_score_adj``), and before that it is ended here, once less than ``Job.floor`` bytes are free.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from benchmarks.device import synchronise
from benchmarks.offload_bound import SIZES, measure_rates
from benchmarks.offload_variants import COMPETITORS
from benchmarks.ranks import available_bytes, joined, rss_bytes
from benchmarks.workload import Batch, Setting, Variant, batch_of, make_model

POLL_S = 0.05
LEAVE_S = 20.0
"""Seconds that a process has to end by itself."""
PROBE_BYTES = 64 << 20
PINNED_KEYS = ("allocated_bytes.peak", "reserved_bytes.peak")
"""What torch's statistics call it: the former now, the latter when the former did not count free blocks."""
RATES = "rates"
"""The job that is no competitor: what the machine can do."""
CGROUPS = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
)
"""Where a container's limit, its use and the part of it that would be given back stand (version 2, version 1)."""


class Failed(Exception):
    """A competitor cannot go on; the text says why."""


class OutOfTime(Failed):
    """It may be able to, but not within the time."""


@dataclass(frozen=True)
class Job:
    """What a process does. name: a competitor, or ``RATES`` · floor: bytes of host memory that must stay free."""

    name: str
    setting: Setting
    device: str
    threads: int
    floor: float


class Trained:
    """One competitor in this process, which has a process group: built, then stepped on one and the same batch."""

    def __init__(self, job: Job) -> None:
        self.job, self.device = job, torch.device(job.device)
        self.batch: Batch = {}
        self.variant: Variant | None = None
        self.pinned_is_resident: bool | None = None
        self.before = self.built_peak = 0

    def build(self) -> dict[str, Any]:
        """The competitor on the weights that everyone begins with. Seconds that it took."""
        if self.device.type == "cuda":
            self.pinned_is_resident = pinned_is_resident()
        self.before = rss_bytes(peak=False)
        start = time.perf_counter()
        with self.device:
            model = make_model(self.job.setting, own=True)
        self.variant = COMPETITORS[self.job.name].build(model, self.job.setting)
        del model
        gc.collect()
        synchronise(self.device)
        taken = time.perf_counter() - start
        self.batch = {key: tokens.to(self.device) for key, tokens in batch_of(self.job.setting, 0, 0).items()}
        if self.device.type == "cuda":
            self.built_peak = torch.cuda.max_memory_allocated()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        return {"build_s": taken}

    def step(self) -> dict[str, Any]:
        """One step, alone between two synchronisations: seconds, loss, and the peaks so far."""
        if self.variant is None:
            raise Failed(f"{self.job.name} was told to step, expected to be built first")
        synchronise(self.device)
        start = time.perf_counter()
        loss = self.variant.forward(self.batch)
        self.variant.backward(loss)
        self.variant.update()
        synchronise(self.device)
        return {"seconds": time.perf_counter() - start, "loss": float(loss.detach()), "memory": self.memory()}

    def memory(self) -> dict[str, Any]:
        """Peaks in bytes, [Note: Memory of a process]. Those of the device belong to the steps, but for ``build``'s."""
        resident = max(rss_bytes(peak=True), self.before)  # the kernel counts per processor: some pages late
        cuda = self.device.type == "cuda"
        pinned = peak_pinned() if cuda else None
        return {
            "rss_before": self.before,
            "peak_rss": resident,
            "peak_pinned": pinned,
            "pinned_is_resident": self.pinned_is_resident,
            "peak_host": host_peak(resident, pinned, self.pinned_is_resident),
            "peak_allocated": torch.cuda.max_memory_allocated() if cuda else None,
            "peak_reserved": torch.cuda.max_memory_reserved() if cuda else None,
            "build_peak_allocated": self.built_peak if cuda else None,
        }


def host_peak(resident: int, pinned: int | None, counted: bool | None) -> int | None:
    """Bytes of both; None where they cannot be told. counted: page-locked memory is among the resident already."""
    if counted is not False:
        return resident
    return None if pinned is None else resident + pinned


def peak_pinned() -> int | None:
    """Bytes that torch has page-locked at most, free blocks included; None where it does not count them."""
    statistics: dict[str, int] = getattr(torch.cuda, "host_memory_stats", dict)()
    found = [statistics[key] for key in PINNED_KEYS if key in statistics]
    return max(found, default=None)


def pinned_is_resident() -> bool:
    """Whether this system counts page-locked memory as resident; [Note: Memory of a process]."""
    torch.empty(1 << 20, dtype=torch.uint8, pin_memory=True)  # what the first one brings along
    before = rss_bytes(peak=False)
    block = torch.ones(PROBE_BYTES, dtype=torch.uint8, pin_memory=True)
    return rss_bytes(peak=False) - before > block.numel() // 2


def free_host_bytes(cgroup: Path = Path("/sys/fs/cgroup")) -> float:
    """Host memory that may still be taken: the machine's, or less where a container has a limit."""
    free = float(available_bytes())
    for limit, used, statistics, cache in CGROUPS:
        with suppress(OSError, ValueError):  # not there, or "max"
            rows = dict(line.split() for line in (cgroup / statistics).read_text(encoding="ascii").splitlines())
            taken = int((cgroup / used).read_text(encoding="ascii")) - int(rows.get(cache, 0))
            free = min(free, float(int((cgroup / limit).read_text(encoding="ascii")) - taken))
    return free


def rates(job: Job) -> dict[str, Any]:
    """What the machine can do, on the device of ``job``."""
    return asdict(measure_rates(torch.device(job.device), SIZES[job.device]))


def serve(pipe: Connection, job: Job) -> None:
    """The process: what it is told, until it is told nothing. The first error is its last answer."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    backend = COMPETITORS[job.name].cuda_backend if job.name in COMPETITORS else "nccl"
    try:
        with (
            tempfile.TemporaryDirectory(prefix="shardengine-bench-") as folder,
            joined(0, 1, folder, job.device, cuda_backend=backend),
        ):
            trained = Trained(job)
            doing: dict[str, Callable[[], dict[str, Any]]] = {
                RATES: lambda: rates(job), "build": trained.build, "step": trained.step,
            }  # fmt: skip
            while (what := pipe.recv()) is not None:
                pipe.send((True, doing[what]()))
            if trained.variant is not None:
                trained.variant.close()
    except Exception as error:
        with suppress(OSError):
            pipe.send((False, f"{type(error).__name__}: {error}".splitlines()[0][:300]))


class Worker:
    """A process with one ``Job``, as the parent sees it. It begins to import at once, and builds when it is asked."""

    def __init__(self, job: Job) -> None:
        self.job = job
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, job), daemon=True)
        with threads_of_children(job.threads):
            self.process.start()
        theirs.close()

    def ask(self, what: str, end: float) -> dict[str, Any]:
        """What it answers. Raises Failed with its reason or ours, and OutOfTime past ``end`` (of ``time.monotonic``).

        After an error the process is gone.
        """
        try:
            self._pipe.send(what)
            self._wait(end)
            fine, answer = self._pipe.recv()
        except (EOFError, OSError):
            self.process.join(LEAVE_S)
            raise Failed(how_it_ended(self.process.exitcode)) from None
        except Failed:
            self._kill()
            raise
        if not fine:
            self.close()
            raise Failed(answer)
        found: dict[str, Any] = answer
        return found

    def _wait(self, end: float) -> None:
        while not self._pipe.poll(POLL_S):
            if time.monotonic() > end:
                raise OutOfTime("the time was over")
            if (free := free_host_bytes()) < self.job.floor:
                raise Failed(f"out of host memory: it was ended when {free / 2**30:.1f} GiB were left")

    def close(self) -> None:
        """End the process; its memory is free afterwards."""
        with suppress(OSError):
            self._pipe.send(None)
        self.process.join(LEAVE_S)
        self._kill()

    def _kill(self) -> None:
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def how_it_ended(code: int | None) -> str:
    """A sentence for an exit code."""
    if code is not None and code < 0:
        return f"the process was ended by signal {-code}" + (", most likely out of host memory" if code == -9 else "")
    return f"the process ended with code {code}"


@contextmanager
def threads_of_children(count: int) -> Iterator[None]:
    """Processes that start in here know from their first moment how many threads there are, also for others' OpenMP."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = str(count)
    try:
        yield
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before
