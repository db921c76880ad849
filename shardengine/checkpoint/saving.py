"""Writing a checkpoint, at once or behind training. Owns: the order of a save, host copies, the thread that writes.

Must not know: the form of files and index.

[Note: Behind training] With ``async_save`` the call copies this rank's tensors to host memory and returns; a thread
writes the copies. Ranks then meet through the process group's store instead of through collectives, which belong to
training. There are two sets of host memory: while one is being written the next save may fill the other, and the one
after that waits. What goes wrong is warned of at once and raised, on all ranks, by the next call that saves or waits.
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
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
_PATIENCE = 1.25
"""A verdict is waited for so much longer than the answers of which it is made."""


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
        job = together(collectives, "copying a checkpoint to host memory", lambda: background.copy(job))
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
    first, begun = job.rank == 0, False

    def begin() -> None:
        nonlocal begun
        directory.begin(job.folder, job.tag)
        begun = True

    def conclude(entries: list[dict[str, Any]]) -> None:
        work = directory.work_of(job.folder, job.tag)
        directory.write_text(work / directory.INDEX, index.to_text({**job.facts, **_tables(entries)}))
        directory.finish(job.folder, job.tag)
        if job.keep_last:
            directory.keep_last(job.folder, job.keep_last)

    def meet_readably(what: str, work: Callable[[], Any]) -> list[Any]:
        return meet(what, lambda: _readably(job.folder, work))

    try:
        meet_readably("making a checkpoint's directory", lambda: begin() if first else None)
        entries = meet_readably("writing a checkpoint", lambda: _write_file(job))
        meet_readably("concluding a checkpoint", lambda: conclude(entries) if first else None)
    except BaseException:
        if begun:
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


def _readably(folder: Path, work: Callable[[], Any]) -> Any:
    try:
        return work()
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
        rows: list[Any] = [[None if failure is None else str(failure), result]]
        verdict = ""
        if self._store is not None:
            try:
                rows, verdict = self._exchange(self._store, what, rows[0])
            except RuntimeError as error:  # the store's own: its host is gone
                failure = failure or CheckpointError(f"{what}: no answer from rank 0 ({str(error).splitlines()[0]})")
        if failure is not None:
            raise failure
        if verdict:
            raise CheckpointError(f"{what} failed on {verdict} (this is rank {self._rank})")
        return [row[1] for row in rows]

    def _exchange(self, store: Store, what: str, mine: list[Any]) -> tuple[list[Any], str]:
        """Every rank's [error, result] on rank 0, nothing elsewhere; what rank 0 says of the errors."""
        if self._rank:
            store.set(f"{self._prefix}/{what}/{self._rank}", json.dumps(mine))
            verdict = self._get(store, f"{what}/verdict", _PATIENCE * self._timeout_s)
            return [], f"rank 0: no answer within {self._timeout_s:g} s" if verdict is None else verdict
        rows = [mine]
        deadline = time.monotonic() + self._timeout_s
        for rank in range(1, self._ranks):
            text = self._get(store, f"{what}/{rank}", deadline - time.monotonic())
            if text is not None:
                store.delete_key(f"{self._prefix}/{what}/{rank}")
            rows.append([f"no answer within {self._timeout_s:g} s", None] if text is None else json.loads(text))
        verdict = "; ".join(f"rank {rank}: {row[0]}" for rank, row in enumerate(rows) if row[0] is not None)
        store.set(f"{self._prefix}/{what}/verdict", verdict)
        return rows, verdict

    def _get(self, store: Store, key: str, seconds: float) -> str | None:
        """A text; None if it does not come."""
        deadline, pause = time.monotonic() + seconds, 0.001
        while not store.check([f"{self._prefix}/{key}"]):
            if time.monotonic() > deadline:
                return None
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_POLL_S)
        return store.get(f"{self._prefix}/{key}").decode()


class Background:
    """Saves that go on behind training ([Note: Behind training]); one per engine, idle unless ``async_save``."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._store: Store | None = None
        self._prefix = ""
        self._running: list[tuple[int, Future[None]]] = []
        self._memory: list[Tensor] = [torch.empty(0, dtype=torch.uint8) for _ in range(2)]
        self._count = 0
        self._told: set[int] = set()

    def copy(self, job: Job) -> Job:
        """``job`` with copies of its tensors, in the memory that nothing is being written from."""
        return replace(job, tensors=self._copy(job.tensors))

    def submit(self, job: Job, mesh: Mesh) -> None:
        """Write ``job``, which ``copy`` has made, later."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "checkpoint")  # the end of the process waits for it
            self._store = mesh.store()
            if self._store is not None:  # engines may share a mesh; every rank makes them in the same order
                self._prefix = f"checkpoint/{self._store.add(f'checkpoint/engines/{mesh.rank}', 1)}"
        self._count += 1
        self._memory.reverse()
        meet = _ByStore(self._store, mesh, f"{self._prefix}/{self._count}")
        self._running.append((self._count, self._thread.submit(_run, job, meet)))

    def surface(self, collectives: Collectives, *, wait: bool = False) -> None:
        """Raise, on all ranks, what went wrong on any. wait: for all; otherwise only where both memories are in use."""
        if self._thread is None:
            return
        errors = []
        while self._running and (wait or len(self._running) > 1 or self._running[0][1].done()):
            number, future = self._running[0]
            error = future.exception()
            del self._running[0]
            errors += [] if error is None or number in self._told else [(number, str(error))]
        found: dict[int, str] = {}
        for number, text in (row for rows in collectives.exchange_objects(errors) for row in rows):
            found.setdefault(number, text)
        self._told |= found.keys()  # here it may still run, and will say the same
        if found:
            error = CheckpointError(f"an earlier save_checkpoint failed: {'; '.join(found.values())}")
            collectives.faults.know(error)  # all ranks raise it
            raise error

    def _copy(self, tensors: list[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
        """Each tensor at a multiple of 64 bytes."""
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
