"""What ranks tell each other when something goes wrong, over the process group's store instead of its collectives.

Owns: notices (a rank raised, a rank waits), the sentences that a waiting rank makes of them, the meeting before new
process groups are built. Must not know: which collectives there are, buckets, the engine.

[Note: Notices] A rank that raises in forward, backward or step leaves the others waiting in a collective that it will
never issue. So it tells them: it writes what happened under its number. A rank whose wait lasts longer than
``POST_AFTER_S`` writes what it waits for, and looks at the others' notices between slices of its wait. One that has
stood for ``STANDS_S`` while we wait ends the wait with an error that names the rank and what it said. Shorter-lived
ones do not count: an exception that happens on every rank may be caught on every rank, and the next call of the engine
takes the notice back. Nor does a notice count of an attempt in which this rank raised, too. An attempt is a place and
how many calls of its kind there were, since ranks make the same calls: a later failure at the same place counts again.

When a wait has failed (``timeout_s``, a closed connection), the missing ranks are those that do not say that they wait
for the same collective. A wait shorter than one slice touches nothing of this.

[Note: The store may be gone] Its host may be killed or stopped, and then an operation may never return. Every
operation therefore runs in a thread, over a connection of its own, and is waited for ``_OPERATION_S`` at most. Where a
rank hosts the store (srun, mpirun, ``init_method="tcp://…"``), that rank is then named, and the others are not known.
"""

from __future__ import annotations

import json
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from queue import SimpleQueue
from typing import Any, TypeVar

from shardengine.errors import CommunicationError, MismatchError
from shardengine.mesh import Mesh, Store

POST_AFTER_S = 1.0
STANDS_S = 3.0
_GRACE_S = 2.0
_OPERATION_S = 1.0
_TEXT_LIMIT = 2000
_STORE = "the process group's store, through which ranks tell each other what happened"

_T = TypeVar("_T")
_Jobs = SimpleQueue[tuple[Callable[[Store], Any], Future[Any]] | None]


class _Unreachable(Exception):
    """The store did not answer; the text says what came instead."""


class _Board:
    """Texts by (kind, rank) in the store ([Note: The store may be gone])."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._jobs: _Jobs = SimpleQueue()
        self._end: weakref.finalize[..., _Board] | None = None
        self._unanswered: Future[Any] | None = None

    def write(self, kind: str, text: str) -> None:
        """Put this rank's text; an empty one takes it back."""

        def job(store: Store) -> None:
            store.set(f"{kind}/{self._mesh.rank}", text)
            store.add("news", 1)

        self._ask(job)

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

    def close(self) -> None:
        """End the thread and its connection, as happens when the board itself goes. The next question starts anew."""
        if self._end is not None:
            self._end()
        self._end = self._unanswered = None

    def _ask(self, job: Callable[[Store], _T]) -> _T:
        if self._end is None:
            self._jobs = SimpleQueue()
            self._end = weakref.finalize(self, self._jobs.put, None)
            threading.Thread(
                target=_serve, args=(self._mesh, self._jobs), name="shardengine-notices", daemon=True
            ).start()
        reason = f"no answer within {_OPERATION_S:g} s"
        if self._unanswered is None or self._unanswered.done():
            answer: Future[_T] = Future()
            self._jobs.put((job, answer))
            try:
                return answer.result(_OPERATION_S)
            except TimeoutError:
                self._unanswered = answer
            except Exception as error:
                reason = str(error).splitlines()[0]
        raise _Unreachable(reason)


def _serve(mesh: Mesh, jobs: _Jobs) -> None:
    """Do ``jobs`` until None comes."""
    store: Store | None = None
    while (task := jobs.get()) is not None:
        job, answer = task
        try:
            store = store or mesh.store()
            if store is None:
                raise RuntimeError("there is no process group")
            answer.set_result(job(store))
        except Exception as error:
            answer.set_exception(error)
        del task, job, answer  # they hold the board, which could not end while the next one is waited for


@dataclass(frozen=True)
class Notice:
    """What a rank said. where, attempt: which call raised · gave_up: because of another rank · over: it went on"""

    text: str
    where: str = ""
    attempt: int = 0
    gave_up: bool = False
    over: bool = False


@dataclass(frozen=True)
class Waiting:
    """What a rank waits for. key: equal on the ranks that wait for the same collective."""

    text: str
    key: str


class Faults:
    """This rank's side of [Note: Notices] over one mesh. At one rank nothing is told."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._board = _Board(mesh)
        self._told: Notice | None = None
        self._known = 0
        self._calls: Counter[str] = Counter()
        self._raised: set[tuple[str, int]] = set()

    @contextmanager
    def announced(self, where: str, place: Callable[[BaseException], str], kind: str = "") -> Iterator[None]:
        """Tell the others when the call inside raises by itself. place: the unit or module in which it raised.

        kind: the calls that are counted together; every rank makes those of one kind in the same order.
        """
        self.withdraw()
        self._known = 0
        self._calls[kind] += 1
        attempt = self._calls[kind]
        try:
            yield
        except (CommunicationError, MismatchError):
            raise  # the consequence of another rank's fault, or raised on every rank
        except BaseException as error:
            if self._known not in (id(error), id(error.__cause__)):
                self._raised.add((where, attempt))
                self.tell(Notice(f"{type(error).__name__}: {error} (in {where}, {place(error)})", where, attempt))
                self.know(error)
            raise

    def know(self, error: BaseException) -> None:
        """The others know of ``error``, which is raised now: there is nothing more to tell."""
        self._known = id(error)  # not the error itself, whose traceback would keep tensors alive

    def tell(self, notice: Notice) -> None:
        """Say it; silent where the store is gone, since whoever calls has an error of its own to raise."""
        if self._mesh.ranks == 1:
            return
        self._told = replace(notice, text=notice.text[:_TEXT_LIMIT])
        self._write("fault", json.dumps(asdict(self._told)))

    def withdraw(self) -> None:
        """This rank goes on: what it told stands no longer."""
        if self._told is not None:
            self.tell(replace(self._told, over=True))
            self._told = None

    def close(self) -> None:
        """Nobody speaks here any more: what this rank told stands no longer, and its connection ends."""
        self.withdraw()
        self._board.close()

    def watch(self, waiting: Waiting, lasted: float = 0.0) -> Watch:
        """A wait that turned out to be a long one. lasted: seconds so far."""
        return Watch(self, waiting, lasted)

    def meet(self, what: str) -> None:
        """Wait until every rank calls this; ``CommunicationError`` names those that do not within ``timeout_s``."""
        if self._mesh.ranks == 1:
            return
        deadline = time.monotonic() + self._mesh.timeout_s
        pause, written = 0.02, False
        told = self._told or Notice(f"it waits in {what}", gave_up=True)
        self.tell(Notice(told.text, gave_up=told.gave_up))  # counts wherever it was: those who wait must come here, too
        others = set(range(self._mesh.ranks)) - {self._mesh.rank}
        came: set[int] = set()
        while True:
            try:
                if not written:
                    self._board.write("here", what)
                here, written = set(self._board.read("here")), True
            except _Unreachable:
                here, written = set(), False
            if here == others:
                return
            came |= here
            if time.monotonic() > deadline:
                self.part()
                raise CommunicationError(
                    f"{what} on rank {self._mesh.rank}: expected every rank to call it within {self._mesh.timeout_s:g} "
                    f"s. {self.describe(others - came or others - here)}. Start the ranks again"
                )
            time.sleep(pause)
            pause = min(0.5, 1.5 * pause)

    def part(self) -> None:
        """After ``meet``: this rank is not there any more."""
        if self._mesh.ranks > 1:
            self._write("here", "")

    def describe(self, missing: set[int], waits: dict[int, Waiting] | None = None) -> str:
        """Who is missing, and what each of them said last."""
        try:
            waits, told = (self.waits() if waits is None else waits), self.notices()
        except _Unreachable as error:
            return self._describe_unheard(missing, waits or {}, str(error))
        said = []
        for rank in sorted(missing):
            parts = []
            if rank in told and not (told[rank].gave_up and rank in waits):
                verb = "gave up" if told[rank].gave_up else "raised"
                parts.append(f"{verb}: {told[rank].text}" + (" (and went on)" if told[rank].over else ""))
            if rank in waits:
                parts.append(f"waits for {waits[rank].text}")
            said.append(f"rank {rank} " + (", ".join(parts) or "says nothing (busy elsewhere, hung or gone)"))
        return "Missing: " + "; ".join(said)

    def _describe_unheard(self, missing: set[int], waits: dict[int, Waiting], reason: str) -> str:
        """As ``describe``, without the store ([Note: The store may be gone]). waits: what was heard before."""
        host = self._mesh.store_host()
        if host is None or host == self._mesh.rank:
            said = [f"{_STORE}, cannot be reached ({reason}): the process that hosts it may be gone or stopped"]
        else:
            said = [f"Missing: rank {host} cannot be reached ({reason}), so it is gone or stopped; it hosts {_STORE}"]
        said += [f"rank {rank} waited for {waits[rank].text}" for rank in sorted(missing & waits.keys() - {host})]
        unheard = sorted(missing - waits.keys() - {host})
        return "; ".join(said) + (f"; without it nothing is known of ranks {unheard}" if unheard else "")

    def waits(self) -> dict[int, Waiting]:
        """What the other ranks say that they wait for."""
        return {rank: Waiting(**json.loads(text)) for rank, text in self._board.read("waits").items()}

    def notices(self) -> dict[int, Notice]:
        """What the other ranks told."""
        return {rank: Notice(**json.loads(text)) for rank, text in self._board.read("fault").items()}

    def standing(self) -> dict[int, Notice]:
        """Those of them that count ([Note: Notices]), whatever their age."""
        told = self.notices().items()
        return {rank: n for rank, n in told if not n.over and (n.where, n.attempt) not in self._raised}

    def news(self) -> int:
        """A number that changes when some rank says something."""
        return self._board.news()

    def post(self, waiting: Waiting | None) -> None:
        """Say what this rank waits for (None: for nothing)."""
        self._write("waits", "" if waiting is None else json.dumps(asdict(waiting)))

    @property
    def mesh(self) -> Mesh:
        """Whose ranks speak here."""
        return self._mesh

    def _write(self, kind: str, text: str) -> None:
        with suppress(_Unreachable):  # those who read say so
            self._board.write(kind, text)


class Watch:
    """One long wait of this rank: what it says meanwhile, and what it makes of what the others say."""

    def __init__(self, faults: Faults, waiting: Waiting, lasted: float) -> None:
        self._faults = faults
        self._waiting = waiting
        self._started = time.monotonic() - lasted
        self._posted: float | None = None
        self._news = -1
        self._seen: dict[tuple[int, Notice], float] = {}

    @property
    def overdue(self) -> bool:
        """Whether the wait has lasted for ``timeout_s``."""
        return time.monotonic() - self._started > self._faults.mesh.timeout_s

    def look(self) -> None:
        """Between two slices: ``CommunicationError`` where another rank's notice says that the wait is in vain."""
        now = time.monotonic()
        if now - self._started > POST_AFTER_S:
            self._post()
        try:
            news = self._faults.news()
            if news == self._news and not self._seen:
                return
            standing = self._faults.standing()
        except _Unreachable:
            return  # said when the wait has failed
        self._news = news
        self._seen = {item: self._seen.get(item, now) for item in standing.items()}
        ripe = [item for item, since in self._seen.items() if now - since >= STANDS_S]
        if ripe:
            rank, notice = min(ripe, key=lambda item: (item[1].gave_up, item[0]))
            verb = "gave up" if notice.gave_up else "raised"
            raise CommunicationError(
                f"rank {rank} {verb}: {notice.text}. Meanwhile {self._waiting.text} cannot end. Handle the cause, then "
                "call engine.reset() on every rank, or start the ranks again"
            )

    def verdict(self) -> str:
        """The wait has failed: who is missing. The others had, or get, ``_GRACE_S`` to say what they do."""
        faults = self._faults
        deadline = self._post() + _GRACE_S
        missing = set(range(faults.mesh.ranks)) - {faults.mesh.rank}
        waits: dict[int, Waiting] = {}
        while missing:
            try:
                waits = faults.waits()
                missing = {rank for rank in missing if rank not in waits or waits[rank].key != self._waiting.key}
                silent = missing - set(waits) - set(faults.notices())
            except _Unreachable:
                break  # ``describe`` says so
            if not silent or time.monotonic() > deadline:
                break
            time.sleep(0.1)
        if not missing:
            return "every rank waits for it: the connection between them is broken"
        return faults.describe(missing, waits)

    def end(self) -> None:
        """It was only slow."""
        if self._posted is not None:
            self._faults.post(None)

    def _post(self) -> float:
        """Say, once, what this rank waits for. When it did."""
        if self._posted is None:
            self._posted = time.monotonic()
            self._faults.post(self._waiting)
        return self._posted
