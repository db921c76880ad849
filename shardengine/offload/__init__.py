"""Where resting shards live: tiers (the device, host memory, files on a disk) and what steps them on the host.

Must not know: stages, buckets, process groups, the order of a step.
"""

from shardengine.offload.copy_queue import CopyQueue
from shardengine.offload.copy_stream import CopyStream, Done, is_apart, mark
from shardengine.offload.cpu_adam import CPUAdam
from shardengine.offload.host_memory import staging
from shardengine.offload.pool import BufferPool
from shardengine.offload.shelf import HOST, Forms, MemoryShelf, Shelf, host_copy
from shardengine.offload.tiers import Homes, HostTier, Tier, Tiers

__all__ = [
    "HOST",
    "BufferPool",
    "CPUAdam",
    "CopyQueue",
    "CopyStream",
    "Done",
    "Forms",
    "Homes",
    "HostTier",
    "MemoryShelf",
    "Shelf",
    "Tier",
    "Tiers",
    "host_copy",
    "is_apart",
    "mark",
    "staging",
]
