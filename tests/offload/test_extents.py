"""Extents: what is written comes back, in blocks as asked for, with the memory and the order that are promised."""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
import weakref
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shardengine.errors import UsageError
from shardengine.offload import direct_io
from shardengine.offload.host_memory import staging
from shardengine.offload.nvme import lease
from shardengine.offload.nvme.extent_file import Aio, Extent, ExtentFile
from tests.support import HANG_S
from tests.support.raising import raises

SMALL = Aio(block_size=8192, queue_depth=3, thread_count=2)
COUNTS = [0, 1, 4095, 4096, 4097, 8192, 8193, 3 * 8192, 100_001]


@pytest.fixture
def file(tmp_path: Path) -> Iterator[ExtentFile]:
    file = ExtentFile(tmp_path, "rank 3", SMALL)
    yield file
    file.close()


def random_bytes(count: int, seed: int = 0) -> Tensor:
    memory = staging(count)
    return memory.copy_(torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.manual_seed(seed + count)))


def read(file: ExtentFile, extent: Extent) -> Tensor:
    memory = staging(extent.count).fill_(85)
    file.read(extent, memory).wait()
    return memory


@pytest.mark.parametrize("direct", [True, False])
def test_what_is_written_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: bool) -> None:
    if not direct:
        monkeypatch.setattr(direct_io, "_DIRECT", 0)
    file = ExtentFile(tmp_path, "rank 3", SMALL)
    assert direct or not file._disk.direct
    extents = [file.allocate(count) for count in COUNTS]
    assert all(extent.offset % 4096 == 0 for extent in extents)
    assert all(not read(file, extent).any() for extent in extents), "a new extent holds zeros"
    sources = [random_bytes(count) for count in COUNTS]
    for transfer in [file.write(*pair) for pair in zip(extents, sources, strict=True)]:
        transfer.wait()
        assert transfer.done()
    later = file.allocate(5000)
    for extent, source in zip(extents, sources, strict=True):
        assert torch.equal(read(file, extent), source)
    assert not read(file, later).any()
    # a file system may count blocks of its own bookkeeping to a file
    assert file.path.stat().st_size <= file.path.stat().st_blocks * 512, "its room is taken"
    file.close()
    assert list(tmp_path.iterdir()) == []


def test_no_byte_of_a_neighbour_changes(file: ExtentFile) -> None:
    """A last page that is not full is written whole, and read into nothing but what was given."""
    first, second = file.allocate(5000), file.allocate(5000)
    file.write(second, random_bytes(5000, seed=2)).wait()
    file.write(first, random_bytes(5000, seed=1)).wait()
    assert torch.equal(read(file, second), random_bytes(5000, seed=2))
    memory = staging(12288).fill_(85)
    file.read(first, memory[:5000]).wait()
    assert torch.equal(memory[:5000], random_bytes(5000, seed=1)) and bool((memory[5000:] == 85).all())


def test_transfers_of_one_extent_follow_each_other(file: ExtentFile, monkeypatch: pytest.MonkeyPatch) -> None:
    extent, started, go_on = file.allocate(8192), threading.Event(), threading.Event()

    def slow(number: int, parts: Any, offset: int) -> int:
        started.set()
        assert go_on.wait(20)
        return os.pwritev(number, parts, offset)

    monkeypatch.setattr(direct_io, "pwritev", slow)
    first = file.write(extent, random_bytes(8192, seed=1))
    assert started.wait(20) and not first.done()
    found: list[Tensor] = []
    other = threading.Thread(target=lambda: found.append(read(file, extent)))
    other.start()
    other.join(0.1)
    assert other.is_alive() and not first.done()
    go_on.set()
    other.join(20)
    assert first.done() and torch.equal(found[0], random_bytes(8192, seed=1))


class Watch:
    """In place of a system call: how long the requests were, and how many were under way at once."""

    def __init__(self, call: Any, together: int) -> None:
        self.call, self.lengths, self.now, self.most = call, list[int](), 0, 0
        self.lock, self.barrier = threading.Lock(), threading.Barrier(together)

    def __call__(self, number: int, parts: Any, offset: int) -> int:
        with self.lock:
            self.now += 1
            self.most = max(self.most, self.now)
            self.lengths.append(sum(len(part) for part in parts))
        self.barrier.wait(20)
        count: int = self.call(number, parts, offset)
        with self.lock:
            self.now -= 1
        return count


@pytest.mark.parametrize("depth", [1, 3])
def test_block_size_and_queue_depth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, depth: int) -> None:
    file = ExtentFile(tmp_path, "rank 3", Aio(block_size=12288, queue_depth=depth))
    extent, source = file.allocate(12288 * 5 + 4000), random_bytes(12288 * 5 + 4000)
    reads, writes = Watch(os.preadv, depth), Watch(os.pwritev, depth)
    monkeypatch.setattr(direct_io, "preadv", reads)
    monkeypatch.setattr(direct_io, "pwritev", writes)
    file.write(extent, source).wait()
    assert torch.equal(read(file, extent), source)
    for watch in (reads, writes):
        assert sorted(watch.lengths) == [4096, *5 * [12288]] and watch.most == depth
    file.close()


@pytest.mark.parametrize("count", [1, 2])
def test_thread_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """So many checksums at once, though more requests are in flight."""
    file = ExtentFile(tmp_path, "rank 3", Aio(block_size=4096, queue_depth=4, thread_count=count))
    extent, watch = file.allocate(16 * 4096), Watch(lambda _, parts, __: zlib.crc32(parts[0]), count)
    monkeypatch.setattr("shardengine.offload.nvme.extent_file.crc32", lambda data: watch(0, [data], 0))
    file.write(extent, random_bytes(16 * 4096)).wait()
    assert len(watch.lengths) == 16 and watch.most == count
    file.close()


@pytest.mark.parametrize("bad", [{"block_size": 0}, {"block_size": 5000}, {"queue_depth": 0}, {"thread_count": -1}])
def test_aio_is_checked(bad: dict[str, int]) -> None:
    ((name, value),) = bad.items()
    with pytest.raises(UsageError, match=rf"aio: {name}: expected a positive multiple .*, got {value}"):
        Aio(**bad)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: staging(8192)[1:4097],
        lambda: staging(8192),
        lambda: staging(4096).view(torch.int8),
        lambda: staging(8192)[::2],
        lambda: staging(4096).view(64, 64),
        lambda: torch.empty(4096, dtype=torch.uint8, device="meta"),
    ],
)
def test_memory_that_does_not_fit(file: ExtentFile, wrong: Any) -> None:
    extent = file.allocate(4096)
    for name in ("read", "write"):
        with pytest.raises(UsageError, match=rf"rank 3: ExtentFile.{name}: expected uint8 \[4096\] on the CPU"):
            getattr(file, name)(extent, wrong())
    with raises("nvme-extent-of-another-file"):
        file.read(Extent(0, 4096), staging(4096))
    with raises("nvme-allocate-count-invalid", "got -1"):
        file.allocate(-1)


def test_what_is_edited_is_part_of_the_file(file: ExtentFile) -> None:
    before, extent, after = file.allocate(100), file.allocate(20_000), file.allocate(100)
    file.write(extent, random_bytes(20_000)).wait()
    mapped = file.edit(extent)
    assert mapped.shape == (20_000,) and torch.equal(mapped, random_bytes(20_000))
    for value in (1, 2):  # it lives on: each transfer takes what it finds
        mapped[9000] = value
        assert read(file, extent)[9000] == value and torch.equal(read(file, extent), mapped)
        assert torch.equal(file.look(extent), mapped) and torch.equal(file.edit(extent), mapped)
    mapped[[0, -1]] = 7
    expected = mapped.clone()
    del mapped
    assert torch.equal(file.look(extent), expected)
    assert torch.equal(read(file, extent), expected)
    assert file._states[extent].edited is None, "it is verified again"
    file.write(extent, random_bytes(20_000, seed=3)).wait()
    assert torch.equal(file.look(extent), random_bytes(20_000, seed=3))
    assert not read(file, before).any() and not read(file, after).any()
    assert file.look(file.allocate(0)).shape == file.edit(file.allocate(0)).shape == (0,)


def test_what_is_written_to_a_look_is_lost(file: ExtentFile) -> None:
    extent = file.allocate(20_000)
    file.write(extent, random_bytes(20_000)).wait()
    file.look(extent).fill_(3)
    seen = file.look(extent)
    seen[9000] += 1
    for again in (file.look(extent), file.edit(extent), read(file, extent)):
        assert torch.equal(again, random_bytes(20_000))


def test_an_edit_is_seen_by_whoever_looks(file: ExtentFile) -> None:
    extent = file.allocate(20_000)
    looked = file.look(extent)
    edited, more = file.edit(extent), file.edit(extent)
    edited[9000], more[9001] = 5, 6
    del edited
    for seen in (looked, file.look(extent), more, read(file, extent)):
        assert seen[9000:9002].tolist() == [5, 6] and seen.sum() == 11
    more[9002] = 7
    del more
    assert read(file, extent)[9000:9003].tolist() == [5, 6, 7]


def test_a_look_is_verified_once(file: ExtentFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as it is there; what is written over is verified again."""
    extent, reads = file.allocate(20_000), Watch(os.preadv, 1)
    monkeypatch.setattr(direct_io, "preadv", reads)
    views = [file.look(extent), file.look(extent), file.edit(extent)]
    assert sum(reads.lengths) == 20_480
    del views[:2]
    file.look(extent)
    assert sum(reads.lengths) == 20_480
    views.clear()
    looked = file.look(extent)
    file.write(extent, random_bytes(20_000)).wait()
    assert torch.equal(file.look(extent), random_bytes(20_000)) and looked.shape == (20_000,)
    assert sum(reads.lengths) == 3 * 20_480


@pytest.mark.parametrize("verb", ["look", "edit"])
def test_memory_of_a_file_outlives_it(tmp_path: Path, verb: str) -> None:
    file = ExtentFile(tmp_path, "rank 3", SMALL)
    mapped = getattr(file, verb)(file.allocate(8192))
    file.close()
    assert mapped.fill_(3).sum() == 3 * 8192


def test_a_closed_file(tmp_path: Path) -> None:
    file = ExtentFile(tmp_path, "rank 3", SMALL)
    extent, memory = file.allocate(50_000), random_bytes(50_000)
    transfers = [file.write(extent, memory), file.read(extent, memory)]
    file.close()
    file.close()
    assert all(transfer.done() for transfer in transfers) and list(tmp_path.iterdir()) == []
    for transfer in transfers:
        transfer.wait()
    for call in (lambda: file.read(extent, memory), lambda: file.look(extent), lambda: file.allocate(1)):
        with raises("nvme-file-closed", "rank 3"):
            call()


def test_nothing_is_held_of_what_is_done(tmp_path: Path) -> None:
    """Neither a caller's memory, nor threads or a file of an object that nobody has any more."""
    before = set(threading.enumerate())
    file = ExtentFile(tmp_path, "rank 3", SMALL)
    extent, memory = file.allocate(50_000), random_bytes(50_000)
    gone: list[bool] = []
    area = memory.untyped_storage()
    weakref.finalize(area, gone.append, True)
    transfers = [file.write(extent, memory), file.read(extent, memory)]
    for transfer in transfers:
        transfer.wait()
    del memory, area
    until = time.monotonic() + HANG_S
    while not gone and time.monotonic() < until:  # a thread lets go of it a moment after the transfer is done
        gc.collect()
    assert gone == [True]
    assert len(set(threading.enumerate()) - before) == 2 * SMALL.queue_depth
    del file, extent
    gc.collect()
    assert list(tmp_path.iterdir()) == [] and not set(threading.enumerate()) - before


def test_it_says_once_that_there_is_no_direct_io(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Refused at opening, and refused at the first transfer: both are tried before the first extent."""
    system_open = os.open

    def refuse_open(path: Any, flags: int, *rest: int, **more: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return system_open(path, flags, *rest, **more)

    def refuse_write(number: int, *rest: Any) -> int:
        if direct_io.is_direct(number):
            raise OSError(22, "Invalid argument")
        return os.pwritev(number, *rest)

    caplog.set_level(logging.INFO, "shardengine.offload")
    for place, name, refuse in ((os, "open", refuse_open), (direct_io, "pwritev", refuse_write)):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, refuse)
            file = ExtentFile(tmp_path, "rank 3", SMALL)
        assert not file._disk.direct and caplog.text.count("no O_DIRECT") == 1
        extent = file.allocate(9000)
        file.write(extent, random_bytes(9000)).wait()
        assert torch.equal(read(file, extent), random_bytes(9000))
        caplog.clear()
        file.close()


def test_directories_are_made_and_shared(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    files = [ExtentFile(folder, f"rank {rank}", SMALL) for rank in range(3)]
    extents = [file.allocate(5000) for file in files]
    for rank, (file, extent) in enumerate(zip(files, extents, strict=True)):
        file.write(extent, random_bytes(5000, seed=rank)).wait()
    (folder / "mine.txt").write_text("a file of the user")
    for rank, (file, extent) in enumerate(zip(files, extents, strict=True)):
        assert torch.equal(read(file, extent), random_bytes(5000, seed=rank))
        file.close()
        assert len(list(folder.glob(lease.PREFIX + "*"))) == 2 - rank
    assert (folder / "mine.txt").exists()
