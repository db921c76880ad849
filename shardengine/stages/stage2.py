"""Stage 2: gradients are sharded as well.

Memory 4Ψ + 12Ψ/N (fp32 Adam). Sends (N-1)/N·(4k+4)Ψ per step with k micro-batches. Use it when stage 1 does not fit and
few micro-batches are accumulated.
"""

from shardengine.stages.placement import Placement
from shardengine.stages.stage import Stage

STAGE2 = Stage(
    name="2",
    weights_after_forward=Placement.REPLICATED,
    weights_after_backward=Placement.REPLICATED,
    gradients=Placement.SHARDED,
    state=Placement.SHARDED,
)
