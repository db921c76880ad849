"""Directories of checkpoints: each appears whole or not at all, ``latest`` names one, old ones are removed.

Must not know: engines, tensors, what is inside of a checkpoint but for the name of its index.

[Note: Atomic directories] A checkpoint is written into ``.tmp-<tag>``, files and directory are fsynced, and one rename
makes it ``<tag>``; then ``latest`` is replaced by another rename. Where the tag exists already, the old directory is
first renamed to ``.old-<tag>`` and removed at the end; ``recover`` puts it back if the program ended between the two
renames. So at every moment ``latest`` names a directory that is whole, or one that ``recover`` brings back.
"""

from __future__ import annotations

import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

from shardengine.errors import UsageError

INDEX, LATEST = "index.json", "latest"
_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=-]*")
_AUTOMATIC = re.compile(r"step-\d{8,}")
_MAX_TAG = 200


def tag_of(step: int) -> str:
    """The tag of a checkpoint that nobody gave a name."""
    return f"step-{step:08}"


def check_tag(tag: str) -> str:
    """``tag``; ``UsageError`` unless it is a plain name."""
    if not isinstance(tag, str) or not _TAG.fullmatch(tag) or tag == LATEST or len(tag) > _MAX_TAG:
        raise UsageError(
            f"checkpoint tag {str(tag)[:_MAX_TAG]!r}: expected a plain name of at most {_MAX_TAG} letters, digits and "
            ". _ + = - (and not 'latest')"
        )
    return tag


def check_folder(directory: str | Path) -> Path:
    """``directory`` as a path; ``UsageError`` unless it is one."""
    if not isinstance(directory, str | Path) or not str(directory):
        raise UsageError(f"directory of checkpoints: expected a path, came {directory!r}")
    return Path(directory)


def saved(directory: Path) -> list[str]:
    """``present``, after what killed runs began is ended; for the run that writes there, or loads."""
    with suppress(OSError):
        for old in directory.glob(".old-*"):
            recover(directory, old.name.removeprefix(".old-"))
    return present(directory)


def present(directory: Path) -> list[str]:
    """The tags of the checkpoints in ``directory``, whole as far as names go, the one that was written last first."""
    found = []
    with suppress(OSError):
        for path in directory.iterdir():
            with suppress(OSError):
                if _TAG.fullmatch(path.name):
                    found.append((-(path / INDEX).stat().st_mtime_ns, path.name))
    return [name for _, name in sorted(found)]


def latest(directory: Path) -> str | None:
    """The tag that ``latest`` names; None where it is missing or says nothing of use."""
    try:
        name = (directory / LATEST).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return None
    return name if _TAG.fullmatch(name) else None


def begin(directory: Path, tag: str) -> Path:
    """The empty directory to write ``tag`` into; what killed runs left unfinished is removed."""
    directory.mkdir(parents=True, exist_ok=True)
    recover(directory, tag)
    for left in directory.glob(".tmp-*"):
        shutil.rmtree(left)
    work = work_of(directory, tag)
    work.mkdir()
    return work


def finish(directory: Path, tag: str) -> Path:
    """Everything is written: ``tag`` appears, and ``latest`` names it ([Note: Atomic directories]).

    An error leaves everything as it was, the work directory included.
    """
    work, target, old = work_of(directory, tag), directory / tag, _old(directory, tag)
    sync_directory(work)
    if target.exists():
        target.rename(old)
    try:
        work.rename(target)
        sync_directory(directory)
        write_text(directory / LATEST, tag + "\n")
    except BaseException:
        if target.exists():
            target.rename(work)
        if old.exists():
            old.rename(target)
        raise
    shutil.rmtree(old, ignore_errors=True)
    return target


def keep_last(directory: Path, count: int) -> None:
    """Remove all but the last ``count`` checkpoints with automatic tags; those that somebody named stay."""
    for tag in [name for name in saved(directory) if _AUTOMATIC.fullmatch(name)][count:]:
        gone = directory / f".tmp-removed-{tag}"
        with suppress(OSError):
            (directory / tag).rename(gone)  # so that half of it is never taken for a checkpoint
            shutil.rmtree(gone)


def abandon(directory: Path, tag: str) -> None:
    """Remove what was written so far; never raises."""
    shutil.rmtree(work_of(directory, tag), ignore_errors=True)
    with suppress(OSError):
        recover(directory, tag)


def recover(directory: Path, tag: str) -> None:
    """End what a killed run began when it replaced ``tag``."""
    old = _old(directory, tag)
    if not old.exists():
        return
    if (directory / tag).exists():
        shutil.rmtree(old)
    else:
        old.rename(directory / tag)


def write_text(path: Path, text: str) -> None:
    """Write and fsync a text file beside ``path`` and move it there."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make renames and new files in ``path`` durable."""
    number = os.open(path, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network file systems refuse it
            os.fsync(number)
    finally:
        os.close(number)


def work_of(directory: Path, tag: str) -> Path:
    """Where ``tag`` is written until it is whole."""
    return directory / f".tmp-{tag}"


def _old(directory: Path, tag: str) -> Path:
    return directory / f".old-{tag}"
