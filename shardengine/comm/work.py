"""A collective from its start to the end of its wait.

Owns: counters of bytes and of collectives, the comparison in debug mode, the wait under the watchdog, the errors.

Every collective passes through a ``CollectiveLedger``. It counts the bytes, compares the collective across ranks in
debug mode, and turns a failure into an error that names operation, bucket, parameters and ranks. Must not know: the
operations of torch, the purposes of collectives.

[Note: Waiting in slices] On gloo a wait is cut into slices; the end of a slice leaves the operation running. Between
slices this rank reads the reports of the others (failures: [Note: Failure reports]). On NCCL ``wait`` only orders
streams and the host never blocks there; it learns of a failure in the next exchange, which always uses gloo, or from
the watcher.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from shardengine.comm.failures import Failures
from shardengine.comm.flight_recorder import Collective, CollectiveRecord, FlightRecorder, Purpose
from shardengine.comm.group_kind import GroupName
from shardengine.comm.mesh import Mesh
from shardengine.comm.nccl_watcher import Watcher
from shardengine.comm.watchdog import NOBODY_MISSING, Watchdog
from shardengine.errors import CommunicationError, InternalError, MismatchError, ShardEngineError
from shardengine.offload import CopyStream
from shardengine.trace import COMMUNICATION, HostMoment, Moment, Trace, now

_SLICE = timedelta(seconds=0.5)
_SHORT_SLICE = timedelta(milliseconds=5)
"""The time between two calls of ``meanwhile``."""
_BACKENDS = ("gloo", "nccl", "connection")
"""Words in errors of the backends that carry messages."""


class Work:
    """A collective in flight. ``wait`` blocks until its result may be used (on CUDA: makes the stream wait).

    works: torch's · wait_for: blocks until their data is there · on_complete: the local part, called once · wait_here:
    makes the current stream, on which nothing else waits, wait for all of ``works``, waited for or not.
    """

    def __init__(
        self,
        works: Sequence[dist.Work] = (),
        wait_for: Callable[[Sequence[dist.Work]], None] = lambda works: None,
        on_complete: Callable[[], None] | None = None,
        wait_here: Callable[[], None] = lambda: None,
    ) -> None:
        self._works = works
        self._wait_for = wait_for
        self._on_complete = on_complete
        self.wait_here = wait_here
        self._follow: Callable[[], Work] | None = None
        self._at_end: Callable[[], None] | None = None

    def ending_with(self, at_end: Callable[[], None]) -> Work:
        """Return this work, whose local part ends with ``at_end``, called once."""
        self._at_end = at_end
        return self

    def followed_by(self, follow: Callable[[], Work]) -> Work:
        """Return this work; when its data is there, it continues as the work that ``follow`` starts."""
        self._follow = follow
        return self

    def done(self) -> bool:
        """Return whether the data is there; ``wait`` may still have to run the local part. A successor is started."""
        over = all(work.is_completed() for work in self._works)
        if not over or self._follow is None:
            return over
        self._go_on()
        return self.done()

    def wait_data(self) -> None:
        """Wait until the data is there; the local part does not run yet."""
        while self._works or self._follow is not None:
            self._go_on()

    def _go_on(self) -> None:
        if self._works:
            self._wait_for(self._works)
            self._works = ()
        if self._follow is not None:
            later = self._follow()  # if it raises, the next wait does so as well
            self._follow = None
            self._works, self._wait_for, self._on_complete = later._works, later._wait_for, later._on_complete

    def wait(self) -> None:
        """Wait, then run the local part (the sum of a direct reduce-scatter), once."""
        self.wait_data()
        on_complete, self._on_complete = self._on_complete, None
        at_end, self._at_end = self._at_end, None
        for part in (on_complete, at_end):
            if part is not None:
                part()


class _HeldUp(NamedTuple):
    """Who waited for a collective (None: the host), from when until when."""

    stream: Any
    start: Moment
    end: Moment


class CollectiveLedger:
    """Starts every collective over one mesh, and waits for it. ``sent``: bytes by purpose, as the algorithm needs.

    trace, sent: of this rank, over all meshes · overlap: collectives run beside the computation; if not, the ledger
    waits for each one at its start · before: the ledger of the groups that ``mesh`` replaces · compare: called in debug
    mode before each collective of data, with the text that is the same on all ranks.
    """

    def __init__(
        self,
        mesh: Mesh,
        trace: Trace,
        sent: Counter[Purpose],
        *,
        overlap: bool,
        before: CollectiveLedger | None,
        compare: Callable[[str], None] | None,
    ) -> None:
        self.mesh, self.trace, self.sent = mesh, trace, sent
        self._overlap, self._compare = overlap, compare
        self.failures = Failures(mesh)
        self._watcher = Watcher(self.failures) if mesh.kind.breaks_off and mesh.ranks > 1 else None
        self._sequence = 0
        self._is_replaced = False
        if before is not None:
            self.failures.take_over_progress(before.failures)
            before._is_replaced = True
        self.flight_recorder = FlightRecorder((GroupName.GATHER, GroupName.REDUCE))

    def record(self, what: Collective) -> CollectiveRecord:
        """Return the record of ``what``, which is issued next, with its number."""
        if what.purpose is not Purpose.CONTROL:
            self._sequence += 1
        issued = self.failures.issued
        issued[what.group] += 1
        self.flight_recorder.add(what)
        return CollectiveRecord(self._sequence, issued[what.group], what)

    def start(
        self,
        what: Collective,
        call: Callable[[], list[dist.Work]],
        on_complete: Callable[[], None] | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> Work:
        """Count the collective, compare it across ranks in debug mode, and start it; without overlap wait for it here.

        call: starts it and returns torch's works · meanwhile: called again and again while the host waits.
        ``InternalError`` after ``reset`` has made new groups: the holder of a transfer of the old ones must drop it.
        """
        if self._is_replaced:
            raise InternalError(f"{what.title}: its transfer was compiled for groups that reset() has replaced")
        return self.issue(self.record(what), call, on_complete, meanwhile)

    def issue(
        self,
        record: CollectiveRecord,
        call: Callable[[], list[dist.Work]],
        on_complete: Callable[[], None] | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> Work:
        """As ``start``, for a collective that has its number already."""
        of = record.of
        is_data = of.purpose is not Purpose.CONTROL
        if self.mesh.breaking_off.reason:
            self.mesh.breaking_off.check(record.describe(self.mesh.rank))
        if self._compare is not None and is_data:
            self._compare(record.debug_text)
        self.sent[of.purpose] += of.sent
        start = self._moment(record) if self.trace.recording else None
        try:
            works = call()
        except (ShardEngineError, torch.OutOfMemoryError):  # of the call's own work: it says more
            raise
        except RuntimeError as error:
            raise CommunicationError(
                f"{record.describe(self.mesh.rank)} failed: {error}", code="collective-failed"
            ) from error
        if self._watcher is not None and of.begun_here and of.group is not GroupName.CONTROL:
            self._watcher.issued(record, works[-1])
        if start is not None:
            self._trace_end(works, record, start)
        before = None
        if not self._overlap and is_data:  # and once more before its use, maybe on another stream
            before = self._held_up(record, works)
        wait = functools.partial(self._wait, record, before, meanwhile)
        return Work(works, wait, on_complete, functools.partial(self._wait_here, record, works))

    def _wait_here(self, record: CollectiveRecord, works: Sequence[dist.Work]) -> None:
        for work in works:
            wait_for(work, record, self.failures)

    def _wait(
        self,
        record: CollectiveRecord,
        before: _HeldUp | None,
        meanwhile: Callable[[], None] | None,
        works: Sequence[dist.Work],
    ) -> None:
        """Wait until the data of ``works`` may be used.

        before: an earlier wait for them, if any; its time counts if the same stream waited.
        """
        if before is None and not ends_on_stream(record, self.mesh):
            since = now()
            for work in works:
                wait_for(work, record, self.failures, meanwhile)
            self.trace.host_waited(record.of.title, since)
            return
        held = self._held_up(record, works, meanwhile)
        exposed = before if before is not None and before.stream == held.stream else held
        self.trace.waited(record.of.title, exposed.start, exposed.end)

    def _held_up(
        self, record: CollectiveRecord, works: Sequence[dist.Work], meanwhile: Callable[[], None] | None = None
    ) -> _HeldUp:
        """Wait on the current stream, or on the host; return the time that this took."""
        start = self._moment(record)
        for work in works:
            wait_for(work, record, self.failures, meanwhile)
        return _HeldUp(self.mesh.platform.here(), start, self._moment(record))

    def _moment(self, record: CollectiveRecord) -> Moment:
        """Return the present moment of the waiting side: the current stream, or the host."""
        return self.trace.moment() if ends_on_stream(record, self.mesh) else HostMoment()

    def _trace_end(self, works: Sequence[dist.Work], record: CollectiveRecord, start: Moment) -> None:
        """Trace the end of ``works``: from the thread that finds it, or on a stream that waits for it."""
        of = record.of
        details = {"purpose": of.purpose.value, "bytes sent": of.sent, "what": of.subject}

        def ended(_: Any = None) -> None:
            self.trace.add(COMMUNICATION, of.title, start, self._moment(record), details)

        if not ends_on_stream(record, self.mesh):
            works[-1].get_future().add_done_callback(ended)
            return
        with self._ends.is_current():
            for work in works:
                work.wait()
            ended()

    @functools.cached_property
    def _ends(self) -> CopyStream:
        """The stream that waits for the ends of traced collectives."""
        return self.mesh.platform.copy_stream()


def ends_on_stream(record: CollectiveRecord, mesh: Mesh) -> bool:
    """Return whether streams wait for the collective, and the host does not."""
    return mesh.backend == "nccl" and record.of.begun_here and record.of.group is not GroupName.CONTROL


def wait_for(
    work: dist.Work, record: CollectiveRecord, failures: Failures, meanwhile: Callable[[], None] | None = None
) -> None:
    """Wait until the data of ``work`` may be used; on NCCL the stream waits, and the host continues.

    meanwhile: called again and again if the host waits.
    """
    if not ends_on_stream(record, failures.mesh):
        _wait_under_watchdog(work, record, failures, meanwhile)
        return
    try:
        work.wait()
    except RuntimeError as error:
        raise CommunicationError(
            f"{record.describe(failures.mesh.rank)} failed: {error}", code="collective-failed"
        ) from error


def explain(error: BaseException, record: CollectiveRecord, failures: Failures) -> None:
    """Raise ``CommunicationError`` with the missing ranks if ``error`` comes from a connection.

    error: of a collective that somebody else has begun.
    """
    if failures.mesh.ranks == 1 or not any(word in str(error).lower() for word in _BACKENDS):
        return
    rank = failures.mesh.rank
    watchdog = Watchdog(failures, record.waiting(rank))
    try:
        watchdog.look_for_departures()
        raise CommunicationError(
            f"{record.describe(rank)} failed: {error}. {watchdog.diagnosis()}", code="collective-failed"
        ) from error
    except (CommunicationError, MismatchError) as raised:
        failures.give_up(str(raised))
        raise


def _diagnosis(watchdog: Watchdog, record: CollectiveRecord) -> str:
    said = watchdog.diagnosis()
    if said == NOBODY_MISSING and not record.of.begun_here:
        return "Every rank waits for the future that its hook has returned, and nobody has completed it"
    return said


def _ended(work: dist.Work, meanwhile: Callable[[], None] | None) -> bool:
    """Wait for a slice; return False if the slice is over, or if ``work`` has failed, which completes it."""
    parts = 1 if meanwhile is None else _SLICE // _SHORT_SLICE
    for _ in range(parts):
        if meanwhile is not None:
            meanwhile()
        with suppress(RuntimeError):
            work.wait(_SLICE / parts)
            return True
        if work.is_completed():
            break
    return False


def _wait_under_watchdog(
    work: dist.Work, record: CollectiveRecord, failures: Failures, meanwhile: Callable[[], None] | None
) -> None:
    """Wait for ``work`` ([Note: Waiting in slices])."""
    if _ended(work, meanwhile):
        return
    rank = failures.mesh.rank
    watchdog = Watchdog(failures, record.waiting(rank), lasted=0.0 if work.is_completed() else _SLICE.total_seconds())
    try:
        while not work.is_completed():
            watchdog.raise_if_in_vain()
            if watchdog.overdue:
                raise CommunicationError(
                    f"{record.describe(rank)}{watchdog.in_call} did not end within {failures.mesh.timeout_s:g} s. "
                    f"{watchdog.late(_diagnosis(watchdog, record))}",
                    code="collective-timed-out",
                )
            _ended(work, meanwhile)
        try:
            work.wait()
        except RuntimeError as error:
            watchdog.look_for_departures()
            diagnosis = watchdog.late(watchdog.diagnosis()) if watchdog.overdue else watchdog.diagnosis()
            what = f"{record.describe(rank)}{watchdog.in_call}"
            raise CommunicationError(f"{what} failed: {error}. {diagnosis}", code="collective-failed") from error
    except (CommunicationError, MismatchError) as error:
        failures.give_up(str(error))
        raise
    watchdog.end()
