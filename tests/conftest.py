"""Fixtures of a test session: rank pools, one per world size; the process that forks lives."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import settings

from tests.support.forks import Forks
from tests.support.ranks import RankPool

torch.set_num_threads(1)
settings.register_profile("any machine", deadline=None)  # a busy machine is no failure
settings.load_profile("any machine")


@pytest.fixture(scope="session")
def pools() -> Iterator[Callable[[int], RankPool]]:
    """``pools(n)``: n rank processes, started when first asked for."""
    started: dict[int, RankPool] = {}

    def pool(ranks: int) -> RankPool:
        return started.setdefault(ranks, RankPool(ranks))

    yield pool
    for running in started.values():
        running.stop()


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    """Started when first asked for."""
    forks = Forks()
    yield forks
    forks.end()
