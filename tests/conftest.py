"""Fixtures: rank pools, one per world size and test session."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from tests.ranks import RankPool

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def pools() -> Iterator[Callable[[int], RankPool]]:
    """``pools(n)``: n rank processes, started when first asked for."""
    started: dict[int, RankPool] = {}

    def pool(ranks: int) -> RankPool:
        return started.setdefault(ranks, RankPool(ranks))

    yield pool
    for running in started.values():
        running.stop()
