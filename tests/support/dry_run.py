"""Engines on torch's meta device: of any size, as one of any number of ranks, without memory.

Tensors there have a shape, a dtype and strides, and no values. So whatever mixes host and device, or needs a value of
the device on the host, cannot be computed; ``Border`` sees where that is tried. Nothing is sent: what an engine asks of
the other ranks on the host is answered as if each had said the same, and of the device's data nothing is needed.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import shardengine
from shardengine.comm import Wire
from shardengine.offload import HOST, CopyStream, Done, Fetched, Platform
from shardengine.planner import AbsentMesh, Silent, absent_mesh

META = torch.device("meta")
_aten = torch.ops.aten

# The ranks that are not there


class SilentWire(Wire):
    """Carries nothing. What is on the host is received as if every rank had sent the same.

    issued: (operation, name of the group) → how many.
    """

    def __init__(self, ranks: int) -> None:
        self.issued: Counter[tuple[str, str]] = Counter()
        self._ranks = ranks

    def broadcast(self, tensor: Tensor, source: int, group: Any) -> dist.Work:
        """See ``Wire``."""
        if not 0 <= source < self._ranks:
            raise AssertionError(f"broadcast: expected a source of {self._ranks} ranks, got {source}")
        return self._begin("broadcast", group, tensor)

    def all_gather(self, out: Tensor, own: Tensor, group: Any) -> dist.Work:
        """See ``Wire``."""
        self._require_ratio("all_gather", out, own)
        if not own.is_meta:
            out.view(self._ranks, -1).copy_(own.clone())
        return self._begin("all_gather", group, out, own)

    def reduce_scatter(self, out: Tensor, full: Tensor, group: Any) -> dist.Work:
        """See ``Wire``."""
        self._require_ratio("reduce_scatter", full, out)
        return self._begin("reduce_scatter", group, out, full)

    def all_to_all(self, out: Tensor, full: Tensor, group: Any) -> dist.Work:
        """See ``Wire``."""
        if out.numel() != full.numel() or full.numel() % self._ranks:
            raise AssertionError(f"all_to_all: expected {self._ranks} equal slices, got {full.numel()}, {out.numel()}")
        return self._begin("all_to_all", group, out, full)

    def _require_ratio(self, name: str, large: Tensor, small: Tensor) -> None:
        if large.numel() != self._ranks * small.numel():
            raise AssertionError(f"{name}: expected {self._ranks} × {small.numel()} elements, got {large.numel()}")

    def _begin(self, name: str, group: Any, *tensors: Tensor) -> dist.Work:
        kinds = {(tensor.device.type, tensor.dtype, tensor.dim(), tensor.is_contiguous()) for tensor in tensors}
        expected = HOST.type if group == "control" else META.type
        if len(kinds) != 1 or any(kind[0] != expected or kind[2:] != (1, True) for kind in kinds):
            raise AssertionError(f"{name} over {group}: expected flat contiguous tensors on {expected}, got {kinds}")
        self.issued[name, group] += 1
        return Silent()


def dry_mesh(
    ranks: int,
    rank: int = 0,
    *,
    backend: str = "nccl",
    platform: Callable[[torch.device], Platform] | None = None,
    wire: SilentWire | None = None,
) -> AbsentMesh:
    """``rank`` of ``ranks`` on the meta device, used as ``backend`` is. platform: what makes the device's platform."""
    return absent_mesh(
        ranks, rank, META, backend=backend, platform=platform or DryPlatform, wire=wire or SilentWire(ranks)
    )


# The border between host and device


class Crossing(NamedTuple):
    """Something between host and device. place: "file:function" of the product, or "" where it was the caller's.

    what: "to host" or "to device", a copy · "read": the host needs a value of the device · "wait": the host waits for
    what the device was given. how: of a copy: "blocking", "asynchronous" (from or to page-locked memory), "pageable"
    (asked for as asynchronous, which it cannot be), "stream" (a CopyStream's, page-locked), "pageable stream".
    """

    place: str
    what: str
    how: str = ""


class Log:
    """Crossings, how many of each, and where one was seen first ("file:line")."""

    def __init__(self) -> None:
        self.seen: Counter[Crossing] = Counter()
        self.lines: dict[Crossing, str] = {}
        self.pinned_bytes = 0
        self._lock = threading.Lock()

    def note(self, what: str, how: str = "") -> None:
        """It happens now."""
        place, line = _place()
        crossing = Crossing(place, what, how)
        with self._lock:
            self.seen[crossing] += 1
            self.lines.setdefault(crossing, line)

    def take(self) -> Counter[Crossing]:
        """What was seen since the last call."""
        with self._lock:
            seen, self.seen = self.seen, Counter()
        return seen


_PACKAGE = f"{Path(shardengine.__file__).parent}/"
_PASSED_THROUGH = ("offload/platform.py", "offload/copy_queue.py", "offload/pool.py")
"""Files that carry out what others ask for: the place is the one that asked."""


def _place() -> tuple[str, str]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        name = code.co_filename.removeprefix(_PACKAGE)
        if name != code.co_filename and name not in _PASSED_THROUGH:
            return f"{name}:{code.co_qualname}", f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return "", ""


_pinned: weakref.WeakValueDictionary[int, torch.UntypedStorage] = weakref.WeakValueDictionary()


def _is_pinned(tensor: Tensor) -> bool:
    storage = tensor.untyped_storage()
    return _pinned.get(storage._cdata) is storage


def _asynchronous(host: Tensor, how: str, otherwise: str) -> str:
    return how if _is_pinned(host) else otherwise


class DryDone(Done):
    """What the device was given is over when the host has waited for it, and not before."""

    def __init__(self, log: Log) -> None:
        super().__init__()
        self._log = log
        self._over = False

    @property
    def reached(self) -> bool:
        """Whether the host has waited."""
        return self._over

    def wait_on_host(self) -> None:
        """A crossing, once."""
        if not self._over:
            self._log.note("wait")
            self._over = True


class DryStream(CopyStream):
    """Copies nothing between host and device. What comes to the host is zero."""

    def __init__(self, log: Log) -> None:
        super().__init__(META)
        self._log = log

    def copy(self, source: Tensor, target: Tensor, *after: Done) -> Done:
        """See ``CopyStream``; AssertionError where a stream would not carry it out as one copy of bytes."""
        forms = {(t.dtype, t.shape, t.is_contiguous()) for t in (source, target)}
        if not (source.is_meta or target.is_meta):
            target.copy_(source)
            return Done()
        if len(forms) != 1 or (source.is_meta and target.is_meta):
            raise AssertionError(f"a stream was asked to copy {_form(source)} to {_form(target)}")
        host = target if source.is_meta else source
        self._log.note("to host" if source.is_meta else "to device", _asynchronous(host, "stream", "pageable stream"))
        if source.is_meta:
            target.zero_()
        return DryDone(self._log)


class DryFetched(Fetched):
    """Values that the host waits for when it takes them."""

    def __init__(self, values: Tensor, log: Log) -> None:
        super().__init__(values, Done())
        self._log = log
        self._taken = False

    @property
    def reached(self) -> bool:
        """Whether they were taken."""
        return self._taken

    def get(self) -> Tensor:
        """They; a crossing, once."""
        if not self._taken:
            self._log.note("read")
            self._taken = True
        return super().get()


class DryPlatform(Platform):
    """The meta device as a device apart. ``flag``: what a fetched flag says."""

    def __init__(self, device: torch.device, log: Log | None = None, *, flag: bool = False) -> None:
        super().__init__(device)
        self.log = Log() if log is None else log
        self.flag = flag

    @property
    def autocast_type(self) -> str:
        """torch has no autocast for the meta device."""
        return HOST.type

    def copy_stream(self) -> CopyStream:
        """See ``Platform``."""
        return DryStream(self.log)

    def mark(self) -> Done:
        """See ``Platform``."""
        return DryDone(self.log)

    def fetch(self, values: Tensor) -> Fetched:
        """Zeros, or ``flag``."""
        if not values.is_meta:
            return Fetched(values, Done())
        number = self.flag if values.dtype is torch.bool else 0
        return DryFetched(torch.full(values.shape, number, dtype=values.dtype), self.log)

    def host_empty(self, count: int, dtype: torch.dtype, *, pinned: bool) -> Tensor:
        """See ``Platform``. Ordinary memory, of which is known whether it was to be page-locked."""
        made = torch.zeros(count, dtype=dtype)
        return self._pin(made) if pinned else made

    def host_buffer(self, count: int, *, pinned: bool) -> Tensor:
        """See ``Platform``."""
        made = super().host_buffer(count, pinned=pinned)
        return self._pin(made) if pinned else made

    def _pin(self, made: Tensor) -> Tensor:
        storage = made.untyped_storage()
        _pinned[storage._cdata] = storage
        self.log.pinned_bytes += made.nbytes
        return made

    def free_bytes(self) -> int:
        """Of a large device."""
        return 80 << 30


_COPIES = {_aten.copy_.default, _aten._to_copy.default}
_READS = {
    _aten._local_scalar_dense.default, _aten.equal.default, _aten.is_nonzero.default, _aten.allclose.default,
    _aten.nonzero.default, _aten.masked_select.default, _aten.repeat_interleave.Tensor, _aten._unique2.default,
}  # fmt: skip
"""What cannot be done without values of the device on the host."""
_INDEXED = {_aten.index.Tensor, _aten.index_put_.default, _aten.index_put.default}


class Border(TorchDispatchMode):
    """Inside, every operation of this thread is looked at: what crosses the border is written to ``log``.

    A read is answered with zero, or ``flag`` where it is of a flag; a copy to the host brings zeros. AssertionError
    where an operation mixes host and device otherwise; scalars of the host are no mixing, they travel with the launch.
    """

    def __init__(self, log: Log, *, flag: bool = False) -> None:
        super().__init__()
        self.log = log
        self._flag = flag
        self._functions = _Functions(log)

    def __enter__(self) -> Any:
        """Look."""
        self._functions.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        """Look no longer."""
        super().__exit__(*error)
        self._functions.__exit__(*error)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """One operation."""
        kwargs = kwargs or {}
        if func in _COPIES:
            return self._copy(func, args, kwargs)
        tensors = list(_tensors((*args, *kwargs.values())))
        if not any(tensor.is_meta for tensor in tensors):
            return func(*args, **kwargs)
        if func in _READS:
            return self._read(func, args, kwargs)
        on_host = [tensor for tensor in tensors if not tensor.is_meta]
        if on_host:
            self._mixed(func, args, on_host)
        return func(*args, **kwargs)

    def _copy(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        asked = bool(kwargs.get("non_blocking", len(args) > 2 and args[2]))
        source, target = (args[1], args[0]) if func is _aten.copy_.default else (args[0], None)
        to = target.device if target is not None else torch.device(kwargs.get("device") or source.device)
        if (to.type == META.type) == source.is_meta:
            return func(*args, **kwargs)
        if not source.is_meta:
            self.log.note("to device", _asynchronous(source, "asynchronous", "pageable") if asked else "blocking")
            return func(*args, **kwargs)
        if target is not None:
            self.log.note("to host", _asynchronous(target, "asynchronous", "pageable") if asked else "blocking")
            return target.zero_()
        self.log.note("to host", "pageable" if asked else "blocking")
        return torch.zeros_like(source, device=HOST, dtype=kwargs.get("dtype") or source.dtype)

    def _read(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        self.log.note("read")
        if func is _aten._local_scalar_dense.default:
            return self._flag if args[0].dtype is torch.bool else torch.zeros((), dtype=args[0].dtype).item()
        if func in (_aten.equal.default, _aten.allclose.default):
            return True
        return func(*args, **kwargs)  # how much there is of it nobody knows: torch raises

    def _mixed(self, func: Any, args: tuple[Any, ...], on_host: list[Tensor]) -> None:
        if func in _INDEXED and args[0].is_meta:
            self.log.note("to device", "blocking")  # the indices
            return
        writes = func._schema.is_mutable and isinstance(args[0], Tensor) and not args[0].is_meta
        if writes or any(tensor.dim() for tensor in on_host):
            forms = [_form(tensor) for tensor in _tensors(args)]
            raise AssertionError(f"{func} mixes host and device: {', '.join(forms)}; at {_place()[1]}")


class _Functions(TorchFunctionMode):
    """What torch does without an operation that a dispatch mode sees."""

    _MADE = (torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor)

    def __init__(self, log: Log) -> None:
        super().__init__()
        self._log = log

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """One call."""
        kwargs = kwargs or {}
        if func is Tensor.data_ptr and args[0].is_meta and _place()[0].startswith("kernels/"):
            raise AssertionError(f"the address of {_form(args[0])} was taken, at {_place()[1]}")
        made = func(*args, **kwargs)
        if (
            func in self._MADE
            and made.is_meta
            and not isinstance(args[0 if func is not Tensor.new_tensor else 1], Tensor)
        ):
            self._log.note("to device", "blocking")  # numbers of Python's
        return made


def _tensors(arguments: Iterable[Any]) -> Iterator[Tensor]:
    for argument in arguments:
        if isinstance(argument, Tensor):
            yield argument
        elif isinstance(argument, (list, tuple)):
            yield from _tensors(argument)


def _form(tensor: Tensor) -> str:
    return f"{tensor.device.type} {str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
