"""What a program keeps beside a checkpoint: JSON in its index, anything else in a file of torch.save.

Owns: which of the two, the file, that it is whole. Must not know: how an engine saves and loads.

[Note: Two names] The file lies in the checkpoint's directory, which the engine makes at once and whole. So it is
written beside it first and moved inside afterwards; the index has its checksum. Where a program is killed in between,
nothing is lost: it is read where it was written.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from shardengine.compat.deepspeed import processes
from shardengine.errors import CheckpointError, UsageError

FILE = "client_state.pt"
_CHECKSUM = f"sha256 of {FILE}"


@contextmanager
def kept(save_dir: str | Path, tag: str, given: Any) -> Iterator[Any]:
    """Yield what the engine keeps for ``given``, JSON, while it saves ``save_dir/tag``; of rank 0, as ever.

    UsageError on every rank, from the engine, where torch.save cannot write it.
    """
    if _is_json(given) or processes.get_rank() != 0:
        yield given if _is_json(given) else None
        return
    waiting: Path | None = None
    try:
        try:
            data = io.BytesIO()
            torch.save(given, data)
            checksum = hashlib.sha256(data.getbuffer()).hexdigest()
            waiting = _waiting(save_dir, checksum)
            os.makedirs(save_dir, exist_ok=True)
            with open(waiting, "wb") as file:
                file.write(data.getbuffer())
                os.fsync(file.fileno())
        except Exception as error:
            problem = UsageError(f"client_state: it is not JSON, and torch.save could not write it: {error}")
            problem.__cause__ = error
            try:
                yield given  # which the engine refuses on every rank
            except UsageError:
                raise problem from error
            return
        yield {_CHECKSUM: checksum}
        os.replace(waiting, Path(save_dir, tag, FILE))
    finally:
        if waiting is not None:
            waiting.unlink(missing_ok=True)


def found(stored: dict[str, Any], place: Path) -> dict[str, Any]:
    """What was given, of a checkpoint in the directory ``place`` whose index has ``stored``.

    CheckpointError: the file is missing or damaged. UsageError: it holds what torch does not take from a file unasked.
    """
    if set(stored) != {_CHECKSUM}:
        return stored
    for path in (place / FILE, _waiting(place.parent, stored[_CHECKSUM]), place / FILE):  # it may just be moved
        if path.is_file():
            break
    else:
        raise CheckpointError(f"{place / FILE}: the file is missing; it has the client state of this checkpoint")
    data = path.read_bytes()
    if hashlib.sha256(data).hexdigest() != stored[_CHECKSUM]:
        raise CheckpointError(f"{path}: damaged; its SHA-256 is not the one in the checkpoint's index")
    try:
        value: dict[str, Any] = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise UsageError(
            f"{path}: the client state holds objects of classes that torch does not load from a file unasked; call "
            f"torch.serialization.add_safe_globals([...]) with those that you trust before load_checkpoint: {error}"
        ) from error
    return value


def _waiting(folder: str | Path, checksum: str) -> Path:
    return Path(folder, f".{checksum[:16]}-{FILE}")


def _is_json(value: Any) -> bool:
    """Whether JSON gives ``value`` back as it is."""
    try:
        return bool(json.loads(json.dumps(value, allow_nan=False)) == value)
    except (TypeError, ValueError, RecursionError):
        return False
