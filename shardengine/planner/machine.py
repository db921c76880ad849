"""Describes this machine as ``Hardware`` for the ranks of a run that is about to begin here.

Must not know: engines, which device a rank chooses.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

import torch

from shardengine.comm import devices
from shardengine.config import Config
from shardengine.planner.hardware import Hardware

_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""The files with a container's memory limit, of cgroup versions 2 and 1."""


def this_machine(device: torch.device, ranks: int, config: Config) -> Hardware:
    """Return the hardware of ``ranks`` ranks like this one.

    The launcher gives the ranks per machine; by default all are here.

    device: that this rank computes on · config: gives the disk, if it uses one. All memory counts, even if other
    processes use some of it now.
    """
    said = os.environ.get(devices.LOCAL_SIZE, "")
    local = int(said) if said.isdecimal() and int(said) else ranks
    here = local if ranks % local == 0 else ranks
    host = host_bytes() // max(local, here) * here  # the rest belongs to other processes of this machine
    disk = _disk_bytes(config)
    if device.type == "cpu":
        return Hardware(ranks, host // here, None, disk, here, is_gpu=False)
    return Hardware(ranks, torch.cuda.get_device_properties(device).total_memory, host, disk, here)


def host_bytes() -> int:
    """Return the bytes of this machine's memory, or the container's limit."""
    found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in _LIMITS:
        with suppress(OSError, ValueError):
            found = min(found, int(path.read_text(encoding="ascii")))
    return found


def _disk_bytes(config: Config) -> int | None:
    """Return the free bytes on the disk of the config's tier nvme; None if the config has none."""
    zero = config.zero_optimization
    places = [each.nvme_path for each in (zero.offload_optimizer, zero.offload_param) if each.device == "nvme"]
    for place in filter(None, places):
        path = Path(place).absolute()
        return shutil.disk_usage(next(each for each in (path, *path.parents) if each.exists())).free
    return None
