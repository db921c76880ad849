"""Makes shard groups that step on their own the same again: averages the weights and the states of their optimizers.

Owns: when that is done, and how. Must not know: which steps end so (ddp/replicas), how gradients become complete.

[Note: Averages] A bucket is averaged as soon as it is stepped. Every rank has its group's slice of the stepped weights
(fp32, or fp32 masters) and of the states. Their sums over groups are computed as those of gradients are: each group
computes a part, in the declared order (kernels: [Note: One arithmetic]). The sums are divided, and gathered back across
the groups. Weights in lower precision are rounded from the masters. Then weights are published once, for the step and
its average.

If a rank fails after such a step has begun to write, the step is lost. Some buckets may be averaged and others not, so
a checkpoint must be loaded (recovery: [Note: Back to one step]).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from shardengine.comm import Purpose
from shardengine.config import STEPPING_APART, Config
from shardengine.core.exchanging import agree, exchange
from shardengine.core.parts import Core
from shardengine.errors import UsageError
from shardengine.kernels import ordered_sum
from shardengine.optim import Needs, ShardedOptimizer
from shardengine.sharding import Bucket, Layout, precision
from shardengine.stages import Placement


def check(config: Config, needs: Needs, plan: Layout, kind: str | None) -> None:
    """Raise ``UsageError`` if groups step on their own and the optimizer's weights or states cannot be averaged.

    needs, kind: of the optimizer.
    """
    if config.comm_hook.name not in STEPPING_APART or plan.replicas == 1 or kind is None:
        return
    which, found = precision.of(config), ""
    own = {getattr(torch, each.dtype) for each in plan.flat_buffers if each.trainable}
    kept = {which.master_dtype(dtype) or dtype for dtype in own}
    kept |= {form.dtype for forms in needs.forms.values() for form in forms.values()}
    if needs.by_sums or any(needs.whole):
        found = f"{kind}, which needs whole matrices"
    elif other := sorted(str(dtype).removeprefix("torch.") for dtype in kept - {torch.float32}):
        found = f"{kind} with weights or states in {' and '.join(other)}"
    if found:
        raise UsageError(
            f"comm_hook {config.comm_hook.name}: expected an optimizer that steps each element from itself, with "
            f"weights (or master weights) and states in fp32, of which means can be taken; got {found}",
            code="hook-optimizer-without-means",
        )


def step_buckets(core: Core, optimizer: ShardedOptimizer) -> None:
    """Do the update, publish the weights, and average the shard groups if the step ends with an average."""
    state = core.step_state
    stepped = optimizer.step_buckets()
    try:
        with torch.no_grad():
            core.publish(_averaged(core, optimizer, stepped) if state.replicas.step.averaged else stepped)
    except BaseException:
        if state.replicas.step.averaged and state.has_begun:
            state.lose()
        raise


def average(core: Core, optimizer: ShardedOptimizer) -> None:
    """See ``Engine.average_replicas``. Call it only if the groups differ."""
    state, call = core.step_state, "engine.average_replicas()"
    core.schedule.finish_open_backward()
    state.require("average_replicas()", call)
    optimizer.settle()
    agree(core, call)
    optimizer.await_reader()
    exchange(core, _averaged(core, optimizer, (each.bucket for each in core.reducer.buckets)))
    state.replicas.note_alike()


def _averaged(core: Core, optimizer: ShardedOptimizer, buckets: Iterable[Bucket]) -> Iterator[Bucket]:
    """Yield ``buckets``, each as soon as its weights and states are the mean over groups ([Note: Averages])."""
    for bucket in buckets:
        held = list(optimizer.stored(bucket, writable=True).values())
        _take_means(core, bucket, held)
        bucket.adopt_master()
        yield bucket


def _take_means(core: Core, bucket: Bucket, held: Sequence[Tensor]) -> None:
    """Replace each of ``held``, the group's slices, by its mean over groups."""
    layout, move, platform = bucket.layout, core.collectives.move, core.mesh.platform
    away = bucket.state_store.away and platform.has_own_memory  # offloaded: collectives need copies on the device
    full = [core.pool.acquire(tensor.numel(), tensor.dtype) for tensor in held] if away else held
    for loading in [platform.loads.copy(tensor, here) for here, tensor in zip(full, held, strict=True) if away]:
        loading.wait()

    def take_mean(here: Tensor, terms: Sequence[Tensor]) -> None:
        own = bucket.own_slice(here, Placement.SHARDED, of=Placement.SHARDED_INSIDE)
        ordered_sum(terms, own, divisor=core.mesh.replicas)

    across = Placement.PARTIAL_ACROSS, Placement.SHARDED, layout, Purpose.REPLICAS
    back = Placement.SHARDED, Placement.SHARDED_INSIDE, layout, Purpose.REPLICAS
    for summing in [move(here, *across, functools.partial(take_mean, here)) for here in full]:
        summing.wait()
    for gathering in [move(here, *back) for here in full]:
        gathering.wait()
    for saving in [platform.saves.copy(here, tensor) for here, tensor in zip(full, held, strict=True) if away]:
        saving.wait_on_host()
    for here in full if away else ():
        core.pool.release(here)
