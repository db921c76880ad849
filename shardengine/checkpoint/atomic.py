"""Texts and directories that appear whole or not at all, and durably. Must not know: what is written into them.

A text is written beside its place, under a name of the writer's own, and renamed, so that of several writers the last
one counts. A directory is written by one program at a time, as ``.<name>.partial/<name>``: what raises inside, and
SIGTERM, Ctrl-C and a closed terminal, remove it. What a killed program left is removed by the next one that writes the
same text or directory. Directories of checkpoints, which many ranks write and which take the place of others, have
rules of their own (directory, [Note: Atomic directories]).

[Note: The lock of a directory] Who writes holds a lock on ``.<name>.partial`` and removes that at its end. Who comes
meanwhile may have opened it already, and would hold a lock on a directory without a name, beside somebody who has made
a new one. So a lock counts only if what is locked still has the name; and only then is looked whether the place is
free, since the one before may have taken it.
"""

from __future__ import annotations

import fcntl
import glob
import os
import secrets
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import FrameType

from shardengine.errors import UsageError

_STALE_S = 3600.0
"""Where a file system has no locks, a text that was begun so long before another one is of a killed program."""


def write_text(path: Path, text: str) -> None:
    """Write and fsync a text file beside ``path`` and move it there. Others may do the same at the same time."""
    while not _try_to_write(path, text):
        pass  # the new file was taken for a killed program's, in the moment before it was locked
    sync(path.parent)


def _try_to_write(path: Path, text: str) -> bool:
    partial = path.with_name(f".{path.name}.partial-{secrets.token_hex(4)}")
    try:
        with partial.open("x", encoding="utf-8") as file:
            _try_to_lock(file.fileno())
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
            written = os.fstat(file.fileno()).st_mtime
            os.replace(partial, path)
    except FileNotFoundError:
        if path.parent.is_dir():
            return False
        raise
    finally:
        partial.unlink(missing_ok=True)
    for left in path.parent.glob(f".{glob.escape(path.name)}.partial*"):
        with suppress(OSError):
            if left.is_file() and _is_left(left, written):
                left.unlink()
    return True


def _is_left(partial: Path, now: float) -> bool:
    """Whether nobody writes ``partial`` any more."""
    with partial.open() as file:
        free = _try_to_lock(file.fileno())
        return os.fstat(file.fileno()).st_mtime < now - _STALE_S if free is None else free


def _try_to_lock(number: int) -> bool | None:
    """Whether the open file or directory is this program's now; None where the file system has no locks."""
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def sync(path: Path) -> None:
    """Make a file durable, or the renames and new files in a directory."""
    number = os.open(path, os.O_RDONLY)
    try:
        with suppress(OSError) if path.is_dir() else nullcontext():  # some network file systems refuse it
            os.fsync(number)
    finally:
        os.close(number)


def make_directory(path: Path) -> None:
    """Make ``path``, and what is missing above it, durably. Others may do the same at the same time."""
    missing = [place for place in (path, *path.parents) if not place.is_dir()]
    path.mkdir(parents=True, exist_ok=True)
    for place in reversed(missing):
        sync(place.parent)


def check_free(out: Path) -> None:
    """``UsageError`` unless ``out`` is not there, or is an empty directory, and can be put there by a rename."""
    wanted = f"{out}: expected a new or empty directory"
    try:
        if (out.exists() or out.is_symlink()) and (not out.is_dir() or any(out.iterdir())):
            found = "a directory with something in it" if out.is_dir() else "a file"
            raise UsageError(f"{wanted}, found {found}; nothing is overwritten")
        if out.is_dir() and os.path.ismount(out):
            raise UsageError(f"{wanted}, found the place of a mounted file system; name a new directory inside of it")
        above = next((place for place in out.absolute().parents if os.path.lexists(place)), None)
        if above is not None and not above.is_dir():
            raise UsageError(f"{wanted}, but {above} is a file")
    except OSError as error:
        raise UsageError(f"{str(out)[:200]}: expected a new or empty directory: {error.strerror}") from None


@contextmanager
def new_directory(out: Path) -> Iterator[Path]:
    """An empty directory to write into; at the end of the ``with`` all of it is on disk, under the name ``out``.

    Whatever raises inside, nothing is left. UsageError unless ``out`` is free and, as far as the file system has
    locks, nobody else is writing it; OSError where the disk is full or refuses.
    """
    check_free(out)
    target = out.resolve()
    make_directory(target.parent)
    outer = target.parent / f".{target.name}.partial"
    work, lock = outer / target.name, _locked(outer, out)
    try:
        with _ended_by_exception():
            try:
                shutil.rmtree(work, ignore_errors=True)
                check_free(out)
                work.mkdir()
                yield work
                for path in [*sorted(work.rglob("*"), reverse=True), work]:
                    sync(path)
                os.rename(work, target)
                sync(target.parent)
            finally:
                shutil.rmtree(work, ignore_errors=True)
                with suppress(OSError):
                    outer.rmdir()
    finally:
        os.close(lock)


def _locked(outer: Path, out: Path) -> int:
    """The descriptor of the directory ``outer``, made and locked ([Note: The lock of a directory])."""
    while True:
        outer.mkdir(exist_ok=True)
        try:
            number = os.open(outer, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue  # removed by the program before
        try:
            if _try_to_lock(number) is False:
                raise UsageError(f"{out}: another program is writing this very directory; wait for it")
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(number), outer.stat()):
                    return number
        except BaseException:
            os.close(number)
            raise
        os.close(number)


@contextmanager
def _ended_by_exception() -> Iterator[None]:
    """SIGTERM and SIGHUP, where they would end the program, raise SystemExit in the main thread instead."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    ending = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_DFL]
    if threading.current_thread() is not threading.main_thread():
        ending = []  # only the main thread may set them
    for number in ending:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number in ending:
            signal.signal(number, signal.SIG_DFL)
