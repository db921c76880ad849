"""Communication runs while a rank computes, shown by order instead of time.

Rank 1 holds back one of its collectives until rank 0 says that it has gone on. Rank 0 can say so only if it does not
stand still for that collective, which cannot end before. With ``"overlap_comm": false`` it does stand still.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from shardengine.comm import Wire
from shardengine.stages import Placement
from tests.support import HANG_S, cases
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]
PATIENCE_S = HANG_S / 2
"""For what should come."""
SHORT_S = 0.2
"""For what cannot come, so that no wait is too short."""


class Signal:
    """A file with which rank 0 says that it has gone on. ``came``: whether rank 1 saw it in time, per wait."""

    def __init__(self, folder: str, patience_s: float) -> None:
        self._folder = Path(folder)
        self._patience_s = patience_s
        self.came: list[bool] = []

    def give(self, name: str = "gone on") -> None:
        (self._folder / name).touch()

    def wait(self, name: str = "gone on") -> None:
        deadline = time.monotonic() + self._patience_s
        while not (there := (self._folder / name).exists()) and time.monotonic() < deadline:
            time.sleep(0.002)
        self.came.append(there)


def engine_after_a_step(stage: str, **options: Any) -> Any:
    """Orders of launches and gathers are known after the first step. One unit is gathered ahead."""
    config = cases.config_of(stage, zero={"reduce_bucket_size": 600, "stage3_prefetch_bucket_size": 1}, **options)
    engine = cases.make_engine(cases.make_mlp(), config, "SGD")
    cases.run_micro_batch(engine, cases.loss_of, 0, 0)
    return engine


def on_gradient(module: nn.Module, call: Callable[[], None]) -> None:
    """Call ``call`` when a gradient reaches the output of ``module``."""

    def listen(_module: nn.Module, _args: Any, output: Tensor) -> None:
        output.register_hook(lambda _gradient: call())

    module.register_forward_hook(listen)


def reduce_late(folder: str, patience_s: float, stage: str, options: dict[str, Any]) -> list[bool]:
    """Rank 1 sends no gradient until rank 0, which has begun to, computes the next one."""
    engine, signal = engine_after_a_step(stage, **options), Signal(folder, patience_s)
    plain, begun = Wire.all_to_all, False

    def reduce(*args: Any, **kwargs: Any) -> Any:
        nonlocal begun
        if engine.rank == 1 and not begun:
            signal.wait()
        begun = True
        return plain(*args, **kwargs)

    def go_on() -> None:
        if engine.rank == 0 and begun:
            signal.give()

    for module in engine.module.modules():
        if isinstance(module, nn.Linear):
            on_gradient(module, go_on)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Wire, "all_to_all", reduce)
        cases.run_micro_batch(engine, cases.loss_of, 1, 0)
    engine.close()
    return signal.came


def gather_late(folder: str, patience_s: float, stage: str, options: dict[str, Any]) -> list[bool]:
    """Rank 1 does not gather block 1 until rank 0, which has begun to, has run the block before: 0, in backward 2."""
    engine, signal = engine_after_a_step(stage, **options), Signal(folder, patience_s)
    unit, blocks = engine._core.units[2], engine.module.blocks
    plain, gathers = unit.unshard, 0

    def gather(*args: Any) -> None:
        nonlocal gathers
        gathers += 1
        if engine.rank == 1:
            signal.wait(f"gone on {gathers}")
        plain(*args)

    def go_on(number: int) -> None:
        if engine.rank == 0 and gathers >= number:
            signal.give(f"gone on {number}")

    blocks[0].register_forward_hook(lambda *_: go_on(1))
    on_gradient(blocks[2][0], lambda: go_on(2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unit, "unshard", gather)
        cases.run_micro_batch(engine, cases.loss_of, 1, 0)
    engine.close()
    return signal.came


def publish_late(folder: str, patience_s: float, stage: str, options: dict[str, Any]) -> list[bool]:
    """Rank 1 sends no stepped weights until rank 0 has stepped all, or is out of ``step`` (overlap_param_gather)."""
    engine, signal = engine_after_a_step(stage, **options), Signal(folder, patience_s)
    collectives, optimizer = engine._core.collectives, engine.optimizer
    plain_move, plain_step = collectives.move, optimizer.step_buckets

    def gather(full: Tensor, source: Placement, *rest: Any) -> Any:
        if engine.rank == 1 and source is Placement.SHARDED and not signal.came:
            signal.wait()
        return plain_move(full, source, *rest)

    def step_all() -> Any:
        yield from plain_step()
        if engine.rank == 0 and not options.get("overlap_param_gather"):
            signal.give()

    engine.backward(cases.loss_of(engine, 1, engine.rank, 0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "move", gather)
        patch.setattr(optimizer, "step_buckets", step_all)
        engine.step()
    if engine.rank == 0:
        signal.give()
    engine.close()
    return signal.came


def rank_1_saw(pools: Pools, folder: Path, late: Callable[..., Any], stage: str, **options: Any) -> list[bool]:
    folder.mkdir()
    patience_s = PATIENCE_S if options.get("overlap_comm", True) else SHORT_S
    found: list[bool] = pools(2).run(late, str(folder), patience_s, stage, options)[1]
    return found


@pytest.mark.parametrize("stage", list(cases.STAGES))
def test_backward_goes_on_while_gradients_are_reduced(pools: Pools, tmp_path: Path, stage: str) -> None:
    assert rank_1_saw(pools, tmp_path / "on", reduce_late, stage) == [True]
    assert rank_1_saw(pools, tmp_path / "off", reduce_late, stage, overlap_comm=False) == [False]


@pytest.mark.parametrize(("stage", "gathers"), [("3k", 1), ("3", 2)])
def test_a_block_runs_while_the_next_one_is_gathered(pools: Pools, tmp_path: Path, stage: str, gathers: int) -> None:
    assert rank_1_saw(pools, tmp_path / "on", gather_late, stage) == [True] * gathers
    assert rank_1_saw(pools, tmp_path / "off", gather_late, stage, overlap_comm=False) == [False] * gathers


@pytest.mark.parametrize("beyond_step", [False, True], ids=["within step", "overlap_param_gather"])
@pytest.mark.parametrize("stage", ["1", "2"])
def test_the_step_goes_on_while_weights_are_published(
    pools: Pools, tmp_path: Path, stage: str, beyond_step: bool
) -> None:
    options = {"overlap_param_gather": beyond_step}
    assert rank_1_saw(pools, tmp_path / "on", publish_late, stage, **options) == [True]
    assert rank_1_saw(pools, tmp_path / "off", publish_late, stage, **options, overlap_comm=False) == [False]
