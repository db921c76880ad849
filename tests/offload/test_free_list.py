"""Room in a file of extents: what is freed is used again, what is reserved is there."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from shardengine.errors import OffloadError
from shardengine.offload import direct_io
from shardengine.offload.host_memory import staging
from shardengine.offload.nvme.extent_file import Aio, ExtentFile
from shardengine.offload.nvme.free_list import FreeList
from tests.offload.test_extent_failures import Failure
from tests.offload.test_extents import random_bytes, read
from tests.support.raising import raises


@pytest.fixture
def file(tmp_path: Path) -> Iterator[ExtentFile]:
    file = ExtentFile(tmp_path, "rank 3", Aio(block_size=8192, queue_depth=3))
    yield file
    file.close()


def test_free_list() -> None:
    """What touches is one; what is asked for comes from the smallest that holds it."""
    free = FreeList()
    assert free.take(1) is None and free.count == 0
    for start in (40, 0, 20, 10):
        free.give(start, 10)
    free.give(99, 0)
    assert free.count == 40 and free.take(31) is None and free.take(0) is None
    assert [free.take(count) for count in (5, 6, 20, 5, 4)] == [40, 0, 6, 45, 26]
    assert free.count == 0
    for start in (30, 10, 20):
        free.give(start, 10)
    assert free.take(30) == 10


def test_what_is_freed_is_used_again(file: ExtentFile) -> None:
    """As zeros, which are compared with zeros."""
    extents = [file.allocate(count) for count in (20_000, 20_000, 100, 8192)]
    for extent in extents:
        file.write(extent, random_bytes(extent.count)).wait()
    size = file.path.stat().st_size
    file.free(extents[0])
    file.free(extents[1])
    new = [file.allocate(count) for count in (30_000, 8192)]
    assert [extent.offset for extent in new] == [0, 32_768] and file.path.stat().st_size == size
    assert not any(read(file, extent).any() for extent in new)
    assert all(torch.equal(read(file, extent), random_bytes(extent.count)) for extent in extents[2:])
    file.write(new[0], random_bytes(30_000)).wait()
    assert torch.equal(read(file, new[0]), random_bytes(30_000)) and not read(file, new[1]).any()
    assert file.allocate(1).offset == size
    with raises("nvme-extent-of-another-file"):
        file.read(extents[0], staging(20_000))


@pytest.mark.parametrize("verb", ["look", "edit"])
def test_room_that_somebody_still_looks_at_is_not_used(file: ExtentFile, verb: str) -> None:
    """An asynchronous save does, say."""
    extent = file.allocate(20_000)
    file.write(extent, random_bytes(20_000)).wait()
    views = [getattr(file, verb)(extent) for _ in range(2)]
    file.free(extent)
    assert file.allocate(20_000).offset == 20_480
    del views[0]
    assert file.allocate(20_000).offset == 40_960 and torch.equal(views[0], random_bytes(20_000))
    views.clear()
    again = file.allocate(20_000)
    assert again.offset == 0 and not read(file, again).any()


def test_what_is_reserved(file: ExtentFile, monkeypatch: pytest.MonkeyPatch) -> None:
    for count in (20_000, 20_000, 100, 300):
        file.reserve(count)
    size = file.path.stat().st_size
    with monkeypatch.context() as patch:
        patch.setattr(file._disk, "grow", lambda _: pytest.fail("nothing more is needed"))
        extents = [file.allocate(count) for count in (100, 20_000)]
    assert not any(read(file, extent).any() for extent in extents)
    file.free_reserved()
    more = [file.allocate(count) for count in (20_000, 300)]
    assert file.path.stat().st_size == size
    assert len({extent.offset for extent in (*extents, *more)}) == 4


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_room_that_no_zeros_can_be_written_to(file: ExtentFile, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """It is left alone where it is broken, and kept where there was only no room for a copy of it."""
    first = file.allocate(20_000)
    file.write(first, random_bytes(20_000)).wait()
    file.free(first)
    failure = Failure(os.pwritev, code, 9000)
    monkeypatch.setattr(direct_io, "pwritev", failure)
    if code == errno.ENOSPC:
        with pytest.raises(OffloadError, match=r"taking room for 20000 bytes .* make room there"):
            file.allocate(20_000)
        failure.on = False
    extent = file.allocate(20_000)
    assert extent.offset == (0 if code == errno.ENOSPC else 20_480) and not read(file, extent).any()
    failure.on = False
    assert file.allocate(20_000).offset == extent.offset + 20_480
