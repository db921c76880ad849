"""A thread that observes the other ranks while this rank's host may wait for its GPU and cannot do so itself.

Owns: when and why the collectives in flight over groups of NCCL are broken off. Must not know: the data sent, how
collectives are broken off (breaking_off, group_kind).

[Note: The watcher] On NCCL the host waits for no collective, but for the GPU (``loss.item()``, a copy from pageable
memory), behind a collective whose peer may never come. Only the end of that collective lets it continue. So a thread of
every engine asks the store once a second whether some rank has written. The watchers of all ranks break off the
collectives in flight if one stays in flight although

- a rank has failed, or left without issuing it. That rank has as long to come back as in a wait over gloo (watchdog),
  and ``GRACE_S`` more, while the main thread may notice by itself
- this rank has issued nothing for ``timeout_s``

The host continues with the output of the broken collective, and the next call of the engine raises the reason. A rank
that is only slow reports nothing, and nothing follows from that before ``timeout_s``.

The thread asks the GPU whether a collective is over only if a rank has failed or nothing was issued for ``timeout_s``:
a query from another thread would spoil the capture of a CUDA graph.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from contextlib import suppress

import torch.distributed as dist

from shardengine.comm.breaking_off import ASKS
from shardengine.comm.failures import Failures
from shardengine.comm.flight_recorder import CollectiveRecord
from shardengine.comm.group_kind import GroupName
from shardengine.comm.positions import Presence
from shardengine.comm.store_board import Unreachable
from shardengine.comm.threads import ending_threads
from shardengine.comm.watchdog import Watchdog
from shardengine.errors import CommunicationError, MismatchError

_log = logging.getLogger(__name__)
POLL_S = 1.0
GRACE_S = 3.0
_END_S = 2.0
_CURE = "Call engine.reset() on every rank, or start the ranks again"


class Watcher:
    """The thread of [Note: The watcher], from the first collective until the engine ends. It keeps no engine alive."""

    def __init__(self, failures: Failures) -> None:
        self._failures = weakref.ref(failures)
        self._over = threading.Event()
        self._acting = threading.Lock()
        self._thread: threading.Thread | None = None
        self._latest: dict[GroupName, tuple[CollectiveRecord, dist.Work]] = {}
        self._seen: tuple[int, ...] = ()
        self._moved = time.monotonic()
        self._news = -1
        self._alarm = False
        self._watched: tuple[CollectiveRecord, dist.Work] | None = None
        self._watchdog: Watchdog | None = None
        self._in_vain_since: float | None = None
        failures.call_before_close(self.end)

    def issued(self, record: CollectiveRecord, work: dist.Work) -> None:
        """A collective is in flight; those of one group end in the order of issue."""
        self._latest[record.of.group] = (record, work)
        if self._thread is None:
            self._begin()

    def end(self) -> None:
        """End the watcher; after this returns it breaks off nothing more."""
        self._over.set()
        with self._acting:
            pass
        if self._thread is not None:
            self._thread.join(_END_S)

    def _begin(self) -> None:
        self._thread = threading.Thread(target=self._run, name="shardengine-watcher", daemon=True)
        ending_threads.add(self._thread)
        self._thread.start()

    def _run(self) -> None:
        while not self._over.wait(POLL_S):
            failures = self._failures()
            if failures is None or failures.presence in (Presence.LEFT, Presence.ENDED):
                return
            if reason := failures.mesh.breaking_off.reason or self._look(failures):
                self._break_off(failures, reason)
                return
            del failures  # while it sleeps nobody else may need them

    def _break_off(self, failures: Failures, reason: str) -> None:
        with self._acting:
            if self._over.is_set():
                return
            failures.give_up(reason)
            try:
                failures.mesh.break_off(reason)
            except CommunicationError as error:
                _log.error("%s", error)  # every later call raises it

    def _look(self, failures: Failures) -> str:
        """Return why the collectives in flight have to be broken off now; "" if they need not be."""
        now = time.monotonic()
        seen = tuple(record.sequence for record, _ in list(self._latest.values()))
        if seen != self._seen:
            self._seen, self._moved = seen, now
        if asked := self._listen(failures):
            return asked
        idle = now - self._moved
        waited_for = self._outstanding() if self._alarm or idle > failures.mesh.timeout_s else None
        if waited_for is None:
            self._watched = self._watchdog = self._in_vain_since = None
            return ""
        if self._watchdog is None or waited_for is not self._watched:
            waiting = waited_for[0].waiting(failures.mesh.rank)
            self._watched, self._in_vain_since = waited_for, None
            self._watchdog = Watchdog(failures, waiting, lasted=idle, host_waits=False)
        return self._judge(failures, self._watchdog, waited_for[0], now)

    def _judge(self, failures: Failures, watchdog: Watchdog, record: CollectiveRecord, now: float) -> str:
        try:
            watchdog.raise_if_in_vain()
        except (CommunicationError, MismatchError) as error:
            if self._in_vain_since is None:
                self._in_vain_since = now
            return str(error) if now - self._in_vain_since >= GRACE_S else ""
        self._in_vain_since = None
        if not watchdog.overdue:
            return ""
        mesh = failures.mesh
        return f"{record.describe(mesh.rank)} did not end within {mesh.timeout_s:g} s. {watchdog.diagnosis()}. {_CURE}"

    def _listen(self, failures: Failures) -> str:
        """Return the request of another rank to break off the collectives in flight; "" if there is none."""
        with suppress(Unreachable):
            news = failures.news()
            if news != self._news:
                asking = failures.board.read(ASKS)
                self._alarm = bool(failures.standing() or failures.departures())
                self._news = news
                for rank, text in asking.items():
                    return f"rank {rank} gave up: {text}"
        return ""

    def _outstanding(self) -> tuple[CollectiveRecord, dist.Work] | None:
        """Return a collective in flight: the last watched one while it is, then one of the latest ones."""
        candidates = [*([self._watched] if self._watched is not None else []), *list(self._latest.values())]
        return next((each for each in candidates if not _is_over(each[1])), None)


def _is_over(work: dist.Work) -> bool:
    try:
        return work.is_completed()
    except RuntimeError:  # the device has failed
        return False
