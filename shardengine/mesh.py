"""Process groups, per axis and purpose, built by one function and passed in. No global state.

Must not know: buckets, modules, what is sent over the groups.

One axis exists today (shard: all ranks). Its traffic runs over two groups, because a group executes its collectives in
the order in which they were issued: gathers must not queue behind reductions. Decisions between ranks (norms, flags,
handshakes) use a third group on CPU.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from shardengine.errors import UsageError

Group = dist.ProcessGroup | None


@dataclass(frozen=True)
class Mesh:
    """Who takes part. Groups are None at world size 1, where nothing is sent."""

    rank: int
    ranks: int
    device: torch.device
    gather: Group = None
    reduce: Group = None
    control: Group = None
    backend: str = "none"

    def destroy(self) -> None:
        """Give the groups back. The caller's own process group stays."""
        if dist.is_initialized():
            for group in (self.gather, self.reduce, self.control):
                if group is not None:
                    dist.destroy_process_group(group)


def build(device: torch.device | None = None, timeout_s: float = 600.0) -> Mesh:
    """The mesh of all ranks of the default process group; initialises that one from the launcher's environment.

    Without a process group and without a launcher (RANK and WORLD_SIZE unset) the mesh has one rank and no groups.
    """
    if device is None:
        device = default_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
            return Mesh(0, 1, device)
        if "MASTER_ADDR" not in os.environ:
            raise UsageError(
                "RANK and WORLD_SIZE are set but MASTER_ADDR is not: expected the environment of a launcher; start the "
                "program with torchrun or `shardengine train`, or call torch.distributed.init_process_group first"
            )
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timedelta(seconds=timeout_s))
    ranks = dist.get_world_size()
    if ranks == 1:
        return Mesh(0, 1, device)
    timeout = timedelta(seconds=timeout_s)
    backend = "nccl" if device.type == "cuda" and dist.is_nccl_available() else "gloo"
    gather = dist.new_group(backend=backend, timeout=timeout)
    reduce = dist.new_group(backend=backend, timeout=timeout)
    control = dist.new_group(backend="gloo", timeout=timeout)
    return Mesh(dist.get_rank(), ranks, device, gather, reduce, control, backend)


def default_device() -> torch.device:
    """This rank's GPU (LOCAL_RANK modulo the number of GPUs), else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    return torch.device("cpu")
