"""``offload_states`` frees the device between two phases, and ``reload_states`` brings every bit back."""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shardengine.errors import UsageError
from shardengine.sharding.bucket import FlatBuffer
from tests.stages.test_memory import live_storages, only_new_tensors
from tests.support import cases
from tests.support.comparing import assert_equal_to_truth
from tests.support.parts import is_hidden
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]
WHEN, STEPS = 2, 4
INCLUDES = [("optimizer", "weights"), ("optimizer",), ("weights",)]


def alive(expected: int) -> int:
    """Bytes of live tensors; a communication thread may hold on to what it sent for a moment longer."""
    for _ in range(200):
        gc.collect()
        found = sum(live_storages().values())
        if found == expected:
            break
        time.sleep(0.05)
    return found


def move_out_and_back(engine: Any, include: tuple[str, ...]) -> dict[str, Any]:
    """What is alive before, meanwhile and afterwards, and what the engine says meanwhile."""
    engine._core.pool.clear()
    was = engine.memory()
    state = int(was["live_weight_bytes"] + was["live_state_bytes"])
    before = alive(state)
    engine.offload_states(include)
    away, refused = alive(state), []
    for call in (lambda: engine(torch.zeros(1, 7)), engine.state_dict, engine.step, engine.zero_grad, engine.memory):
        try:
            call()
        except UsageError as error:
            refused.append("engine.reload_states()" in str(error))
    hidden = [is_hidden(parameter) for parameter in engine.module.parameters()]
    weights, states = engine._core.weight_bytes(), engine.optimizer.state_bytes()
    engine.offload_states(include)  # said twice, done once
    engine.reload_states()
    engine.reload_states()
    return {
        "alive": (before, away, alive(state), state),
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
            assert not any(is_hidden(parameter) for parameter in model.parameters())
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
            before, away, after, state = seen["alive"]
            assert before == away == after == state, "moved, neither copied nor lost"
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
        assert "expected some of optimizer, weights, got ['gradients']" in texts[0] and "'activations'" in texts[1]
        assert "between two steps" in texts[2] and "engine.zero_grad()" in texts[2]
        assert "offload_states inside full_params()" in texts[3]


def engine_after_a_step(stage: str) -> Any:
    engine = cases.make_engine(cases.make_mlp(), cases.config_of(stage), "AdamW")
    cases.run_micro_batch(engine, cases.loss_of, 0, 0)
    return engine


def offload_what_somebody_holds(stage: str) -> None:
    engine = engine_after_a_step(stage)
    held = {**engine.module.state_dict(), "aside": engine.module.inp.weight.detach()}
    before = {name: value.clone() for name, value in held.items()}
    loss = cases.loss_of(engine.module, 1, 0, 0)  # its graph holds weights
    engine.offload_states()
    assert all(torch.equal(held[name], value) for name, value in before.items())
    assert all(is_hidden(parameter) for parameter in engine.module.parameters())
    engine.reload_states()
    assert all(torch.equal(value, before[name]) for name, value in engine.module.state_dict().items())
    engine.backward(loss)
    engine.step()
    assert all(torch.equal(held[name], value) for name, value in before.items()), "the engine steps other memory"
    expected = engine_after_a_step(stage)
    cases.run_micro_batch(expected, cases.loss_of, 1, 0)
    for (name, value), other in zip(engine.state_dict().items(), expected.state_dict().values(), strict=True):
        assert torch.equal(value, other), name


@pytest.mark.parametrize("stage", ["0", "1", "2"])
def test_who_holds_weights_keeps_them_when_they_are_moved(pools: Pools, stage: str) -> None:
    """In a process of its own, which reading freed memory would end."""
    pools(1).run(offload_what_somebody_holds, stage)


def close_without_room(stage: str, at: int) -> tuple[bool, bool]:
    """Rank 0 has no room for all of its weights; whether close() said so, and whether the weights are whole."""
    engine = engine_after_a_step(stage)
    with engine.full_params():
        before = {name: value.detach().clone() for name, value in engine.module.named_parameters()}
    reload, calls, failed = FlatBuffer.reload, 0, False

    def no_room(flat_buffer: FlatBuffer) -> None:
        nonlocal calls
        calls += 1
        if calls >= at:
            raise MemoryError("no more")
        reload(flat_buffer)

    engine.offload_states()
    with pytest.MonkeyPatch.context() as patch:
        if engine.rank == 0:
            patch.setattr(FlatBuffer, "reload", no_room)
        try:
            engine.close()
        except MemoryError:
            failed = True
    return failed, all(torch.equal(value, before[name]) for name, value in engine.module.named_parameters())


@pytest.mark.parametrize("stage", list(cases.STAGES))
@pytest.mark.parametrize("ranks", [1, 2])
def test_close_without_room_for_the_weights_leaves_them_on_the_host(pools: Pools, stage: str, ranks: int) -> None:
    for at in (1, 2):
        results = pools(ranks).run(close_without_room, stage, at)
        flat_buffers = 2 if stage.startswith("3") else 1  # at least
        assert results == [(rank == 0 and at <= flat_buffers, True) for rank in range(ranks)]


def uses_of(engine: Any) -> dict[str, Callable[[], Any]]:
    """What a program may do with the module itself."""
    model, x = engine.module, torch.ones(2, 7)
    return {
        "forward": lambda: model(x),
        "by the engine's name": lambda: engine.forward(x),
        "a part": lambda: model.blocks[0](torch.ones(2, 13)),
        "state_dict": model.state_dict,
        "state_dict of a part": model.out.state_dict,
        "load_state_dict": lambda: model.load_state_dict(cases.make_mlp().state_dict()),
        "copy": lambda: copy.deepcopy(model),
    }


def count_hooks(model: nn.Module) -> int:
    return sum(
        len(part._forward_pre_hooks) + len(part._state_dict_pre_hooks) + len(part._load_state_dict_pre_hooks)
        for part in model.modules()
    )


def use_the_module(stage: str) -> tuple[dict[str, str], dict[str, bool]]:
    """What is said to each use while the weights are away; what still works while the states are."""
    engine = engine_after_a_step(stage)
    hooks = count_hooks(engine.module)
    x, said, same = torch.ones(2, 7), {}, {}
    with torch.no_grad():
        before = engine(x)
        for include in ("weights", ["optimizer", "weights"]):
            engine.offload_states(include)
            for name, use in uses_of(engine).items():
                try:
                    use()
                    said[f"{name}, {include}"] = "nothing"
                except UsageError as error:
                    said[f"{name}, {include}"] = str(error)
            engine.reload_states()
            same[f"after {include}"] = torch.equal(engine.module(x), before)
        engine.offload_states("optimizer")
        same["states away"] = torch.equal(engine.module(x), before)
        engine.offload_states("weights")  # joins them
        with pytest.raises(UsageError, match="optimizer and weights"):
            engine.module(x)
        engine.reload_states()
    same["hooks"] = count_hooks(engine.module) == hooks
    engine.close()
    return said, same


@pytest.mark.parametrize("stage", list(cases.STAGES))
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_module_is_refused_while_its_weights_are_away(pools: Pools, stage: str, ranks: int) -> None:
    for said, same in pools(ranks).run(use_the_module, stage):
        for use, text in said.items():
            assert "engine.reload_states()" in text or "weights are sharded" in text, (use, text)
        assert all(same.values()), same


def test_a_module_that_was_compiled_in_place_is_refused_too() -> None:
    engine = engine_after_a_step("2")
    engine.module.compile(backend="eager")
    x = torch.ones(2, 7)
    with torch.no_grad():
        before = engine.module(x)
        engine.offload_states()
        with pytest.raises(UsageError, match="reload_states"):
            engine.module(x)
        engine.reload_states()
        assert torch.equal(engine.module(x), before)


def test_states_that_come_back_in_inference_mode_can_be_stepped() -> None:
    engine, expected = engine_after_a_step("3"), engine_after_a_step("3")
    for move in (engine.offload_states, engine.reload_states):
        with torch.inference_mode():
            move()
    cases.run_micro_batch(engine, cases.loss_of, 1, 0)
    cases.run_micro_batch(expected, cases.loss_of, 1, 0)
    with engine.full_optimizer_state(writable=True) as states:
        for entry in states.values():
            entry["exp_avg"].mul_(1.0)
    for (name, value), other in zip(engine.state_dict().items(), expected.state_dict().values(), strict=True):
        assert torch.equal(value, other), name


def test_what_is_freed_is_given_back_to_a_device_with_memory_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, given = engine_after_a_step("1"), []
    platform = engine._core.mesh.platform
    monkeypatch.setattr(platform, "free_cached", lambda: given.append(engine._core.pool.allocated_bytes))
    engine.offload_states()
    assert given == [0], "after everything was freed"
