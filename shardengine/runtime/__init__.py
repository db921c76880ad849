"""What happens during a forward and a backward: hooks, unshard and reshard, prefetch, recomputation.

hooks                      every registration on the user's module
attachments                what hangs on it, to be taken off
casting                    inputs in the dtype of the weights
schedule, calls            which unit is unsharded when, and how long it stays
prefetch_order             which unit is needed next
unit, placing              the weights of one unit; filling them from the model
deferred_gather            gathers after a step that forwards wait for (overlap_param_gather)
activation_checkpointing   blocks that are computed again in backward
activation_offload         saved tensors in host memory

Must not know: the optimizer, checkpoints.
"""

from __future__ import annotations

from shardengine.runtime import activation_checkpointing, casting, hooks, placing
from shardengine.runtime.activation_offload import ActivationStore
from shardengine.runtime.attachments import Attachments
from shardengine.runtime.deferred_gather import DeferredGather
from shardengine.runtime.schedule import Schedule
from shardengine.runtime.unit import Summoned, Unit, UnshardState, weight_bytes

__all__ = [
    "ActivationStore",
    "Attachments",
    "DeferredGather",
    "Schedule",
    "Summoned",
    "Unit",
    "UnshardState",
    "activation_checkpointing",
    "casting",
    "hooks",
    "placing",
    "weight_bytes",
]
