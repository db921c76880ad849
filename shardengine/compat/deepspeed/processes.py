"""deepspeed.comm: ranks, and joining the process group; the collectives are torch's. Must not know: engines."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.device_mesh

from shardengine.comm import rendezvous

OF_TORCH: dict[str, Any] = {
    name: getattr(torch.distributed.device_mesh if name == "init_device_mesh" else dist, name)
    for name in (
        *("ReduceOp", "new_group", "get_global_rank", "is_available", "destroy_process_group"),
        *("all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor"),
        *("gather", "scatter", "send", "recv", "isend", "irecv", "all_gather_object", "broadcast_object_list"),
        *("all_to_all", "all_to_all_single", "reduce_scatter", "monitored_barrier", "get_backend"),
        *("get_process_group_ranks", "init_device_mesh", "scatter_object_list", "gather_object"),
    )
}
"""Names of deepspeed.comm that are torch.distributed's own functions; scripts call them, shardengine does not."""


def init_distributed(
    dist_backend: str | None = None,
    *_: Any,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    rank: int = -1,
    world_size: int = -1,
    **__: Any,
) -> None:
    """Create the default process group from the launcher's environment; do nothing if there is one.

    dist_backend: None: NCCL with a GPU, else gloo. Other arguments (discovery by MPI, ports) have no effect: the
    variables of torchrun, SLURM and MPI are read.
    """
    if dist.is_initialized():
        return
    rendezvous.join()
    backend = dist_backend or ("nccl" if torch.cuda.is_available() else "gloo")
    given: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    if init_method is not None:  # unlike env://, it gives no process its rank
        given |= {"rank": int(os.environ.get("RANK", "0")), "world_size": int(os.environ.get("WORLD_SIZE", "1"))}
    given |= {name: number for name, number in (("rank", rank), ("world_size", world_size)) if number >= 0}
    dist.init_process_group(backend, init_method=init_method, **given)


def get_rank(group: Any = None) -> int:
    """Return this process's rank; 0 without a process group."""
    return dist.get_rank(group) if dist.is_initialized() else 0


def get_local_rank() -> int:
    """Return this process's rank on its machine, as set by the launcher."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def get_world_size(group: Any = None) -> int:
    """Return the number of processes; 1 without a process group."""
    return dist.get_world_size(group) if dist.is_initialized() else 1


def barrier(group: Any = None, **_: Any) -> None:
    """Wait until every process of ``group`` has called this."""
    if dist.is_initialized():
        dist.barrier(group)


def is_launched() -> bool:
    """Return whether a launcher started this process as one of several."""
    return dist.is_initialized() or rendezvous.join()


def get_world_group() -> Any:
    """Return the group of all processes."""
    return dist.group.WORLD


def get_all_ranks_from_group(group: Any = None) -> list[int]:
    """Return the global ranks of the processes of a group."""
    return dist.get_process_group_ranks(dist.group.WORLD if group is None else group)


def has_it() -> bool:
    """Return True: torch has this collective."""
    return True


def log_summary(*_: Any, **__: Any) -> None:
    """Do nothing: ``engine.traffic()`` returns the traffic."""


def configure(*_: Any, **__: Any) -> None:
    """Do nothing, as ``log_summary``."""


NAMES: dict[str, Any] = {
    "init_distributed": init_distributed,
    "comm.init_distributed": init_distributed,
    "comm.is_initialized": dist.is_initialized,
    "comm.get_rank": get_rank,
    "comm.get_local_rank": get_local_rank,
    "comm.get_world_size": get_world_size,
    "comm.barrier": barrier,
    "comm.get_world_group": get_world_group,
    "comm.get_all_ranks_from_group": get_all_ranks_from_group,
    "comm.log_summary": log_summary,
    "comm.configure": configure,
    "comm.inference_all_reduce": dist.all_reduce,
    "comm.all_reduce_coalesced": dist.all_reduce_coalesced,
    "comm.all_gather_coalesced": dist.all_gather_coalesced,
    "comm.allgather_fn": dist.all_gather_into_tensor,
    "comm.reduce_scatter_fn": dist.reduce_scatter_tensor,
    **{
        f"comm.has_{name}": has_it
        for name in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce_coalesced")
    },
    **{f"comm.{name}": value for name, value in OF_TORCH.items()},
}
"""Dotted name → the object."""
