"""What lives between forward and backward with activation checkpointing, counted by walking all live tensors.

On the device one input per block, and in backward besides what the backward of one block needs; with cpu_offload no
input between forward and backward, and in backward two: of the block at work, and of the one before it.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.runtime.test_activation_checkpointing import engine_of, pool_of
from tests.stages.test_memory import live_storages, only_new_tensors

ROWS, WIDTH, DEPTH = 64, 32, 6
INPUT = ROWS * WIDTH * 4
INSIDE = 4
"""What the backward of one block needs, in sizes of its input: the input and three results."""
PASSING = 2
"""Gradients on their way through a block, likewise."""


class Fat(nn.Module):
    """Needs its input and the results of cos, sigmoid and tanh for backward."""

    def __init__(self, watch: Callable[[Tensor], None]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.watch = watch

    def forward(self, x: Tensor) -> Tensor:
        y = torch.sigmoid(torch.sin(torch.cos(x)))
        y.register_hook(self.watch)
        return torch.tanh(y) * self.scale


class FatModel(nn.Module):
    """``peak``: the most bytes of activations that were alive inside of the backward of a block."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self.blocks = nn.ModuleList(Fat(self.watch) for _ in range(DEPTH))

    def watch(self, _gradient: Tensor) -> None:
        self.peak = max(self.peak, activations())

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x * 1)
        return x.sum()


def activations() -> int:
    return sum(size for size in live_storages().values() if size == INPUT)


def measure(way: str, stage: str) -> tuple[int, int, int]:
    """Sizes of an input: on the device between forward and backward, at most in backward, in host buffers."""
    model = FatModel()
    engine = engine_of(way, stage, model)
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    for _ in range(2):
        with only_new_tensors():
            loss = engine(x)
            between = activations()
            engine.backward(loss)
            engine.step()
            del loss
    host = pool_of(engine).allocated_bytes if way == "offloaded" else 0
    engine.close()
    return between // INPUT, model.peak // INPUT, host // INPUT


@pytest.mark.parametrize("stage", ["0", "3"])
def test_memory_is_one_input_per_block_and_one_block_at_work(stage: str) -> None:
    between, peak, host = measure("recomputed", stage)
    assert (between, host) == (DEPTH, 0)
    assert DEPTH + INSIDE - 1 <= peak <= DEPTH + INSIDE - 1 + PASSING
    between, peak, host = measure("offloaded", stage)
    assert (between, host) == (0, DEPTH), "the host buffers of the first step are those of the second"
    assert 1 + INSIDE <= peak <= 1 + INSIDE + PASSING, "the block at work, and the input of the one before it"
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        kept[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = FatModel()(torch.randn(ROWS, WIDTH, requires_grad=True))
    assert loss.requires_grad and list(kept.values()).count(INPUT) == DEPTH * INSIDE
