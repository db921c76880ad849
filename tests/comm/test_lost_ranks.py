"""Killed ranks: who is missing, what waits for it, and how soon that is said; also where the store goes with it."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from shardengine.errors import CommunicationError
from tests.engine.test_recovery import make_engine, train_through
from tests.support import HANG_S, cases
from tests.support.ranks import RankFailure, RankPool

TIMEOUT_S = 4.0
SLACK_S = 120.0
"""Asking a store that does not answer, and a busy machine."""


def rejoin(folder: str) -> None:
    """From the pool's process group into one whose rank 0 hosts the store. It is the last process of the pool."""
    rank, ranks = dist.get_world_size() - 1 - dist.get_rank(), dist.get_world_size()
    dist.barrier()
    dist.destroy_process_group()
    place = Path(folder, "port")
    if rank == 0:
        store = TCPStore("127.0.0.1", 0, ranks, is_master=True, wait_for_workers=False)
        place.with_suffix(".new").write_text(str(store.port))
        place.with_suffix(".new").rename(place)
    else:
        deadline = time.monotonic() + HANG_S
        while not place.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        store = TCPStore("127.0.0.1", int(place.read_text()), ranks, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)


def lose_a_rank(stage: str, host: bool, folder: str) -> None:
    """host: the rank that is killed hosts the store. What the others said goes into files."""
    if host:
        rejoin(folder)
    engine = make_engine(stage, TIMEOUT_S)
    lost = 0 if host else engine.world_size - 1
    began: list[float] = []

    def go_wrong(engine: Any) -> None:
        began.append(time.monotonic())
        if engine.rank == lost:
            os.kill(os.getpid(), signal.SIGKILL)

    def recover(engine: Any, error: Exception) -> None:
        said = [str(error), time.monotonic() - began[0]]
        started = time.monotonic()
        try:
            engine.reset()
        except CommunicationError as second:
            said += [str(second), time.monotonic() - started]
        Path(folder, str(engine.rank)).write_text(json.dumps(said))
        raise error

    train_through(engine, go_wrong, recover)


@pytest.mark.core
@pytest.mark.parametrize(("stage", "ranks", "host"), [("2", 3, False), ("3", 3, True), ("3 hybrid", 4, False)])
def test_a_killed_rank_is_named_by_the_error_and_by_reset(tmp_path: Path, stage: str, ranks: int, host: bool) -> None:
    with pytest.raises(RankFailure):
        RankPool(ranks).run(lose_a_rank, stage, host, str(tmp_path))
    parameters = dict(cases.make_mlp().named_parameters()).keys()
    for rank in range(1, ranks) if host else range(ranks - 1):
        first, seconds, second, reset_seconds = json.loads((tmp_path / str(rank)).read_text())
        collective = r"(all-gather|reduce-scatter)(?: inside| across)? number \d+"
        waited = re.match(rf"{collective} on rank {rank} for bucket \d+ \(([^)]+)\) ", first)
        assert waited, first
        assert set(re.sub(r" and \d+ more", "", waited[2]).split(", ")) <= parameters, first
        assert second.startswith(f"engine.reset() on rank {rank}: expected every rank"), second
        for text in (first, second):
            if host:
                assert "Missing: rank 0 cannot be reached" in text and "it hosts the process group's" in text, text
                assert f"nothing is known of ranks [{3 - rank}]" in text, text
            else:
                assert re.search(rf"Missing: (rank \d waits for .*)?rank {ranks - 1} says nothing", text), text
        assert seconds < TIMEOUT_S + SLACK_S and reset_seconds < TIMEOUT_S + SLACK_S
