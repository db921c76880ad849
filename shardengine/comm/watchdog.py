"""The watchdog of one long wait: the reports of this rank meanwhile, and the conclusions from those of the others.

Owns: when a wait is in vain, and the error messages. Must not know: how the rank waits, where texts are written.

The waiting code calls ``look`` between slices of its wait, and ``diagnosis`` if the wait has failed (failures:
[Note: Failure reports], [Note: Departures]).
"""

from __future__ import annotations

import logging
import time
from contextlib import suppress

from shardengine.comm.advice import BLOCKS, EVALUATE, asks
from shardengine.comm.failures import FailureReport, Failures
from shardengine.comm.flight_recorder import HOOK
from shardengine.comm.group_kind import GroupName
from shardengine.comm.outside import stands_outside
from shardengine.comm.positions import Departure, Presence, Waiting, deadlock
from shardengine.comm.store_board import Unreachable
from shardengine.errors import CommunicationError, MismatchError

_log = logging.getLogger(__name__)
POST_AFTER_S = 1.0
STANDS_S = 3.0
_WARN_AFTER_S = 30.0
"""A wait that lasts longer is logged, though it may still end: ``timeout_s`` is long, and a rank that is busy elsewhere
reports nothing."""
_GRACE_S = 2.0
MEETING = "meeting"
"""Stands for a group: the wait of `meeting.meet_before_groups`."""
_DEADLOCK = "ranks wait for each other"
"""Begins the report of a rank that found a deadlock (``_describe_deadlock``), and appears in the errors that quote it.
"""
NOBODY_MISSING = "every rank waits for it: the connection between them is broken"
"""A diagnosis."""
_RESET = "Handle the cause, then call engine.reset() on every rank, or start the ranks again"
_RESTART = (
    "Handle the cause, and start the ranks again: what a hook has begun itself is not put in order by engine.reset()"
)
_SAME = (
    "Give every rank the same number of batches, or train inside `with engine.join():`, and make the same calls on "
    "every rank"
)
_BATCHES = (
    "Where ranks come there after different numbers of batches, give every rank the same number, or train inside `with "
    "engine.join():`"
)
_TRAINING = frozenset({"", "forward", "backward", "step", "join", "engine.join()"})
"""Calls that ranks make in their loops over batches; "": outside of any call."""
_EVALUATION = frozenset({"forward without grad", "a forward without grad"})


class Watchdog:
    """One long wait of this rank: its reports meanwhile, and the conclusions from those of the others.

    host_waits: False: the host may be elsewhere and not waiting. Then nothing is reported before the diagnosis, and
    ``look`` may be called again after it has raised.
    """

    def __init__(self, failures: Failures, waiting: Waiting, lasted: float = 0.0, *, host_waits: bool = True) -> None:
        self._failures = failures
        self._host_waits = host_waits
        self._waiting = waiting
        self._started = time.monotonic() - lasted
        self._posted: float | None = None
        self._warned = False
        self._news = -1
        self._seen: dict[tuple[int, FailureReport], float] = {}
        self._deadlock: dict[int, str] = {}
        self._deadlock_since = 0.0

    @property
    def overdue(self) -> bool:
        """Whether the wait has lasted for ``timeout_s``."""
        return time.monotonic() - self._started > self._failures.mesh.timeout_s

    @property
    def in_call(self) -> str:
        """The call that this rank waits in, for errors."""
        where = self._failures.placed(self._waiting).where
        return f" in {where}" if where else ""

    def late(self, diagnosis: str) -> str:
        """Return ``diagnosis`` of a wait that was too long.

        It ends with a remedy if ranks that can be reached have not come.
        """
        if not diagnosis.startswith("Missing: ") or "cannot be reached" in diagnosis:
            return diagnosis
        return f"{diagnosis}. {_cure_alone(self._failures.placed(self._waiting), left=False)}"

    def raise_if_in_vain(self) -> None:
        """Raise, between two slices, if a report of another rank means that the wait is in vain.

        ``CommunicationError``: it raised, gave up or has left. ``MismatchError``: ranks wait for each other, or did
        until one of them found that.
        """
        if self._host_waits and time.monotonic() - self._started > POST_AFTER_S:
            self._post()
        try:
            self._warn()
            news = self._failures.news()
            if self._host_waits and news == self._news and not self._seen and not self._deadlock:
                return
            left = self._left()
            ripe = self.ripe(frozenset(left))
            stuck = self._stuck() if self._posted is not None else {}
        except Unreachable:
            return  # reported when the wait has failed
        self._news = news
        self._raise_reported({rank: report for rank, report in ripe.items() if not report.gave_up})
        self._raise_stuck(stuck)
        self._raise_left({rank: each for rank, each in left.items() if rank not in ripe})
        self._raise_reported(ripe)

    def _warn(self) -> None:
        """Log who is missing, once."""
        lasted = time.monotonic() - self._started
        if self._warned or lasted < _WARN_AFTER_S:
            return
        failures, waits = self._failures, self._failures.waits()
        self._warned = True
        if missing := self._not_here(self._others(), waits):
            _log.warning(
                "rank %d has waited for %d s for %s%s, and gives up after %g s. %s. Every rank has to make the call",
                *(failures.mesh.rank, lasted, self._waiting.text, self.in_call),
                *(failures.mesh.timeout_s, failures.describe(missing, waits)),
            )

    def look_before_groups(self) -> None:
        """As ``look``, for a wait outside of the engine of this channel.

        Its reports and departures do not count, except departures of ranks whose processes end.
        """
        self._post()
        with suppress(Unreachable):
            self._raise_stuck(self._stuck())
            departed = self._failures.departures().items()
            self._raise_left({rank: each for rank, each in departed if each.presence is Presence.ENDED})

    def stuck_before_groups(self) -> str:
        """Describe a deadlock of this wait, in ``engine.close()``, with a meeting before new groups; "" if none."""
        if time.monotonic() - self._started <= POST_AFTER_S:
            return ""
        self._post()
        stuck = self._stuck()
        return _describe_deadlock(stuck) if any(each.group == MEETING for each in stuck.values()) else ""

    def _raise_stuck(self, stuck: dict[int, Waiting]) -> None:
        if stuck:
            raise MismatchError(_describe_deadlock(stuck), code="ranks-wait-for-each-other")

    def look_for_departures(self) -> None:
        """After a failed wait: raise as ``look`` does if a rank has left without issuing the collective."""
        with suppress(Unreachable):
            left = self._left()
            reports = self._failures.standing() if left else {}
            self._raise_left({rank: each for rank, each in left.items() if rank not in reports})

    def ripe(self, left: frozenset[int] = frozenset()) -> dict[int, FailureReport]:
        """Return the reports that have stood for ``STANDS_S`` during this wait, or whose ranks have ``left``."""
        now = time.monotonic()
        self._seen = {item: self._seen.get(item, now) for item in self._failures.standing().items()}
        return {rank: n for (rank, n), since in self._seen.items() if rank in left or now - since >= STANDS_S}

    def _left(self) -> dict[int, Departure]:
        """Return the ranks that will not issue the collective that this rank waits for."""
        departed = self._failures.departures().items()
        left = {rank: each for rank, each in departed if self._waiting.needs(rank, each.issued)}
        if self._failures.presence is Presence.PRESENT:
            return left
        return {rank: each for rank, each in left.items() if each.presence is not Presence.CLOSING}  # all close

    def _raise_reported(self, reports: dict[int, FailureReport]) -> None:
        for rank, report in sorted(reports.items()):
            cure = _RESTART if HOOK in self._waiting.text + report.text else _RESET
            raise _error_of(report.text)(
                f"rank {rank} {report.verb}: {report.text}. This rank is blocked in {self._waiting.text}. {cure}",
                code="another-rank-failed",
            )

    def _raise_left(self, left: dict[int, Departure]) -> None:
        if left:
            cure = _cure_alone(self._failures.placed(self._waiting))
            if any(each.failed for each in left.values()):
                cure = "Handle the cause, and start the ranks again"
            said = one_sentence({rank: each.text for rank, each in left.items()})
            place = self._failures.place
            if self._waiting.group == MEETING:
                place = f"this rank ({self._failures.mesh.rank}) is in {self._waiting.where}"
            raise _error_of(said)(
                f"{said}; {place}, and {self._waiting.text} cannot end. {cure}", code="another-rank-left"
            )

    def _stuck(self) -> dict[int, Waiting]:
        """Return the deadlock that this rank has been part of for ``STANDS_S``."""
        rank, now = self._failures.mesh.rank, time.monotonic()
        found = deadlock(rank, {**self._failures.waits(), rank: self._failures.placed(self._waiting)})
        keys = {rank: each.key for rank, each in found.items()}
        if keys != self._deadlock:
            self._deadlock, self._deadlock_since = keys, now
        return found if now - self._deadlock_since >= STANDS_S else {}

    def diagnosis(self) -> str:
        """Return who is missing, after a failed wait.

        The other ranks get ``_GRACE_S`` from this rank's report to answer.
        """
        failures = self._failures
        deadline = self._post() + _GRACE_S
        missing = self._others()
        waits: dict[int, Waiting] = {}
        while missing:
            try:
                waits = failures.waits()
                missing = self._whom_they_miss(self._not_here(missing, waits), waits)
                silent = missing - set(waits) - set(failures.reports())
            except Unreachable:
                break  # ``describe`` says so
            if not silent or time.monotonic() > deadline:
                break
            time.sleep(0.1)
        if not missing:
            return NOBODY_MISSING
        return failures.describe(missing, waits)

    def _others(self) -> set[int]:
        ranks = self._waiting.members or range(self._failures.mesh.ranks)
        return set(ranks) - {self._failures.mesh.rank}

    def _not_here(self, ranks: set[int], waits: dict[int, Waiting]) -> set[int]:
        """Return those of ``ranks`` that do not wait for the same collective as this rank."""
        return {rank for rank in ranks if rank not in waits or waits[rank].key != self._waiting.key}

    def _whom_they_miss(self, missing: set[int], waits: dict[int, Waiting]) -> set[int]:
        """Return ``missing``, and the ranks that these wait for themselves, in collectives between other ranks."""
        found, new = set(missing), set(missing)
        while new:
            asked = [(rank, waits[rank]) for rank in new if rank in waits and waits[rank].members]
            others = {other for rank, each in asked for other in each.members if other not in waits}
            new = others - found - {self._failures.mesh.rank}
            found |= new
        return found

    def end(self) -> None:
        """The wait has ended: it was only slow."""
        if self._posted is not None:
            self._failures.post(None)

    def _post(self) -> float:
        """Report, once, the wait of this rank; return when it did."""
        if self._posted is None:
            self._posted = time.monotonic()
            self._failures.post(self._waiting)
        return self._posted


def _describe_deadlock(stuck: dict[int, Waiting]) -> str:
    places = [f"rank {rank} stands in {each.where or 'a call'} ({each.text})" for rank, each in stuck.items()]
    return f"ranks wait for each other: {', '.join(places)}; none of them can end. {_cure(list(stuck.values()))}"


def _cure(stuck: list[Waiting]) -> str:
    """Return the advice for ranks that stand in these waits."""
    outside = any(stands_outside(each) for each in stuck)
    stuck = [each for each in stuck if not stands_outside(each)]
    others = list(dict.fromkeys(_call(each) for each in stuck if not _trains(each) and not _evaluates(each)))
    if not others:
        if any(_evaluates(each) for each in stuck):
            return EVALUATE
        runs = all(each.where.startswith(("forward", "backward")) for each in stuck)
        return f"{_SAME}. {BLOCKS}" if (runs and not outside) or any(asks(each.text) for each in stuck) else _SAME
    same = f"Make the same calls on every rank, in the same order: {' and '.join(others)} on all of them, or on none"
    added = [EVALUATE] if any(_evaluates(each) for each in stuck) else []
    added += [_BATCHES] if any(_trains(each) for each in stuck) else []
    return ". ".join([same, *added])


def _cure_alone(waiting: Waiting, *, left: bool = True) -> str:
    """Return the advice if a rank stands in ``waiting`` and another has ``left``, or has not come."""
    if _evaluates(waiting):
        return EVALUATE
    first = ", before one of them leaves," if left else ""
    return _SAME if _trains(waiting) else f"Call {_call(waiting)} on every rank{first} or on none"


def _call(waiting: Waiting) -> str:
    """Return the call of the engine that a rank waits in."""
    return waiting.where.split(" of step ")[0].removeprefix("leaving ")


def _trains(waiting: Waiting) -> bool:
    return not _evaluates(waiting) and _call(waiting) in _TRAINING


def _evaluates(waiting: Waiting) -> bool:
    gathers = waiting.group == GroupName.EVALUATE or asks(waiting.text, grad=False)
    return gathers or _call(waiting) in _EVALUATION


def _error_of(said: str) -> type[CommunicationError | MismatchError]:
    """Return the class of the error: a deadlock is the same on every rank, whichever of them found it first."""
    return MismatchError if _DEADLOCK in said else CommunicationError


def one_sentence(said: dict[int, str]) -> str:
    """Return one sentence from the texts of ranks; ranks with equal texts are listed together."""
    texts = dict.fromkeys(said[rank] for rank in sorted(said))
    parts = []
    for text in texts:
        ranks = [rank for rank in sorted(said) if said[rank] == text]
        parts.append(f"rank {ranks[0]} {text}" + (f" (and so ranks {ranks[1:]})" if ranks[1:] else ""))
    return "; ".join(parts)
