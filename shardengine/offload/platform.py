"""A device beside the host: its streams, when what they were given is done, and host memory that it copies from and to.

Must not know: what is copied and why, who keeps the memory.

[Note: Order by events] On CUDA a copy starts after everything that the current stream was given before it, and
``Done.wait`` lets a stream go on after the copy: two events, no host waits, no ``record_stream``. The allocator
knows nothing of a copy, so the caller keeps both tensors until the stream that uses their memory next has waited: what
is freed then, and given out again on that stream, is written after the copy has ended. A host buffer that only one
CopyStream reads and writes may be used for its next copy at once: one stream runs its copies in order. On a CPU a copy
is over when ``copy`` returns, and all of this is empty.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardengine.offload.host_memory import staging
from shardengine.trace import HostMoment, Moment, now

HOST = torch.device("cpu")


class Done:
    """The end of one copy, or of what a stream was given ([Note: Order by events])."""

    def __init__(self, event: torch.cuda.Event | None = None, issuer: torch.cuda.Stream | None = None) -> None:
        self._event = event
        self._issuer = issuer

    @property
    def reached(self) -> bool:
        """Whether the copy is over. Never blocks."""
        return self._event is None or self._event.query()

    def wait(self) -> None:
        """What the current stream is given from now on runs after the copy; so does what the copy's issuer is given.

        The host goes on at once. The issuer is the stream that was current when the copy began, whose allocator owns
        memory that was taken there for the copy; it may be another one where a finalizer or another thread waits.
        """
        if self._event is None or self._issuer is None:
            return
        current = torch.cuda.current_stream(self._issuer.device)
        for stream in {current, self._issuer}:
            stream.wait_event(self._event)

    def hold(self, stream: torch.cuda.Stream) -> None:
        """What ``stream`` is given from now on runs after it."""
        if self._event is not None:
            stream.wait_event(self._event)

    def wait_on_host(self) -> None:
        """Return when the copy is over: before the host reads what was copied to it, or writes what is copied from."""
        if self._event is not None:
            self._event.synchronize()


class DeviceMoment:
    """When ``stream`` has done what it was given so far (trace: [Note: Moments])."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = stream.record_event(torch.cuda.Event(enable_timing=True))

    @property
    def reached(self) -> bool:
        """As ``Moment``'s."""
        return bool(self._event.query())

    def since(self, earlier: DeviceMoment) -> int:
        """As ``Moment``'s."""
        return round(earlier._event.elapsed_time(self._event) * 1e6)

    def at(self, zero: DeviceMoment, time_of_zero: int) -> int:
        """As ``Moment``'s."""
        return time_of_zero + self.since(zero)

    def wait_on_host(self) -> int:
        """As ``Moment``'s."""
        self._event.synchronize()
        return now()


NOW = Done()
"""The end of what is over at once: nobody has to wait for it."""


class CopyStream:
    """Copies to and from ``device``, in the order in which they are asked for."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def copy(self, source: Tensor, target: Tensor, *after: Done) -> Done:
        """Begin ``target.copy_(source)``, of equal shapes, after what the current stream was given so far.

        after: behind these instead. Keep both tensors as [Note: Order by events] says.
        """
        if self._stream is None:
            target.copy_(source)
            return Done()
        issuer = torch.cuda.current_stream(self._stream.device)
        if not after:
            self._stream.wait_stream(issuer)
        for done in after:
            done.hold(self._stream)
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        return Done(self._stream.record_event(), issuer)

    @contextmanager
    def is_current(self) -> Iterator[None]:
        """Inside, a collective begins behind the copies, and not behind what the current stream was given before."""
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            yield


class Fetched:
    """Values of the device for the host, which waits for what the device was given until they were asked for and for
    no more."""

    def __init__(self, values: Tensor, done: Done) -> None:
        self._values = values
        self._done = done

    @property
    def reached(self) -> bool:
        """Whether they are here. Never blocks."""
        return self._done.reached

    def get(self) -> Tensor:
        """They, in host memory; waits."""
        self._done.wait_on_host()
        return self._values


def _page_lock(address: int, size: int) -> Callable[[], None] | None:
    """Let CUDA copy from and to this memory beside the computation; what ends that. None where it cannot be had."""
    runtime = torch.cuda.cudart()
    if int(runtime.cudaHostRegister(address, size, 0)):
        with suppress(RuntimeError):  # CUDA keeps what went wrong for the next kernel's launch, which torch then fails
            torch.ones(1, device="cuda")
        return None
    return lambda: runtime.cudaHostUnregister(address)


class Platform:
    """``device`` as the engine uses it. A CPU's memory is the host's, and nothing of it is done later."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def has_own_memory(self) -> bool:
        """Whether the device has a memory of its own, beside the host's, so that there is something to copy."""
        return self.device.type != HOST.type

    @property
    def autocast_type(self) -> str:
        """The type of device by which ``torch.autocast`` knows what is computed on it."""
        return self.device.type

    @property
    def alignment(self) -> int:
        """Bytes: tensors that begin at multiples of it look alike to the device's libraries, which choose by address.

        torch tells cuBLAS of each pointer up to 256; on a CPU a cache line is what matters.
        """
        return 256 if self.has_own_memory else 64

    def copy_stream(self) -> CopyStream:
        """A stream of its own for one purpose."""
        return CopyStream(self.device)

    @functools.cached_property
    def loads(self) -> CopyStream:
        """On which weights that are kept elsewhere come to the device."""
        return self.copy_stream()

    @functools.cached_property
    def saves(self) -> CopyStream:
        """On which what is written to a checkpoint at once comes to the host."""
        return self.copy_stream()

    def mark(self) -> Done:
        """The end of what the current stream was given so far."""
        if self.device.type != "cuda":
            return Done()
        stream = torch.cuda.current_stream(self.device)
        return Done(stream.record_event(), stream)

    def moment(self) -> Moment:
        """When the current stream has done what it was given so far, for the trace."""
        return HostMoment() if self.device.type != "cuda" else DeviceMoment(torch.cuda.current_stream(self.device))

    def synchronize(self) -> None:
        """Return when the device has done all that it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def here(self) -> torch.cuda.Stream | None:
        """The current stream; memory that is taken now is given out again there."""
        return torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None

    def come_home(self, home: torch.cuda.Stream | None) -> None:
        """Before memory is let go of that was taken ``home``: that stream goes on behind the current one."""
        if home is not None:
            home.wait_stream(torch.cuda.current_stream(self.device))

    def fetch(self, values: Tensor) -> Fetched:
        """Bring ``values`` to the host, behind what the current stream was given so far."""
        if values.device.type != "cuda":
            return Fetched(values, Done())
        here = self.host_empty(values.numel(), values.dtype, pinned=True).view(values.shape)
        here.copy_(values, non_blocking=True)
        return Fetched(here, self.mark())

    def empty(self, count: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor in the device's memory with undefined contents."""
        return torch.empty(count, dtype=dtype, device=self.device)

    def host_empty(self, count: int, dtype: torch.dtype, *, pinned: bool) -> Tensor:
        """A flat tensor in host memory with undefined contents. pinned: page-locked where that speeds up copies."""
        return torch.empty(count, dtype=dtype, device=HOST, pin_memory=pinned and self.device.type == "cuda")

    def host_buffer(self, count: int, *, pinned: bool) -> Tensor:
        """Zeros in host memory, uint8 [count], for what is on its way between the device and a disk (``staging``);
        pinned: page-locked for a GPU, which else would have the host wait for its copies."""
        return staging(count, _page_lock if pinned and self.device.type == "cuda" else None)

    def file_in_place_of(self, folder: Path) -> Any:
        """What has the interface of an ``ExtentFile``, and is used instead of one in ``folder``; None: nothing is."""
        return None

    def free_bytes(self) -> int:
        """Bytes of the device's own memory that nobody holds."""
        return int(torch.cuda.mem_get_info(self.device)[0])

    def free_cached(self) -> None:
        """What torch, or on a CPU malloc, keeps of the device's memory for its own later use is free for everybody."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        elif self.device.type == HOST.type:
            trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
            if trim is not None:
                trim(0)

    def use_in_this_thread(self) -> None:
        """A new thread would take, and begin to use, the first device."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
