"""SyncBatchNorm: torch's own on GPUs; on a CPU a refusal by name at initialize, because torch has none there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shardengine
from shardengine.errors import MismatchError, UsageError
from shardengine.sharding import partition
from tests.support import cases
from tests.support.raising import raises
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def normed() -> nn.Module:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    return nn.SyncBatchNorm.convert_sync_batchnorm(model)


def try_on_cpu(stage: str) -> list[Any]:
    config = {**cases.config_of(stage), "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    mesh = cases.mesh_of_this_process()
    with pytest.raises(ValueError, match="expected input tensor to be on GPU"):
        normed()(torch.randn(3, 4))  # what torch says; where this fails, ours may end
    found: list[Any] = []
    with pytest.raises((UsageError, MismatchError)) as raised:
        shardengine.initialize(normed(), config, mesh=mesh)
    found.append(str(raised.value))
    model: Any = normed()
    model[1].eval()  # frozen statistics
    engine = shardengine.initialize(model, config, mesh=mesh)
    engine.backward(engine(torch.randn(3, 4)).square().mean())
    engine.step()
    found.append(engine.get_global_grad_norm())
    engine.close()
    return found


@pytest.mark.parametrize(("ranks", "stage"), [(1, "0"), (2, "0"), (2, "2"), (2, "3")])
def test_on_a_cpu_it_is_refused_by_name_but_for_evaluation(pools: Pools, ranks: int, stage: str) -> None:
    for text, norm in pools(ranks).run(try_on_cpu, stage):
        assert "module '1' is a SyncBatchNorm, which torch computes on GPUs alone" in text and norm > 0


def test_without_a_process_group_it_is_a_batch_norm() -> None:
    config = {**cases.config_of("0"), "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine = shardengine.initialize(normed(), config)
    engine.backward(engine(torch.randn(3, 4)).square().mean())
    engine.step()
    engine.close()


def test_over_other_ranks_than_the_engines_it_is_refused() -> None:
    model = normed()
    partition.check_sync_batch_norm(model, GPU, 4, lambda group: 4)
    partition.check_sync_batch_norm(nn.BatchNorm1d(3), CPU, 4, lambda group: 2)
    with raises("model-sync-batch-norm-ranks", "'1'", "over 8", "has 4"):
        partition.check_sync_batch_norm(model, GPU, 4, lambda group: 8)
    partition.check_sync_batch_norm(model.eval(), GPU, 4, lambda group: 8)
