"""Stage 3 with hpZ: between forward and backward a unit's weights are sharded only inside of the shard group.

Memory at rest 16Ψ/N, as stage 3; at the end of forward 4Ψ/L on top, with L ranks in a group. The gather for backward
stays inside of the group. Use it when the network between the groups is slow and their memory is not enough for hybrid
sharding. Source: ZeRO++, arXiv 2306.10209, section 3.2; there the second copy stays after backward.
"""

from shardengine.stages.placement import Placement
from shardengine.stages.stage import Stage

STAGE3_HPZ = Stage(
    name="3 hpZ",
    weights_after_forward=Placement.SHARDED_INSIDE,
    weights_after_backward=Placement.SHARDED,
    gradients=Placement.SHARDED,
    state=Placement.SHARDED,
)
