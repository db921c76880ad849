"""outside.py: one rank is in a call of the engine, the others are in collectives of the program."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardengine.comm import outside, store_board
from shardengine.comm.mesh import Mesh
from shardengine.comm.outside import Outside
from tests.comm.test_uneven_data import SAME, TIMEOUT_S, Pools, listening_closely, logged, make_engine, said_by, train
from tests.support import HANG_S, cases

EVALUATE = "evaluate the same number of batches on every rank"


def evaluate(engine: Any, _folder: str) -> None:
    with torch.no_grad():
        cases.loss_of(engine, 1, engine.rank, 0)


CALLS: dict[str, Callable[[Any, str], Any]] = {
    "evaluation": evaluate,
    "a batch more": lambda engine, _: train(engine, 1, 2),
    "save_checkpoint": lambda engine, folder: engine.save_checkpoint(folder),
}
COLLECTIVES: dict[str, Callable[[], Any]] = {
    "barrier": lambda: dist.barrier(),
    "all_gather_object": lambda: dist.all_gather_object([None] * dist.get_world_size(), 0),
    "all_reduce": lambda: dist.all_reduce(torch.zeros(1)),
}


def act_alone(stage: str, call: str, collective: str, folder: str) -> str:
    """Rank 0 is in a call of the engine and the others in a collective, which rank 0 joins when they have logged."""
    heard = Path(folder, "heard")
    with listening_closely(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(store_board, "WRITE_LATER_S", 0.1)
        told = logged(patch, outside._log, "error", heard)
        engine = make_engine(stage, TIMEOUT_S)
        train(engine, 0, 1)
        if engine.rank == 0:
            told.append(said_by(lambda: CALLS[call](engine, folder)))
            wait_for(heard.exists)
        COLLECTIVES[collective]()
        said_by(engine.close)
    return told[0] if told else ""


def wait_for(there: Callable[[], bool]) -> None:
    deadline = time.monotonic() + HANG_S / 10
    while not there() and time.monotonic() < deadline:
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("stage", "call", "collective", "cure"),
    [
        ("3", "evaluation", "barrier", EVALUATE),
        ("3", "evaluation", "all_gather_object", EVALUATE),
        ("3", "a batch more", "all_reduce", SAME),
        ("2", "a batch more", "barrier", SAME),
        ("2", "save_checkpoint", "barrier", "save_checkpoint on all of them, or on none"),
    ],
)
def test_a_call_of_one_rank_ends_where_the_others_are_in_a_collective_of_the_program(
    pools: Pools, tmp_path: Path, stage: str, call: str, collective: str, cure: str
) -> None:
    zero, one = pools(2).run(act_alone, stage, call, collective, str(tmp_path))
    assert zero.startswith("MismatchError: ranks wait for each other: rank 0 stands in "), zero
    assert f"rank 1 stands in torch.distributed.{collective}() (a collective of the program, begun at comm/" in zero
    assert cure in zero
    assert one.startswith(f"rank 1 stands in torch.distributed.{collective}() ("), one
    assert "which may never end: rank 0 gave up: ranks wait for each other" in one


def come_late() -> list[float]:
    """The program's collectives of one rank are slow, and all of them come."""
    with listening_closely(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(store_board, "WRITE_LATER_S", 0.05)
        engine = make_engine("3", TIMEOUT_S)
        losses = []
        for step in range(2):
            if engine.rank == step:
                time.sleep(1.0)
            dist.barrier()
            if engine.rank != step:
                time.sleep(1.0)
            losses += train(engine, step, step + 1)
        engine.close()
    return losses


def test_a_rank_that_is_late_in_a_collective_of_the_program_is_no_alarm(pools: Pools) -> None:
    assert len(pools(2).run(come_late)[0]) == 2


def look_at_each(numbers: tuple[int, ...]) -> list[str]:
    """What another thread sees of rank 1, which is in one function after the other; rank 0 lets it go on. numbers: the
    ranks of the mesh in the default group."""
    seen: list[str] = []
    rank = dist.get_rank()
    place = numbers.index(rank) if rank in numbers else rank
    here = Outside("outside/0", Mesh(place, 2, torch.device("cpu"), backend="gloo", global_ranks=numbers), 0, {})
    mine = dist.new_group([0, 1])
    calls: list[Callable[[], Any]] = [
        lambda: dist.barrier(group=mine),
        lambda: dist.broadcast(torch.zeros(1), 0, group=mine),
        lambda: dist.recv(torch.zeros(1), 0) if rank else dist.send(torch.zeros(1), 1),
        lambda: time.sleep(0.3),
    ]
    for call in calls:
        over = threading.Event()
        if rank == 0:
            time.sleep(0.6)
            call()
            continue

        def look(over: threading.Event = over) -> None:
            found = None
            for _ in range(4):
                if not over.wait(0.1):
                    found = here.look() or found
            here.look()
            seen.append("" if found is None else f"{found.where} {found.members} {found.needs(0, {})}")

        watching = threading.Thread(target=look)
        watching.start()
        call()
        over.set()
        watching.join()
    return seen


def test_what_is_seen_of_a_rank_is_its_collective_and_its_group(pools: Pools) -> None:
    _, one = pools(2).run(look_at_each, ())
    barrier, broadcast, receive, sleep = one
    assert barrier == "torch.distributed.barrier() [0, 1] True"
    assert broadcast == "torch.distributed.broadcast() [0, 1] False", "only of its source, which may be another rank"
    assert receive == "torch.distributed.recv() [0, 1] False"
    assert sleep == ""


def test_ranks_have_the_numbers_that_they_have_in_the_mesh(pools: Pools) -> None:
    _, one = pools(2).run(look_at_each, (1, 3))
    assert one == ["", "", "", ""], "rank 0 of the default group is not in the mesh, so nobody in it is waited for"
    _, one = pools(2).run(look_at_each, (1, 0))
    assert one[0] == "torch.distributed.barrier() [0, 1] True"


def test_collectives_of_a_group_of_torch_are_counted(pools: Pools) -> None:
    assert pools(2).run(count) == [[0, 1, 2], [0, 1, 2]]


def count() -> list[int]:
    group = dist.new_group([0, 1])
    found = []
    for _ in range(3):
        found.append(outside.counts()[f"torch's group {group.group_name}"])
        dist.barrier(group=group)
    return found
