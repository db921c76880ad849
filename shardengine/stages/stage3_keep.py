"""Stage 3, kept after forward: a unit stays gathered from its forward to its backward.

Memory at rest 16Ψ/N, at the end of forward all weights (4Ψ) on top. Sends one gather of the units less than stage 3.
Use it when the weights fit but optimizer state and gradients do not, and the network is slow.
"""

from shardengine.stages.placement import Placement
from shardengine.stages.stage import Stage

STAGE3_KEEP = Stage(
    name="3k",
    weights_after_forward=Placement.REPLICATED,
    weights_after_backward=Placement.SHARDED,
    gradients=Placement.SHARDED,
    state=Placement.SHARDED,
)
