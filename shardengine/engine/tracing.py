"""``engine.trace()``: writes the events of all ranks to one file. Must not know: the meaning of the events."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shardengine import trace
from shardengine.comm import Collectives, compare, run_on_all_ranks


@contextmanager
def traced(collectives: Collectives, path: str | Path) -> Iterator[None]:
    """Record the events inside the ``with`` on all ranks to one file; collective. See ``Engine.trace``."""
    compare(collectives, {"call": ["trace"]})
    collectives.trace.begin()
    try:
        yield
    except BaseException:
        collectives.trace.drop()
        raise
    mine = collectives.trace.end()
    ranks = collectives.exchange_objects(mine, "what engine.trace() has recorded")

    def write() -> None:
        trace.write(Path(path), ranks)

    run_on_all_ranks(collectives, f"writing {path}", write if collectives.mesh.rank == 0 else lambda: None)
