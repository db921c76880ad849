"""Rank processes that live for the whole test session and run the cases they are fed.

One pool per world size, forked from one process that has imported everything: starting one costs milliseconds. A case
is a module-level function; every rank calls it with its arguments and the parent gets the list of results. A failing
rank's traceback becomes the parent's error; a hang kills the pool, the next case gets a new one.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from shardengine import errors
from tests.support import HANG_S

IMPORTED = [
    "pytest",
    "tests.support.cases",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "tests.support.frozen",
]
"""What the process that forks imports before: it must start no thread."""


def fork_context() -> Any:
    """Processes are forked from a server without threads, groups or engines, with the environment of its start."""
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    return context


class RankFailure(AssertionError):
    """A rank raised. ``errors``: rank → traceback."""

    def __init__(self, errors: dict[int, str]) -> None:
        self.errors = errors
        super().__init__("\n".join(f"rank {rank}:\n{text}" for rank, text in errors.items()))


def _serve(rank: int, ranks: int, store: str, pipe: Connection) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timedelta(seconds=HANG_S)
    )
    gc.collect()
    log = logging.getLogger("shardengine")
    level = log.level
    gc.freeze()  # so that a collection looks at what jobs made, and takes milliseconds
    pipe.send("ready")
    while (job := pipe.recv()) is not None:
        function, args, kwargs = job
        gc.collect()  # earlier engines, whose groups have threads of gloo's that wake a hundred times a second
        try:
            pipe.send((True, function(*args, **kwargs)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
        errors._names.clear()  # what one job has called by other names is no business of the next one
        log.setLevel(level)
    dist.barrier()
    dist.destroy_process_group()


class RankPool:
    """``ranks`` processes with a gloo process group."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = HANG_S, **kwargs: Any) -> list[Any]:
        """Call ``function`` on every rank; its results in rank order."""
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((function, args, kwargs))
        answers = self._collect(timeout)
        errors = {rank: value for rank, (fine, value) in enumerate(answers) if not fine}
        if errors:
            self.stop(force=True)
            raise RankFailure(errors)
        return [value for _, value in answers]

    def run_expecting_errors(self, function: Callable[..., Any], *args: Any, timeout: float = HANG_S) -> dict[int, str]:
        """Call ``function`` on every rank, expecting that it raises somewhere; rank → traceback."""
        try:
            self.run(function, *args, timeout=timeout)
        except RankFailure as failure:
            return failure.errors
        raise AssertionError("expected an error on some rank, none came")

    def stop(self, *, force: bool = False) -> None:
        """End the processes."""
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            if force:
                process.kill()
            elif process.is_alive():
                pipe.send(None)
        for process in self._processes:
            process.join(20)
            if process.is_alive():
                process.kill()
        self._processes, self._pipes = [], []

    def _start(self) -> None:
        context = fork_context()
        store = Path(tempfile.mkdtemp()) / "store"
        for rank in range(self.ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.ranks, str(store), theirs), daemon=True)
            process.start()
            self._processes.append(process)
            self._pipes.append(ours)
        self._collect(HANG_S)

    def _collect(self, timeout: float) -> list[Any]:
        deadline = time.monotonic() + timeout
        answers = []
        for rank, pipe in enumerate(self._pipes):
            while not pipe.poll(0.05):
                if not self._processes[rank].is_alive():
                    code = self._processes[rank].exitcode
                    self.stop(force=True)
                    raise RankFailure({rank: f"the process died with exit code {code}"})
                if time.monotonic() > deadline:
                    self.stop(force=True)
                    raise RankFailure({rank: f"no answer within {timeout} s: a hang"})
            try:
                answers.append(pipe.recv())
            except EOFError:
                self._processes[rank].join(5)
                code = self._processes[rank].exitcode
                self.stop(force=True)
                raise RankFailure({rank: f"the process died with exit code {code}"}) from None
        return answers
