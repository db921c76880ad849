"""Weights exchanged for others that the optimizer keeps: averages, and what schedule-free classes evaluate at.

Owns: the order around it. Must not know: what the others are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from shardengine.engine.core import Core
from shardengine.errors import UsageError
from shardengine.optim import ShardedOptimizer
from shardengine.sharding import Bucket


def call_class(core: Core, optimizer: ShardedOptimizer, method: str) -> None:
    """Call "train" or "eval" of the optimizer's class; collective where weights are exchanged, which is the same on
    every rank."""
    core.schedule.finish_open_backward()
    if optimizer.begin_exchange(method):
        core.step_state.require("optimizer.train() or eval()", f"optimizer.{method}()")
        _exchange(core, optimizer.exchange_buckets())


@contextmanager
def averaged(core: Core, optimizer: ShardedOptimizer) -> Iterator[None]:
    """The averages are the weights inside the ``with``; collective. See ``Engine.ema``."""
    if not optimizer.averages:
        raise UsageError(
            'engine.ema(): expected "ema": {"decay": 0.999} in the config, got none, so nothing is averaged'
        )
    core.schedule.finish_open_backward()
    core.step_state.require("engine.ema()")
    optimizer.settle()
    _exchange(core, optimizer.swap_averages())
    try:
        with core.step_state.averaging():
            yield
    finally:
        _exchange(core, optimizer.swap_averages())


def _exchange(core: Core, buckets: Iterable[Bucket]) -> None:
    core.schedule.reshard_all()
    core.await_weights()
    core.adopt_written_weights()
    try:
        with torch.no_grad():
            core.publish(buckets)
    except BaseException:
        core.step_state.lose()  # some are exchanged
        raise
    core.note_stepped()
