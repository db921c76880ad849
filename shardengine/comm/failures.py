"""Reports between ranks when something goes wrong, over the process group's store instead of its collectives.

Owns: the reports of a rank (that it raised or gave up, that it waits, that it leaves), and how the others read and
describe them. Must not know: which collectives there are, the conclusions of a wait (watchdog), buckets, the engine.

[Note: Failure reports] A rank that raises in forward, backward or step leaves the others waiting in a collective that
it will never issue. So it reports the failure: it writes what happened under its number. A rank whose wait lasts longer
than ``POST_AFTER_S`` (watchdog) announces its wait, and reads the others' reports between slices of its wait. If a
report has stood for ``STANDS_S`` during the wait, the rank ends its wait with an error that names the other rank and
quotes its report. Reports with a shorter life do not count: an exception that happens on every rank may be caught on
every rank, and the next call of the engine withdraws the report. A report also does not count on a rank that raised in
the same attempt. An attempt is a place and the number of calls of its kind so far, since ranks make the same calls. So
a later failure at the same place counts again.

When a wait has failed (``timeout_s``, a closed connection), the missing ranks are those that do not report that they
wait for the same collective. A wait shorter than one slice uses none of this.

[Note: Departures] A rank that closes its engine, drops it or ends its process reports this at once, with the number of
collectives that it has issued. A rank that waits for a later one raises at its next look, because nobody will issue it.
A departure is written in a channel. Ranks take the channels of a mesh in the same order, so engines beside and after
each other do not read each other's departures. Ranks that wait for each other (positions: [Note: In vain]) raise when
this has lasted for ``STANDS_S``. A killed rank reports nothing; its progress was written before (store_board:
[Note: How far a rank is]).
"""

from __future__ import annotations

import atexit
import json
import multiprocessing.util
import os
import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace

from shardengine.comm import outside
from shardengine.comm.mesh import Mesh
from shardengine.comm.outside import Outside
from shardengine.comm.positions import Departure, Presence, Waiting
from shardengine.comm.store_board import StoreBoard, Unreachable
from shardengine.comm.threads import await_threads
from shardengine.errors import CommunicationError, MismatchError

LINGER_S = 5.0
_TEXT_LIMIT = 2000
_STORE = "the process group's store, through which ranks tell each other what happened"


@dataclass(frozen=True)
class FailureReport:
    """The report of one rank.

    where, attempt: the call that raised · gave_up: because of another rank · over: the rank has continued.
    """

    text: str
    where: str = ""
    attempt: int = 0
    gave_up: bool = False
    over: bool = False

    @property
    def verb(self) -> str:
        """The rank's action, for a sentence."""
        return "gave up" if self.gave_up else "raised"


class Failures:
    """This rank's side of [Note: Failure reports] over one mesh. At one rank nothing is written."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self._process = os.getpid()
        self._channel = next(mesh.channels)
        self.issued: Counter[str] = Counter()
        self._outside = Outside(f"outside/{self._channel}", mesh, self._channel, self.issued)
        self.board = StoreBoard(mesh, f"at/{self._channel}", [self._outside])
        self._progress: tuple[int, int] | None = None
        self._place = ""
        self._inside = False
        self._posted = False
        self.departure: Departure | None = None
        self.gave_up = ""
        self._reported: FailureReport | None = None
        self._known = 0
        self._calls: Counter[str] = Counter()
        self._before_close: list[Callable[[], None]] = []
        self._raised: set[tuple[str, int]] = set()
        if mesh.ranks > 1:
            _open.add(self)
            _at_exit()

    @contextmanager
    def reports_failure(self, where: str, place: Callable[[BaseException], str], kind: str = "") -> Iterator[None]:
        """Report to the others if the call inside raises by itself.

        place: returns the unit or module that raised · kind: the calls that are counted together; every rank makes
        those of one kind in the same order.
        """
        self.withdraw()
        self._outside.look_at_this_thread()
        self._known = 0
        self._calls[kind] += 1
        attempt = self._calls[kind]
        outer = (self._place, self._inside)
        self._place, self._inside = where, True
        try:
            yield
        except (CommunicationError, MismatchError):
            raise  # the consequence of another rank's failure, or raised on every rank
        except BaseException as error:
            if not self.knows(error):
                self._raised.add((where, attempt))
                self.report(
                    FailureReport(f"{type(error).__name__}: {error} (in {where}, {place(error)})", where, attempt)
                )
                self.mark_known(error)
            raise
        finally:
            self._place, self._inside = outer if outer[1] else (where, False)

    def report_outside(self, error: BaseException, what: str) -> None:
        """Report ``error``, raised at ``what`` outside of any call of the engine; inside of one, that call reports it.

        Ranks that raise the same error at the same place ignore each other's reports.
        """
        if self._inside or isinstance(error, CommunicationError | MismatchError):
            return
        where = f"{what} {self._after()}".strip()
        self._raised.add((where, 0))
        self.report(FailureReport(f"{type(error).__name__}: {error} (in {where})", where))
        self.mark_known(error)

    def begin(self) -> None:
        """From now on report to the other ranks which collective of the program this rank waits in."""
        if self.mesh.ranks > 1:
            self.board.write_later(self._after())

    def set_progress(self, steps: int, micro_batches: int) -> None:
        """Report the progress of this rank: the steps that it has completed, and micro-batches of the next one."""
        if (steps, micro_batches) != self._progress and self.mesh.ranks > 1:
            self._progress = (steps, micro_batches)
            self.board.write_later(self._after())

    def take_over_progress(self, before: Failures) -> None:
        """Take over the progress of ``before``, whose mesh this one's replaces."""
        if before._progress is not None:
            self.set_progress(*before._progress)

    def mark_known(self, error: BaseException) -> None:
        """The other ranks know of ``error``, which is raised now, so it needs no report."""
        self._known = id(error)  # not the error itself, whose traceback would keep tensors alive

    def knows(self, error: BaseException) -> bool:
        """Return whether ``error`` was reported to the other ranks."""
        return self._known in (id(error), id(error.__cause__))

    def give_up(self, reason: str) -> None:
        """Report that a wait has failed, so something is in flight that may never end."""
        self.gave_up = reason
        if self._reported is None:  # a report of its own exception explains more
            self.report(FailureReport(reason, gave_up=True))

    def report(self, report: FailureReport) -> None:
        """Write the report; silent if the store is gone, since the caller has an error of its own to raise."""
        if self.mesh.ranks == 1:
            return
        self._reported = replace(report, text=report.text[:_TEXT_LIMIT])
        self._write("failure", json.dumps(asdict(self._reported)))

    def withdraw(self) -> None:
        """This rank continues: withdraw its report and the wait that it announced.

        After a departure the announced wait stands: this rank waited for the others to close, and some may wait
        elsewhere.
        """
        if self._posted and self.presence is Presence.PRESENT:
            self.post(None)
        if self._reported is not None:
            self.report(replace(self._reported, over=True))
            self._reported = None

    def call_before_close(self, call: Callable[[], None]) -> None:
        """Call ``call`` when this ends, before the connection ends."""
        self._before_close.append(call)

    def _end_companions(self) -> None:
        while self._before_close and self.is_of_this_process:  # threads of another process are not here
            self._before_close.pop()()

    def close(self) -> None:
        """End: withdraw this rank's report and close the connection to the store."""
        self._end_companions()
        self.withdraw()
        self.board.close()
        _open.discard(self)
        if self.departure is not None and self._hosts:
            _last[:] = [self]

    def leave(
        self, what: str, presence: Presence = Presence.LEFT, *, error: BaseException | None = None, wait: bool = True
    ) -> None:
        """Report that this rank takes part in nothing any more, and why ([Note: Departures]).

        presence: from now on. A rank that gave up before has LEFT instead of CLOSING, and is not waited for · error:
        the reason · wait: until the report is written.
        """
        may = self.presence.may_become(presence)
        if self.mesh.ranks == 1 or not self.issued or not may or not self.is_of_this_process:
            return
        reason = "" if error is None else f" ({type(error).__name__}: {error})"
        reason = f" (gave up: {self.gave_up})" if self.gave_up else reason
        unclosed = presence is not Presence.CLOSING and self._progress is not None
        without = ", without engine.close()" if unclosed else ""
        after = self._after()
        text = f"{what}{after and ' '}{after}{without}{reason}"[:_TEXT_LIMIT]
        counts = {str(group): count for group, count in self.issued.items()}
        if presence is Presence.CLOSING and self.gave_up:
            presence = Presence.LEFT
        self.departure = Departure(text, presence, bool(reason), counts)
        with suppress(Unreachable):
            self.board.write(f"left/{self._channel}", json.dumps(asdict(self.departure)), wait=wait)

    def linger(self, deadline: float) -> None:
        """Wait until the others have left or until ``deadline``, if this process hosts the store.

        The store ends with the process.
        """
        if self.departure is None or not self._hosts:
            return
        with suppress(Unreachable):
            while len(self.departures()) < self.mesh.ranks - 1 and time.monotonic() < deadline:
                time.sleep(0.05)
        self.board.close(wait_s=1.0)

    def end_with_process(self, error: BaseException | None) -> None:
        """Report that the process ends; afterwards no thread is at work."""
        self._end_companions()
        self.leave("has ended its process", Presence.ENDED, error=error)
        self.board.close(wait_s=1.0)

    @property
    def _hosts(self) -> bool:
        return self.mesh.store_host() == self.mesh.rank

    def _after(self) -> str:
        """Return the progress of this rank, in words; "" if it is not known."""
        if self._progress is None:
            return ""
        steps, micro_batches = self._progress
        if micro_batches:
            return f"after micro-batch {micro_batches} of step {steps + 1}"
        return f"after step {steps}" if steps else "before its first step"

    def repeat_report(self, what: str) -> None:
        """Repeat this rank's last report without its place, so it counts for every rank.

        The ranks that wait must come to ``what``.
        """
        last = self._reported or FailureReport(f"it waits in {what}", gave_up=True)
        self.report(FailureReport(last.text, gave_up=last.gave_up))

    def describe(self, missing: set[int], waits: dict[int, Waiting] | None = None) -> str:
        """Return who is missing, with the last report of each."""
        try:
            waits, reports = (self.waits() if waits is None else waits), self.reports()
            departed, passed = self.departures(), self.board.read(f"at/{self._channel}")
        except Unreachable as error:
            return self._describe_unheard(missing, waits or {}, str(error))
        said = []
        for rank in sorted(missing):
            parts = []
            report = reports.get(rank)
            if report is not None and not (report.gave_up and rank in waits):
                parts.append(f"{report.verb}: {report.text}" + (" (and went on)" if report.over else ""))
            if rank in departed:
                parts.append(departed[rank].text)
            elif rank in waits:
                parts.append(f"waits for {waits[rank].text}" + (f" in {waits[rank].where}" * bool(waits[rank].where)))
            if not parts:
                parts.append("says nothing (busy elsewhere, hung or gone)")
                parts += [f"last seen {passed[rank]}"] if rank in passed else []
            said.append(f"rank {rank} " + ", ".join(parts))
        return "Missing: " + "; ".join(said)

    def _describe_unheard(self, missing: set[int], waits: dict[int, Waiting], reason: str) -> str:
        """As ``describe``, without the store ([Note: The store may be gone]). waits: those that were read before."""
        host = self.mesh.store_host()
        if host is None or host == self.mesh.rank:
            said = [f"{_STORE}, cannot be reached ({reason}): the process that hosts it may be gone or stopped"]
        else:
            said = [f"Missing: rank {host} cannot be reached ({reason}), so it is gone or stopped; it hosts {_STORE}"]
        said += [f"rank {rank} waited for {waits[rank].text}" for rank in sorted(missing & waits.keys() - {host})]
        unheard = sorted(missing - waits.keys() - {host})
        return "; ".join(said) + (f"; without it nothing is known of ranks {unheard}" if unheard else "")

    def waits(self) -> dict[int, Waiting]:
        """Return the waits of the other ranks: those that they report, and those in collectives of the program."""
        texts = {**self.board.read(f"outside/{self._channel}"), **self.board.read("waits")}
        return {rank: Waiting(**json.loads(text)) for rank, text in texts.items()}

    def departures(self) -> dict[int, Departure]:
        """Return the departures of the other ranks."""
        return {rank: Departure.from_json(text) for rank, text in self.board.read(f"left/{self._channel}").items()}

    def reports(self) -> dict[int, FailureReport]:
        """Return the reports of the other ranks."""
        return {rank: FailureReport(**json.loads(text)) for rank, text in self.board.read("failure").items()}

    def standing(self) -> dict[int, FailureReport]:
        """Return the reports that count ([Note: Failure reports]), whatever their age."""
        reports = self.reports().items()
        return {rank: n for rank, n in reports if not n.over and (n.where, n.attempt) not in self._raised}

    def news(self) -> int:
        """Return a number that changes whenever some rank writes."""
        return self.board.news()

    def post(self, waiting: Waiting | None) -> None:
        """Announce the wait of this rank (None: it waits for nothing)."""
        self._posted = waiting is not None
        self._write("waits", "" if waiting is None else json.dumps(asdict(self.placed(waiting))))

    def placed(self, waiting: Waiting) -> Waiting:
        """Return ``waiting`` with the call that this rank is in and the collectives that it has issued."""
        where = self._place if self._inside else waiting.where
        issued = {**outside.counts(), **self.issued, **waiting.issued}
        return replace(waiting, channel=self._channel, issued=issued, where=where)

    @property
    def place(self) -> str:
        """The place of this rank, for errors."""
        if not self._place:
            return f"rank {self.mesh.rank} goes on"
        return f"this rank ({self.mesh.rank}) {'is in' if self._inside else 'has left'} {self._place}"

    @property
    def presence(self) -> Presence:
        """Whether this rank still takes part."""
        return Presence.PRESENT if self.departure is None else self.departure.presence

    @property
    def is_open(self) -> bool:
        """Whether it was not closed."""
        return self in _open

    @property
    def is_of_this_process(self) -> bool:
        """Whether this was made in this process, and not in one that has forked it."""
        return self._process == os.getpid()

    def _write(self, kind: str, text: str) -> None:
        with suppress(Unreachable):  # those who read say so
            self.board.write(kind, text)


# The end of the process

_open: weakref.WeakSet[Failures] = weakref.WeakSet()
_last: list[Failures] = []
"""The one that was closed last, if this process hosts the store."""
_registered: list[int] = []
"""The process that reports its end; a process that it forks does not."""


def open_failures() -> list[Failures]:
    """Return the ``Failures`` of this process that have not been closed."""
    return [each for each in list(_open) if each.is_of_this_process]


def leave_all(what: str) -> None:
    """Report ``what`` as a departure of every open engine of this process, before the rank waits for the end."""
    for each in list(_open):
        each.leave(what, Presence.ENDED)


def _at_exit() -> None:
    if _registered != [os.getpid()]:
        _registered[:] = [os.getpid()]
        atexit.register(_end)
        multiprocessing.util.Finalize(None, _end, exitpriority=0)  # a process of multiprocessing runs nothing else


def _end() -> None:
    """The process ends. Nothing may fail here, nor wait for long."""
    if _registered != [os.getpid()]:
        return
    _registered.clear()
    error = sys.exc_info()[1] or getattr(sys, "last_value", None)
    if isinstance(error, SystemExit) and not error.code:
        error = None
    with suppress(Exception):
        ending = list(_open)
        for each in ending:
            each.end_with_process(error)
        deadline = time.monotonic() + LINGER_S
        for each in [*ending, *_last]:
            each.linger(deadline)
        await_threads(LINGER_S)
