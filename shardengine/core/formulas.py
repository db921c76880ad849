"""The stage's formulas applied to one engine: bytes of model state and bytes on the wire, padding included.

Must not know: measurements.
"""

from __future__ import annotations

from collections import Counter

import torch

from shardengine import stages
from shardengine.budget import Footprint, outside_bytes, settled, wire_of
from shardengine.config import Config
from shardengine.core.parts import Core
from shardengine.ddp import comm_hooks
from shardengine.offload import Homes
from shardengine.optim import Needs
from shardengine.sharding import FlatBufferLayout, Layout, Partition


def footprint_of(
    core: Core, config: Config, needs: Needs, found: Partition | None = None, plan: Layout | None = None
) -> Footprint:
    """The facts that determine the bytes of ``core``, or of its successor with partition ``found`` and layout ``plan``.

    needs: the optimizer's requirements on a layout.
    """
    layout = plan or core.layout
    return Footprint(
        stage=core.stage,
        layout=layout,
        precision=core.precision,
        rules=core.reducer.rules,
        state=needs.bytes_of,
        kept_whole=needs.bytes_kept_whole(layout),
        beside=needs.bytes_beside(layout, core.stage.state, core.mesh.rank)
        + comm_hooks.kept_bytes(core.reducer.hook, layout),
        micro_batches=core.window.size,
        prefetch=settled(config.zero_optimization.stage3_prefetch_bucket_size),
        outside=outside_bytes(found or core.partition, core.precision),
        nodes=core.collectives.nodes,
        message=comm_hooks.buffers_per_element(core.reducer.hook),
        coded=comm_hooks.bytes_per_element(core.schedule.coding),
        averages=bool(core.step_state.replicas.name),
    )


def homes_of(core: Core) -> Homes:
    """The tiers of the state of ``core`` that is offloaded."""
    return next((flat_buffer.homes for unit in core.units for flat_buffer in unit.flat_buffers), Homes())


def predicted_traffic(core: Core, needs: Needs, micro_batches: int) -> float:
    """The stage's formula for bytes sent per rank and step, padding included, plus this rank's whole matrices or sums.

    Excludes gradients that travel as rows, which depend on the data.
    """
    whole = needs.bytes_sent(core.layout, core.stage.state, core.mesh.rank)
    return float(whole) + sum(predicted_by_axis(core, needs, micro_batches).values())


def _coded_bytes(core: Core, flat_buffer: FlatBufferLayout) -> float | None:
    """Bytes per element of weights that travel coded; None if they travel unchanged."""
    floats = getattr(torch, flat_buffer.dtype).is_floating_point
    return comm_hooks.bytes_per_element(core.schedule.coding) if floats else None


def predicted_by_axis(core: Core, needs: Needs, micro_batches: int) -> Counter[str]:
    """``predicted_traffic`` without whole matrices and sums, split into bytes inside shard groups and across them.

    If shard groups step on their own (local SGD), it describes the last step.
    """
    sent, once, hook = Counter[str](), core.schedule.unsharded_once, core.reducer.hook if core.mesh.ranks > 1 else None
    replicas = core.step_state.replicas
    step = replicas.last or replicas.step
    for flat_buffer in core.layout.flat_buffers:
        wire, coded = wire_of(core.reducer.rules, flat_buffer), hook is not None and hook.makes_messages
        by_rows = core.reducer.sends_rows(flat_buffer.buckets[0])  # their number depends on the data
        volume = stages.Volume(
            trainable=flat_buffer.length if flat_buffer.trainable and not by_rows else 0,
            twice=0 if flat_buffer.unit in once else flat_buffer.length,
            once=flat_buffer.length if flat_buffer.unit in once else 0,
            message=comm_hooks.said_per_element(hook, flat_buffer.buckets) if flat_buffer.trainable else None,
            coded=_coded_bytes(core, flat_buffer),
            brought=hook is not None and (hook.in_rounds or isinstance(hook, comm_hooks.WholeGradients)),
            apart=step.apart,
            exchanges=step.exchanges,
            averaged=4 + needs.bytes_of(flat_buffer.family) if step.averaged else 0,
        )
        by_axis = core.stage.bytes_by_axis(
            volume,
            core.mesh.ranks,
            micro_batches=micro_batches,
            weight=flat_buffer.itemsize,
            gradient=wire.itemsize,
            nodes=core.collectives.nodes(wire) if core.mesh.replicas > 1 or not coded else 1,
            partial=core.reducer.rules.reduce.itemsize,
        )
        for axis, count in by_axis.items():
            sent[axis.value] += count  # type: ignore[assignment]  # a float
    return sent
