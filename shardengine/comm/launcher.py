"""Start ranks from a script or a notebook. Owns: their processes and environment, and how a failure comes back.

Must not know: buckets, models, the command line. ``shardengine train`` uses torchrun instead and takes only
``rank_environment`` and ``default_ranks`` from here.
"""

from __future__ import annotations

import logging
import math
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from importlib.util import find_spec
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardengine.comm import devices
from shardengine.comm.failures import leave_all
from shardengine.comm.group_kind import nccl_defaults
from shardengine.comm.mesh import await_all
from shardengine.comm.rank_failure import RankFailure
from shardengine.comm.rendezvous import LAUNCHED, loopback
from shardengine.errors import ShardEngineError, UsageError

_log = logging.getLogger(__name__)
THREADS = "SHARDENGINE_THREADS"
"""The variable with the number of threads of a native kernel."""
_GRACE_S = 5.0
"""How long a rank may take to end after a request before it is killed, and how long the rank that failed first may take
to report after others that only suffer from it.
"""
_END_S = 30 * 86400.0
"""How long a rank of NCCL that has returned waits for the others; the parent ends it if one fails."""
_SPREAD_S = 0.5
"""How long other ranks may still report after one has reported a failure of its own."""


@dataclass(frozen=True)
class _RankReport:
    """The only report of a rank to the parent: its pickled value, or its pickled exception and the failure."""

    rank: int
    value: bytes
    failure: RankFailure | None = None


class _RankTraceback(Exception):
    """Carries a rank's traceback as text; Python shows it above the exception that is raised in the parent."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def cores() -> int:
    """Return the number of CPU cores that this process may use: its affinity and the container's quota, at least 1."""
    found = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    quota = Path("/sys/fs/cgroup/cpu.max")
    if quota.exists():
        limit, _, period = quota.read_text().partition(" ")
        if limit != "max":
            found = min(found, int(limit) // int(period))
    return max(1, found)


def default_ranks() -> int:
    """Return one rank per GPU; without a GPU, or if SHARDENGINE_DEVICE is cpu, 2."""
    return devices.count() or 2


def rank_environment(ranks: int) -> dict[str, str]:
    """Return variables for ``ranks`` processes on this machine, without those that the caller has already set.

    OMP_NUM_THREADS = cores // ranks (torchrun would set 1, and without it every rank would take all cores).
    GLOO_SOCKET_IFNAME = the loopback interface.
    """
    wanted = {"OMP_NUM_THREADS": str(max(1, cores() // ranks))}
    wanted |= loopback()
    return {name: value for name, value in wanted.items() if name not in os.environ}


def host_threads(*, offloads: bool) -> int | None:
    """Return the number of threads for this rank's native kernels; None: as many as torch has.

    SHARDENGINE_THREADS sets it; UsageError if that is not an integer >= 1. offloads: the host steps offloaded state.
    Then the number is cores // ranks of this machine if torchrun has set OMP_NUM_THREADS=1, as it does if nobody has
    set it, for ranks whose work is on a GPU. To give torch more threads as well, set OMP_NUM_THREADS.
    """
    said = os.environ.get(THREADS, "")
    if said:
        if not said.isdecimal() or int(said) < 1:
            raise UsageError(f"{THREADS}: expected an integer >= 1, got {said!r}", code="launch-threads-invalid")
        return int(said)
    torchrun = {"TORCHELASTIC_RUN_ID", "LOCAL_WORLD_SIZE"} <= set(os.environ)
    if offloads and torchrun and os.environ.get("OMP_NUM_THREADS") == "1" and torch.get_num_threads() == 1:
        return max(1, cores() // int(os.environ["LOCAL_WORLD_SIZE"]))
    return None


def launch(fn: Callable[..., Any], ranks: int = 2, args: Sequence[Any] = ()) -> list[Any]:
    """Run ``fn(*args)`` in ``ranks`` new processes of this machine and return each rank's value, in rank order.

    While ``fn`` runs the process group exists (NCCL if there is a GPU for every rank, else gloo on loopback, with a
    warning about GPUs that are not used). RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set, so
    ``shardengine.initialize`` needs no more. SHARDENGINE_DEVICE=cpu uses no GPU; with cuda too few GPUs are an error.
    ``fn``, ``args`` and the values travel pickled; with ``cloudpickle`` installed ``fn`` may also be a lambda, a nested
    function or a function of a notebook. In a script, call it under ``if __name__ == "__main__":``.

    An exception in one rank ends the others and is raised here, with that rank's traceback as its cause. UsageError if
    ``fn`` cannot be sent or ``ranks`` is not a positive integer; ShardEngineError if a rank died without an exception
    and no other had one of its own.
    """
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise UsageError(f"launch: expected ranks to be an integer >= 1, got {ranks!r}", code="launch-ranks-invalid")
    if os.environ.get(LAUNCHED):
        raise UsageError(
            "launch was called in a process that launch itself started. If this is a script, its start-up code runs "
            'again in every rank: put the call under `if __name__ == "__main__":`',
            code="launch-nested",
        )
    payload = _pack(fn, tuple(args))
    environment = {**rank_environment(ranks), **_device_environment(ranks), LAUNCHED: "1"}
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]  # lives here
    context = multiprocessing.get_context("spawn")
    processes: list[SpawnProcess] = []
    connections: list[Connection] = []
    try:
        with _environment(environment):
            for rank in range(ranks):
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(target=_run_rank, args=(sender, rank, ranks, store.port, payload))
                process.start()
                sender.close()
                processes.append(process)
                connections.append(receiver)
        reports = _collect(connections)
        failures = {report.failure: report.value for report in reports.values() if report.failure is not None}
        if failures or len(reports) < ranks:
            _raise(failures, _silent(processes, reports))
        for process in processes:
            process.join()
        return [pickle.loads(reports[rank].value) for rank in range(ranks)]
    finally:
        _end(processes)
        for connection in connections:
            connection.close()


def _device_environment(ranks: int) -> dict[str, str]:
    """Return the ranks' variables for devices; warn the user if GPUs are not used."""
    visible = devices.count()
    reason = devices.too_few(ranks)
    if not reason and dist.is_nccl_available():
        return {}
    reason = reason or f"torch has no NCCL for {visible} GPU(s)"
    if devices.wish() == "cuda":
        raise UsageError(
            f"launch: {devices.WISH}=cuda expects a GPU for every rank, but {reason}", code="launch-too-few-gpus"
        )
    if visible:
        _log.warning(
            "launch: %s: the ranks compute on the CPU. Start at most %d; %s=cpu says that it is meant",
            reason,
            visible,
            devices.WISH,
        )
    return {devices.WISH: "cpu"}


def _pack(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """Return ``fn`` and ``args`` as bytes; if that cannot work, raise UsageError with a remedy."""
    interactive = fn.__module__ == "__main__" and "__file__" not in vars(sys.modules["__main__"])
    try:
        if find_spec("cloudpickle"):
            packed: bytes = import_module("cloudpickle").dumps((fn, args))
            return packed
        if interactive:
            raise pickle.PicklingError("it is defined in a notebook or an interactive session")
        return pickle.dumps((fn, args))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UsageError(
            f"launch: {fn!r} cannot be sent to other processes ({error}); move the function to the top level of a "
            "module and import it, or `pip install cloudpickle`, which sends lambdas and functions of notebooks as "
            "well",
            code="launch-function-not-sendable",
        ) from error


def _run_rank(sender: Connection, rank: int, ranks: int, port: int, payload: bytes) -> None:
    """Run a rank's process: the process group around ``fn``, and one report to the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process of a terminal; the parent decides
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(ranks),
        LOCAL_WORLD_SIZE=str(ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    try:
        nccl = devices.wish() != "cpu"
        if nccl:
            torch.cuda.set_device(rank)
            nccl_defaults()
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))  # type: ignore[attr-defined]
        dist.init_process_group("nccl" if nccl else "gloo", store=store, rank=rank, world_size=ranks)
        fn, args = pickle.loads(payload)
        value = pickle.dumps(fn(*args))
        leave_all("has returned from the launched function")
        if nccl:
            await_all(dist.PrefixStore("shardengine/returned", store), rank, ranks, _END_S)  # type: ignore[attr-defined]
        else:
            dist.barrier()
        dist.destroy_process_group()
        report = _RankReport(rank, value)
    except BaseException as error:
        report = _RankReport(rank, _pack_error(error), RankFailure.of(rank, error))
    sender.send_bytes(pickle.dumps(report))
    sender.close()
    if report.failure is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # a group in the middle of a collective may never come back from its destructor


def _pack_error(error: BaseException) -> bytes:
    """Return the exception as bytes; one that does not survive pickling is replaced by one with the same text."""
    try:
        packed = pickle.dumps(error)
        pickle.loads(packed)
    except Exception:
        packed = pickle.dumps(ShardEngineError(f"{type(error).__qualname__}: {error}"))
    return packed


def _end_with_parent() -> None:
    """End this rank when the process that started it is gone, so no rank continues as an orphan."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def _collect(connections: Sequence[Connection]) -> dict[int, _RankReport]:
    """Return reports by rank: of all ranks or, once one failed, of those that answer while the failure spreads.

    That time is longer while every failed rank may have failed because of another, whose report is on its way.
    """
    reports: dict[int, _RankReport] = {}
    pending = {connection: rank for rank, connection in enumerate(connections)}
    deadline = math.inf
    while pending:
        ready = wait(list(pending), None if deadline == math.inf else max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for connection in [connection for connection in pending if connection in ready]:
            rank = pending.pop(connection)
            try:
                report = reports[rank] = pickle.loads(connection.recv_bytes())
            except (EOFError, OSError):  # it ended, maybe in the middle of its report
                report = None
            if report is None or report.failure is not None:
                original = report is not None and report.failure is not None and not report.failure.is_consequence
                deadline = min(deadline, time.monotonic() + (_SPREAD_S if original else _GRACE_S))
    return reports


def _silent(processes: Sequence[SpawnProcess], reports: Mapping[int, _RankReport]) -> list[RankFailure]:
    """Return the failures of ranks that ended by themselves without a report."""
    silent: list[RankFailure] = []
    for rank, process in enumerate(processes):
        if rank not in reports:
            process.join(0.2)
            if process.exitcode is not None:
                silent.append(RankFailure(rank, process.exitcode))
    return silent


def _raise(failures: Mapping[RankFailure, bytes], silent: Sequence[RankFailure]) -> None:
    """Raise the first failure (rank_failure, [Note: Which failure is reported]). failures: pickled exceptions."""
    first = RankFailure.first([*failures, *silent])
    if first is None:
        raise ShardEngineError("a rank closed its connection without a report; what it printed last is above")
    if first not in failures:
        raise ShardEngineError(f"{first.line}; what it printed last is above")
    error = pickle.loads(failures[first])
    if not isinstance(error, Exception):
        error = ShardEngineError(f"rank {first.rank} ended by itself: {type(error).__name__}({error})")
    raise error from _RankTraceback(f"Traceback of rank {first.rank}:\n{first.trace}")


def _end(processes: Sequence[SpawnProcess]) -> None:
    """Terminate the processes that still run, and kill those that do not end."""
    for process in processes:
        if process.is_alive():
            process.terminate()
    deadline = time.monotonic() + _GRACE_S
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables while processes are started (a child's torch reads OMP_NUM_THREADS when it is loaded)."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
