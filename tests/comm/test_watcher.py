"""The watcher: when it breaks off what is in flight, and when not. The store is played, and so are collectives."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from typing import Any

import pytest

from shardengine.comm import Purpose, nccl_watcher
from shardengine.comm.breaking_off import ASKS
from shardengine.comm.failures import Failures
from shardengine.comm.flight_recorder import Collective, CollectiveRecord
from shardengine.comm.group_kind import GroupName
from shardengine.comm.mesh import Mesh
from shardengine.comm.nccl_watcher import Watcher
from shardengine.comm.positions import Presence
from tests.comm.test_failures import failures_of_ranks, raises_in
from tests.support import HANG_S

LONG = 1e6


class PlayedWork:
    """A collective that is over when somebody says so. asked: how often somebody wanted to know."""

    def __init__(self) -> None:
        self.over, self.asked = False, 0

    def is_completed(self) -> bool:
        self.asked += 1
        return self.over


OF = Collective(GroupName.GATHER, "all-gather", "b", (), 8, Purpose.WEIGHTS)


def in_flight(watching: Watcher, place: int = 1) -> Any:
    """A gather is issued, without a thread that looks at it."""
    work = PlayedWork()
    of = Collective(GroupName.GATHER, "all-gather", "bucket 1", ("w",), 8, Purpose.WEIGHTS)
    record = CollectiveRecord(place, place, of)
    watching._thread = threading.current_thread()
    watching.issued(record, work)  # type: ignore[arg-type]
    watching._thread = None
    return work


def looks_until(watching: Watcher, failures: Failures) -> str:
    """What it says in the end."""
    deadline = time.monotonic() + HANG_S
    while not (reason := watching._look(failures)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return reason


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_watcher, "GRACE_S", 0.1)


@pytest.mark.usefixtures("soon")
def test_a_report_that_stands_breaks_off_what_is_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    (one, two), _ = failures_of_ranks(monkeypatch, timeout_s=LONG)
    watching = Watcher(one)
    in_flight(watching)
    raises_in(two, "step 1")
    reason = looks_until(watching, one)
    assert reason.startswith(
        "rank 1 raised: Boom: loud (in step 1, unit 'block'). This rank is blocked in all-gather number 1 on rank 0"
    )


@pytest.mark.usefixtures("soon")
def test_a_deadlock_that_another_rank_found_breaks_off_what_is_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    (one, two), _ = failures_of_ranks(monkeypatch, timeout_s=LONG)
    watching = Watcher(one)
    in_flight(watching)
    two.give_up("ranks wait for each other: rank 0 …, rank 1 …; none of them can end")
    assert looks_until(watching, one).startswith("rank 1 gave up: ranks wait for each other")


def test_nobody_is_missed_while_nothing_is_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_watcher, "GRACE_S", 0.0)
    (one, two), _ = failures_of_ranks(monkeypatch, timeout_s=LONG)
    watching = Watcher(one)
    work = in_flight(watching)
    assert not watching._look(one) and work.asked == 0  # the device is asked nothing while all is well
    raises_in(two, "step 1")
    assert not watching._look(one) and work.asked == 1
    work.over = True
    time.sleep(0.15)  # the report stands
    assert not watching._look(one)


def test_a_rank_that_comes_back_in_time_is_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_watcher, "GRACE_S", LONG)
    (one, two), _ = failures_of_ranks(monkeypatch, timeout_s=LONG)
    watching = Watcher(one)
    in_flight(watching)
    raises_in(two, "step 1")
    assert not watching._look(one)
    time.sleep(0.15)
    assert not watching._look(one) and watching._in_vain_since is not None
    two.withdraw()
    assert not watching._look(one) and watching._in_vain_since is None


@pytest.mark.usefixtures("soon")
def test_a_rank_that_left_is_missed_where_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    (one, two), _ = failures_of_ranks(monkeypatch, timeout_s=LONG)
    two.issued[GroupName.GATHER] = 1
    two.leave("has closed its engine", Presence.CLOSING)
    watching = Watcher(one)
    work = in_flight(watching)  # which rank 1 has issued, too
    for _ in range(3):
        assert not watching._look(one)
        time.sleep(0.05)
    work.over = True
    in_flight(watching, place=2)
    assert "rank 1 has closed its engine" in looks_until(watching, one)


def test_another_rank_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    (one, two), _ = failures_of_ranks(monkeypatch, timeout_s=LONG)
    watching = Watcher(one)
    assert not watching._look(one)
    two.board.write(ASKS, "rank 2 raised: Boom")
    assert watching._look(one) == "rank 1 gave up: rank 2 raised: Boom"


def test_without_the_store_there_is_still_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    (one, _), store = failures_of_ranks(monkeypatch, timeout_s=0.5)
    watching = Watcher(one)
    in_flight(watching)
    store.stuck.set()
    reason = looks_until(watching, one)
    assert "all-gather number 1 on rank 0 for bucket 1 (w) did not end within 0.5 s" in reason
    assert "cannot be reached" in reason and "engine.reset()" in reason


def broken_off(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The reasons for which meshes are broken off from now on."""
    reasons: list[str] = []
    monkeypatch.setattr(Mesh, "break_off", lambda _mesh, reason: reasons.append(reason))
    monkeypatch.setattr(nccl_watcher, "POLL_S", 0.01)
    return reasons


@pytest.mark.usefixtures("soon")
def test_it_acts_once_and_never_after_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    (one, two), _ = failures_of_ranks(monkeypatch, timeout_s=LONG)
    reasons = broken_off(monkeypatch)
    watching = Watcher(one)
    watching.issued(CollectiveRecord(1, 1, OF), PlayedWork())  # type: ignore[arg-type]
    thread = watching._thread
    assert thread is not None
    raises_in(two, "step 1")
    thread.join(HANG_S)
    assert not thread.is_alive() and len(reasons) == 1 and one.gave_up == reasons[0]
    one.close()
    watching._break_off(one, "too late")
    assert len(reasons) == 1


def test_it_keeps_nothing_alive_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    failures, _ = failures_of_ranks(monkeypatch, timeout_s=LONG)
    broken_off(monkeypatch)
    watching = Watcher(failures[0])
    watching.issued(CollectiveRecord(1, 1, OF), PlayedWork())  # type: ignore[arg-type]
    thread, gone = watching._thread, weakref.ref(failures[0])
    assert thread is not None
    failures.clear()
    deadline = time.monotonic() + HANG_S
    while thread.is_alive() and time.monotonic() < deadline:
        gc.collect()
        thread.join(0.05)
    assert gone() is None and not thread.is_alive()


def test_a_forked_process_waits_for_no_thread_that_it_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    (one, _), _ = failures_of_ranks(monkeypatch, timeout_s=LONG)
    watching = Watcher(one)
    one._process = -1
    with watching._acting:
        one.close()  # would wait for the lock
    assert not watching._over.is_set()
