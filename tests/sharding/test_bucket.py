"""bucket.py: storages that come and go while views of them stay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from shardengine.offload import BufferPool, Done, Fetched, Platform
from shardengine.sharding import layout
from shardengine.sharding.bucket import FlatBuffer, poison, restore_poison
from tests.support.parts import CPU, make_flat_buffers, spec


def one_flat_buffer(rank: int = 0) -> FlatBuffer:
    """Parameters a (4×5) and b (7) at 2 ranks: 64 elements in two buckets."""
    (flat_buffer,) = make_flat_buffers(layout.build([spec("b", 7), spec("a", 4, 5)], 2, 32), rank)
    return flat_buffer


def detached_flat_buffer() -> FlatBuffer:
    flat_buffer = one_flat_buffer()
    for bucket in flat_buffer.buckets:
        bucket.detach_shard()
    return flat_buffer


def test_views_have_the_shapes_and_places_of_the_slots() -> None:
    flat_buffer = one_flat_buffer()
    flat_buffer.flat.copy_(torch.arange(64))
    assert torch.equal(flat_buffer.views[0], torch.arange(20.0).view(4, 5))
    assert torch.equal(flat_buffer.views[1], torch.arange(32.0, 39.0))


def test_a_flat_buffer_starts_as_zeros_so_that_padding_is_zero() -> None:
    assert torch.equal(one_flat_buffer().flat, torch.zeros(64))


def test_release_frees_the_memory_and_allocate_brings_it_back_under_the_same_views() -> None:
    flat_buffer = detached_flat_buffer()
    view, full, key = flat_buffer.views[1], flat_buffer.buckets[1].full, flat_buffer.storage_key
    assert flat_buffer.storage_bytes == 256
    flat_buffer.release()
    assert flat_buffer.storage_bytes == 0
    flat_buffer.allocate()
    assert flat_buffer.storage_bytes == 256 and flat_buffer.storage_key == key
    flat_buffer.flat.copy_(torch.arange(64))
    assert torch.equal(view, torch.arange(32.0, 39.0)) and torch.equal(full, torch.arange(32.0, 64.0))


def test_allocate_leaves_an_allocated_flat_buffer_as_it_is() -> None:
    flat_buffer = one_flat_buffer()
    flat_buffer.flat.fill_(3)
    flat_buffer.allocate()
    assert torch.equal(flat_buffer.flat, torch.full((64,), 3.0))


def test_an_abandoned_storage_is_left_to_the_views_outside() -> None:
    flat_buffer = detached_flat_buffer()
    flat_buffer.flat.copy_(torch.arange(64))
    outside, key = flat_buffer.views[0], flat_buffer.storage_key
    flat_buffer.release(abandon=True)
    assert flat_buffer.storage_bytes == 0 and flat_buffer.storage_key != key
    flat_buffer.allocate()
    flat_buffer.flat.zero_()
    assert torch.equal(outside, torch.arange(20.0).view(4, 5))


def test_after_abandon_views_and_buckets_are_those_of_the_new_storage() -> None:
    flat_buffer = detached_flat_buffer()
    flat_buffer.release(abandon=True)
    flat_buffer.allocate()
    flat_buffer.flat.copy_(torch.arange(64))
    assert torch.equal(flat_buffer.views[1], torch.arange(32.0, 39.0))
    assert torch.equal(flat_buffer.buckets[1].full, torch.arange(32.0, 64.0))


def test_a_relocated_flat_buffer_has_its_contents_in_other_memory() -> None:
    flat_buffer = one_flat_buffer(rank=1)
    flat_buffer.flat.copy_(torch.arange(64))
    old, views = flat_buffer.flat, [view.clone() for view in flat_buffer.views]
    flat_buffer.relocate()
    old.fill_(-1)  # as something in flight may do
    assert all(torch.equal(view, before) for view, before in zip(flat_buffer.views, views, strict=True))
    for bucket in flat_buffer.buckets:
        bucket.shard(writable=True).fill_(7)
        assert (bucket.own_slice(flat_buffer.flat[bucket.layout.start : bucket.layout.end]) == 7).all()
    detached = one_flat_buffer(rank=1)
    detached.buckets[0].detach_shard()
    shard = detached.buckets[0].shard()
    detached.relocate()
    assert detached.buckets[0].shard() is shard


def test_a_storage_that_numpy_has_seen_is_released_all_the_same() -> None:
    flat_buffer = detached_flat_buffer()
    flat_buffer.flat.fill_(2)
    array = flat_buffer.views[1].numpy()
    flat_buffer.release()
    assert flat_buffer.storage_bytes == 0
    assert array.tolist() == [2.0] * 7
    flat_buffer.allocate()
    flat_buffer.buckets[1].full.fill_(5)
    assert flat_buffer.views[1].tolist() == [5.0] * 7 and array.tolist() == [2.0] * 7


def test_a_shard_is_a_view_of_this_ranks_slice_until_it_is_detached() -> None:
    bucket = one_flat_buffer(rank=1).buckets[1]
    bucket.full.copy_(torch.arange(32))
    assert torch.equal(bucket.shard(), torch.arange(16.0, 32.0)) and bucket.weights() is bucket.full
    bucket.detach_shard()
    bucket.full.zero_()
    assert torch.equal(bucket.shard(), torch.arange(16.0, 32.0)) and bucket.weights() is bucket.shard()


def test_a_detached_shard_is_loaded_into_its_slice_alone() -> None:
    bucket = one_flat_buffer(rank=1).buckets[0]
    bucket.detach_shard()
    bucket.shard(writable=True).fill_(4)
    bucket.load_shard()
    assert bucket.full.tolist() == [0.0] * 16 + [4.0] * 16


def test_shards_that_lie_in_a_flat_buffer_are_not_released_with_it() -> None:
    flat_buffer = one_flat_buffer()
    flat_buffer.buckets[0].detach_shard()
    for abandon in (False, True):
        flat_buffer.release(abandon=abandon)
        assert flat_buffer.storage_bytes == 256


def test_a_shard_survives_the_release_of_its_flat_buffer() -> None:
    flat_buffer = one_flat_buffer()
    flat_buffer.flat.fill_(3)
    for bucket in flat_buffer.buckets:
        bucket.detach_shard()
    flat_buffer.release()
    assert all(torch.equal(bucket.shard(), torch.full((16,), 3.0)) for bucket in flat_buffer.buckets)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_poison_reads_as_nan_of_the_right_shape_and_dtype(dtype: torch.dtype) -> None:
    value = poison(dtype, (3, 4), CPU)
    assert value.shape == (3, 4) and value.dtype is dtype
    assert value.isnan().all() and value.sum().isnan()


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.uint8])
def test_poison_of_integers_reads_as_their_smallest_value(dtype: torch.dtype) -> None:
    assert (poison(dtype, (2, 2), CPU) == torch.iinfo(dtype).min).all()


def test_writing_to_poison_raises() -> None:
    with pytest.raises(RuntimeError):
        poison(torch.float32, (5,), CPU).add_(1)


class Hanging(Platform):
    """A device that never reaches what it is asked."""

    class _Never:
        reached = False

    def fetch(self, flag: torch.Tensor) -> Any:
        return self._Never()


def test_a_device_that_hangs_hides_no_write_from_other_engines() -> None:
    ordinary, hanging = Platform(CPU), Hanging(CPU)
    for _ in range(2):
        assert not restore_poison(torch.float32, hanging)
        poison(torch.float32, (), CPU).fill_(1.0)
        assert restore_poison(torch.float32, ordinary)
        assert not restore_poison(torch.float32, ordinary)


def test_poison_takes_the_memory_of_one_element() -> None:
    assert poison(torch.float32, (1000, 1000), CPU).untyped_storage().nbytes() == 4


def test_poison_without_dimensions_or_elements_keeps_its_shape() -> None:
    assert poison(torch.float32, (), CPU).shape == ()
    assert poison(torch.float32, (0, 3), CPU).shape == (0, 3)


class Behind(Platform):
    """A device that runs behind the host: what is fetched is there once the host has asked for it twice more."""

    def fetch(self, values: Tensor) -> Fetched:
        class Asked(Done):
            times = 0

            @property
            def reached(self) -> bool:
                self.times += 1
                return self.times > 2

        return Fetched(values, Asked())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.int8])
@pytest.mark.parametrize("platform", [Platform(CPU), Behind(CPU)])
def test_a_fill_of_poison_is_mended_at_once_and_told_when_the_device_knows(
    platform: Platform, dtype: torch.dtype
) -> None:
    mine, other = poison(dtype, (3,), CPU), poison(dtype, (2, 2), CPU)
    before = other.clone()
    assert not any(restore_poison(dtype, platform) for _ in range(6))
    for value in (0, 1):
        mine.fill_(value)
        told = [restore_poison(dtype, platform)]
        assert torch.equal(other.isnan(), before.isnan()) and torch.equal(other.nan_to_num(), before.nan_to_num())
        told += [restore_poison(dtype, platform) for _ in range(5)]
        assert told == [place == (2 if isinstance(platform, Behind) else 0) for place in range(6)]


def test_a_flat_buffer_has_one_poison_per_parameter_of_its_shape() -> None:
    assert [tuple(value.shape) for value in one_flat_buffer().poisons] == [(4, 5), (7,)]


def test_a_pool_hands_a_returned_buffer_out_again() -> None:
    pool = BufferPool(Platform(CPU))
    first = pool.take(16, torch.float32)
    second = pool.take(16, torch.float32)
    assert first.data_ptr() != second.data_ptr() and pool.allocated_bytes == 128
    pool.give(first)
    assert pool.take(16, torch.float32).data_ptr() == first.data_ptr()
    assert pool.allocated_bytes == 128


def test_a_pool_never_hands_a_buffer_to_two_takers() -> None:
    pool = BufferPool(Platform(CPU))
    pool.give(pool.take(16, torch.float32))
    first, second = pool.take(16, torch.float32), pool.take(16, torch.float32)
    assert first.data_ptr() != second.data_ptr()


def test_a_pool_never_hands_out_another_length_or_dtype() -> None:
    pool = BufferPool(Platform(CPU))
    pool.give(pool.take(16, torch.float32))
    assert pool.take(32, torch.float32).shape == (32,)
    assert pool.take(16, torch.float64).dtype is torch.float64
    assert pool.allocated_bytes == 64 + 128 + 128


def test_a_pool_that_forgets_counts_from_nothing() -> None:
    pool = BufferPool(Platform(CPU))
    first, _ = pool.take(4, torch.float32), pool.take(8, torch.float32)
    pool.give(first)
    pool.forget()
    assert pool.allocated_bytes == 0
    assert pool.take(4, torch.float32) is not first and pool.allocated_bytes == 16


def test_clearing_a_pool_forgets_only_what_nobody_has_taken() -> None:
    pool = BufferPool(Platform(CPU))
    taken, free = pool.take(16, torch.float32), pool.take(16, torch.float32)
    pool.give(free)
    pool.clear()
    assert pool.allocated_bytes == taken.nbytes
