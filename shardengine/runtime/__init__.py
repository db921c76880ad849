"""The runtime of a forward and a backward: hooks, unshard and reshard, prefetch, recomputation.

hooks                      every registration on the user's module
gradient_hooks             the same on its parameters; when hooks of the user's run there
attachments                changes to the user's module, to be undone
casting                    inputs in the dtype of the weights
schedule, calls            which unit is unsharded when, and how long it stays so (``Hold``)
prefetch_order             which unit is needed next
recorded_window            the order of gathers and reductions, for a rank without data
saved_weights              weights that autograd requests, announced or not
transforms                 of torch.func around the engine
unit, placing              the weights of one unit; filling them from the model
written_weights            writes of the user's code into weights
deferred_gather            gathers after a step that forwards wait for (overlap_param_gather)
activation_checkpointing   blocks that are recomputed in backward
activation_offload         saved tensors in host memory

Must not know: the optimizer, checkpoints.
"""

from __future__ import annotations

from shardengine.runtime import activation_checkpointing, casting, gradient_hooks, hooks, placing, transforms
from shardengine.runtime.activation_offload import ActivationStore
from shardengine.runtime.attachments import Attachments
from shardengine.runtime.deferred_gather import DeferredGather
from shardengine.runtime.gradient_hooks import GradientHooks
from shardengine.runtime.schedule import Schedule
from shardengine.runtime.unit import Summoned, Unit, UnshardState, weight_bytes
from shardengine.runtime.written_weights import WrittenWeights

__all__ = [
    "ActivationStore",
    "Attachments",
    "DeferredGather",
    "GradientHooks",
    "Schedule",
    "Summoned",
    "Unit",
    "UnshardState",
    "WrittenWeights",
    "activation_checkpointing",
    "casting",
    "gradient_hooks",
    "hooks",
    "placing",
    "transforms",
    "weight_bytes",
]
