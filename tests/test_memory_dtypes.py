"""Model state per rank is the stage's formula in bf16, in models of several dtypes, and with another dtype on the wire.

Owns: the formula once more, per storage: weights in their own dtype, gradients in the wire's (fp32 where micro-batches
are summed), fp32 states, and fp32 master weights of what is not fp32. The count is ``test_memory``'s.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests import cases
from tests.ranks import RankPool
from tests.sizes import padded
from tests.test_memory import Count, count_step, live_storages, only_new_tensors

Pools = Callable[[int], RankPool]

WIDTH = 48
STEPS = 2


class Layers(nn.Module):
    """Two linear layers, each in its own dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.up, self.down):
            x = torch.tanh(layer(x.to(layer.weight.dtype)))
        return x


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(7, WIDTH)
        self.blocks = nn.ModuleList(Layers() for _ in range(4))
        self.out = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x.to(self.inp.weight.dtype))
        for block in self.blocks:
            x = x + block(x)
        return self.out(x.to(self.out.weight.dtype)).float()


def make_stack(mixed: bool) -> Stack:
    """Mixed: blocks of bf16, of frozen bf16, and of fp32 over frozen bf16, between parts in fp32."""
    torch.manual_seed(16)
    model: Any = Stack()
    if mixed:
        model.blocks[0].bfloat16()
        model.blocks[1].bfloat16().requires_grad_(False)
        model.blocks[2].down.bfloat16().requires_grad_(False)
    return model


def formula(
    stage: str, letter: str, ranks: int, micros: int, *, mixed: bool, low: bool, wire: str | None
) -> dict[str, int]:
    """Bytes per rank: weights, gradients between micro-batches (or complete, for one), states; whole: see the test."""
    sharded = stage.startswith("3")
    found: dict[tuple[str, bool, int], list[int]] = {}
    for name, parameter in make_stack(mixed).named_parameters():
        block = name.split(".")[1] if sharded and name.startswith("blocks") else ""
        itemsize = 2 if low else parameter.itemsize
        found.setdefault((block, parameter.requires_grad, itemsize), []).append(parameter.numel())
    total = dict.fromkeys(("weights", "gradients", "states", "whole"), 0)
    for (_, trainable, size), counts in found.items():
        length = padded(counts, ranks, size) if trainable or sharded else sum(counts)
        total["weights"] += length * size // (ranks if sharded else 1)
        if trainable:
            sent = {None: size, "fp32": 4, "bf16": 2}[wire]
            total["gradients"] += length * (sent if micros == 1 else 4) // (ranks if letter == "sharded" else 1)
            total["whole"] += length * sent
            total["states"] += length * (8 if size == 4 else 12) // (1 if stage == "0" else ranks)
    return total


def train_and_count(chosen: list[dict[str, Any]], mixed: bool) -> list[Count]:
    counts = []
    for config in chosen:
        count = Count()
        with only_new_tensors():
            model = make_stack(mixed)
            engine = cases.make_engine(model, config)
            gc.collect()
            count.start = sum(live_storages().values())
            for _ in range(STEPS):
                count_step(engine, count)
            engine.close()
            del engine, model
            gc.collect()
        counts.append(count)
    return counts


@pytest.mark.parametrize("letter", [None, "full", "sharded"])
@pytest.mark.parametrize(
    ("mixed", "low", "wire", "ranks"),
    [
        (False, True, None, 2),
        (False, True, None, 3),
        (True, False, None, 2),
        (True, False, None, 3),
        (False, False, "bf16", 2),
        (False, True, "fp32", 3),
    ],
)
def test_model_state_is_the_formula(
    pools: Pools, mixed: bool, low: bool, wire: str | None, letter: str | None, ranks: int
) -> None:
    """With a ``letter`` over three micro-batches, else over one; at the start, between, before step() and after it.

    Stage 0 steps all weights on every rank: the complete gradient is gathered in the wire's dtype, and takes the place
    of the sum.
    """
    micros = 1 if letter is None else 3
    options: dict[str, Any] = {"zero": {"reduce_bucket_size": 1024}}
    options |= {"gradient_accumulation": letter} if letter else {}
    options |= {"bf16": {"enabled": True}} if low else {}
    options |= {"communication_data_type": wire} if wire else {}
    chosen = [cases.config_of(stage, micros, **{**options, "zero": dict(options["zero"])}) for stage in cases.STAGES]
    for counts in pools(ranks).run(train_and_count, chosen, mixed):
        for stage, count in zip(cases.STAGES, counts, strict=True):
            rests = letter or cases.LETTER[stage]
            bytes_of = formula(stage, rests, ranks, micros, mixed=mixed, low=low, wire=wire)
            kept = bytes_of["weights"] + bytes_of["states"]
            complete = bytes_of["whole"] if stage == "0" else bytes_of["gradients"]
            assert count.start == kept, stage
            for live, waiting in zip(count.between, count.between_waiting, strict=True):
                assert live == kept + bytes_of["gradients"] + waiting, f"stage {stage}, between micro-batches"
            for live, waiting in zip(count.before, count.before_waiting, strict=True):
                assert live == kept + complete + waiting, f"stage {stage}, before step()"
            for live, waiting in zip(count.after, count.after_waiting, strict=True):
                assert live == kept + waiting, f"stage {stage}, after step()"
            for said in count.said:
                assert said["predicted_model_state_bytes"] == kept + bytes_of["gradients"], stage
                assert said["measured_model_state_bytes"] == kept + complete, stage
                assert said["live_weight_bytes"] == bytes_of["weights"], stage
                assert said["live_state_bytes"] == bytes_of["states"], stage
