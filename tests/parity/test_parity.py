"""Every stage equals the oracle bit for bit: losses, norms, parameters and optimizer states of ten steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests import cases, oracle
from tests.ranks import RankPool


def assert_equal_to_truth(results: list[dict[str, Any]], truth: oracle.Trace) -> None:
    for step, losses in enumerate(truth.losses):
        for rank, result in enumerate(results):
            assert result["losses"][step] == losses[rank], f"loss of step {step}, rank {rank}"
            assert result["norms"][step] == truth.norms[step], f"norm of step {step}, rank {rank}"
    for name, expected in truth.parameters.items():
        assert torch.equal(torch.from_numpy(results[0]["weights"][name]), expected.float()), f"parameter {name}"
    for (name, key), flat in cases.assemble([result["state"] for result in results]).items():
        held = "master" if key == "weight" and "master" in truth.states.get(name, {}) else key
        expected = truth.parameters[name] if held == "weight" else truth.states[name][held]
        assert torch.equal(torch.from_numpy(flat), expected.reshape(-1)), f"state {key} of {name}"


@pytest.mark.parametrize("model", ["mlp", "gpt2", "llama"])
@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
@pytest.mark.parametrize("micros", [1, 3])
@pytest.mark.parametrize("stage", list(cases.STAGES))
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_stage_equals_oracle(
    pools: Callable[[int], RankPool], ranks: int, stage: str, micros: int, kind: str, model: str
) -> None:
    results = pools(ranks).run(cases.train_engine, model, kind, cases.config_of(stage, micros))
    order = cases.LETTER[stage] if micros > 1 else "full"
    assert_equal_to_truth(results, cases.truth(model, kind, ranks, micros, order))
