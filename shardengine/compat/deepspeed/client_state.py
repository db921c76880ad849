"""A program's own data beside a checkpoint: JSON in its index, anything else in a file of torch.save.

Owns: the choice between the two, the file, its integrity. Must not know: how an engine saves and loads.

[Note: Two names] The file belongs in the checkpoint's directory, which the engine creates atomically. So the file is
first written beside that directory and moved into it afterwards. The index has its checksum. If the program is killed
in between, nothing is lost: the file is read from the first place.
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
    """Yield the JSON value that the engine saves for ``given`` in ``save_dir/tag``; only rank 0's counts.

    If ``given`` is not JSON, rank 0 writes it to the file. UsageError on every rank, raised by the engine, if
    torch.save cannot write it.
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
            problem = UsageError(
                f"client_state: it is not JSON, and torch.save could not write it: {error}",
                code="deepspeed-client-state-unsavable",
            )
            problem.__cause__ = error
            try:
                yield given  # the engine rejects it on every rank
            except UsageError:
                raise problem from error
            return
        yield {_CHECKSUM: checksum}
        os.replace(waiting, Path(save_dir, tag, FILE))
    finally:
        if waiting is not None:
            waiting.unlink(missing_ok=True)


def found(stored: dict[str, Any], place: Path) -> dict[str, Any]:
    """Return the client state of the checkpoint in the directory ``place``, whose index has ``stored``.

    CheckpointError: the file is missing or damaged. UsageError: it holds classes that torch does not load by default.
    """
    if set(stored) != {_CHECKSUM}:
        return stored
    for path in (place / FILE, _waiting(place.parent, stored[_CHECKSUM]), place / FILE):  # it may be moved meanwhile
        if path.is_file():
            break
    else:
        raise CheckpointError(
            f"{place / FILE}: the file is missing; it has the client state of this checkpoint",
            code="deepspeed-client-state-missing",
        )
    data = path.read_bytes()
    if hashlib.sha256(data).hexdigest() != stored[_CHECKSUM]:
        raise CheckpointError(
            f"{path}: damaged; its SHA-256 is not the one in the checkpoint's index",
            code="deepspeed-client-state-damaged",
        )
    try:
        value: dict[str, Any] = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise UsageError(
            f"{path}: the client state holds objects of classes that torch does not load from a file unasked; call "
            f"torch.serialization.add_safe_globals([...]) with those that you trust before load_checkpoint: {error}",
            code="deepspeed-client-state-unsafe",
        ) from error
    return value


def _waiting(folder: str | Path, checksum: str) -> Path:
    return Path(folder, f".{checksum[:16]}-{FILE}")


def _is_json(value: Any) -> bool:
    """Return whether JSON restores ``value`` exactly."""
    try:
        return bool(json.loads(json.dumps(value, allow_nan=False)) == value)
    except (TypeError, ValueError, RecursionError):
        return False
