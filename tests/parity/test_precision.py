"""fp16, pure bf16, and the dtypes of sums and accumulators: equal to the oracle bit for bit at every stage."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests import oracle
from tests.support import cases
from tests.support.comparing import assert_equal_to_truth
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]
BF16, FP16 = torch.bfloat16, torch.float16
SEED = 5
STEPS = 6
SCALING = (2.0**17, 2, 1, 1.0)
"""Of the oracle's Scaler: some steps overflow, the scale falls and grows again."""

PRECISIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fp16": (
        {"fp16": {"enabled": True, "initial_scale_power": 17, "loss_scale_window": 2, "hysteresis": 1}},
        {"low": FP16, "scaling": SCALING},
    ),
    "fp16, static scale": (
        {"fp16": {"enabled": True, "loss_scale": 100}},
        {"low": FP16, "scaling": (100.0, 10**9, 10**9, 100.0)},
    ),
    "bf16, no masters": (
        {"bf16": {"enabled": True, "master_weights": False}},
        {"low": BF16, "keeps_masters": False},
    ),
    "bf16, no masters, stochastic": (
        {"bf16": {"enabled": True, "master_weights": False, "stochastic_rounding": True}, "seed": SEED},
        {"low": BF16, "keeps_masters": False, "seed": SEED},
    ),
}
"""What the config says → what the oracle is told."""


def configs_of(precision: str, micros: int, stages: tuple[str, ...], **options: Any) -> dict[str, dict[str, Any]]:
    said, _ = PRECISIONS[precision]
    return {stage: cases.config_of(stage, micros, **said, **options) for stage in stages}


def train_each(model: str, kind: str, configs: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {stage: cases.train_engine(model, kind, config, STEPS) for stage, config in configs.items()}


def compare(
    pools: Pools, ranks: int, configs: dict[str, dict[str, Any]], truth_of: Callable[[str], oracle.Trace],
    kind: str, model: str,
) -> None:  # fmt: skip
    results = pools(ranks).run(train_each, model, kind, configs)
    for stage in configs:
        assert_equal_to_truth([result[stage] for result in results], truth_of(stage), stage)


@pytest.mark.parametrize("precision", list(PRECISIONS))
@pytest.mark.parametrize(
    ("ranks", "micros", "kind", "model"),
    [
        (1, 1, "AdamW", "mlp"), (2, 1, "SGD", "mlp"), (2, 3, "AdamW", "gpt2"), (3, 3, "SGD", "mlp"),
        (3, 1, "Lion", "llama"), (4, 3, "AdamW", "mlp"),
    ],
)  # fmt: skip
def test_every_precision_equals_the_oracle(
    pools: Pools, precision: str, ranks: int, micros: int, kind: str, model: str
) -> None:
    _, told = PRECISIONS[precision]
    configs = configs_of(precision, micros, tuple(cases.STAGES))

    def truth(stage: str) -> oracle.Trace:
        return cases.truth(model, kind, ranks, micros, cases.LETTER[stage], STEPS, **told)

    compare(pools, ranks, configs, truth, kind, model)


@pytest.mark.parametrize("precision", ["fp16", "bf16, no masters, stochastic"])
def test_precision_does_not_depend_on_buckets_and_overlap(pools: Pools, precision: str) -> None:
    _, told = PRECISIONS[precision]
    truth = cases.truth("gpt2", "SGD", 3, 3, "sharded", STEPS, **told)
    for size, overlap in ((600, True), (10**6, False)):
        said, _ = PRECISIONS[precision]
        changes: dict[str, Any] = {"zero": {"reduce_bucket_size": size}, "overlap_comm": overlap}
        changes |= {"gradient_accumulation": "sharded"}
        configs = {stage: cases.config_of(stage, 3, **said, **changes) for stage in ("0", "2", "3")}
        compare(pools, 3, configs, lambda _stage: truth, "SGD", "gpt2")


TYPES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"data_types": {"reduce_dtype": "bf16"}}, {"reduce": BF16}),
    ({"data_types": {"grad_accum_dtype": "bf16"}}, {"accumulate": BF16}),
    (
        {"data_types": {"grad_accum_dtype": "bf16", "reduce_dtype": "fp16"}, "bf16": {"enabled": True}},
        {"accumulate": BF16, "reduce": FP16, "low": BF16},
    ),
    ({"communication_data_type": "fp16"}, {"wire": FP16}),
    (
        {"communication_data_type": "bf16", "data_types": {"grad_accum_dtype": "fp16"}},
        {"wire": BF16, "accumulate": FP16},
    ),
]
"""Wire, sum and accumulator are separate: what the config says → what the oracle is told."""


@pytest.mark.parametrize("types", range(len(TYPES)))
@pytest.mark.parametrize(("ranks", "micros"), [(3, 1), (3, 3), (4, 3)])
def test_wire_sum_and_accumulator_have_dtypes_of_their_own(pools: Pools, types: int, ranks: int, micros: int) -> None:
    said, told = TYPES[types]
    configs = {stage: cases.config_of(stage, micros, **said) for stage in cases.STAGES}

    def truth(stage: str) -> oracle.Trace:
        return cases.truth("mlp", "SGD", ranks, micros, cases.LETTER[stage], STEPS, **told)

    compare(pools, ranks, configs, truth, "SGD", "mlp")


class Convolutions(nn.Module):
    """Weights whose order in memory is not that of their dimensions, a frozen one before them."""

    def __init__(self) -> None:
        super().__init__()
        self.still = nn.Conv2d(3, 3, 3, padding=1).requires_grad_(False)
        self.first, self.second = nn.Conv2d(3, 5, 3), nn.Conv2d(5, 2, 2)
        for convolution in (self.still, self.first):
            convolution.weight.data = convolution.weight.data.contiguous(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(self.still(x))))


def convolutions_loss(model: Any, step: int, rank: int, micro: int) -> Tensor:
    torch.manual_seed(cases.seed_of(step, rank, micro))
    return model(torch.randn(2, 3, 5, 5).bfloat16()).float().square().mean()


def make_convolutions() -> nn.Module:
    torch.manual_seed(21)
    return Convolutions()


def train_convolutions(stage: str) -> dict[str, Any]:
    config = cases.config_of(stage, **PRECISIONS["bf16, no masters, stochastic"][0])
    engine = cases.make_engine(make_convolutions(), config, "SGD")
    result = cases.run_steps(engine, 3, convolutions_loss)
    engine.close()
    return result


def test_elements_of_channels_last_weights_are_numbered_as_they_lie_in_memory(pools: Pools) -> None:
    network = make_convolutions()
    _, told = PRECISIONS["bf16, no masters, stochastic"]
    truth = oracle.train(network, convolutions_loss, ranks=2, steps=3, kind="SGD", clip=cases.CLIP,
                         groups=cases.groups_of(network, "SGD"), **told)  # fmt: skip
    for stage in ("0", "2", "3"):
        assert_equal_to_truth(pools(2).run(train_convolutions, stage), truth, stage)


def test_the_precisions_of_the_truth_differ() -> None:
    """If they did not, the tests above would prove nothing."""
    curve = functools.partial(cases.truth, "mlp", "SGD", 3, 3, "sharded", STEPS)
    every = [told for _, told in (*PRECISIONS.values(), *TYPES)] + [{}, {"low": BF16}]
    losses = [str(curve(**told).losses[-1]) for told in every]
    assert len(set(losses)) == len(losses)
    scaled = curve(**PRECISIONS["fp16"][1])
    assert 0 < len(scaled.skipped) < STEPS and any(b > a for a, b in itertools.pairwise(scaled.scales))
