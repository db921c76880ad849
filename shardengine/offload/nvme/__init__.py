"""States on a disk: one file per process; its stores pass through a few host buffers to be stepped.

file_tier       stores in that file, with few buffers
extent_file     its extents and their checksums, the messages of failures
free_list       the free bytes of the file
disk            the file on the disk: made, grown, read and written by threads
io_request      a read or a write in flight
lease           which files below a directory belong to a living process

Must not know: other tiers, the meaning of the tensors.
"""

from shardengine.offload.nvme.extent_file import Aio, Extent, ExtentFile
from shardengine.offload.nvme.file_tier import FileTier
from shardengine.offload.nvme.io_request import IORequest

__all__ = ["Aio", "Extent", "ExtentFile", "FileTier", "IORequest"]
