"""What checkpointed blocks keep, in host memory: what goes there, how it comes back, which memory it takes."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from shardengine.offload import Platform
from shardengine.runtime.activation_offload import ActivationStore, HostBuffers
from tests.support.parts import CPU
from tests.support.raising import raises


def offload(*weights: Tensor) -> ActivationStore:
    kept = {weight.untyped_storage()._cdata for weight in weights}
    return ActivationStore(Platform(CPU), lambda storage: storage._cdata in kept)


def kept(home: ActivationStore) -> int:
    """Bytes of buffers in use."""
    return home.buffers.allocated_bytes - home.buffers.idle_bytes


def call(home: ActivationStore, function: Callable[..., Tensor], *args: Tensor) -> Tensor:
    with home.saving():
        result: Tensor = checkpoint(function, *args, use_reentrant=False)
    return result


def test_the_original_is_free_after_the_forward_and_the_buffer_after_the_backward() -> None:
    home = offload()
    leaf = torch.randn(64, requires_grad=True)
    x = leaf * 2
    original = weakref.ref(x.untyped_storage())
    y = call(home, torch.sin, x)
    assert original() is not None and kept(home) == 256
    del x
    assert original() is None
    y.sum().backward()
    assert leaf.grad is not None and torch.equal(leaf.grad, 2 * torch.cos(2 * leaf.detach()))
    assert kept(home) == 0 and home.buffers.allocated_bytes == 256
    call(home, torch.sin, leaf * 3)
    assert kept(home) == 0 and home.buffers.allocated_bytes == 256, "a graph that is dropped returns its buffer"


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "whole": lambda x: x,
    "transposed": lambda x: x.t(),
    "rows in the middle": lambda x: x[3:5],
    "columns": lambda x: x[:, 5:9],
    "one row for all": lambda x: x[2].expand(7, 12),
    "integers": lambda x: (x * 100).long(),
    "bool": lambda x: x > 0,
    "bf16, an odd offset": lambda x: x.bfloat16()[1:, 1:],
    "complex, conjugate": lambda x: torch.complex(x, x).conj(),
    "no elements": lambda x: x[:0],
    "no dimension": lambda x: x[1, 1],
    "sparse": lambda x: x.to_sparse(),
}

STAYING = ("complex, conjugate", "no elements", "sparse")


@pytest.mark.parametrize("name", list(VIEWS))
def test_every_tensor_comes_back_with_its_bits_shape_strides_and_alignment(name: str) -> None:
    torch.manual_seed(3)
    x = VIEWS[name](torch.randn(6, 12))
    expected, seen = x.clone(), []
    anchor = torch.ones((), requires_grad=True)

    def look(x: Tensor, anchor: Tensor) -> Tensor:
        seen.append(x)
        return torch.sin(anchor)

    call(offload(), look, x, anchor).backward()
    first, again = seen
    assert first is x and (again.dtype, again.shape, again.layout) == (x.dtype, x.shape, x.layout)
    assert again.is_conj() == x.is_conj()
    assert torch.equal(again.to_dense(), expected.to_dense())
    if name not in STAYING:
        assert again.stride() == x.stride() and again.data_ptr() % 64 == x.data_ptr() % 64
        assert again.untyped_storage()._cdata != x.untyped_storage()._cdata, "it was not moved"


def test_a_view_takes_the_memory_of_its_stretch_alone() -> None:
    home, big = offload(), torch.randn(1000, requires_grad=True) * 1
    y = call(home, torch.sin, big[16:32].expand(50, 16))
    assert kept(home) == 64
    y.sum().backward()


def test_weights_are_not_copied() -> None:
    weight = torch.randn(32, requires_grad=True)
    home = offload(weight)
    y = call(home, lambda a, b: torch.sin(a * b), weight, weight.view(4, 8)[1:2].t())
    assert home.buffers.allocated_bytes == 0
    y.sum().backward()
    assert weight.grad is not None and home.buffers.allocated_bytes == 0


def test_what_several_blocks_are_given_is_kept_once() -> None:
    home, mask, x = offload(), torch.rand(16) > 0.5, torch.randn(16, requires_grad=True)
    for _ in range(4):
        x = call(home, lambda x, mask: torch.sin(x) * mask.view(16), x, mask.detach()[None])
    assert home.buffers.allocated_bytes == 4 * 64 + 16
    x.sum().backward()
    assert kept(home) == 0


def test_what_was_written_to_between_two_blocks_is_kept_twice() -> None:
    home, x, y = offload(), torch.ones(16), torch.ones(16, requires_grad=True)
    factors = torch.zeros(16)
    for factor in (2.0, 3.0):
        factors.fill_(factor)
        y = call(home, lambda y, f: y * y * f, y, factors)
    y.sum().backward()
    assert torch.equal(y.detach(), 12 * x)
    assert home.buffers.allocated_bytes == 4 * 64


def test_what_is_on_another_storage_at_the_same_place_is_kept_too() -> None:
    """A storage that is gone leaves its address to the next one."""
    home, leaf = offload(), torch.ones(16, requires_grad=True)
    outputs, places = [], set()
    for number in range(20):
        factor = torch.full((16,), float(number))
        places.add(id(factor.untyped_storage()))
        outputs.append(call(home, lambda a, f: torch.sin(a) * f, leaf, factor))
        del factor
    assert len(places) < 20
    for number, output in enumerate(outputs):
        (gradient,) = torch.autograd.grad(output.sum(), leaf)
        assert torch.equal(gradient, torch.cos(leaf.detach()) * number)


def test_in_backward_the_way_back_begins_one_block_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    home, told = offload(), []
    x = torch.randn(16, requires_grad=True)
    places: list[int] = []
    copy = home.stream.copy

    def noting(source: Tensor, target: Tensor) -> Any:
        if len(places) < 4:
            places.append(target.data_ptr())
        else:
            told.append(f"back {places.index(source.data_ptr())}")
        return copy(source, target)

    monkeypatch.setattr(home.stream, "copy", noting)

    def block(number: int) -> Callable[[Tensor], Tensor]:
        def run(x: Tensor) -> Tensor:
            if torch._C._current_graph_task_id() >= 0:
                told.append(f"block {number}")
            return torch.sin(x)

        return run

    for number in range(4):
        x = call(home, block(number), x * 1)
    x.sum().backward()
    assert told == [
        *("back 3", "back 2", "block 3"),
        *("back 1", "block 2"),
        *("back 0", "block 1"),
        "block 0",
    ]


def test_a_graph_that_is_kept_gives_its_gradient_twice() -> None:
    home, leaf = offload(), torch.randn(16, requires_grad=True)
    y = call(home, torch.sin, leaf * 1).sum()
    first = torch.autograd.grad(y, leaf, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(y, leaf)[0], first)
    del y
    assert kept(home) == 0


@pytest.mark.parametrize("moved", [True, False])
def test_an_input_that_the_block_writes_to_is_refused_as_autograd_refuses_it(moved: bool) -> None:
    leaf = torch.randn(16, requires_grad=True)
    x = leaf * 1
    home = offload() if moved else offload(x)
    y = call(home, lambda x: torch.sin(x.mul_(2)), x)
    with raises("activation-checkpointing-input-changed"):
        y.sum().backward()
    del y
    assert kept(home) == 0


def test_a_forward_that_raises_returns_its_buffers() -> None:
    home = offload()

    def fail(x: Tensor) -> Tensor:
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        call(home, fail, torch.randn(16, requires_grad=True))
    assert kept(home) == 0 and home.buffers.allocated_bytes == 64


def test_the_pool_never_holds_more_than_twice_of_what_was_in_use() -> None:
    draw, pool = random.Random(1), HostBuffers(Platform(CPU))
    used: list[tuple[int, Tensor]] = []
    most = most_room = 0
    for turn in range(2000):
        if used and draw.random() < (0.2, 0.8)[turn // 100 % 2]:
            pool.release(used.pop(draw.randrange(len(used)))[1])
        else:
            count = draw.randrange(1, (100, 1000, 5000, 300)[turn // 200 % 4])
            buffer = pool.acquire(count)
            assert count <= buffer.numel() <= 2 * count and all(buffer is not other for _, other in used)
            used.append((count, buffer))
        room = sum(buffer.numel() for _, buffer in used)
        most, most_room = max(most, sum(count for count, _ in used)), max(most_room, room)
        assert pool.allocated_bytes == pool.idle_bytes + room <= most_room <= 2 * most
    again = HostBuffers(Platform(CPU))
    for _ in range(3):
        taken = [again.acquire(100 + n) for n in range(5)]
        assert again.allocated_bytes == 510
        for buffer in taken:
            again.release(buffer)
