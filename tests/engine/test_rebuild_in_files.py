"""A new layout of what rests in files: its room, disks that fail on one rank alone, and every bit as without a file."""

from __future__ import annotations

import errno
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from shardengine import Engine
from shardengine.core import rebuild
from shardengine.errors import MismatchError, OffloadError, ShardEngineError
from shardengine.offload import direct_io
from shardengine.offload.nvme.extent_file import ExtentFile
from tests.engine.test_rebuild import assert_same, begin, new_group, one_step, step_both
from tests.offload.test_extent_failures import refusing
from tests.offload.test_failures import full_disk, places
from tests.parity.test_changed_models import group, set_trainable
from tests.support import cases
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]


def in_a_file(stage: str, folder: Path, **options: Any) -> Any:
    return begin(stage, zero=places("all" if stage == "3" else "states", folder), **options)


def unfreeze_one_by_one(engine: Any) -> Iterator[None]:
    """A new layout for each parameter of the frozen blocks."""
    for parameter in engine.module.blocks[0].parameters():
        parameter.requires_grad_(True)
        engine.optimizer.add_param_group(group("AdamW", [parameter]))
        yield
    for parameter in engine.module.blocks[1].parameters():
        parameter.requires_grad_(True)
        yield


@pytest.mark.parametrize(
    "precision", [{}, {"bf16": {"enabled": True}}, {"bf16": {"enabled": True, "master_weights": False}}]
)
@pytest.mark.parametrize("stage", ["0", "2", "3"])
def test_room_is_taken_before_anything_moves_and_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str, precision: dict[str, Any]
) -> None:
    """Just what is needed: two layouts at most lie in the file, however many there were; and every bit moves along."""
    engine, calm = in_a_file(stage, tmp_path, **precision), begin(stage, **precision)
    moving, carry_out, reserve = False, rebuild._carry_out, ExtentFile.reserve

    def watched(*args: Any) -> Any:
        nonlocal moving
        moving = True
        found = carry_out(*args)
        moving = False
        return found

    def reserved(file: ExtentFile, count: int) -> None:
        assert not moving, "it was taken too late"
        reserve(file, count)

    def free_reserved(file: ExtentFile) -> None:
        assert not any(file._reserved.values()), "more was taken than is needed"

    monkeypatch.setattr(rebuild, "_carry_out", watched)
    monkeypatch.setattr(ExtentFile, "reserve", reserved)
    monkeypatch.setattr(ExtentFile, "free_reserved", free_reserved)
    (path,) = engine._core.tiers.files
    for number, _ in enumerate(zip(unfreeze_one_by_one(engine), unfreeze_one_by_one(calm), strict=True)):
        step_both(engine, calm, number)
    assert number > 5
    assert path.stat().st_size <= 2.2 * live_bytes(engine)
    assert_same(engine, calm)


def live_bytes(engine: Any) -> int:
    """Bytes of the pages that stores lie in."""
    stores = [store for unit in engine._core.units for store in unit.stores()]
    parts = [part for store in stores for part in getattr(store, "_parts", [])]
    return sum(-(-part.extent.count // 4096) * 4096 for part in parts)


def own_groups(stage: str, folder: Path) -> Any:
    """As ``in_a_file``, with process groups of its own, which a failure may ruin."""
    model: Any = cases.make_mlp()
    frozen = set_trainable(model.blocks[0], False)
    chosen = [p for p in model.parameters() if all(p is not other for other in frozen)]
    zero = places("all" if stage == "3" else "states", folder)
    config = cases.config_of(stage, zero=zero, timeout_s=30.0)
    return Engine(model, config, torch.optim.AdamW([group("AdamW", chosen)]))


def without_room(stage: str, folder: Path, full: bool) -> Any:
    """Rank 1's disk is full; what everybody holds after one step more."""
    engine = own_groups(stage, folder)
    one_step(engine, 0)
    if full:
        new = new_group(engine)
        before = dict(new)
        with pytest.MonkeyPatch.context() as patch:
            if engine.rank == 1:
                patch.setattr(direct_io, "fallocate", refusing(errno.ENOSPC))
            with pytest.raises(OffloadError if engine.rank else MismatchError, match=r"rank 1: taking room for"):
                engine.optimizer.add_param_group(new)
        assert len(engine.optimizer.param_groups) == 1 and new == before
        set_trainable(engine.module.blocks[0], False)
    one_step(engine, 1)
    found = cases.local_state(engine)
    engine.close()
    return found


@pytest.mark.parametrize("stage", ["1", "3"])
def test_a_disk_without_room_changes_nothing(pools: Pools, tmp_path: Path, stage: str) -> None:
    found, calm = (pools(2).run(without_room, stage, tmp_path, full) for full in (True, False))
    assert cases.digest(found) == cases.digest(calm)


def break_while_moving(stage: str, folder: Path) -> str:
    """Rank 1's disk fails when the new layout is filled; what is said."""
    engine = own_groups(stage, folder)
    one_step(engine, 0)
    with full_disk(math.inf if engine.rank == 1 else 0), pytest.raises(ShardEngineError) as raised:
        engine.optimizer.add_param_group(new_group(engine))
    engine._core.tiers.close()
    engine._core.mesh.destroy(orderly=False)
    return f"{type(raised.value).__name__}: {raised.value}"


@pytest.mark.parametrize("stage", ["1", "3"])
def test_a_disk_that_fails_while_it_moves_is_told(pools: Pools, tmp_path: Path, stage: str) -> None:
    waiting, failing = pools(2).run(break_while_moving, stage, tmp_path)
    assert failing.startswith("OffloadError: rank 1: writing")
    assert "rank 1 raised: OffloadError: rank 1: writing" in waiting and "add_param_group" in waiting
