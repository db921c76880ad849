"""Where bytes are stored (device, host memory, disk), and copies between these places.

tiers                     the tier of each bucket, also for the ratio "auto"
shard_store               the tensors of one bucket in a tier
nvme/                     stores in one file per process: its extents, free space, lease and threads
direct_io                 transfers between memory and any file, past the page cache; checkpoints use it as well
platform                  a device beside the host: streams, copies and their ends, page-locked memory
copy_queue                tensors on their way between device and host
pool, host_memory         buffers that are used again; memory in huge pages
cpu_adam                  Adam for loops without an engine; an engine steps on the host by optim.update

Must not know: stages, the contents of a bucket, process groups, the order of a step.
"""

from shardengine.offload import direct_io
from shardengine.offload.copy_queue import CopyQueue
from shardengine.offload.cpu_adam import CPUAdam
from shardengine.offload.host_memory import staging
from shardengine.offload.nvme import Extent, IORequest
from shardengine.offload.platform import HOST, NOW, CopyStream, Done, Fetched, Platform
from shardengine.offload.pool import BufferPool
from shardengine.offload.shard_store import Forms, MemoryStore, ShardStore, host_copy
from shardengine.offload.tiers import Homes, HostTier, Tier, Tiers

__all__ = [
    "HOST",
    "NOW",
    "BufferPool",
    "CPUAdam",
    "CopyQueue",
    "CopyStream",
    "Done",
    "Extent",
    "Fetched",
    "Forms",
    "Homes",
    "HostTier",
    "IORequest",
    "MemoryStore",
    "Platform",
    "ShardStore",
    "Tier",
    "Tiers",
    "direct_io",
    "host_copy",
    "staging",
]
