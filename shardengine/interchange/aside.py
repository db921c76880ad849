"""A directory that appears whole or not at all. Must not know: what is written into it."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shardengine.checkpoint.directory import sync_directory
from shardengine.errors import CheckpointError, UsageError


def check_free(out: Path) -> None:
    """``UsageError`` unless ``out`` is not there, or is an empty directory."""
    try:
        if (out.exists() or out.is_symlink()) and (not out.is_dir() or any(out.iterdir())):
            found = "a directory with something in it" if out.is_dir() else "a file"
            raise UsageError(f"{out}: expected a new or empty directory, found {found}; nothing is overwritten")
    except OSError as error:
        raise UsageError(f"{out}: expected a new or empty directory: {error.strerror}") from None


@contextmanager
def new_directory(out: Path) -> Iterator[Path]:
    """An empty directory to write into; at the end of the ``with`` all of it is on disk, under the name ``out``.

    Whatever raises inside, nothing is left; where it is the disk, that is a CheckpointError.
    """
    check_free(out)
    target = out.resolve()
    outer: Path | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        outer = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        work = outer / target.name
        work.mkdir()
        yield work
        for path in sorted(work.rglob("*"), reverse=True):
            _sync(path)
        sync_directory(work)
        os.rename(work, target)
        sync_directory(target.parent)
    except OSError as error:
        raise CheckpointError(
            f"{out}: could not be written: {error.strerror or error}; nothing is left there"
        ) from error
    finally:
        if outer is not None:
            shutil.rmtree(outer, ignore_errors=True)


def _sync(path: Path) -> None:
    if path.is_dir():
        return sync_directory(path)
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
    return None
