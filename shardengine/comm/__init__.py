"""Everything between ranks: process groups, collectives, agreement, and the reports of failures.

devices          which device and which backend a rank uses
nodes            which ranks share a node
mesh             process groups, also of shard groups (``in_shard_groups_of``)
group_kind       how those of gloo and of NCCL are made, and how they end
rendezvous       which rank this is: the variables of torchrun, SLURM and MPI
launcher         ranks from a script
rank_failure     why the process of a rank ended, and which of several was first
wire             torch's data operations, the only file that calls them
transfer         collectives of buckets, compiled once per layout; a reduce-scatter is an all-to-all and a local sum
collectives      data operations between ranks, by their effect
group_speed      how long collectives of the group last, measured
work             a collective from its start to the end of its wait: counted, compared, waited for
flight_recorder  the issued collectives, and where ranks differ
failures         reports between ranks: failures, progress, departures
positions        the position of each rank, and which of them wait for each other
outside          the collectives that a rank waits in, outside of the engine
breaking_off     ends the collectives in flight on all ranks, after a fault
nccl_watcher     a thread that looks after a host that waits for its GPU (NCCL), and its timeout
watchdog         a long wait: which rank is missing, whether it can still end, the error message (timeouts: work)
advice           remedies for the user if ranks do not make the same calls
threads          threads that may stay inside of torch
store_board      the texts of ranks in the process group's store
agreement        compare facts, and run a function that fails on all ranks or on none
meeting          ranks meet before an engine's groups are made, in reset() and in close()

Must not know: how modules, buckets and stages work.
"""

from __future__ import annotations

from shardengine.comm import agreement, devices, meeting, mesh, nodes, rendezvous
from shardengine.comm.advice import BLOCKS, EVALUATE, gathering
from shardengine.comm.agreement import compare, describe, run_on_all_ranks, settle_kernels
from shardengine.comm.collectives import Chunks, Collectives, Named
from shardengine.comm.failures import Failures
from shardengine.comm.flight_recorder import HOOK, STEP, Purpose
from shardengine.comm.group_kind import GroupKind, GroupName
from shardengine.comm.group_speed import GroupSpeed, measure_gathers, measure_reduction
from shardengine.comm.launcher import cores, default_ranks, host_threads, launch, rank_environment
from shardengine.comm.mesh import Mesh, Store, await_the_others
from shardengine.comm.positions import Presence
from shardengine.comm.rank_failure import RankFailure
from shardengine.comm.transfer import Coding, CollectiveLabel, OnComplete, TransferOptions
from shardengine.comm.wire import Wire
from shardengine.comm.work import Work

__all__ = [
    "BLOCKS",
    "EVALUATE",
    "HOOK",
    "STEP",
    "Chunks",
    "Coding",
    "CollectiveLabel",
    "Collectives",
    "Failures",
    "GroupKind",
    "GroupName",
    "GroupSpeed",
    "Mesh",
    "Named",
    "OnComplete",
    "Presence",
    "Purpose",
    "RankFailure",
    "Store",
    "TransferOptions",
    "Wire",
    "Work",
    "agreement",
    "await_the_others",
    "compare",
    "cores",
    "default_ranks",
    "describe",
    "devices",
    "gathering",
    "host_threads",
    "launch",
    "measure_gathers",
    "measure_reduction",
    "meeting",
    "mesh",
    "nodes",
    "rank_environment",
    "rendezvous",
    "run_on_all_ranks",
    "settle_kernels",
]
