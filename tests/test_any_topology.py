"""A checkpoint loads at any number of ranks, stage and precision, with the same bits everywhere."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import cases
from tests.ranks import RankPool

Pools = Callable[[int], RankPool]


def make(stage: str, low: bool, **zero: Any) -> Any:
    options: dict[str, Any] = {"bf16": {"enabled": True}} if low else {}
    return cases.make_engine(cases.MODELS["gpt2"](), cases.config_of(stage, 1, zero=zero, **options), "AdamW")


def local(engine: Any) -> dict[str, Any]:
    return {"state": cases.local_state(engine), "steps": list(engine.optimizer.steps), "counts": engine.global_steps}


def saves(folder: str, stage: str, low: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """(state when saved, whole weights)."""
    engine = make(stage, low)
    for step in range(2):
        engine.backward(cases.loss_of(engine, step, engine.rank, 0))
        engine.step()
    engine.save_checkpoint(folder)
    found = local(engine)
    weights = {name: cases.copy_out(value).float().numpy() for name, value in engine.state_dict().items()}
    engine.close()
    return found, weights


def loads(folder: str, stage: str, low: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    engine = make(stage, low, reduce_bucket_size=1500)
    engine.load_checkpoint(folder)
    found = local(engine)
    weights = {name: cases.copy_out(value).float().numpy() for name, value in engine.state_dict().items()}
    engine.close()
    return found, weights


TARGETS = list(itertools.product((1, 2, 3, 4), cases.STAGES))


@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize(("ranks", "stage"), [(1, "0"), (2, "3"), (3, "1"), (4, "3k"), (3, "2")])
def test_the_state_is_the_same_at_every_topology(
    pools: Pools, tmp_path: Path, ranks: int, stage: str, low: bool
) -> None:
    before = pools(ranks).run(saves, str(tmp_path), stage, low)
    whole = cases.assemble([found["state"] for found, _ in before])
    for target, other in TARGETS if (ranks, stage) == (2, "3") else TARGETS[::3]:
        after = pools(target).run(loads, str(tmp_path), other, low)
        again = cases.assemble([found["state"] for found, _ in after])
        assert whole.keys() == again.keys()
        assert all(flat.tobytes() == again[at].tobytes() for at, flat in whole.items()), (target, other)
        assert after[0][0]["steps"] == before[0][0]["steps"] and after[0][0]["counts"] == 2
        assert all(value.tobytes() == after[0][1][name].tobytes() for name, value in before[0][1].items())
