"""A communication hook of the user's that fails on one rank: the others learn who it was, and soon."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from concurrent import futures
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from shardengine.errors import CommunicationError, UsageError
from tests.engine.test_recovery import listening_closely, make_engine, raise_in
from tests.support import cases
from tests.support.ranks import RankFailure, RankPool
from tests.support.special_models import Boom

GROUP_TIMEOUT_S = 1800.0
"""Of the group in which such a hook's own collectives are: nobody may wait for so long."""


def returns_work() -> str:
    engine = make_engine("1", GROUP_TIMEOUT_S)
    engine.register_comm_hook(None, lambda state, bucket: dist.all_reduce(bucket.buffer(), async_op=True))
    with pytest.raises(UsageError) as raised:
        cases.run_micro_batch(engine, cases.loss_of, 0, 0)
    return str(raised.value)


def test_a_hook_that_returns_a_collective_is_told_of_its_future() -> None:
    pool = RankPool(2)
    for said in pool.run(returns_work):
        assert "expected a tensor, or a future of one (of a collective that is under way: .get_future())" in said, said
    pool.stop(force=True)


def go_wrong(how: str, overlap: bool, said_in: str = "") -> str:
    """What a rank says."""
    engine = make_engine("1", GROUP_TIMEOUT_S, overlap_comm=overlap)
    calls = [0]

    def hook(state: Any, bucket: Any) -> Any:
        calls[0] += 1
        fails = calls[0] == 3 and engine.rank == 1
        if fails and how == "raises":
            raise ValueError("no more codebook")
        if fails and how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        begun: Any = dist.all_reduce(bucket.buffer(), async_op=True)

        def divide(future: Any) -> Any:
            if calls[0] == 3 and (how == "callback" or (how == "callback of one" and engine.rank == 1)):
                raise ValueError("no more codebook")
            return future.value()[0] / dist.get_world_size()

        return begun.get_future().then(divide)

    engine.register_comm_hook(None, hook)
    said = ""
    try:
        for step in range(3):
            cases.run_micro_batch(engine, cases.loss_of, step, 0)
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        if said_in:
            Path(said_in).write_text(json.dumps(said))
            raise
    return said


@pytest.mark.parametrize("overlap", [True, False])
def test_a_hook_that_raises_on_one_rank_ends_the_wait_of_the_others(overlap: bool) -> None:
    pool = RankPool(2)
    waits, raised = pool.run(go_wrong, "raises", overlap)
    pool.stop(force=True)
    assert raised == "ValueError: no more codebook"
    assert waits.startswith("CommunicationError: rank 1 raised: ValueError: no more codebook (in backward"), waits
    assert "This rank is blocked in communication hook number 3 on rank 0 for bucket" in waits, waits


def test_an_error_on_every_rank_is_the_hooks_own() -> None:
    pool = RankPool(2)
    for said in pool.run(go_wrong, "callback", True):
        assert "no more codebook" in said, said
    pool.stop(force=True)


def test_an_error_on_one_rank_is_the_hooks_own_and_told_to_the_others() -> None:
    pool = RankPool(2)
    waits, raised = pool.run(go_wrong, "callback of one", True)
    pool.stop(force=True)
    assert "no more codebook" in raised and not raised.startswith("CommunicationError"), raised
    assert waits.startswith("CommunicationError: rank 1 raised: ") and "no more codebook" in waits, waits


def test_a_rank_that_is_killed_in_a_hook_is_named(tmp_path: Path) -> None:
    with pytest.raises(RankFailure):
        RankPool(2).run(go_wrong, "killed", True, str(tmp_path / "said"))
    said = json.loads((tmp_path / "said").read_text())
    assert said.startswith("CommunicationError: communication hook number 3 on rank 0 for bucket"), said
    assert "Missing: rank 1 says nothing" in said, said


def reset_after(how: str, stage: str, folder: str) -> list[str]:
    """What a rank says of the failure, of engine.reset(), of what it may do then; steps in the end."""
    engine = make_engine(stage, 20)
    group, calls, said = dist.new_group(), [0], list[str]()

    def hook(state: Any, bucket: Any) -> Any:
        calls[0] += 1
        fails = calls[0] == 3 and engine.rank == 1
        if fails and how == "before":
            raise ValueError("no more codebook")
        begun: Any = dist.all_reduce(bucket.buffer(), async_op=True)
        if fails and how == "after":
            raise ValueError("no more codebook")
        return begun.get_future().then(lambda future: future.value()[0] / dist.get_world_size())

    engine.register_comm_hook(None, hook)
    tries: list[Callable[[], Any]] = [
        engine.reset,
        engine.reset,
        lambda: engine.save_checkpoint(folder),
        lambda: engine.register_comm_hook(None, hook),
        lambda: cases.run_micro_batch(engine, cases.loss_of, 0, 0),
    ]
    with listening_closely():
        if how in ("forward", "before the update") and engine.rank == 1:
            raise_in(engine, how)
        with pytest.raises((ValueError, CommunicationError, Boom)) as raised:
            for step in range(3):
                cases.run_micro_batch(engine, cases.loss_of, step, 0)
        said.append(str(raised.value))
        for attempt in tries:
            try:
                said.append(f"fine: {attempt()}")
            except UsageError as error:
                said.append(str(error))
            dist.barrier(group)
    return [*said, str(engine.global_steps)]


@pytest.mark.parametrize("how", ["before", "after", "forward"])
def test_reset_refuses_where_what_a_hook_has_begun_may_be_out_of_step(how: str, tmp_path: Path) -> None:
    pool = RankPool(2)
    ranks = pool.run(reset_after, how, "1", str(tmp_path))
    pool.stop(force=True)
    why = f"it has failed, or did not end, on ranks {[0] if how == 'forward' else [0, 1]}"
    for _, refused, again, saved, registered, trained, steps in ranks:
        assert f"the communication hook hook: {why}" in refused and "Expected the ranks to be started again" in refused
        assert ranks[0][1] == refused == again == registered == trained
        assert saved.startswith("fine: "), saved
        assert steps == "0"
    waits = ranks[0][0]
    assert how == "forward" or "start the ranks again: what a hook has begun itself" in waits, waits


@pytest.mark.parametrize(("how", "stage", "steps"), [("forward", "3", "1"), ("before the update", "1", "2")])
def test_reset_trains_on_where_ranks_have_called_the_hook_as_often(
    how: str, stage: str, steps: str, tmp_path: Path
) -> None:
    pool = RankPool(2)
    for said in pool.run(reset_after, how, stage, str(tmp_path)):
        assert all(each.startswith("fine: ") for each in said[1:-1]) and said[-1] == steps, said
    pool.stop(force=True)


def answers(what: str) -> str:
    """What a hook's answer, or what it does, is told."""
    engine = make_engine("1", GROUP_TIMEOUT_S)

    def hook(state: Any, bucket: Any) -> Any:
        buffer = bucket.buffer()
        if what in CALLS:
            CALLS[what](engine)
        elif what == "resizes":
            buffer.resize_(3)
        given = {"counts": buffer.long(), "meta": buffer.to("meta"), "thread": futures.Future()}
        return given.get(what, buffer)

    engine.register_comm_hook(None, hook)
    try:
        cases.run_micro_batch(engine, cases.loss_of, 0, 0)
    except UsageError as error:
        return str(error)
    return "nothing"


CALLS: dict[str, Any] = {
    "saves": lambda engine: engine.save_checkpoint("never"),
    "steps": lambda engine: engine.step(),
    "forgets": lambda engine: engine.zero_grad(),
    "closes": lambda engine: engine.close(),
}
TOLD = {
    "counts": "elements of torch.int64 on cpu: expected a tensor of the bucket's",
    "meta": "elements of torch.float32 on meta: expected a tensor of the bucket's",
    "thread": "returned Future: expected a tensor, or a future of one",
    "resizes": "has resized the bucket's buffer to 3 elements",
    **dict.fromkeys(CALLS, "inside of a communication hook (rank"),
}


def test_what_a_hook_may_not_answer_or_do() -> None:
    pool = RankPool(2)
    for what, text in TOLD.items():
        for said in pool.run(answers, what):
            assert text in said, f"{what}: {said}"
    pool.stop(force=True)
