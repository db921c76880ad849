"""safe_get_*, safe_set_*: what is written to one parameter is what the step takes, whole or in each rank's part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import shardengine.compat.deepspeed as deepspeed
from shardengine.errors import UsageError
from tests.compat.test_facade import loss_of
from tests.compat.test_own_loops import config_of, make_model, whole
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]
utils = deepspeed.utils
EVERYWHERE = pytest.mark.parametrize(
    ("stage", "ranks", "device"),
    [(0, 2, "none"), (1, 2, "none"), (2, 2, "none"), (3, 1, "none"), (3, 2, "none"), (1, 1, "cpu"), (3, 2, "cpu")],
)


def make(stage: int, device: str, **more: Any) -> Any:
    config = {**config_of(stage), "gradient_accumulation_steps": 1, "gradient_clipping": 0.0, **more}
    config["optimizer"] = {
        "type": "AdamW",
        "params": {"lr": 0.25, "weight_decay": 0.0, "betas": [0.5, 0.5], "eps": 0.0},
    }
    config["zero_optimization"] = {"stage": stage, "offload_optimizer": {"device": device}}
    return deepspeed.initialize(model=make_model(), config=config)[0]


def written(stage: int, device: str) -> None:
    """Whole values: gradients before the step, the weight and the states after it."""
    engine = make(stage, device)
    weight = engine.module[2].weight
    values = torch.arange(256.0).view(16, 16) + 1
    engine.backward(loss_of(engine, 0))
    before = whole(engine)
    utils.safe_set_full_grad(weight, values)
    assert torch.equal(utils.safe_get_full_grad(weight), values)
    utils.safe_update_full_grad_vectorized([weight, engine.module[0].bias], lambda gradient, param: gradient * 2)
    assert torch.equal(utils.safe_get_full_grad(weight), values * 2)
    engine.step()
    stepped = before["2.weight"] - 0.25  # Adam's first step: the sign
    assert torch.allclose(whole(engine)["2.weight"], stepped, atol=1e-6)
    assert torch.equal(utils.safe_get_full_optimizer_state(weight, "exp_avg"), values)
    utils.safe_set_full_fp32_param(weight, values)
    utils.safe_set_full_optimizer_state(weight, values * 3, "exp_avg_sq")
    assert torch.equal(utils.safe_get_full_fp32_param(weight), values) and torch.equal(
        whole(engine)["2.weight"], values
    )
    assert torch.equal(utils.safe_get_full_optimizer_state(weight, "exp_avg_sq"), values * 3)
    with pytest.raises(UsageError, match=r"'2.weight' has no 'momentum': it has 'weight', 'exp_avg'"):
        utils.safe_set_full_optimizer_state(weight, values, "momentum")
    with pytest.raises(UsageError, match=r"expected a tensor of shape \(16, 16\), got \(3,\)"):
        utils.safe_set_full_fp32_param(weight, torch.zeros(3))
    engine.destroy()


@EVERYWHERE
def test_what_is_written_to_one_parameter_is_stepped(stage: int, ranks: int, device: str, pools: Pools) -> None:
    pools(ranks).run(written, stage, device)


def in_parts(ranks: int, device: str) -> None:
    engine = make(3, device)
    rank, bias = engine.global_rank, engine.module[4].bias  # of 3 elements, which 2 ranks cannot share evenly
    size = -(-3 // ranks)
    engine.backward(loss_of(engine, 0))
    assert bias.ds_tensor.shape == (size,) and utils.safe_get_local_grad(bias).shape == (size,)
    utils.safe_set_local_grad(bias, torch.arange(float(size)) + 1 + rank * size)
    assert utils.safe_get_full_grad(bias).tolist() == [1.0, 2.0, 3.0]
    engine.step()
    part = utils.safe_get_local_fp32_param(bias)
    utils.safe_set_local_fp32_param(bias, part + 1)
    utils.safe_set_local_optimizer_state(bias, torch.full((size,), float(rank)), "exp_avg")
    expected = [min(each // size, ranks - 1) for each in range(3)]
    assert utils.safe_get_full_optimizer_state(bias, "exp_avg").tolist() == expected
    ends = torch.zeros(size) + float(rank)
    ends[max(0, 3 - rank * size) :] = 0.0  # what fills the last part up
    assert torch.equal(utils.safe_get_local_optimizer_state(bias, "exp_avg"), ends)
    with pytest.raises(UsageError, match=f"expected this rank's part, a tensor of {size} elements, got"):
        utils.safe_set_local_grad(bias, torch.zeros(7))
    engine.destroy()


@pytest.mark.parametrize(("ranks", "device"), [(1, "none"), (2, "none"), (2, "cpu")])
def test_parts_are_of_equal_size_and_make_the_whole(ranks: int, device: str, pools: Pools) -> None:
    pools(ranks).run(in_parts, ranks, device)


def without_parts() -> None:
    engine = make(2, "none")
    with pytest.raises(UsageError, match=r"safe_get_local_grad: expected stage 3, .* got stage 2; safe_get_full_\*"):
        utils.safe_get_local_grad(engine.module[0].weight)
    engine.destroy()


def test_parts_are_of_stage_3_alone(pools: Pools) -> None:
    pools(1).run(without_parts)
