"""Stage 0: plain data parallelism (DDP). Everything is replicated.

Memory 16Ψ (fp32 Adam). Sends 2(N-1)/N·4Ψ per step: a reduce-scatter and an all-gather of gradients, in backward.
Use it when the model, its gradients and its optimizer state fit: nothing is gathered on the way to a result.
"""

from shardengine.stages.placement import Placement
from shardengine.stages.stage import Stage

STAGE0 = Stage(
    name="0",
    weights_after_forward=Placement.REPLICATED,
    weights_after_backward=Placement.REPLICATED,
    gradients=Placement.PARTIAL,
    state=Placement.REPLICATED,
)
