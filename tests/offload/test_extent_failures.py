"""Extents when something fails: nothing is lost silently, errors say what and where, nobody's files are removed."""

from __future__ import annotations

import errno
import os
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from shardengine.errors import OffloadError
from shardengine.offload import direct_io
from shardengine.offload.host_memory import staging
from shardengine.offload.nvme.extent_file import Aio, Extent, ExtentFile
from tests.offload.test_extents import random_bytes, read
from tests.support.forks import NO_FILE_SYSTEM, Forks
from tests.support.raising import raises

SMALL = Aio(block_size=8192, queue_depth=3)
Say = Callable[[Any], None]


@pytest.fixture
def file(tmp_path: Path) -> Iterator[ExtentFile]:
    file = ExtentFile(tmp_path / "given", "rank 3", SMALL)
    yield file
    file.close()


def error(code: int) -> OSError:
    return OSError(code, os.strerror(code))


def refusing(code: int) -> Any:
    """In place of a system call: raises ``code``."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise error(code)

    return refuse


class Failure:
    """In place of a system call: raises ``code`` at byte ``at`` of the file, as long as it is on."""

    def __init__(self, call: Any, code: int, at: int) -> None:
        self.call, self.code, self.at, self.on = call, code, at, True

    def __call__(self, number: int, parts: Any, offset: int) -> int:
        if self.on and offset <= self.at < offset + sum(len(part) for part in parts):
            raise error(self.code)
        return int(self.call(number, parts, offset))


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
def test_a_failed_write(file: ExtentFile, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """It says so, the extent is torn, and the same bytes can be written again."""
    other, extent = file.allocate(9000), file.allocate(30_000)
    file.write(extent, random_bytes(30_000, seed=1)).wait()
    failure = Failure(os.pwritev, code, extent.offset + 20_000)
    monkeypatch.setattr(direct_io, "pwritev", failure)
    source = random_bytes(30_000, seed=2)
    transfer = file.write(extent, source)
    for _ in range(2):
        with pytest.raises(OffloadError) as caught:
            transfer.wait()
        text = str(caught.value)
        assert text.startswith(f"rank 3: writing 30000 bytes at offset {extent.offset} of {file.path} failed: ")
        assert os.strerror(code) in text and text.endswith("the bytes are still in memory and may be written again")
        assert ("make room" in text) == (code != errno.EIO)
    assert transfer.done()
    with pytest.raises(OffloadError, match=r"the last write of it failed.*What to do: write it again before"):
        read(file, extent)
    with pytest.raises(OffloadError, match="the last write of it failed"):
        file.look(extent)
    file.write(other, source[:9000]).wait()
    failure.on = False
    file.write(extent, source).wait()
    assert torch.equal(read(file, extent), source) and torch.equal(read(file, other), source[:9000])


def test_a_failed_read(file: ExtentFile, monkeypatch: pytest.MonkeyPatch) -> None:
    extent = file.allocate(30_000)
    failure = Failure(os.preadv, errno.EIO, extent.offset + 29_000)
    monkeypatch.setattr(direct_io, "preadv", failure)
    with pytest.raises(OffloadError, match=r"reading 30000 bytes at offset 0 .* Input/output error.*last checkpoint"):
        read(file, extent)
    failure.on = False
    assert not read(file, extent).any()


@pytest.mark.parametrize("most", [4096, 5000, 8191])
def test_short_transfers_are_continued(file: ExtentFile, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    calls = []

    def short(call: Any) -> Any:
        def moved(number: int, parts: Any, offset: int) -> int:
            calls.append(offset)
            data = memoryview(bytearray(b"".join(parts)))
            count = min(most, len(data))
            if call is os.pwrite:
                os.pwrite(number, data[:count], offset)
                return count
            found = os.pread(number, count, offset)
            for part in parts:
                part[: len(found)] = found[: len(part)]
                found = found[len(part) :]
            return count

        return moved

    monkeypatch.setattr(file._disk, "_file", file._disk._plain)  # the system takes these lengths from the page cache
    monkeypatch.setattr(direct_io, "pwritev", short(os.pwrite))
    monkeypatch.setattr(direct_io, "preadv", short(os.pread))
    extent, source = file.allocate(30_001), random_bytes(30_001)
    file.write(extent, source).wait()
    assert torch.equal(read(file, extent), source) and len(calls) == 2 * 8


@pytest.mark.parametrize("name", ["preadv", "pwritev"])
def test_a_system_that_moves_nothing(file: ExtentFile, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    extent = file.allocate(8192)
    monkeypatch.setattr(direct_io, name, lambda *_: 0)
    with pytest.raises(OffloadError, match=r"the file ends before byte 8192|write returned 0 bytes without an error"):
        (file.read if name == "preadv" else file.write)(extent, staging(8192)).wait()


def changed(file: ExtentFile, offset: int, data: bytes) -> None:
    number = os.open(file.path, os.O_WRONLY)
    os.pwrite(number, data, offset)
    os.close(number)


def raw(file: ExtentFile, offset: int, count: int) -> bytes:
    return file.path.read_bytes()[offset : offset + count]


@pytest.mark.parametrize("written", [True, False])
@pytest.mark.parametrize("place", [0, 8191, 8192, 12_345, 19_999])
def test_every_flipped_bit_is_seen(file: ExtentFile, place: int, written: bool) -> None:
    extents = [file.allocate(20_000) for _ in range(3)]
    if written:
        for extent in extents:
            file.write(extent, random_bytes(20_000, seed=extent.offset)).wait()
    at = extents[1].offset + place
    (byte,) = raw(file, at, 1)
    for bit in (0, 7):
        changed(file, at, bytes([byte ^ 1 << bit]))
        start = at - place % 8192
        for call in (lambda: read(file, extents[1]), lambda: file.look(extents[1]), lambda: file.edit(extents[1])):
            with pytest.raises(OffloadError, match=rf"bytes {start} to \d+ are not those that were written"):
                call()
    read(file, extents[0])
    read(file, extents[2])
    changed(file, at, bytes([byte]))
    read(file, extents[1])


def test_bytes_of_another_place_or_time(file: ExtentFile) -> None:
    """A write that went astray, and one that was lost."""
    first, second = file.allocate(20_000), file.allocate(20_000)
    file.write(first, random_bytes(20_000, seed=1)).wait()
    old = raw(file, first.offset, 20_000)
    file.write(second, random_bytes(20_000, seed=2)).wait()
    file.write(first, random_bytes(20_000, seed=3)).wait()
    new = raw(file, first.offset, 20_000)
    changed(file, second.offset, new)
    with pytest.raises(OffloadError, match="a checksum differs"):
        read(file, second)
    changed(file, first.offset, old)
    with pytest.raises(OffloadError, match="a checksum differs"):
        read(file, first)
    changed(file, first.offset, new[8192:16384] + new[:8192])  # two blocks of one extent
    with pytest.raises(OffloadError, match="a checksum differs"):
        read(file, first)
    changed(file, first.offset, new)
    assert torch.equal(read(file, first), random_bytes(20_000, seed=3))


def test_damage_after_an_edit(file: ExtentFile) -> None:
    """The transfer after it takes the sums anew; the next one compares."""
    extent = file.allocate(20_000)
    file.edit(extent).fill_(3)
    read(file, extent)
    changed(file, extent.offset + 5, b"4")
    with pytest.raises(OffloadError, match="a checksum differs"):
        read(file, extent)
    file.write(extent, random_bytes(20_000)).wait()
    file.edit(extent)
    file.write(extent, random_bytes(20_000, seed=2)).wait()
    changed(file, extent.offset + 5, b"4")
    with pytest.raises(OffloadError, match="a checksum differs"):
        read(file, extent)


@pytest.mark.parametrize("kept", [True, False])
def test_damage_after_a_look(file: ExtentFile, kept: bool) -> None:
    """Looking changes nothing: what comes after it is compared, also while somebody still looks."""
    extent = file.allocate(20_000)
    file.write(extent, random_bytes(20_000)).wait()
    seen = [file.look(extent) for _ in range(2)]
    if not kept:
        seen.clear()
    (byte,) = raw(file, extent.offset + 5, 1)
    changed(file, extent.offset + 5, bytes([byte ^ 1]))
    for _ in range(2):
        with pytest.raises(OffloadError, match="a checksum differs"):
            read(file, extent)


@pytest.mark.parametrize("name", ["read", "write"])
def test_a_mapping_that_cannot_be_flushed(file: ExtentFile, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The system says once that something could not be written, and not what: whatever was mapped is void until it is
    written as a whole. Here its old bytes stay on the disk, where they would be taken for the new ones."""
    never, extents = file.allocate(20_000), [file.allocate(20_000) for _ in range(3)]
    for extent in (never, *extents):
        file.write(extent, random_bytes(20_000)).wait()
    lost = [raw(file, extent.offset, 20_480) for extent in extents]
    for extent in extents:
        file.edit(extent).fill_(3)
    os.fsync(file._disk._plain)
    for extent, old in zip(extents, lost, strict=True):
        changed(file, extent.offset, old)
    with monkeypatch.context() as patch:
        patch.setattr(direct_io, "fsync", refusing(errno.EIO))
        with pytest.raises(OffloadError, match=r"ing 20000 bytes at offset .* Input/output error"):
            getattr(file, name)(extents[0], random_bytes(20_000)).wait()
    assert torch.equal(read(file, never), random_bytes(20_000))
    for extent in extents:
        with pytest.raises(OffloadError, match="the last write of it failed"):
            read(file, extent)
        with pytest.raises(OffloadError, match="the last write of it failed"):
            file.look(extent)
    for extent in extents:
        file.write(extent, random_bytes(20_000, seed=4)).wait()
        assert torch.equal(read(file, extent), random_bytes(20_000, seed=4))


def cut(file: ExtentFile, extent: Extent) -> str:
    os.truncate(file.path, extent.offset + 6000)
    return "somebody has cut the file to"


def remove(file: ExtentFile, _: Extent) -> str:
    file.path.unlink()
    return "somebody has removed the file"


def replace(file: ExtentFile, _: Extent) -> str:
    shutil.copy(file.path, file.path.with_name("copy"))
    os.replace(file.path.with_name("copy"), file.path)
    return "somebody has put another file in its place"


def remove_directory(file: ExtentFile, _: Extent) -> str:
    shutil.rmtree(file.path.parent.parent)
    return "somebody has removed the file"


def replace_directory(file: ExtentFile, _: Extent) -> str:
    file.path.parent.parent.rename(file.path.parent.parent.with_name("elsewhere"))
    file.path.parent.parent.write_text("")
    return "somebody has removed the file"


@pytest.mark.parametrize("what", [cut, remove, replace, remove_directory, replace_directory])
def test_a_file_that_is_not_what_it_was(file: ExtentFile, what: Callable[[ExtentFile, Extent], str]) -> None:
    """Every use says so, also of extents that are still there; the end is quiet."""
    first, extent = file.allocate(20_000), file.allocate(20_000)
    file.write(extent, random_bytes(20_000)).wait()
    text = what(file, extent)
    memory = staging(20_000)
    for doing, call in (
        ("reading", lambda: file.read(extent, memory).wait()),
        ("writing", lambda: file.write(first, memory).wait()),
        ("reading", lambda: file.look(extent)),
        ("reading", lambda: file.edit(extent)),
        ("taking room for", lambda: file.allocate(20_000)),
    ):
        with pytest.raises(OffloadError, match=rf"rank 3: {doing} 20000 bytes at .*{text}.*What to do: let nothing"):
            call()
    file.close()


def test_a_file_that_is_cut_during_a_read(file: ExtentFile, monkeypatch: pytest.MonkeyPatch) -> None:
    extent = file.allocate(20_000)
    os.truncate(file.path, 14_000)
    monkeypatch.setattr(file._disk, "check", lambda: None)
    with pytest.raises(OffloadError, match=r"the file ends before byte"):
        read(file, extent)


def test_no_room_at_allocation(file: ExtentFile, monkeypatch: pytest.MonkeyPatch) -> None:
    first = file.allocate(5000)
    system = direct_io.fallocate

    def full(number: int, start: int, count: int) -> None:
        system(number, start, count // 2)
        raise error(errno.ENOSPC)

    with monkeypatch.context() as patch:
        patch.setattr(direct_io, "fallocate", full)
        text = rf"rank 3: taking room for 100000 bytes at offset 8192 of {file.path} failed: No space left.* make room"
        with pytest.raises(OffloadError, match=text):
            file.allocate(100_000)
    assert file.path.stat().st_size == 8192
    second = file.allocate(100_000)
    assert second.offset == 8192 and not read(file, second).any() and not read(file, first).any()


def test_a_file_system_that_reserves_nothing(file: ExtentFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_io, "fallocate", refusing(errno.EOPNOTSUPP))
    extent = file.allocate(20_000)
    assert file.path.stat().st_size == 20_480 and not read(file, extent).any()


def on_a_small_disk(say: Say, _: int, place: str) -> None:
    file = ExtentFile(Path(place), "rank 3", SMALL)
    small = file.allocate(300_000)
    for _ in range(2):
        try:
            file.allocate(1 << 20)
        except OffloadError as caught:
            say(str(caught))
    file.write(small, random_bytes(300_000)).wait()
    direct_io.fallocate = refusing(errno.EOPNOTSUPP)
    large, source = file.allocate(1 << 20), random_bytes(1 << 20)
    try:
        file.write(large, source).wait()
    except OffloadError as caught:
        say(str(caught))
    say(torch.equal(read(file, small), random_bytes(300_000)))
    file.close()
    say(os.listdir(place))


def test_a_full_disk(forks: Forks, tmp_path: Path) -> None:
    """A file system of one MiB."""
    (words,) = forks.live(on_a_small_disk, str(tmp_path), disk=(str(tmp_path), 1 << 20))
    if words == [NO_FILE_SYSTEM]:
        pytest.skip("this machine lets nobody mount a file system of his own")
    assert all("taking room for 1048576 bytes" in text and "No space left" in text for text in words[:2])
    assert "writing 1048576 bytes" in words[2] and "No space left on device" in words[2]
    assert words[3:] == [True, []]


def with_small_files(say: Say, _: int, place: str) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    file = ExtentFile(Path(place), "rank 3", SMALL)
    try:
        file.allocate(200_000)
    except OffloadError as caught:
        say(str(caught))
    extent = file.allocate(90_000)
    file.write(extent, random_bytes(90_000)).wait()
    say(torch.equal(read(file, extent), random_bytes(90_000)))


def test_a_limit_on_the_size_of_files(forks: Forks, tmp_path: Path) -> None:
    (words,) = forks.live(with_small_files, str(tmp_path))
    assert "taking room for 200000 bytes" in words[0] and "File too large" in words[0] and words[1] is True


@pytest.mark.parametrize("case", ["below a file", "no lock", "no right"])
def test_a_directory_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    place, reason = tmp_path, "No locks available"
    if case == "below a file":
        (tmp_path / "text").write_text("")
        place, reason = tmp_path / "text" / "more", "Not a directory"
    elif case == "no lock":
        monkeypatch.setattr("fcntl.flock", refusing(errno.ENOLCK))
    else:
        reason = "Permission denied"
        monkeypatch.setattr("tempfile.mkdtemp", refusing(errno.EACCES))
    with pytest.raises(OffloadError, match=rf"rank 3: no file .* can be made in {place}: {reason}.*name another one"):
        ExtentFile(place, "rank 3")


def test_a_file_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_io, "pwritev", refusing(errno.EIO))
    with raises("nvme-file-not-made", "rank 3:", "extents cannot be made: Input/output error"):
        ExtentFile(tmp_path, "rank 3")
    assert list(tmp_path.iterdir()) == []
