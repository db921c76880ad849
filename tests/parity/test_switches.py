"""Keys of the config that give up an equality: ``"reproducible": false`` and ``"broadcast_buffers": false``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from shardengine.comm import Wire
from tests import oracle
from tests.support import cases
from tests.support.comparing import assert_equal_to_truth
from tests.support.ranks import RankPool
from tests.support.special_losses import CASES

Pools = Callable[[int], RankPool]
BF16 = {"bf16": {"enabled": True}}
STEPS = 4


def train_natively(kind: str, micros: int, options: dict[str, Any]) -> dict[str, tuple[dict[str, Any], int]]:
    """Per stage: what ``cases.train_engine`` gives, and how often the backend's own reduce-scatter was called."""
    found, calls = {}, 0
    plain = Wire.reduce_scatter

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return plain(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Wire, "reduce_scatter", counted)
        for stage in cases.STAGES:
            calls = 0
            result = cases.train_engine("mlp", kind, cases.config_of(stage, micros, **options), STEPS)
            found[stage] = (result, calls)
    return found


@pytest.mark.parametrize(("kind", "micros"), [("AdamW", 1), ("SGD", 3)])
@pytest.mark.parametrize("reproducible", [False, None, True])
def test_two_ranks_have_the_same_bits_either_way(
    pools: Pools, reproducible: bool | None, kind: str, micros: int
) -> None:
    """Two terms have one sum, a + b = b + a, whoever adds them up. Unset, gloo's ranks reduce directly."""
    options = {} if reproducible is None else {"reproducible": reproducible}
    results = pools(2).run(train_natively, kind, micros, options)
    for stage in cases.STAGES:
        order = cases.LETTER[stage]
        truth = cases.truth("mlp", kind, 2, micros, order if micros > 1 else "full", STEPS)
        assert_equal_to_truth([result[stage][0] for result in results], truth, stage)
        assert all((result[stage][1] > 0) is (reproducible is False) for result in results), stage


def test_three_ranks_agree_and_are_near_where_the_backend_sums_in_its_own_order(pools: Pools) -> None:
    """rtol: sums of three terms that may differ by one rounding of fp32, in four steps of SGD."""
    results = pools(3).run(train_natively, "SGD", 3, {"reproducible": False})
    for stage in cases.STAGES:
        order = cases.LETTER[stage]
        truth = cases.truth("mlp", "SGD", 3, 3, order, STEPS)
        cases.assemble([result[stage][0]["state"] for result in results])  # or ranks disagree
        for rank, of_stage in enumerate(results):
            result, calls = of_stage[stage]
            assert calls > 0
            expected = torch.tensor([row[rank] for row in truth.losses])
            torch.testing.assert_close(torch.tensor(result["losses"]), expected, rtol=1e-5, atol=0.0)
        for name, value in results[0][stage][0]["weights"].items():
            torch.testing.assert_close(torch.from_numpy(value), truth.shown[name], rtol=1e-5, atol=1e-6)


def test_what_is_not_sent_in_fp32_is_summed_directly_all_the_same(pools: Pools) -> None:
    """The backend would add bf16 up in bf16."""
    results = pools(3).run(train_natively, "SGD", 1, {"reproducible": False, **BF16})
    truth = cases.truth("mlp", "SGD", 3, 1, "full", STEPS, low=torch.bfloat16)
    for stage in cases.STAGES:
        assert_equal_to_truth([result[stage][0] for result in results], truth, stage)
        assert all(result[stage][1] == 0 for result in results)


def test_sent_in_fp32_they_are_the_backends(pools: Pools) -> None:
    """What bf16 models are told to set where they want that."""
    results = pools(2).run(train_natively, "SGD", 1, {"reproducible": False, "communication_data_type": "fp32", **BF16})
    truth = cases.truth("mlp", "SGD", 2, 1, "full", STEPS, low=torch.bfloat16, wire=torch.float32)
    for stage in cases.STAGES:
        assert_equal_to_truth([result[stage][0] for result in results], truth, stage)
        assert all(result[stage][1] > 0 for result in results), stage


def train_with_buffers(broadcast: bool) -> dict[str, dict[str, Any]]:
    """Per stage: as ``cases.run_steps``. The buffers of a rank reach its next loss."""
    case, found = CASES["buffers"], {}
    for stage in cases.STAGES:
        engine = cases.make_engine(case.make(), cases.config_of(stage, case.micros, broadcast_buffers=broadcast))
        found[stage] = cases.run_steps(engine, STEPS, case.loss)
        engine.close()
    return found


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("broadcast", [False, True])
def test_buffers_stay_each_ranks_own_or_become_rank_0s(pools: Pools, broadcast: bool, ranks: int) -> None:
    case = CASES["buffers"]
    results = pools(ranks).run(train_with_buffers, broadcast)
    for stage in cases.STAGES:
        order = cases.LETTER[stage]
        model = case.make()
        truth = oracle.train(
            model, case.loss, ranks=ranks, micros=case.micros, steps=STEPS, groups=cases.groups_of(model, "AdamW"),
            order=order, clip=cases.CLIP, own_buffers=not broadcast,
        )  # fmt: skip
        assert_equal_to_truth([result[stage] for result in results], truth, stage)
