"""Exchanges the weights for others that the optimizer keeps: averages, or the evaluation point of schedule-free
classes.

Owns: the order of calls around an exchange. Must not know: the meaning of the other weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from shardengine.comm import compare
from shardengine.core.parts import Core
from shardengine.errors import UsageError
from shardengine.optim import ShardedOptimizer
from shardengine.sharding import Bucket


def call_class(core: Core, optimizer: ShardedOptimizer, method: str) -> None:
    """Call "train" or "eval" of the optimizer's class.

    Collective if that exchanges weights, which is the same on every rank.
    """
    core.schedule.finish_open_backward()
    if optimizer.begin_exchange(method):
        call = f"optimizer.{method}()"
        core.step_state.require("optimizer.train() or eval()", call)
        agree(core, call)
        exchange(core, optimizer.exchange_buckets())


@contextmanager
def averaged(core: Core, optimizer: ShardedOptimizer) -> Iterator[None]:
    """The averages are the weights inside the ``with``; collective. See ``Engine.ema``."""
    if not optimizer.averages:
        raise UsageError(
            'engine.ema(): expected "ema": {"decay": 0.999} in the config, got none, so nothing is averaged',
            code="ema-not-in-config",
        )
    core.schedule.finish_open_backward()
    core.step_state.require("engine.ema()")
    optimizer.settle()
    agree(core, "engine.ema()")
    exchange(core, optimizer.swap_averages())
    try:
        with core.step_state.averaging():
            yield
    finally:
        try:
            agree(core, "the end of engine.ema()")
        except BaseException:
            core.step_state.lose()  # the weights are still the averages
            raise
        exchange(core, optimizer.swap_averages())


def agree(core: Core, call: str) -> None:
    """Check that every rank makes ``call``. If shards are stepped, the call sends nothing else."""
    compare(core.collectives, {"call": [call]})


def exchange(core: Core, buckets: Iterable[Bucket]) -> None:
    """Publish ``buckets`` one by one as they are written. After an error the update is lost."""
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
