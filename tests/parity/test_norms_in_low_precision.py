"""Norms with running statistics in bf16 and fp16: their parameters stay in fp32, and all equals the oracle."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import shardengine
from tests import oracle
from tests.support import cases
from tests.support.comparing import assert_equal_to_truth
from tests.support.covering import covering
from tests.support.raising import raises
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]
BF16, FP16, STEPS = torch.bfloat16, torch.float16, 4

PRECISIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "bf16": ({"bf16": {"enabled": True}}, {"low": BF16}),
    "fp16": (
        {"fp16": {"enabled": True, "initial_scale_power": 10, "loss_scale_window": 2, "hysteresis": 1}},
        {"low": FP16, "scaling": (2.0**10, 2, 1, 1.0)},
    ),
    "bf16, no masters, stochastic": (
        {"bf16": {"enabled": True, "master_weights": False, "stochastic_rounding": True}, "seed": 5},
        {"low": BF16, "keeps_masters": False, "seed": 5},
    ),
}
"""What the config says → what the oracle is told."""
NORMS = {
    "blocks.0.1.weight": torch.float32, "blocks.1.3.bias": torch.float32, "own.weight": torch.float32,
    "plain.weight": None, "apart.weight": None, "blocks.0.0.weight": None, "out.bias": None,
}  # fmt: skip
"""Parameters, and the dtype that they keep; None: they are cast."""


class OwnNorm(nn.Module):
    """A norm of the user's, of no class of torch's."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.register_buffer("running_mean", torch.zeros(width))
        self.register_buffer("running_var", torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        mean: Any = self.running_mean
        variance: Any = self.running_var
        return functional.batch_norm(x, mean, variance, self.weight, None, training=self.training)


class Normed(nn.Module):
    """Norms of each kind: with statistics, affine or not, and without."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(21)
        self.first = nn.BatchNorm1d(4)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv1d(4, 4, 3, padding=1), nn.BatchNorm1d(4), nn.Tanh(),
                nn.InstanceNorm1d(4, affine=True, track_running_stats=True), nn.BatchNorm1d(4, affine=False),
            )
            for _ in range(2)
        )  # fmt: skip
        self.own = OwnNorm(4)
        self.plain, self.apart = nn.LayerNorm(6), nn.BatchNorm1d(4, track_running_stats=False)
        self.out = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        x = self.apart(self.plain(self.own(x)))
        return self.out(x)


def loss_of(model: Any, step: int, rank: int, micro: int) -> Tensor:
    torch.manual_seed(cases.seed_of(step, rank, micro))
    bare = getattr(model, "module", model)
    x = torch.randn(5, 4, 6)
    y = model(x if bare is not model else x.to(bare.out.weight.dtype))
    assert y.dtype is bare.out.weight.dtype
    return y.float().square().mean()


def evaluated(model: Any) -> Tensor:
    bare = getattr(model, "module", model)
    bare.eval()
    with torch.no_grad():
        return model(torch.ones(2, 4, 6).cumsum(1).to(bare.out.weight.dtype)).float()


def engine_of(stage: str, precision: str, micros: int, tier: str) -> Any:
    zero: dict[str, Any] = {"reduce_bucket_size": 64}
    if tier:
        zero["offload_optimizer"] = {"device": tier}
    if tier and stage.startswith("3"):
        zero["offload_param"] = {"device": tier}
    config = cases.config_of(stage, micros, zero=zero, **PRECISIONS[precision][0])
    return cases.make_engine(Normed(), config)


def train(stage: str, precision: str, micros: int, tier: str, folder: str) -> dict[str, Any]:
    """Half of it by one engine, half by another that loads a checkpoint of the first."""
    engine = engine_of(stage, precision, micros, tier)
    cast = FP16 if precision == "fp16" else BF16
    for name, dtype in NORMS.items():
        assert engine.module.get_parameter(name).dtype is (dtype or cast), name
    whole = cases.run_steps(engine, STEPS, loss_of)
    engine.close()
    engine = engine_of(stage, precision, micros, tier)
    half = cases.run_steps(engine, STEPS // 2, loss_of)
    engine.save_checkpoint(folder, "half")
    engine.close()
    engine = engine_of("2" if stage == "3" else stage, precision, micros, tier)
    engine.load_checkpoint(folder, "half")

    def later(model: Any, step: int, rank: int, micro: int) -> Tensor:
        return loss_of(model, step + STEPS // 2, rank, micro)

    rest = cases.run_steps(engine, STEPS - STEPS // 2, later)
    assert half["losses"] + rest["losses"] == whole["losses"]
    result = evaluated(engine)
    engine.close()
    return whole | {"evaluated": result.numpy()}


ALL = itertools.product((1, 2, 3), cases.STAGES, (1, 2), PRECISIONS, ("", "cpu"))


@pytest.mark.parametrize(("ranks", "stage", "micros", "precision", "tier"), covering(ALL, 2))
def test_they_equal_the_oracle(
    pools: Pools, tmp_path: Path, ranks: int, stage: str, micros: int, precision: str, tier: str
) -> None:
    results = pools(ranks).run(train, stage, precision, micros, tier, str(tmp_path))
    told = dict(PRECISIONS[precision][1])
    scaler = oracle.Scaler(*told.pop("scaling")) if "scaling" in told else None
    model = Normed()
    truth = oracle.train(
        model, loss_of, ranks=ranks, micros=micros, steps=STEPS, groups=cases.groups_of(model, "AdamW"),
        order=cases.LETTER[stage] if micros > 1 else "full", clip=cases.CLIP, scaler=scaler, **told,
    )  # fmt: skip
    assert_equal_to_truth(results, truth, stage)
    found = torch.from_numpy(results[0]["evaluated"])  # other ranks have statistics of their own
    assert torch.equal(found, evaluated(model))


def test_split_masters_need_bf16_weights() -> None:
    with raises("split-masters-beside-fp32-weight", "'first.weight'", "float32"):
        cases.make_engine(Normed(), cases.config_of("2", bf16={"enabled": True, "split_masters": True}))


def test_statistics_in_bf16_keep_nothing() -> None:
    """A model that was cast whole is as torch has it."""
    engine = cases.make_engine(Normed().bfloat16(), cases.config_of("2", bf16={"enabled": True}))
    assert {p.dtype for p in engine.module.parameters()} == {BF16}
    cases.run_steps(engine, 1, loss_of)
    engine.close()


def test_a_plan_counts_them_in_fp32() -> None:
    """In a model that is norms alone, bf16 saves nothing."""
    found = []
    for bf16 in (False, True):
        model = nn.Sequential(*(nn.BatchNorm1d(4096) for _ in range(8)))
        optimizer = {"type": "AdamW", "params": {"lr": 1e-3}}
        config = {**cases.config_of("2", bf16={"enabled": bf16}), "optimizer": optimizer}
        plan = shardengine.plan(model, config, "2x8GB", batch={"input": torch.ones(4, 4096)}, loss=torch.sum)
        found.append((plan.device.at_rest["weights"], plan.device.at_rest["states"]))
    assert found[0] == found[1] and found[0][0] >= 8 * 2 * 4096 * 4
