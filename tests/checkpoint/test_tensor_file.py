"""Files of tensors from a device with a memory of its own: the same bytes, and copies one chunk ahead of checksums."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from shardengine import kernels
from shardengine.checkpoint import tensor_file
from shardengine.offload import HOST, CopyStream, Done, Platform, direct_io
from tests.support.damage import SMALL_CHUNK, small_chunks


class LateCopy(Done):
    """A copy that is made when the host waits for it."""

    def __init__(self, number: int, source: Tensor, target: Tensor, told: list[str]) -> None:
        super().__init__()
        self._given, self._told, self._over = (number, source, target), told, False

    @property
    def reached(self) -> bool:
        return self._over

    def wait_on_host(self) -> None:
        number, source, target = self._given
        target.copy_(source)
        self._told.append(f"copy {number} is over")
        self._over = True


class Apart(Platform):
    """The CPU as a device apart; ``told``: what happens, in order."""

    def __init__(self) -> None:
        super().__init__(HOST)
        self.told: list[str] = []
        self.pinned_bytes = 0

    @property
    def has_own_memory(self) -> bool:
        return True

    def copy_stream(self) -> CopyStream:
        told, numbers = self.told, iter(range(1000))

        class Stream(CopyStream):
            def copy(self, source: Tensor, target: Tensor, *after: Done) -> Done:
                number = next(numbers)
                told.append(f"copy {number} begins")
                return LateCopy(number, source, target, told)

        return Stream(HOST)

    def host_buffer(self, count: int, *, pinned: bool) -> Tensor:
        self.pinned_bytes += count * pinned
        return super().host_buffer(count, pinned=pinned)


@pytest.fixture(autouse=True)
def chunks_are_small() -> Iterator[None]:
    back = small_chunks()
    yield
    back()


def tensors() -> list[tuple[str, Tensor]]:
    """More than the blocks hold; views of every kind; nothing."""
    made = torch.Generator().manual_seed(1)
    values = torch.randn(60_000, generator=made)
    return [
        ("long", values),
        ("turned", values[:35].view(5, 7).t()),
        ("low", values[:9001].bfloat16()),
        ("every third", values[::3]),
        ("none", torch.empty(0)),
        ("last", values[-700:].to(torch.int32)),
    ]


def test_a_device_apart_has_the_same_bytes(tmp_path: Path) -> None:
    apart = Apart()
    given = tensors()
    assert sum(each.nbytes for _, each in given) > apart_blocks()
    expected = tensor_file.write(tmp_path / "host", given)
    assert tensor_file.write(tmp_path / "device", given, apart) == expected
    assert (tmp_path / "device").read_bytes() == (tmp_path / "host").read_bytes()
    assert apart.pinned_bytes == apart_blocks()


def apart_blocks() -> int:
    """Bytes."""
    return (tensor_file._BLOCKS + 1) * tensor_file._BLOCK_CHUNKS * SMALL_CHUNK


@pytest.mark.parametrize("apart", [True, False])
def test_a_checksum_is_taken_while_the_next_chunk_arrives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, apart: bool
) -> None:
    """On the host nothing is ahead, and a chunk's checksum is taken while it is in the cache."""
    platform = Apart()
    sums = iter(range(1000))
    summed = kernels.crc32

    def crc32(data: memoryview) -> int:
        platform.told.append(f"sum {next(sums)}")
        return summed(data)

    monkeypatch.setattr(tensor_file, "crc32", crc32)
    with tensor_file.Stream(tmp_path / "file", platform=platform if apart else Platform(HOST)) as stream:
        stream.put(torch.arange(4 * SMALL_CHUNK + 10).to(torch.uint8))
        before = list(platform.told)
    if not apart:
        assert before == ["sum 0", "sum 1", "sum 2", "sum 3"]
        return
    assert before == [
        "copy 0 begins",
        *(
            line
            for number in range(3)
            for line in (f"copy {number + 1} begins", f"copy {number} is over", f"sum {number}")
        ),
        "copy 4 begins",
    ]
    assert platform.told[len(before) :] == ["copy 3 is over", "sum 3", "copy 4 is over", "sum 4"]


def test_a_save_that_fails_waits_for_what_is_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks are given back to the system then, and the tensors may be changed."""
    platform, full = Apart(), OSError(errno.ENOSPC, "No space left on device")

    def write(*_given: object) -> None:
        raise full

    monkeypatch.setattr(direct_io, "write", write)
    with pytest.raises(OSError, match="No space left"):
        tensor_file.write(tmp_path / "file", tensors(), platform)
    begun = {line.removesuffix(" begins") for line in platform.told if line.endswith("begins")}
    over = {line.removesuffix(" is over") for line in platform.told if line.endswith("over")}
    assert begun == over and len(begun) < sum(each.nbytes for _, each in tensors()) // SMALL_CHUNK
