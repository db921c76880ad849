"""Where master weights, optimizer state and weights rest changes no bit: equal to the oracle at every stage."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shardengine.offload import CopyQueue, Platform
from tests.support import cases
from tests.support.comparing import assert_equal_to_truth
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]
STEPS = 20
SMALL = 600
"""Elements of a bucket: several in every flat buffer, so that a part of them can rest elsewhere."""

PRECISIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fp32": ({}, {}),
    "bf16": ({"bf16": {"enabled": True}}, {"low": torch.bfloat16}),
    "bf16 stepped itself": (
        {"bf16": {"enabled": True, "master_weights": False, "stochastic_rounding": True}, "seed": 5},
        {"low": torch.bfloat16, "keeps_masters": False, "seed": 5},
    ),
    "fp16": (
        {"fp16": {"enabled": True, "initial_scale_power": 17, "loss_scale_window": 2, "hysteresis": 1}},
        {"low": torch.float16, "scaling": (2.0**17, 2, 1, 1.0)},
    ),
}
"""What the config says → what the oracle is told."""
CPU: dict[str, Any] = {"offload_optimizer": {"device": "cpu"}}
PART: dict[str, Any] = {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}


def train_each(model: str, kind: str, configs: dict[str, dict[str, Any]], steps: int) -> dict[str, dict[str, Any]]:
    return {name: cases.train_engine(model, kind, config, steps) for name, config in configs.items()}


def configs_of(places: dict[str, dict[str, Any]], micros: int, **options: Any) -> dict[str, dict[str, Any]]:
    """Every stage with every place, by "stage, place"; 3k is in ``test_weights_rest_anywhere_at_stage_3``."""
    return {
        f"{stage}, {name}": cases.config_of(stage, micros, zero={"reduce_bucket_size": SMALL, **place}, **options)
        for stage in ("0", "1", "2", "3")
        for name, place in places.items()
    }


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("micros", [1, 3])
def test_twenty_steps_have_the_bits_of_the_oracle(pools: Pools, tmp_path: Path, precision: str, micros: int) -> None:
    said, told = PRECISIONS[precision]
    disk = {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path), "buffer_count": 3}}
    places = {"cpu": CPU, "part": PART, "disk": disk}
    configs = configs_of(places, micros, **said)
    results = pools(2).run(train_each, "mlp", "AdamW", configs, STEPS)
    for name in configs:
        stage = name.split(",")[0]
        truth = cases.truth("mlp", "AdamW", 2, micros, cases.LETTER[stage], STEPS, **told)
        assert_equal_to_truth([result[name] for result in results], truth, name)


def everywhere(folder: Path) -> dict[str, dict[str, Any]]:
    """Every way in which weights and state may rest at stage 3."""
    disk = {"device": "nvme", "nvme_path": str(folder), "buffer_count": 2}
    return {
        "weights on the host": {"offload_param": {"device": "cpu"}},
        "all on the host": {"offload_param": {"device": "cpu"}, **CPU},
        "weights on disk": {"offload_param": disk},
        "weights on disk, state on the host": {"offload_param": disk, **CPU},
        "all on disk": {"offload_param": disk, "offload_optimizer": disk},
        "weights on the host, a part of the state": {"offload_param": {"device": "cpu"}, **PART},
    }


@pytest.mark.core
@pytest.mark.parametrize(
    ("ranks", "model", "kind", "micros", "precision"),
    [
        (1, "mlp", "AdamW", 1, "fp32"),
        (2, "gpt2", "SGD", 3, "fp32"),
        (3, "mlp", "Lion", 1, "bf16"),
        (2, "mlp", "AdamW", 3, "bf16 stepped itself"),
        (4, "mlp", "AdamW", 1, "fp16"),
    ],
)
def test_weights_rest_anywhere_at_stage_3(
    pools: Pools, tmp_path: Path, ranks: int, model: str, kind: str, micros: int, precision: str
) -> None:
    said, told = PRECISIONS[precision]
    configs = {
        f"{stage}, {name}": cases.config_of(stage, micros, zero={"reduce_bucket_size": SMALL, **place}, **said)
        for stage in ("3k", "3")
        for name, place in everywhere(tmp_path).items()
    }
    results = pools(ranks).run(train_each, model, kind, configs, 6)
    truth = cases.truth(model, kind, ranks, micros, "sharded", 6, **told)
    for name in configs:
        assert_equal_to_truth([result[name] for result in results], truth, name)


def train_apart(model: str, kind: str, configs: dict[str, dict[str, Any]], steps: int) -> dict[str, dict[str, Any]]:
    """As if the device had a memory of its own: what crosses is copied, and added up on the other side."""
    with pytest.MonkeyPatch.context() as patch:
        sent: list[int] = []
        send = CopyQueue.send

        def counted(self: CopyQueue, pairs: Any, *rest: Any) -> Any:
            for source, target in pairs:
                assert source.data_ptr() != target.data_ptr() and source.dtype is target.dtype
                sent.append(source.element_size())
            return send(self, pairs, *rest)

        patch.setattr(Platform, "has_own_memory", True)
        patch.setattr(CopyQueue, "send", counted)
        results = {}
        for name, config in configs.items():
            sent.clear()
            results[name] = {**cases.train_engine(model, kind, config, steps), "sent": sorted(set(sent))}
        return results


@pytest.mark.parametrize(
    ("ranks", "micros", "precision", "wire", "sums"),
    [(1, 1, "bf16", 2, 2), (1, 3, "bf16", 2, 2), (2, 3, "bf16", 2, 4), (3, 1, "fp16", 2, 2), (2, 3, "fp32", 4, 4)],
)
def test_gradients_leave_for_the_host_and_weights_come_back(
    pools: Pools, ranks: int, micros: int, precision: str, wire: int, sums: int
) -> None:
    """wire, sums: bytes per element on the way, where a window's gradient is sent once, and with letter S.

    Stepped weights go back in their own dtype.
    """
    said, told = PRECISIONS[precision]
    configs = configs_of({"cpu": CPU, "part": PART}, micros, **said)
    results = pools(ranks).run(train_apart, "mlp", "AdamW", configs, 6)
    for name in configs:
        stage = name.split(",")[0]
        found = [result[name] for result in results]
        weights = 4 if precision == "fp32" else 2
        widths = {"0": {weights}, "1": {weights, wire}}.get(stage, {weights, sums})
        assert [set(result.pop("sent")) for result in found] == [widths] * ranks, name
        truth = cases.truth("mlp", "AdamW", ranks, micros, cases.LETTER[stage], 6, **told)
        assert_equal_to_truth(found, truth, name)


def test_weights_and_state_rest_on_both_sides(pools: Pools, tmp_path: Path) -> None:
    """As above, with the weights' shards away as well, or alone."""
    said, told = PRECISIONS["bf16"]
    configs = {
        name: cases.config_of("3", 1, zero={"reduce_bucket_size": SMALL, **place}, **said)
        for name, place in everywhere(tmp_path).items()
    }
    results = pools(2).run(train_apart, "mlp", "AdamW", configs, 6)
    truth = cases.truth("mlp", "AdamW", 2, 1, "sharded", 6, **told)
    for name in configs:
        found = [{key: value for key, value in result[name].items() if key != "sent"} for result in results]
        assert_equal_to_truth(found, truth, name)
