"""What rank 0 writes in full_grads and full_optimizer_state is what all ranks train on with, or nothing is written.

The truth is the oracle with its own functions told to write the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardengine.errors import ShardEngineError
from tests import oracle
from tests.engine.test_full_state import DTYPES, MODELS, STAGES, STATES, STEPS, backward, make, truth, truths
from tests.support import cases
from tests.support.comparing import assert_equal_to_truth
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]
WHEN = 1
"""The step whose gradients are written, and after which states are."""
TARGETS = {
    "mlp": ("blocks.1.0.weight", "out.bias"),
    "tied": ("head.weight", "body.blocks.0.up.bias"),
    "strides": ("stem.weight", "blocks.0.conv.weight"),
    "dtypes": ("blocks.0.up.weight", "blocks.2.up.weight"),
}
"""Of each model the two parameters that are written; in the MLP the first lies in two buckets."""


def write_gradients(gradients: dict[str, Any], model: str, rank: int) -> None:
    first, second = TARGETS[model]
    gradients[first].zero_().add_(rank)
    gradients[second] = gradients[second] * (0.5 + rank)


def write_states(states: dict[str, Any], model: str, kind: str, rank: int) -> None:
    first, second = (states[name] for name in TARGETS[model])
    first["weight"].mul_(0.5).add_(0.01 + rank)
    first[STATES[kind][0]].zero_().add_(rank)
    second["step"] = 7 + rank
    second[STATES[kind][-1]] = second[STATES[kind][-1]] * (0.25 + rank)


def trains(engine: Any, model: str, kind: str, way: str) -> dict[str, Any]:
    """Three steps with what ``way`` says written; every rank writes something else, rank 0's counts."""

    def run_micro_batch(engine: Any, loss_of: cases.LossOf, step: int, micro: int) -> float:
        loss = loss_of(engine, step, engine.rank, micro)
        engine.backward(loss)
        last = micro + 1 == engine.gradient_accumulation_steps()
        if last and way == "doubled":
            with engine.full_grads(writable=True) as gradients:
                for gradient in gradients.values():
                    if gradient is not None:
                        gradient.mul_(2.0 if engine.rank == 0 else 77.0)
        writes = last and way == "written" and step == WHEN
        if writes:
            with engine.full_grads(TARGETS[model], writable=True) as gradients:
                write_gradients(gradients, model, engine.rank)
        engine.step()
        if writes:
            with engine.full_optimizer_state(TARGETS[model], writable=True) as states:
                write_states(states, model, kind, engine.rank)
        return float(loss.item())

    return cases.run_steps(engine, STEPS, MODELS[model][1], run_micro_batch)


def trains_all(model: str, kind: str, micros: int, options: dict[str, Any], way: str) -> dict[str, Any]:
    found = {}
    for stage in STAGES:
        engine = make(model, stage, kind, micros, 200, **options)
        found[stage] = trains(engine, model, kind, way)
        engine.close()
    return found


class Writing:
    """The oracle's functions, writing at step WHEN what ``write_gradients`` and ``write_states`` write on rank 0."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, model: str) -> None:
        self.names = TARGETS[model]
        self.network: nn.Module | None = None
        self.steps = 0
        self.complete, self.step = oracle.complete_gradient, oracle.Optimizer.step
        make_plain = MODELS[model][0]

        def made() -> nn.Module:
            self.network, self.steps = make_plain(), 0
            return self.network

        def complete(grads: Any, like: Tensor, sums: oracle.Sums, *more: Any) -> Tensor | None:
            found = self.complete(grads, like, sums, *more)
            if self.steps == WHEN and found is not None:
                for name, factor in zip(self.names, (0.0, 0.5), strict=True):
                    if self.parameter(name).data_ptr() == like.data_ptr():
                        found = (found * factor).to(sums.wire or like.dtype).float()
            return found

        def step(optimizer: Any, *args: Any) -> None:
            self.step(optimizer, *args)
            if self.steps == WHEN:
                self.write(optimizer)
            self.steps += 1

        monkeypatch.setitem(MODELS, model, (made, MODELS[model][1]))
        monkeypatch.setattr(oracle, "complete_gradient", complete)
        monkeypatch.setattr(oracle.Optimizer, "step", step)

    def parameter(self, name: str) -> Tensor:
        assert self.network is not None
        return dict(self.network.named_parameters(remove_duplicate=False))[name]

    def write(self, optimizer: Any) -> None:
        first, second = (self.parameter(name) for name in self.names)
        state = optimizer.state[first]
        if "master" in state:
            state["master"].mul_(0.5).add_(0.01)
            first.detach().copy_(state["master"][: first.numel()].view_as(first))
        else:
            first.detach().mul_(0.5).add_(0.01)
        state[STATES[optimizer.kind][0]].zero_()
        optimizer.state[second]["step"] = 7
        optimizer.state[second][STATES[optimizer.kind][-1]].mul_(0.25)


RUNS = [
    ("mlp", 1, "AdamW", 1, "fp32"), ("mlp", 2, "AdamW", 1, "fp32"), ("mlp", 3, "SGD", 3, "fp32"),
    ("mlp", 2, "SGD", 3, "bf16"), ("mlp", 3, "AdamW", 1, "bf16"), ("tied", 2, "AdamW", 1, "fp32"),
    ("strides", 3, "AdamW", 1, "fp32"), ("strides", 2, "Lion", 1, "fp32"), ("dtypes", 2, "AdamW", 3, "fp32"),
]  # fmt: skip


@pytest.mark.parametrize(("model", "ranks", "kind", "micros", "dtype"), RUNS)
def test_written_by_rank_0_is_what_all_train_on_with(
    pools: Pools, monkeypatch: pytest.MonkeyPatch, model: str, ranks: int, kind: str, micros: int, dtype: str
) -> None:
    """Zeroed and replaced gradients; then a weight, a state and a step count."""
    low = torch.bfloat16 if dtype == "bf16" else None
    results = pools(ranks).run(trains_all, model, kind, micros, DTYPES[dtype], "written")
    plain = truth(model, ranks, micros, "full", kind, low)
    Writing(monkeypatch, model)
    for stage, expected in truths(model, ranks, micros, kind, low).items():
        assert expected.norms[WHEN] != plain.norms[WHEN] and expected.losses[-1] != plain.losses[-1]
        assert_equal_to_truth([result[stage] for result in results], expected)


@pytest.mark.parametrize(("ranks", "micros", "dtype"), [(2, 1, "fp32"), (3, 3, "bf16")])
def test_doubled_gradients_are_those_of_a_doubled_loss(
    pools: Pools, monkeypatch: pytest.MonkeyPatch, ranks: int, micros: int, dtype: str
) -> None:
    """A power of two changes no rounding, in any dtype."""
    results = pools(ranks).run(trains_all, "mlp", "SGD", micros, DTYPES[dtype], "doubled")

    def doubled(*args: Any) -> Tensor:
        return 2.0 * cases.loss_of(*args)

    monkeypatch.setitem(MODELS, "mlp", (cases.make_mlp, doubled))
    low = torch.bfloat16 if dtype == "bf16" else None
    for stage, trace in truths("mlp", ranks, micros, "SGD", low).items():
        losses = [[[loss / 2 for loss in row] for row in rows] for rows in trace.losses]
        expected = dataclasses.replace(trace, losses=losses)
        assert_equal_to_truth([result[stage] for result in results], expected)


# Nothing is written

NAME = "out.bias"


def attempt(work: Callable[[], Any]) -> str:
    try:
        work()
    except (ShardEngineError, ArithmeticError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def spoiled(open_it: Callable[..., Any], change: Callable[[dict[str, Any]], Any], **options: Any) -> str:
    """Write garbage, then do ``change``; what it raises."""

    def work() -> None:
        with open_it(writable=True, **options) as found:
            for value in found.values():
                for tensor in value.values() if isinstance(value, dict) else [value]:
                    if isinstance(tensor, Tensor):
                        tensor.fill_(77.0)
            change(found)

    return attempt(work)


def fails_on_rank_1(engine: Any) -> Callable[[Any], None]:
    def change(_: Any) -> None:
        if engine.rank == 1:
            raise ArithmeticError("on purpose")

    return change


def refused(stage: str) -> dict[str, Any]:
    """Everything that must raise and write nothing, in the middle of a training that must stay the oracle's."""
    engine = make("mlp", stage, "AdamW", 3, 200)
    grads, states = engine.full_grads, engine.full_optimizer_state
    said: dict[str, str] = {}

    def opens(open_it: Callable[..., Any], *names: Any) -> Callable[[], None]:
        def work() -> None:
            with open_it(*names):
                pass

        return work

    def run_micro_batch(engine: Any, loss_of: cases.LossOf, step: int, micro: int) -> float:
        loss = loss_of(engine, step, engine.rank, micro)
        if step == 1:  # without the engine: full_grads itself ends the backward
            (loss / 3).backward()
        else:
            engine.backward(loss)
        if micro == 0:
            said["early"] = attempt(opens(grads))
        if micro < 2:
            engine.step()
            return float(loss.item())
        different = NAME if engine.rank == 0 else "out.weight"
        for key, call in (("gradients", grads), ("states", states)):
            said[f"{key}: unknown"] = attempt(opens(call, ["out.bais"]))
            said[f"{key}: different"] = attempt(opens(call, different))
            said[f"{key}: raises"] = spoiled(call, fails_on_rank_1(engine))
        said["gradient: shape"] = spoiled(grads, lambda found: found.update({NAME: torch.zeros(2)}))
        said["gradient: None"] = spoiled(grads, lambda found: found.update({NAME: None}))
        said["state: shape"] = spoiled(states, lambda found: found[NAME].update(exp_avg=torch.zeros(2)))
        said["state: entry"] = spoiled(states, lambda found: found.update({NAME: {}}))
        said["state: unknown key"] = spoiled(states, lambda found: found[NAME].update(exp_average=1))
        said["state: step"] = spoiled(states, lambda found: found[NAME].update(step=-1))
        said["state: stepped inside"] = spoiled(states, lambda found: engine.step())
        return float(loss.item())

    result = cases.run_steps(engine, STEPS, run=run_micro_batch)
    backward(engine, "mlp", STEPS)
    said["gradient: zero_grad inside"] = spoiled(grads, lambda found: engine.zero_grad())
    engine.close()
    return {**result, "said": said}


EXPECTED = {
    "early": "UsageError: full_grads: the window's gradients are not complete",
    "gradients: unknown": "UsageError: full_grads: the model has no parameter 'out.bais'; the nearest is 'out.bias'",
    "states: unknown": "UsageError: full_optimizer_state: the model has no parameter 'out.bais'; the nearest is",
    "gradients: different": "MismatchError: the list of names given to full_grads differs between ranks",
    "states: different": "MismatchError: the list of names given to full_optimizer_state differs between ranks",
    "gradient: shape": "full_grads, gradient of 'out.bias': expected a tensor of shape (3,), got (2,)",
    "gradient: None": "full_grads, gradient of 'out.bias': expected a tensor of shape (3,), got NoneType",
    "state: shape": "full_optimizer_state, 'exp_avg' of 'out.bias': expected a tensor of shape (3,), got (2,)",
    "state: entry": "full_optimizer_state: the entry of 'out.bias' was replaced",
    "state: unknown key": "full_optimizer_state: 'out.bias' has no 'exp_average'",
    "state: step": "expected the step count of 'out.bias' to be 0 or more, got -1",
    "state: stepped inside": "expected step() after the `with` block",
    "gradient: zero_grad inside": "expected step(), zero_grad() and backward after the `with` block",
}


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_what_raises_writes_nothing_and_training_goes_on(pools: Pools, stage: str, ranks: int) -> None:
    results = pools(ranks).run(refused, stage)
    assert_equal_to_truth(results, cases.truth("mlp", "AdamW", ranks, 3, cases.LETTER[stage], STEPS))
    for rank, result in enumerate(results):
        for key, text in EXPECTED.items():
            assert text in result["said"][key], f"rank {rank}, {key}"
        for key in ("gradients", "states"):
            own = "ArithmeticError: on purpose"
            other = f"failed on rank 1: {own} (this is rank {rank})"
            assert (own if rank == 1 else other) in result["said"][f"{key}: raises"]
