"""Write a checkpoint, synchronously or behind training. Owns: the contents of the index, and the order of a save.

Must not know: the format of tensor files, how ranks synchronize.

0. agreement   ranks compare their arguments; the weights that a user's code has written are taken over
1. directory   rank 0 creates an empty directory beside the checkpoints
2. files       every rank writes its tensors to one file, and its entry of the index to another; with ``async_save``
               from host copies, in a thread, while training continues
3. index       rank 0 combines these entries into the index, and removes them
4. commit      rank 0 renames the directory to the tag (``directory.finish``), and lets ``latest`` name it; an older
               checkpoint with that tag is moved aside before, and removed after
5. clean-up    checkpoints beyond ``keep_last`` are removed
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from shardengine.checkpoint import atomic, contents, directory, index, left_out, model_facts, state, tensor_file
from shardengine.checkpoint.background import Background, Meet
from shardengine.comm import Collectives, compare, run_on_all_ranks
from shardengine.core import Inspection
from shardengine.errors import CheckpointError, UsageError
from shardengine.offload import HOST, Platform
from shardengine.sharding import BUFFER, WEIGHT

_log = logging.getLogger(__name__)
_OPEN = (
    "checkpoint %s was saved in the middle of a step: it has the steps that are complete, and nothing of the gradients "
    "of %d micro-batch(es) of step %d. This run goes on with them; one that loads it begins that step anew"
)


@dataclass(frozen=True)
class Job:
    """Everything that one rank writes of one checkpoint.

    tensors: the tensors to write, by their keys in the file · behind: how many of them, from the end, are optimizer
    states · parts: (name, state, dtype, first, end) of each tensor but random states · random: keys of random states
    left_out: this rank's share of the fingerprints of the weights that are not written, by name
    latest: whether ``latest`` is changed to name this checkpoint
    ready: returns when the tensors hold the values to save · platform: that of their device, or the host's
    """

    folder: Path
    tag: str
    rank: int
    ranks: int
    facts: dict[str, Any]
    tensors: list[tuple[str, Tensor]]
    behind: int
    parts: list[tuple[str, str, str, int, int]]
    random: list[str]
    left_out: dict[str, int]
    keep_last: int | None
    platform: Platform
    latest: bool = True
    ready: Callable[[], None] = lambda: None


def save(
    engine: Inspection,
    folder: str | Path,
    tag: str | None,
    client_state: dict[str, Any] | None,
    *,
    frozen: bool = True,
    latest: bool = True,
) -> Path:
    """Write a checkpoint and return its directory. See ``Engine.save_checkpoint``."""
    core = engine._core
    collectives = core.collectives
    core.step_state.require("saving", "save_checkpoint")
    client = {} if client_state is None else client_state
    absent = set() if frozen else left_out.names(core, engine.module)

    def prepare() -> Job:
        """Check the arguments and collect the tensors, so that errors of one rank are found before anything is written.

        Raises UsageError.
        """
        core.step_state.require("save_checkpoint")
        if not isinstance(client, dict):
            raise UsageError(
                f"client_state: expected a dict of JSON values, got {type(client).__name__}",
                code="save-client-state-not-dict",
            )
        state.require_json(client, "client_state")
        place = directory.check_folder(folder)
        name = directory.check_tag(directory.tag_of(engine.global_steps) if tag is None else tag)
        facts = json.loads(json.dumps({**_describe(engine), "client_state": client}))
        return replace(_job(engine, place, name, facts, absent), latest=latest)

    job = run_on_all_ranks(collectives, "preparing a checkpoint", prepare)
    compare(collectives, {"place given to save_checkpoint": [str(job.folder), job.tag], "frozen": [str(frozen)]})
    core.adopt_written_weights()
    if not core.window.is_first and core.mesh.rank == 0:
        _log.warning(_OPEN, job.tag, core.window.micro_batches, engine.global_steps + 1)
    if not engine.config.checkpoint.async_save:
        _write(job, _by_collectives(collectives))
        return job.folder / job.tag
    saves = background_of(engine)
    copies, copying = run_on_all_ranks(
        collectives, "copying a checkpoint to host memory", lambda: saves.copy(job.tensors, job.behind, core.mesh)
    )
    copied = replace(job, tensors=copies, platform=Platform(HOST), ready=copying.result)
    if engine.optimizer is not None:
        engine.optimizer.let_read(copying)
    told = [sum(tensor.nbytes for _, tensor in copies), saves.failures()]
    rows = collectives.exchange_objects(told, "sizes of a checkpoint")
    saves.submit(lambda meet: _write_behind(copied, meet), core.mesh, max(size for size, _ in rows))
    saves.tell([failures for _, failures in rows], collectives)
    return job.folder / job.tag


def finish(engine: Inspection) -> None:
    """Wait until all saves are on disk; raise the failures of any rank on all ranks. Collective."""
    if engine._saves is not None:
        engine._saves.await_copy()  # surface() does not wait for the copy of a save that was never submitted
        engine._saves.surface(engine._core.collectives)


def background_of(engine: Inspection) -> Background:
    """Return the asynchronous saves of ``engine``, created on first use."""
    found: Background = engine._save_behind(Background)
    return found


def _describe(engine: Inspection) -> dict[str, Any]:
    """Return the facts in the index of a checkpoint of ``engine``, except files and client state."""
    core = engine._core
    letters = (
        core.stage.weights_after_forward, core.stage.weights_after_backward, core.stage.gradients, core.stage.state,
    )  # fmt: skip
    return {
        "world_size": core.mesh.ranks,
        "stage": {"name": core.stage.name, "letters": "".join(letter.value for letter in letters)},
        "batch": {
            "train_batch_size": engine.train_batch_size(),
            "train_micro_batch_size_per_gpu": engine.train_micro_batch_size_per_gpu(),
            "gradient_accumulation_steps": engine.gradient_accumulation_steps(),
        },
        "own_buffers": not engine.config.broadcast_buffers,
        "model": model_facts.describe(engine.module),
        "parameters": contents.parameter_table(core),
        "buffers": contents.buffer_table(core),
        "optimizer": state.optimizer_state(engine.optimizer, core),
        "lr_scheduler": state.scheduler_state(engine.lr_scheduler),
        "loss_scaler": state.scaler_state(engine.optimizer),
        "comm_hook": None,
        "counters": {
            "global_steps": engine.global_steps,
            "global_samples": engine.global_samples,
            "micro_steps": core.window.completed,
        },
    }


def _job(engine: Inspection, folder: Path, tag: str, facts: dict[str, Any], absent: set[str]) -> Job:
    core = engine._core
    owned = list(contents.owned(core, engine.optimizer, own_buffers=facts["own_buffers"]))
    owned, kept_out = left_out.parts_of(owned, absent)
    model = [part for part in owned if part.key in (WEIGHT, BUFFER)]  # loaded first
    stepped = [part for part in owned if part.key not in (WEIGHT, BUFFER)]
    parts = model + stepped
    random = [(f"random/{name}", values) for name, values in state.random_states(core.mesh.device)]
    return Job(
        folder=folder,
        tag=tag,
        rank=core.mesh.rank,
        ranks=core.mesh.ranks,
        facts=facts,
        tensors=random + [(contents.name_in_file(p.name, p.key, p.first, p.end), p.values) for p in parts],
        behind=len(stepped),
        parts=[(p.name, p.key, str(p.values.dtype).removeprefix("torch."), p.first, p.end) for p in parts],
        random=[key for key, _ in random],
        left_out=left_out.sums(kept_out, contents.sizes(core)),
        keep_last=engine.config.checkpoint.keep_last,
        platform=core.mesh.platform,
    )


def _write(job: Job, meet: Meet) -> None:
    """Run the steps of a save; a failure on one rank is raised on all and leaves no files behind."""
    first, begun = job.rank == 0, False

    def begin() -> None:
        nonlocal begun
        if first:
            directory.begin(job.folder, job.tag)
            begun = True

    def conclude() -> None:
        """On rank 0: write the index, rename the directory, update ``latest``, remove old checkpoints."""
        if first:
            work = directory.work_of(job.folder, job.tag)
            atomic.write_text(work / directory.INDEX, index.to_text({**job.facts, **_collect(job, work)}))
            directory.finish(job.folder, job.tag, latest=job.latest)
            if job.keep_last:
                directory.keep_last(job.folder, job.keep_last)

    try:
        meet("making a checkpoint's directory", lambda: _readably(job.folder, begin))
        meet("writing a checkpoint", lambda: _readably(job.folder, lambda: _write_file(job)))
        meet("concluding a checkpoint", lambda: _readably(job.folder, conclude))
    except BaseException:
        if begun:
            directory.abandon(job.folder, job.tag)
        raise


def _write_behind(job: Job, meet: Meet) -> None:
    try:
        _write(job, meet)
    except Exception as error:
        if job.rank == 0:
            warnings.warn(f"save_checkpoint of {job.folder / job.tag}: {error}", stacklevel=1)
        raise


def _write_file(job: Job) -> None:
    """Write this rank's file, and beside it the entry of the index for it."""
    work = directory.work_of(job.folder, job.tag)
    if not work.is_dir():
        raise CheckpointError(
            f"{work}, which rank 0 has made, is not there on rank {job.rank}: expected a directory that all "
            "ranks share",
            code="save-folder-not-shared",
        )
    file = index.file_of(job.rank)
    job.ready()
    done = tensor_file.write(work / file, job.tensors, job.platform)
    sizes = {key: values.numel() for key, values in job.tensors}
    entry = {
        "file": {"bytes": done.bytes, "chunks": done.chunks},
        "parts": [
            [name, kind, dtype, [file, first, end, done.offsets[contents.name_in_file(name, kind, first, end)]]]
            for name, kind, dtype, first, end in job.parts
        ],
        "random": {key.removeprefix("random/"): [file, done.offsets[key], sizes[key]] for key in job.random},
        "left_out": job.left_out,
    }
    _entry_of(work, job.rank).write_text(json.dumps(entry), encoding="utf-8")


def _entry_of(work: Path, rank: int) -> Path:
    return work / f"{index.file_of(rank)}.json"


def _collect(job: Job, work: Path) -> dict[str, Any]:
    """Return ``files``, ``tensors``, ``random`` and ``left_out`` of the index from all ranks' entries; remove these."""
    files: dict[str, Any] = {}
    tensors: dict[str, dict[str, Any]] = {}
    random: dict[str, list[Any]] = {}
    shares: list[dict[str, int]] = []
    for rank in range(job.ranks):
        path = _entry_of(work, rank)
        entry = json.loads(path.read_text(encoding="utf-8"))
        path.unlink()
        size = (work / index.file_of(rank)).stat().st_size
        if size != entry["file"]["bytes"]:
            raise CheckpointError(
                f"{work / index.file_of(rank)} has {size} bytes, rank {rank} wrote {entry['file']['bytes']}",
                code="save-file-size-wrong",
            )
        files[index.file_of(rank)] = entry["file"]
        for name, kind, dtype, piece in entry["parts"]:
            tensors.setdefault(name, {}).setdefault(kind, {"dtype": dtype, "pieces": []})["pieces"].append(piece)
        for name, place in entry["random"].items():
            random.setdefault(name, []).append(place)
        shares.append(entry["left_out"])
    return {"files": files, "tensors": tensors, "random": random, "left_out": left_out.together(shares)}


def _readably(folder: Path, work: Callable[[], None]) -> None:
    try:
        work()
    except OSError as error:
        raise CheckpointError(
            f"the checkpoint could not be written to {folder}: {error.strerror or error}; the previous one is intact",
            code="save-not-written",
        ) from error


def _by_collectives(collectives: Collectives) -> Meet:
    return lambda what, work: run_on_all_ranks(collectives, what, work)
