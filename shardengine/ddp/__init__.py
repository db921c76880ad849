"""The bucketed data-parallel core that every stage runs on. Must not know stages by name, modules or weights."""

from shardengine.ddp.buffers import BufferSync
from shardengine.ddp.gradient_bucket import GradientBucket, Rules
from shardengine.ddp.reducer import Payload, Reducer, no_payload

__all__ = ["BufferSync", "GradientBucket", "Payload", "Reducer", "Rules", "no_payload"]
