"""Bytes between memory and an open file, past the page cache where its file system can do that (O_DIRECT).

Owns: opening, transfers that come in parts, room taken ahead. Must not know: what a file holds, who reads it, threads.

What is moved past the page cache begins at a multiple of ``ALIGNMENT`` in the file and in memory, and is a multiple of
it long. Some file systems refuse O_DIRECT at opening, others at the first transfer; either way the file is then used
through the page cache, from there on.
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
"""Of places in the file and in memory: what O_DIRECT needs on every disk that is known."""
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What the system says where there is no room."""
preadv, pwritev, fallocate, fsync = os.preadv, os.pwritev, os.posix_fallocate, os.fdatasync
_DIRECT = getattr(os, "O_DIRECT", 0)
_LIBC = ctypes.CDLL(None)
_LOWEST_BIT = bytes(state & 1 for state in range(256))
_PRIVATE = mmap.PROT_READ | mmap.PROT_WRITE  # of pages that nobody writes: ctypes asks for it
_UNABLE = (errno.EINVAL, errno.EOPNOTSUPP)


def open_direct(path: Path, flags: int, mode: int = 0o777) -> int:
    """``path`` opened with O_DIRECT, or without it where that is refused."""
    try:
        return os.open(path, flags | _DIRECT, mode)
    except OSError as error:
        if error.errno != errno.EINVAL or not _DIRECT:
            raise
        return os.open(path, flags, mode)


def is_direct(file: int) -> bool:
    """Whether the page cache is passed by."""
    return bool(fcntl.fcntl(file, fcntl.F_GETFL) & _DIRECT)


def read(file: int, parts: Sequence[memoryview], offset: int, least: int) -> int:
    """Fill ``parts``, one after the other, until ``least`` bytes are there or the file ends; how many came."""
    return _move(preadv, file, parts, offset, least)


def read_cached(file: int, part: memoryview, offset: int) -> int:
    """Of what is to fill ``part``, take what the page cache has, up to the first page that it has not; how many bytes.

    Nothing is asked for that is not there: that would make the system read ahead, at the cost of what reads past it.
    """
    count = _cached(file, offset, len(part))
    try:
        return preadv(file, [part[:count]], offset, getattr(os, "RWF_NOWAIT", 0)) if count else 0
    except OSError as error:
        if error.errno in (errno.EAGAIN, *_UNABLE):
            return 0
        raise


def _cached(file: int, offset: int, length: int) -> int:
    """How many of the bytes [offset, offset + length) that come first are in the page cache; all where nobody says."""
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
        raise OSError(errno.EIO, "the system wrote nothing and named no reason")


def take_room(file: int, count: int) -> None:
    """Have the file system reserve the first ``count`` bytes, where it can: a full disk is known now, and writes are
    faster. ``fallocate`` writes zeros where it cannot, which is for those who must have the room."""
    reserve = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
    if count and reserve is not None and reserve(file, 0, ctypes.c_int64(0), ctypes.c_int64(count)):
        code = ctypes.get_errno()
        if code in FULL:
            raise OSError(code, os.strerror(code))


def whole_pages(count: int) -> int:
    """The bytes of the pages that ``count`` bytes lie in."""
    return -(-count // ALIGNMENT) * ALIGNMENT


def bytes_of(data: Tensor) -> memoryview:
    """The memory of ``data``, which is uint8 on the CPU."""
    return memoryview(data.numpy())  # type: ignore[arg-type]  # its stubs do not say so


def memory_of(data: Tensor) -> memoryview:
    """As ``bytes_of``, for as long as ``data`` lives; its storage can be resized afterwards, which numpy's cannot."""
    return memoryview((ctypes.c_uint8 * data.numel()).from_address(data.data_ptr())).cast("B")


def _move(
    call: Callable[[int, list[memoryview], int], int], file: int, parts: Sequence[memoryview], offset: int, least: int
) -> int:
    """``least`` bytes or more, in as many calls as the system wants; fewer where a call moves nothing."""
    done = 0
    while done < least:
        direct = is_direct(file)  # before the call: another thread may find out, too
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
    """What follows the first ``done`` bytes of ``parts``."""
    left = []
    for part in parts:
        if done < len(part):
            left.append(part[done:])
        done = max(0, done - len(part))
    return left
