"""Transfers between memory and an open file, past the page cache if the file system supports O_DIRECT.

Owns: opening, transfers that the system splits, reservation of room. Must not know: the contents of a file, who reads
it, threads.

A transfer past the page cache begins at a multiple of ``ALIGNMENT`` in the file and in memory, and its length is a
multiple of it. Some file systems reject O_DIRECT at opening, others at the first transfer. In both cases the file is
used through the page cache from then on.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from torch import Tensor

ALIGNMENT = 4096
"""Bytes, in the file and in memory: enough for O_DIRECT on every known disk."""
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""The error codes of the system for a lack of room."""
preadv, pwritev, fallocate, fsync = os.preadv, os.pwritev, os.posix_fallocate, os.fdatasync
_DIRECT = getattr(os, "O_DIRECT", 0)
_LIBC = ctypes.CDLL(None)
_LOWEST_BIT = bytes(state & 1 for state in range(256))
_PRIVATE = mmap.PROT_READ | mmap.PROT_WRITE  # of pages that nobody writes: ctypes asks for it
_UNABLE = (errno.EINVAL, errno.EOPNOTSUPP)


def open_direct(path: Path, flags: int, mode: int = 0o777) -> int:
    """Open ``path`` with O_DIRECT, or without it if the system rejects that, and return the file descriptor."""
    try:
        return os.open(path, flags | _DIRECT, mode)
    except OSError as error:
        if error.errno != errno.EINVAL or not _DIRECT:
            raise
        return os.open(path, flags, mode)


def is_direct(file: int) -> bool:
    """Return whether transfers bypass the page cache."""
    return bool(fcntl.fcntl(file, fcntl.F_GETFL) & _DIRECT)


def read(file: int, parts: Sequence[memoryview], offset: int, least: int) -> int:
    """Fill ``parts``, one after the other, until ``least`` bytes are read or the file ends.

    Returns the number of bytes read.
    """
    return _move(preadv, file, parts, offset, least)


def read_cached(file: int, part: memoryview, offset: int) -> int:
    """Read into ``part`` the bytes that are in the page cache, up to the first page that is not. Return how many.

    Bytes that are not cached are not requested: the system would read ahead, which slows down direct reads.
    """
    count = _cached(file, offset, len(part))
    try:
        return preadv(file, [part[:count]], offset, getattr(os, "RWF_NOWAIT", 0)) if count else 0
    except OSError as error:
        if error.errno in (errno.EAGAIN, *_UNABLE):
            return 0
        raise


def _cached(file: int, offset: int, length: int) -> int:
    """Return how many bytes from ``offset`` on, up to ``length``, are in the page cache; ``length`` if unknown."""
    start = offset // mmap.PAGESIZE * mmap.PAGESIZE
    end = min(offset + length, os.fstat(file).st_size)
    if end <= offset:
        return 0
    states = (ctypes.c_ubyte * -(-(end - start) // mmap.PAGESIZE))()
    try:
        with mmap.mmap(file, end - start, mmap.MAP_PRIVATE, _PRIVATE, offset=start) as window:
            first = ctypes.c_ubyte.from_buffer(window)
            failed = _LIBC.mincore(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(end - start), states)
            del first
    except (OSError, ValueError, TypeError, AttributeError):
        return length
    missing = bytes(states).translate(_LOWEST_BIT).find(0)
    if failed or missing < 0:
        return length
    return max(0, min(length, start + missing * mmap.PAGESIZE - offset))


def write(file: int, parts: Sequence[memoryview], offset: int) -> None:
    """Write all of ``parts``, one after the other."""
    total = sum(len(part) for part in parts)
    if _move(pwritev, file, parts, offset, total) < total:
        raise OSError(errno.EIO, "write returned 0 bytes without an error")


def take_room(file: int, count: int) -> None:
    """Have the file system reserve the first ``count`` bytes, if it can. Raises OSError if the disk is full.

    So a full disk is noticed now, and writes are faster. A file system that cannot reserve is left alone; use
    ``fallocate`` if the room must be there, which then writes zeros.
    """
    reserve = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
    if count and reserve is not None and reserve(file, 0, ctypes.c_int64(0), ctypes.c_int64(count)):
        code = ctypes.get_errno()
        if code in FULL:
            raise OSError(code, os.strerror(code))


def whole_pages(count: int) -> int:
    """Return ``count`` rounded up to whole pages, in bytes."""
    return -(-count // ALIGNMENT) * ALIGNMENT


def bytes_of(data: Tensor) -> memoryview:
    """Return the memory of ``data``, which is uint8 on the CPU."""
    return memoryview(data.numpy())  # type: ignore[arg-type]  # its stubs do not say so


def memory_of(data: Tensor) -> memoryview:
    """Return the memory of ``data`` as ``bytes_of`` does, valid as long as ``data`` lives.

    Unlike with numpy, the storage can be resized afterwards.
    """
    return memoryview((ctypes.c_uint8 * data.numel()).from_address(data.data_ptr())).cast("B")


def _move(
    call: Callable[[int, list[memoryview], int], int], file: int, parts: Sequence[memoryview], offset: int, least: int
) -> int:
    """Move at least ``least`` bytes, in as many calls as the system needs; fewer if a call moves nothing.

    Returns how many.
    """
    done = 0
    while done < least:
        direct = is_direct(file)  # before the call: another thread may switch it off as well
        try:
            count = call(file, _after(parts, done), offset + done)
        except OSError as error:
            if error.errno not in _UNABLE or not direct:
                raise
            fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) & ~_DIRECT)
            continue
        if done + count < least:  # O_DIRECT goes on at no other place than the end of a page
            count = count - count % ALIGNMENT or (0 if direct else count)
        if not count:
            break
        done += count
    return done


def _after(parts: Sequence[memoryview], done: int) -> list[memoryview]:
    """Return the memory of ``parts`` behind their first ``done`` bytes."""
    left = []
    for part in parts:
        if done < len(part):
            left.append(part[done:])
        done = max(0, done - len(part))
    return left
