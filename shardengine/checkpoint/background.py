"""Asynchronous saves. Owns: host copies, the threads that make and write them, synchronization without collectives.

Must not know: the format of files and index, engines.

[Note: Behind training] With ``async_save`` a save copies the weights and buffers, which the user's code can write, to
host memory and returns. A thread copies the optimizer states, which only an optimizer update writes; the next update
waits for that copy. Another thread writes the copies to disk. The ranks then synchronize through the process group's
store, because collectives belong to training and a thread must not issue any. There are two host buffers: while one is
being written, the next save may fill the other, and the save after that waits. Rank 0 warns of a failure at once. The
next call that saves (its own save is under way by then), loads or waits raises it on all ranks. Ranks notice a failure
at different times, so they exchange failures first, and each failure is raised once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from shardengine.comm import Collectives, Mesh, Store
from shardengine.errors import CheckpointError
from shardengine.offload import CopyStream, Done, Platform

Meet = Callable[[str, Callable[[], None]], None]
"""Run a function on every rank and wait for all; an exception on one rank is raised on all."""

_LONGEST_POLL_S = 0.01
_POLLS_PER_S = 1000
"""Limit for all ranks together, once each polls rarely."""
_PATIENCE = 1.25
"""Ranks wait for rank 0's verdict this many times as long as rank 0 waits for their answers."""
_SLOWEST_DISK = 16 << 20
"""Bytes per second; a save may take longer than the group's timeout by the time that such a disk needs for it."""


class Background:
    """One per engine, idle unless ``async_save`` ([Note: Behind training])."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._copier: ThreadPoolExecutor | None = None
        self._copying: Future[None] | None = None
        self._store: Store | None = None
        self._prefix = ""
        self._running: list[tuple[int, Future[None]]] = []
        self._stream: CopyStream | None = None
        self._memory: list[Tensor] = [torch.empty(0, dtype=torch.uint8) for _ in range(2)]
        self._count = 0
        self._told: set[int] = set()

    def copy(
        self, tensors: list[tuple[str, Tensor]], behind: int, mesh: Mesh
    ) -> tuple[list[tuple[str, Tensor]], Future[None]]:
        """Copy ``tensors`` to the host buffer that is not being written; wait until one is free.

        Return the copies and a future. The last ``behind`` copies are complete when the future is done; their sources
        must not change until then. All steps that may fail on one rank alone happen here, not in ``submit``.
        """
        self.await_copy()
        if self._thread is None:
            if mesh.ranks > 1:
                self._store = mesh.store()
                if self._store is None:
                    raise CheckpointError(
                        "async_save: expected the process group's store, there is none", code="save-async-without-store"
                    )
                # engines may share a mesh; every rank creates them in the same order
                self._prefix = f"checkpoint/{self._store.add(f'checkpoint/engines/{mesh.rank}', 1)}"
            self._thread = ThreadPoolExecutor(1, "checkpoint")  # the process waits for it before it exits
            self._copier = ThreadPoolExecutor(1, "checkpoint-copy", mesh.platform.use_in_this_thread)
            self._stream = mesh.platform.copy_stream()
        if len(self._running) > 1:
            self._running[-2][1].exception()
        with torch.inference_mode(False):  # threads run outside of it and cannot write tensors that were made in it
            copies = self._places(tensors, mesh.platform)
            pairs = [(copy, tensor.detach()) for (_, copy), (_, tensor) in zip(copies, tensors, strict=True)]
        ahead = len(pairs) - behind
        now = mesh.platform.mark()
        assert self._copier is not None and self._stream is not None
        _copy(pairs[:ahead], self._stream, now)
        self._copying = self._copier.submit(_copy, pairs[ahead:], self._stream, now)
        return copies, self._copying

    def await_copy(self) -> None:
        """Wait until the copy is complete. Its errors are raised later, by the thread that writes the copies."""
        if self._copying is not None:
            self._copying.exception()

    def submit(self, write: Callable[[Meet], None], mesh: Mesh, largest: int) -> None:
        """Let the thread write the last copies of ``copy``. largest: bytes of the rank that has most."""
        if self._thread is None:
            raise CheckpointError("async_save: expected copy() before submit()", code="save-submit-before-copy")
        self._count += 1
        self._memory.reverse()
        limit = mesh.timeout_s + largest / _SLOWEST_DISK
        meet = _ByStore(self._store, mesh, f"{self._prefix}/{self._count}", limit)
        self._running.append((self._count, self._thread.submit(write, meet)))

    def surface(self, collectives: Collectives) -> None:
        """Wait for all saves in flight and raise the failures of any rank on all ranks. Collective."""
        self.tell(collectives.exchange_objects(self.failures(wait=True), "the end of saves"), collectives)

    def failures(self, *, wait: bool = False) -> list[tuple[int, str]]:
        """Return this rank's failures that were not raised yet, as (number of the save, text). wait: for all saves."""
        errors = []
        while self._running and (wait or self._running[0][1].done()):
            number, future = self._running[0]
            error = future.exception()
            del self._running[0]
            errors += [] if error is None or number in self._told else [(number, str(error))]
        return errors

    def tell(self, failures: list[list[tuple[int, str]]], collectives: Collectives) -> None:
        """Raise the failures of any rank on all ranks. failures: the result of ``failures`` of every rank."""
        found: dict[int, str] = {}
        for number, text in (row for rows in failures for row in rows):
            found.setdefault(number, text)
        self._told |= found.keys()  # a save that still runs here ends in the same failure
        if found:
            failure = CheckpointError(
                f"an earlier save_checkpoint failed: {'; '.join(found.values())}", code="save-earlier-failed"
            )
            collectives.failures.mark_known(failure)  # all ranks raise it
            raise failure

    def close(self) -> None:
        """End the threads and free the memory. Nothing may be in flight."""
        for thread in (self._thread, self._copier):
            if thread is not None:
                thread.shutdown(wait=False)
        self._memory.clear()

    def _places(self, tensors: list[tuple[str, Tensor]], platform: Platform) -> list[tuple[str, Tensor]]:
        """Return room for each tensor in the free host buffer, aligned to 64 bytes."""
        starts, total = [], 0
        for _, tensor in tensors:
            starts.append(total)
            total += -(-tensor.nbytes // 64) * 64
        if self._memory[0].numel() < total:
            self._memory[0] = torch.empty(0, dtype=torch.uint8)  # free the old one first
            self._memory[0] = platform.host_empty(total, torch.uint8, pinned=True)
        return [
            (key, self._memory[0][start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
            for start, (key, tensor) in zip(starts, tensors, strict=True)
        ]


def _copy(pairs: list[tuple[Tensor, Tensor]], stream: CopyStream, after: Done) -> None:
    """Copy the second tensor of each pair to the first, after ``after``; return when the copies are complete."""
    for end in [stream.copy(tensor, copy, after) for copy, tensor in pairs]:
        end.wait_on_host()


class _ByStore:
    """Synchronize ranks through the store: each posts its error or "", rank 0 reads them all and posts a verdict."""

    def __init__(self, store: Store | None, mesh: Mesh, prefix: str, limit_s: float) -> None:
        self._store, self._prefix, self._limit_s = store, prefix, limit_s
        self._rank, self._ranks = mesh.rank, mesh.ranks

    def __call__(self, what: str, work: Callable[[], None]) -> None:
        failure: Exception | None = None
        try:
            work()
        except Exception as error:
            failure = error
        verdict = ""
        if self._store is not None:
            try:
                verdict = self._verdict(self._store, what, "" if failure is None else str(failure) or repr(failure))
            except RuntimeError as error:  # the store's own: its host is gone
                failure = failure or CheckpointError(
                    f"{what}: no answer from rank 0 ({str(error).splitlines()[0]})", code="save-rank-0-silent"
                )
        if failure is not None:
            raise failure
        if verdict:
            raise CheckpointError(
                f"{what} failed on {verdict} (this is rank {self._rank})", code="save-failed-on-other-rank"
            )

    def _verdict(self, store: Store, what: str, mine: str) -> str:
        """Return the errors of all ranks as collected by rank 0; "" if there are none."""
        silence = f"no answer within {self._limit_s:.3g} s"
        if self._rank:
            store.set(f"{self._prefix}/{what}/{self._rank}", mine)
            verdict = self._get(store, f"{what}/verdict", _PATIENCE * self._limit_s)
            return f"rank 0: {silence}" if verdict is None else verdict
        texts = [mine]
        deadline = time.monotonic() + self._limit_s
        for rank in range(1, self._ranks):
            text = self._get(store, f"{what}/{rank}", deadline - time.monotonic())
            texts.append(silence if text is None else text)
            if text is not None:
                store.delete_key(f"{self._prefix}/{what}/{rank}")
        verdict = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts) if text)
        store.set(f"{self._prefix}/{what}/verdict", verdict)
        return verdict

    def _get(self, store: Store, key: str, seconds: float) -> str | None:
        """Return the text at ``key``; None if it does not arrive within ``seconds``."""
        deadline, pause = time.monotonic() + seconds, 0.001
        while not store.check([f"{self._prefix}/{key}"]):
            if time.monotonic() > deadline:
                return None
            time.sleep(pause)
            pause = min(2 * pause, max(_LONGEST_POLL_S, self._ranks / _POLLS_PER_S))
        return store.get(f"{self._prefix}/{key}").decode()
