"""A device beside the host: its streams, the ends of their work, and the host memory that it copies from and to.

Must not know: which tensors are copied and why, who keeps the memory.

[Note: Order by events] On CUDA a copy starts after all work that was queued on the current stream before it, and
``Done.wait`` lets a stream go on after the copy: two events, no host waits, no ``record_stream``. The allocator knows
nothing of a copy. So the caller keeps both tensors until the stream that uses their memory next has waited: memory that
is freed then, and allocated again on that stream, is written after the copy has ended. If only one CopyStream reads and
writes a host buffer, the buffer may be used for the next copy at once, because one stream runs its copies in order. On
a CPU a copy is over when ``copy`` returns, and all of this does nothing.
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
    """The end of one copy, or of the work queued on a stream ([Note: Order by events])."""

    def __init__(self, event: torch.cuda.Event | None = None, issuer: torch.cuda.Stream | None = None) -> None:
        self._event = event
        self._issuer = issuer

    @property
    def reached(self) -> bool:
        """Whether the copy is over. Never blocks."""
        return self._event is None or self._event.query()

    def wait(self) -> None:
        """Make later work of the current stream, and of the stream that issued the copy, run after the copy.

        The host goes on at once. The issuing stream is the one that was current when the copy began; its allocator owns
        memory that was allocated there for the copy. It may differ from the current stream if a finalizer or another
        thread waits.
        """
        if self._event is None or self._issuer is None:
            return
        current = torch.cuda.current_stream(self._issuer.device)
        for stream in {current, self._issuer}:
            stream.wait_event(self._event)

    def hold(self, stream: torch.cuda.Stream) -> None:
        """Make later work of ``stream`` run after it."""
        if self._event is not None:
            stream.wait_event(self._event)

    def wait_on_host(self) -> None:
        """Block until the copy is over: before the host reads the target of the copy, or writes its source."""
        if self._event is not None:
            self._event.synchronize()


class DeviceMoment:
    """The moment when ``stream`` has done the work queued on it so far (trace: [Note: Moments])."""

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
"""An end that is reached already: nobody has to wait for it."""


class CopyStream:
    """Copies to and from ``device``, in the order of the calls."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def copy(self, source: Tensor, target: Tensor, *after: Done) -> Done:
        """Begin ``target.copy_(source)``, of equal shapes, after the work queued on the current stream so far.

        after: if given, the copy begins after these instead. Keep both tensors as [Note: Order by events] describes.
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
        """Make this the current stream: a collective inside begins after the copies, not after the caller's stream."""
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            yield


class Fetched:
    """Values of the device for the host, which waits for the device's work up to the request and for no later work."""

    def __init__(self, values: Tensor, done: Done) -> None:
        self._values = values
        self._done = done

    @property
    def reached(self) -> bool:
        """Whether the values are in host memory. Never blocks."""
        return self._done.reached

    def get(self) -> Tensor:
        """Wait for the values and return them, in host memory."""
        self._done.wait_on_host()
        return self._values


def _page_lock(address: int, size: int) -> Callable[[], None] | None:
    """Page-lock this memory, so that CUDA copies it concurrently with the computation. Return the undo function.

    Returns None if the memory cannot be locked.
    """
    runtime = torch.cuda.cudart()
    if int(runtime.cudaHostRegister(address, size, 0)):
        with suppress(RuntimeError):  # CUDA keeps the error, and torch would raise it at the next kernel's launch
            torch.ones(1, device="cuda")
        return None
    return lambda: runtime.cudaHostUnregister(address)


class Platform:
    """The operations of ``device`` that the engine uses.

    On a CPU device memory is host memory, and work is never deferred.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def has_own_memory(self) -> bool:
        """Whether the device has memory of its own, separate from the host's, so that tensors have to be copied."""
        return self.device.type != HOST.type

    @property
    def autocast_type(self) -> str:
        """The device type that ``torch.autocast`` takes for computation on this device."""
        return self.device.type

    @property
    def alignment(self) -> int:
        """The alignment, in bytes, that makes tensors look alike to libraries which choose kernels by address.

        torch reports the alignment of each pointer to cuBLAS, up to 256; on a CPU a cache line matters.
        """
        return 256 if self.has_own_memory else 64

    def copy_stream(self) -> CopyStream:
        """Return a new stream for one purpose."""
        return CopyStream(self.device)

    @functools.cached_property
    def loads(self) -> CopyStream:
        """The stream that copies offloaded weights to the device."""
        return self.copy_stream()

    @functools.cached_property
    def saves(self) -> CopyStream:
        """The stream that copies to the host the tensors that are written to a checkpoint at once."""
        return self.copy_stream()

    def mark(self) -> Done:
        """Return the end of the work queued on the current stream so far."""
        if self.device.type != "cuda":
            return Done()
        stream = torch.cuda.current_stream(self.device)
        return Done(stream.record_event(), stream)

    def moment(self) -> Moment:
        """Return the moment when the current stream has done the work queued on it so far, for the trace."""
        return HostMoment() if self.device.type != "cuda" else DeviceMoment(torch.cuda.current_stream(self.device))

    def synchronize(self) -> None:
        """Block until the device has done all queued work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def here(self) -> torch.cuda.Stream | None:
        """Return the current stream; memory that is allocated now is reused on it."""
        return torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None

    def come_home(self, home: torch.cuda.Stream | None) -> None:
        """Make the stream ``home`` go on after the current one.

        Call it before you free memory that was allocated on ``home``.
        """
        if home is not None:
            home.wait_stream(torch.cuda.current_stream(self.device))

    def fetch(self, values: Tensor) -> Fetched:
        """Bring ``values`` to the host, after the work queued on the current stream so far."""
        if values.device.type != "cuda":
            return Fetched(values, Done())
        here = self.host_empty(values.numel(), values.dtype, pinned=True).view(values.shape)
        here.copy_(values, non_blocking=True)
        return Fetched(here, self.mark())

    def empty(self, count: int, dtype: torch.dtype) -> Tensor:
        """Return a flat tensor in the device's memory with undefined contents."""
        return torch.empty(count, dtype=dtype, device=self.device)

    def host_empty(self, count: int, dtype: torch.dtype, *, pinned: bool) -> Tensor:
        """Return a flat tensor in host memory with undefined contents. pinned: page-locked if that speeds up copies."""
        return torch.empty(count, dtype=dtype, device=HOST, pin_memory=pinned and self.device.type == "cuda")

    def host_buffer(self, count: int, *, pinned: bool) -> Tensor:
        """Return zeros in host memory, uint8 [count], for data on its way between the device and a disk (``staging``).

        pinned: page-locked for a GPU; without it the host waits for the GPU's copies.
        """
        return staging(count, _page_lock if pinned and self.device.type == "cuda" else None)

    def file_in_place_of(self, folder: Path) -> Any:
        """Return an object to use in place of an ``ExtentFile`` in ``folder``, with its interface, or None."""
        return None

    def free_bytes(self) -> int:
        """Return the free bytes of the device's own memory."""
        return int(torch.cuda.mem_get_info(self.device)[0])

    def free_cached(self) -> None:
        """Release the device memory that torch's allocator, or malloc on a CPU, keeps for later use."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        elif self.device.type == HOST.type:
            trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
            if trim is not None:
                trim(0)

    def use_in_this_thread(self) -> None:
        """Make this the current device of a new thread, which otherwise would use the first device."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
