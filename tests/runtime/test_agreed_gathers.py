"""Ranks that run different modules at stage 3, as where the batch of one has no images: a sentence on every rank.

gloo would end the process, as the units have different sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardengine
from shardengine.comm.mesh import await_all
from shardengine.errors import MismatchError
from tests.comm.test_uneven_data import listening_closely
from tests.support import HANG_S, cases
from tests.support.forks import Forks
from tests.support.program_runs import free_port, join

Pools = Callable[[int], Any]
STEPS = 5


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, width), nn.Linear(width, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Sees(nn.Module):
    """Blocks of a tower, where there is an image, and blocks of another size."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.ModuleList(Block(12) for _ in range(2))
        self.text = nn.ModuleList(Block(24) for _ in range(3))
        self.out = nn.Linear(8, 1)

    def forward(self, x: Tensor, image: bool) -> Tensor:
        for block in (*(self.tower if image else ()), *self.text):
            x = block(x)
        return self.out(x)


def engine_of(stage: str, *, frozen: bool = False, **options: Any) -> Any:
    torch.manual_seed(5)
    model = Sees()
    if frozen:
        model.tower.requires_grad_(False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    return shardengine.initialize(model, cases.config_of(stage, timeout_s=60.0, **options), optimizer=optimizer)


def train(engine: Any, has_image: Callable[[int], bool], *, grad: bool = True) -> list[int]:
    """Of each step how often ranks exchanged something beside their data."""
    asked = []
    for step in range(STEPS):
        before = engine._core.collectives.failures.issued["control"]
        torch.manual_seed(step * 10 + engine.rank)
        if not grad:
            with torch.no_grad():
                engine(torch.randn(3, 8), has_image(step))
        engine.backward(engine(torch.randn(3, 8), has_image(step) if grad else True).square().mean())
        engine.step()
        asked.append(engine._core.collectives.failures.issued["control"] - before)
    return asked


def apart(say: Any, rank: int, ranks: int, port: int, way: str, agreed: int, grad: bool) -> None:
    """After ``agreed`` steps in which all ranks have an image in turns, the last rank alone has none."""
    join(rank, ranks, port)
    stage, zero = MESHES.get(way, (way, {}))
    with listening_closely():
        engine = engine_of(stage, zero=zero)
        try:
            with engine.join() if way == "join" else nullcontext():
                train(engine, lambda step: step % 2 == 0 if step < agreed else rank < ranks - 1, grad=grad)
        except MismatchError as error:
            say(str(error))
        await_all(dist.distributed_c10d._get_default_store(), rank, ranks, HANG_S)


MESHES: dict[str, tuple[str, dict[str, Any]]] = {
    "join": ("3", {}),
    "shard groups": ("3", {"shard_group_size": 2}),
    "hpZ": ("3", {"zero_hpz_partition_size": 2}),
}


@pytest.mark.parametrize(
    ("way", "ranks", "agreed", "grad"),
    [
        *(("3", 2, 0, True), ("3k", 3, 0, True), ("3", 3, 4, True)),
        *(("3k", 2, 4, True), ("3", 2, 0, False), ("3", 2, 4, False)),
        *(("join", 2, 0, True), ("join", 3, 4, True)),
        *((way, 4, agreed, True) for way in ("shard groups", "hpZ") for agreed in (0, 4)),
    ],
)
def test_every_rank_says_it(forks: Forks, way: str, ranks: int, agreed: int, grad: bool) -> None:
    said = forks.live(apart, ranks, free_port(), way, agreed, grad, ranks=ranks)
    for words in said:
        (text,) = words
        assert "tower.0" in text
        assert 'ignored_parameters": ["vision.*"]' in text or (not grad and "evaluate the same number" in text)


def in_turns(stage: str) -> tuple[list[int], list[int]]:
    """Exchanges of steps that are alike, and of steps in two forms that alternate on all ranks."""
    found = []
    for has_image in (lambda step: True, lambda step: step % 2 == 0):
        engine = engine_of(stage)
        found.append(train(engine, has_image))
        engine.close()
    return found[0], found[1]


@pytest.mark.parametrize(("stage", "ranks"), [("3", 2), ("3k", 2), ("3", 3)])
def test_a_step_that_was_made_before_asks_nothing(pools: Pools, stage: str, ranks: int) -> None:
    for alike, turns in pools(ranks).run(in_turns, stage):
        assert alike[0] > alike[2] == alike[3] == alike[4] == 1, "the step's own message alone"
        assert max(turns[2:]) < alike[0]


def ignored(stage: str) -> list[list[Any]]:
    """What the advice is good for: the tower stays whole, and ranks differ in whether they run it."""
    engine = engine_of(stage, frozen=True, ignored_parameters=["tower.*"])
    train(engine, lambda step: (step + engine.rank) % 2 == 0)
    weights = {name: cases.copy_out(value).numpy() for name, value in engine.state_dict().items()}
    engine.close()
    return [weights[name].tolist() for name in sorted(weights)]


def test_ignored_parameters_may_be_run_on_some_ranks(pools: Pools) -> None:
    assert pools(2).run(ignored, "3")[0] == pools(2).run(ignored, "2")[0]
