"""Which files below a directory belong to a living process. Owns: sub-directories, their locks, what may be removed.

Must not know: what the files hold.

[Note: Leases] A process's files lie in a sub-directory of its own, with a lock file that it holds locked for life. The
system drops a lock when its process ends, however that happens; so whoever gets the lock of a sub-directory may remove
it, and nobody else may: neither names nor process numbers nor times say anything. A sub-directory is there before its
lock is held. Somebody may take it for a dead one in between: then he has the lock file, or has removed it, and the
owner, who looks for both after locking, begins again with another. A lock belongs to an open file, which a fork
shares: a child closes its own copy, which leaves the parent's lock in place.
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
    """The sub-directory ``path`` of ``directory`` (made where it is missing), this process's until ``release``.

    What dead processes left in ``directory`` is removed. Raises OffloadError where nothing can be made; ``label`` says
    in it who asked.
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
                "to be a directory in which this process may make files and lock them; name another one"
            ) from error

    @property
    def held(self) -> bool:
        """Whether it is this process's: not after ``release``, not in a forked child."""
        return self._lock >= 0

    def forget(self) -> None:
        """Of a forked child: it is the parent's."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def release(self) -> None:
        """Remove the sub-directory and what is in it."""
        if self._lock >= 0:
            _remove(self.path)
            os.close(self._lock)
            self._lock = -1


def remove_abandoned(directory: Path) -> None:
    """Remove what dead processes left in ``directory``; what cannot be opened or removed stays."""
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
    """A new sub-directory and its lock, an open file."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=directory))
        lock = _lock(path, os.O_CREAT | os.O_EXCL)
        if lock is not None:
            return path, lock


def _lock(path: Path, flags: int) -> int | None:
    """The open and locked lock file of ``path``; None where another process has it, or has removed it."""
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
    """Remove a sub-directory whose lock is held; the lock last, and nothing that is not ours."""
    for name in (DATA, LOCK):
        with suppress(OSError):
            os.unlink(path / name)
    with suppress(OSError):  # somebody has just put a lock file in it, who removes it then
        os.rmdir(path)
