"""Writing a checkpoint, at once or behind training. Owns: the order of a save, host copies, the thread that writes.

Must not know: the form of files and index.

[Note: Behind training] With ``async_save`` the call copies this rank's tensors to host memory and returns; a thread
writes the copies. Ranks then meet through the process group's store instead of through collectives, which belong to
training. There are two sets of host memory: while one is being written the next save may fill the other, and the one
after that waits. What goes wrong is warned of at once and raised, on all ranks, by the next call that saves or waits.
"""

from __future__ import annotations

import contextlib
import json
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardengine.agreement import compare, together
from shardengine.checkpoint import contents, directory, index, state, tensor_file
from shardengine.collectives import Collectives
from shardengine.errors import CheckpointError, UsageError
from shardengine.inspection import Inspection
from shardengine.mesh import Mesh, Store

_Meet = Callable[[str, Callable[[], Any]], list[Any]]
"""Run something on every rank: every rank's result on rank 0 at least; where it raises on one, it raises on all."""

_LONGEST_POLL_S = 0.05


@dataclass(frozen=True)
class Job:
    """Everything that one rank writes of one checkpoint. rows: per tensor (name, state, first, end), or of its name."""

    folder: Path
    tag: str
    rank: int
    facts: dict[str, Any]
    tensors: list[tuple[str, Tensor]]
    parts: list[tuple[str, str, str, int, int]]
    random: list[str]
    keep_last: int | None


def save(engine: Inspection, folder: str | Path, tag: str | None, client_state: dict[str, Any] | None) -> Path:
    """Write a checkpoint; its directory. See ``Engine.save_checkpoint``."""
    core = engine._core
    collectives = core.collectives
    client = {} if client_state is None else client_state

    def prepare() -> tuple[Path, str, dict[str, Any]]:
        if engine.optimizer is not None:
            engine.optimizer.require_whole()
        require_rest(engine, "save_checkpoint")
        if not isinstance(client, dict):
            raise UsageError(f"client_state: expected a dict of JSON values, came {type(client).__name__}")
        state.require_json(client, "client_state")
        place = directory.check_folder(folder)
        name = directory.check_tag(directory.tag_of(engine.global_steps) if tag is None else tag)
        return place, name, json.loads(json.dumps({**index.describe(engine), "client_state": client}))

    place, name, facts = together(collectives, "preparing a checkpoint", prepare)
    background = _background_of(engine)
    background.surface(collectives)
    core.adopt_written_weights()
    compare(collectives, {"place given to save_checkpoint": [str(place), name]})
    job = _job(engine, place, name, facts)
    if engine.config.checkpoint.async_save:
        background.submit(job, core.mesh)
    else:
        _write(job, _by_collectives(collectives))
    return place / name


def finish(engine: Inspection) -> None:
    """Wait until everything that was saved is on disk; raises what went wrong, on all ranks; collective."""
    _background_of(engine).surface(engine._core.collectives, wait=True)


def require_rest(engine: Inspection, call: str) -> None:
    """``UsageError`` unless the engine is between two steps."""
    if engine._core.pinned:
        raise UsageError(f"{call} inside full_params(): call it after the `with` block")
    if not engine._window.is_first:
        raise UsageError(
            f"{call} in the middle of a step (micro-batches are accumulated, the weights are not stepped): call it "
            "after the engine.step() that ends the window, or call engine.zero_grad() first"
        )


def _job(engine: Inspection, folder: Path, tag: str, facts: dict[str, Any]) -> Job:
    core = engine._core
    parts = list(contents.owned(core, engine.optimizer, own_buffers=facts["own_buffers"]))
    random = [(f"random/{name}", values) for name, values in state.random_states(core.mesh.device)]
    dtype_of = {part.key: str(part.values.dtype).removeprefix("torch.") for part in parts}
    return Job(
        folder=folder,
        tag=tag,
        rank=core.mesh.rank,
        facts=facts,
        tensors=[(part.key, part.values) for part in parts] + random,
        parts=[(part.name, part.state, dtype_of[part.key], part.first, part.end) for part in parts],
        random=[key for key, _ in random],
        keep_last=engine.config.checkpoint.keep_last,
    )


def _write(job: Job, meet: _Meet) -> None:
    """The order of a save: an empty directory, every rank's file, the index, one rename ([directory: Atomic])."""
    first = job.rank == 0

    def conclude(entries: list[dict[str, Any]]) -> None:
        work = directory.work_of(job.folder, job.tag)
        directory.write_text(work / directory.INDEX, index.to_text({**job.facts, **_tables(entries)}))
        directory.finish(job.folder, job.tag)
        if job.keep_last:
            directory.keep_last(job.folder, job.keep_last)

    try:
        with _readable(job.folder):
            begin: Callable[[], Any] = lambda: directory.begin(job.folder, job.tag) if first else None  # noqa: E731
            meet("making a checkpoint's directory", lambda: str(begin()))
            entries = meet("writing a checkpoint", lambda: _write_file(job))
            meet("concluding a checkpoint", lambda: conclude(entries) if first else None)
    except BaseException:
        if first:
            directory.abandon(job.folder, job.tag)
        raise


def _write_file(job: Job) -> dict[str, Any]:
    """Write this rank's file; what the index says of it."""
    work = directory.work_of(job.folder, job.tag)
    file = index.file_of(job.rank)
    done = tensor_file.write(work / file, job.tensors)
    sizes = {key: values.numel() for key, values in job.tensors}
    return {
        "file": {"bytes": done.bytes, "chunks": done.chunks},
        "parts": [
            [name, kind, dtype, [file, first, end, done.offsets[contents.key_of(name, kind, first, end)]]]
            for name, kind, dtype, first, end in job.parts
        ],
        "random": {key.removeprefix("random/"): [file, done.offsets[key], sizes[key]] for key in job.random},
    }


def _tables(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """The index's ``files``, ``tensors`` and ``random`` from what each rank has written."""
    tensors: dict[str, dict[str, Any]] = {}
    random: dict[str, list[Any]] = {}
    for entry in entries:
        for name, kind, dtype, piece in entry["parts"]:
            tensors.setdefault(name, {}).setdefault(kind, {"dtype": dtype, "pieces": []})["pieces"].append(piece)
        for name, place in entry["random"].items():
            random.setdefault(name, []).append(place)
    files = {index.file_of(rank): entry["file"] for rank, entry in enumerate(entries)}
    return {"files": files, "tensors": tensors, "random": random}


@contextmanager
def _readable(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"the checkpoint could not be written to {folder}: {error.strerror or error}; the previous one is intact"
        ) from error


def _by_collectives(collectives: Collectives) -> _Meet:
    return lambda what, work: collectives.exchange_objects(together(collectives, what, work))


# Behind training


class _ByStore:
    """Ranks meet through the store: each leaves its result, rank 0 reads them all and leaves a verdict."""

    def __init__(self, store: Store | None, mesh: Mesh, prefix: str) -> None:
        self._store, self._prefix = store, prefix
        self._rank, self._ranks, self._timeout_s = mesh.rank, mesh.ranks, mesh.timeout_s

    def __call__(self, what: str, work: Callable[[], Any]) -> list[Any]:
        failure: Exception | None = None
        result: Any = None
        try:
            result = work()
        except Exception as error:
            failure = error
        if self._store is None:
            if failure is not None:
                raise failure
            return [result]
        text = "" if failure is None else f"{type(failure).__name__}: {failure}"
        self._store.set(f"{self._prefix}/{what}/{self._rank}", json.dumps([text, result]))
        rows: list[Any] = [["", None]]
        verdict = ""
        if self._rank == 0:
            with contextlib.suppress(CheckpointError):
                rows = [json.loads(self._get(f"{what}/{rank}", what)) for rank in range(self._ranks)]
            texts = [f"rank {rank}: {row[0]}" for rank, row in enumerate(rows) if row[0]]
            verdict = "; ".join(texts) if len(rows) == self._ranks else f"{what}: a rank did not answer in time"
            self._store.set(f"{self._prefix}/{what}/verdict", verdict)
        else:
            verdict = self._get(f"{what}/verdict", what)
        if failure is not None:
            raise failure
        if verdict:
            raise CheckpointError(f"{what} failed on {verdict} (this is rank {self._rank})")
        return [row[1] for row in rows]

    def _get(self, key: str, what: str) -> str:
        assert self._store is not None
        deadline, pause = time.monotonic() + self._timeout_s, 0.001
        while not self._store.check([f"{self._prefix}/{key}"]):
            if time.monotonic() > deadline:
                raise CheckpointError(f"{what}: no answer within {self._timeout_s:g} s (this is rank {self._rank})")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_POLL_S)
        return self._store.get(f"{self._prefix}/{key}").decode()


class Background:
    """Saves that go on behind training ([Note: Behind training]); one per engine, idle unless ``async_save``."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._store: Store | None = None
        self._running: list[tuple[int, Future[None]]] = []
        self._memory: list[Tensor] = [torch.empty(0, dtype=torch.uint8) for _ in range(2)]
        self._count = 0
        self._told: set[int] = set()

    def submit(self, job: Job, mesh: Mesh) -> None:
        """Copy ``job``'s tensors and write the copies later."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "checkpoint")  # the end of the process waits for it
            self._store = mesh.store()
        self._count += 1
        meet = _ByStore(self._store, mesh, f"checkpoint/{self._count}")
        self._memory.reverse()
        copied = replace(job, tensors=self._copy(job.tensors))
        self._running.append((self._count, self._thread.submit(_run, copied, meet)))

    def surface(self, collectives: Collectives, *, wait: bool = False) -> None:
        """Raise, on all ranks, what went wrong on any. wait: for all; otherwise only where both memories are in use."""
        if self._thread is None:
            return
        errors = []
        while self._running and (wait or len(self._running) > 1 or self._running[0][1].done()):
            number, future = self._running.pop(0)
            error = future.exception()
            errors += [] if error is None or number in self._told else [(number, str(error))]
        found = [row for rows in collectives.exchange_objects(errors) for row in rows]
        self._told |= {number for number, _ in found}  # here it may still run, and will say the same
        if found:
            error = CheckpointError(f"an earlier save_checkpoint failed: {found[0][1]}")
            collectives.faults.know(error)  # all ranks raise it
            raise error

    def _copy(self, tensors: list[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
        """Copies in one of the two memories, each tensor at a multiple of 64 bytes."""
        starts, total = [], 0
        for _, tensor in tensors:
            starts.append(total)
            total += -(-tensor.nbytes // 64) * 64
        cuda = any(tensor.is_cuda for _, tensor in tensors)
        if self._memory[0].numel() < total:
            self._memory[0] = torch.empty(0, dtype=torch.uint8)  # free the old one first
            self._memory[0] = torch.empty(total, dtype=torch.uint8, pin_memory=cuda)
        copies = []
        for start, (key, tensor) in zip(starts, tensors, strict=True):
            copy = self._memory[0][start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            copies.append((key, copy.copy_(tensor.detach(), non_blocking=cuda)))
        if cuda:
            torch.cuda.synchronize()
        return copies


def _run(job: Job, meet: _Meet) -> None:
    try:
        _write(job, meet)
    except Exception as error:
        if job.rank == 0:
            warnings.warn(f"save_checkpoint of {job.folder / job.tag}: {error}", stacklevel=1)
        raise


def _background_of(engine: Inspection) -> Background:
    if engine._saves is None:
        engine._saves = Background()
    found: Background = engine._saves
    return found
