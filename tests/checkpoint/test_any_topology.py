"""A checkpoint loads at any number of ranks, stage and precision, with the same bits everywhere.

``topology.Everything`` has something of everything. Stages give the same bits, so what is saved with one number of
ranks and one precision is one state, whatever the stage, and one load may be compared with any of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import cases, topology
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]
STAGES = list(cases.STAGES)
RANKS = (1, 2, 3, 4)


def saves(folder: str, low: bool) -> list[dict[str, Any]]:
    """A checkpoint of each stage; what each engine held."""
    found = []
    for stage in STAGES:
        engine = topology.make(stage, low)
        topology.train(engine, 2)
        engine.save_checkpoint(folder, f"{engine.world_size}-{stage}", {"stage": stage})
        found.append(topology.snapshot(engine))
        engine.close()
    return found


def loads(folder: str, low: bool, stage: str, tags: list[str]) -> list[dict[str, Any]]:
    """One engine, of another seed and with other buckets, loads one after the other and trains in between."""
    engine = topology.make(stage, low, seed=5, zero={"reduce_bucket_size": 500})
    found = []
    for tag in tags:
        assert engine.load_checkpoint(folder, tag).client_state == {"stage": tag.partition("-")[2]}
        found.append(topology.snapshot(engine))
        topology.train(engine, 1)
    engine.close()
    return found


@pytest.mark.parametrize("low", [False, True], ids=["fp32", "bf16"])
def test_the_state_is_the_same_at_every_topology(pools: Pools, tmp_path: Path, low: bool) -> None:
    """Every pair of numbers of ranks, and every pair of stages, of 20 checkpoints in each precision: 80 loads."""
    before = {ranks: pools(ranks).run(saves, str(tmp_path), low) for ranks in RANKS}
    for results in before.values():
        for number in range(1, len(STAGES)):
            seen = results[0][number]["whole"]  # the others have statistics of their own since the last forward
            again = [{**rows[number], "whole": seen} for rows in results]
            topology.assert_same(again, [rows[0] for rows in results], number)
    pairs = set()
    for target, (number, stage) in itertools.product(RANKS, enumerate(STAGES)):
        sources = [(ranks, STAGES[(number + 4 * target + ranks) % len(STAGES)]) for ranks in RANKS]
        pairs |= {(source, stage) for _, source in sources}
        after = pools(target).run(loads, str(tmp_path), low, stage, [f"{ranks}-{source}" for ranks, source in sources])
        for position, (ranks, source) in enumerate(sources):
            expected = [rows[0] for rows in before[ranks]]
            topology.assert_same([rows[position] for rows in after], expected, (ranks, source, target, stage))
    assert len(pairs) == len(STAGES) ** 2
