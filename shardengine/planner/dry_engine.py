"""Runs some steps of the real engine with the real model, as one rank of many, without values, memory or other ranks.

Owns: the run, and its counting. Must not know: costs of hardware, how configs are chosen.

[Note: The engine itself] A separate model of the engine's memory would have to be kept in step with the engine. So the
engine itself runs: its units, buckets, pool, prefetch and step are those of training. The arithmetic (kernels:
``without_values``), the other ranks (absent_ranks), the values of tensors (no_values) and the planned GPU are missing.
CPU tensors stand in for a GPU's, on a platform that claims a memory of its own.
"""

from __future__ import annotations

import gc
import logging
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardengine.comm import GroupName, Mesh
from shardengine.engine import Engine
from shardengine.errors import ShardEngineError, UsageError
from shardengine.offload import HOST, CopyStream, Done, Fetched, Platform
from shardengine.planner.absent_ranks import Issued, SilentWire, absent_mesh
from shardengine.planner.layers import AFTER, blocks_of
from shardengine.planner.ledger import MemoryLedger, MemoryMoment, highest, tensors_in
from shardengine.planner.no_disk import NoDisk
from shardengine.planner.no_values import NoValues, without_values
from shardengine.planner.tape import Copy, Current, Mark, Tape, TapeRecorder, Wait
from shardengine.sharding import inner

WEIGHTS, STATES, BUFFERS, ACTIVATIONS, MODEL = "weights", "states", "gradients and buffers", "activations", "model"
KINDS = (WEIGHTS, STATES, BUFFERS, ACTIVATIONS, MODEL)
INITIALIZE, FORWARD, BACKWARD, STEP = "initialize", "forward", "backward", "step"
MAPPED = "file"
"""Memory that maps a file. It belongs to the system, not to this process."""
ABSENT = "absent"
"""The kind of storages that no process holds."""
_HOST_SIDE = "host "
"""Prefix of the kinds of storages in host memory, if the device has a memory of its own."""
CUDA_GRAIN = 512
FORWARD_ALONE = -1
STEPS = 2
"""With one layout, the second step is like all later ones: the pool is filled, and gathers follow the order of the
first."""


@dataclass(frozen=True)
class ModelPlace:
    """The rank that a run plays.

    grain: allocations are rounded up to a multiple of so many bytes; None: as the device does · node_ranks: ranks of
    each node, in rank order; 0: one node · in_slices: each rank reads only its part of the weights, so no rank holds
    the whole model while it is loaded.
    """

    ranks: int = 1
    rank: int = 0
    apart: bool = True
    """The device is a GPU with ``device_bytes`` of memory and NCCL; otherwise it is the CPU with gloo."""
    device_bytes: int = 80 << 30
    grain: int | None = None
    node_ranks: int = 0
    in_slices: bool = False


@dataclass(frozen=True)
class DryRun:
    """The result of a dry run.

    device, host: for each stretch of one phase and unit, the moment with the most bytes; host is empty if the device is
    the CPU · at_rest, host_at_rest: after the last step · issued: the collectives of that step · memory:
    ``Engine.memory`` · seconds: the time of the dry run · tape: the events of that step that take time.

    depths, layers: the layers of the shorter models that the result was derived from, and of the whole one; empty and 0
    if the whole one ran. Otherwise ``issued`` and ``tape`` are those of the deepest model, and ``tape_before`` is that
    of the next shorter one.
    """

    device: list[MemoryMoment]
    host: list[MemoryMoment]
    at_rest: MemoryMoment
    host_at_rest: MemoryMoment
    issued: list[Issued]
    memory: Mapping[str, float]
    config: Any
    parameters: int
    seconds: float
    tape: Tape
    depths: tuple[int, ...] = ()
    layers: int = 0
    tape_before: Tape | None = None

    @property
    def peak(self) -> MemoryMoment:
        """The moment of a step with the most bytes on the device."""
        return highest(self.device, (FORWARD, BACKWARD, STEP))

    def peak_in(self, phase: str) -> MemoryMoment:
        """The moment of ``phase`` with the most bytes on the device."""
        return highest(self.device, (phase,))

    @property
    def host_peak(self) -> MemoryMoment:
        """The moment with the most bytes in host memory, if the device has a memory of its own."""
        return highest(self.host, (INITIALIZE, FORWARD, BACKWARD, STEP))


class _LateTensor(Done):
    """Work of a GPU, which runs behind the host: it counts as complete only when the host has waited for it.

    So memory is held as long as a real run may hold it.
    """

    def __init__(self, recorder: TapeRecorder) -> None:
        super().__init__()
        self.number = recorder.number()
        self._recorder = recorder
        self._over = False

    @property
    def reached(self) -> bool:
        """See ``Done``."""
        return self._over

    def wait(self) -> None:
        """See ``Done``."""
        self._recorder.note(Wait(self.number, False))

    def wait_on_host(self) -> None:
        """See ``Done``."""
        if not self._over:
            self._recorder.note(Wait(self.number, True))
        self._over = True


class _LateStream(CopyStream):
    """A copy stream of a planned GPU."""

    def __init__(self, device: torch.device, ledger: MemoryLedger, recorder: TapeRecorder) -> None:
        super().__init__(device)
        self._number, self._recorder, self._ledger = recorder.number(), recorder, ledger

    def copy(self, source: Tensor, target: Tensor, *after: Done) -> Done:
        """See ``CopyStream``."""
        with self._recorder.quiet():
            super().copy(source, target, *after)
        done = _LateTensor(self._recorder)
        behind = tuple(each.number for each in after if isinstance(each, _LateTensor)) if after else None
        to_host = self._ledger.kind_of(target).startswith(_HOST_SIDE)
        self._recorder.note(Copy(done.number, self._number, to_host, target.nbytes, behind))
        return done

    @contextmanager
    def is_current(self) -> Iterator[None]:
        """See ``CopyStream``."""
        self._recorder.note(Current(self._number))
        try:
            yield
        finally:
            self._recorder.note(Current(None))


class _Imagined(Platform):
    """The platform of the CPU, or of a planned GPU."""

    def __init__(self, place: ModelPlace, ledger: MemoryLedger, recorder: TapeRecorder) -> None:
        super().__init__(HOST)
        self._place, self._ledger, self._recorder = place, ledger, recorder

    @property
    def has_own_memory(self) -> bool:
        """See ``Platform``."""
        return self._place.apart

    def copy_stream(self) -> CopyStream:
        """See ``Platform``."""
        return _LateStream(self.device, self._ledger, self._recorder) if self.has_own_memory else super().copy_stream()

    def mark(self) -> Done:
        """See ``Platform``."""
        if not self.has_own_memory:
            return super().mark()
        done = _LateTensor(self._recorder)
        self._recorder.note(Mark(done.number))
        return done

    def fetch(self, values: Tensor) -> Fetched:
        """See ``Platform``."""
        return Fetched(values, self.mark())

    def empty(self, count: int, dtype: torch.dtype) -> Tensor:
        """See ``Platform``."""
        return self._ledger.name(super().empty(count, dtype), BUFFERS)

    def host_empty(self, count: int, dtype: torch.dtype, *, pinned: bool) -> Tensor:
        """See ``Platform``."""
        made = torch.empty(count, dtype=dtype)
        return self._ledger.name(made, _HOST_SIDE + BUFFERS if self.has_own_memory else BUFFERS)

    def host_buffer(self, count: int, *, pinned: bool) -> Tensor:
        """See ``Platform``."""
        return self.host_empty(count, torch.uint8, pinned=pinned)

    def file_in_place_of(self, folder: Path) -> NoDisk:
        """See ``Platform``."""
        name = lambda count: self._ledger.name(torch.empty(count, dtype=torch.uint8), MAPPED)  # noqa: E731
        return NoDisk(folder, name, self._recorder)

    def free_bytes(self) -> int:
        """See ``Platform``."""
        return self._place.device_bytes


def dry_run(
    make: Callable[[NoValues], nn.Module],
    batch: Callable[[], Mapping[str, Any]],
    config: Any,
    place: ModelPlace,
    loss: Callable[[Any], Tensor],
    options: Mapping[str, Any] | None = None,
    steps: int = STEPS,
) -> DryRun:
    """Run steps until ``steps`` of them in a row have had the same layout.

    steps: 0: none; ``FORWARD_ALONE``: a forward and no step · make: makes the model, inside of ``without_values`` ·
    batch: makes a micro-batch · loss: a function of the model's output · options: further arguments of ``initialize``.
    ``UsageError`` if the model or the loss asks for values that only data has.
    """
    began = time.perf_counter()
    ledger = MemoryLedger(grain=place.grain or (CUDA_GRAIN if place.apart else 1))
    recorder = TapeRecorder(place.apart, lambda each: ledger.kind_of(each).startswith(_HOST_SIDE), lambda: ledger.phase)
    wire = SilentWire(place.ranks, recorder, host_waits=not place.apart)
    with ExitStack() as last:
        last.enter_context(_as_always())
        last.enter_context(ledger.counting())
        seen = without_values(ledger.saw, recorder.saw, on_gpu=place.apart, report=recorder.kernel)
        mode = last.enter_context(seen)
        ledger.begin(INITIALIZE)
        model = make(mode)
        parameters = sum(map(inner.weights_in, model.parameters()))
        for tensor in (*model.parameters(), *model.buffers()) if place.apart or place.in_slices else ():
            ledger.name(tensor.detach(), ABSENT if place.in_slices else _HOST_SIDE + MODEL)  # on the host, or nowhere
        mesh = absent_mesh(
            place.ranks, place.rank, HOST, backend="nccl" if place.apart else "gloo",
            platform=lambda _: _Imagined(place, ledger, recorder), wire=wire, node_ranks=place.node_ranks,
        )  # fmt: skip
        engine = Engine(model, config, mesh=mesh, **(options or {}))
        last.callback(_close, engine)
        _prepare(ledger, engine)
        with _told():
            alike = 0
            if steps == FORWARD_ALONE:
                _look_forward(engine, ledger, batch, loss)
            while alike < steps:
                layout = engine._core.layout
                wire.issued.clear()
                recorder.start()
                _train(engine, ledger, batch, loss)
                alike = alike + 1 if engine._core.layout is layout else 0
        tape = recorder.stop(partial(_members, mesh))
        memory = engine.memory()
        device, rests = ledger.moments(
            lambda kind: kind not in (MAPPED, ABSENT) and not kind.startswith(_HOST_SIDE), _UNNAMED
        )
        host, host_rests = ledger.moments(lambda kind: kind.startswith(_HOST_SIDE), _UNNAMED)
        found = DryRun(
            device, host, rests, host_rests, list(wire.issued), memory, engine.config, parameters,
            time.perf_counter() - began, tape,
        )  # fmt: skip
        ledger.begin("")
        engine.close(restore=False)
    return found


def _close(engine: Engine) -> None:
    """Close an engine whose model may have failed in a step.

    Errors of closing are dropped in favour of the model's own.
    """
    with suppress(Exception):
        engine.close()


def _prepare(ledger: MemoryLedger, engine: Engine) -> None:
    engine._core.step_state.writes.compare_nothing()
    _name_kept(ledger, engine)
    _tell_units(ledger, engine.module)


def _look_forward(
    engine: Engine, ledger: MemoryLedger, batch: Callable[[], Mapping[str, Any]], loss: Callable[[Any], Tensor]
) -> None:
    ledger.begin(FORWARD)
    loss(engine(**batch()))
    ledger.begin("")


def _members(mesh: Mesh, group: str) -> Sequence[int]:
    return mesh.members(GroupName(group)) or range(mesh.ranks)


_UNNAMED = {INITIALIZE: MODEL, FORWARD: ACTIVATIONS, BACKWARD: ACTIVATIONS, STEP: BUFFERS}


def _train(
    engine: Engine, ledger: MemoryLedger, batch: Callable[[], Mapping[str, Any]], loss: Callable[[Any], Tensor]
) -> None:
    for _ in range(engine.gradient_accumulation_steps()):
        ledger.begin(FORWARD)
        value = loss(engine(**batch()))
        ledger.begin(BACKWARD)
        engine.backward(value)
        del value
        ledger.begin(STEP)
        engine.step()
    _name_kept(ledger, engine)


def _tell_units(ledger: MemoryLedger, model: nn.Module) -> None:
    """Let the ledger know, from now on, which block of ``model`` computes.

    The backward of a block begins when its output gets a gradient. Anything after the last block in forward, or before
    it in backward, is in no unit.
    """

    def hook(block: nn.Module, name: str) -> None:
        def begins(*_: Any) -> None:
            if ledger.phase == FORWARD:
                ledger.begin(FORWARD, name)

        def turns(_: Any) -> None:
            ledger.begin(BACKWARD, name)

        def ends(_module: nn.Module, _args: Any, result: Any) -> None:
            if ledger.phase != FORWARD:
                return
            ledger.begin(FORWARD, AFTER + name)
            for each in tensors_in(tuple(result.values()) if isinstance(result, Mapping) else result):
                if each.requires_grad:
                    each.register_hook(turns)
                    return

        block.register_forward_pre_hook(begins)
        block.register_forward_hook(ends)

    for name, block in blocks_of(model):
        hook(block, name)


def _name_kept(ledger: MemoryLedger, engine: Engine) -> None:
    for what, tier, tensor in engine._core.kept():
        ledger.name(
            tensor, what if tier == "device" or not engine._core.mesh.platform.has_own_memory else _HOST_SIDE + what
        )


@contextmanager
def _as_always() -> Iterator[None]:
    """Inside, reference cycles are not collected, as in training between two collections, and gradients are enabled.

    Random states are restored afterwards.
    """
    collects, log = gc.isenabled(), logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    gc.collect(1)  # garbage of an earlier run; a full collection may take longer than a small run
    gc.disable()
    log.setLevel(logging.CRITICAL)  # an exception reports what the model asked for
    try:
        with _interrupted_afterwards(), torch.random.fork_rng(devices=[]), torch.enable_grad():
            yield
    finally:
        log.setLevel(level)
        if collects:
            gc.enable()


@contextmanager
def _interrupted_afterwards() -> Iterator[None]:
    """Defer Ctrl-C to the end of the block; a second one acts at once.

    An exception inside an operation that a dispatch mode handles would end the process.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    came: list[Any] = []

    def note(*given: Any) -> None:
        came.append(given)
        if len(came) > 1:
            before(*given)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        before(*came[0])


@contextmanager
def _told() -> Iterator[None]:
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise UsageError(
            f"plan: the model's shapes depend on data ({error.func}), so it cannot be planned without running it: "
            "expected shapes that follow from those of the inputs; a mixture of experts of transformers has it with "
            'experts_implementation="grouped_mm", and a loop over the experts that were chosen has not',
            code="plan-model-needs-data",
        ) from error
    except (RuntimeError, NotImplementedError) as error:
        if isinstance(error, ShardEngineError):
            raise
        told = next(iter(str(error).strip().splitlines()), "without a word")
        raise UsageError(
            f"plan: the model fails on tensors without data ({type(error).__name__}: {told}): it must run on a CPU and "
            "must not read values of tensors; register operators of your own with torch.library.register_fake",
            code="plan-model-needs-values",
        ) from error


def bytes_by_kind(moment: MemoryMoment) -> Counter[str]:
    """Return the bytes of a moment by kind, as named in ``KINDS``."""
    found: Counter[str] = Counter()
    for kind, size in moment.alive.items():
        kind = kind.removeprefix(_HOST_SIDE)
        found[kind if kind in KINDS else ACTIVATIONS] += size
    return found
