"""The fixtures of the engine's tests: rank pools, the process that forks lives; and ranks of benchmarks as such."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.conftest import forks, pools
from tests.support.forks import Forks

__all__ = ["forked_ranks", "forks", "pools"]


@pytest.fixture
def forked_ranks(forks: Forks, monkeypatch: pytest.MonkeyPatch) -> None:
    """A benchmark's ranks are forked; ``test_step_measures_peak_memory_per_variant`` starts them as users do."""

    def spawn(main: Callable[..., None], args: tuple[Any, ...], nprocs: int) -> None:
        said = forks.live(_rank, main, args, ranks=nprocs)
        assert said == [["done"]] * nprocs

    monkeypatch.setattr("benchmarks.ranks.spawn", spawn)


def _rank(say: Callable[[Any], None], rank: int, main: Callable[..., None], args: tuple[Any, ...]) -> None:
    main(rank, *args)
    say("done")
