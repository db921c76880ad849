"""The bucketed data-parallel core that every stage runs on. Must not know stages by name, modules or weights."""

from shardengine.ddp.accumulation import Forward, Window
from shardengine.ddp.buffers import BufferSync
from shardengine.ddp.gradient_bucket import GradientBucket, Rules
from shardengine.ddp.gradient_views import GradientViews, ShardedGradient, taken
from shardengine.ddp.reducer import Payload, Reducer, no_payload

__all__ = [
    "BufferSync",
    "Forward",
    "GradientBucket",
    "GradientViews",
    "Payload",
    "Reducer",
    "Rules",
    "ShardedGradient",
    "Window",
    "no_payload",
    "taken",
]
