"""What happens during a forward and a backward: hooks, gathering and resharding, prefetch, recomputation.

hooks, casting     every registration on the user's module     attachments   what hangs on it, to be taken off
schedule, holds, calls, prediction   which unit is gathered when, and how long it stays
unit, placing      one unit's weights; filling them from the model          deferred_gather   overlap_param_gather
activations, activation_offload      recomputation; saved tensors in host memory

Must not know: the optimizer, checkpoints.
"""

from __future__ import annotations

from shardengine.runtime import activations, casting, hooks, placing
from shardengine.runtime.activation_offload import ActivationStore
from shardengine.runtime.attachments import Attachments
from shardengine.runtime.deferred_gather import DeferredGather
from shardengine.runtime.schedule import Schedule
from shardengine.runtime.unit import Unit, Weights, weight_bytes

__all__ = [
    "ActivationStore",
    "Attachments",
    "DeferredGather",
    "Schedule",
    "Unit",
    "Weights",
    "activations",
    "casting",
    "hooks",
    "placing",
    "weight_bytes",
]
