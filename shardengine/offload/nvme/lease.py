"""Which files below a directory belong to a living process. Owns: sub-directories, their locks, what may be removed.

Must not know: the contents of the files.

[Note: Leases] A process keeps its files in a sub-directory of its own, with a lock file that it holds locked for life.
The system drops a lock when its process ends, however it ends. So whoever gets the lock of a sub-directory may remove
it, and nobody else may: names, process numbers and times prove nothing. A sub-directory exists before its lock is held,
and in between another process may take it for a dead one. That process then has the lock file, or has removed it; the
owner looks for both after locking, and begins again with another sub-directory. A lock belongs to an open file, which a
fork shares: a child closes its own copy, which leaves the parent's lock in place.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from contextlib import suppress
from pathlib import Path

from shardengine.errors import OffloadError

PREFIX = "shardengine-offload-"
LOCK, DATA = "lock", "extents"


class Lease:
    """The sub-directory ``path`` of ``directory``, owned by this process until ``release``.

    Makes ``directory`` if it is missing, and removes everything that dead processes left in it. Raises OffloadError if
    nothing can be made there; the message begins with ``label``.
    """

    def __init__(self, directory: Path, label: str) -> None:
        try:
            directory = directory.absolute()
            directory.mkdir(parents=True, exist_ok=True)
            remove_abandoned(directory)
            self.path, self._lock = _leased(directory)
        except (OSError, ValueError) as error:
            cause = getattr(error, "strerror", None) or error
            raise OffloadError(
                f"{label}: no file for offloaded states can be made in {directory}: {cause}. It has "
                "to be a directory in which this process may make files and lock them; name another one",
                code="nvme-file-not-made",
            ) from error

    @property
    def held(self) -> bool:
        """Whether this process owns it: not after ``release``, and not in a forked child."""
        return self._lock >= 0

    def forget(self) -> None:
        """Give it up in a forked child: it belongs to the parent."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def release(self) -> None:
        """Remove the sub-directory and its contents."""
        if self._lock >= 0:
            _remove(self.path)
            os.close(self._lock)
            self._lock = -1


def remove_abandoned(directory: Path) -> None:
    """Remove the sub-directories of dead processes in ``directory``; those that cannot be opened or removed stay."""
    with os.scandir(directory) as entries:
        found = [
            Path(entry) for entry in entries if entry.name.startswith(PREFIX) and entry.is_dir(follow_symlinks=False)
        ]
    for path in found:
        with suppress(OSError):  # another user's
            lock = _lock(path, os.O_CREAT)
            if lock is not None:
                _remove(path)
                os.close(lock)


def _leased(directory: Path) -> tuple[Path, int]:
    """Make a sub-directory. Return it and its lock, an open file."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=directory))
        lock = _lock(path, os.O_CREAT | os.O_EXCL)
        if lock is not None:
            return path, lock


def _lock(path: Path, flags: int) -> int | None:
    """Open and lock the lock file of ``path``; None if another process holds it or has removed it."""
    try:
        number = os.open(path / LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | flags, 0o600)
    except (FileExistsError, FileNotFoundError):
        return None
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(number), os.stat(path / LOCK)):
            return number
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError:
        os.close(number)
        raise
    os.close(number)
    return None


def _remove(path: Path) -> None:
    """Remove a sub-directory whose lock is held: the lock last, and no files of others."""
    for name in (DATA, LOCK):
        with suppress(OSError):
            os.unlink(path / name)
    with suppress(OSError):  # another process has just put a lock file in it, and removes it then
        os.rmdir(path)
