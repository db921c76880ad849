"""Directories of checkpoints: each appears complete or not at all, ``latest`` names one, old ones are removed.

Must not know: engines, tensors, the contents of a checkpoint except the name of its index.

[Note: Atomic directories] A checkpoint is written into ``.tmp-<tag>``. Files and directory are fsynced, and one rename
makes it ``<tag>``. Another rename then replaces ``latest``. If the tag exists already, the old directory is first
renamed to ``.old-<tag>`` and removed at the end. If the program ends between the two renames, ``recover`` puts the old
directory back. So at every moment ``latest`` names a complete directory, or one that ``recover`` restores.
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
"""Directories that engines of this process are writing; several engines may save asynchronously into one folder."""
_ONE_AT_A_TIME = threading.RLock()


def tag_of(step: int) -> str:
    """Return the automatic tag of a checkpoint, which is used if the user gives none."""
    return f"step-{step:08}"


def step_of(tag: str) -> int | None:
    """Return the step in an automatic tag (``tag_of``); None if the user named the checkpoint."""
    automatic = _AUTOMATIC.fullmatch(tag)
    return int(automatic[1]) if automatic else None


def check_tag(tag: str) -> str:
    """Return ``tag``; raise ``UsageError`` unless it is a plain name."""
    if not isinstance(tag, str) or not _TAG.fullmatch(tag) or tag == LATEST or len(tag) > _MAX_TAG:
        raise UsageError(
            f"checkpoint tag {str(tag)[:_MAX_TAG]!r}: expected a plain name of at most {_MAX_TAG} letters, digits and "
            ". _ + = - (and not 'latest')",
            code="checkpoint-tag-invalid",
        )
    return tag


def check_folder(directory: str | Path) -> Path:
    """Return ``directory`` as a path; raise ``UsageError`` unless it is a path or a non-empty string."""
    if not isinstance(directory, str | Path) or not str(directory):
        raise UsageError(
            f"directory of checkpoints: expected a path, got {directory!r}", code="checkpoint-folder-not-a-path"
        )
    return Path(directory)


def saved(directory: Path) -> list[str]:
    """Return ``present`` after ``recover`` of every interrupted save; for a run that writes or loads there."""
    for old in _begins_with(directory, _OLD):
        with suppress(OSError):
            recover(directory, old.name.removeprefix(_OLD))
    return [tag for tag in present(directory) if place_of(directory, tag) == directory / tag]  # recover may have failed


def present(directory: Path) -> list[str]:
    """Return the tags of the checkpoints in ``directory``, newest first.

    A directory counts as a checkpoint if it has an index; nothing else is checked. Nothing is changed: a checkpoint
    that a killed save renamed to ``.old-<tag>`` is listed, and ``place_of`` returns its path.
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
    """Return the sibling folder with the newest checkpoint; only siblings whose names differ in digits alone count."""
    alike = re.compile(re.sub(r"[0-9]+", "[0-9]+", re.escape(directory.name)))
    found = []
    with suppress(OSError):
        for folder in directory.absolute().parent.iterdir():
            if folder.name != directory.name and alike.fullmatch(folder.name) and (tags := present(folder)):
                found.append(((place_of(folder, tags[0]) / INDEX).stat().st_mtime_ns, folder))
    return max(found)[1] if found else None


def place_of(directory: Path, tag: str) -> Path:
    """Return the path of ``tag``: ``<tag>``, or ``.old-<tag>`` if a save was killed between its two renames."""
    whole, old = directory / tag, _old(directory, tag)
    return old if os.path.lexists(old) and not os.path.lexists(whole) else whole


def latest(directory: Path) -> str | None:
    """Return the tag that ``latest`` names; None if the file is missing or holds no tag."""
    path = directory / LATEST
    try:
        if not path.is_file() or path.stat().st_size > 2 * _MAX_TAG:
            return None
        name = path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return None
    return name if _TAG.fullmatch(name) else None


def astray(directory: Path) -> str:
    """Return a message if ``latest`` names no existing directory; "" if it does, or if there is no ``latest``."""
    tag = latest(directory)
    if not os.path.lexists(directory / LATEST) or (tag is not None and os.path.isdir(directory / tag)):
        return ""
    return f"{directory / LATEST} names {'no checkpoint' if tag is None else f'{tag!r}, which is not there'}"


def begin(directory: Path, tag: str) -> Path:
    """Create and return the empty directory to write ``tag`` into; remove the unfinished ones of killed runs."""
    atomic.make_directory(directory)
    recover(directory, tag)
    with _ONE_AT_A_TIME:
        work = work_of(directory, tag)
        if work.absolute() in _under_way:
            raise CheckpointError(
                f"{directory / tag} is being written by another engine: give it another tag",
                code="checkpoint-tag-being-written",
            )
        for left in _begins_with(directory, _WORK):
            if left.absolute() not in _under_way:
                _remove(left)
        work.mkdir()
        _under_way.add(work.absolute())
    return work


def finish(directory: Path, tag: str, *, latest: bool = True) -> Path:
    """Rename the written directory to ``tag`` ([Note: Atomic directories]). latest: let ``latest`` name it.

    An error leaves everything unchanged, including the work directory.
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
    """Remove all but the last ``count`` checkpoints with automatic tags; keep those with tags from the user.

    The checkpoint that ``latest`` names is kept as well. "Last" means written last, not the highest step.
    """
    kept = latest(directory)
    for tag in [name for name in saved(directory) if step_of(name) is not None][count:]:
        if tag == kept:
            continue
        gone = directory / f"{_WORK}removed-{tag}"
        with suppress(OSError):
            (directory / tag).rename(gone)  # so that a half-removed directory never looks like a checkpoint
            _remove(gone)


def abandon(directory: Path, tag: str) -> None:
    """Remove the directory that ``begin`` created, with its contents; never raises."""
    work = work_of(directory, tag)
    shutil.rmtree(work, ignore_errors=True)
    _under_way.discard(work.absolute())
    with suppress(OSError):
        recover(directory, tag)


def recover(directory: Path, tag: str) -> None:
    """Finish or undo the replacement of ``tag`` by a killed run."""
    old = _old(directory, tag)
    with _ONE_AT_A_TIME:
        if not os.path.lexists(old):
            return
        if os.path.lexists(directory / tag):
            _remove(old)
        else:
            old.rename(directory / tag)


def work_of(directory: Path, tag: str) -> Path:
    """Return the directory that ``tag`` is written into until it is complete."""
    return directory / f"{_WORK}{tag}"


def _old(directory: Path, tag: str) -> Path:
    return directory / f"{_OLD}{tag}"


def _begins_with(directory: Path, prefix: str) -> list[Path]:
    """Return the entries of ``directory`` whose names begin with ``prefix``; none if it cannot be read."""
    with suppress(OSError):
        return [path for path in directory.iterdir() if path.name.startswith(prefix)]
    return []


def _remove(path: Path) -> None:
    """Remove a directory with its contents, or a file or link in its place."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _make_newest(directory: Path, work: Path) -> None:
    """Make the index in ``work`` newer than all others: clocks are coarse, set back, and differ between machines."""
    tags = saved(directory)
    newest = (directory / tags[0] / INDEX).stat().st_mtime_ns if tags else 0
    ours = (work / INDEX).stat()
    if ours.st_mtime_ns <= newest:
        os.utime(work / INDEX, ns=(ours.st_atime_ns, newest + 1))
