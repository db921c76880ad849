"""Texts of ranks in the process group's store. Owns: the thread and the connection that write and read them.

Must not know: the content of the texts.

[Note: The store may be gone] Its host may be killed or stopped, and then an operation may never return. So every
operation runs in a thread, over a connection of its own, and the caller waits at most ``OPERATION_S`` for it. If a rank
hosts the store (srun, mpirun, ``init_method="tcp://…"``), the error names that rank; nothing is known of the others.

[Note: How far a rank is] A rank that is inside the user's code cannot answer. So the thread writes the rank's progress
every ``WRITE_LATER_S`` if it has changed. The training loop only assigns an attribute. The thread also finds out
whether the rank is in a collective of the program (outside).
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
    """The store did not answer; the text is the reason."""


class Later(Protocol):
    """Something that the thread writes to the store now and then."""

    def put(self, store: Store) -> None:
        """Write it; called in the thread."""


class LaterText:
    """A text that is written under ``key`` if it has changed."""

    def __init__(self, key: str) -> None:
        self.key = key
        self.text = ""
        self._put = ""

    def put(self, store: Store) -> None:
        """Write it if it has changed; called in the thread."""
        text = self.text
        if text != self._put:
            store.set(self.key, text)
            self._put = text


class StoreBoard:
    """Texts by (kind, rank) in the store ([Note: The store may be gone]).

    later: the key for ``write_later`` · beside: objects that the thread also writes every ``WRITE_LATER_S``.
    """

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
        """Let the thread write ``text`` within ``WRITE_LATER_S``, under its own key ([Note: How far a rank is])."""
        self._later.text = text
        if self._end is None:
            self._begin()

    def write(self, kind: str, text: str, *, wait: bool = True) -> None:
        """Write this rank's text; an empty one withdraws it. wait: until it is written."""

        def job(store: Store) -> None:
            store.set(f"{kind}/{self._mesh.rank}", text)
            store.add("news", 1)

        if wait:
            self._ask(job)
        else:
            self._submit(job)

    def read(self, kind: str) -> dict[int, str]:
        """Return the other ranks' texts."""

        def job(store: Store) -> dict[int, str]:
            keys = {rank: f"{kind}/{rank}" for rank in range(self._mesh.ranks) if rank != self._mesh.rank}
            found = {rank: store.get(key).decode() for rank, key in keys.items() if store.check([key])}
            return {rank: text for rank, text in found.items() if text}

        return self._ask(job)

    def news(self) -> int:
        """Return a number that changes with every text."""
        return self._ask(lambda store: store.add("news", 0))

    def close(self, *, wait_s: float = 0.0) -> None:
        """End the thread and its connection, as happens when the board itself is dropped.

        The next request starts a new thread.

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
    """Run ``jobs`` until None comes, and call ``put`` of each ``later`` every ``WRITE_LATER_S``."""
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
