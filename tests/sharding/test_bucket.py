"""bucket.py: storages that come and go while views of them stay."""

from __future__ import annotations

import pytest
import torch

from shardengine.offload import BufferPool, Platform
from shardengine.sharding import layout
from shardengine.sharding.bucket import FlatBuffer
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


def test_the_padding_of_a_new_flat_buffer_is_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else is written: a rank that fills its own slice alone needs the memory of that alone."""
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", lambda count, **how: torch.full((count,), 7.0, **how))
        flat = one_flat_buffer().flat
    holds = torch.zeros(64, dtype=torch.bool)
    holds[:20] = holds[32:39] = True
    assert torch.equal(flat, torch.where(holds, 7.0, 0.0))


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
        assert (bucket.own_slice(bucket.full, bucket.weight_placement) == 7).all()
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
    bucket.full.zero_()
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


def test_a_flat_buffer_has_one_poison_per_parameter_of_its_shape() -> None:
    assert [tuple(value.shape) for value in one_flat_buffer().poisons] == [(4, 5), (7,)]


def test_a_pool_hands_a_returned_buffer_out_again() -> None:
    pool = BufferPool(Platform(CPU))
    first = pool.acquire(16, torch.float32)
    second = pool.acquire(16, torch.float32)
    assert first.data_ptr() != second.data_ptr() and pool.allocated_bytes == 128
    pool.release(first)
    assert pool.acquire(16, torch.float32).data_ptr() == first.data_ptr()
    assert pool.allocated_bytes == 128


def test_a_pool_never_hands_a_buffer_to_two_takers() -> None:
    pool = BufferPool(Platform(CPU))
    pool.release(pool.acquire(16, torch.float32))
    first, second = pool.acquire(16, torch.float32), pool.acquire(16, torch.float32)
    assert first.data_ptr() != second.data_ptr()


def test_a_pool_never_hands_out_another_length_or_dtype() -> None:
    pool = BufferPool(Platform(CPU))
    pool.release(pool.acquire(16, torch.float32))
    assert pool.acquire(32, torch.float32).shape == (32,)
    assert pool.acquire(16, torch.float64).dtype is torch.float64
    assert pool.allocated_bytes == 64 + 128 + 128


def test_a_pool_that_forgets_counts_from_nothing() -> None:
    pool = BufferPool(Platform(CPU))
    first, _ = pool.acquire(4, torch.float32), pool.acquire(8, torch.float32)
    pool.release(first)
    pool.forget()
    assert pool.allocated_bytes == 0
    assert pool.acquire(4, torch.float32) is not first and pool.allocated_bytes == 16


def test_clearing_a_pool_forgets_only_what_nobody_has_taken() -> None:
    pool = BufferPool(Platform(CPU))
    taken, free = pool.acquire(16, torch.float32), pool.acquire(16, torch.float32)
    pool.release(free)
    pool.clear()
    assert pool.allocated_bytes == taken.nbytes
