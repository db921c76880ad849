"""Texts of ranks in the process group's store. Owns: the thread and the connection over which they are put and read.

Must not know: what they say.

[Note: The store may be gone] Its host may be killed or stopped, and then an operation may never return. Every
operation therefore runs in a thread, over a connection of its own, and is waited for ``OPERATION_S`` at most. Where a
rank hosts the store (srun, mpirun, ``init_method="tcp://…"``), that rank is then named, and the others are not known.

[Note: How far a rank is] A rank that stands in something of the user's cannot answer, so the thread puts how far it is
every ``WRITE_LATER_S`` if that has changed. The training loop only assigns an attribute. The thread also finds out
whether the rank stands in a collective of the program (outside).
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, Protocol, TypeVar

from shardengine.comm.mesh import Mesh, Store
from shardengine.comm.threads import ending_threads

OPERATION_S = 1.0
WRITE_LATER_S = 2.5

_T = TypeVar("_T")
_Jobs = SimpleQueue[tuple[Callable[[Store], Any], Future[Any]] | None]


class Unreachable(Exception):
    """The store did not answer; the text says what came instead."""


class Later(Protocol):
    """What the thread puts into the store now and then."""

    def put(self, store: Store) -> None:
        """In the thread."""


class LaterText:
    """A text that is put under ``key`` if it has changed."""

    def __init__(self, key: str) -> None:
        self.key = key
        self.text = ""
        self._put = ""

    def put(self, store: Store) -> None:
        """In the thread."""
        text = self.text
        if text != self._put:
            store.set(self.key, text)
            self._put = text


class StoreBoard:
    """Texts by (kind, rank) in the store ([Note: The store may be gone]). later: the key for ``write_later`` · beside:
    what the thread also puts every ``WRITE_LATER_S``."""

    def __init__(self, mesh: Mesh, later: str, beside: Sequence[Later] = ()) -> None:
        self._mesh = mesh
        self._beginning = threading.Lock()
        self._jobs: _Jobs = SimpleQueue()
        self._end: weakref.finalize[..., StoreBoard] | None = None
        self._unanswered: Future[Any] | None = None
        self._thread: threading.Thread | None = None
        self._later = LaterText(f"{later}/{mesh.rank}")
        self._beside = tuple(beside)

    def write_later(self, text: str) -> None:
        """The thread writes ``text`` within ``WRITE_LATER_S``, under a key of its own ([Note: How far a rank is])."""
        self._later.text = text
        if self._end is None:
            self._begin()

    def write(self, kind: str, text: str, *, wait: bool = True) -> None:
        """Put this rank's text; an empty one takes it back. wait: until it is there."""

        def job(store: Store) -> None:
            store.set(f"{kind}/{self._mesh.rank}", text)
            store.add("news", 1)

        if wait:
            self._ask(job)
        else:
            self._submit(job)

    def read(self, kind: str) -> dict[int, str]:
        """The other ranks' texts."""

        def job(store: Store) -> dict[int, str]:
            keys = {rank: f"{kind}/{rank}" for rank in range(self._mesh.ranks) if rank != self._mesh.rank}
            found = {rank: store.get(key).decode() for rank, key in keys.items() if store.check([key])}
            return {rank: text for rank, text in found.items() if text}

        return self._ask(job)

    def news(self) -> int:
        """A number that changes with every text."""
        return self._ask(lambda store: store.add("news", 0))

    def close(self, *, wait_s: float = 0.0) -> None:
        """End the thread and its connection, as happens when the board itself goes. The next question starts anew.

        wait_s: for the end of the thread.
        """
        if self._end is not None:
            self._end()
        if self._thread is not None and wait_s:
            self._thread.join(wait_s)
        self._end = self._unanswered = self._thread = None

    def _begin(self) -> None:
        self._jobs = SimpleQueue()
        self._end = weakref.finalize(self, self._jobs.put, None)
        later = (self._later, *self._beside)
        self._thread = threading.Thread(
            target=_serve, args=(self._mesh, self._jobs, later), name="shardengine-store", daemon=True
        )
        self._thread.start()
        ending_threads.add(self._thread)

    def _submit(self, job: Callable[[Store], _T]) -> Future[_T]:
        with self._beginning:  # several threads ask
            if self._end is None:
                self._begin()
        answer: Future[_T] = Future()
        self._jobs.put((job, answer))
        return answer

    def _ask(self, job: Callable[[Store], _T]) -> _T:
        reason = f"no answer within {OPERATION_S:g} s"
        if self._unanswered is None or self._unanswered.done():
            answer: Future[_T] | None = None
            try:
                answer = self._submit(job)
                return answer.result(OPERATION_S)
            except TimeoutError:
                self._unanswered = answer
            except Exception as error:
                reason = str(error).splitlines()[0]
        raise Unreachable(reason)


def _serve(mesh: Mesh, jobs: _Jobs, later: Sequence[Later]) -> None:
    """Do ``jobs`` until None comes, and every ``WRITE_LATER_S`` put what is to be written ``later``."""
    store: Store | None = None
    due = time.monotonic() + WRITE_LATER_S
    while True:
        try:
            task = jobs.get(timeout=max(0.0, due - time.monotonic()))
        except Empty:
            with suppress(Exception):  # it only helps to describe a failure, and whoever asks hears of the store
                store = store or mesh.store()
                if store is not None:
                    for each in later:
                        each.put(store)
            due = time.monotonic() + WRITE_LATER_S
            continue
        if task is None:
            return
        job, answer = task
        try:
            store = store or mesh.store()
            if store is None:
                raise RuntimeError("there is no process group")
            answer.set_result(job(store))
        except Exception as error:
            answer.set_exception(error)
        del task, job, answer  # they hold the board, which could not end while the next one is waited for
