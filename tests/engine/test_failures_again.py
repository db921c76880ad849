"""What comes after a failure: a checkpoint where reset() has no way back, a second one at the same place, any call."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardengine
from shardengine.comm.flight_recorder import Purpose
from shardengine.errors import CommunicationError, UsageError
from tests.engine.test_recovery import check, fail_once, listening_closely, make_engine, raise_in, train_through
from tests.support import cases
from tests.support.ranks import RankPool
from tests.support.special_models import Boom

Pools = Callable[[int], RankPool]
SOON_S = 300
"""Far below the engines' ``timeout_s``, far above what a loaded machine needs."""


def threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "shardengine-store"}


# An update that nothing can finish


def tear_and_load(stage: str, folder: str, **options: Any) -> dict[str, Any]:
    """The last rank's update is torn inside of a bucket; all go on from a checkpoint that was written before."""
    before = threads()
    network = cases.make_mlp()
    network.register_buffer("table", torch.zeros(3))  # broadcast in every step: ranks must agree on when
    config = cases.config_of(stage, zero={"reduce_bucket_size": 600}, timeout_s=60, **options)
    engine = shardengine.initialize(network, config, optimizer=cases.make_optimizer(network, "AdamW"))
    torn = engine.rank == engine.world_size - 1

    def go_wrong(engine: Any) -> None:
        engine.save_checkpoint(folder)
        if torn:
            raise_in(engine, "inside of a bucket")

    def recover(engine: Any, error: Exception) -> None:
        if engine.world_size > 1:
            if torn:
                with pytest.raises(UsageError, match=r"engine\.reset\(\) on every rank first"):
                    engine.load_checkpoint(folder)
            with pytest.raises(UsageError, match=r"engine\.load_checkpoint\(\) on every rank"):
                engine.reset()
        for call in (engine.zero_grad, lambda: engine.save_checkpoint(folder, "torn")):
            with pytest.raises(UsageError, match="interrupted during its update"):
                call()
        engine.load_checkpoint(folder)
        if engine.world_size > 1:
            engine._core.collectives.failures.news()  # as in a long wait: the new groups have a thread, too

    with listening_closely():
        result = train_through(engine, go_wrong, recover)
    result["weights"].pop("table", None)  # the oracle has no such buffer; ranks above 0 have no weights
    deadline = time.monotonic() + SOON_S
    while not threads() <= before and time.monotonic() < deadline:
        time.sleep(0.05)
    return {**result, "left": len(threads() - before)}


@pytest.mark.parametrize(
    ("stage", "ranks", "options"), [("0", 1, {}), ("1", 2, {"overlap_param_gather": True}), ("3", 2, {})]
)
def test_after_a_torn_update_loading_a_checkpoint_is_the_way_back(
    pools: Pools, tmp_path: Path, stage: str, ranks: int, options: dict[str, Any]
) -> None:
    folder = str(tmp_path)
    results = pools(ranks).run(tear_and_load, stage, folder, **options) if ranks > 1 else [tear_and_load(stage, folder)]
    check(results, stage)
    assert [result["left"] for result in results] == [0] * ranks, "store threads outlive their process groups"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000001"]


# The same place again


def fail_again(stage: str) -> dict[str, Any]:
    """Every rank raises in a forward and catches it; in the same forward, begun anew, rank 1 raises alone."""
    engine = make_engine(stage, 2 * SOON_S)
    said: list[str] = []
    started = 0.0

    def recover(engine: Any, error: Exception) -> None:
        nonlocal started
        said.append(f"{type(error).__name__}: {error}")
        if len(said) > 1:
            board = engine._core.collectives.failures
            while engine.rank == 1 and time.monotonic() - started < SOON_S:  # reset() would report it, too
                if any(report.gave_up for report in board.reports().values()):
                    break
                time.sleep(0.05)
            said.append(str(time.monotonic() - started))
            engine.reset()
            return
        started = time.monotonic()
        engine.zero_grad()
        if engine.rank == 1:
            raise_in(engine, "forward")

    with listening_closely():
        return {**train_through(engine, lambda engine: raise_in(engine, "forward"), recover), "said": said}


def test_a_second_failure_at_the_same_place_is_told(pools: Pools) -> None:
    results = pools(2).run(fail_again, "3")
    check(results, "3")
    for rank, result in enumerate(results):
        first, second, seconds = result["said"]
        assert first == "Boom: on purpose" and float(seconds) < SOON_S
        assert ("CommunicationError: rank 1 raised: Boom: on purpose (in forward of step 2" in second) == (rank == 0)


# Outside of any call of the engine


def exponential(engine: Any) -> None:
    engine.module.get_parameter("inp.weight").grad.exp_()


def of_another_shape(engine: Any) -> None:
    engine.module.get_parameter("inp.weight").grad.add_(torch.ones(3, 5, 7))


def forgotten(engine: Any) -> None:
    loss = cases.loss_of(engine.module, 1, engine.rank, 0)
    engine.module.get_parameter("inp.weight").grad = None
    loss.backward()


def refused_on_one_rank(stage: str, change: Callable[[Any], None]) -> list[str]:
    engine = make_engine(stage, 30)
    group, said = dist.new_group(), ""
    with listening_closely():
        cases.run_micro_batch(engine, cases.loss_of, 0, 0)
        engine.backward(cases.loss_of(engine, 1, engine.rank, 0))
        if engine.rank:
            with pytest.raises((UsageError, RuntimeError)):
                change(engine)
        if engine.rank == 0:
            try:
                engine.step()
            except CommunicationError as error:
                said = str(error)
        dist.barrier(group)
        engine.reset()
        cases.run_micro_batch(engine, cases.loss_of, 1, 0)
        steps = engine.global_steps
        engine.close()
    return [said, str(steps)]


@pytest.mark.parametrize("change", [exponential, of_another_shape, forgotten])
def test_a_refused_change_of_a_gradient_is_told_to_the_others(pools: Pools, change: Callable[[Any], None]) -> None:
    (told, steps), (_, same) = pools(2).run(refused_on_one_rank, "1", change)
    assert told.startswith("rank 1 raised: ") and "(in a change of 'inp.weight'.grad after " in told, told
    assert "engine.reset() on every rank" in told
    assert steps == same == "3", "rank 0 had begun the second"


# Collective calls besides forward, backward and step


def enter(context: Any) -> None:
    with context:
        pass


CALLS: dict[str, tuple[Callable[[Any, str], Any], Callable[[Any], tuple[Any, str]]]] = {
    "full_params": (lambda engine, _: enter(engine.full_params()), lambda core: (core.units[1], "summon")),
    "leaving full_params": (
        lambda engine, _: enter(engine.full_params(writable=True)),
        lambda core: (core.units[1], "release_summoned"),
    ),
    "full_optimizer_state": (
        lambda engine, _: enter(engine.full_optimizer_state()),
        lambda core: (core, "adopt_written_weights"),
    ),
    "state_dict": (lambda engine, _: engine.state_dict(), lambda core: (core.pool, "acquire")),
    "save_pretrained": (
        lambda engine, folder: engine.save_pretrained(Path(folder, "model")),
        lambda core: (core.pool, "acquire"),
    ),
    "save_checkpoint": (
        lambda engine, folder: engine.save_checkpoint(folder),
        lambda core: (core, "adopt_written_weights"),
    ),
    "load_checkpoint": (lambda engine, folder: engine.load_checkpoint(folder), lambda core: (core, "await_weights")),
}
"""Per call: how it is made, and what raises in it (owner, name)."""


def failing_in(call: str) -> int:
    """The rank that raises; where rank 0 only sends, the other one waits."""
    return 0 if call.startswith("leaving") else 1


def fail_in_calls(stage: str, folder: str) -> dict[str, Any]:
    engine = make_engine(stage, 2 * SOON_S)
    said: dict[str, tuple[str, float]] = {}
    unnamed: list[str] = []

    def go_wrong(engine: Any) -> None:
        unnamed.extend(unnamed_collectives(engine))
        engine.save_checkpoint(folder)
        for name, (call, owner) in CALLS.items():
            if engine.rank == failing_in(name):
                fail_once(*owner(engine._core), 0)
            started = time.monotonic()
            with pytest.raises((Boom, CommunicationError)) as caught:
                call(engine, folder)
            said[name] = (str(caught.value), time.monotonic() - started)
            engine.reset()

    def recover(_engine: Any, error: Exception) -> None:
        raise error

    with listening_closely():
        return {**train_through(engine, go_wrong, recover), "said": said, "unnamed": unnamed}


def unnamed_collectives(engine: Any) -> list[str]:
    """The collectives of ``full_optimizer_state`` whose errors would not name their bucket."""
    ledger: Any = engine._core.collectives._ledger
    plain, records = ledger.record, []

    def noted(*args: Any) -> Any:
        records.append(plain(*args))
        return records[-1]

    ledger.record = noted
    with engine.full_optimizer_state(writable=True):
        pass
    del ledger.record
    whole = [record.of for record in records if record.of.purpose is Purpose.WHOLE_STATE]
    assert {record.operation for record in whole} == {"all-gather", "broadcast"}
    return [record.subject for record in whole if not record.what.startswith("bucket ")]


def test_a_failure_in_any_collective_call_is_told(pools: Pools, tmp_path: Path) -> None:
    results = pools(2).run(fail_in_calls, "3", str(tmp_path))
    check(results, "3")
    assert [result["unnamed"] for result in results] == [[], []]
    for name in CALLS:
        failing = failing_in(name)
        assert results[failing]["said"][name][0] == "on purpose"
        text, seconds = results[1 - failing]["said"][name]
        assert f"rank {failing} raised: Boom: on purpose (in {name} of step 2" in text and seconds < SOON_S, text
