"""What happened when, on one rank, in the Chrome trace event format. Must not know: collectives, units, the engine.

Times are from a monotonic clock that all processes of a machine share, in nanoseconds. Lanes are rows of the picture:

    compute         forward, backward, step, and the forwards of units
    communication   from the issue of a collective to its completion
    waiting         the same collectives, as long as the compute lane stood still for them: the exposed communication
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

COMPUTE, COMMUNICATION, WAITING = "compute", "communication", "waiting"
LANES = (COMPUTE, COMMUNICATION, WAITING)
MAX_EVENTS = 200_000
"""Per rank; what comes later is counted and left out."""

Event = tuple[int, str, int, int, dict[str, Any]]
"""Lane, name, start and duration in nanoseconds, what else is shown."""

now = time.perf_counter_ns


class Trace:
    """The events of one rank, written down only while ``recording``; ``waited_ns`` is always counted."""

    def __init__(self) -> None:
        self.recording = False
        self.waited_ns = 0
        self.events: list[Event] = []
        self.left_out = 0

    def begin(self) -> None:
        """Write down what happens from now on."""
        self.recording = True
        self.events, self.left_out = [], 0

    def end(self) -> tuple[list[Event], int]:
        """Stop; what was written down, and how many events were left out."""
        self.recording = False
        found, self.events = (self.events, self.left_out), []
        return found

    def add(self, lane: str, name: str, start: int, end: int, details: Mapping[str, Any] | None = None) -> None:
        """An event from ``start`` to ``end`` (of ``now``), if recording."""
        if not self.recording:
            return
        if len(self.events) == MAX_EVENTS:
            self.left_out += 1
            return
        self.events.append((LANES.index(lane), name, start, end - start, dict(details or {})))

    def waited(self, name: str, start: int) -> None:
        """The compute lane stood still for a collective from ``start`` until now."""
        end = now()
        self.waited_ns += end - start
        self.add(WAITING, name, start, end)

    @contextmanager
    def span(self, name: str, **details: Any) -> Iterator[None]:
        """An event of the compute lane, as long as the ``with`` block."""
        start = now()
        try:
            yield
        finally:
            self.add(COMPUTE, name, start, now(), details)


def write(path: Path, ranks: Sequence[tuple[Sequence[Sequence[Any]], int]]) -> None:
    """Write the (events, number left out) of all ranks as one file for chrome://tracing or Perfetto; OSError."""
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
