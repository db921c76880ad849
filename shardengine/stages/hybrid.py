"""Hybrid sharding (HSDP, MiCS): sharded inside of a shard group, replicated across the groups.

Every S of a stage becomes SR, so that weights are gathered only inside of the group. Gradients are summed inside of it
for each micro-batch (SP), and across the groups once per step. The memory is that of the stage on the ranks of one
group. Use it when a group's memory is enough and the network between the groups is slow.
"""

from dataclasses import replace

from shardengine.stages.placement import Placement
from shardengine.stages.stage import Stage


def hybrid(stage: Stage) -> Stage:
    """Return ``stage`` inside of each shard group, the groups being replicas of each other."""
    inside = {
        Placement.SHARDED: Placement.SHARDED_INSIDE,
        Placement.REPLICATED: Placement.REPLICATED,
    }
    return replace(
        stage,
        name=f"{stage.name} hybrid",
        weights_after_forward=inside[stage.weights_after_forward],
        weights_after_backward=inside[stage.weights_after_backward],
        gradients=Placement.PARTIAL_ACROSS if stage.reduces_every_micro_batch else stage.gradients,
        state=inside[stage.state],
    )
