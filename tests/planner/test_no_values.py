"""no_values.py, and what the engine does with tensors that have no values: what it does with ordinary ones."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardengine import kernels
from shardengine.errors import UsageError
from shardengine.offload import Platform
from shardengine.planner import without_values
from shardengine.runtime.activation_offload import ActivationStore
from shardengine.sharding import inner
from shardengine.sharding.poison import hide, poison, reveal
from tests.support.parts import CPU

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
            with pytest.raises(UsageError, match="parameter 'w'"):
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

    with kernels.without_values(), pytest.raises(UsageError, match="is a DTensor"):
        inner.check("w", nn.Parameter(torch.randn(2).as_subclass(DTensor), requires_grad=False))
