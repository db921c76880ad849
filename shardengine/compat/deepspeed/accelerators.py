"""deepspeed.accelerator: device queries of scripts, answered by torch.cuda if there is a GPU, else for the CPU.

Must not know: engines. On a CPU there are no streams and events, and memory is the host memory of this process.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from shardengine.errors import UsageError

_KINDS = ("cuda", "cpu")


def _on_gpu() -> bool:
    return torch.cuda.is_available()


def _resident() -> int:
    """Return the resident host memory of this process in bytes."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _most_resident() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _of_memory(name: str, on_cpu: Callable[[], int]) -> Callable[..., int]:
    def ask(_self: Accelerator, device_index: int | None = None) -> int:
        return int(getattr(torch.cuda, name)(device_index)) if _on_gpu() else on_cpu()

    ask.__doc__ = f"Bytes: ``torch.cuda.{name}``; on a CPU of the host's memory."
    return ask


def _of_device(name: str) -> Callable[..., None]:
    def call(_self: Accelerator, device_index: int | None = None) -> None:
        if _on_gpu():
            getattr(torch.cuda, name)(device_index)

    call.__doc__ = f"``torch.cuda.{name}``; on a CPU nothing."
    return call


class Accelerator:
    """DeepSpeed's accelerator for CUDA devices, or for the CPU."""

    @property
    def _name(self) -> str:
        return self.device_name()

    def device_name(self, device_index: int | None = None) -> str:
        """Return "cuda", "cuda:0" or "cpu"."""
        kind = "cuda" if _on_gpu() else "cpu"
        return kind if device_index is None or kind == "cpu" else f"{kind}:{device_index}"

    def device(self, device_index: int | None = None) -> AbstractContextManager[Any]:
        """Return a context manager that makes the device current."""
        return torch.cuda.device(device_index) if _on_gpu() and device_index is not None else nullcontext()

    def current_device_name(self) -> str:
        """Return the name of the current device."""
        return self.device_name(torch.cuda.current_device() if _on_gpu() else None)

    def current_device(self) -> int | str:
        """Return the index of the current device; "cpu" on a CPU."""
        return torch.cuda.current_device() if _on_gpu() else "cpu"

    def device_count(self) -> int:
        """Return the number of visible devices; on a CPU the launcher's processes on this machine, at least 1."""
        launched = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or "1"
        return torch.cuda.device_count() if _on_gpu() else max(1, int(launched))

    def is_available(self) -> bool:
        """Return True: there always is a device."""
        return True

    def is_synchronized_device(self) -> bool:
        """Return whether an operation is complete when its call returns."""
        return not _on_gpu()

    use_host_timers = resolves_data_dependency = handles_memory_backpressure = is_synchronized_device

    set_device = _of_device("set_device")
    synchronize = _of_device("synchronize")
    reset_peak_memory_stats = _of_device("reset_peak_memory_stats")
    reset_max_memory_allocated = _of_device("reset_max_memory_allocated")
    reset_max_memory_cached = _of_device("reset_max_memory_cached")

    def empty_cache(self) -> None:
        """Return unused cached memory to the device."""
        if _on_gpu():
            torch.cuda.empty_cache()

    # Random numbers

    def random(self) -> Any:
        """Return the module torch.random."""
        return torch.random

    def manual_seed(self, seed: int) -> None:
        """Seed the generator of the current device."""
        if _on_gpu():
            torch.cuda.manual_seed(seed)
        else:
            torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        """Seed the generators of all visible devices; on a CPU the default generator."""
        if _on_gpu():
            torch.cuda.manual_seed_all(seed)
        else:
            torch.manual_seed(seed)

    def initial_seed(self) -> int:
        """Return the initial seed of the current device."""
        return torch.cuda.initial_seed() if _on_gpu() else torch.initial_seed()

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        """Return the random state of the given device, by default the current one."""
        if not _on_gpu():
            return torch.get_rng_state()
        return torch.cuda.get_rng_state() if device_index is None else torch.cuda.get_rng_state(device_index)

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        """Set the random state of the given device, by default the current one."""
        if not _on_gpu():
            torch.set_rng_state(new_state)
        elif device_index is None:
            torch.cuda.set_rng_state(new_state)
        else:
            torch.cuda.set_rng_state(new_state, device_index)

    def default_generator(self, device_index: int) -> torch.Generator:
        """Return the default generator of a device."""
        return torch.cuda.default_generators[device_index] if _on_gpu() else torch.default_generator

    # Streams

    @property
    def Stream(self) -> Any:
        """torch.cuda.Stream; None on a CPU."""
        return torch.cuda.Stream if _on_gpu() else None

    @property
    def Event(self) -> Any:
        """torch.cuda.Event; None on a CPU."""
        return torch.cuda.Event if _on_gpu() else None

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Return a context manager that makes the stream current."""
        return torch.cuda.stream(stream) if _on_gpu() else nullcontext()

    def current_stream(self, device_index: int | None = None) -> Any:
        """Return the current stream; None on a CPU."""
        return torch.cuda.current_stream(device_index) if _on_gpu() else None

    def default_stream(self, device_index: int | None = None) -> Any:
        """Return the default stream; None on a CPU."""
        return torch.cuda.default_stream(device_index) if _on_gpu() else None

    # Memory

    memory_allocated = _of_memory("memory_allocated", _resident)
    max_memory_allocated = _of_memory("max_memory_allocated", _most_resident)
    memory_cached = memory_reserved = _of_memory("memory_reserved", _resident)
    max_memory_cached = max_memory_reserved = _of_memory("max_memory_reserved", _most_resident)

    def memory_stats(self, device_index: int | None = None) -> dict[str, Any]:
        """Return torch.cuda.memory_stats; on a CPU the current and peak resident memory."""
        if _on_gpu():
            return dict(torch.cuda.memory_stats(device_index))
        return {"allocated_bytes.all.current": _resident(), "allocated_bytes.all.peak": _most_resident()}

    def total_memory(self, device_index: int | None = None) -> int:
        """Return the bytes of memory of the device, or of the host."""
        if _on_gpu():
            return int(torch.cuda.mem_get_info(device_index)[1])
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def available_memory(self, device_index: int | None = None) -> int:
        """Return the bytes of free memory of the device, or of the host."""
        if _on_gpu():
            return int(torch.cuda.mem_get_info(device_index)[0])
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")

    def pin_memory(self, tensor: torch.Tensor, make_copy: bool = True, match_shape: bool = True) -> torch.Tensor:
        """Return ``tensor`` in page-locked memory; on a CPU ``tensor`` itself."""
        return tensor.pin_memory() if _on_gpu() else tensor

    def unpin_memory(self, tensor: torch.Tensor) -> None:
        """Do nothing: memory is unpinned when the tensor is freed."""

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` is in page-locked memory."""
        return tensor.is_pinned() if _on_gpu() else False

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` is on a device of this kind."""
        return tensor.device.type == self.device_name()

    # Capabilities

    def is_bf16_supported(self) -> bool:
        """Return whether the device computes in bf16."""
        return torch.cuda.is_bf16_supported() if _on_gpu() else True

    def is_fp16_supported(self) -> bool:
        """Return whether the device computes in fp16."""
        return True

    def is_fp64_supported(self) -> bool:
        """Return whether the device computes in fp64."""
        return True

    def is_triton_supported(self) -> bool:
        """Return whether Triton compiles for the device."""
        return _on_gpu() and torch.cuda.get_device_capability() >= (8, 0)

    def supported_dtypes(self) -> list[torch.dtype]:
        """Return the dtypes that weights may have."""
        return [torch.float, torch.half, *([torch.bfloat16] if self.is_bf16_supported() else [])]

    def communication_backend_name(self) -> str:
        """Return the backend of torch.distributed for this device."""
        return "nccl" if _on_gpu() else "gloo"

    def range_push(self, msg: str, *_: Any, **__: Any) -> None:
        """Begin an NVTX range; on a CPU do nothing."""
        if _on_gpu():
            torch.cuda.nvtx.range_push(msg)

    def range_pop(self, *_: Any, **__: Any) -> None:
        """End the last NVTX range; on a CPU do nothing."""
        if _on_gpu():
            torch.cuda.nvtx.range_pop()

    def lazy_call(self, callback: Callable[[], Any]) -> Any:
        """Call ``callback`` now."""
        return callback()

    def get_compile_backend(self) -> str:
        """Return the default backend of torch.compile."""
        return "inductor"

    def visible_devices_envs(self) -> list[str]:
        """Return the environment variables that select the visible devices."""
        return ["CUDA_VISIBLE_DEVICES"]

    def export_envs(self) -> list[str]:
        """Return prefixes of environment variables that a launcher passes on to other machines."""
        return ["NCCL"] if _on_gpu() else []

    def __getattr__(self, name: str) -> Any:
        kinds = {"BFloat16Tensor", "ByteTensor", "DoubleTensor", "FloatTensor", "HalfTensor", "IntTensor", "LongTensor"}
        if name in kinds:
            return getattr(torch.cuda if _on_gpu() else torch, name)
        raise AttributeError(
            f"deepspeed's accelerator has no {name!r} here: expected a question about devices, memory, streams or "
            "random numbers; operators that are compiled are not available",
            name=name,
            obj=self,
        )


_ACCELERATOR = Accelerator()


def get_accelerator() -> Accelerator:
    """Return the accelerator of this process."""
    return _ACCELERATOR


def set_accelerator(accelerator: Any) -> None:
    """Raise UsageError unless ``accelerator`` is the one of this process, which torch determines."""
    if accelerator is not _ACCELERATOR:
        raise UsageError(
            f"set_accelerator: expected get_accelerator()'s, got {type(accelerator).__name__}; a GPU is used where "
            "torch sees one, else the CPU",
            code="deepspeed-accelerator-unknown",
        )


def is_current_accelerator_supported() -> bool:
    """Return whether the engine trains on the current accelerator."""
    return _ACCELERATOR.device_name() in _KINDS


NAMES: dict[str, Any] = {
    "get_accelerator": get_accelerator,
    "accelerator.get_accelerator": get_accelerator,
    "accelerator.real_accelerator.get_accelerator": get_accelerator,
    "accelerator.set_accelerator": set_accelerator,
    "accelerator.is_current_accelerator_supported": is_current_accelerator_supported,
    "accelerator.DeepSpeedAccelerator": Accelerator,
    "accelerator.abstract_accelerator.DeepSpeedAccelerator": Accelerator,
    "runtime.zero.partition_parameters.get_accelerator": get_accelerator,
}
"""Dotted name → the object."""
