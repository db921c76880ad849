"""Copies between device and host: immediate on a CPU; on CUDA the order of what streams are told.

tests/parity/test_late_mutations.py takes each of these orders out and calls the functions here."""

from __future__ import annotations

from collections.abc import Iterator
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


class FakeCuda:
    """Streams that write down what they are ``told``. ``inside``: what ``torch.cuda.stream`` is then."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.told: list[str] = []
        self.copies, self.compute, self.other = (FakeStream(name, self.told) for name in ("copies", "compute", "other"))
        self.current = [self.compute]
        patch.setattr(torch.cuda, "Stream", lambda device: self.copies)
        patch.setattr(torch.cuda, "current_stream", lambda device: self.current[-1])
        patch.setattr(torch.cuda, "stream", self.inside)
        patch.setattr(torch.cuda, "synchronize", lambda device: self.told.append(f"the host waits for {device}"))
        patch.setattr(torch.cuda, "Event", lambda *, enable_timing: FakeEvent(f"timed {enable_timing}", self.told))

    @contextmanager
    def inside(self, stream: FakeStream) -> Iterator[None]:
        self.current.append(stream)
        yield
        self.current.pop()

    def tensor(self) -> Any:
        """What writes down where it is copied to."""
        return Source(self.told, self.current)


def test_on_cuda_streams_wait_for_events_and_the_host_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)
    told, inside, other = cuda.told, cuda.inside, cuda.other
    stream = Platform(CUDA).copy_stream()
    target = cuda.tensor()
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
    told.clear()
    stream.copy(target, target, end)
    assert told == ["copies waits for event on compute", "copy on copies", "event on copies"]
    assert Done().reached and Platform(CPU).mark().reached


def test_on_cuda_the_host_waits_for_what_it_fetches_and_memory_comes_home(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, platform = FakeCuda(monkeypatch), Platform(CUDA)
    told, home = cuda.told, platform.here()
    with cuda.inside(cuda.other):
        platform.come_home(home)
        with platform.copy_stream().is_current():
            platform.mark()
    assert told == ["compute waits for other", "event on copies"]
    told.clear()
    values, arrived = cuda.tensor(), cuda.tensor()
    values.device, values.dtype, values.shape, values.numel = CUDA, torch.float32, (1,), lambda: 1
    arrived.view = lambda shape: arrived
    monkeypatch.setattr(platform, "host_empty", lambda count, dtype, *, pinned: arrived if pinned else None)
    fetched = platform.fetch(values)
    assert told == ["copy on compute", "event on compute"] and not fetched.reached
    assert fetched.get() is arrived
    assert told.pop() == "the host waits"
    told.clear()
    platform.synchronize()
    assert told == ["the host waits for cuda:0"]


def test_on_cuda_a_moment_is_when_the_current_stream_comes_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    told = FakeCuda(monkeypatch).told
    platform = Platform(CUDA)
    first, later = platform.moment(), platform.moment()
    assert told == ["timed True on compute"] * 2 and not first.reached  # the host has waited for nothing
    before = now()
    assert before <= first.wait_on_host() <= now()
    assert first.reached and not later.reached
    later.wait_on_host()
    assert later.since(first) == 250_000 and later.at(first, 7) == 250_007


def test_on_a_cpu_a_moment_is_now() -> None:
    before = now()
    first, later = Platform(CPU).moment(), Platform(CPU).moment()
    assert first.reached and before <= first.wait_on_host() <= later.wait_on_host() <= now()
    assert later.since(first) == later.wait_on_host() - first.wait_on_host()
    assert later.at(first, 7) == later.wait_on_host()
