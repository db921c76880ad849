"""gathering.py: one bucket's tensors whole on every rank, wherever they are placed, and the memory of that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from shardengine.comm import Purpose
from shardengine.core.gathering import gathered
from shardengine.sharding import FullTensors, join
from tests.support import cases
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]


def gather_everything(stage: str) -> dict[str, Any]:
    """What is stepped, in fp32 in one message per bucket, and weights in their own dtype, on one rank."""
    options: dict[str, Any] = {"bf16": {"enabled": True, "master_weights": False}}
    engine = cases.make_engine(cases.make_mlp(), cases.config_of(stage, zero={"reduce_bucket_size": 600}, **options))
    core, optimizer = engine._core, engine.optimizer
    assert optimizer is not None
    specs = {spec.name: spec for spec in core.layout.parameters}

    def gather() -> tuple[FullTensors, FullTensors]:
        weights: FullTensors = {}
        stepped: FullTensors = {}
        for bucket in (state.bucket for state in core.reducer.buckets):
            with gathered(
                core, bucket, {"weight": bucket.weights()}, bucket.placement, Purpose.WHOLE_WEIGHTS, torch.bfloat16
            ) as slices:
                join(slices, weights, specs, core.mesh.device)
            held = optimizer.held(bucket)
            with gathered(core, bucket, held, bucket.state_placement, Purpose.WHOLE_STATE, torch.float32) as slices:
                join(slices, stepped, specs, core.mesh.device)
        return weights, stepped

    weights, stepped = gather()
    pooled = core.pool.allocated_bytes
    gather()
    found = {
        "added to the pool": core.pool.allocated_bytes - pooled,
        "keys": {tuple(tensors) for tensors in stepped.values()},
        "dtypes": {str(tensor.dtype) for tensors in stepped.values() for tensor in tensors.values()},
        "weights": {name: cases.copy_out(of["weight"]).float().numpy() for name, of in weights.items()},
        "stepped": {name: cases.copy_out(of["weight"]).numpy() for name, of in stepped.items()},
        "largest buffer": max((free[0].numel() for free in core.pool._free.values() if free), default=0),
        "largest bucket": max(bucket.length for bucket in core.layout.buckets),
    }
    engine.close()
    return found


@pytest.mark.parametrize("stage", ["0", "2", "3"])
def test_every_rank_has_every_element_and_the_pool_its_buffers_back(pools: Pools, stage: str) -> None:
    expected = {name: parameter.detach().bfloat16().float() for name, parameter in cases.make_mlp().named_parameters()}
    for found in pools(2).run(gather_everything, stage):
        assert found["added to the pool"] == 0
        assert found["largest buffer"] <= found["largest bucket"], "one that only this needs would stay there"
        assert found["keys"] == {("weight", "exp_avg", "exp_avg_sq")} and found["dtypes"] == {"torch.float32"}
        for name, values in expected.items():
            for came in (found["weights"][name], found["stepped"][name]):
                assert torch.equal(torch.from_numpy(came), values.view(-1)), name
