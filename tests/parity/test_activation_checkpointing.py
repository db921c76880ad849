"""With activation checkpointing every stage still equals the oracle, which knows nothing of it, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.parity.test_special_cases import truth
from tests.support import cases
from tests.support.comparing import assert_equal_to_truth
from tests.support.ranks import RankPool
from tests.support.special_losses import CASES

Pools = Callable[[int], RankPool]
STEPS = 3
Run = tuple[str, str, int, bool, bool]
"""Model, stage, micro-batches, whether in bf16, whether what is kept goes to host memory. GPT-2 has dropout."""
RUNS: dict[int, list[Run]] = {
    1: [("gpt2", "0", 3, False, True), ("gpt2", "3", 1, True, False)],
    2: [
        *(("gpt2", stage, 1, low, not low) for stage, low in (("0", True), ("1", False), ("2", True), ("3", False))),
        *(("gpt2", stage, 3, stage == "3", stage != "2") for stage in cases.STAGES),
    ],
    3: [("gpt2", "0", 1, False, False), ("gpt2", "3", 3, False, True), ("mlp", "2", 3, True, True)],
}
SPECIAL = [
    *("tied: embedding and head", "tied: one weight in two blocks", "frozen: adapters over bf16", "called twice"),
    *("output: dict", "output: dataclass", "output: view, changed in place", "output: None", "in place: output"),
    *("buffers", "checkpointing: each block", "two forwards, one backward", "exceptions in forward"),
    *("unused: in some micro-batches of some ranks", "evaluation under inference_mode"),
]


def checkpointing(offloaded: bool) -> dict[str, Any]:
    return {"activation_checkpointing": {"enabled": True, "cpu_offload": offloaded}}


def train(runs: list[Run]) -> list[dict[str, Any]]:
    results = []
    for model, stage, micros, low, offloaded in runs:
        config = cases.config_of(stage, micros, bf16={"enabled": low}, **checkpointing(offloaded))
        results.append(cases.train_engine(model, "AdamW", config, STEPS))
    return results


@pytest.mark.parametrize("ranks", list(RUNS))
def test_equals_the_oracle(pools: Pools, ranks: int) -> None:
    answers = pools(ranks).run(train, RUNS[ranks])
    for number, (model, stage, micros, low, _) in enumerate(RUNS[ranks]):
        precision = {"low": torch.bfloat16} if low else {}
        expected = cases.truth(model, "AdamW", ranks, micros, cases.LETTER[stage], STEPS, **precision)
        assert_equal_to_truth([answer[number] for answer in answers], expected, RUNS[ranks][number])


def train_special(stage: str, offloaded: bool) -> list[dict[str, Any]]:
    results = []
    for name in SPECIAL:
        case = CASES[name]
        config = cases.config_of(stage, case.micros, zero=case.zero, **checkpointing(offloaded))
        engine = cases.make_engine(case.make(), config, "AdamW")
        results.append(cases.run_steps(engine, STEPS, case.loss))
        engine.close()
    return results


@pytest.mark.parametrize(("stage", "offloaded"), [("3", True), ("3k", False), ("0", True)])
def test_what_users_models_do(pools: Pools, stage: str, offloaded: bool) -> None:
    answers = pools(2).run(train_special, stage, offloaded)
    for number, name in enumerate(SPECIAL):
        order = cases.LETTER[stage] if CASES[name].micros > 1 else "full"
        expected = truth(name, "AdamW", 2, order, STEPS)
        assert_equal_to_truth([answer[number] for answer in answers], expected, name)
