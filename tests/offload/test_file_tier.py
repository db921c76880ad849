"""Shelves in a file: whose buffer it is, what becomes of it when a write fails or a step is interrupted."""

from __future__ import annotations

import errno
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from shardengine.errors import InternalError, OffloadError
from shardengine.offload import Shelf
from shardengine.offload.nvme.extent_file import Aio, ExtentFile
from shardengine.offload.nvme.file_tier import FileTier
from tests.offload.test_failures import full_disk

LENGTH = 5000


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[FileTier]:
    """With two buffers."""
    file = ExtentFile(tmp_path, "rank 3", Aio(block_size=8192, queue_depth=3))
    yield FileTier(file, 2)
    file.close()


def shelf_with(tier: FileTier, value: float) -> Shelf:
    shelf = tier.shelf()
    shelf.add({"a": torch.full((LENGTH,), value)})
    return shelf


def value_of(tensors: dict[str, Tensor]) -> float:
    """Of all elements of "a"."""
    (value,) = set(tensors["a"].tolist())
    return float(value)


def step(shelf: Shelf, value: float) -> None:
    shelf.take()["a"].fill_(value)
    shelf.put()


@pytest.mark.parametrize("verb", ["look", "edit"])
def test_what_is_taken_is_not_shown(tier: FileTier, verb: str) -> None:
    """It is half written, and somebody still has it; what was taken may be given up instead."""
    shelf = shelf_with(tier, 1.0)
    taken = shelf.take()["a"]
    taken[:9] = 2.0
    with pytest.raises(InternalError, match=r"is being stepped.*engine\.reset\(\)"):
        getattr(shelf, verb)()
    assert taken[:10].tolist() == [2.0] * 9 + [1.0]
    shelf.abandon()
    assert value_of(getattr(shelf, verb)()) == 1.0
    step(shelf, 3.0)
    assert value_of(getattr(shelf, verb)()) == 3.0
    shelf.abandon()  # nothing is taken
    assert value_of(shelf.take()) == 3.0


def test_giving_up_loses_nothing_that_the_file_has_not(tier: FileTier) -> None:
    shelf = shelf_with(tier, 1.0)
    with full_disk(1):
        step(shelf, 2.0)
        with pytest.raises(OffloadError, match="No space left"):
            shelf.take()
    assert value_of(shelf.take()) == 2.0
    shelf.abandon()
    assert value_of(shelf.look()) == 2.0


def test_overwriting_may_begin_again(tier: FileTier) -> None:
    """After a step that was interrupted; its buffer is not another one's."""
    shelf, other = shelf_with(tier, 1.0), shelf_with(tier, 2.0)
    shelf.overwrite()["a"].fill_(5.0)
    again = shelf.overwrite()["a"]
    step(other, 3.0)
    again.fill_(4.0)
    shelf.put()
    assert (value_of(shelf.look()), value_of(other.look())) == (4.0, 3.0)


def test_a_hint_raises_no_error_of_others(tier: FileTier) -> None:
    """Of a write that failed the next one that needs a buffer is told, once, and nothing is lost."""
    first, second, third = (shelf_with(tier, value) for value in (1.0, 2.0, 3.0))
    with full_disk(1):
        step(first, 4.0)
        for transfer in first._requests:  # type: ignore[attr-defined]
            transfer.wait_quietly()
        second.fetch()
        third.fetch()
    assert value_of(second.take()) == 2.0
    second.put()
    with pytest.raises(OffloadError, match="No space left"):
        third.take()
    assert value_of(third.take()) == 3.0
    third.put()
    assert [value_of(shelf.look()) for shelf in (first, second, third)] == [4.0, 2.0, 3.0]


def test_room_that_a_disk_gets_back_is_used(tier: FileTier) -> None:
    """Both buffers hold what could not be written; a third shelf has them written again."""
    shelves = [shelf_with(tier, 1.0) for _ in range(3)]
    with full_disk(math.inf):
        for shelf in shelves[:2]:
            shelf.take()["a"].fill_(2.0)
        for shelf in shelves[:2]:
            shelf.put()
        for _ in range(3):
            with pytest.raises(OffloadError) as caught:
                shelves[2].take()
            assert isinstance(caught.value.__cause__, OSError) and caught.value.__cause__.errno == errno.ENOSPC
    step(shelves[2], 2.0)
    assert [value_of(shelf.look()) for shelf in shelves] == [2.0] * 3
