"""The dry run's own eyes: what crosses between host and device is seen, told apart, and located."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from shardengine.offload import HOST, host_copy
from tests.support.dry_run import META, Border, Crossing, DryPlatform, Log, SilentWire, dry_mesh

HERE, THERE, ONE = torch.ones(3), torch.ones(3, device=META), torch.ones((), device=META)
SEEN: dict[str, tuple[Callable[[], Any], str, str]] = {
    "item": (lambda: ONE.item(), "read", ""),
    "bool": (lambda: bool(ONE > 0), "read", ""),
    "float": (lambda: math.isfinite(ONE), "read", ""),
    "equal": (lambda: torch.equal(THERE, THERE), "read", ""),
    "a value as an option": (lambda: torch.add(THERE, THERE, alpha=ONE), "read", ""),  # type: ignore[call-overload]
    "tolist": (lambda: THERE.tolist(), "to host", "blocking"),
    "cpu": (lambda: THERE.cpu(), "to host", "blocking"),
    "to the host": (lambda: THERE.to(HOST, non_blocking=True), "to host", "pageable"),
    "written on the host": (lambda: torch.empty(3).copy_(THERE), "to host", "blocking"),
    "to the device": (lambda: HERE.to(META), "to device", "blocking"),
    "written there": (lambda: torch.empty(3, device=META).copy_(HERE), "to device", "blocking"),
    "pageable memory": (lambda: torch.empty(3, device=META).copy_(HERE, non_blocking=True), "to device", "pageable"),
    "numbers": (lambda: torch.tensor([1, 2], device=META), "to device", "blocking"),
    "more numbers": (lambda: THERE.new_tensor([1, 2]), "to device", "blocking"),
    "places": (lambda: THERE[torch.tensor([0, 2])], "to device", "blocking"),
}


@pytest.mark.parametrize("case", SEEN)
def test_what_crosses_is_seen(case: str) -> None:
    call, what, how = SEEN[case]
    log = Log()
    with Border(log):
        call()
    assert log.take() == {Crossing("", what, how): 1}


MIXED: dict[str, Callable[[], Any]] = {
    "added": lambda: HERE + THERE,
    "a scalar of the device on the host": lambda: torch.ones(3).mul_(ONE),  # torch lets this pass on meta
    "filled": lambda: torch.ones(3).fill_(ONE),
    "joined": lambda: torch.cat([HERE, THERE]),
    "chosen": lambda: torch.where(THERE > 0, HERE, THERE),
    "copied as one": lambda: torch._foreach_copy_([torch.ones(3)], [THERE]),
}


@pytest.mark.parametrize("case", MIXED)
def test_what_mixes_is_refused(case: str) -> None:
    with Border(Log()), pytest.raises(AssertionError, match="mixes host and device"):
        MIXED[case]()


def test_what_stays_on_one_side_is_not_seen() -> None:
    log = Log()
    with Border(log):
        (THERE * 2 + torch.tensor(1.0)).sum().add_(1.0)  # a scalar of the host travels with the launch
        assert (HERE + 1).sum().item() == 6.0
        HERE.clone().copy_(HERE)
        THERE.to(torch.float16)
    assert not log.seen


def test_a_crossing_has_the_product_s_place() -> None:
    log = Log()
    platform = DryPlatform(META, log)
    with Border(log):
        host_copy(THERE, platform, pinned=True)
    (crossing,) = log.take()
    assert crossing == ("offload/shard_store.py:host_copy", "to host", "blocking")
    assert log.lines[crossing].startswith("offload/shard_store.py:")
    assert log.pinned_bytes == 12


def test_streams_and_waits() -> None:
    log = Log()
    platform = DryPlatform(META, log)
    stream, host = platform.copy_stream(), platform.host_empty(3, torch.float32, pinned=True)
    done = stream.copy(THERE, host)
    assert not done.reached
    done.wait_on_host()
    done.wait_on_host()
    assert done.reached
    stream.copy(HERE, THERE)
    platform.fetch(ONE).get()
    assert log.take() == {
        Crossing("", "to host", "stream"): 1,
        Crossing("", "wait"): 1,
        Crossing("", "to device", "pageable stream"): 1,
        Crossing("", "read"): 1,
    }
    with pytest.raises(AssertionError, match="meta float32"):
        stream.copy(THERE, torch.ones(3, dtype=torch.float64))


def test_the_wire_refuses_what_cannot_be_sent() -> None:
    wire = SilentWire(4)
    wire.all_gather(torch.empty(12, device=META), THERE, "gather")
    own = torch.tensor([1, 2], dtype=torch.uint8)
    everyone = torch.empty(8, dtype=torch.uint8)
    assert wire.all_gather(everyone, own, "control").wait()
    assert everyone.tolist() == [1, 2] * 4
    for call in (
        lambda: wire.all_gather(torch.empty(9, device=META), THERE, "gather"),
        lambda: wire.all_gather(torch.empty(12), HERE, "gather"),
        lambda: wire.all_gather(torch.empty(12, device=META), HERE, "gather"),
        lambda: wire.all_to_all(torch.empty(6, device=META), torch.empty(6, device=META), "reduce"),
        lambda: wire.reduce_scatter(torch.empty(3, device=META), torch.empty(3, 4, device=META), "reduce"),
    ):
        with pytest.raises(AssertionError, match="expected"):
            call()
    assert wire.issued == {("all_gather", "gather"): 1, ("all_gather", "control"): 1}


def test_the_store_echoes() -> None:
    store = dry_mesh(3, 1).store()
    store.set("left/0/1", "closed")
    assert store.check(["left/0/2"])
    assert store.get("left/0/2") == b"closed"
    assert store.get("failure/0") == b""
