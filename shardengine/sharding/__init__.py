"""Parameters as flat buffers: the units of a model, the place of every element, and its dtype.

partition     the parameters of a model, inside and outside of units, and the facts that ranks compare
wrapping      the choice of modules that are units
inner         parameters that consist of several tensors (quantised ones)
shared_memory parameters in the memory of other tensors, which raise an error
layout        offsets, padding and slices, as integers
readiness     the time when buckets are full, for a given order of gradients
bucket        flat storage, and views into it (filled by runtime.placing)
poison        the tensors that parameters show while their weights are elsewhere
flat_slices   elements of parameters by name and position, in any layout
left_shards   the state that a closed engine leaves on its module
precision     the dtypes, and the config's policy of the loss scale

Must not know: other ranks at run time, hooks, the step.
"""

from __future__ import annotations

from shardengine.sharding import inner, layout, partition, precision
from shardengine.sharding.bucket import (
    MASTER,
    SHARD,
    Bucket,
    FlatBuffer,
    Span,
    holds_weights,
    in_memory_order,
    mark_weights,
    shaped,
)
from shardengine.sharding.flat_slices import BUFFER, WEIGHT, FlatSlice, FullTensors, Targets, join, slices_of
from shardengine.sharding.layout import BucketLayout, FlatBufferLayout, Layout, ParameterSpec, Piece
from shardengine.sharding.left_shards import LeftBucket, LeftShards
from shardengine.sharding.partition import Partition, dtype_of, ignored_by, memory_order
from shardengine.sharding.poison import (
    AWAY,
    IN_FLIGHT,
    SHARDED,
    Elsewhere,
    explain_let_go,
    restore_poison,
    reveal,
    stand_in,
)
from shardengine.sharding.precision import Precision, ScalePolicy
from shardengine.sharding.readiness import is_worth_moving
from shardengine.sharding.wrapping import is_lookup

__all__ = [
    "AWAY",
    "BUFFER",
    "IN_FLIGHT",
    "MASTER",
    "SHARD",
    "SHARDED",
    "WEIGHT",
    "Bucket",
    "BucketLayout",
    "Elsewhere",
    "FlatBuffer",
    "FlatBufferLayout",
    "FlatSlice",
    "FullTensors",
    "Layout",
    "LeftBucket",
    "LeftShards",
    "ParameterSpec",
    "Partition",
    "Piece",
    "Precision",
    "ScalePolicy",
    "Span",
    "Targets",
    "dtype_of",
    "explain_let_go",
    "holds_weights",
    "ignored_by",
    "in_memory_order",
    "inner",
    "is_lookup",
    "is_worth_moving",
    "join",
    "layout",
    "mark_weights",
    "memory_order",
    "partition",
    "precision",
    "restore_poison",
    "reveal",
    "shaped",
    "slices_of",
    "stand_in",
]
