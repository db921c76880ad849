"""deepspeed.comm: which rank this is, and joining the others; the collectives are torch's. Must not know: engines."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shardengine.comm import rendezvous

OF_TORCH: dict[str, Any] = {
    name: getattr(dist, name)
    for name in (
        *("ReduceOp", "new_group", "get_global_rank", "is_available", "destroy_process_group"),
        *("all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor"),
        *("gather", "scatter", "send", "recv", "isend", "irecv", "all_gather_object", "broadcast_object_list"),
    )
}
"""Names of deepspeed.comm that are torch.distributed's own functions; scripts call them, shardengine does not."""


def init_distributed(
    dist_backend: str | None = None,
    *_: Any,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    **__: Any,
) -> None:
    """The default process group, from the launcher's environment; nothing happens where there is one.

    dist_backend: None: NCCL with a GPU, else gloo. Other arguments (discovery by MPI, ports) have no effect: the
    variables of torchrun, SLURM and MPI are read.
    """
    if dist.is_initialized():
        return
    rendezvous.join()
    backend = dist_backend or ("nccl" if torch.cuda.is_available() else "gloo")
    given: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    if init_method is not None:  # which, unlike env://, says of no process which one it is
        given |= {"rank": int(os.environ.get("RANK", "0")), "world_size": int(os.environ.get("WORLD_SIZE", "1"))}
    dist.init_process_group(backend, init_method=init_method, **given)


def get_rank(group: Any = None) -> int:
    """This process's number; 0 without a process group."""
    return dist.get_rank(group) if dist.is_initialized() else 0


def get_local_rank() -> int:
    """This process's number on its machine, as the launcher says."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def get_world_size(group: Any = None) -> int:
    """The number of processes; 1 without a process group."""
    return dist.get_world_size(group) if dist.is_initialized() else 1


def barrier(group: Any = None, **_: Any) -> None:
    """Return when every process of ``group`` is here."""
    if dist.is_initialized():
        dist.barrier(group)
