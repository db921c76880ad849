"""Stage 3: weights are sharded as well; each unit is gathered for forward and again for backward.

Memory 16Ψ/N (fp32 Adam) + the live window. Sends (N-1)/N·k·(2·4Ψ_twice + 4Ψ_once + 4Ψ_trainable) per step. Use it when
the weights alone do not fit.
"""

from shardengine.stages.placement import Placement
from shardengine.stages.stage import Stage

STAGE3 = Stage(
    name="3",
    weights_after_forward=Placement.SHARDED,
    weights_after_backward=Placement.SHARDED,
    gradients=Placement.SHARDED,
    state=Placement.SHARDED,
)
