"""`shardengine env`: the facts that a bug report needs. Owns: collecting them. Must not know: the engine.

The names of the machine and its user are not printed, so the output can be pasted unchanged. Versions come from package
metadata, so nothing is imported for them.
"""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import torch.distributed as dist

import shardengine
from shardengine import kernels
from shardengine.budget import bucket_elements, prefetch_elements
from shardengine.comm import (
    Collectives,
    GroupSpeed,
    cores,
    default_ranks,
    devices,
    launch,
    measure_gathers,
    measure_reduction,
    mesh,
)
from shardengine.errors import UsageError
from shardengine.kernels.native import library, processor
from shardengine.offload import BufferPool
from shardengine.planner import show_bytes

_PACKAGES = "torch triton numpy safetensors transformers tokenizers accelerate peft".split()
ALWAYS = (
    "OMP_NUM_THREADS GLOO_SOCKET_IFNAME NCCL_DEBUG NCCL_SOCKET_IFNAME CUDA_VISIBLE_DEVICES "
    "PYTORCH_ALLOC_CONF PYTORCH_CUDA_ALLOC_CONF"
).split()
WHERE_SET = (
    *"RANK WORLD_SIZE LOCAL_SIZE LOCAL_WORLD_SIZE GROUP_WORLD_SIZE MASTER_PORT CXX TRITON_INTERPRET".split(),
    "ACCELERATE_USE_DEEPSPEED",
    *"NCCL_LAUNCH_ORDER_IMPLICIT SHARDENGINE_DEVICE SHARDENGINE_ISA SHARDENGINE_KERNELS".split(),
    *"SHARDENGINE_LAUNCHED_RANK SHARDENGINE_NATIVE SHARDENGINE_THREADS".split(),
    *"TORCHELASTIC_MAX_RESTARTS TORCHELASTIC_RESTART_COUNT TORCHELASTIC_USE_AGENT_STORE".split(),
    *"SLURM_JOB_ID SLURM_NODEID SLURM_NTASKS SLURM_NTASKS_PER_NODE SLURM_PROCID SLURM_PTY_PORT SLURM_STEP_ID".split(),
    *"SLURM_STEP_NUM_TASKS SLURM_STEP_TASKS_PER_NODE SLURM_TASKS_PER_NODE".split(),
    *"OMPI_COMM_WORLD_LOCAL_SIZE OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE".split(),
    *"MPI_LOCALNRANKS PMI_RANK PMI_SIZE".split(),
    *devices.LOCAL_RANKS,
)
"""Shown if set, as are all that begin with TORCH_NCCL_."""
PRIVATE = (
    "MASTER_ADDR SLURM_JOB_NODELIST SLURM_STEP_NODELIST TORCHELASTIC_RUN_ID SHARDENGINE_CACHE SHARDENGINE_CONTROL_DIR "
    "PYTHONPATH XDG_CACHE_HOME MLFLOW_EXPERIMENT_ID MLFLOW_EXPERIMENT_NAME"
).split()
"""Only shown as "set", because their values may name a machine or its user."""


def describe(ranks: int | None = None) -> str:
    """Return the text, one ``name: value`` per line. ranks: starts so many here and measures their group."""
    rows = {"shardengine": shardengine.__version__, "python": f"{platform.python_version()} on {platform.platform()}"}
    rows |= {package: _version(package) for package in _PACKAGES}
    rows["distributed"] = _backends()
    rows["CUDA"] = _cuda()
    rows["device"] = _device()
    brand = processor.processor().brand
    rows["CPU"] = f"{brand}, {cores()} of {os.cpu_count()} cores usable, {torch.get_num_threads()} torch threads"
    rows["CPU kernels"] = _kernels()
    rows["CPU capability"] = torch.backends.cpu.get_cpu_capability()
    rows["memory"] = _memory()
    rows["group of ranks"] = _group(ranks)
    rows |= {name: os.environ.get(name, "not set") for name in ALWAYS}
    rows |= {name: _told(name) for name in sorted(os.environ) if _tells(name)}
    return "\n".join(f"{name}: {value}" for name, value in rows.items())


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _backends() -> str:
    if not dist.is_available():
        return "not available in this build of torch"
    found = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available(), "mpi": dist.is_mpi_available()}
    return ", ".join(name for name, there in found.items() if there) or "no backend"


def _cuda() -> str:
    if not torch.cuda.is_available():
        return f"no GPU (torch built for CUDA {torch.version.cuda or 'none'})"
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else "none"
    return f"{torch.version.cuda}, NCCL {nccl}, {len(names)} GPU(s): {', '.join(sorted(set(names)))}"


def _device() -> str:
    """Return the device that this process would use, alone or as the rank that its launcher names, with the reason."""
    try:
        choice = devices.choose([devices.facts()], 0)
        return (
            f"{choice.device} ({choice.why}), {choice.backend} between ranks; `train` starts {default_ranks()} rank(s)"
        )
    except UsageError as error:
        return str(error)


def _tells(name: str) -> bool:
    return name in WHERE_SET or name in PRIVATE or name.startswith("TORCH_NCCL_")


def _told(name: str) -> str:
    return "set" if name in PRIVATE else os.environ[name]


def _kernels() -> str:
    """Return the kernels' implementation, and whether py-cpuinfo finds the same instruction sets."""
    try:
        if (said := kernels.wanted()) not in ("auto", "native"):
            return f"{said} (SHARDENGINE_KERNELS)"
        loaded = library.load()
    except UsageError as error:
        return str(error)
    if loaded is None:
        return "torch (SHARDENGINE_NATIVE=require says why)"
    doubts = processor.disagreements(loaded, processor.processor())
    return f"native, {processor.name_of(loaded)} ({'; '.join(doubts) or 'py-cpuinfo agrees'})"


def _group(ranks: int | None) -> str:
    """Return the fit of a group of so many ranks on this machine, and the values that "auto" derives from it."""
    if ranks is None:
        return "not measured (--ranks N starts N ranks and measures it)"
    if ranks == 1:
        return "one rank, nothing to measure"
    reduction, gather, apart = launch(measure, ranks)[0]
    sizes = ", ".join(f"{bucket_elements(reduction, count, 4, apart=apart):,} of {count:,}" for count in _MODEL_SIZES)
    return (
        f"{ranks} ranks, reductions take {reduction}, gathers take {gather}; in fp32 reduce_bucket_size auto is "
        f"{sizes} elements, stage3_prefetch_bucket_size auto is {prefetch_elements(gather, 4):,}"
    )


_MODEL_SIZES = (100_000_000, 1_000_000_000)


def measure() -> tuple[GroupSpeed, GroupSpeed, bool]:
    """Measure, on a rank, reductions and gathers of fp32; return also whether the device has a memory of its own."""
    made = mesh.build(owned=True)
    collectives = Collectives(made, BufferPool(made.platform), direct=made.backend != "nccl")
    try:
        speeds = measure_reduction(collectives, torch.float32), measure_gathers(collectives, torch.float32)
        return *speeds, made.platform.has_own_memory
    finally:
        made.destroy()


def _memory() -> str:
    """Return total and available memory from /proc/meminfo, or "unknown" if that does not exist."""
    path = Path("/proc/meminfo")
    if not path.exists():
        return "unknown"
    lines = dict(line.split(":", 1) for line in path.read_text(encoding="utf-8").splitlines())
    total, free = (int(lines[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    return f"{show_bytes(total)}, {show_bytes(free)} available"
