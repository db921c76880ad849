"""Hooks of the user's on parameters: they run once per step, with the mean gradient, and do not step parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardengine
from shardengine.errors import ShardEngineError, UsageError
from tests import oracle
from tests.support import cases
from tests.support.comparing import assert_same, expected_state
from tests.support.raising import raises
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]
STEPS = 3
TIERS: dict[str, dict[str, Any]] = {
    "": {},
    "cpu": {"offload_optimizer": {"device": "cpu"}},
}
RUNS = [
    *((stage, ranks, "") for stage in cases.STAGES for ranks in (1, 2, 3)),
    *((stage, 2, "cpu") for stage in cases.STAGES),
]


def half_of(model: Any, step: int, rank: int, micro: int) -> Tensor:
    return cases.loss_of(model, step, rank, micro) * 0.5


def truth(ranks: int, stage: str, loss_of: cases.LossOf = half_of) -> oracle.Trace:
    model = cases.make_mlp()
    return oracle.train(
        model, loss_of, ranks=ranks, micros=2, steps=STEPS, groups=cases.groups_of(model, "AdamW"),
        order=cases.LETTER[stage], clip=cases.CLIP,
    )  # fmt: skip


def on_all(model: nn.Module, hook: Callable[[Tensor], Any]) -> list[Any]:
    return [p.register_post_accumulate_grad_hook(hook) for p in model.parameters()]


def halves(stage: str, tier: str, *, bare: bool) -> dict[str, Any]:
    """Two hooks, one of them registered after ``initialize``: one halves the gradient, one looks at its norm."""
    model = cases.make_mlp()
    names = {id(p): name for name, p in model.named_parameters()}
    seen: list[tuple[str, float]] = []

    def halve(p: Tensor) -> None:
        p.grad.mul_(0.5)  # type: ignore[union-attr]

    on_all(model, halve)
    engine = cases.make_engine(model, cases.config_of(stage, 2, zero=TIERS[tier]))
    on_all(model, lambda p: seen.append((names[id(p)], float(p.grad.norm()))))  # type: ignore[union-attr]

    def run(engine: Any, loss_of: cases.LossOf, step: int, micro: int) -> float:
        if not bare:
            return cases.run_micro_batch(engine, loss_of, step, micro)
        loss = loss_of(engine, step, engine.rank, micro)
        (loss / 2).backward()
        engine.step()
        return float(loss)

    result = cases.run_steps(engine, STEPS, run=run)
    engine.close()
    return result | {"seen": seen}


@pytest.mark.parametrize(("stage", "ranks", "tier"), RUNS)
def test_a_hook_changes_the_mean_gradient_once_per_step(pools: Pools, stage: str, ranks: int, tier: str) -> None:
    results = pools(ranks).run(halves, stage, tier, bare=ranks == 2)
    expected = truth(ranks, stage)
    for result in results:
        assert result["seen"] == results[0]["seen"]
        assert len(result["seen"]) == STEPS * len(expected.parameters)
    assert [name for name, _ in results[0]["seen"][: len(expected.parameters)]] == list(expected.parameters)
    last = dict(results[0]["seen"])
    for name, gradient in expected.gradients.items():
        torch.testing.assert_close(last[name], gradient.norm().item(), rtol=1e-6, atol=1e-9)
    assert_same(results[0]["weights"], expected.shown, stage)
    assert_same(cases.assemble([result["state"] for result in results]), expected_state(expected), stage)


def tutorial(model: nn.Module, kind: str) -> list[Any]:
    """An optimizer for each parameter, which a hook steps."""
    optimizers = {
        p: torch.optim.SGD([p], lr=0.1) if kind == "SGD" else torch.optim.AdamW([p], lr=0.1, weight_decay=0.1)
        for p in model.parameters()
    }

    def step(p: Tensor) -> None:
        optimizers[p].step()  # type: ignore[index]
        if kind != "no zero_grad":
            optimizers[p].zero_grad()  # type: ignore[index]

    def decay(p: Tensor) -> None:
        with torch.no_grad():
            p.mul_(0.9)

    return on_all(model, decay if kind == "decay" else step)


def optimizers_in_hooks(stage: str) -> dict[str, Any]:
    """Refused on every rank, with and without an optimizer of the engine's; without the hook the engine trains on."""
    for kind in ("SGD", "AdamW", "no zero_grad", "decay"):
        for early in (True, False):
            model = cases.make_mlp()
            handles = tutorial(model, kind) if early else []
            engine = cases.make_engine(model, cases.config_of(stage), None if kind == "AdamW" else "AdamW")
            handles = handles or tutorial(model, kind)
            with pytest.raises(ShardEngineError) as caught:
                for step in range(2):
                    engine.backward(cases.loss_of(engine, step, engine.rank, 0))
                    if kind != "AdamW":
                        engine.step()
            for words in ("register_post_accumulate_grad_hook", "'scale'", "given to initialize", "step_in_backward"):
                assert words in str(caught.value), (kind, early, str(caught.value))
            for handle in handles:
                handle.remove()
            engine.reset()
            engine.close()
    model = cases.make_mlp()
    handles = tutorial(model, "SGD")
    engine = cases.make_engine(model, cases.config_of(stage, 2))
    for micro in range(2):
        loss = half_of(engine, 0, engine.rank, micro)
        if micro == 0:
            engine.backward(loss)
            engine.step()
        else:
            with pytest.raises(UsageError):
                engine.backward(loss)
    engine.reset()
    for handle in handles:
        handle.remove()
    result = cases.run_steps(engine, STEPS, half_of)
    engine.close()
    return result


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("stage", cases.STAGES)
def test_an_optimizer_in_a_hook_is_refused_and_told_the_way(pools: Pools, stage: str, ranks: int) -> None:
    results = pools(ranks).run(optimizers_in_hooks, stage)
    assert_same(results[0]["weights"], truth(ranks, stage).shown, stage)


def test_at_stage_0_a_hook_reads_the_whole_gradient(pools: Pools) -> None:
    expected = truth(2, "0", cases.loss_of)
    for read in pools(2).run(reads):
        assert all(torch.equal(torch.from_numpy(read[name]), value) for name, value in expected.gradients.items())


def reads() -> dict[str, Any]:
    model = cases.make_mlp()
    names = {id(p): name for name, p in model.named_parameters()}
    found: dict[str, Any] = {}
    engine = cases.make_engine(model, cases.config_of("0", 2))

    def read(p: Any) -> None:
        found[names[id(p)]] = (p.grad + 0).numpy()

    on_all(model, read)
    cases.run_steps(engine, STEPS)
    engine.close()
    return found


@pytest.mark.parametrize("stage", ["0", "2", "3"])
def test_hooks_come_and_go(stage: str) -> None:
    """Handles work whenever a hook was registered. After close hooks run as in plain torch, then by a second engine."""
    model: Any = cases.make_mlp()
    called: list[str] = []
    plain = model.scale._post_accumulate_grad_hooks
    first = model.scale.register_post_accumulate_grad_hook(lambda p: called.append("first"))
    config = {**cases.config_of(stage), "optimizer": {"type": "SGD", "params": {"lr": 0.01}}}

    def hears(engine: Any) -> list[str]:
        called.clear()
        loss = cases.loss_of(engine, 0, 0, 0)
        if isinstance(engine, shardengine.Engine):
            engine.backward(loss)
            engine.step()
        else:
            loss.backward()
        return list(called)

    engine = cases.make_engine(model, config, None)
    assert hears(engine) == ["first"]
    second = model.scale.register_post_accumulate_grad_hook(lambda p: called.append("second"))
    assert hears(engine) == ["first", "second"]
    engine.close()
    assert hears(model) == ["first", "second"] and model.scale.grad is not None
    model.zero_grad()
    engine = cases.make_engine(model, config, None)
    assert hears(engine) == ["first", "second"]
    first.remove()
    assert hears(engine) == ["second"]
    second.remove()
    assert hears(engine) == []
    engine.close()
    assert not model.scale._post_accumulate_grad_hooks and hears(model) == [] and plain is None
    assert model.out.weight._post_accumulate_grad_hooks is None


def test_hooks_stay_where_parameters_are_unfrozen() -> None:
    model: Any = cases.make_mlp()
    called: list[str] = []
    model.scale.register_post_accumulate_grad_hook(lambda p: called.append("scale"))
    model.out.bias.register_post_accumulate_grad_hook(lambda p: called.append("bias"))
    model.out.bias.requires_grad_(False)
    engine = cases.make_engine(model, cases.config_of("2"))
    for frozen in (True, False):
        if not frozen:
            model.out.bias.requires_grad_(True)
            assert engine.optimizer is not None
            engine.optimizer.add_param_group({"params": [model.out.bias]})
        engine.backward(cases.loss_of(engine, 0, 0, 0))
        engine.step()
    assert called == ["scale", "scale", "bias"]
    engine.close()


def test_optimizers_that_torch_steps_out_of_sight_are_refused() -> None:
    import torch.distributed.optim as torch_optim

    model = cases.make_mlp()
    torch_optim._apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})  # type: ignore[attr-defined]
    with raises("optimizer-applied-in-backward", "'scale'", "step_in_backward"):
        cases.make_engine(model, cases.config_of("0"))
