"""no_values.py, and what the engine does with tensors that have no values: what it does with ordinary ones."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardengine import kernels
from shardengine.offload import Platform
from shardengine.planner import without_values
from shardengine.runtime.activation_offload import ActivationStore
from shardengine.sharding import inner
from shardengine.sharding.poison import hide, poison, reveal
from tests.support.parts import CPU
from tests.support.raising import raises

KINDS: dict[str, Callable[[], Tensor]] = {
    "activation": lambda: torch.randn(2, 3),
    "transposed": lambda: torch.randn(2, 3).t(),
    "parameter": lambda: nn.Parameter(torch.randn(2, 3)),
    "no elements": lambda: torch.randn(0, 3),
    "number": lambda: torch.tensor(1.0),
}


@pytest.mark.parametrize("kind", list(KINDS))
def test_what_would_be_moved_to_the_host_is_moved(kind: str) -> None:
    store = ActivationStore(Platform(CPU), lambda storage: False)
    expected = store.moves(KINDS[kind]())
    with without_values():
        assert store.moves(KINDS[kind]()) is expected
    assert expected is (kind in ("activation", "transposed", "number"))


def test_a_weight_that_is_elsewhere_is_refused_as_ever() -> None:
    with without_values():
        weight = nn.Parameter(torch.randn(2, 3))
        whole = weight.data
        hide(weight, poison(torch.float32, (2, 3), CPU), "parameter 'w'")
        for read in (lambda: weight + 1, lambda: weight.data + 1, lambda: weight.detach().t()[0] * 2):
            with raises("weights-used-while-sharded", "parameter 'w'"):
                read()
        reveal(weight, whole)
        assert (weight + 1).shape == (2, 3) and inner.own_class(weight) is nn.Parameter


def test_a_frozen_weight_is_not_taken_for_a_quantised_one() -> None:
    """What torch keeps on a fake tensor, and what the module keeps in its objects, are no parameters."""
    with without_values():
        module: Any = nn.Linear(3, 2).requires_grad_(False)
        module.kept = SimpleNamespace(scale=torch.randn(2))
        inner.split(module, CPU)
        assert inner.beside(module) == [] and type(module.kept.scale) is not nn.Parameter
        assert not isinstance(module.kept.scale, nn.Parameter)
        assert inner.facts(module) == []
    plain: Any = nn.Linear(3, 2).requires_grad_(False)
    plain.kept = SimpleNamespace(scale=torch.randn(2))
    inner.split(plain, CPU)
    assert inner.beside(plain) == []


def test_what_cannot_be_held_is_refused_without_values_too() -> None:
    class DTensor(Tensor):  # by its name alone
        pass

    with kernels.without_values(), raises("model-dtensor-parameter"):
        inner.check("w", nn.Parameter(torch.randn(2).as_subclass(DTensor), requires_grad=False))


def attention(x: Tensor) -> Tensor:
    return nn.functional.scaled_dot_product_attention(x, x, x)


ASKED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "sum of two": lambda x, y: x + y,
    "transposed": lambda x, y: (x.t() * 2).pow(2),
    "number of another kind": lambda x, y: (x.long() * 2.5, x.long() * 2),
    "product": lambda x, y: x @ y.t(),
    "mean": lambda x, y: x.mean(-1, keepdim=True) / y.rsqrt(),
    "cast": lambda x, y: (x.to(torch.bfloat16), x.t().to(torch.float64)),
    "cat": lambda x, y: torch.cat([x, y.t().contiguous().t()], 1),
    "parts": lambda x, y: [*x.chunk(3, 1), *x.split(4), *x.unbind(), x[2:5, 1], x.expand(2, 8, 12)],
    "largest": lambda x, y: x.max(0),
    "like": lambda x, y: (torch.empty_like(x.t()), x.new_empty(3), torch.zeros_like(x, dtype=torch.float16)),
    "attention": lambda x, y: attention(x.view(1, 2, 4, 12)[..., :8].transpose(1, 2)),
    "several": lambda x, y: torch.var_mean(x, 0),
}


@pytest.mark.parametrize("what", list(ASKED))
def test_what_comes_out_has_the_form_that_it_has_with_values(what: str) -> None:
    """The first time and the second, when it is known, and of other strides."""

    def forms(found: Any) -> list[Any]:
        several = [found] if isinstance(found, Tensor) else list(found)
        return [(each.shape, each.stride(), each.dtype, each.untyped_storage().nbytes()) for each in several]

    for turned in (False, True):
        with without_values():
            x, y = (
                (torch.randn(12, 8).t(), torch.randn(12, 8).t()) if turned else (torch.randn(8, 12), torch.randn(8, 12))
            )
            if turned and what == "attention":
                x = x.contiguous()
            found = [forms(ASKED[what](x, y)) for _ in range(2)]
        x, y = (torch.randn(12, 8).t(), torch.randn(12, 8).t()) if turned else (torch.randn(8, 12), torch.randn(8, 12))
        x = x.contiguous() if turned and what == "attention" else x
        assert found == [forms(ASKED[what](x, y))] * 2


def test_what_comes_out_has_memory_of_its_own() -> None:
    with without_values():
        x = torch.randn(8, 12)
        made = [x * 2 for _ in range(3)]
        assert len({each.untyped_storage()._cdata for each in (x, *made)}) == 4
        assert x[2:].untyped_storage()._cdata == x.untyped_storage()._cdata


def test_who_hears_of_operations_hears_what_was_given_and_returned() -> None:
    heard: list[tuple[str, list[Any], Any]] = []

    def seen(func: Any, args: Any, kwargs: Any, tensors: Any, result: Any) -> None:
        heard.append((func._schema.name, list(tensors), result))

    with without_values(seen):
        x = torch.randn(2, 3)
        y = x.add(x, alpha=2)
    name, tensors, result = heard[-1]
    assert name == "aten::add" and all(each is x for each in tensors) and len(tensors) == 2
    assert result.shape == y.shape and heard[0][0] == "aten::randn"


def test_dropout_is_that_of_a_gpu_inside_alone() -> None:
    """In place a GPU, too, keeps what it multiplies with, in the dtype of the input."""

    def node(of: Callable[[Tensor], Tensor]) -> str:
        return type(of(torch.randn(2, 3, requires_grad=True)).grad_fn).__name__

    drop = nn.functional.dropout
    with without_values(on_gpu=True):
        assert node(lambda x: drop(x, 0.1)) == node(nn.Dropout(0.1)) == "NativeDropoutBackward0"
        assert node(lambda x: drop(x * 1, 0.1, inplace=True)) == "MulBackward0"
        x = torch.randn(2, 3)
        assert drop(x, 0.1, training=False).untyped_storage()._cdata == x.untyped_storage()._cdata
    with without_values():
        assert node(lambda x: drop(x, 0.1)) == "MulBackward0"
    assert node(lambda x: drop(x, 0.1)) == "MulBackward0"
