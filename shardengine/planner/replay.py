"""When a step's events happen: a discrete simulation of its tape, with a clock for each stream.

Owns: the waits, the busy times, and the reasons that the computation stands still. Must not know: engines, the time of
a single event (rates).

[Note: Clocks] If the device is a GPU, the host issues work without delay, and has a clock for its own computation and
waits. An operation starts when the current stream reaches it and the host has issued it. A collective starts after the
earlier work of the current stream and after earlier collectives of its group. A copy starts after earlier copies of its
stream and after the events that it has to follow, one at a time in each direction. Collectives over the same links
share these: one transfers at a time, latencies overlap. Disk transfers run one after the other.

If the device is the CPU, host and computation are one. Collectives run on threads of their own, which need cores. If a
node has fewer than two cores per rank, a collective that is waited for takes its time from the computation, except for
the part ``HIDDEN_BY_CPU``. Otherwise it runs beside the computation.

The step is over when all clocks have stopped. Work that an earlier step left in flight is not waited for, but work that
this one leaves is. So steps that overlap are a little faster than simulated.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from shardengine.budget import HIDDEN_BY_CPU
from shardengine.planner.rates import (
    BESIDE,
    COMPUTE,
    CONTROL,
    DISK,
    FLOPS_IN,
    HOST_STEP,
    NETWORK,
    NODE,
    PYTHON,
    TO_DEVICE,
    TO_HOST,
    Rates,
)  # fmt: skip
from shardengine.planner.tape import Compute, Copy, Current, Mark, Tape, TapeBegin, TapedCopy, TapePhase, Wait


class ReplayPart(NamedTuple):
    """A part of a step.

    busy: seconds that it runs · exposed: seconds that the computation stands still for it; for the computation itself,
    all · limit: the least seconds that its hardware needs.
    """

    name: str
    busy: float
    exposed: float
    limit: float


class TimeSpan(NamedTuple):
    """Work from start to end in a lane, which has the name of a part."""

    lane: str
    start: float
    end: float
    name: str


@dataclass(frozen=True)
class Times:
    """The times of a step.

    phases: seconds by phase, on the computation's clock · timeline: the spans of all lanes · unknown: operations
    without a FLOP formula, by name, with their number; they count for their bytes alone · assumed: speeds of the
    hardware that were not given.
    """

    seconds: float
    parts: Sequence[ReplayPart]
    phases: Mapping[str, float]
    timeline: Sequence[TimeSpan]
    unknown: Mapping[str, int]
    assumed: Sequence[str] = ()

    @property
    def bound(self) -> float:
        """A lower bound for any schedule of this work: the slowest part at its limit."""
        return max(part.limit for part in self.parts)

    def part(self, name: str) -> ReplayPart:
        """Return the part of that name; zeros if it never runs."""
        return next((part for part in self.parts if part.name == name), ReplayPart(name, 0.0, 0.0, 0.0))

    def with_more(self, one: Times, count: int) -> Times:
        """Return the times of a step with ``count`` further micro-batches, each as ``one``. The timeline stays."""

        def longer(part: ReplayPart) -> ReplayPart:
            more = one.part(part.name)
            return ReplayPart(part.name, *(had + count * each for had, each in zip(part[1:], more[1:], strict=True)))

        parts = [longer(each) for each in self.parts]
        phases = {name: seconds + count * one.phases.get(name, 0.0) for name, seconds in self.phases.items()}
        unknown = {name: number + count * one.unknown.get(name, 0) for name, number in self.unknown.items()}
        return replace(self, seconds=self.seconds + count * one.seconds, parts=parts, phases=phases, unknown=unknown)

    def as_dict(self) -> dict[str, Any]:
        """Return the times for JSON, without the timeline."""
        return {
            "seconds": self.seconds,
            "bound_seconds": self.bound,
            "parts": {part.name: {"busy": part.busy, "exposed": part.exposed, "limit": part.limit}
                      for part in self.parts},
            "phases": dict(self.phases),
            "unknown": dict(self.unknown),
            "assumed": list(self.assumed),
        }  # fmt: skip


def simulate(tape: Tape, rates: Rates, ranks: int = 1) -> Times:
    """Return the time of a step, by part and phase. ranks: of the run."""
    run = _Run(tape, rates, ranks)
    for event in tape.events:
        run.act(event)
    return run.end()


def carried_times(known: Sequence[Times], depths: Sequence[int], layers: int) -> Times:
    """Return the times of a model with all ``layers``, from those of two with fewer (layers: [Note: Fewer layers]).

    A step grows by the same time with each layer. The timeline is the deeper model's.
    """
    early, late = known
    more = (layers - depths[1]) / (depths[1] - depths[0])

    def line(before: float, after: float) -> float:
        return max(0.0, after + (after - before) * more)

    parts = [
        ReplayPart(
            part.name, *(line(before, after) for before, after in zip(early.part(part.name)[1:], part[1:], strict=True))
        )
        for part in late.parts
    ]
    phases = {name: line(early.phases.get(name, 0.0), seconds) for name, seconds in late.phases.items()}
    unknown = {name: round(line(early.unknown.get(name, 0), count)) for name, count in late.unknown.items()}
    return replace(late, seconds=line(early.seconds, late.seconds), parts=parts, phases=phases, unknown=unknown)


class _Run:
    """A simulation in progress ([Note: Clocks]). The stream None is the computation's."""

    def __init__(self, tape: Tape, rates: Rates, ranks: int) -> None:
        self._tape, self._rates, self._ranks = tape, rates, ranks
        self._host = 0.0
        self._streams: dict[int | None, float] = {None: 0.0}
        self._current: int | None = None
        self._free: dict[str, float] = {}
        """The times at which groups, links and the disk become free."""
        self._under_way: dict[int, TimeSpan] = {}
        self._takes: dict[int, float] = {}
        """Seconds that collectives take from the computation, if they share the CPU with it."""
        node = rates.node_ranks or ranks
        self._shared = not tape.apart and 0 < rates.cores < 2 * min(node, ranks)
        self._timeline: list[TimeSpan] = []
        self._of_host: list[TimeSpan] = []
        """The host's computations and waits, in order, without gaps."""
        self._exposed: defaultdict[str, float] = defaultdict(float)
        self._limits: defaultdict[str, float] = defaultdict(float)
        self._python = 0.0
        self._phase, self._phases, self._began = "", defaultdict[str, float](float), 0.0
        self._actions: dict[type, Callable[[Any], None]] = {
            Compute: self._compute, TapeBegin: self._begin, Copy: self._copy, TapedCopy: self._transfer,
            Mark: self._mark, Wait: self._wait, Current: self._switch, TapePhase: self._enter,
        }  # fmt: skip

    def act(self, event: Any) -> None:
        """Process one event."""
        self._actions[type(event)](event)

    # Events that take time

    def _compute(self, event: Compute) -> None:
        call = self._tape.calls[event.call]
        lasts = self._rates.seconds(call, on_host=event.on_host)
        if event.on_host:
            self._limits[HOST_STEP] += call.bytes / self._rates.host_memory
            self._host_goes_on(TimeSpan(HOST_STEP, self._host, self._host + lasts, call.name))
            return
        self._limits[COMPUTE if self._current is None else BESIDE] += self._rates.limit_of(call)
        start = self._ready()
        if self._current is None:
            self._blame(self._streams[None], start)
        if not self._tape.apart:
            python = self._rates.bucket_s if call.kernel else self._rates.dispatch_s * (1 + event.before)
            self._python += python
            start += python
        end = self._streams[self._current] = start + lasts
        self._show(TimeSpan(COMPUTE if self._current is None else BESIDE, start, end, call.name))

    def _begin(self, event: TapeBegin) -> None:
        speed = self._rates.collective(event, self._tape.members.get(event.group, range(self._ranks)))
        of_host = speed.link == CONTROL or not self._tape.apart
        ready = self._host_time if of_host else self._ready()
        lane = f"group {event.group}"
        begins = max(ready, self._free.get(lane, 0.0))
        transfers = max(begins + speed.seconds - speed.limit_s, self._free.get(speed.link, 0.0))
        end = transfers + speed.limit_s
        self._free[lane] = self._free[speed.link] = end
        self._limits[speed.link] += speed.limit_s
        self._under_way[event.number] = self._show(TimeSpan(speed.link, end - speed.seconds, end, event.operation))
        if self._shared:
            self._takes[event.number] = (1 - HIDDEN_BY_CPU) * speed.seconds
        if not self._tape.apart:
            self._streams[None] += self._rates.bucket_s
            self._python += self._rates.bucket_s

    def _copy(self, event: Copy) -> None:
        stream = self._current if event.stream is None else event.stream
        behind = self._ready() if event.after is None else self._host
        for number in event.after or ():
            if number in self._under_way:
                behind = max(behind, self._under_way[number].end)
        lasts, lane = self._rates.copy(event), TO_HOST if event.to_host else TO_DEVICE
        start = max(behind, self._streams.get(stream, 0.0), self._free.get(lane, 0.0))
        self._streams[stream] = self._free[lane] = start + lasts
        self._limits[lane] += lasts
        if stream is None:
            self._exposed[lane] += lasts
        self._under_way[event.number] = self._show(TimeSpan(lane, start, start + lasts, ""))

    def _transfer(self, event: TapedCopy) -> None:
        lasts = self._rates.transfer(event, self._ranks)
        start = max(self._host_time, self._free.get(DISK, 0.0))
        self._free[DISK] = start + lasts
        self._limits[DISK] += lasts
        name = "write" if event.write else "read"
        self._under_way[event.number] = self._show(TimeSpan(DISK, start, start + lasts, name))

    def _mark(self, event: Mark) -> None:
        now = self._ready()
        self._under_way[event.number] = TimeSpan(COMPUTE if self._current is None else BESIDE, now, now, "")

    # Waits

    def _wait(self, event: Wait) -> None:
        awaited = self._under_way.get(event.number)
        if awaited is None:  # it is of an earlier step
            return
        if not self._tape.apart:
            self._stand_still(awaited, self._takes.pop(event.number, 0.0))
        elif event.on_host:
            if awaited.end > self._host:
                self._host_goes_on(awaited._replace(start=self._host))
        elif awaited.end > (before := self._streams.get(self._current, 0.0)):
            self._streams[self._current] = awaited.end
            if self._current is None:
                self._blame(before, awaited.end, awaited)

    def _stand_still(self, awaited: TimeSpan, taken: float) -> None:
        """Let the CPU wait for ``awaited``, after the ``taken`` seconds that it may have worked for it."""
        before = self._streams[None]
        self._streams[None] = max(before + taken, awaited.end)
        self._exposed[awaited.lane] += self._streams[None] - before

    def _host_goes_on(self, span: TimeSpan) -> None:
        self._of_host.append(span)
        self._host = span.end
        if span.lane == HOST_STEP:
            self._show(span)

    def _switch(self, event: Current) -> None:
        self._current = event.stream

    def _enter(self, event: TapePhase) -> None:
        now = self._streams[None]
        self._phases[self._phase] += now - self._began
        self._phase, self._began = event.name, now

    @property
    def _host_time(self) -> float:
        return self._host if self._tape.apart else self._streams[None]

    def _ready(self) -> float:
        """Return the time at which the current stream starts work that it is given now."""
        return max(self._streams.get(self._current, 0.0), self._host)

    # Results

    def _show(self, span: TimeSpan) -> TimeSpan:
        self._timeline.append(span)
        return span

    def _blame(self, begin: float, end: float, awaited: TimeSpan | None = None) -> None:
        """Account for the computation's pause from ``begin`` to ``end``.

        The time that ``awaited`` runs counts for it, and the time before for the host's work.
        """
        if end <= begin:
            return
        own = awaited.lane if awaited is not None else COMPUTE
        left = end - begin
        if awaited is not None:
            part = end - max(begin, awaited.start)
            self._exposed[own] += part
            left, end = left - part, end - part
        for span in reversed(self._of_host):
            if span.end <= begin or left <= 0:
                break
            if (part := min(end, span.end) - max(begin, span.start)) > 0:
                self._exposed[span.lane] += part
                left -= part
        if left > 0:
            self._exposed[own] += left

    def end(self) -> Times:
        """Wait for everything, and return the times."""
        if not self._tape.apart:
            for number, taken in self._takes.items():
                self._stand_still(self._under_way[number], taken)
        now = self._streams[None]
        last = max(self._under_way.values(), key=lambda span: span.end, default=None)
        end = max(now, self._host, *self._streams.values(), *self._free.values())
        if last is not None and last.end == end > self._host:
            self._blame(now, end, last)
        else:
            self._blame(now, end)
        self._enter(TapePhase(""))
        busy: defaultdict[str, float] = defaultdict(float)
        for span in self._timeline:
            busy[span.lane] += span.end - span.start
        self._exposed[COMPUTE] += busy[COMPUTE]
        if self._python:
            busy[PYTHON] = self._exposed[PYTHON] = self._python
        parts = [ReplayPart(name, busy[name], self._exposed[name], self._limits[name]) for name in self._lanes(busy)]
        phases = {name: seconds for name, seconds in self._phases.items() if name}
        return Times(end, parts, phases, self._timeline, dict(self._tape.unknown), self._assumed(busy))

    def _assumed(self, busy: Mapping[str, float]) -> list[str]:
        """Return the rates that were not given and that this step needs."""
        parts = {NODE, NETWORK, DISK, TO_HOST, TO_DEVICE, HOST_STEP}
        of_dtypes = {f"{FLOPS_IN} {dtype}" for dtype in self._tape.flops()}
        return [
            name for name in self._rates.assumed
            if (name not in parts or name in busy) and (not name.startswith(FLOPS_IN) or name in of_dtypes)
        ]  # fmt: skip

    def _lanes(self, busy: Mapping[str, float]) -> Iterator[str]:
        yield COMPUTE
        yield from (name for name in busy if name != COMPUTE)
