"""An exception in a checkpointed forward, or in its recomputation, costs that micro-batch and nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.runtime.test_activation_checkpointing import chain, engine_of, pool_of, squares, train
from tests.support import cases
from tests.support.special_models import Boom

STAGES = list(cases.STAGES)


class Failing(nn.Module):
    """Raises at one of its forwards, counted over all blocks."""

    at, count = 0, 0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.sigmoid(self.linear(x))
        Failing.count += 1
        if Failing.count == Failing.at:
            raise Boom("on purpose")
        return torch.tanh(x) * x


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("at", [2, 3, 4, 6])
def test_after_an_exception_training_goes_on(stage: str, at: int) -> None:
    """At 2 and 3 in a forward, at 4 and 6 in a recomputation of the last and of the first block."""
    Failing.at = 0
    expected = train(engine_of("kept", stage, chain(Failing, 3)), squares)
    engine = engine_of("offloaded", stage, chain(Failing, 3))
    pool = pool_of(engine)
    Failing.at, Failing.count = at, 0
    with pytest.raises(Boom):
        engine.backward(squares(engine, 5, 0, 0))
    Failing.at = 0
    engine.zero_grad()
    assert pool.idle_bytes == pool.allocated_bytes > 0
    assert train(engine, squares) == expected
