"""Stores in a file: whose buffer it is, what becomes of it when a write fails or a step is interrupted."""

from __future__ import annotations

import errno
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from shardengine.errors import InternalError, OffloadError
from shardengine.offload import Platform, ShardStore
from shardengine.offload.nvme.extent_file import Aio, ExtentFile
from shardengine.offload.nvme.file_tier import FileTier
from tests.offload.test_failures import full_disk

LENGTH = 5000


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[FileTier]:
    """With two buffers."""
    file = ExtentFile(tmp_path, "rank 3", Aio(block_size=8192, queue_depth=3))
    yield FileTier(file, 2, Platform(torch.device("cpu")))
    file.close()


def store_with(tier: FileTier, value: float) -> ShardStore:
    store = tier.store()
    store.add({"a": torch.full((LENGTH,), value)})
    return store


def value_of(tensors: dict[str, Tensor]) -> float:
    """Of all elements of "a"."""
    (value,) = set(tensors["a"].tolist())
    return float(value)


def step(store: ShardStore, value: float) -> None:
    store.check_out()["a"].fill_(value)
    store.check_in()


@pytest.mark.parametrize("writable", [False, True])
def test_what_is_checked_out_is_not_shown(tier: FileTier, writable: bool) -> None:
    """It is half written, and somebody still has it; what was taken may be given up instead."""
    store = store_with(tier, 1.0)
    taken = store.check_out()["a"]
    taken[:9] = 2.0
    with pytest.raises(InternalError, match=r"is being stepped.*engine\.reset\(\)"):
        store.tensors(writable=writable)
    assert taken[:10].tolist() == [2.0] * 9 + [1.0]
    store.abandon()
    assert value_of(store.tensors(writable=writable)) == 1.0
    step(store, 3.0)
    assert value_of(store.tensors(writable=writable)) == 3.0
    store.abandon()  # nothing is taken
    assert value_of(store.check_out()) == 3.0


def test_giving_up_loses_nothing_that_the_file_has_not(tier: FileTier) -> None:
    store = store_with(tier, 1.0)
    with full_disk(1):
        step(store, 2.0)
        with pytest.raises(OffloadError, match="No space left"):
            store.check_out()
    assert value_of(store.check_out()) == 2.0
    store.abandon()
    assert value_of(store.tensors()) == 2.0


def test_overwriting_may_begin_again(tier: FileTier) -> None:
    """After a step that was interrupted; its buffer is not another one's."""
    store, other = store_with(tier, 1.0), store_with(tier, 2.0)
    store.check_out(blank=True)["a"].fill_(5.0)
    again = store.check_out(blank=True)["a"]
    step(other, 3.0)
    again.fill_(4.0)
    store.check_in()
    assert (value_of(store.tensors()), value_of(other.tensors())) == (4.0, 3.0)


def test_a_hint_raises_no_error_of_others(tier: FileTier) -> None:
    """Of a write that failed the next one that needs a buffer is told, once, and nothing is lost."""
    first, second, third = (store_with(tier, value) for value in (1.0, 2.0, 3.0))
    with full_disk(1):
        step(first, 4.0)
        for transfer in first._requests:  # type: ignore[attr-defined]
            transfer.wait_quietly()
        second.prefetch()
        third.prefetch()
    assert value_of(second.check_out()) == 2.0
    second.check_in()
    with pytest.raises(OffloadError, match="No space left"):
        third.check_out()
    assert value_of(third.check_out()) == 3.0
    third.check_in()
    assert [value_of(store.tensors()) for store in (first, second, third)] == [4.0, 2.0, 3.0]


def test_room_that_a_disk_gets_back_is_used(tier: FileTier) -> None:
    """Both buffers hold what could not be written; a third store has them written again."""
    stores = [store_with(tier, 1.0) for _ in range(3)]
    with full_disk(math.inf):
        for store in stores[:2]:
            store.check_out()["a"].fill_(2.0)
        for store in stores[:2]:
            store.check_in()
        for _ in range(3):
            with pytest.raises(OffloadError) as caught:
                stores[2].check_out()
            assert isinstance(caught.value.__cause__, OSError) and caught.value.__cause__.errno == errno.ENOSPC
    step(stores[2], 2.0)
    assert [value_of(store.tensors()) for store in stores] == [2.0] * 3


def test_checking_in_twice_is_found_at_once(tier: FileTier) -> None:
    """A second write of the same buffer may meet the next one that has it."""
    store = store_with(tier, 1.0)
    step(store, 2.0)
    for changed in (True, False):
        with pytest.raises(InternalError, match="is checked in, but it is"):
            store.check_in(changed=changed)
    assert value_of(store.tensors()) == 2.0
