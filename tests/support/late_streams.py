"""A device whose streams are as late as they may be, on a CPU, and a judge of the order of all that touches memory.

On a CPU everything happens at once, which is the luckiest schedule that is legal on a GPU. Here it is the unluckiest: a
copy between host and device, and a collective, take effect only when somebody waits for them; until then what they
write to is full of NaN, and the host is never told that they are over. What runs on another thread runs when it is
waited for.

Beside that every access to memory is judged by happens-before, with a vector clock for the host, for each stream and
for each communicator (as in C. J. Fidge, "Timestamps in message-passing systems that preserve the partial ordering",
1988): two accesses to the same bytes, at least one of which writes, by two of them, of which the later one does not
know of the earlier, are a race, even where the values come out right. Giving memory back is a write by the stream on
which it was taken, because CUDA's caching allocator gives it out again on that stream at once. Operations of torch are
seen by a dispatch mode, so kernels must be torch's own inside (``adversary`` sees to that).

What is the host's memory is known by who made it (``Platform.host_empty``, ``host_buffer``, ``torch.frombuffer``),
control data that is exchanged is the host's, and what is computed from that alone. An operation of torch over both
sides is taken as CUDA does it: a copy that is not ``non_blocking`` waits.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardengine.checkpoint import background, tensor_file
from shardengine.comm import Collectives, Wire
from shardengine.comm.group_kind import GroupKind, GroupName
from shardengine.comm.mesh import Mesh
from shardengine.kernels import operations, reference, reference_update
from shardengine.offload import CopyStream, Done, Fetched, Platform, staging
from shardengine.offload.nvme import ExtentFile, file_tier
from shardengine.optim import in_backward

HOST, DEFAULT = "the host", "the default stream"
Clock = dict[str, int]


class Race(AssertionError):
    """Two accesses to the same memory without an order between them."""


@dataclass(frozen=True)
class _Access:
    """Bytes [first, end) of memory were read, or written, by ``agent`` at its ``time``."""

    first: int
    end: int
    agent: str
    time: int
    writes: bool
    what: str

    def __str__(self) -> str:
        return f"{self.what}, which {'writes' if self.writes else 'reads'} on {self.agent}"


@dataclass
class _Area:
    """One storage. owner: the stream on which it was taken, or the host · guarded: torch's allocator of page-locked
    memory holds it until the copies from and to it are over."""

    storage: weakref.ref[torch.UntypedStorage]
    owner: str
    guarded: bool = False
    accesses: list[_Access] = field(default_factory=list)

    @property
    def is_host(self) -> bool:
        return self.owner == HOST


class Judge:
    """Who knows of what (module docstring). current: the stream on which torch would launch now."""

    def __init__(self) -> None:
        self.current = DEFAULT
        self.kernel: str | None = None
        """Who runs the kernel that is running, if one is."""
        self.races: list[str] = []
        self.lines: dict[str, _Line] = {}
        self.counts: Counter[str] = Counter()
        self._clocks: dict[str, Clock] = {}
        self._areas: dict[int, _Area] = {}
        self._lock = threading.RLock()

    # Clocks

    def clock(self, agent: str) -> Clock:
        """What ``agent`` knows of at this moment: an event that is recorded on it now."""
        return dict(self._clocks.get(agent, {}))

    def wait(self, agent: str, clock: Clock) -> None:
        """What ``agent`` does from now on comes after ``clock``."""
        mine = self._clocks.setdefault(agent, {})
        for other, time in clock.items():
            mine[other] = max(mine.get(other, 0), time)

    def launch(self, agent: str) -> None:
        """The host gives ``agent`` something to do: after all that it was given, and that the host has done."""
        self.wait(agent, self.clock(HOST))
        mine = self._clocks.setdefault(agent, {})
        mine[agent] = mine.get(agent, 0) + 1

    # Memory

    def area(self, storage: torch.UntypedStorage, owner: str | None = None) -> _Area:
        """What is known of a storage. owner: of a new one, else the current stream."""
        known = self._areas.get(storage._cdata)
        if known is None or known.storage() is not storage:
            known = self._areas[storage._cdata] = _Area(weakref.ref(storage), owner or self.current)
            weakref.finalize(storage, self.give_back, known).atexit = False
        return known

    def own(self, tensor: Tensor, owner: str, *, guarded: bool = False) -> Tensor:
        """``tensor`` is new memory of ``owner``'s."""
        area = self.area(tensor.untyped_storage(), owner)
        area.owner, area.guarded, area.accesses = owner, guarded, []
        return tensor

    def take(self, tensor: Tensor, owner: str) -> None:
        """``owner`` has taken the memory of ``tensor``, which it may still be using for what was there before."""
        self.own(tensor, owner)
        self._begin(self.area(tensor.untyped_storage()), tensor.untyped_storage().nbytes())

    def _begin(self, area: _Area, size: int) -> None:
        area.accesses = []
        if not area.is_host and size:
            time = self.clock(area.owner).get(area.owner, 0)
            area.accesses.append(_Access(0, size, area.owner, time, True, "what was in that memory before"))

    def resize(self, storage: torch.UntypedStorage, size: int) -> None:
        """``storage`` is about to have ``size`` bytes: other memory, where it is another number."""
        area = self.area(storage)
        if storage.nbytes():
            self.give_back(area)
        if not area.is_host:
            area.owner = self.current
        self._begin(area, size)

    def give_back(self, area: _Area) -> None:
        """Its memory is free: the next use of it comes behind what its owner was given until now."""
        with self._lock:
            accesses, area.accesses = [] if area.guarded else area.accesses, []
            known = self.clock(area.owner)
            for agent, time in self.clock(HOST).items():
                known[agent] = max(known.get(agent, 0), time)
            for access in accesses:
                if access.agent != area.owner and known.get(access.agent, 0) < access.time:
                    self.races.append(f"memory was given back on {area.owner} behind {access}, not waited for")

    def touch(self, tensor: Tensor, agent: str, what: str, *, writes: bool) -> None:
        """``agent`` reads or writes ``tensor``, now or when its turn comes; ``Race``."""
        if tensor.numel() == 0:
            return
        storage = tensor.untyped_storage()
        if storage.nbytes() == 0:
            raise Race(f"{what} uses memory that was given back")
        with self._lock:
            area, base = self.area(storage), int(tensor.storage_offset()) * tensor.itemsize
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            first, end = base, base + int(last + 1) * tensor.itemsize
            mine = self._clocks.setdefault(agent, {})
            now = _Access(first, end, agent, mine.get(agent, 0), writes, what)
            kept = []
            for before in area.accesses:
                if before.end <= first or end <= before.first:
                    kept.append(before)
                    continue
                known = before.agent == agent or mine.get(before.agent, 0) >= before.time
                if (writes or before.writes) and not known:
                    raise Race(f"{now} does not wait for {before}")
                covered = first <= before.first and before.end <= end
                if not (covered and known and (writes or not before.writes)):
                    kept.append(before)
            area.accesses = [*kept, now]
        if self.races:
            raise Race(self.races[0])


class _Watch(TorchDispatchMode):
    """Every operation of torch of this thread, told to the judge."""

    def __init__(self, judge: Judge) -> None:
        super().__init__()
        self._judge = judge

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """torch.compile compiles below this mode, which sees the operations of what was compiled."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not func.is_view:
            self._judge_operation(func, args, kwargs, result)
        return result

    def _judge_operation(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        read: list[Tensor] = []
        written: list[Tensor] = []
        for number, argument in enumerate(func._schema.arguments):
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            writes = argument.alias_info is not None and argument.alias_info.is_write
            (written if writes else read).extend(_tensors(value))
        given = {tensor.untyped_storage()._cdata for tensor in (*read, *written)}
        made = [each for each in _tensors(result) if each.untyped_storage()._cdata not in given]
        judge, name = self._judge, str(func)
        sides = {judge.area(each.untyped_storage()).is_host for each in (*read, *written) if each.numel()}
        agent = judge.kernel or (HOST if sides == {True} else judge.current)
        judge.launch(agent)
        behind = name.startswith("aten.copy_") and (*args, *kwargs.values())[-1] is True  # non_blocking
        blocks = len(sides) == 2 and not behind and judge.kernel is None
        reads = name == "aten._local_scalar_dense.default" and agent != HOST and judge.kernel is None
        if judge.kernel == HOST and False in sides:  # a scalar, which was brought to the host
            judge.wait(HOST, judge.clock(judge.current))
        if blocks or reads:
            judge.wait(HOST, judge.clock(agent))  # the host has waited when this returns
            judge.counts["the host waits"] += 1
        for each in made:
            judge.take(each, agent)
        if "empty" in name:
            return
        for tensors, writes in ((read, False), (written, True), (made, True)):
            for each in tensors:
                judge.touch(each, agent, name, writes=writes)
        if blocks:
            judge.wait(HOST, judge.clock(agent))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.layout is torch.strided:
            yield value
    elif isinstance(value, list | tuple | dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _tensors(each)


def poison(tensor: Tensor) -> None:
    """NaN in every float, and no small number in the rest."""
    tensor.detach().view(-1).view(torch.uint8).fill_(0xFF)


class _Line:
    """What one stream was given and has not done yet. Everything is done as late as somebody waits for it."""

    def __init__(self) -> None:
        self._left: deque[tuple[int, Callable[[], None]]] = deque()
        self._numbers = itertools.count(1)
        self._done = 0

    def give(self, job: Callable[[], None]) -> int:
        number = next(self._numbers)
        self._left.append((number, job))
        return number

    def finish(self, number: int | None = None) -> None:
        """Do everything up to a job, or all of it."""
        while self._left and (number is None or self._done < number):
            self._done, job = self._left.popleft()
            with torch.no_grad(), torch.inference_mode(False), torch.utils._python_dispatch._disable_current_modes():
                job()


class _Place:
    """A stretch of memory that nobody keeps alive for us."""

    def __init__(self, tensor: Tensor, what: str) -> None:
        storage = tensor.untyped_storage()
        self._storage, self._address, self._what = weakref.ref(storage), storage.data_ptr(), what
        self._form = (tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
        self._dtype = tensor.dtype

    def tensor(self) -> Tensor:
        storage = self._storage()
        if storage is None or storage.nbytes() == 0 or storage.data_ptr() != self._address:
            raise Race(f"{self._what} was freed, resized or moved while it was under way")
        return torch.empty(0, dtype=self._dtype).set_(storage, *self._form)


def _quietly(call: Callable[[], Any]) -> None:
    with torch.no_grad(), torch.utils._python_dispatch._disable_current_modes():
        call()


class LateDone(Done):
    """The end of what a stream was given: the host hears of it when it waits, and not before."""

    def __init__(self, judge: Judge, clock: Clock, issuer: str, finish: Callable[[], None]) -> None:
        super().__init__()
        self._judge, self._clock, self._issuing, self._finish = judge, clock, issuer, finish
        self._over = False

    @property
    def reached(self) -> bool:
        return self._over

    def wait(self) -> None:
        for stream in {self._judge.current, self._issuing}:
            self.hold(stream)

    def hold(self, stream: Any) -> None:
        self._judge.wait(stream, self._clock)
        self._finish()

    def wait_on_host(self) -> None:
        self._judge.wait(HOST, self._clock)
        self._finish()
        self._over = True


class LateStream(CopyStream):
    """Copies that are made when somebody waits for them."""

    def __init__(self, judge: Judge, name: str) -> None:
        self._judge, self._name = judge, name
        self._line = judge.lines[name] = _Line()

    def copy(self, source: Tensor, target: Tensor, *after: Done) -> Done:
        judge, issuer = self._judge, self._judge.current
        if source.numel() == 0:
            return Done()
        sides = {judge.area(each.untyped_storage()).is_host for each in (source, target)}
        if len(sides) == 1:  # on one side: CUDA's host does that at once
            target.copy_(source)
            return Done()
        if not after:
            judge.wait(self._name, judge.clock(issuer))
        for done in after:
            done.hold(self._name)  # type: ignore[arg-type]  # a stream has a name here
        judge.launch(self._name)
        judge.touch(source, self._name, "a copy", writes=False)
        judge.touch(target, self._name, "a copy", writes=True)
        judge.counts["copies"] += 1
        places = _Place(source, "the source of a copy"), _Place(target, "the target of a copy")
        _quietly(lambda: poison(target))

        def job() -> None:
            places[1].tensor().copy_(places[0].tensor())

        number = self._line.give(job)
        return LateDone(judge, judge.clock(self._name), issuer, lambda: self._line.finish(number))

    @contextmanager
    def is_current(self) -> Iterator[None]:
        before, self._judge.current = self._judge.current, self._name
        try:
            yield
        finally:
            self._judge.current = before


class LatePlatform(Platform):
    """The CPU as a device with a memory of its own."""

    def __init__(self, judge: Judge, device: torch.device) -> None:
        super().__init__(device)
        self._judge = judge
        self._names = (f"copy stream {number}" for number in itertools.count(1))

    @property
    def has_own_memory(self) -> bool:
        return True

    def copy_stream(self) -> CopyStream:
        return LateStream(self._judge, next(self._names))

    def mark(self) -> Done:
        judge = self._judge
        return LateDone(judge, judge.clock(judge.current), judge.current, lambda: None)

    def here(self) -> Any:
        return self._judge.current

    def come_home(self, home: Any) -> None:
        self._judge.wait(home, self._judge.clock(self._judge.current))

    def fetch(self, values: Tensor) -> Fetched:
        here = self.host_empty(values.numel(), values.dtype, pinned=True).view(values.shape)
        here.copy_(values, non_blocking=True)
        return Fetched(here, self.mark())

    def host_empty(self, count: int, dtype: torch.dtype, *, pinned: bool) -> Tensor:
        return self._judge.own(torch.empty(count, dtype=dtype), HOST, guarded=pinned)

    def host_buffer(self, count: int, *, pinned: bool) -> Tensor:
        return self._judge.own(super().host_buffer(count, pinned=pinned), HOST)


class _LateWork:
    """A collective on NCCL, whose result appears, and whose input is free, behind whoever waits for it."""

    def __init__(self, judge: Judge, clock: Clock, finish: Callable[[], None], real: Any) -> None:
        self._judge, self._clock, self._finish, self._real = judge, clock, finish, real

    def is_completed(self) -> bool:
        return False

    def get_future(self) -> Any:
        return self._real.get_future()

    def wait(self, timeout: Any = None) -> bool:
        self._judge.wait(self._judge.current, self._clock)
        self._finish()
        return True


class _LateMessage:
    """A collective of gloo's, whose result appears when the host has waited."""

    def __init__(self, real: Any, show: Callable[[], Any], sent: Tensor) -> None:
        self._real, self._show, self._sent = real, show, sent

    def is_completed(self) -> bool:
        return bool(self._real.is_completed())

    def get_future(self) -> Any:
        return self._real.get_future()

    def wait(self, *timeout: Any) -> bool:
        self._real.wait(*timeout)
        self._show()
        return True


class LateWire(Wire):
    """Collectives in the order of streams, as NCCL's are: over gloo, between copies. issued: the communicator of each,
    in the order in which this rank has issued them over all communicators, which must be every rank's."""

    def __init__(self, judge: Judge, control: Any) -> None:
        self._judge, self.control = judge, control
        self._names: dict[Any, str] = {}
        self.issued: list[tuple[str, str, int]] = []

    def broadcast(self, tensor: Tensor, source: int, group: Any) -> Any:
        sends = dist.get_rank(group) == source
        begin = super().broadcast
        return self._late(
            "broadcast", group, [tensor], [] if sends else [tensor], lambda made: begin(made, source, group)
        )

    def all_gather(self, out: Tensor, own: Tensor, group: Any) -> Any:
        begin = super().all_gather
        if group is self.control:
            return self._message(begin, out, own, group)
        parts = list(out.split(own.numel()))
        if out.untyped_storage()._cdata == own.untyped_storage()._cdata:
            del parts[dist.get_rank(group)]
        copy = own.detach().clone
        return self._late("all-gather", group, [own], parts, lambda made: begin(made, copy(), group), whole=out)

    def reduce_scatter(self, out: Tensor, full: Tensor, group: Any) -> Any:
        begin = super().reduce_scatter
        return self._late(
            "reduce-scatter", group, [full], [out], lambda made: begin(made, full.detach().clone(), group)
        )

    def all_to_all(self, out: Tensor, full: Tensor, group: Any) -> Any:
        begin = super().all_to_all
        return self._late("all-to-all", group, [full], [out], lambda made: begin(made, full.detach().clone(), group))

    def _message(self, begin: Callable[..., Any], out: Tensor, own: Tensor, group: Any) -> Any:
        """Of hosts: they see it when they have waited for it."""
        for each in (out, own):
            self._judge.own(each, HOST)
        with torch.utils._python_dispatch._disable_current_modes():
            received, sent = torch.empty_like(out), own.clone()
            poison(out)
        return _LateMessage(begin(received, sent, group), lambda: _quietly(lambda: out.copy_(received)), sent)

    def _late(
        self, name: str, group: Any, read: Sequence[Tensor], written: Sequence[Tensor],
        begin: Callable[[Tensor], Any], whole: Tensor | None = None,
    ) -> Any:  # fmt: skip
        """Begin the real one with a tensor in the place of the last argument that it writes, and show it later."""
        judge = self._judge
        agent = self._names.setdefault(group, f"communicator {len(self._names) + 1}")
        line = judge.lines.setdefault(agent, _Line())
        self.issued.append((agent, name, read[0].numel()))
        judge.wait(agent, judge.clock(judge.current))
        judge.launch(agent)
        for tensors, writes in ((read, False), (written, True)):
            for each in tensors:
                judge.touch(each, agent, name, writes=writes)
        if judge.current in judge.lines:
            judge.lines[judge.current].finish()  # the collective waits for that, and nobody else has
        judge.counts["collectives"] += 1
        out = whole if whole is not None else (written or read)[0]
        with torch.no_grad(), torch.utils._python_dispatch._disable_current_modes():
            received = out.detach().clone()
            real = begin(received)
            for each in written:
                poison(each)
        places = [_Place(each, f"the output of {name}") for each in written]
        inputs = [_Place(each, f"the input of {name}") for each in read]
        start = out.storage_offset()
        shown = [received.view(-1)[each.storage_offset() - start :][: each.numel()] for each in written]

        def job() -> None:
            real.wait()
            for place in inputs:
                place.tensor()
            for place, values in zip(places, shown, strict=True):
                place.tensor().copy_(values.view(place.tensor().shape))

        number = line.give(job)
        return _LateWork(judge, judge.clock(agent), lambda: line.finish(number), real)


class _LateKind(GroupKind):
    """Groups of gloo, of which the wire must know which one is for decisions."""

    def __init__(self, wire: LateWire) -> None:
        self._wire = wire

    def make(self, timeout_s: float, device: torch.device, ranks: Sequence[int] = ()) -> dict[str, Any]:
        made = super().make(timeout_s, device)
        self._wire.control = made[GroupName.CONTROL.value]
        return made


class _LateFuture(Future[Any]):
    """Runs, and everything that was submitted before it, when somebody waits for it."""

    def __init__(self, executor: _LateExecutor) -> None:
        super().__init__()
        self._executor = executor

    def result(self, timeout: float | None = None) -> Any:
        self._executor.run_until(self)
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._executor.run_until(self)
        return super().exception(timeout)


class _LateExecutor:
    """In the place of a thread."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        self._left: deque[tuple[_LateFuture, Callable[[], Any]]] = deque()
        self._lock = threading.RLock()

    def submit(self, call: Callable[..., Any], *args: Any) -> _LateFuture:
        future = _LateFuture(self)
        self._left.append((future, lambda: call(*args)))
        return future

    def run_until(self, future: _LateFuture) -> None:
        with self._lock:
            while not future.done():
                first, call = self._left.popleft()
                try:
                    first.set_result(call())
                except BaseException as error:
                    first.set_exception(error)

    def shutdown(self, **_options: Any) -> None:
        while self._left:
            self.run_until(self._left[0][0])


def _as_kernel(judge: Judge, call: Callable[..., Any]) -> Callable[..., Any]:
    """torch's form of a kernel makes small tensors and may read a flag, for which no kernel has the host wait."""

    def launched(*args: Any, **kwargs: Any) -> Any:
        given = [each for value in (*args, *kwargs.values()) for each in _tensors(value)]
        sides = {judge.area(each.untyped_storage()).is_host for each in given if each.numel() > 1}
        before, judge.kernel = judge.kernel, HOST if True in sides else judge.current
        try:
            return call(*args, **kwargs)
        finally:
            judge.kernel = before

    return launched


def _told_of_disk(judge: Judge, begin: Callable[..., Any], writes: bool) -> Callable[..., Any]:
    """``ExtentFile.read`` or ``write``, whose threads are the host's."""

    def told(file: ExtentFile, extent: Any, memory: Tensor) -> Any:
        judge.launch(HOST)
        judge.touch(memory, HOST, "the disk", writes=writes)
        return begin(file, extent, memory)

    return told


def _of_host(judge: Judge, call: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``torch.frombuffer``, or ``Collectives.exchange``: what it is given, and what it makes, is the host's."""

    def told(*args: Any, **options: Any) -> Tensor:
        for each in args:
            if isinstance(each, Tensor):
                judge.own(each, HOST)
        return judge.own(call(*args, **options), HOST)

    return told


def _executor(real: Any) -> Any:
    def make(workers: int, name: str, *rest: Any) -> Any:
        return (
            _LateExecutor()
            if name in ("checkpoint", "checkpoint-copy", "step-in-backward")
            else real(workers, name, *rest)
        )

    return make


@dataclass(frozen=True)
class Adversary:
    """What ``adversary`` gives: the mesh to train over, and who judges."""

    mesh: Mesh
    judge: Judge
    wire: LateWire

    @contextmanager
    def on(self, stream: str) -> Iterator[None]:
        """``with torch.cuda.stream(stream)``."""
        before, self.judge.current = self.judge.current, stream
        try:
            yield
        finally:
            self.judge.current = before

    def wait_stream(self, stream: str, other: str) -> None:
        """``stream.wait_stream(other)``."""
        self.judge.wait(stream, self.judge.clock(other))

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """What the test alone does: nobody waits for it, and nobody judges it."""
        with torch.utils._python_dispatch._disable_current_modes():
            yield

    def record_stream(self, tensor: Tensor) -> None:
        """``tensor.record_stream``: its memory is given out again when nobody uses it."""
        self.judge.area(tensor.untyped_storage()).guarded = True

    def check(self) -> None:
        """``Race`` where memory was given back too early since."""
        if self.judge.races:
            raise Race(self.judge.races[0])


@contextmanager
def adversary(mesh: Mesh, *, backend: str = "nccl", watch: bool = True) -> Iterator[Adversary]:
    """Train over ``.mesh`` inside. mesh: over gloo, or of one rank · watch: judge torch's operations."""
    judge = Judge()
    wire = LateWire(judge, mesh.control)
    resize = torch.UntypedStorage.resize_

    def resized(storage: torch.UntypedStorage, size: int) -> Any:
        judge.resize(storage, size)
        return resize(storage, size)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.UntypedStorage, "resize_", resized)
        patch.setattr(torch, "frombuffer", _of_host(judge, torch.frombuffer))
        patch.setattr(Collectives, "exchange", _of_host(judge, Collectives.exchange))
        patch.setattr(operations, "implementation", lambda device: None)
        for name in ("flatten", "unflatten", "ordered_sum", "sum_of_squares", "update"):
            module = reference_update if name == "update" else reference
            patch.setattr(module, name, _as_kernel(judge, getattr(module, name)))
        for name, writes in (("read", True), ("write", False)):
            patch.setattr(ExtentFile, name, _told_of_disk(judge, getattr(ExtentFile, name), writes))
        patch.setattr(file_tier, "staging", lambda count: judge.own(staging(count), HOST))
        for module in (background, in_backward):
            patch.setattr(module, "ThreadPoolExecutor", _executor(module.ThreadPoolExecutor))
        patch.setattr(tensor_file, "ThreadPoolExecutor", _LateExecutor)
        late = replace(
            mesh, backend=backend if mesh.ranks > 1 else mesh.backend, wire=wire,
            platform_of=lambda device: LatePlatform(judge, device), kind=_LateKind(wire),
        )  # fmt: skip
        made = Adversary(late, judge, wire)
        if watch:
            with _Watch(judge):
                yield made
        else:
            yield made
        made.check()
