"""A record of events and their times, on one rank, in the Chrome trace event format.

Must not know: collectives, units, the engine.

Times are from a monotonic clock that all processes of a machine share, in nanoseconds. Lanes are rows of the picture:

    compute         forward, backward, step, and the forwards of units
    communication   from the issue of a collective to its completion
    waiting         the same collectives, as long as the compute lane stood still for them: the exposed communication

[Note: Moments] On a CPU a moment is when the host reaches it. On a GPU it is when a stream reaches it, which the host
learns later. For compute this is the stream that computes, so a forward lasts as long as its kernels. For a collective
it is first the stream that issued it, then one that waits for its end and for nothing else. So nothing waits for the
device while a trace is recorded; only its beginning and its writing wait. Exposed communication lies between two
moments of the computing stream, before and after its wait for the collective. Decisions that the host waits for are in
the host's time.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

COMPUTE, COMMUNICATION, WAITING = "compute", "communication", "waiting"
LANES = (COMPUTE, COMMUNICATION, WAITING)
MAX_EVENTS = 200_000
"""The most events per rank; later ones are counted and left out."""

Event = tuple[int, str, int, int, dict[str, Any]]
"""Lane, name, start and duration in nanoseconds, further details to show."""

now = time.perf_counter_ns


class Moment(Protocol):
    """A point in the work of the host or of a stream ([Note: Moments])."""

    @property
    def reached(self) -> bool:
        """Whether it is past. Never blocks."""

    def since(self, earlier: Any) -> int:
        """Return the nanoseconds from ``earlier``, of the same kind, to this moment. Both are reached."""

    def at(self, zero: Any, time_of_zero: int) -> int:
        """Return the time, of ``now``, when it was reached. zero: a moment of the device, and its time."""

    def wait_on_host(self) -> int:
        """Block until it is reached, and return the time."""


class HostMoment:
    """A time of the host. time: of ``now``; None: this moment."""

    reached = True

    def __init__(self, time: int | None = None) -> None:
        self._time = now() if time is None else time

    def since(self, earlier: HostMoment) -> int:
        """As ``Moment``'s."""
        return self._time - earlier._time

    def at(self, zero: Any, time_of_zero: int) -> int:
        """As ``Moment``'s."""
        return self._time

    def wait_on_host(self) -> int:
        """As ``Moment``'s."""
        return self._time


class Trace:
    """The events of one rank, recorded only while ``recording``; ``waited_ns`` is always counted.

    moment: returns the present moment of the current stream.
    """

    def __init__(self, moment: Callable[[], Moment] = HostMoment) -> None:
        self.moment = moment
        self.recording = False
        self.events: list[Event] = []
        self.left_out = 0
        self._zero: tuple[Moment, int] = (HostMoment(), 0)
        self._open: deque[tuple[str, str, Moment, Moment, dict[str, Any]]] = deque()
        """Events whose end may not be reached yet; later events wait behind them."""
        self._waits: deque[tuple[Moment, Moment]] = deque()
        self._waited_ns = 0
        self._lock = threading.Lock()
        """Threads of the backend add events as well."""

    def begin(self) -> None:
        """Begin to record; waits for the device."""
        zero = self.moment()
        self._zero = zero, zero.wait_on_host()
        self.recording = True
        self.events, self.left_out = [], 0
        self._open.clear()

    def end(self) -> tuple[list[Event], int]:
        """Stop. Return the recorded events and the number of events that were left out. Waits for the device."""
        self.recording = False
        self._settle(wait=True)
        found, self.events = (self.events, self.left_out), []
        return found

    def drop(self) -> None:
        """Stop and discard all events, because after an error the device may never reach them."""
        self.recording = False
        self.events = []
        self._open.clear()

    def add(self, lane: str, name: str, start: Moment, end: Moment, details: Mapping[str, Any] | None = None) -> None:
        """Record an event from ``start`` to ``end``, if recording."""
        if not self.recording:
            return
        if len(self.events) + len(self._open) >= MAX_EVENTS:
            self.left_out += 1
            return
        self._open.append((lane, name, start, end, dict(details or {})))
        self._settle()

    def mark(self) -> Moment | None:
        """Return the present moment, if recording."""
        return self.moment() if self.recording else None

    def waited(self, name: str, start: Moment, end: Moment) -> None:
        """Record that the compute lane stood still for a collective from ``start`` to ``end``."""
        self._waits.append((start, end))
        self.add(WAITING, name, start, end)

    def host_waited(self, name: str, since: int) -> None:
        """Record that the host waited for a collective from ``since``, a time of ``now``, to this moment."""
        self.waited(name, HostMoment(since), HostMoment())

    @property
    def waited_ns(self) -> int:
        """The nanoseconds that the compute lane stood still for collectives, as far as the device has come.

        Never blocks.
        """
        with self._lock:
            while self._waits and self._waits[0][1].reached:
                start, end = self._waits.popleft()
                self._waited_ns += end.since(start)
        return self._waited_ns

    @contextmanager
    def span(self, name: str, **details: Any) -> Iterator[None]:
        """Record an event of the compute lane, as long as the ``with`` block."""
        start = self.moment()
        try:
            yield
        finally:
            self.add(COMPUTE, name, start, self.moment(), details)

    def _settle(self, *, wait: bool = False) -> None:
        """Compute the times of all events that are over, or, with ``wait``, of all events."""
        with self._lock:
            while self._open and (wait or self._open[0][3].reached):
                lane, name, start, end, details = self._open.popleft()
                if wait:
                    end.wait_on_host()
                first, last = start.at(*self._zero), end.at(*self._zero)
                self.events.append((LANES.index(lane), name, first, last - first, details))


def write(path: Path, ranks: Sequence[tuple[Sequence[Sequence[Any]], int]]) -> None:
    """Write the (events, number left out) of all ranks as one file for chrome://tracing or Perfetto. Raises OSError."""
    first = min((event[2] for events, _ in ranks for event in events), default=0)
    rows: list[dict[str, Any]] = []
    for rank, (events, _) in enumerate(ranks):
        rows.append({"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}})
        for lane, title in enumerate(LANES):
            names = {"pid": rank, "tid": lane}
            rows.append({"ph": "M", **names, "name": "thread_name", "args": {"name": title}})
            rows.append({"ph": "M", **names, "name": "thread_sort_index", "args": {"sort_index": lane}})
        for lane, name, start, duration, details in events:
            rows.append({
                "ph": "X", "pid": rank, "tid": lane, "cat": LANES[lane], "name": name,
                "ts": (start - first) / 1e3, "dur": duration / 1e3, "args": details,
            })  # fmt: skip
    left_out = {f"events left out on rank {rank}": count for rank, (_, count) in enumerate(ranks) if count}
    tree = {"traceEvents": rows, "displayTimeUnit": "ms", "otherData": left_out}
    path.write_text(json.dumps(tree), encoding="utf-8")
