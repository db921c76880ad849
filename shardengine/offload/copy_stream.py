"""Copies between device and host beside the computation. Owns: a stream per purpose, and when a copy is done.

Must not know: what is copied and why, who keeps the memory.

[Note: Order by events] On CUDA a copy starts after everything that the current stream was given before it, and
``Done.wait`` lets a stream go on after the copy: two events, no host waits, no ``record_stream``. The allocator
knows nothing of a copy, so the caller keeps both tensors until the stream that uses their memory next has waited: what
is freed then, and given out again on that stream, is written after the copy has ended. A host buffer that only one
CopyStream reads and writes may be used for its next copy at once: one stream runs its copies in order. On a CPU a copy
is over when ``copy`` returns, and all of this is empty.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Done:
    """The end of one copy ([Note: Order by events])."""

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

    def wait_on_host(self) -> None:
        """Return when the copy is over: before the host reads what was copied to it, or writes what is copied from."""
        if self._event is not None:
            self._event.synchronize()


class CopyStream:
    """Copies to and from ``device``, in the order in which they are asked for."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def copy(self, source: Tensor, target: Tensor) -> Done:
        """Begin ``target.copy_(source)``, after what the current stream was given so far; of equal shapes.

        Keep both tensors as [Note: Order by events] says.
        """
        if self._stream is None:
            target.copy_(source)
            return Done()
        issuer = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(issuer)
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        return Done(self._stream.record_event(), issuer)


def mark(device: torch.device) -> Done:
    """The end of what the current stream of ``device`` was given so far; on a CPU that is over."""
    if device.type != "cuda":
        return Done()
    stream = torch.cuda.current_stream(device)
    return Done(stream.record_event(), stream)


def is_apart(device: torch.device) -> bool:
    """Whether ``device`` has a memory of its own, beside the host's, so that there is something to copy and to pin."""
    return device.type != "cpu"
