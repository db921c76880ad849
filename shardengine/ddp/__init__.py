"""The bucketed data-parallel core that every stage runs on: gradients, from autograd to the shard that is stepped.

window            counts micro-batches: which one ends the accumulation window (the micro-batches of one optimizer step)
step_state        the progress of a step, and the calls that it allows
gradient_bucket   the gradients of one bucket: their sums over micro-batches, places and dtypes
reducer           readiness, order of launches, the end of a backward
sparse_rows       the messages of sparse gradients
gradient_views    the tensors that parameter.grad shows
comm_hooks        the messages of a reduction of gradients
early_use         gradients that are stepped in backward
buffers           module buffers that are equal to rank 0's
joining           ranks that have no more batches, and how the others learn it
writes            values that the user's code has written into weights, and whether every rank has
replicas          diverged replicas: shard groups that step separately for a while

Must not know: stages by name, how modules run, where weights are kept.
"""

from shardengine.ddp import comm_hooks
from shardengine.ddp.buffers import BufferSync
from shardengine.ddp.comm_hooks import CommHook
from shardengine.ddp.gradient_bucket import GradientBucket, Rules
from shardengine.ddp.gradient_views import GradientViews, ShardedGradient, taken
from shardengine.ddp.joining import Attendance, Join
from shardengine.ddp.reducer import ERROR, FACTOR, MAX_IN_FLIGHT, Payload, Reducer, no_payload
from shardengine.ddp.replicas import Replicas, ReplicaStep
from shardengine.ddp.step_state import EarlySteps, Phase, StepState
from shardengine.ddp.window import Forward, Window
from shardengine.ddp.writes import Writes, digest

__all__ = [
    "ERROR",
    "FACTOR",
    "MAX_IN_FLIGHT",
    "Attendance",
    "BufferSync",
    "CommHook",
    "EarlySteps",
    "Forward",
    "GradientBucket",
    "GradientViews",
    "Join",
    "Payload",
    "Phase",
    "Reducer",
    "ReplicaStep",
    "Replicas",
    "Rules",
    "ShardedGradient",
    "StepState",
    "Window",
    "Writes",
    "comm_hooks",
    "digest",
    "no_payload",
    "taken",
]
