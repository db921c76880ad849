"""A checkpoint that is saved in the middle of a step has the steps that are complete, and disturbs nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardengine.checkpoint import index
from tests.support import cases
from tests.support.comparing import assert_equal_to_truth
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]
MICROS, STEPS = 3, 3
CPU: dict[str, Any] = {"device": "cpu"}


def config_of(stage: str, tier: str, folder: str, *, behind: bool) -> dict[str, Any]:
    disk = {"device": "nvme", "nvme_path": folder}
    zero: dict[str, Any] = {"": {}, "cpu": {"offload_optimizer": CPU}, "nvme": {"offload_optimizer": disk}}[tier]
    return cases.config_of(stage, MICROS, zero={"reduce_bucket_size": 600, **zero}, checkpoint={"async_save": behind})


def engine_of(config: dict[str, Any]) -> Any:
    return cases.make_engine(cases.make_mlp(), config, "AdamW")


def trained(stage: str, tier: str, folder: str, behind: bool) -> dict[str, Any]:
    """Saves after each micro-batch: before step() has counted it, too. What each checkpoint should have."""
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("shardengine").addHandler(handler)
    config = config_of(stage, tier, folder, behind=behind)
    engine = engine_of(config)
    after: list[str] = [cases.digest([cases.local_state(engine)])]

    def run_micro_batch(engine: Any, loss_of: cases.LossOf, step: int, micro: int) -> float:
        loss = loss_of(engine, step, engine.rank, micro)
        engine.backward(loss)
        engine.save_checkpoint(f"{folder}/saved", f"backward-{step}-{micro}")
        engine.step()
        if micro + 1 < MICROS:
            engine.save_checkpoint(f"{folder}/saved", f"counted-{step}-{micro}")
        else:
            after.append(cases.digest([cases.local_state(engine)]))
        return float(loss.item())

    result = cases.run_steps(engine, STEPS, run=run_micro_batch)
    engine.wait_for_checkpoint()
    for step in range(STEPS):
        for name in [f"backward-{step}-{micro}" for micro in range(MICROS)] + [f"counted-{step}-0"]:
            found = engine.load_checkpoint(f"{folder}/saved", name)
            assert (found.global_steps, found.micro_steps) == (step, step * MICROS), name
            assert cases.digest([cases.local_state(engine)]) == after[step], name
    engine.close()
    logging.getLogger("shardengine").removeHandler(handler)
    told = [line for line in heard if "in the middle of a step" in line]
    assert len(told) == (STEPS * (2 * MICROS - 1) if engine.rank == 0 else 0)
    return result


@pytest.mark.parametrize(
    ("stage", "ranks", "tier", "behind"),
    [("0", 1, "", False), ("1", 2, "cpu", True), ("2", 2, "", True), ("2", 1, "nvme", False), ("3", 2, "", False),
     ("3", 2, "cpu", False), ("3k", 3, "nvme", True)],
)  # fmt: skip
def test_it_has_the_last_step_and_changes_no_bit(
    pools: Pools, tmp_path: Path, stage: str, ranks: int, tier: str, behind: bool
) -> None:
    results = pools(ranks).run(trained, stage, tier, str(tmp_path), behind)
    assert_equal_to_truth(results, cases.truth("mlp", "AdamW", ranks, MICROS, cases.LETTER[stage], STEPS))


def test_who_loads_it_begins_the_step_anew(tmp_path: Path) -> None:
    config = config_of("2", "", str(tmp_path), behind=False)
    engine, whole = engine_of(config), engine_of(config)
    for one in (engine, whole):
        cases.run_steps(one, 1)
    engine.backward(cases.loss_of(engine, 1, 0, 0))
    engine.step()
    engine.save_checkpoint(tmp_path, "open")
    assert index.read(tmp_path / "open")["counters"] == {"global_steps": 1, "global_samples": 3, "micro_steps": 3}
    engine.close()
    other = engine_of(config)
    other.load_checkpoint(tmp_path, "open")
    assert other.is_gradient_accumulation_boundary() is False and other.micro_steps == MICROS
    for one in (other, whole):
        for micro in range(MICROS):
            one.backward(cases.loss_of(one, 1, 0, micro))
            one.step()
    assert cases.digest([cases.local_state(other)]) == cases.digest([cases.local_state(whole)])
    other.close()
    whole.close()
