"""Write an imported checkpoint as one of ours, in the form that a single rank would have saved.

Owns: the order of writing. Any number of ranks at any stage can load the result. One tensor at a time is in memory, and
the checkpoint appears only when all of it is on disk. Must not know: the source.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardengine.checkpoint import Stream, contents, directory, header_of, index, write_text
from shardengine.errors import CheckpointError, ShardEngineError
from shardengine.interchange import options
from shardengine.interchange.foreign import Foreign, ForeignParameter
from shardengine.sharding import BUFFER, WEIGHT


@dataclass(frozen=True)
class _WrittenEntry:
    """A whole tensor to write."""

    name: str
    state: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], Tensor]

    @property
    def key(self) -> str:
        return contents.name_in_file(self.name, self.state, 0, prod(self.shape))


def write(foreign: Foreign, folder: str | Path, tag: str | None = None) -> Path:
    """Write ``foreign`` as checkpoint ``tag`` of ``folder`` (default: ``step-`` and its steps); return its path.

    A checkpoint of that name is replaced when the new one is complete. After an error nothing has changed.
    """
    place = directory.check_folder(folder)
    name = directory.check_tag(directory.tag_of(foreign.global_steps) if tag is None else tag)
    entries = sorted(_entries(foreign), key=lambda entry: -entry.dtype.itemsize)  # every tensor then starts aligned
    head, offsets, total = header_of([(entry.key, entry.dtype, entry.shape) for entry in entries])
    file = index.file_of(0)
    try:
        work = directory.begin(place, name)  # do not abandon after an error here: it may be another writer's directory
    except OSError as error:
        raise _unwritten(place / name, error) from error
    try:
        with Stream(work / file) as stream:
            stream.put(torch.frombuffer(bytearray(head), dtype=torch.uint8))
            for entry in entries:
                stream.put(_bytes_of(entry, foreign.source))
        tensors: dict[str, dict[str, Any]] = {}
        for entry in entries:
            dtype, piece = _text(entry.dtype), [file, 0, prod(entry.shape), offsets[entry.key]]
            tensors.setdefault(entry.name, {})[entry.state] = {"dtype": dtype, "pieces": [piece]}
        files = {file: {"bytes": total, "chunks": stream.chunks}}
        facts = {**_facts(foreign), "files": files, "tensors": tensors, "random": {}}
        write_text(work / directory.INDEX, index.to_text(facts))
        index.read(work)  # raises now what a load would raise later
        return directory.finish(place, name)
    except BaseException as error:
        directory.abandon(place, name)
        if isinstance(error, OSError) and not isinstance(error, ShardEngineError):
            raise _unwritten(place / name, error) from error
        raise


def _unwritten(place: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"{place} could not be written: {error.strerror or error}", code="import-not-written")


def _bytes_of(entry: _WrittenEntry, source: str) -> Tensor:
    expected = f"{entry.name} ({entry.state}): expected {_text(entry.dtype)} {entry.shape} from {source}"
    try:
        value = entry.read().detach()
    except ShardEngineError:
        raise
    except (RuntimeError, ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise CheckpointError(
            f"{expected}, its files are damaged ({type(error).__name__}: {error})", code="import-damaged"
        ) from error
    if value.dtype != entry.dtype or tuple(value.shape) != entry.shape:
        raise CheckpointError(
            f"{expected}, got {_text(value.dtype)} {tuple(value.shape)}", code="import-tensor-unlike-described"
        )
    return value.contiguous().reshape(-1).view(torch.uint8)


def _entries(foreign: Foreign) -> Iterator[_WrittenEntry]:
    made = options.states_of(foreign.kind, foreign.groups)
    for parameter in foreign.parameters:
        stepped = parameter.is_stepped and foreign.kind is not None
        own = options.states_of(foreign.kind, [foreign.groups[parameter.group]]) if stepped else ()
        for state in (WEIGHT, *(made if stepped else ())):
            if state in parameter.states:
                yield _stored(parameter, state)
            elif not parameter.steps or state not in own:
                yield _zeros(parameter, state)
    for name, buffer in foreign.buffers.items():
        yield _WrittenEntry(name, BUFFER, buffer.dtype, tuple(buffer.shape), lambda buffer=buffer: buffer)  # type: ignore[misc]


def _stored(parameter: ForeignParameter, state: str) -> _WrittenEntry:
    dtype = torch.float32 if state != WEIGHT or parameter.is_stepped else parameter.dtype
    return _WrittenEntry(parameter.names[0], state, dtype, parameter.shape, lambda: parameter.read(state).to(dtype))


def _zeros(parameter: ForeignParameter, state: str) -> _WrittenEntry:
    """Return zeros for a state that the source lacks.

    Either torch creates it at the first step, or its group has no such state but another group has: our optimizer keeps
    a state for every group or for none.
    """
    return _WrittenEntry(
        parameter.names[0], state, torch.float32, parameter.shape, lambda: torch.zeros(parameter.shape)
    )


def _text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _facts(foreign: Foreign) -> dict[str, Any]:
    """Return the index without its tables of files and tensors."""
    steps, samples = foreign.global_steps, foreign.global_samples
    batch = {"train_batch_size": samples // steps} if steps and samples and not samples % steps else {}
    return {
        "world_size": 1,
        "stage": {"name": f"imported from {foreign.source}", "letters": "RRPR"},
        "batch": batch,
        "own_buffers": False,
        "model": {"class": None, "config": None, "generation_config": None, "peft": None},
        "parameters": [
            {
                "names": list(parameter.names),
                "shape": list(parameter.shape),
                "order": [],
                "dtype": _text(parameter.dtype),
                "trainable": parameter.trainable,
                "group": parameter.group,
            }
            for parameter in foreign.parameters
        ],
        "buffers": [
            {"name": name, "shape": list(buffer.shape), "dtype": _text(buffer.dtype)}
            for name, buffer in foreign.buffers.items()
        ],
        "optimizer": _optimizer(foreign),
        "lr_scheduler": None,
        "loss_scaler": _loss_scaler(foreign),
        "comm_hook": None,
        "counters": {"global_steps": steps, "global_samples": samples, "micro_steps": foreign.micro_steps},
        "client_state": foreign.client_state,
    }


def _loss_scaler(foreign: Foreign) -> dict[str, Any] | None:
    """Return the state of our loss scaler: only the scale is imported; its count of good steps starts at 0."""
    if foreign.loss_scale is None or not 0 < foreign.loss_scale < 2**128:
        return None
    return {"scale": foreign.loss_scale, "good": 0, "tolerated": 1 << 30, "skipped": 0}


def _optimizer(foreign: Foreign) -> dict[str, Any] | None:
    if foreign.kind is None:
        return None
    groups = [
        {"params": [p.names[0] for p in foreign.parameters if p.group == number], "options": group}
        for number, group in enumerate(foreign.groups)
    ]
    return {"kind": foreign.kind, "groups": groups, "steps": {p.names[0]: p.steps for p in foreign.parameters}}
