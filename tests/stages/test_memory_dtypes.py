"""Memory per rank is the stage's formula in bf16, in models of several dtypes, and with another dtype on the wire.

Owns: the formula once more, per storage: weights in their own dtype, gradients in the wire's (fp32 where micro-batches
are summed), fp32 states, and fp32 master weights of what is not fp32. The count is ``test_memory``'s.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardengine import Engine
from tests.stages.test_memory import (
    ACTIVATION_BYTES,
    TRANSIENT_BYTES,
    Count,
    count_step,
    live_storages,
    observe,
    only_new_tensors,
)
from tests.support import HANG_S, cases
from tests.support.ranks import RankPool
from tests.support.sizes import padded

Pools = Callable[[int], RankPool]

WIDTH, BUCKET = 48, 1024
WIDE, DEEP = 90, 7
"""Blocks of such layers dwarf the transient buffers in bf16, and no matrix is a bucket of its own (layout: [Note: Tiny
buckets])."""
STEPS = 2


class Layers(nn.Module):
    """Linear layers, each in its own dtype."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)
        self.more = nn.ModuleList(nn.Linear(width, width) for _ in range(depth - 2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.up, self.down, *self.more):
            x = torch.tanh(layer(x.to(layer.weight.dtype)))
        return x


class Stack(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.inp = nn.Linear(7, width)
        self.blocks = nn.ModuleList(Layers(width, depth) for _ in range(4))
        self.out = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x.to(self.inp.weight.dtype))
        for block in self.blocks:
            x = x + block(x)
        return self.out(x.to(self.out.weight.dtype)).float()


def make_stack(mixed: bool, width: int = WIDTH, depth: int = 2) -> Stack:
    """Mixed: blocks of bf16, of frozen bf16, and of fp32 over frozen bf16, between parts in fp32."""
    torch.manual_seed(16)
    model: Any = Stack(width, depth)
    if mixed:
        model.blocks[0].bfloat16()
        model.blocks[1].bfloat16().requires_grad_(False)
        model.blocks[2].down.bfloat16().requires_grad_(False)
    return model


def storages(model: Stack, *, sharded: bool, low: bool) -> dict[tuple[int, bool, int], list[int]]:
    """(unit, trainable, itemsize) → the sizes of the parameters that share a storage; unit 0 is the root."""
    found: dict[tuple[int, bool, int], list[int]] = {}
    for name, parameter in model.named_parameters():
        unit = int(name.split(".")[1]) + 1 if sharded and name.startswith("blocks") else 0
        itemsize = 2 if low else parameter.itemsize
        found.setdefault((unit, parameter.requires_grad, itemsize), []).append(parameter.numel())
    return found


def formula(
    model: Stack, stage: str, letter: str, ranks: int, micros: int, *, low: str, wire: str | None
) -> dict[str, int]:
    """Bytes per rank: weights, gradients between micro-batches (or complete, for one), states; whole: see the test."""
    waiting = 2 if low == "waiting in bf16" else 4
    sharded = stage.startswith("3")
    total = dict.fromkeys(("weights", "gradients", "states", "whole"), 0)
    for (_, trainable, size), counts in storages(model, sharded=sharded, low=bool(low)).items():
        length = padded(counts, ranks, size) if trainable or sharded else sum(counts)
        total["weights"] += length * size // (ranks if sharded else 1)
        if trainable:
            sent = {None: size, "fp32": 4, "bf16": 2}[wire]
            resting = sent if micros == 1 else waiting
            total["gradients"] += length * resting // (ranks if letter == "sharded" else 1)
            total["whole"] += length * sent
            masters = size < 4 and low != "no masters"
            total["states"] += length * (12 if masters else 8) // (1 if stage == "0" else ranks)
    return total


def transient(mixed: bool) -> int:
    """Bytes of buffers in use for a moment: as many buckets of the second dtype, which are half as large."""
    return TRANSIENT_BYTES + (TRANSIENT_BYTES // 2 if mixed else 0)


def settled_bytes(engine: Engine) -> int:
    """Bytes alive before the first step, as soon as no communication thread holds on to what was sent last."""
    said, deadline = engine.memory(), time.monotonic() + HANG_S
    while True:
        live = sum(live_storages().values())
        if live == said["live_weight_bytes"] + said["live_state_bytes"] or time.monotonic() > deadline:
            return live
        time.sleep(0.01)


def train_and_count(chosen: list[dict[str, Any]], mixed: bool, watched: bool = False) -> list[Count]:
    """Per config. watched: wide blocks, and what is alive as each of them runs."""
    counts = []
    for config in chosen:
        count = Count()
        with only_new_tensors():
            model: Any = make_stack(mixed, *((WIDE, DEEP) if watched else (WIDTH, 2)))
            engine = cases.make_engine(model, config)
            gc.collect()
            count.start = settled_bytes(engine)
            if watched:
                observe(engine, model, count)
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
        (False, "masters", None, 2),
        (False, "masters", None, 3),
        (False, "no masters", None, 3),
        (False, "waiting in bf16", None, 2),
        (True, "", None, 2),
        (True, "", None, 3),
        (False, "", "bf16", 2),
        (False, "masters", "fp32", 3),
    ],
)
def test_model_state_is_the_formula(
    pools: Pools, mixed: bool, low: str, wire: str | None, letter: str | None, ranks: int
) -> None:
    """With a ``letter`` over three micro-batches, else over one; at the start, between, before step() and after it.

    Stage 0 steps all weights on every rank: the complete gradient is gathered in the wire's dtype, and takes the place
    of the sum. low: "", or how bf16 is trained.
    """
    micros = 1 if letter is None else 3
    options: dict[str, Any] = {"zero": {"reduce_bucket_size": BUCKET}}
    options |= {"gradient_accumulation": letter} if letter else {}
    options |= {"bf16": {"enabled": True, "master_weights": low != "no masters"}} if low else {}
    options |= {"data_types": {"grad_accum_dtype": "bf16"}} if low == "waiting in bf16" else {}
    options |= {"communication_data_type": wire} if wire else {}
    chosen = [cases.config_of(stage, micros, **{**options, "zero": dict(options["zero"])}) for stage in cases.STAGES]
    for counts in pools(ranks).run(train_and_count, chosen, mixed):
        for stage, count in zip(cases.STAGES, counts, strict=True):
            rests = letter or cases.LETTER[stage]
            bytes_of = formula(make_stack(mixed), stage, rests, ranks, micros, low=low, wire=wire)
            kept = bytes_of["weights"] + bytes_of["states"]
            complete = bytes_of["whole"] if stage == "0" else bytes_of["gradients"]
            moved, gathered = (bytes_of["gradients"], bytes_of["whole"]) if stage == "0" else (0, 0)
            assert count.start == kept, stage
            for live, waiting in zip(count.between, count.between_waiting, strict=True):
                assert live == kept + bytes_of["gradients"] + waiting, f"stage {stage}, between micro-batches"
                assert waiting <= transient(mixed) + gathered, f"stage {stage}, between micro-batches"
            for live, waiting in zip(count.before, count.before_waiting, strict=True):
                assert live == kept + complete + waiting, f"stage {stage}, before step()"
                assert waiting <= transient(mixed) + moved, f"stage {stage}, before step()"
            for live, waiting in zip(count.after, count.after_waiting, strict=True):
                assert live == kept + waiting, f"stage {stage}, after step()"
                assert waiting <= complete + transient(mixed) + moved, f"stage {stage}, after step()"
            assert count.after[-1] == count.before[-1], f"stage {stage}: a later step must neither allocate nor leak"
            for said in count.said:
                assert said["predicted_model_state_bytes"] == kept + bytes_of["gradients"], stage
                assert said["measured_model_state_bytes"] == kept + complete, stage
                assert said["live_weight_bytes"] == bytes_of["weights"], stage
                assert said["live_state_bytes"] == bytes_of["states"], stage


@pytest.mark.parametrize(("mixed", "low"), [(False, True), (True, False)])
@pytest.mark.parametrize("ranks", [2, 3])
def test_the_live_window_is_the_blocks_that_are_open(pools: Pools, ranks: int, mixed: bool, low: bool) -> None:
    """Stage 3: the block that runs and one ahead of it; 3k: in forward one more with each block."""
    model = make_stack(mixed, WIDE, DEEP)
    unit_bytes = dict.fromkeys(range(5), 0)
    for (unit, _, size), counts in storages(model, sharded=True, low=low).items():
        unit_bytes[unit] += padded(counts, ranks, size) * size
    extra = transient(mixed) + ACTIVATION_BYTES
    assert min(unit_bytes[unit] for unit in range(1, 5)) > extra, "one block too many would not be noticed"
    block_elements = DEEP * padded([WIDE * WIDE, WIDE], 4, 2)
    options: dict[str, Any] = {"bf16": {"enabled": True}} if low else {}
    chosen = [
        cases.config_of(stage, zero={"reduce_bucket_size": BUCKET, "stage3_prefetch_bucket_size": ahead}, **options)
        for stage, ahead in (("3", block_elements), ("3k", 0))
    ]
    for ahead, kept in pools(ranks).run(train_and_count, chosen, mixed, True):
        for stage, count in (("3", ahead), ("3k", kept)):
            bytes_of = formula(model, stage, "sharded", ranks, 1, low="masters" if low else "", wire=None)
            rest = bytes_of["weights"] + bytes_of["states"] + bytes_of["gradients"]
            assert {(event.kind, event.block) for event in count.events} >= {("forward", n) for n in range(1, 5)}
            for event in count.events:
                open_now = (*range(event.block + 1),) if stage == "3k" else event.full
                assert event.full == open_now and {0, event.block} <= set(event.full), event
                assert stage == "3k" or len(event.full) <= 3, f"more than one block ahead: {event}"
                limit = rest + sum(unit_bytes[unit] for unit in open_now) + extra
                assert event.live <= limit, f"more than {limit} bytes: {event}"
