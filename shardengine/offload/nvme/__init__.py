"""States on a disk: one file per process, and stores in it that pass through a few host buffers to be stepped.

file_tier       stores in that file, with few buffers
extent_file     its parts and their checksums, what is said when something fails
free_list       which of its bytes are free
disk            the file as the system has it, and the threads that read and write it
io_request      a read or a write under way
lease           which files below a directory belong to a living process

Must not know: what else a tier may be, what the tensors mean.
"""

from shardengine.offload.nvme.extent_file import Aio, Extent, ExtentFile
from shardengine.offload.nvme.file_tier import FileTier
from shardengine.offload.nvme.io_request import IORequest

__all__ = ["Aio", "Extent", "ExtentFile", "FileTier", "IORequest"]
