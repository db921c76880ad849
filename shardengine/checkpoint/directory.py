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
import threading
from contextlib import suppress
from pathlib import Path

from shardengine.checkpoint import atomic
from shardengine.errors import CheckpointError, UsageError

INDEX, LATEST = "index.json", "latest"
_WORK, _OLD = ".tmp-", ".old-"
_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=-]*")
_AUTOMATIC = re.compile(r"step-(\d{8,})", re.ASCII)
_MAX_TAG = 200
_under_way: set[Path] = set()
"""What engines of this process are writing: several may save behind training, into one directory."""
_ONE_AT_A_TIME = threading.RLock()


def tag_of(step: int) -> str:
    """The tag of a checkpoint that nobody gave a name."""
    return f"step-{step:08}"


def step_of(tag: str) -> int | None:
    """The step in a tag of ``tag_of``; None where somebody gave the checkpoint a name."""
    automatic = _AUTOMATIC.fullmatch(tag)
    return int(automatic[1]) if automatic else None


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
        raise UsageError(f"directory of checkpoints: expected a path, got {directory!r}")
    return Path(directory)


def saved(directory: Path) -> list[str]:
    """``present``, after what killed runs began is ended; for the run that writes there, or loads."""
    for old in _begins_with(directory, _OLD):
        with suppress(OSError):
            recover(directory, old.name.removeprefix(_OLD))
    return [tag for tag in present(directory) if place_of(directory, tag) == directory / tag]  # a disk may refuse


def present(directory: Path) -> list[str]:
    """The tags of the checkpoints in ``directory``, whole as far as names go, the one that was written last first.

    Nothing is changed: one that a killed save put aside counts, and lies at ``place_of``.
    """
    found = {}
    with suppress(OSError):
        for path in directory.iterdir():
            tag = path.name.removeprefix(_OLD)
            with suppress(OSError):
                if _TAG.fullmatch(tag):
                    found[tag] = (place_of(directory, tag) / INDEX).stat().st_mtime_ns
    return sorted(found, key=lambda tag: (found[tag], tag), reverse=True)


def beside(directory: Path) -> Path | None:
    """The folder with the newest checkpoint of those beside ``directory`` whose names differ in digits alone."""
    alike = re.compile(re.sub(r"[0-9]+", "[0-9]+", re.escape(directory.name)))
    found = []
    with suppress(OSError):
        for folder in directory.absolute().parent.iterdir():
            if folder.name != directory.name and alike.fullmatch(folder.name) and (tags := present(folder)):
                found.append(((place_of(folder, tags[0]) / INDEX).stat().st_mtime_ns, folder))
    return max(found)[1] if found else None


def place_of(directory: Path, tag: str) -> Path:
    """Where ``tag`` lies: under its name, or where a save that was killed between its two renames has left it."""
    whole, old = directory / tag, _old(directory, tag)
    return old if os.path.lexists(old) and not os.path.lexists(whole) else whole


def latest(directory: Path) -> str | None:
    """The tag that ``latest`` names; None where it is missing or says nothing of use."""
    path = directory / LATEST
    try:
        if not path.is_file() or path.stat().st_size > 2 * _MAX_TAG:
            return None
        name = path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return None
    return name if _TAG.fullmatch(name) else None


def astray(directory: Path) -> str:
    """That ``latest`` names nothing that is there, for messages; "" where it does, or is missing."""
    tag = latest(directory)
    if not os.path.lexists(directory / LATEST) or (tag is not None and os.path.isdir(directory / tag)):
        return ""
    return f"{directory / LATEST} names {'no checkpoint' if tag is None else f'{tag!r}, which is not there'}"


def begin(directory: Path, tag: str) -> Path:
    """The empty directory to write ``tag`` into; what killed runs left unfinished is removed."""
    atomic.make_directory(directory)
    recover(directory, tag)
    with _ONE_AT_A_TIME:
        work = work_of(directory, tag)
        if work.absolute() in _under_way:
            raise CheckpointError(f"{directory / tag} is being written by another engine: give it another tag")
        for left in _begins_with(directory, _WORK):
            if left.absolute() not in _under_way:
                _remove(left)
        work.mkdir()
        _under_way.add(work.absolute())
    return work


def finish(directory: Path, tag: str, *, latest: bool = True) -> Path:
    """Everything is written: ``tag`` appears, and ``latest`` names it, if so told ([Note: Atomic directories]).

    An error leaves everything as it was, the work directory included.
    """
    work, target, old = work_of(directory, tag), directory / tag, _old(directory, tag)
    atomic.sync(work)
    with _ONE_AT_A_TIME:
        _make_newest(directory, work)
        if os.path.lexists(target):
            target.rename(old)
        try:
            work.rename(target)
            atomic.sync(directory)
            if latest:
                atomic.write_text(directory / LATEST, tag + "\n")
        except BaseException:
            if not os.path.lexists(work):
                target.rename(work)
            if os.path.lexists(old):
                old.rename(target)
            raise
        _under_way.discard(work.absolute())
    with suppress(OSError):
        _remove(old)
    return target


def keep_last(directory: Path, count: int) -> None:
    """Remove all but the last ``count`` checkpoints with automatic tags; those that somebody named stay.

    So does what ``latest`` names. The last ones are those that were written last, which need not be those of the
    highest steps.
    """
    kept = latest(directory)
    for tag in [name for name in saved(directory) if step_of(name) is not None][count:]:
        if tag == kept:
            continue
        gone = directory / f"{_WORK}removed-{tag}"
        with suppress(OSError):
            (directory / tag).rename(gone)  # so that half of it is never taken for a checkpoint
            _remove(gone)


def abandon(directory: Path, tag: str) -> None:
    """Remove what was written so far, after ``begin``; never raises."""
    work = work_of(directory, tag)
    shutil.rmtree(work, ignore_errors=True)
    _under_way.discard(work.absolute())
    with suppress(OSError):
        recover(directory, tag)


def recover(directory: Path, tag: str) -> None:
    """End what a killed run began when it replaced ``tag``."""
    old = _old(directory, tag)
    with _ONE_AT_A_TIME:
        if not os.path.lexists(old):
            return
        if os.path.lexists(directory / tag):
            _remove(old)
        else:
            old.rename(directory / tag)


def work_of(directory: Path, tag: str) -> Path:
    """Where ``tag`` is written until it is whole."""
    return directory / f"{_WORK}{tag}"


def _old(directory: Path, tag: str) -> Path:
    return directory / f"{_OLD}{tag}"


def _begins_with(directory: Path, prefix: str) -> list[Path]:
    """The entries of ``directory`` with such names; none where it cannot be read."""
    with suppress(OSError):
        return [path for path in directory.iterdir() if path.name.startswith(prefix)]
    return []


def _remove(path: Path) -> None:
    """A whole directory, or a file or link that somebody has put in its place."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _make_newest(directory: Path, work: Path) -> None:
    """Date the index in ``work`` after all others: clocks tick slowly, may be set back, and differ between machines."""
    tags = saved(directory)
    newest = (directory / tags[0] / INDEX).stat().st_mtime_ns if tags else 0
    ours = (work / INDEX).stat()
    if ours.st_mtime_ns <= newest:
        os.utime(work / INDEX, ns=(ours.st_atime_ns, newest + 1))
