"""``offload_states`` frees the device between two phases, and ``reload_states`` brings every bit back."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

from shardengine.errors import UsageError
from tests import cases
from tests.comparing import assert_equal_to_truth
from tests.ranks import RankPool
from tests.test_memory import live_storages, only_new_tensors

Pools = Callable[[int], RankPool]
WHEN, STEPS = 2, 4
INCLUDES = [("optimizer", "weights"), ("optimizer",), ("weights",)]


def move_out_and_back(engine: Any, include: tuple[str, ...]) -> dict[str, Any]:
    """What is alive before, meanwhile and afterwards, and what the engine says meanwhile."""
    engine._core.pool.clear()
    gc.collect()
    before = sum(live_storages().values())
    was = engine.memory()
    engine.offload_states(include)
    gc.collect()
    away, refused = sum(live_storages().values()), []
    for call in (lambda: engine(torch.zeros(1, 7)), engine.state_dict, engine.step, engine.zero_grad, engine.memory):
        try:
            call()
        except UsageError as error:
            refused.append("engine.reload_states()" in str(error))
    hidden = [bool(parameter.isnan().all()) for parameter in engine.module.parameters()]
    weights, states = engine._core.weight_bytes(), engine.optimizer.state_bytes()
    engine.offload_states(include)  # said twice, done once
    engine.reload_states()
    engine.reload_states()
    gc.collect()
    return {
        "alive": (before, away, sum(live_storages().values())),
        "refused": refused,
        "hidden": hidden,
        "device": (weights["device"], states["device"]),
        "host": (weights["cpu"], states["cpu"]),
        "was": (was["live_weight_bytes"], was["live_state_bytes"]),
    }


def train_in_phases(stage: str, options: dict[str, Any]) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    results = []
    for include in INCLUDES:
        with only_new_tensors():
            model = cases.make_mlp()
            engine = cases.make_engine(model, cases.config_of(stage, **options), "AdamW")
            seen: list[dict[str, Any]] = []

            def before(step: int, engine: Any = engine, include: Any = include, seen: Any = seen) -> None:
                if step == WHEN:
                    seen.append(move_out_and_back(engine, include))

            result = cases.run_steps(engine, STEPS, before=before)
            engine.offload_states(include)
            engine.close()  # brings them back
            assert not any(bool(parameter.isnan().any()) for parameter in model.parameters())
            results.append((result, seen))
            del engine, model
    return results


@pytest.mark.parametrize("stage", list(cases.STAGES))
@pytest.mark.parametrize(("ranks", "low"), [(1, True), (2, False), (3, True)])
def test_phases_have_the_bits_of_training_without(pools: Pools, stage: str, ranks: int, low: bool) -> None:
    said: dict[str, Any] = {"bf16": {"enabled": True}} if low else {}
    told: dict[str, Any] = {"low": torch.bfloat16} if low else {}
    truth = cases.truth("mlp", "AdamW", ranks, 1, cases.LETTER[stage], STEPS, **told)
    results = pools(ranks).run(train_in_phases, stage, said)
    for number, include in enumerate(INCLUDES):
        assert_equal_to_truth([rank[number][0] for rank in results], truth, (stage, include))
        for seen in (rank[number][1][0] for rank in results):
            weights, states = seen["was"]
            before, away, after = seen["alive"]
            assert before == away == after, "moved, neither copied nor lost"
            assert seen["refused"] == [True, True, True, True], "everything but memory() refuses"
            assert seen["device"][0] == (0 if "weights" in include else weights)
            assert seen["device"][1] == (0 if "optimizer" in include else states)
            assert seen["host"] == (weights - seen["device"][0], states - seen["device"][1])
            hidden = "weights" in include or stage.startswith("3")
            assert seen["hidden"] == [hidden] * len(seen["hidden"])


def refuses(stage: str) -> list[str]:
    engine = cases.make_engine(cases.make_mlp(), cases.config_of(stage, 2), "AdamW")
    texts = []
    for include in ("gradients", ["optimizer", "activations"]):
        with pytest.raises(UsageError) as unknown:
            engine.offload_states(include)
        texts.append(str(unknown.value))
    engine.backward(cases.loss_of(engine, 0, engine.rank, 0))
    with pytest.raises(UsageError) as inside:
        engine.offload_states()
    texts.append(str(inside.value))
    engine.zero_grad()
    with engine.full_params(), pytest.raises(UsageError) as shown:
        engine.offload_states()
    texts.append(str(shown.value))
    engine.close()
    return texts


def test_what_cannot_be_moved_is_said(pools: Pools) -> None:
    for texts in pools(2).run(refuses, "3"):
        assert "expected some of optimizer, weights, came ['gradients']" in texts[0] and "'activations'" in texts[1]
        assert all("between two steps" in text and "engine.zero_grad()" in text for text in texts[2:])
