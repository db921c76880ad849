"""Texts and directories that appear whole or not at all, and durably. Must not know: what is written into them.

A text is written as ``.<name>.partial`` beside its place and renamed. So is a directory that one process writes, as
``.<name>.partial/<name>``: what raises inside, and SIGTERM, Ctrl-C and a closed terminal, remove it; what a killed
program left is removed by the next one that writes the same directory. Directories of checkpoints, which many ranks
write and which take the place of others, have rules of their own (directory, [Note: Atomic directories]).
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import FrameType

from shardengine.errors import UsageError


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
    sync(path.parent)


def sync(path: Path) -> None:
    """Make a file durable, or the renames and new files in a directory."""
    number = os.open(path, os.O_RDONLY)
    try:
        with suppress(OSError) if path.is_dir() else nullcontext():  # some network file systems refuse it
            os.fsync(number)
    finally:
        os.close(number)


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

    Whatever raises inside, nothing is left. OSError where the disk is full or refuses.
    """
    check_free(out)
    target = out.resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    outer = target.parent / f".{target.name}.partial"
    outer.mkdir(exist_ok=True)
    work, lock = outer / target.name, os.open(outer, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _lock(lock, out)
        with _ended_by_exception():
            try:
                shutil.rmtree(work, ignore_errors=True)
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


def _lock(directory: int, out: Path) -> None:
    try:
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UsageError(f"{out}: another program is writing this very directory; wait for it") from None
    except OSError:
        pass  # a file system without locks


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
