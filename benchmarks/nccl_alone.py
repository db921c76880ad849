"""What NCCL does for one rank, of that on which the engine relies: waits, memory behind them, broken-off groups.

``python -m benchmarks.nccl_alone`` prints a line of JSON for each thing that it found, as soon as it is found, so that
what was printed counts even if a later one never returns. Each observation says what went wrong where it could not be
made; the others go on. With ``--device cpu`` gloo plays the part, which tries the program and says nothing of NCCL.

    memory      bytes of the GPU that each of two communicators takes
    asynchrony  what issuing and waiting cost the host while the GPU is busy, whether the result is there then, and
                whether memory that is given back behind the wait was read before
    ends        how long ``destroy_process_group`` takes with a collective in flight, and an abort; whether a new group
                works afterwards, and the process lives on
    priority    how long a collective takes while products fill the GPU, on a stream of high and of ordinary priority
    watchdog    how many seconds after the limit of a group a process ends whose collective does not
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.device import synchronise

ELEMENTS = 1 << 24
CYCLES_PER_S = 1.7e9
"""Of a GPU's clock, about: what holds it up lasts about as long as it is told."""
HELD_S = 2.0
LIMIT_S, PATIENCE_S = 5.0, 60.0
"""Of the group whose watchdog is tried; after that it is taken for one that never ends a process."""
PRODUCT, PRODUCTS = 8192, 40

Found = dict[str, Any]


class Alone:
    """One rank and its device."""

    def __init__(self, device: str, elements: int) -> None:
        self.device = torch.device(device)
        self.cuda = self.device.type == "cuda"
        self.elements = elements

    def hold(self, seconds: float) -> None:
        """The GPU is busy for about so long with nothing."""
        if self.cuda:
            torch.cuda._sleep(int(seconds * CYCLES_PER_S))

    def group(self, *, high_priority: bool = False, limit_s: float = PATIENCE_S) -> Any:
        """A new one, which has a communicator and has run a collective."""
        options = None
        if self.cuda:
            options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=high_priority)
            options._timeout = timedelta(seconds=limit_s)
        backend = "nccl" if self.cuda else "gloo"
        group = dist.new_group(backend=backend, timeout=timedelta(seconds=limit_s), pg_options=options)
        dist.all_reduce(self.ones(8), group=group)
        synchronise(self.device)
        return group

    def ones(self, count: int) -> torch.Tensor:
        """On the device."""
        return torch.ones(count, device=self.device)

    def free(self) -> int:
        """Bytes of the GPU that nobody holds."""
        return int(torch.cuda.mem_get_info()[0]) if self.cuda else 0


def ms(action: Callable[[], object]) -> float:
    """How long the host is busy with it."""
    start = time.perf_counter()
    action()
    return (time.perf_counter() - start) * 1e3


def memory(alone: Alone) -> Found:
    """Bytes of each communicator."""
    alone.ones(8)
    synchronise(alone.device)
    free = [alone.free()]
    for _ in range(2):
        alone.group()
        free.append(alone.free())
    return {"communicator_bytes": [before - after for before, after in pairwise(free)]}


def asynchrony(alone: Alone) -> Found:
    """A gather behind a busy GPU: when which call returns, and what is in its memory."""
    group, own = alone.group(), alone.ones(alone.elements)
    full, copy = torch.zeros_like(own), torch.zeros_like(own)
    synchronise(alone.device)
    alone.hold(HELD_S)
    begun: list[Any] = []
    found: Found = {
        "issue_ms": ms(lambda: begun.append(dist.all_gather_into_tensor(full, own, group=group, async_op=True)))
    }
    (work,) = begun
    fired: list[float] = []
    work.get_future().add_done_callback(lambda _: fired.append(time.perf_counter()))
    found |= {"complete_when_issued": work.is_completed(), "future_done_when_issued": bool(fired)}
    found |= {"wait_ms": ms(work.wait), "complete_after_wait": work.is_completed()}
    copy.copy_(full)
    full.untyped_storage().resize_(0)
    other = torch.full_like(own, 7.0)  # may take the memory that was given back
    found["idle_after_wait_ms"] = ms(lambda: synchronise(alone.device))
    found["right_although_given_back"] = bool(torch.equal(copy, own)) and float(other[0]) == 7.0
    return found


def ends(alone: Alone) -> Found:
    """Groups that end with a collective in flight."""
    found: Found = {}
    for name, end in (("destroy", dist.destroy_process_group), ("abort", dist.distributed_c10d._abort_process_group)):
        group, values = alone.group(), alone.ones(alone.elements)
        synchronise(alone.device)
        alone.hold(HELD_S)
        work = dist.all_reduce(values, group=group, async_op=True)
        found[f"{name}_ms"] = ms(lambda end=end, group=group: end(group))  # type: ignore[misc]
        found[f"idle_after_{name}_ms"] = ms(lambda: synchronise(alone.device))
        del work
        again, two = alone.group(), alone.ones(8) * 2
        dist.all_reduce(two, group=again)
        synchronise(alone.device)
        found[f"new_group_after_{name}"] = float(two.sum()) == 16.0
    return found


def priority(alone: Alone) -> Found:
    """Milliseconds from the begin of products that fill the GPU to the end of a collective that is issued with them."""
    size = PRODUCT if alone.cuda else 64
    a = torch.randn(size, size, device=alone.device, dtype=torch.bfloat16)
    found: Found = {}
    for name, high in (("ordinary", False), ("high", True)):
        group, values = alone.group(high_priority=high), alone.ones(alone.elements)
        if not alone.cuda:
            dist.all_reduce(values, group=group)
            continue
        begin, end, last = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        side = torch.cuda.Stream()
        torch.mm(a, a)
        torch.cuda.synchronize()
        begin.record()
        for _ in range(PRODUCTS):
            torch.mm(a, a)
        last.record()
        with torch.cuda.stream(side):
            dist.all_reduce(values, group=group)
            end.record()
        torch.cuda.synchronize()
        found |= {f"{name}_priority_ms": begin.elapsed_time(end), "products_ms": begin.elapsed_time(last)}
    return found


def watchdog(alone: Alone) -> Found:
    """A process of its own whose collective outlasts its limit: when it ends, and how."""
    if not alone.cuda:
        return {}
    start = time.monotonic()
    command = [sys.executable, "-m", "benchmarks.nccl_alone", "--outlast"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    except subprocess.TimeoutExpired:
        return {"ends_the_process": False}
    lines = done.stdout.splitlines()
    issued = float(lines[-1]) if lines else start
    return {
        "ends_the_process": done.returncode != 0,
        "exit_code": done.returncode,
        "after_limit_s": time.monotonic() - issued - LIMIT_S,
    }


def outlast() -> None:
    """What ``watchdog`` starts. Prints the time at which the collective was issued."""
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")  # as the engine does
    alone = Alone("cuda", 8)
    with joined(alone):
        group, values = alone.group(limit_s=LIMIT_S), alone.ones(8)
        alone.hold(PATIENCE_S)
        dist.all_reduce(values, group=group, async_op=True)
        print(time.monotonic(), flush=True)
        time.sleep(PATIENCE_S)
        os._exit(0)  # the watchdog did nothing


OBSERVATIONS: dict[str, Callable[[Alone], Found]] = {
    "memory": memory, "asynchrony": asynchrony, "ends": ends, "priority": priority, "watchdog": watchdog,
}  # fmt: skip


@contextmanager
def joined(alone: Alone) -> Iterator[None]:
    """A process group of one rank. Nothing waits for its end."""
    if alone.cuda:
        torch.cuda.set_device(0)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory(prefix="shardengine-bench-") as folder:
        store = dist.FileStore(f"{folder}/store", 1)  # type: ignore[attr-defined]
        dist.init_process_group("nccl" if alone.cuda else "gloo", store=store, rank=0, world_size=1)
        yield


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.nccl_alone", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: to try the program")
    parser.add_argument("--outlast", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Command line. Returns 1 if an observation could not be made."""
    options = parse(argv)
    if options.outlast:
        outlast()
    alone = Alone(options.device, ELEMENTS if options.device == "cuda" else 64)
    failed = False
    with joined(alone):
        for name, observe in OBSERVATIONS.items():
            try:
                found = observe(alone)
            except Exception as error:
                failed, found = True, {"failed": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
            print(json.dumps({name: found}), flush=True)
        dist.destroy_process_group()
    return int(failed)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # the end of groups that were broken off is not waited for
