"""Copies between device and host: immediate on a CPU; on CUDA the order of what streams are told."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import pytest
import torch

from shardengine.offload import Done, Platform
from shardengine.trace import now

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def test_on_a_cpu_a_copy_is_over_at_once() -> None:
    source, target = torch.arange(5.0), torch.zeros(5)
    stream = Platform(CPU).copy_stream()
    done = stream.copy(source, target)
    assert torch.equal(target, source) and target.data_ptr() != source.data_ptr()
    assert done.reached
    done.wait()
    done.wait_on_host()


class FakeStream:
    """Writes down what it is told."""

    def __init__(self, name: str, told: list[str]) -> None:
        self.name, self.told, self.device = name, told, CUDA

    def wait_stream(self, other: FakeStream) -> None:
        self.told.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: FakeEvent) -> None:
        self.told.append(f"{self.name} waits for {event.after}")

    def record_event(self, event: FakeEvent | None = None) -> FakeEvent:
        self.told.append(f"event on {self.name}" if event is None else f"{event.after} on {self.name}")
        return event or FakeEvent(f"event on {self.name}", self.told)


class FakeEvent:
    def __init__(self, after: str, told: list[str]) -> None:
        self.after, self.told, self.over = after, told, False

    def query(self) -> bool:
        return self.over

    def synchronize(self) -> None:
        self.told.append("the host waits")
        self.over = True

    def elapsed_time(self, later: FakeEvent) -> float:
        assert self.over and later.over
        return 0.25


class Source:
    """A tensor that writes down on which stream it is copied."""

    def __init__(self, told: list[str], current: list[FakeStream]) -> None:
        self.told, self.current = told, current

    def copy_(self, source: Any, *, non_blocking: bool) -> None:
        self.told.append(f"copy on {self.current[-1].name}" + ("" if non_blocking else ", the host waits"))


def test_on_cuda_streams_wait_for_events_and_the_host_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    copies, compute, other = (FakeStream(name, told) for name in ("copies", "compute", "other"))
    current = [compute]

    @contextmanager
    def inside(stream: FakeStream) -> Any:
        current.append(stream)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: copies)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[-1])
    monkeypatch.setattr(torch.cuda, "stream", inside)
    stream = Platform(CUDA).copy_stream()
    target: Any = Source(told, current)
    done = stream.copy(target, target)
    assert not done.reached
    assert told == ["copies waits for compute", "copy on copies", "event on copies"]
    told.clear()
    done.wait()
    assert told == ["compute waits for event on copies"]
    told.clear()
    with inside(other):
        done.wait()  # the allocator of the issuer's stream must not reuse the memory earlier either
    assert sorted(told) == ["compute waits for event on copies", "other waits for event on copies"]
    told.clear()
    done.wait_on_host()
    assert told == ["the host waits"] and done.reached
    told.clear()
    end = Platform(CUDA).mark()
    assert told == ["event on compute"] and not end.reached
    assert Done().reached and Platform(CPU).mark().reached


def test_on_cuda_a_moment_is_when_the_current_stream_comes_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    compute = FakeStream("compute", told)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: compute)
    monkeypatch.setattr(torch.cuda, "Event", lambda *, enable_timing: FakeEvent(f"timed {enable_timing}", told))
    platform = Platform(CUDA)
    first, later = platform.moment(), platform.moment()
    assert told == ["timed True on compute"] * 2 and not first.reached  # the host has waited for nothing
    before = now()
    assert before <= first.wait_on_host() <= now()
    assert not later.reached
    later.wait_on_host()
    assert later.since(first) == 250_000 and later.at(first, 7) == 250_007


def test_on_a_cpu_a_moment_is_now() -> None:
    before = now()
    first, later = Platform(CPU).moment(), Platform(CPU).moment()
    assert first.reached and before <= first.wait_on_host() <= later.wait_on_host() <= now()
    assert later.since(first) == later.wait_on_host() - first.wait_on_host()
    assert later.at(first, 7) == later.wait_on_host()
