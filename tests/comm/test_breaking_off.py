"""What is in flight is broken off: the order between ranks, and groups that are aborted (played: no GPU)."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardengine.comm import Mesh, breaking_off, group_kind, mesh
from shardengine.comm.breaking_off import BreakingOff, come_together
from shardengine.comm.group_kind import GroupKind, GroupName, NcclGroupKind
from tests.support import HANG_S
from tests.support.played_nccl import PlayedDevice, PlayedGroup, PlayedWork
from tests.support.raising import raises


class Endless:
    """A collective of gloo whose peer never comes."""

    def get_future(self) -> Any:
        return self

    def add_done_callback(self, _call: Any) -> None:
        pass


def wedged() -> tuple[PlayedDevice, dict[GroupName, Any]]:
    """A device that both groups hold."""
    device, store = PlayedDevice(), dist.HashStore()  # type: ignore[attr-defined]
    names = (GroupName.GATHER, GroupName.REDUCE)
    groups = {name: PlayedGroup(name.value, None, device, lambda: store) for name in names}
    for group in groups.values():
        PlayedWork(group, Endless(), lambda: None, lambda: None)
    return device, groups


def test_both_groups_are_aborted_at_once_and_the_device_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_kind, "_ABORT_S", HANG_S)
    device, groups = wedged()
    NcclGroupKind().break_off({**groups, GroupName.CONTROL: None})
    device.synchronize()
    assert sorted(device.events) == ["abort gather", "abort reduce"]


def test_groups_of_gloo_need_no_abort() -> None:
    _, groups = wedged()
    GroupKind().break_off(groups)
    assert not any(group.aborted for group in groups.values())


def test_an_abort_that_does_not_return_or_fails_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_kind, "_ABORT_S", 0.1)
    _, groups = wedged()
    never = threading.Event()
    monkeypatch.setattr(groups[GroupName.GATHER], "abort", never.wait)
    monkeypatch.setattr(groups[GroupName.REDUCE], "abort", lambda: exec("raise RuntimeError('no such communicator')"))
    state = BreakingOff()
    for _ in range(2):  # nobody tries again, and everybody hears of it
        with (
            raises("nccl-abort-failed", "no such communicator; 1 of 2 did not return within 0.1 s"),
            state.once("a fault") as has_to,
        ):
            assert has_to
            NcclGroupKind().break_off(groups)
    never.set()


def test_the_first_reason_stays() -> None:
    state = BreakingOff()
    state.check("forward on rank 0")
    with state.once("the first") as first, raises("ranks-connection-broken-off", "forward on rank 0", "the first"):
        state.check("forward on rank 0")
    with state.once("the second") as second:
        assert (first, second, state.reason) == (True, False, "the first")


def come(store: Any, rank: int, ranks: int, gone: list[int]) -> threading.Thread:
    def run() -> None:
        come_together(store, rank, ranks, f"reason {rank}")
        gone.append(rank)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_nobody_goes_before_all_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(breaking_off, "TOGETHER_S", HANG_S)
    store, gone = dist.HashStore(), list[int]()  # type: ignore[attr-defined]
    threads = [come(store, rank, 3, gone) for rank in range(2)]
    threads[1].join(0.2)
    assert not gone
    assert store.get("breaks off/0") == b"reason 0" and store.add("news", 0) > 0  # the others' watchers hear of it
    threads.append(come(store, 2, 3, gone))
    for thread in threads:
        thread.join(HANG_S)
    assert sorted(gone) == [0, 1, 2]


def test_one_that_is_dead_is_not_awaited_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(breaking_off, "TOGETHER_S", 0.2)
    store, gone = dist.HashStore(), list[int]()  # type: ignore[attr-defined]
    for thread in [come(store, rank, 3, gone) for rank in range(2)]:
        thread.join(HANG_S)
    assert sorted(gone) == [0, 1]


@dataclass(frozen=True)
class Left(Mesh):
    """Of an engine that nobody has any more, on rank 0 of 2."""

    board: Any = None

    def store(self) -> Any:
        return self.board


class Kind(NcclGroupKind):
    """ended: the names of the groups that were."""

    def __init__(self) -> None:
        self.ended: list[str] = []

    def end(self, groups: Any) -> None:
        self.ended += [group.name for group in groups.values()]


def test_what_two_engines_have_left_is_broken_off_at_once_when_the_other_ranks_are_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The abort of one engine's groups waits for the GPU, on which those of the other one still run."""
    monkeypatch.setattr(group_kind, "_ABORT_S", HANG_S)
    monkeypatch.setattr(breaking_off, "TOGETHER_S", HANG_S)
    monkeypatch.setattr(mesh, "_lives", lambda group: True)
    monkeypatch.setattr(mesh, "_abandoned", [])
    device, kind, gone, stores, groups = PlayedDevice(), Kind(), list[int](), list[Any](), list[Any]()
    for engine in "ab":
        stores.append(dist.HashStore())  # type: ignore[attr-defined]
        names = (f"gather {engine}", f"reduce {engine}")
        made: list[Any] = [PlayedGroup(name, None, device, lambda at=stores[-1]: at) for name in names]  # type: ignore[misc]
        for group in made:
            PlayedWork(group, Endless(), lambda: None, lambda: None)
        groups += made
        of_rank: dict[str, Any] = {"gather": made[0], "reduce": made[1], "backend": "nccl", "kind": kind}
        Left(0, 2, torch.device("cpu"), **of_rank, owned=True, board=stores[-1]).abandon()
    destroying = threading.Thread(target=mesh._destroy_abandoned)
    destroying.start()
    destroying.join(0.2)
    assert not device.events  # rank 1 is not there yet
    others = [come(store, 1, 2, gone) for store in stores]
    for thread in (destroying, *others):
        thread.join(HANG_S)
    assert not destroying.is_alive() and all(group.aborted for group in groups)
    assert device.came == [2] * 4 and not device.in_flight
    assert sorted(kind.ended) == ["gather a", "gather b", "reduce a", "reduce b"] and not mesh._abandoned
