"""Weights begin with rank 0's values: on other ranks a model may be on the meta device, and its values are not read.

Owns: equality with ranks that all have values, memory on those that have none, what is refused.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardengine
from shardengine.errors import MismatchError
from tests.support import cases
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]
WIDTH = 16


class Marked(nn.Parameter):
    """A parameter of a class of its own."""


class Net(nn.Module):
    """Tied and frozen weights, another memory order, buffers that no checkpoint holds or that two modules share."""

    shift: Tensor
    kept: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 8, bias=False)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)) for _ in range(2))
        self.tied = nn.Linear(WIDTH, 8, bias=False)
        self.tied.weight = self.down.weight
        self.frozen = nn.Parameter(torch.randn(WIDTH), requires_grad=False)
        self.marked = Marked(torch.randn(WIDTH))
        self.marked.word = "kept"  # type: ignore[attr-defined]
        self.convolution = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        shift = torch.randn(WIDTH)
        self.shift: Tensor
        self.kept: Tensor
        self.register_buffer("shift", shift, persistent=False)
        self.register_buffer("again", shift)
        self.up.register_buffer("same", shift)
        self.register_buffer("kept", torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x) * self.frozen * self.marked
        for block in self.blocks:
            hidden = torch.relu(block(hidden))
        hidden = (hidden + self.shift + self.up.get_buffer("same") * self.kept).to(x.dtype)
        return self.down(hidden) + self.tied(hidden) + self.convolution.weight.sum()


def make(without_values: bool) -> Net:
    torch.manual_seed(7)
    if without_values:
        with torch.device("meta"):
            return Net()
    return Net()


def train(stage: str, options: dict[str, Any], elsewhere: str) -> dict[str, Any]:
    """Losses and last state dict. elsewhere: what the ranks other than 0 begin with."""
    mesh = cases.mesh_of_this_process()
    model = make(elsewhere == "meta" and mesh.rank > 0)
    if elsewhere == "nan" and mesh.rank > 0:
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.data.fill_(torch.nan)
    parameters = [id(parameter) for parameter in model.parameters()]
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    engine = shardengine.initialize(model, cases.config_of(stage, **options), optimizer=optimizer, mesh=mesh)
    losses = []
    for step in range(3):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + mesh.rank))
        loss = engine(x.bfloat16() if "bf16" in options else x).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    state = {name: value.clone() for name, value in engine.state_dict().items()}
    engine.close()
    assert parameters == [id(parameter) for parameter in model.parameters()]
    assert model.down.weight is model.tied.weight and model.shift is model.up.same
    assert model.again is model.shift
    assert type(model.marked) is Marked and vars(model.marked) == {"word": "kept"}
    assert model.convolution.weight.is_contiguous(memory_format=torch.channels_last)
    return {"losses": losses, **state}


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("options", [{}, {"bf16": {"enabled": True}}], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", ["0", "1", "2", "3"])
def test_what_other_ranks_begin_with_changes_nothing(
    pools: Pools, stage: str, options: dict[str, Any], ranks: int
) -> None:
    expected = pools(ranks).run(train, stage, options, "the same")
    for elsewhere in ("meta", "nan"):
        for got, want in zip(pools(ranks).run(train, stage, options, elsewhere), expected, strict=True):
            assert got.keys() == want.keys() and got["losses"] == want["losses"]
            for name in want.keys() - {"losses"}:
                assert torch.equal(got[name], want[name]), name


def meta_on_rank_0(what: str) -> str:
    mesh = cases.mesh_of_this_process()
    model = make(mesh.rank == 0 and what == "parameters")
    if mesh.rank == 0 and what == "buffers":
        model.shift = model.shift.to("meta")
    with pytest.raises(RuntimeError) as raised:
        shardengine.initialize(model, cases.config_of("3"), mesh=mesh)
    return str(raised.value)


@pytest.mark.parametrize("what", ["parameters", "buffers"])
def test_rank_0_must_have_values(pools: Pools, what: str) -> None:
    said = pools(2).run(meta_on_rank_0, what)
    for text in said:
        assert "is on the meta device" in text and "on rank 0" in text


def in_other_order(stage: str, frozen: bool) -> str:
    mesh = cases.mesh_of_this_process()
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 3))
    if mesh.rank == 0:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model[0].requires_grad_(not frozen)
    with pytest.raises(MismatchError) as raised:
        shardengine.initialize(model, cases.config_of(stage), mesh=mesh)
    return str(raised.value)


@pytest.mark.parametrize(("stage", "frozen"), [("1", True), ("3", False)])
def test_weights_lie_in_the_same_order_on_every_rank(pools: Pools, stage: str, frozen: bool) -> None:
    for text in pools(2).run(in_other_order, stage, frozen):
        assert "0.weight: shape (4, 3, 3, 3)" in text and "dimensions in memory (0, 2, 3, 1)" in text


def resident(without_values: bool) -> int:
    """MiB of memory that come with a model of 64 MiB and its engine at stage 3, on this rank."""
    mesh = cases.mesh_of_this_process()
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # else what a test before has used is used again, and not counted
    before = _anonymous()
    with torch.device("meta" if without_values and mesh.rank else "cpu"):
        model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(16)))
    if without_values and not mesh.rank:
        for parameter in model.parameters():
            parameter.data.normal_()
    peak = _anonymous() - before
    zero = {"units": ["Linear"], "reduce_bucket_size": 1 << 20}
    engine = shardengine.initialize(
        model, cases.config_of("3", zero=zero), optimizer=torch.optim.SGD(model.parameters(), 0.1), mesh=mesh
    )
    peak = max(peak, _anonymous() - before)
    engine.close(restore=False)
    return peak >> 20


def _anonymous() -> int:
    with open("/proc/self/smaps_rollup", encoding="ascii") as file:
        return sum(1024 * int(line.split()[1]) for line in file if line.startswith("Anonymous"))


def test_a_rank_without_values_never_has_the_whole_model(pools: Pools) -> None:
    """A half of 64 MiB, one unit of 4 and what is on its way; with values it has all of it first."""
    assert pools(2).run(resident, True)[1] <= 32 + 16
    assert pools(2).run(resident, False)[1] > 32 + 16
