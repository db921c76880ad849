"""What happens after a fault on NCCL, over groups that are played on a CPU: nothing here has run on a GPU."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import shardengine
from shardengine.comm import Named, Purpose, breaking_off, nccl_watcher, watchdog
from shardengine.comm.nccl_watcher import Watcher
from shardengine.errors import CommunicationError
from shardengine.stages import Placement
from tests.engine.test_recovery import check, fail_once, raise_in, train_through
from tests.support import HANG_S, cases
from tests.support.played_nccl import PlayedDevice, played_mesh
from tests.support.ranks import RankPool
from tests.support.special_models import Boom

Pools = Callable[[int], RankPool]


def make_engine(stage: str, timeout_s: float = HANG_S, **options: Any) -> tuple[Any, PlayedDevice]:
    """An engine over played groups of its own."""
    mesh, device = played_mesh(timeout_s)
    model = cases.make_mlp()
    config = cases.config_of(
        stage, 1, zero={"reduce_bucket_size": 600}, timeout_s=timeout_s, reproducible=True, **options
    )
    return shardengine.initialize(model, config, optimizer=cases.make_optimizer(model, "AdamW"), mesh=mesh), device


@contextmanager
def listening_closely() -> Iterator[None]:
    """Shorter times, so that many cases can be tried."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watchdog, "STANDS_S", 0.3)
        patch.setattr(nccl_watcher, "POLL_S", 0.1)
        patch.setattr(nccl_watcher, "GRACE_S", 0.3)
        yield


def watchers() -> list[threading.Thread]:
    """Those of this process."""
    return [thread for thread in threading.enumerate() if thread.name == "shardengine-watcher"]


def raise_on_one_rank(stage: str, place: str, failing: int) -> dict[str, Any]:
    """Rank ``failing`` raises, the other one is caught in a wait for its device, both train on."""
    with listening_closely():
        engine, device = make_engine(stage)
        said: list[str] = []

        def go_wrong(engine: Any) -> None:
            if engine.rank == failing:
                raise_in(engine, place)

        def recover(engine: Any, error: Exception) -> None:
            said.append(f"{type(error).__name__}: {error}")
            engine.reset()
            device.events.append("reset")

        result = train_through(engine, go_wrong, recover)
        return {**result, "said": said, "events": device.events, "came": device.came, "watchers": len(watchers())}


CASES = [
    ("3", "forward"),
    ("2", "backward"),
    ("1", "before the update"),
    ("1", "between two buckets"),
    ("0", "backward"),
]
CALLS = {"forward": "forward", "backward": "backward"}


@pytest.mark.parametrize(("stage", "place"), CASES)
@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_waits_for_its_device_hears_of_a_fault_and_both_train_on(
    pools: Pools, stage: str, place: str, failing: int
) -> None:
    results = pools(2).run(raise_on_one_rank, stage, place, failing)
    check(results, stage)
    assert results[failing]["said"] == ["Boom: on purpose"]
    (heard,) = results[1 - failing]["said"]
    assert f"rank {failing} raised: Boom: on purpose (in {CALLS.get(place, 'step')} of step 2" in heard
    assert "engine.reset()" in heard
    for result in results:
        assert_aborted_once(result)
        assert result["events"][4:] == ["reset", "end gather", "end reduce"]  # the second time in order


def assert_aborted_once(result: dict[str, Any]) -> None:
    """Both groups at once, when both ranks knew, and before any of them ended; nobody watches any more."""
    assert sorted(result["events"][:2]) == ["abort gather", "abort reduce"]
    assert result["events"][2:4] == ["end gather", "end reduce"]
    assert result["came"] == [2, 2]
    assert result["watchers"] == 0


BUCKET = Named(["block.weight"], "bucket 7")


def wait_between_calls(stage: str) -> dict[str, Any]:
    """Rank 1 raises in forward and is caught there; rank 0 waits for its device in the user's own code. Both close."""
    with listening_closely():
        engine, device = make_engine(stage)
        engine.backward(cases.loss_of(engine, 0, engine.rank, 0))
        engine.step()
        said: list[str] = []
        if engine.rank == 1:
            fail_once(engine._core.schedule, "restart", 0)  # before the forward's first collective
            with pytest.raises(Boom):
                cases.loss_of(engine, 1, 1, 0)
            while not engine._core.mesh.breaking_off.reason:
                time.sleep(0.01)  # in something of the user's
        else:
            engine._core.collectives.move(
                torch.ones(4), Placement.PARTIAL, Placement.SHARDED, BUCKET, Purpose.GRADIENTS, lambda terms: None
            )
            device.synchronize()
        for call in ("forward", "step"):
            with pytest.raises(CommunicationError) as caught:
                engine.step() if call == "step" else cases.loss_of(engine, 1, engine.rank, 0)
            said.append(str(caught.value))
        with contextlib.suppress(CommunicationError):  # weights that are spread over ranks stay so
            engine.close()
        return {"said": said, "events": device.events, "came": device.came, "watchers": len(watchers())}


@pytest.mark.parametrize("stage", ["0", "3"])
def test_the_next_call_says_who_failed_and_close_returns(pools: Pools, stage: str) -> None:
    results = pools(2).run(wait_between_calls, stage)
    for rank, result in enumerate(results):
        for call, text in zip(("forward", "step"), result["said"], strict=True):
            assert text.startswith(
                f"{call} on rank {rank} cannot begin, since what was in flight between the ranks was"
            )
            assert "rank 1 raised: Boom: on purpose (in forward of step 2" in text
            assert "on rank 0 for bucket 7 (block.weight)" in text and "engine.reset()" in text
        assert_aborted_once(result)
        assert len(result["events"]) == 4


def die(folder: str) -> None:
    """Rank 1 is killed in the second step; rank 0 writes down what it heard."""
    with listening_closely(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(breaking_off, "TOGETHER_S", 0.3)
        engine, device = make_engine("2", 3.0)
        for step in range(2):
            loss = cases.loss_of(engine, step, engine.rank, 0)
            if step and engine.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                engine.backward(loss)
                engine.step()
            except CommunicationError as error:
                engine.close()
                Path(folder, "heard").write_text(json.dumps([str(error), device.events, len(watchers())]))


def test_a_killed_rank_is_named_before_the_process_is_ended_and_close_returns(pools: Pools, tmp_path: Path) -> None:
    assert list(pools(2).run_expecting_errors(die, str(tmp_path))) == [1]
    text, events, left = json.loads((tmp_path / "heard").read_text())
    assert "did not end within 3 s. Missing: rank 1 says nothing (busy elsewhere, hung or gone)" in text
    assert sorted(events[:2]) == ["abort gather", "abort reduce"] and events[2:] == ["end gather", "end reduce"]
    assert left == 0


def be_slow(folder: str) -> dict[str, Any]:
    """Rank 1 comes when the watcher of rank 0 has looked twenty times at a collective that does not end."""
    enough = Path(folder, "enough")
    looks = itertools.count()
    plain = Watcher._look

    def look(watching: Any, failures: Any) -> str:
        if any(not work.is_completed() for _, work in watching._latest.values()) and next(looks) == 20:
            enough.touch()
        return plain(watching, failures)

    with listening_closely(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Watcher, "_look", look)
        engine, device = make_engine("3")

        def wait(engine: Any) -> None:
            while engine.rank == 1 and not enough.exists():
                time.sleep(0.01)

        result = train_through(engine, wait, lambda _engine, error: None)
        return {**result, "events": device.events, "watchers": len(watchers())}


def test_a_rank_that_is_only_slow_ends_nothing_and_an_orderly_end_aborts_nothing(pools: Pools, tmp_path: Path) -> None:
    results = pools(2).run(be_slow, str(tmp_path))
    check(results, "3")
    for result in results:
        assert result["events"] == ["end gather", "end reduce"]
        assert result["watchers"] == 0


def close_early() -> tuple[str, list[str]]:
    """Rank 1 closes its engine after a step, rank 0 goes on."""
    with listening_closely(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(breaking_off, "TOGETHER_S", 0.3)
        engine, device = make_engine("0")
        engine.backward(cases.loss_of(engine, 0, engine.rank, 0))
        engine.step()
        text = ""
        if engine.rank == 0:
            with pytest.raises(CommunicationError) as caught:
                engine.backward(cases.loss_of(engine, 1, 0, 0))
                engine.step()
            text = str(caught.value)
        engine.close()
        return text, device.events


def test_a_rank_that_closed_its_engine_is_missed_only_when_it_is_needed(pools: Pools) -> None:
    (text, heard), (_, closed) = pools(2).run(close_early)
    assert "rank 1 has closed its engine after step 1" in text
    assert sorted(heard[:2]) == ["abort gather", "abort reduce"]
    assert closed == ["end gather", "end reduce"]


def reset_without_a_fault() -> dict[str, Any]:
    engine, device = make_engine("1")
    result = train_through(engine, lambda engine: engine.reset(), lambda _engine, error: None)
    return {**result, "events": device.events, "came": device.came, "watchers": len(watchers())}


def test_reset_with_nothing_in_flight(pools: Pools) -> None:
    results = pools(2).run(reset_without_a_fault)
    check(results, "1")
    for result in results:
        assert_aborted_once(result)
