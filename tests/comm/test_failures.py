"""failures.py: what ranks tell each other, what counts, and a store that does not answer."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore, TCPStore  # type: ignore[attr-defined]

from shardengine.comm import meeting, store_board, watchdog
from shardengine.comm.failures import FailureReport, Failures
from shardengine.comm.mesh import Mesh
from shardengine.comm.positions import Presence, Waiting
from shardengine.comm.rendezvous import LAUNCHED
from shardengine.comm.watchdog import Watchdog
from shardengine.errors import CommunicationError, MismatchError
from tests.support import HANG_S
from tests.support.raising import raises


class Boom(ArithmeticError):
    """The exception that is raised on purpose."""


class FakeStore:
    """A store of one process; ``stuck``: operations never return."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}
        self.numbers: dict[str, int] = {}
        self.stuck = threading.Event()

    def set(self, key: str, value: str) -> None:
        self._answer()
        self.texts[key] = value

    def get(self, key: str) -> bytes:
        return self.texts[key].encode()

    def check(self, keys: list[str]) -> bool:
        self._answer()
        return all(key in self.texts for key in keys)

    def add(self, key: str, amount: int) -> int:
        self._answer()
        self.numbers[key] = self.numbers.get(key, 0) + amount
        return self.numbers[key]

    def _answer(self) -> None:
        if self.stuck.is_set():
            time.sleep(1000)


def failures_of_ranks(
    monkeypatch: pytest.MonkeyPatch, ranks: int = 2, timeout_s: float = 0.5
) -> tuple[list[Failures], FakeStore]:
    """One ``Failures`` per rank over one store."""
    store = FakeStore()
    monkeypatch.setattr(Mesh, "store", lambda _mesh: store)
    monkeypatch.setattr(watchdog, "STANDS_S", 0.1)
    monkeypatch.setattr(store_board, "OPERATION_S", 0.2)
    monkeypatch.setattr(watchdog, "_GRACE_S", 0.2)
    meshes = [Mesh(rank, ranks, torch.device("cpu"), backend="gloo", timeout_s=timeout_s) for rank in range(ranks)]
    return [Failures(mesh) for mesh in meshes], store


def raises_in(failures: Failures, where: str) -> None:
    with pytest.raises(Boom), failures.reports_failure(where, lambda error: "unit 'block'"):
        raise Boom("loud")


def look_twice(failures: Failures) -> None:
    watching = Watchdog(failures, Waiting("a gather", "gather 1"))
    watching.raise_if_in_vain()
    time.sleep(0.15)
    watching.raise_if_in_vain()


def test_a_long_wait_is_logged_once_with_who_is_missing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (one, two, _), _ = failures_of_ranks(monkeypatch, 3, timeout_s=60)
    waiting = Waiting("a gather", "gather 1")
    two.post(waiting)
    watching = Watchdog(one, waiting)
    watching.raise_if_in_vain()
    assert not caplog.messages
    monkeypatch.setattr(watchdog, "_WARN_AFTER_S", 0.0)
    watching.raise_if_in_vain()
    watching.raise_if_in_vain()
    (said,) = caplog.messages
    assert "for a gather, and gives up after 60 s. Missing: rank 2 says nothing" in said and "rank 1" not in said


def test_a_report_that_stands_ends_the_wait_of_another_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    (one, two), _ = failures_of_ranks(monkeypatch)
    raises_in(two, "step 1")
    with raises("another-rank-failed", "rank 1", "raised", "Boom: loud (in step 1, unit 'block')", "a gather"):
        look_twice(one)


def test_what_is_raised_outside_of_calls_is_reported_once_and_not_counted_where_all_raise_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (one, two), _ = failures_of_ranks(monkeypatch)
    for each in (one, two):
        each.set_progress(1, 1)
        each.report_outside(Boom("loud"), "a change of 'w'.grad")
    look_twice(one)
    two.set_progress(1, 2)
    two.report_outside(Boom("louder"), "a change of 'w'.grad")
    told = r"rank 1 raised: Boom: louder \(in a change of 'w'.grad after micro-batch 2 of step 2\).*a gather"
    with pytest.raises(CommunicationError, match=told):
        look_twice(one)
    with pytest.raises(Boom), two.reports_failure("step 2", lambda error: "unit 'block'"):
        two.report_outside(error := Boom("loudest"), "a change of 'w'.grad")
        raise error
    assert one.reports()[1].text == "Boom: loudest (in step 2, unit 'block')"


def test_a_report_that_is_taken_back_or_has_not_stood_long_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    (one, two), _ = failures_of_ranks(monkeypatch)
    raises_in(two, "step 1")
    Watchdog(one, Waiting("a gather", "gather 1")).raise_if_in_vain()
    with two.reports_failure("step 2", lambda error: "unit 'block'"):
        look_twice(one)
    assert one.reports()[1].over


def test_a_report_from_where_this_rank_raised_too_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    (one, two), _ = failures_of_ranks(monkeypatch)
    raises_in(one, "step 1")
    raises_in(two, "step 1")
    look_twice(one)
    raises_in(two, "step 2")
    with raises("another-rank-failed", "in step 2"):
        look_twice(one)


def test_a_later_failure_at_the_same_place_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    (one, two), _ = failures_of_ranks(monkeypatch)
    raises_in(one, "step 1")
    raises_in(two, "step 1")
    with one.reports_failure("step 1", lambda *_: "block"):
        look_twice(one)  # rank 1 has not gone on yet
        raises_in(two, "step 1")
        with raises("another-rank-failed", "in step 1"):
            look_twice(one)


def test_calls_of_another_kind_do_not_shift_the_count(monkeypatch: pytest.MonkeyPatch) -> None:
    (one, two), _ = failures_of_ranks(monkeypatch)
    for _ in range(3):
        with one.reports_failure("evaluation", lambda *_: "block", "evaluation"):
            pass
    raises_in(one, "step 1")
    raises_in(two, "step 1")
    look_twice(one)


def test_what_the_others_know_is_not_reported_again(monkeypatch: pytest.MonkeyPatch) -> None:
    (one, two), store = failures_of_ranks(monkeypatch)
    with pytest.raises(Boom), two.reports_failure("saving", lambda *_: "block"):
        error = Boom("every rank raises")
        two.mark_known(error)
        raise error
    assert not store.texts
    outer, inner = (two.reports_failure(where, lambda *_: "block") for where in ("outer", "inner"))
    with pytest.raises(Boom), outer, inner:
        raise Boom("loud")
    assert one.reports()[1].where == "inner"


def store_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "shardengine-store"]


@pytest.mark.parametrize("how", ["closed", "forgotten"])
def test_threads_and_connections_end(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    before = set(store_threads())
    (one, two), _ = failures_of_ranks(monkeypatch)
    connections: list[weakref.ref[FakeStore]] = []

    def connect(_mesh: Mesh) -> FakeStore:
        store = FakeStore()
        connections.append(weakref.ref(store))
        return store

    monkeypatch.setattr(Mesh, "store", connect)
    raises_in(two, "step 1")
    [thread] = set(store_threads()) - before
    if how == "closed":
        two.close()
        two.close()
    else:
        del one, two
        gc.collect()
    thread.join(20)
    assert not thread.is_alive() and connections[0]() is None
    if how == "closed":
        assert two.reports() == {} and len(connections) == 2  # a late question has a connection of its own
        two.close()


def test_closing_takes_back_what_was_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    (one, two), _ = failures_of_ranks(monkeypatch)
    raises_in(two, "step 1")
    two.close()
    look_twice(one)


def test_consequences_are_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    (one, two), store = failures_of_ranks(monkeypatch)
    for error in (CommunicationError("x"), MismatchError("y")):
        with pytest.raises(type(error)), two.reports_failure("step 1", lambda error: "unit 'block'"):
            raise error
    look_twice(one)
    assert not store.texts


def test_the_cause_is_named_before_those_who_gave_up(monkeypatch: pytest.MonkeyPatch) -> None:
    (one, two, three), _ = failures_of_ranks(monkeypatch, 3)
    two.report(FailureReport("because of rank 2", gave_up=True))
    with raises("another-rank-failed", "rank 1", "gave up", "because of rank 2"):
        look_twice(one)
    raises_in(three, "step 1")
    with raises("another-rank-failed", "rank 2", "raised", "Boom"):
        look_twice(one)


def test_a_deadlock_is_the_same_error_on_the_rank_that_did_not_find_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one may have found it, given up and closed its engine before this one looked again."""
    (one, two), _ = failures_of_ranks(monkeypatch)
    here = Waiting("a gather", "gather 1", "gather", 1, issued={"gather": 1})
    there = Waiting("a reduce", "reduce 1", "reduce", 1, issued={"reduce": 1})
    one.post(here)
    watching = Watchdog(two, there)
    watching._post()
    watching.raise_if_in_vain()
    time.sleep(0.15)
    with pytest.raises(MismatchError, match=r"^ranks wait for each other: rank 1") as found:
        watching.raise_if_in_vain()
    two.give_up(str(found.value))
    with raises("another-rank-failed", "rank 1", "gave up", "ranks wait for each other"):
        look_twice(one)
    two.issued.update(reduce=1)
    two.leave("has closed its engine", Presence.CLOSING)
    two.withdraw()
    with raises("another-rank-left", "rank 1 has closed its engine (gave up: ranks wait"):
        Watchdog(one, here).raise_if_in_vain()


def test_who_waits_for_the_same_is_not_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    (one, two, three, four), _ = failures_of_ranks(monkeypatch, 4)
    two.post(Waiting("the same gather", "gather 1"))
    three.post(Waiting("another gather", "gather 2"))
    diagnosis = Watchdog(one, Waiting("a gather", "gather 1")).diagnosis()
    assert diagnosis.startswith("Missing: rank 2 waits for another gather; rank 3 says nothing")
    three.post(Waiting("the same gather", "gather 1"))
    four.post(Waiting("the same gather", "gather 1"))
    assert "every rank waits for it" in Watchdog(one, Waiting("a gather", "gather 1")).diagnosis()
    assert "Missing" in Watchdog(two, Waiting("a scatter", "reduce 1")).diagnosis()


def test_a_store_that_does_not_answer_is_said_and_nothing_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    (one, two), store = failures_of_ranks(monkeypatch)
    store.stuck.set()
    started = time.monotonic()
    raises_in(two, "step 1")
    look_twice(one)
    assert "cannot be reached (no answer within 0.2 s)" in Watchdog(one, Waiting("a gather", "gather 1")).diagnosis()
    with pytest.raises(CommunicationError, match="cannot be reached"):
        meeting.meet(one, "engine.reset()")
    assert time.monotonic() - started < 60


def test_the_rank_that_hosts_the_store_is_named_when_it_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    (one, _, three), store = failures_of_ranks(monkeypatch, 3)
    monkeypatch.setattr(Mesh, "store_host", lambda _mesh: 0)
    store.stuck.set()
    diagnosis = Watchdog(three, Waiting("a gather", "gather 1")).diagnosis()
    assert diagnosis.startswith("Missing: rank 0 cannot be reached (no answer within 0.2 s), so it is gone or stopped")
    assert diagnosis.endswith("nothing is known of ranks [1]")
    assert "rank 1 waited for another gather" in three.describe({0, 1}, {1: Waiting("another gather", "gather 2")})
    with pytest.raises(CommunicationError, match=r"engine\.reset\(\) on rank 2: .*Missing: rank 0 cannot be reached"):
        meeting.meet(three, "engine.reset()")
    assert "rank 0" not in Watchdog(one, Waiting("a gather", "gather 1")).diagnosis(), "it is there itself"


def test_only_a_rank_that_hosts_the_store_is_taken_for_its_host(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    mesh = Mesh(1, 2, torch.device("cpu"), backend="gloo")
    assert mesh.store_host() is None, "no process group"
    served = TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
    shared = {"store": PrefixStore("outer", PrefixStore("inner", served))}
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: shared["store"])
    assert mesh.store_host() == 0
    for variable, value in (("TORCHELASTIC_USE_AGENT_STORE", "True"), (LAUNCHED, "1")):
        with monkeypatch.context() as patch:
            patch.setenv(variable, value)
            assert mesh.store_host() is None
    shared["store"] = PrefixStore("outer", FileStore(str(tmp_path / "store"), 1))
    assert mesh.store_host() is None


@pytest.mark.parametrize("presence", [Presence.CLOSING, Presence.LEFT, Presence.ENDED])
def test_a_meeting_ends_as_soon_as_a_rank_has_left(monkeypatch: pytest.MonkeyPatch, presence: Presence) -> None:
    (one, two), _ = failures_of_ranks(monkeypatch, timeout_s=HANG_S)
    two.issued.update(reduce=1)
    two.set_progress(3, 0)
    one.issued.update(reduce=1)
    said: list[str] = []

    def meet() -> None:
        with pytest.raises(CommunicationError) as raised:
            meeting.meet(one, "engine.reset()")
        said.append(str(raised.value))

    waits = threading.Thread(target=meet)
    waits.start()
    while not two.board.read("here"):
        time.sleep(0.01)
    two.leave("has closed its engine", presence)
    waits.join(HANG_S / 4)
    text = said[0]
    assert text.startswith("engine.reset() on rank 0: expected every rank to call it, but rank 1 has closed its engine")
    assert "after step 3" in text and text.endswith("Start the ranks again")
    assert not two.board.read("here"), "so that nobody takes it for one who waits"


def test_meeting_waits_for_every_rank_and_names_those_that_do_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    (one, two), _ = failures_of_ranks(monkeypatch)
    with pytest.raises(CommunicationError, match=r"engine\.reset\(\) on rank 0: .*within 0\.5 s.*rank 1 says nothing"):
        meeting.meet(one, "engine.reset()")
    other = threading.Thread(target=meeting.meet, args=(two, "engine.reset()"))
    other.start()
    meeting.meet(one, "engine.reset()")
    other.join(5)
    assert not other.is_alive()
    meeting.end(one)
    with pytest.raises(CommunicationError):
        meeting.meet(two, "engine.reset()")
    with pytest.raises(CommunicationError, match="rank 1 gave up: it waits in engine"):
        look_twice(one)
