"""What ``parameter.grad`` shows between the window's last backward and the step, and what may be done with it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardengine
from shardengine.errors import MismatchError, UsageError
from shardengine.offload import Platform
from tests.support import cases
from tests.support.raising import raises
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]
STAGES = list(cases.STAGES)


def engine_of(stage: str, kind: str = "SGD", micros: int = 1, bucket: int = 600, **options: Any) -> Any:
    zero = {"reduce_bucket_size": bucket}
    config = cases.config_of(stage, micros, gradient_clipping=0.0, zero=zero, **options)
    return cases.make_engine(cases.make_mlp(), config, kind)


def whole_gradients(engine: Any) -> dict[str, Tensor]:
    with engine.full_grads() as gradients:
        return {name: gradient.clone() for name, gradient in gradients.items() if gradient is not None}


def weights_of(engine: Any) -> dict[str, list[float]]:
    return {name: value.reshape(-1).tolist() for name, value in engine.state_dict().items()}


def read_norms(stage: str) -> list[Any]:
    """Norms as loggers take them, beside those of the whole gradients; only one rank asks, in other orders."""
    engine = engine_of(stage)
    seen: list[Any] = []
    for step in range(2):
        cases.loss_of(engine, step, engine.rank, 0).backward()
        found = {}
        if engine.rank == 0:  # no communication: a rank may log alone
            for name, p in reversed(list(engine.module.named_parameters())):
                found[name] = [p.grad.data.norm(2).item(), torch.norm(p.grad.detach()).item(), p.grad.float().norm()]
        expected = {name: gradient.norm().item() for name, gradient in whole_gradients(engine).items()}
        seen.append({name: (values, expected[name]) for name, values in found.items()})
        engine.step()
        seen.append(all(p.grad is None for p in engine.module.parameters()))
    engine.close()
    return seen


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_norms_are_those_of_whole_gradients(pools: Pools, stage: str, ranks: int) -> None:
    first = pools(ranks).run(read_norms, stage)[0]
    assert first[1] and first[3]
    for seen in (first[0], first[2]):
        assert len(seen) > 10
        for values, expected in seen.values():
            assert all(float(value) == pytest.approx(expected, rel=1e-6) for value in values)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "mul_": lambda p: p.grad.mul_(0.25),
    "data mul_ by a tensor": lambda p: p.grad.data.mul_(torch.tensor(0.25)),
    "div_": lambda p: p.grad.div_(3.0),
    "imul": lambda p: p.grad.__imul__(0.5),
    "zero_": lambda p: p.grad.zero_(),
    "fill_": lambda p: p.grad.fill_(0.125),
    "add_ of a tensor": lambda p: p.grad.add_(torch.arange(p.numel()).view(p.shape) / 100, alpha=2),
    "add_ broadcast": lambda p: p.grad.add_(torch.arange(p.shape[-1]) / 100 if p.dim() else torch.tensor(0.5)),
    "clamp_": lambda p: p.grad.clamp_(-0.01, 0.01),
    "clip_grad_value_": lambda p: torch.nn.utils.clip_grad_value_([p], 0.01),
    "nan_to_num_": lambda p: p.grad.nan_to_num_(),
    "neg_": lambda p: p.grad.neg_(),
    "copy_": lambda p: p.grad.copy_(torch.arange(p.numel()).view(p.shape) / 50),
    "masked_fill_": lambda p: p.grad.masked_fill_(torch.arange(p.numel()).view(p.shape) % 2 == 0, 0.0),
    "replaced": lambda p: setattr(p, "grad", (torch.arange(p.numel()).view(p.shape) / 50).to(p.dtype)),
}


def changed(stage: str, change: str, micros: int, bf16: bool) -> list[Any]:
    """Change every gradient; whole ones before and after, and the norm that the engine then has."""
    options: dict[str, Any] = {"bf16": {"enabled": True}} if bf16 else {}
    engine = engine_of(stage, micros=micros, **options)
    for micro in range(micros):
        (cases.loss_of(engine, 0, engine.rank, micro) / micros).backward()
        if micro < micros - 1:
            engine.step()
    before = whole_gradients(engine)
    for parameter in engine.module.parameters():
        CHANGES[change](parameter)
    engine._core.reducer.views.adopt()
    after = whole_gradients(engine)
    engine.step()
    norm = engine.get_global_grad_norm()
    found = [{n: g.float().reshape(-1).tolist() for n, g in each.items()} for each in (before, after)]
    engine.close()
    return [*found, norm]


@pytest.mark.parametrize("change", list(CHANGES))
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("micros", "bf16"), [(1, False), (2, True)])
def test_a_change_takes_effect_as_on_a_whole_gradient(
    pools: Pools, stage: str, change: str, micros: int, bf16: bool
) -> None:
    results = pools(2).run(changed, stage, change, micros, bf16)
    assert repr(results[0]) == repr(results[1])
    before, after, norm = results[0]
    dtype = torch.bfloat16 if bf16 else torch.float32
    plain = {name: nn.Parameter(p.detach().clone().to(dtype)) for name, p in cases.make_mlp().named_parameters()}
    whole, total = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for name, parameter in plain.items():
        parameter.grad = torch.tensor(before[name], dtype=dtype).view(parameter.shape)
        whole += parameter.grad.double().square().sum()
        CHANGES[change](parameter)
        assert parameter.grad is not None
        assert parameter.grad.float().reshape(-1).tolist() == after[name], (change, name)
        total += parameter.grad.double().square().sum()
    if change in ("mul_", "data mul_ by a tensor", "div_", "imul"):
        total = whole  # what the engine tells is the norm before clipping, as with its own
    assert norm == pytest.approx(total.sqrt().item(), rel=1e-6)


def followed(micros: int, place: dict[str, Any]) -> list[Any]:
    """Norms, and weights after the step, where gradients are changed, or joined by another backward's, before it."""
    found: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Platform, "has_own_memory", True)
        for change in ("none", "mul_", "clamp_", "replaced", "another backward"):
            zero = {"reduce_bucket_size": 600, **place}
            engine = cases.make_engine(cases.make_mlp(), cases.config_of("2", micros, zero=zero), "AdamW")
            for step in range(2):
                for micro in range(micros):
                    engine.backward(cases.loss_of(engine, step, engine.rank, micro))
                    if micro < micros - 1:
                        engine.step()
                found.append(engine.get_global_grad_norm())
                if change == "another backward":
                    engine.backward(cases.loss_of(engine, 7, engine.rank, 0))
                for parameter in engine.module.parameters() if change in CHANGES else ():
                    CHANGES[change](parameter)
                found.append([p.grad.norm().item() for p in engine.module.parameters() if p.grad is not None])
                engine.step()
                found.append(engine.get_global_grad_norm())
            found.append(weights_of(engine))
            engine.close()
    return found


@pytest.mark.parametrize("micros", [1, 2])
def test_norms_of_gradients_that_have_left_follow_changes(pools: Pools, micros: int) -> None:
    away = {"offload_optimizer": {"device": "cpu"}}
    assert pools(2).run(followed, micros, away) == pools(2).run(followed, micros, {})


# Copies


def edited(number: int, gradient: Tensor, earlier: list[Any]) -> None:
    """What users do with copies. earlier: what the window before has left."""
    copied = gradient.clone()
    if number == 0:
        gradient.mul_(2).add_(copied)
    elif number == 1:
        gradient.mul_(0.0).add_(copied.detach(), alpha=0.5)
    elif number == 2:
        gradient.copy_(gradient.bfloat16().float())
    elif number == 3:
        gradient.copy_(gradient.mul_(1000).int().float())
    elif number == 4:
        gradient.mul_(0.5).div_(1 + copied.norm())
    elif number == 5:
        gradient.add_(gradient)
    elif earlier:
        gradient.add_(earlier.pop(), alpha=0.5)
    earlier.append(copied)


EDITS = 7


def copies(stage: str) -> list[tuple[int, str, float]]:
    """(edit, name, how far the gradient is from one of plain tensors) in two windows each."""
    found = []
    for number in range(EDITS):
        engine = engine_of(stage)
        kept: dict[str, tuple[list[Any], list[Any]]] = {}
        for step in range(2):
            cases.loss_of(engine, step, engine.rank, 0).backward()
            expected = whole_gradients(engine)
            for name, parameter in engine.module.named_parameters():
                ours, plain = kept.setdefault(name, ([], []))
                edited(number, parameter.grad, ours)
                edited(number, expected[name], plain)
            after = whole_gradients(engine)
            found += [(number, name, (after[name] - expected[name]).abs().max().item()) for name in after]
            engine.step()
        engine.close()
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_a_copy_has_the_values_of_its_time_and_dtype(pools: Pools, stage: str, ranks: int) -> None:
    for found in pools(ranks).run(copies, stage):
        apart = {number: max(far for each, _, far in found if each == number) for number in range(EDITS)}
        assert apart.pop(4) < 1e-6, "a norm in fp64, rounded, beside torch's"
        assert set(apart.values()) == {0.0}, apart


def in_its_place(stage: str) -> list[str]:
    """What stands in the place of a gradient when the step begins; what was kept of the window before."""
    said = []
    for way in ("copy", "another's", "kept", "kept copy"):
        engine = engine_of(stage)
        one, two = engine.module.blocks[1][0].weight, engine.module.blocks[2][0].weight
        kept: list[Any] = []
        try:
            for step in range(2):
                cases.loss_of(engine, step, engine.rank, 0).backward()
                if way == "copy":
                    one.grad = one.grad.clone()
                elif way == "another's":
                    one.grad, two.grad = two.grad, one.grad
                elif step:
                    one.grad.add_(kept.pop())
                kept.append(one.grad.clone() if way == "kept copy" else one.grad)
                engine.step()
            said.append("stepped")
        except UsageError as error:
            said.append(str(error))
        engine.close()
    return said


@pytest.mark.parametrize("stage", STAGES)
def test_copies_may_be_put_in_the_place_of_a_gradient_and_kept(pools: Pools, stage: str) -> None:
    for copy_, another, kept, kept_copy in pools(2).run(in_its_place, stage):
        assert copy_ == kept_copy == "stepped"
        assert "expected a copy of its own gradient, grad.clone()" in another
        assert "is of a step that is over" in kept


def refused(stage: str) -> list[str]:
    """What needs the values of other ranks, or would be lost, says so."""
    engine = engine_of(stage)
    cases.loss_of(engine, 0, engine.rank, 0).backward()
    parameter = engine.module.blocks[1][0].weight
    other = torch.optim.AdamW(engine.module.parameters(), lr=0.1)
    calls: list[Callable[[], Any]] = [
        lambda: parameter.grad[0],
        lambda: parameter.grad.view(-1),
        lambda: parameter.grad.add_(engine.module.blocks[2][0].weight.grad),
        lambda: parameter.grad.sum(),
        lambda: parameter.grad.norm(0),
        lambda: torch.zeros_like(parameter).add_(parameter.grad),
        lambda: copy.deepcopy(parameter.grad),
        lambda: pickle.dumps(parameter.grad),
        lambda: other.step(),
        lambda: torch.nn.utils.clip_grad_norm_([parameter], 1.0, norm_type=0),
        lambda: parameter.grad.clone().mul_(2),
        lambda: parameter.grad.apply_(abs),
        lambda: parameter.grad * 2,
        lambda: torch.distributed.all_reduce(parameter.grad),
    ]
    found = []
    for call in calls:
        try:
            call()
            found.append("")
        except (UsageError, RuntimeError) as error:
            found.append(str(error))
    shown = repr(parameter.grad)
    like = torch.zeros_like(parameter.grad)
    found += [shown, f"{type(like).__name__} {tuple(like.shape)} {like.sum().item()}"]
    engine.close()
    return found


@pytest.mark.parametrize("stage", ["1", "2", "3k", "3"])
def test_what_needs_values_elsewhere_is_refused_by_name(pools: Pools, stage: str) -> None:
    for rank, found in enumerate(pools(2).run(refused, stage)):
        *errors, shown, like = found
        for number, text in enumerate(errors):
            mine = "blocks.1.0.weight'.grad is not possible" in text or "engine.full_grads(" in text
            stepped = "single memory location" in text or ("'scale' (rank" in text and "written by mul_" in text)
            assert mine or (number == 8 and stepped), (number, text)
        assert shown.startswith("ShardedGradient('blocks.1.0.weight', shape (29, 13), rank")
        assert f"rank {rank} holds" in shown and like == "Tensor (29, 13) 0.0"


def test_on_one_rank_values_can_be_read() -> None:
    engine = engine_of("3")
    cases.loss_of(engine, 0, 0, 0).backward()
    with engine.full_grads() as whole:
        for name, parameter in engine.module.named_parameters():
            assert torch.equal(parameter.grad * 1.0, whole[name]) and parameter.grad.sum() == whole[name].sum()
            assert not torch.isnan(parameter.grad).any()
    with raises("grad-operation-refused", "select", "'inp.weight'"):
        engine.module.inp.weight.grad[0] = 0.0  # a write to a copy would be lost
    engine.close()


@pytest.mark.parametrize("stage", STAGES)
def test_none_is_refused_before_the_step(stage: str) -> None:
    engine = engine_of(stage)
    cases.loss_of(engine, 0, 0, 0).backward()
    engine.module.zero_grad()
    with raises("grad-set-to-none"):
        engine.step()
    engine.zero_grad()
    cases.loss_of(engine, 0, 0, 0).backward()
    engine.step()
    engine.close()


@pytest.mark.parametrize("stage", STAGES)
def test_a_gradient_of_an_old_step_says_so(stage: str) -> None:
    engine = engine_of(stage)
    cases.loss_of(engine, 0, 0, 0).backward()
    kept = engine.module.out.weight.grad
    engine.step()
    for call in (kept.norm, lambda: kept.mul_(2.0), kept.sum):
        with raises("grad-of-past-step", "'out.weight'"):
            call()
    engine.close()


def unseen(stage: str) -> list[Any]:
    """A backward of which no end is known, because the loss was made of parts: the first use of a gradient ends it."""
    engine, plain = engine_of(stage), engine_of(stage)
    for each in (engine, plain):
        torch.manual_seed(each.rank)
        model, x = each.module, torch.randn(5, 7)
        with each.full_params():
            loss = model.out(model.inp(x)).square().mean() + model.blocks[0][0].weight.square().sum() * each.rank
        each.backward(loss) if each is plain else loss.backward()
    missing = torch.nn.utils.clip_grad_norm_(engine.module.parameters(), 0.1).item()
    expected = plain.clip_grad_norm_(0.1)
    shown = sorted(name for name, p in engine.module.named_parameters() if p.grad is not None)
    also = sorted(name for name, p in plain.module.named_parameters() if p.grad is not None)
    for each in (engine, plain):
        each.step()
    ours, theirs = weights_of(engine), weights_of(plain)
    engine.close()
    plain.close()
    return [missing, expected, shown, also, ours, theirs]


@pytest.mark.parametrize("stage", ["0", "1", "2"])
def test_parts_of_a_model_under_torchs_clipping(pools: Pools, stage: str) -> None:
    """Ranks use different parameters; each clips with the norm of all."""
    results = pools(2).run(unseen, stage)
    for norm, expected, shown, also, *_ in results:
        assert norm == pytest.approx(expected, rel=1e-6) and shown == also and len(shown) == 5
    assert results[0][2] == results[1][2]
    _, _, _, _, ours, theirs = results[0]
    for name, values in ours.items():
        assert values == pytest.approx(theirs[name], rel=1e-5, abs=1e-7)


class Half(nn.Module):
    """Uses ``a`` on even ranks and ``b`` on odd ones."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.never = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, rank: int) -> Tensor:
        return (self.b if rank % 2 else self.a)(x)


def used_elsewhere(stage: str) -> list[Any]:
    torch.manual_seed(0)
    engine = cases.make_engine(Half(), cases.config_of(stage, gradient_clipping=0.0), "SGD")
    engine(torch.ones(2, 4), engine.rank).sum().backward()
    shown = sorted(name for name, p in engine.module.named_parameters() if p.grad is not None)
    norm = torch.nn.utils.clip_grad_norm_(engine.module.parameters(), 0.1).item()
    found = [shown, norm, engine.get_global_grad_norm()]
    engine.step()
    engine.close()
    return found


@pytest.mark.parametrize("stage", STAGES)
def test_a_parameter_that_another_rank_used_shows_its_gradient(pools: Pools, stage: str) -> None:
    results = pools(2).run(used_elsewhere, stage)
    assert results[0] == results[1]
    shown, norm, expected = results[0]
    assert shown == ["a.bias", "a.weight", "b.bias", "b.weight"] and norm == pytest.approx(expected, rel=1e-6)


def changed_on_one_rank(stage: str) -> list[str]:
    engine = cases.make_engine(cases.Mlp(), cases.config_of(stage, gradient_clipping=0.0), "SGD")
    said = ""
    for step in range(2):
        try:
            engine.backward(cases.loss_of(engine, step, engine.rank, 0))
            gradient: Any = engine.module.get_parameter("inp.weight").grad
            gradient.mul_(1.0 + engine.rank)
            engine.step()
        except MismatchError as error:
            said = str(error)
            engine.reset()
    engine.backward(cases.loss_of(engine, 2, engine.rank, 0))
    engine.step()
    engine.close()
    return [said.replace(f"rank {engine.rank}", "rank R")]


@pytest.mark.parametrize("stage", STAGES)
def test_a_change_that_differs_between_ranks_is_told_by_the_next_backward(pools: Pools, stage: str) -> None:
    for (said,) in pools(2).run(changed_on_one_rank, stage):
        assert "parameter.grad was changed on rank" in said


@pytest.mark.parametrize("stage", STAGES)
def test_a_window_that_the_module_forgets_is_refused_by_the_next_backward(stage: str) -> None:
    engine = engine_of(stage)
    engine.backward(cases.loss_of(engine, 0, 0, 0))
    engine.module.zero_grad()
    with raises("grad-set-to-none"):
        engine.backward(cases.loss_of(engine, 1, 0, 0))
    engine.zero_grad()
    engine.backward(cases.loss_of(engine, 1, 0, 0))
    engine.step()
    engine.close()


def clipped_together(stage: str) -> list[float]:
    """As ``foreach=True`` does on a GPU."""
    engine = cases.make_engine(cases.Mlp(), cases.config_of(stage, gradient_clipping=0.0), "SGD")
    engine.backward(cases.loss_of(engine, 0, engine.rank, 0))
    gradients = [p.grad for p in engine.module.parameters() if p.grad is not None]
    before = torch.stack(torch._foreach_norm(gradients, 2.0)).norm().item()
    torch._foreach_mul_(gradients, torch.tensor(0.5))
    torch._foreach_div_(gradients, 2.0)
    after = torch.stack(torch._foreach_norm(gradients)).norm().item()
    found = [before, after, engine.get_global_grad_norm()]
    engine.step()
    engine.close()
    return found


@pytest.mark.parametrize("stage", STAGES)
def test_operations_on_lists_of_gradients(pools: Pools, stage: str) -> None:
    for before, after, norm in pools(2).run(clipped_together, stage):
        assert before == pytest.approx(norm, rel=1e-6) and after == pytest.approx(before / 4, rel=1e-6)


class Ends(nn.Sequential):
    """Its output is what its last unit returned."""

    def __init__(self) -> None:
        super().__init__(*(nn.Linear(4, 4) for _ in range(4)))


@pytest.mark.parametrize("stage", STAGES)
def test_what_replaces_a_gradient_counts_where_the_last_unit_ends_the_forward(stage: str) -> None:
    torch.manual_seed(0)
    engine = cases.make_engine(Ends(), cases.config_of(stage, gradient_clipping=0.0), "SGD")
    engine(torch.ones(2, 4)).sum().backward()
    before = {name: cases.copy_out(value) for name, value in engine.state_dict().items()}
    for parameter in engine.module.parameters():
        parameter.grad = torch.ones_like(parameter)
    engine.step()
    after = engine.state_dict()
    assert all(bool((after[name] < before[name]).all()) for name in before)
    engine.close()


@pytest.mark.parametrize("stage", STAGES)
def test_several_backwards_and_a_dropped_window(stage: str) -> None:
    """What a parameter shows does not join the next gradient."""
    engine, plain = engine_of(stage), engine_of(stage)
    for each in (engine, plain):
        cases.loss_of(each, 9, 0, 0).backward()
        each.zero_grad()
        assert all(p.grad is None for p in each.module.parameters())
    for seed in (0, 1):
        cases.loss_of(engine, seed, 0, 0).backward()
        plain.backward(cases.loss_of(plain, seed, 0, 0))
        assert engine.get_global_grad_norm() == plain.get_global_grad_norm()
    for each in (engine, plain):
        each.step()
    assert weights_of(engine) == weights_of(plain)
    engine.close()
    plain.close()


def scaled(stage: str) -> list[Any]:
    """torch's GradScaler around the engine's optimizer."""
    engine = engine_of(stage)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=100)
    seen = []
    for step in range(3):
        loss = cases.loss_of(engine, step, engine.rank, 0)
        scaler.scale(loss * (float("inf") if step == 1 and engine.rank == 0 else 1.0)).backward()
        scaler.unscale_(engine.optimizer)
        norm = torch.nn.utils.clip_grad_norm_(engine.module.parameters(), 1e9).item()
        scaler.step(engine.optimizer)
        scaler.update()
        engine.optimizer.zero_grad()
        seen.append((norm, scaler.get_scale(), engine.global_steps))
    engine.close()
    return seen


@pytest.mark.parametrize("stage", STAGES)
def test_torchs_grad_scaler(pools: Pools, stage: str) -> None:
    plain = engine_of(stage)
    for each in pools(2).run(scaled, stage):
        (first, *_), (bad, scale, steps), (_, later, taken) = each
        assert 0 < first < 100 and not bad < float("inf")
        assert (scale, steps, later, taken) == (32.0, 1, 32.0, 2)
    plain.close()


def test_under_a_loss_scale_norms_are_without_it() -> None:
    config = cases.config_of("2", gradient_clipping=0.0, fp16={"enabled": True, "loss_scale": 1024.0})
    engine: Any = cases.make_engine(cases.make_mlp(), config, "SGD")
    engine.backward(cases.loss_of(engine, 0, 0, 0).float())
    norm = torch.nn.utils.clip_grad_norm_(engine.module.parameters(), 1e9).item()
    assert norm == pytest.approx(engine.get_global_grad_norm(), rel=1e-6)
    with raises("grad-change-while-scaled", "1024"):
        engine.module.out.weight.grad.add_(1.0)
    engine.close()


@pytest.mark.parametrize("call", [
    lambda parameters, bound: torch.nn.utils.clip_grad_value_(parameters, bound),
    lambda parameters, bound: [each.grad.clamp_(-bound, bound) for each in parameters],
    lambda parameters, bound: [each.grad.clamp_min_(-bound).clamp_max_(bound) for each in parameters],
])  # fmt: skip
@pytest.mark.parametrize("bound", [0.01, 1e6])
def test_under_a_loss_scale_values_are_clipped_without_it(call: Any, bound: float) -> None:
    config = cases.config_of("2", gradient_clipping=0.0, fp16={"enabled": True, "loss_scale": 1024.0})
    engine: Any = cases.make_engine(cases.make_mlp(), config, "SGD")
    engine.backward(cases.loss_of(engine, 0, 0, 0).float())
    before = whole_gradients(engine)
    call(list(engine.module.parameters()), bound)
    for name, value in whole_gradients(engine).items():
        assert value.abs().max() <= bound * 1.001
        torch.testing.assert_close(value, before[name].clamp(-bound, bound), rtol=1e-3, atol=0)
    engine.step()
    assert engine.was_step_applied() and max(each.abs().max() for each in before.values()) > 0.01
    engine.close()


def test_an_overflow_that_is_clipped_by_value_is_still_skipped() -> None:
    config = cases.config_of("2", gradient_clipping=0.0, fp16={"enabled": True})
    engine: Any = cases.make_engine(cases.make_mlp(), config, "SGD")
    before = weights_of(engine)
    engine.backward(cases.loss_of(engine, 0, 0, 0).float() * 1e9)
    torch.nn.utils.clip_grad_value_(engine.module.parameters(), 0.01)
    engine.step()
    assert not engine.was_step_applied() and engine.skipped_steps == 1 and weights_of(engine) == before
    engine.close()


def test_an_engine_without_an_optimizer_shows_gradients_too() -> None:
    engine: Any = shardengine.initialize(cases.make_mlp(), {"train_micro_batch_size_per_gpu": 1})
    cases.loss_of(engine, 0, 0, 0).backward()
    assert engine.module.out.weight.grad is not None
    with raises("grad-operation-refused", "the norm, which is known only where the engine has an optimizer"):
        torch.nn.utils.clip_grad_norm_(engine.module.parameters(), 1.0)
    engine.close()


def closure(stage: str) -> list[Any]:
    """``optimizer.step(closure)``, and what the user's own optimizer is after ``close()``."""
    model: Any = cases.make_mlp()
    given = torch.optim.SGD(model.parameters(), lr=0.1)
    mesh = cases.mesh_of_this_process() if torch.distributed.is_initialized() else None
    engine = shardengine.initialize(model, cases.config_of(stage), optimizer=given, mesh=mesh)

    def loss_of() -> Tensor:
        given.zero_grad()
        loss = cases.loss_of(engine, 0, engine.rank, 0)
        loss.backward()
        return loss

    losses = [given.step(loss_of).item() for _ in range(3)]
    state = [*given.state_dict()]
    engine.close()
    ordinary = [name for name in ("step", "zero_grad", "state_dict") if name in given.__dict__]
    cases.loss_of(model, 0, 0, 0).backward()
    before = model.out.weight.detach().clone()
    given.step()
    return [losses, state, ordinary, not torch.equal(before, model.out.weight)]


@pytest.mark.parametrize("stage", STAGES)
def test_the_given_optimizer_is_the_engines_until_close(pools: Pools, stage: str) -> None:
    for rank, (losses, state, ordinary, moved) in enumerate(pools(2).run(closure, stage)):
        assert losses[0] > losses[1] > losses[2]
        assert state == ([] if rank else ["state", "param_groups"]) and ordinary == [] and moved


@pytest.mark.parametrize("stage", STAGES)
def test_the_engines_clipping_sees_what_the_user_has_multiplied(pools: Pools, stage: str) -> None:
    for found in pools(2).run(clipped_twice, stage):
        assert found[0] == pytest.approx(found[1], rel=1e-5, abs=1e-8) and found[2] == [False, True]


def clipped_twice(stage: str) -> list[Any]:
    """Gradients times 100 under the config's clipping move weights as others do; times Inf the step is skipped."""
    moved: list[list[float]] = []
    applied: list[bool] = []
    for factor in (1.0, 100.0):
        engine: Any = cases.make_engine(cases.make_mlp(), cases.config_of(stage, gradient_clipping=0.01), "SGD")
        for times in (factor, float("inf")):
            cases.loss_of(engine, 0, engine.rank, 0).backward()
            for parameter in engine.module.parameters():
                parameter.grad.mul_(times)
            engine.step()
            applied.append(engine.was_step_applied())
        state = engine.state_dict()
        moved.append([value for tensor in state.values() for value in tensor.reshape(-1).tolist()])
        engine.close()
    return [*moved, [applied[1] or applied[3], applied[0] and applied[2]]]
