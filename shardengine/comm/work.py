"""A collective in flight, and the wait for it. Owns: waiting under the watchdog, the error of a wait that failed.

Must not know: what is sent, why and by which operation.

[Note: Waiting in slices] On gloo a wait is cut into slices; one that ends early leaves the operation running. Between
slices this rank looks at what the others say (failures: [Note: Failure reports]). On NCCL ``wait`` only orders streams
and the host never blocks there; it learns of a failure in the next exchange, which is always gloo's, or from the
watcher.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from shardengine.comm.failures import Failures
from shardengine.comm.flight_recorder import CollectiveRecord
from shardengine.comm.group_kind import GroupName
from shardengine.comm.mesh import Mesh
from shardengine.comm.watchdog import NOBODY_MISSING, Watchdog
from shardengine.errors import CommunicationError, MismatchError

_SLICE = timedelta(seconds=0.5)
_SHORT_SLICE = timedelta(milliseconds=5)
"""After which what is done meanwhile is done again."""
_BACKENDS = ("gloo", "nccl", "connection")
"""Words of errors that come from what carries messages."""


class Work:
    """A collective in flight. ``wait`` blocks until its result may be used (on CUDA: makes the stream wait).

    works: torch's · wait_for: blocks until their data is there · on_complete: the local part, called once.
    """

    def __init__(
        self,
        works: Sequence[dist.Work] = (),
        wait_for: Callable[[Sequence[dist.Work]], None] = lambda works: None,
        on_complete: Callable[[], None] | None = None,
    ) -> None:
        self._works = works
        self._wait_for = wait_for
        self._on_complete = on_complete
        self._follow: Callable[[], Work] | None = None
        self._at_end: Callable[[], None] | None = None

    def ending_with(self, at_end: Callable[[], None]) -> Work:
        """This work, whose local part ends with ``at_end``, called once."""
        self._at_end = at_end
        return self

    def followed_by(self, follow: Callable[[], Work]) -> Work:
        """This work, which is then about the data of what ``follow`` begins when this one's is there."""
        self._follow = follow
        return self

    def done(self) -> bool:
        """Whether the data is there; ``wait`` may still have the local part to do. What follows is begun."""
        over = all(work.is_completed() for work in self._works)
        if not over or self._follow is None:
            return over
        self._go_on()
        return self.done()

    def wait_data(self) -> None:
        """Wait until the data is there; the local part is still to be done."""
        while self._works or self._follow is not None:
            self._go_on()

    def _go_on(self) -> None:
        if self._works:
            self._wait_for(self._works)
            self._works = ()
        follow, self._follow = self._follow, None
        if follow is not None:
            later = follow()
            self._works, self._wait_for, self._on_complete = later._works, later._wait_for, later._on_complete

    def wait(self) -> None:
        """Wait, then run the local part (the sum of a direct reduce-scatter), once."""
        self.wait_data()
        on_complete, self._on_complete = self._on_complete, None
        at_end, self._at_end = self._at_end, None
        for part in (on_complete, at_end):
            if part is not None:
                part()


def ends_on_stream(record: CollectiveRecord, mesh: Mesh) -> bool:
    """Whether streams wait for the collective, and the host does not."""
    return mesh.backend == "nccl" and record.begun_here and record.group is not GroupName.CONTROL


def wait_for(
    work: dist.Work, record: CollectiveRecord, failures: Failures, meanwhile: Callable[[], None] | None = None
) -> None:
    """Until the data of ``work`` may be used; on NCCL the stream waits, and the host goes on. meanwhile: called again
    and again where the host waits."""
    if not ends_on_stream(record, failures.mesh):
        _wait_under_watchdog(work, record, failures, meanwhile)
        return
    try:
        work.wait()
    except RuntimeError as error:
        raise CommunicationError(f"{record.describe(failures.mesh.rank)} failed: {error}") from error


def explain(error: BaseException, record: CollectiveRecord, failures: Failures) -> None:
    """``CommunicationError`` where ``error``, of what others have begun, comes from a connection: who is missing."""
    if failures.mesh.ranks == 1 or not any(word in str(error).lower() for word in _BACKENDS):
        return
    rank = failures.mesh.rank
    watchdog = Watchdog(failures, record.waiting(rank))
    try:
        watchdog.look_for_departures()
        raise CommunicationError(f"{record.describe(rank)} failed: {error}. {watchdog.diagnosis()}") from error
    except (CommunicationError, MismatchError) as raised:
        failures.give_up(str(raised))
        raise


def _diagnosis(watchdog: Watchdog, record: CollectiveRecord) -> str:
    said = watchdog.diagnosis()
    if said == NOBODY_MISSING and not record.begun_here:
        return "Every rank waits for the future that its hook has returned, and nobody has completed it"
    return said


def _ended(work: dist.Work, meanwhile: Callable[[], None] | None) -> bool:
    """Wait for a slice. Returns False where that is over, or where ``work`` has failed: then it is completed."""
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
            watchdog.look()
            if watchdog.overdue:
                raise CommunicationError(
                    f"{record.describe(rank)}{watchdog.in_call} did not end within {failures.mesh.timeout_s:g} s. "
                    f"{watchdog.late(_diagnosis(watchdog, record))}"
                )
            _ended(work, meanwhile)
        try:
            work.wait()
        except RuntimeError as error:
            watchdog.look_for_departures()
            diagnosis = watchdog.late(watchdog.diagnosis()) if watchdog.overdue else watchdog.diagnosis()
            what = f"{record.describe(rank)}{watchdog.in_call}"
            raise CommunicationError(f"{what} failed: {error}. {diagnosis}") from error
    except (CommunicationError, MismatchError) as error:
        failures.give_up(str(error))
        raise
    watchdog.end()
