"""engine.trace(): one file with the lanes of all ranks, and the exposed communication that is always counted."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from shardengine import trace
from shardengine.comm import Collectives, Mesh, Named, Purpose, Wire, Work
from shardengine.offload import BufferPool, CopyStream, Platform
from tests.support import cases
from tests.support.parts import PARTIAL, SHARDED
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]


def record(folder: str, stage: str) -> dict[str, Any]:
    """Two traced steps, of which the collectives are counted from outside; then one that is not traced."""
    engine = cases.make_engine(cases.make_mlp(), cases.config_of(stage, zero={"reduce_bucket_size": 600}))
    issued: list[str] = []
    ledger = engine._core.collectives._ledger
    issue = ledger.issue

    def counted(record: Any, *rest: Any, **options: Any) -> Any:
        issued.append(record.of.operation)
        return issue(record, *rest, **options)

    def step(number: int) -> None:
        engine.backward(cases.loss_of(engine, number, engine.rank, 0))
        engine.step()

    step(0)
    with engine.trace(Path(folder) / "trace.json"):
        ledger.issue = counted  # type: ignore[method-assign]
        step(1)
        step(2)
        ledger.issue = issue  # type: ignore[method-assign]
    step(3)
    told = engine.traffic()
    assert not engine._core.collectives.trace.events
    engine.close()
    return {"issued": issued, "told": told}


@pytest.mark.parametrize("stage", list(cases.STAGES))
def test_every_collective_and_every_call_is_in_the_file(pools: Pools, tmp_path: Path, stage: str) -> None:
    results = pools(2).run(record, str(tmp_path), stage)
    tree = json.loads((tmp_path / "trace.json").read_text())
    events = [event for event in tree["traceEvents"] if event["ph"] == "X"]
    assert min(event["ts"] for event in events) == 0
    for rank, result in enumerate(results):
        mine = [event for event in events if event["pid"] == rank]
        lanes = {lane: [e for e in mine if e["cat"] == lane] for lane in trace.LANES}
        operations = sorted(event["name"].split()[0] for event in lanes["communication"])
        assert operations == sorted(result["issued"])
        calls = [e["name"] for e in lanes["compute"] if e["name"] in ("forward", "backward", "step")]
        assert calls == ["forward", "backward", "step"] * 2
        if stage.startswith("3"):
            names = [e["name"] for e in lanes["compute"]]
            assert names.count("forward blocks.1") == names.count("backward blocks.1") == 2
        for event in lanes["waiting"]:  # whoever waited, waited inside a call, and not longer than the collective took
            around = [e for e in lanes["compute"] if e["ts"] <= event["ts"] and end(event) <= end(e) + 1]
            assert around, event
        for event in lanes["communication"]:
            assert event["dur"] > 0 and event["args"]["purpose"]
        assert result["told"]["exposed_s_total"] > result["told"]["exposed_s_last_step"] > 0


def end(event: dict[str, Any]) -> float:
    return float(event["ts"] + event["dur"])


def test_a_trace_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "MAX_EVENTS", 3)
    found = trace.Trace()
    moment = trace.HostMoment()
    found.add(trace.COMPUTE, "before", moment, moment)
    found.begin()
    for number in range(5):
        found.add(trace.COMPUTE, str(number), moment, trace.HostMoment())
    assert [event[1] for event in found.events] == ["0", "1", "2"]
    assert found.end()[1] == 2 and not found.events
    found.begin()
    found.add(trace.COMPUTE, "after", moment, moment)
    found.drop()
    assert not found.recording and found.end() == ([], 0)


def unwritable(folder: str) -> str:
    engine = cases.make_engine(cases.make_mlp(), cases.config_of("2"))
    try:
        with engine.trace(Path(folder) / "missing" / "trace.json"):
            engine.backward(cases.loss_of(engine, 0, engine.rank, 0))
    except Exception as error:
        engine.step()
        engine.close()
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_a_file_that_cannot_be_written_is_an_error_on_every_rank(pools: Pools, tmp_path: Path) -> None:
    first, second = pools(2).run(unwritable, str(tmp_path))
    assert first.startswith("FileNotFoundError") and "failed on rank 0" in second


# A device whose streams have clocks, and which the host may not wait for


class PlayedDevice:
    """When each stream will have done what it was given; the host learns it when the device has ``come`` so far."""

    def __init__(self) -> None:
        self.busy_until: dict[str, int] = defaultdict(int)
        self.current = "compute"
        self.come = 0

    def run(self, nanoseconds: int) -> None:
        self.busy_until[self.current] += nanoseconds


@dataclass
class PlayedMoment:
    device: PlayedDevice
    time: int

    @property
    def reached(self) -> bool:
        return self.time <= self.device.come

    def since(self, earlier: PlayedMoment) -> int:
        assert self.reached and earlier.reached
        return self.time - earlier.time

    def at(self, zero: PlayedMoment, time_of_zero: int) -> int:
        return time_of_zero + self.since(zero)

    def wait_on_host(self) -> int:
        assert self.reached, "the host waits for the device"
        return 7_000_000 + self.time  # another clock


class PlayedStream(CopyStream):
    def __init__(self, device: PlayedDevice, name: str) -> None:
        self._device, self._name = device, name

    @contextmanager
    def is_current(self) -> Iterator[None]:
        before, self._device.current = self._device.current, self._name
        yield
        self._device.current = before


class PlayedPlatform(Platform):
    def __init__(self, device: PlayedDevice) -> None:
        super().__init__(torch.device("cpu"))
        self._played = device
        self._streams = itertools.count(1)

    def copy_stream(self) -> CopyStream:
        return PlayedStream(self._played, f"stream {next(self._streams)}")

    def here(self) -> Any:
        return self._played.current

    def moment(self) -> trace.Moment:
        return PlayedMoment(self._played, self._played.busy_until[self._played.current])


@dataclass
class PlayedWire(Wire):
    """A collective takes 30 ns and begins behind the current stream and those before it."""

    device: PlayedDevice

    def all_to_all(self, out: Any, full: Any, group: Any) -> Any:
        until = self.device.busy_until
        until[group] = max(until[group], until[self.device.current]) + 30
        return PlayedWork(self.device, until[group])


@dataclass
class PlayedWork:
    device: PlayedDevice
    ends: int

    def wait(self) -> None:
        until = self.device.busy_until
        until[self.device.current] = max(until[self.device.current], self.ends)


def played(device: PlayedDevice) -> Mesh:
    """One of two ranks."""
    return Mesh(
        0, 2, torch.device("cpu"), reduce="reduce", backend="nccl", wire=PlayedWire(device),  # type: ignore[arg-type]
        platform_of=lambda _: PlayedPlatform(device),
    )  # fmt: skip


def reduction(link: Collectives, name: str) -> Work:
    return link.move(torch.zeros(4), PARTIAL, SHARDED, Named((), name), Purpose.GRADIENTS, lambda terms: None)


def step_on_a_device(recording: bool) -> tuple[PlayedDevice, trace.Trace]:
    """Compute 10 ns, begin two reductions with 5 ns between them, compute 20 ns, wait for both, compute 40 ns."""
    device = PlayedDevice()
    mesh = played(device)
    link = Collectives(mesh, BufferPool(mesh.platform))
    works = []
    if recording:
        link.trace.begin()
    with link.trace.span("backward"):
        device.run(10)
        for name in ("a", "b"):
            works.append(reduction(link, name))
            device.run(5)
        device.run(15)
        for work in works:
            work.wait()
        device.run(40)
    return device, link.trace


def test_on_a_device_the_trace_shows_what_streams_do_and_the_host_waits_for_nothing() -> None:
    device, found = step_on_a_device(recording=True)
    assert found.waited_ns == 0 and not found.events  # the device has not come so far, and nobody has waited for it
    device.come = 50  # the first reduction is over at 40
    assert found.waited_ns == 5
    device.come = 1000
    assert found.waited_ns == 5 + 30
    events, left_out = found.end()
    shown = [(trace.LANES[lane], name, start - 7_000_000, lasted) for lane, name, start, lasted, _ in events]
    assert sorted(shown) == [
        ("communication", "reduce-scatter a", 10, 30),
        ("communication", "reduce-scatter b", 15, 55),  # it is behind the other one
        ("compute", "backward", 0, 110),
        ("waiting", "reduce-scatter a", 35, 5),
        ("waiting", "reduce-scatter b", 40, 30),
    ]
    assert left_out == 0


def test_a_trace_does_not_disturb_the_stream_that_computes() -> None:
    traced, plain = (step_on_a_device(recording)[0].busy_until for recording in (True, False))
    assert traced.pop("stream 1") == 70  # where the ends are waited for
    assert traced == plain
    assert plain["compute"] == 110


def test_a_trace_that_ends_with_an_error_waits_for_nothing() -> None:
    _, found = step_on_a_device(recording=True)
    found.drop()
    assert found.end() == ([], 0)


@pytest.mark.parametrize("elsewhere", [False, True])
def test_without_overlap_what_is_waited_for_on_two_streams_is_exposed_once(elsewhere: bool) -> None:
    """A gather of weights that are away begins on another stream, which computes nothing and may wait."""
    device = PlayedDevice()
    link = Collectives(mesh := played(device), BufferPool(mesh.platform), overlap=False)
    with mesh.platform.loads.is_current() if elsewhere else nullcontext():
        work = reduction(link, "a")
    device.run(10)
    work.wait()
    device.come = 1000
    assert link.trace.waited_ns == (20 if elsewhere else 30)
    assert device.busy_until["compute"] == (30 if elsewhere else 40)
