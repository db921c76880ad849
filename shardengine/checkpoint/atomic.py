"""Text files and directories that appear complete or not at all, and durably. Must not know: their contents.

A text file is written under a temporary name unique to the writer and renamed. If several programs write it, the last
one wins. A directory is written by one program at a time, as ``.<name>.partial/<name>``. An exception inside, SIGTERM,
Ctrl-C and a closed terminal remove it. The leftovers of a killed program are removed by the next program that writes
the same text or directory. Checkpoint directories have rules of their own, because many ranks write them and they may
replace older ones (directory, [Note: Atomic directories]).

[Note: The lock of a directory] The writer holds a lock on ``.<name>.partial`` and removes that directory at the end. A
second program may have opened the directory before it was removed. It would then lock a directory without a name, while
a third program creates and locks a new one. So a lock counts only if the locked directory still has the name. Only then
does the writer check that the target is free, because the previous writer may have created it.
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
"""Without file locks, a partial text file that is older than a new one by this much belongs to a killed program."""


def write_text(path: Path, text: str) -> None:
    """Write and fsync a text file beside ``path`` and rename it to ``path``. Safe with concurrent writers."""
    while not _try_to_write(path, text):
        pass  # before it was locked, another writer took the new file for a killed program's and removed it
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
    """Whether no program is still writing ``partial``. now: the modification time of a file written just now."""
    with partial.open() as file:
        free = _try_to_lock(file.fileno())
        return os.fstat(file.fileno()).st_mtime < now - _STALE_S if free is None else free


def _try_to_lock(number: int) -> bool | None:
    """Lock an open file or directory; return whether it worked, None if the file system has no locks."""
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def sync(path: Path) -> None:
    """Fsync a file, or a directory to make its renames and new files durable."""
    number = os.open(path, os.O_RDONLY)
    try:
        with suppress(OSError) if path.is_dir() else nullcontext():  # some network file systems cannot do it
            os.fsync(number)
    finally:
        os.close(number)


def make_directory(path: Path) -> None:
    """Create the directory ``path`` and its missing parents, durably. Safe with concurrent writers."""
    missing = [place for place in (path, *path.parents) if not place.is_dir()]
    path.mkdir(parents=True, exist_ok=True)
    for place in reversed(missing):
        sync(place.parent)


def check_free(out: Path) -> None:
    """Raise ``UsageError`` unless ``out`` is missing or an empty directory, and a rename can create it."""
    wanted = f"{out}: expected a new or empty directory"
    try:
        if (out.exists() or out.is_symlink()) and (not out.is_dir() or any(out.iterdir())):
            found = "a directory with something in it" if out.is_dir() else "a file"
            raise UsageError(f"{wanted}, found {found}; nothing is overwritten", code="output-not-empty")
        if out.is_dir() and os.path.ismount(out):
            raise UsageError(
                f"{wanted}, found the place of a mounted file system; name a new directory inside of it",
                code="output-is-mount-point",
            )
        above = next((place for place in out.absolute().parents if os.path.lexists(place)), None)
        if above is not None and not above.is_dir():
            raise UsageError(f"{wanted}, but {above} is a file", code="output-below-a-file")
    except OSError as error:
        raise UsageError(
            f"{str(out)[:200]}: expected a new or empty directory: {error.strerror}", code="output-not-accessible"
        ) from None


@contextmanager
def new_directory(out: Path) -> Iterator[Path]:
    """Yield an empty directory to write into; at the end of the ``with`` it is durable and named ``out``.

    An exception inside leaves nothing behind. UsageError if ``out`` is not free, or if another program is writing it
    (checked only on file systems with locks). OSError if the disk is full or fails.
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
    """Create and lock the directory ``outer``; return its descriptor ([Note: The lock of a directory])."""
    while True:
        outer.mkdir(exist_ok=True)
        try:
            number = os.open(outer, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue  # the previous writer removed it
        try:
            if _try_to_lock(number) is False:
                raise UsageError(
                    f"{out}: another program is writing this very directory; wait for it",
                    code="output-written-by-another",
                )
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(number), outer.stat()):
                    return number
        except BaseException:
            os.close(number)
            raise
        os.close(number)


@contextmanager
def _ended_by_exception() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise SystemExit in the main thread, if they have their default handlers."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    ending = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_DFL]
    if threading.current_thread() is not threading.main_thread():
        ending = []  # only the main thread may set handlers
    for number in ending:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number in ending:
            signal.signal(number, signal.SIG_DFL)
