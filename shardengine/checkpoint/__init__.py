"""Saving and loading a training: own shards as safetensors, one JSON index, written aside and renamed; no pickle.

save   every rank writes its file into a temporary directory; when all are written rank 0 adds the index and renames
load   every rank verifies first, everywhere, and only then changes the engine

Collective calls. Must not know: the training loop.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardengine.agreement import compare, together
from shardengine.checkpoint import contents, files, index, state
from shardengine.errors import CheckpointError, UsageError
from shardengine.inspection import Inspection
from shardengine.recovery import announced

__all__ = ["Checkpoint", "load", "save"]


@dataclass(frozen=True)
class Checkpoint:
    """What was loaded, from where."""

    tag: str
    directory: Path
    global_steps: int
    global_samples: int
    micro_steps: int
    client_state: dict[str, Any]


@announced("save_checkpoint")
def save(engine: Inspection, directory: str | Path, tag: str | None, client_state: dict[str, Any] | None) -> Path:
    """Write a checkpoint; its directory. See ``Engine.save_checkpoint``."""
    core, folder = engine._need_core(), Path(directory)
    collectives, rank = core.collectives, core.mesh.rank
    client = {} if client_state is None else client_state

    def prepare() -> tuple[str, dict[str, Any]]:
        if engine.optimizer is not None:
            engine.optimizer.require_whole()
        _require_rest(engine, "save_checkpoint")
        state.require_json(client, "client_state")
        name = index.check_tag(f"step-{engine.global_steps:08}" if tag is None else tag)
        return name, {**index.describe(engine), "client_state": client}

    name, facts = together(collectives, "preparing a checkpoint", prepare)
    core.adopt_written_weights()
    compare(collectives, {"place given to save_checkpoint": [str(folder), name]})
    work = folder / f".tmp-{name}"

    def write() -> dict[str, Any]:
        own_buffers = not engine.config.broadcast_buffers
        parts = list(contents.owned(core, engine.optimizer, own_buffers=own_buffers))
        tensors = [(part.key, part.values) for part in parts] + state.random_states(core.mesh.device)
        written = files.write_tensors(work / index.file_of(rank), tensors)
        rows = [[p.name, p.state, str(p.values.dtype).removeprefix("torch."), p.first, p.end] for p in parts]
        return {"file": written, "parts": rows}

    def conclude(entries: list[dict[str, Any]]) -> None:
        files.write_text(work / index.INDEX, index.to_text({**facts, **_tables(entries)}))
        files.finish(folder, name)

    try:
        with _writing(folder):
            first = rank == 0
            together(collectives, "making a checkpoint's directory", lambda: first and files.begin(folder, name))
            entry = together(collectives, "writing a checkpoint", write)
            entries = collectives.exchange_objects(entry)
            together(collectives, "concluding a checkpoint", lambda: conclude(entries) if first else None)
    except BaseException:
        if rank == 0:
            files.abandon(folder, name)
        raise
    return folder / name


@announced("load_checkpoint")
def load(engine: Inspection, directory: str | Path, tag: str | None) -> Checkpoint:
    """Verify a checkpoint on every rank, then fill the engine from it. See ``Engine.load_checkpoint``.

    Also the way on after an update that nothing can finish (recovery: [Note: Back to one step]).
    """
    core, folder = engine._need_core(), Path(directory)
    collectives, rank, ranks = core.collectives, core.mesh.rank, core.mesh.ranks
    interrupted = _interrupted(engine)
    compare(collectives, {"place given to load_checkpoint": [str(folder), str(tag)]})
    chosen = together(collectives, "finding the checkpoint", lambda: _find(engine, folder, tag) if rank == 0 else "")
    name = str(collectives.exchange_objects(chosen)[0])
    place = folder / name

    def verify() -> dict[str, Any]:
        if not interrupted:
            _require_rest(engine, "load_checkpoint")
        saved = index.read(place)
        problems = index.differences(saved, index.describe(engine))
        if not problems:
            problems = index.missing(saved, contents.held(core, engine.optimizer))
        if problems:
            raise UsageError("\n  - ".join([f"checkpoint {place} does not fit this engine:", *problems]))
        for number, (file, facts) in enumerate(sorted(saved["files"].items())):
            _check_file(saved, place / file, facts, thoroughly=number % ranks == rank)
        return saved

    saved = together(collectives, f"verifying checkpoint {place}", verify)
    core.await_weights()
    core.schedule.rest()
    core.reducer.release()
    together(
        collectives, f"loading checkpoint {place} (the engine is partly loaded)", lambda: _fill(engine, place, saved)
    )
    core.adopt_masters()
    if engine.optimizer is not None:
        engine.optimizer.end_window()
    engine._window.restart()
    engine._buffers_sent = False
    counters = saved["counters"]
    engine._window.total = counters["micro_steps"]
    engine.global_steps, engine.global_samples = counters["global_steps"], counters["global_samples"]
    return Checkpoint(name, place, client_state=saved["client_state"], **counters)


def _interrupted(engine: Inspection) -> bool:
    """Whether an update was interrupted for good, so that an open window is no obstacle to loading."""
    update = None if engine.optimizer is None else engine.optimizer.update
    if update is None or not update.begun:
        return False
    if not update.lost and engine.world_size > 1:
        raise UsageError(
            "load_checkpoint after a step() that was interrupted in the middle of its update: call engine.reset() on "
            f"every rank first, because collectives of rank {engine.rank} may still be under way"
        )
    return True


def _require_rest(engine: Inspection, call: str) -> None:
    if engine._core.pinned:
        raise UsageError(f"{call} inside full_params(): call it after the `with` block")
    if not engine._window.is_first:
        raise UsageError(
            f"{call} in the middle of a step (micro-batches are accumulated, the weights are not stepped): call it "
            "after the engine.step() that ends the window, or call engine.zero_grad() first"
        )


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"the checkpoint could not be written to {folder}: {error.strerror or error}; the previous one is intact"
        ) from error


def _tables(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """The index's ``files`` and ``tensors`` from what each rank has written."""
    tensors: dict[str, dict[str, Any]] = {}
    for rank, entry in enumerate(entries):
        for name, kind, dtype, first, end in entry["parts"]:
            row = tensors.setdefault(name, {}).setdefault(kind, {"dtype": dtype, "pieces": []})
            row["pieces"].append([index.file_of(rank), first, end])
    return {"files": {index.file_of(rank): entry["file"] for rank, entry in enumerate(entries)}, "tensors": tensors}


def _find(engine: Inspection, folder: Path, tag: str | None) -> str:
    """The tag to load: the given one, or what ``latest`` names."""
    if tag is None:
        try:
            tag = (folder / files.LATEST).read_text(encoding="utf-8").strip()
        except (OSError, ValueError):
            raise CheckpointError(
                f"{folder}: expected a directory of checkpoints, it has no readable 'latest'"
            ) from None
    name = index.check_tag(tag)
    files.recover(folder, name)
    if not (folder / name).is_dir():
        raise CheckpointError(f"{folder} has no checkpoint {name!r}")
    return name


def _check_file(saved: dict[str, Any], path: Path, facts: dict[str, Any], *, thoroughly: bool) -> None:
    found = path.stat().st_size if path.is_file() else -1
    if found == facts["bytes"] and (not thoroughly or files.checksum(path) == facts["sha256"]):
        return
    inside = [name for name, kinds in saved["tensors"].items() for row in kinds.values()
              if any(piece[0] == path.name for piece in row["pieces"])]  # fmt: skip
    what = "is missing" if found < 0 else f"has {found} bytes, expected {facts['bytes']}"
    what = "is damaged (its checksum differs)" if found == facts["bytes"] else what
    names = list(dict.fromkeys(inside))
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    raise CheckpointError(f"{path} {what}; it holds {', '.join(names[:4])}{more}. Load another checkpoint")


@torch.no_grad()
def _fill(engine: Inspection, place: Path, saved: dict[str, Any]) -> None:
    """Write every view that this rank holds, then everything that is no tensor."""
    from safetensors import safe_open

    core = engine._core
    names = [spec.name for spec in core.layout.parameters]
    mine = index.file_of(core.mesh.rank)
    opened: dict[str, Any] = {}

    def source(file: str) -> Any:
        if file not in opened:
            opened[file] = safe_open(place / file, "pt")
        return opened[file]

    for part in contents.held(core, engine.optimizer):
        whole = part.values.is_contiguous()
        flat = part.values.view(-1) if whole else part.values.new_empty(part.values.numel())
        for file, first, end in _pieces(saved, part, mine):
            start, stop = max(first, part.first), min(end, part.end)
            key = contents.key_of(part.name, part.state, first, end)
            if part.values.numel() and start < stop:
                values = source(file).get_tensor(key).reshape(-1)[start - first : stop - first]
                flat[start - part.first : stop - part.first].copy_(values)
        if not whole:
            part.values.copy_(flat.view(part.values.shape))
    if engine.optimizer is not None:
        state.restore_optimizer(engine.optimizer, saved["optimizer"], names)
    if engine.lr_scheduler is not None:
        state.restore_scheduler(engine.lr_scheduler, saved["lr_scheduler"])
    own = source(mine)
    states = {key: own.get_tensor(key) for key in own.keys() if key.startswith("rng/") and "[" not in key}  # noqa: SIM118
    state.restore_random_states(states, core.mesh.device)


def _pieces(saved: dict[str, Any], part: contents.Part, mine: str) -> list[tuple[str, int, int]]:
    """(file, first, end) of what the files have of ``part``; this rank's own alone where every rank wrote all of it."""
    pieces: list[tuple[str, int, int]] = saved["tensors"][part.name][part.state]["pieces"]
    own = [piece for piece in pieces if piece[0] == mine] if part.state == contents.BUFFER else []
    return own or pieces
