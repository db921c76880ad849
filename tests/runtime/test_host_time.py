"""What Python does per step grows as the model does, and no faster: counted in executed lines, not in time.

Lines are those of shardengine's own files, in the thread that calls. Something that goes through the whole model for
each of its parts shows as a count that grows with the square of the number of layers.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardengine
from shardengine.comm.work import _wait_under_watchdog
from shardengine.offload import Platform
from shardengine.runtime.activation_offload import HostBuffers
from shardengine.runtime.prefetch_order import PrefetchOrder
from shardengine.sharding import layout
from shardengine.sharding.layout import Layout, ParameterSpec
from tests.support import cases
from tests.support.parts import SHARDED
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]
SOURCE = str(Path(shardengine.__file__).parent)
LAYERS = (6, 12, 24)
WIDTH = 16
PER_LAYER = 2 * WIDTH * WIDTH
SLACK, LATE = 1.15, 1.6
"""What grows with the square makes the second difference twice the first, four times that of what grows in line."""


def executed(call: Callable[[], Any]) -> Counter[str]:
    """Lines of shardengine that ``call`` executes in this thread, by file; without what it does until another rank has
    come, which depends on the machine."""
    found: Counter[str] = Counter()
    waits = False

    def trace(frame: FrameType, event: str, _argument: Any) -> Any:
        nonlocal waits
        name = frame.f_code.co_filename
        if frame.f_code is _wait_under_watchdog.__code__:
            waits = event != "return"
            return trace
        if waits or not name.startswith(SOURCE):
            return None
        if event == "line":
            found[name[len(SOURCE) + 1 :]] += 1
        return trace

    gc.disable()  # what it would end is not counted
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(None)
        gc.enable()
    return found


class Layer(nn.Module):
    """Two weights and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(torch.tanh(self.inner(x))) * self.scale


class Stack(nn.Module):
    """So many layers, each of which is a block."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def step(engine: Any, batch: Tensor) -> None:
    engine.backward(engine(batch))
    engine.step()


def lines_per_step(stage: str, zero: dict[str, Any], options: dict[str, Any]) -> list[Counter[str]]:
    """Of the fourth step, when orders are known, with each number of layers; a bucket per layer."""
    found = []
    for layers in LAYERS:
        settings = {"reduce_bucket_size": PER_LAYER, "stage3_prefetch_bucket_size": 10**9, **zero}
        config = cases.config_of(stage, zero=settings, **options)
        engine = cases.make_engine(Stack(layers), config, "AdamW")
        batch = torch.ones(2, WIDTH)
        for _ in range(3):
            step(engine, batch)
        found.append(executed(functools.partial(step, engine, batch)))
        assert len(engine._core.layout.buckets) >= layers
        engine.close()
    return found


def require_in_line(counts: list[Counter[str]], *, asks: str = "") -> None:
    """Each file's count grows with the number of layers, and no faster. asks: a file that asks whether another rank has
    come, the more often the later it does; its count may be further from a line than others, and not on a parabola."""
    few, more, many = counts
    assert sum(few.values()) > 1000
    for name in many:
        first, second = more[name] - few[name], many[name] - more[name]
        times = 2 * (LATE if name == asks else SLACK)
        assert second <= times * first + 40, f"{name}: {few[name]}, {more[name]}, {many[name]} lines"


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "activations offloaded": ({}, {"activation_checkpointing": {"enabled": True, "cpu_offload": True}}),
    "stepped in backward": (
        {"offload_optimizer": {"device": "cpu", "step_in_backward": True}},
        {"gradient_clipping": 0, "nonfinite_gradients": "step"},
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("stage", cases.STAGES)
def test_what_a_step_does_grows_as_the_model(stage: str, case: str) -> None:
    if case == "stepped in backward" and stage == "0":
        pytest.skip("refused: every rank steps everything")
    require_in_line(lines_per_step(stage, *CASES[case]))


def test_with_two_ranks_and_weights_that_are_awaited_late(pools: Pools) -> None:
    for stage in cases.STAGES:
        overlap = {"overlap_param_gather": True} if stage in ("1", "2") else {}
        for counts in pools(2).run(lines_per_step, stage, {}, overlap):
            require_in_line(counts, asks="comm/work.py")


# The layout


def plan_of(layers: int) -> Layout:
    """``layers`` parameters of 100 elements in one flat buffer, a bucket per three of them."""
    specs = [ParameterSpec((f"p{i}",), (100,), "float32", 4, True, 0, 0) for i in range(layers)]
    return layout.build(specs, 2, 336)


@pytest.mark.parametrize("which", ["pieces", "within", "segments"])
def test_a_bucket_costs_the_same_in_a_model_of_any_size(which: str) -> None:
    def ask(plan: Layout, number: int) -> None:
        bucket = plan.buckets[number]
        if which == "pieces":
            list(plan.pieces(bucket))
        elif which == "within":
            list(plan.pieces_within(bucket, bucket.interval_of_rank(SHARDED, 1)))
        else:
            plan.segments(bucket, bucket.interval_of_rank(SHARDED, 1), lambda _parameter: 0)

    counts = []
    for layers in (30, 120, 480):
        plan = plan_of(layers)
        ask(plan, 0)  # what is made once per layout
        each = [executed(functools.partial(ask, plan, number)) for number in range(len(plan.buckets))]
        counts.append(max(sum(found.values()) for found in each))
    assert max(counts) == min(counts) > 0


def test_a_bucket_is_cut_once() -> None:
    plan = plan_of(30)
    bucket = plan.buckets[4]
    assert plan.pieces(bucket) is plan.pieces(bucket)


# What is ahead, and buffers that wait


def test_a_gather_costs_the_same_however_many_units_are_ahead() -> None:
    counts = []
    for units in (10, 1000):
        prediction = PrefetchOrder()
        for unit in range(units):
            prediction.request(unit)
        prediction.end()
        while (upcoming := prediction.upcoming()) is not None:
            prediction.start(upcoming, 5)
        assert prediction.elements_ahead == 5 * units

        def gather(prediction: PrefetchOrder = prediction) -> None:
            prediction.request(0)
            prediction.upcoming()
            prediction.ahead(4)

        counts.append(sum(executed(gather).values()))
        assert prediction.elements_ahead == 5 * (units - 1)
    assert counts[0] == counts[1]


def test_a_buffer_is_found_at_the_same_cost_however_many_are_idle() -> None:
    counts = []
    for idle in (10, 1000):
        buffers = HostBuffers(Platform(torch.device("cpu")))
        for taken in [buffers.acquire(64) for _ in range(idle)]:
            buffers.release(taken)
        buffers.release(buffers.acquire(64))
        counts.append(sum(executed(functools.partial(buffers.acquire, 64)).values()))
    assert counts[0] == counts[1]
