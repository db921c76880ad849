"""The bucketed data-parallel core that every stage runs on. Must not know stages by name, modules or weights."""

from shardengine.ddp.buffers import BufferSync
from shardengine.ddp.gradient_bucket import GradientBucket
from shardengine.ddp.reducer import Reducer, Rules

__all__ = ["BufferSync", "GradientBucket", "Reducer", "Rules"]
