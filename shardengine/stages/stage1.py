"""Stage 1: optimizer state and master weights are sharded.

Memory 8Ψ + 8Ψ/N (fp32 Adam: the master weight is the weight). Sends (N-1)/N·(4+4)Ψ per step, whatever the number of
micro-batches. Use it first when memory is short, and when many micro-batches are accumulated: same bytes as stage 0.
"""

from shardengine.stages.placement import Placement
from shardengine.stages.stage import Stage

STAGE1 = Stage(
    name="1",
    weights_after_forward=Placement.REPLICATED,
    weights_after_backward=Placement.REPLICATED,
    gradients=Placement.PARTIAL,
    state=Placement.SHARDED,
)
