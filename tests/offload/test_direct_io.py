"""Bytes past the page cache: what a file system refuses goes through it, and what comes in parts arrives whole."""

from __future__ import annotations

import errno
import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from shardengine.offload import direct_io, staging
from shardengine.offload.direct_io import ALIGNMENT, bytes_of

FLAGS = os.O_RDWR | os.O_CREAT


def filled(count: int) -> memoryview:
    """Aligned memory with random bytes."""
    memory = bytes_of(staging(count))
    memory[:] = random.Random(count).randbytes(count)
    return memory


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP])
def test_threads_that_are_refused_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """All of them go on through the page cache, also those that are refused after another one has turned it off."""
    file, blocks, meeting = direct_io.open_direct(tmp_path / "a", FLAGS, 0o600), 4, threading.Barrier(4)
    if not direct_io.is_direct(file):
        pytest.skip("the file system of the temporary directory refuses O_DIRECT")

    def refuses(number: int, parts: Any, offset: int) -> int:
        if direct_io.is_direct(number):
            meeting.wait(20)
            raise OSError(code, os.strerror(code))
        return os.pwritev(number, parts, offset)

    monkeypatch.setattr(direct_io, "pwritev", refuses)
    data = filled(blocks * ALIGNMENT)
    with ThreadPoolExecutor(blocks) as pool:
        for done in [
            pool.submit(direct_io.write, file, [data[start : start + ALIGNMENT]], start)
            for start in range(0, len(data), ALIGNMENT)
        ]:
            done.result()
    assert not direct_io.is_direct(file) and (tmp_path / "a").read_bytes() == data
    os.close(file)


@pytest.mark.parametrize("most", [1, 1000, 4096, 5000])
def test_short_transfers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """Through the page cache a transfer may go on anywhere, and a file's end is known to the byte."""
    file, data = os.open(tmp_path / "a", FLAGS, 0o600), filled(9001)

    def shortened(parts: Any) -> list[memoryview]:
        return [next(part for part in parts if len(part))[:most]]

    monkeypatch.setattr(direct_io, "pwritev", lambda number, parts, at: os.pwritev(number, shortened(parts), at))
    monkeypatch.setattr(direct_io, "preadv", lambda number, parts, at: os.preadv(number, shortened(parts), at))
    direct_io.write(file, [data[:100], data[100:]], 0)
    found = bytes_of(staging(10_000))
    assert direct_io.read(file, [found], 0, 10_000) == 9001 and found[:9001] == data
    assert direct_io.read(file, [found], 9000, 10) == 1 and direct_io.read(file, [found], 9001, 10) == 0
    os.close(file)


def test_what_it_does_not_overcome(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, data = os.open(tmp_path / "a", FLAGS, 0o600), filled(ALIGNMENT)
    for code in (errno.EINVAL, errno.EIO):
        with monkeypatch.context() as patch:

            def refuses(*_: Any, code: int = code) -> int:
                raise OSError(code, os.strerror(code))

            patch.setattr(direct_io, "pwritev", refuses)
            with pytest.raises(OSError, match=os.strerror(code)):
                direct_io.write(file, [data], 0)
    monkeypatch.setattr(direct_io, "pwritev", lambda *_: 0)
    with pytest.raises(OSError, match="write returned 0 bytes without an error"):
        direct_io.write(file, [data], 0)
    os.close(file)
