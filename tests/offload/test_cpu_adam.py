"""offload/cpu_adam.py: the declared arithmetic in anybody's loop, torch's state dict, masters, and what is refused."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardengine.kernels import Spans, operations, reference_update, rule_for
from shardengine.offload import CPUAdam

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
OPTIONS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
SHAPES = [(3, 5, 2, 2), (17,), (), (0, 4), (33, 9)]
States = dict[str, Tensor]


def random(*shape: int, seed: int, dtype: torch.dtype = FP32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def parameters(dtype: torch.dtype = FP32) -> list[nn.Parameter]:
    return [nn.Parameter(random(*shape, seed=i, dtype=dtype)) for i, shape in enumerate(SHAPES)]


def give_gradients(made: list[nn.Parameter], step: int, dtype: torch.dtype | None = None) -> None:
    for i, parameter in enumerate(made):
        dtype = dtype or parameter.dtype
        if dtype is not parameter.dtype:
            parameter.grad_dtype = dtype
        gradient = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
        parameter.grad = gradient.copy_(random(*parameter.shape, seed=100 * step + i))


def train(optimizer: torch.optim.Optimizer, steps: range = range(1, 4)) -> None:
    made = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for step in steps:
        give_gradients(made, step)
        optimizer.step()


def same(a: Tensor, b: Tensor) -> bool:
    """Equal values and dtypes."""
    return a.dtype is b.dtype and torch.equal(a, b)


def assert_same_states(found: torch.optim.Optimizer, expected: torch.optim.Optimizer) -> None:
    for ours, theirs in zip(found.state.values(), expected.state.values(), strict=True):
        assert ours.keys() == theirs.keys()
        assert all(same(ours[name], theirs[name]) for name in ours)


@pytest.fixture(params=["auto", "reference"])
def carried_out_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the native library where there is one, and by torch."""
    monkeypatch.setattr(operations, "wanted", lambda: request.param)


def declared(start: Tensor, gradients: list[Tensor], kind: str, options: dict[str, Any]) -> States:
    """What the reference makes of a flat parameter: "weight" (fp32), "exp_avg", "exp_avg_sq"."""
    flats = {"weight": start.float().reshape(-1).clone()}
    flats |= {name: torch.zeros_like(flats["weight"]) for name in ("exp_avg", "exp_avg_sq")}
    for step, gradient in enumerate(gradients, 1):
        flats["gradient"] = gradient.reshape(-1)
        reference_update.update(flats, Spans.whole(start.numel()), rule_for(kind, options, step))
    return flats


@pytest.mark.usefixtures("carried_out_by")
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
@pytest.mark.parametrize("adamw", [True, False])
@pytest.mark.parametrize("wide", [False, True])
def test_bits_are_those_of_the_declared_arithmetic(dtype: torch.dtype, adamw: bool, wide: bool) -> None:
    made, starts = parameters(dtype), parameters(dtype)
    optimizer = CPUAdam(made, **OPTIONS, adamw=adamw, maximize=wide)
    history: list[list[Tensor]] = [[] for _ in made]
    for step in (1, 2, 3):
        give_gradients(made, step, FP32 if wide else None)
        for gradients, parameter in zip(history, made, strict=True):
            assert parameter.grad is not None
            gradients.append(parameter.grad.clone())
        optimizer.step()
    for parameter, start, gradients in zip(made, starts, history, strict=True):
        options = {**OPTIONS, "maximize": wide}
        expected = declared(start.detach(), gradients, "AdamW" if adamw else "Adam", options)
        state = optimizer.state[parameter]
        assert same(parameter.detach().reshape(-1), expected["weight"].to(dtype))
        assert all(same(state[name].reshape(-1), expected[name]) for name in ("exp_avg", "exp_avg_sq"))
        assert state["step"].item() == 3 and ("master" in state) == (dtype is not FP32)
        assert dtype is FP32 or same(state["master"].reshape(-1), expected["weight"])
        assert parameter.grad is not None and same(parameter.grad, gradients[-1])


def small_model(dtype: torch.dtype = FP32) -> nn.Module:
    torch.manual_seed(1)
    layers = [nn.Conv2d(3, 4, 3), nn.GELU(), nn.Flatten(), nn.Linear(4 * 36, 5)]
    return nn.Sequential(*layers).to(dtype)


def loop(make: Callable[[Any], torch.optim.Optimizer], model: nn.Module, steps: int = 6) -> list[float]:
    """Losses of a loop with clipping, a scheduler and groups."""
    groups = [{"params": list(model[0].parameters()), "weight_decay": 0.0}, {"params": model[3].parameters()}]  # type: ignore[index]
    optimizer = make(groups)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    losses, dtype = [], next(model.parameters()).dtype
    x, y = random(4, 3, 8, 8, seed=0, dtype=dtype), torch.arange(4)
    for _ in range(steps):
        loss = nn.functional.cross_entropy(model(x).float(), y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses


def test_a_loop_with_clipping_groups_and_a_scheduler_follows_torchs_adamw() -> None:
    ours = loop(lambda groups: CPUAdam(groups, **OPTIONS), small_model())
    theirs = loop(lambda groups: torch.optim.AdamW(groups, **OPTIONS), small_model())
    # the same formula in another order of operations: a few roundings of fp32 per step
    assert ours == pytest.approx(theirs, rel=1e-5) and ours[-1] < ours[0] / 2


def test_a_bf16_model_trains_on_its_masters() -> None:
    ours = loop(lambda groups: CPUAdam(groups, **OPTIONS), small_model(BF16))
    wide = loop(lambda groups: CPUAdam(groups, **OPTIONS), small_model())
    assert ours == pytest.approx(wide, rel=0.05)  # bf16 has 8 bits: 0.4% per rounding, some of them in a row


def test_masters_keep_what_bf16_cannot_hold() -> None:
    parameter = nn.Parameter(torch.ones(16, dtype=BF16))
    optimizer = CPUAdam([parameter], lr=2.0**-10, weight_decay=0.0)
    for _ in range(8):  # each moves by 1/1024, bf16 has 1 - 4/1024 next below 1
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    assert parameter.float().sub(1 - 8 / 1024).abs().max() <= 2 / 1024


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
def test_a_saved_state_goes_on_bit_for_bit(dtype: torch.dtype) -> None:
    through, made = parameters(dtype), parameters(dtype)
    straight, first = CPUAdam(through, **OPTIONS), CPUAdam(made, **OPTIONS)
    train(straight, range(1, 7))
    train(first)
    file = io.BytesIO()
    torch.save({"optimizer": first.state_dict(), "weights": [p.detach() for p in made]}, file)
    saved = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    again = [nn.Parameter(weight.clone()) for weight in saved["weights"]]
    second = CPUAdam(again, lr=0.5)
    second.load_state_dict(saved["optimizer"])
    assert_same_states(second, first)
    train(second, range(4, 7))
    assert_same_states(second, straight)
    assert all(same(a, b) for a, b in zip(again, through, strict=True))
    assert [g["lr"] for g in second.param_groups] == [1e-2]


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_a_copied_optimizer_goes_on_bit_for_bit(way: str) -> None:
    optimizer = CPUAdam(parameters(BF16), **OPTIONS)
    train(optimizer)
    other = copy.deepcopy(optimizer) if way == "deepcopy" else pickle.loads(pickle.dumps(optimizer))
    train(optimizer, range(4, 6))
    train(other, range(4, 6))
    assert_same_states(other, optimizer)


@pytest.mark.parametrize("theirs", [torch.optim.AdamW, torch.optim.Adam])
def test_people_can_come_from_torch_and_go_back(theirs: type[torch.optim.AdamW]) -> None:
    made = parameters()
    before = theirs(made, **OPTIONS)
    train(before)
    ours = CPUAdam(made, lr=0.1)
    ours.load_state_dict(before.state_dict())
    assert_same_states(ours, before)
    assert ours.param_groups[0]["decoupled_weight_decay"] == (theirs is torch.optim.AdamW)
    train(ours, range(4, 6))
    after = theirs(made)
    after.load_state_dict(copy.deepcopy(ours.state_dict()))
    assert_same_states(after, ours)
    twin = parameters()
    alone = theirs(twin, **OPTIONS)
    train(alone, range(1, 8))
    train(after, range(6, 8))
    for found, expected in zip(made, twin, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)  # a few roundings of fp32 per step
    assert {float(state["step"]) for state in after.state.values()} == {7.0}


def test_a_state_of_torch_in_bf16_becomes_fp32_and_the_weights_become_masters() -> None:
    made = parameters(BF16)
    before = torch.optim.AdamW(made, **OPTIONS)
    train(before)
    ours = CPUAdam(made, **OPTIONS)
    ours.load_state_dict(before.state_dict())
    assert all(same(ours.state[p]["exp_avg"], before.state[p]["exp_avg"].float()) for p in made)
    train(ours, range(4, 5))
    assert all(same(ours.state[p]["master"].bfloat16(), p.detach()) for p in made)


def test_what_was_loaded_is_a_copy() -> None:
    first, second = CPUAdam(parameters(), **OPTIONS), CPUAdam(parameters(), **OPTIONS)
    train(first)
    kept = copy.deepcopy(first.state_dict())
    second.load_state_dict(first.state_dict())
    train(second, range(4, 6))
    assert all(same(a[n], b[n]) for a, b in zip(first.state.values(), kept["state"].values(), strict=True) for n in a)


def hooked(optimizer: CPUAdam, seen: list[int]) -> None:
    def double(_: Any, given: dict[str, Any]) -> dict[str, Any]:
        return {**given, "state": {k: {**v, "exp_avg": 2 * v["exp_avg"]} for k, v in given["state"].items()}}

    optimizer.register_load_state_dict_pre_hook(double)
    optimizer.register_load_state_dict_post_hook(lambda it: seen.append(len(it.state)))


def test_hooks_of_loading_see_and_change_what_is_loaded() -> None:
    seen: list[int] = []
    first, second = CPUAdam(parameters(), **OPTIONS), CPUAdam(parameters(), **OPTIONS)
    train(first)
    hooked(second, seen)
    for _ in range(2):
        second.load_state_dict(first.state_dict())
    for ours, theirs in zip(second.state.values(), first.state.values(), strict=True):
        assert same(ours["exp_avg"], 2 * theirs["exp_avg"]) and same(ours["exp_avg_sq"], theirs["exp_avg_sq"])
    assert seen == [len(SHAPES)] * 2


@pytest.mark.usefixtures("carried_out_by")
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("form", ["channels_last", "transposed", "while training"])
def test_what_lies_otherwise_in_memory_is_stepped_alike(form: str, dtype: torch.dtype) -> None:
    values = random(4, 3, 2, 5, seed=1, dtype=dtype)
    plain, other = nn.Parameter(values.clone()), nn.Parameter(values.clone())

    def lay_out(tensor: Tensor) -> Tensor:
        if form == "transposed":
            return tensor.permute(3, 0, 2, 1).contiguous().permute(1, 3, 2, 0)
        return tensor.contiguous(memory_format=torch.channels_last)

    if form != "while training":
        other = nn.Parameter(lay_out(values))
    optimizers = [CPUAdam([parameter], **OPTIONS) for parameter in (plain, other)]
    for step in (1, 2, 3):
        gradient = random(4, 3, 2, 5, seed=step, dtype=dtype)
        plain.grad, other.grad = gradient.clone(), gradient.clone() if step == 2 else lay_out(gradient)
        if step == 2 and form == "while training":
            other.data = lay_out(other.data)
        for optimizer in optimizers:
            optimizer.step()
    assert not other.is_contiguous() and same(other, plain)
    assert_same_states(optimizers[1], optimizers[0])
    assert {s.stride() for s in optimizers[1].state[other].values()} == {(), other.stride()}
    optimizers[1].load_state_dict(optimizers[0].state_dict())
    assert optimizers[1].state[other]["exp_avg"].stride() == other.stride()


def test_a_state_from_before_torch_kept_the_kind_of_weight_decay_keeps_ours() -> None:
    optimizer = CPUAdam(parameters(), **OPTIONS)
    train(optimizer)
    saved = optimizer.state_dict()
    for key in ("decoupled_weight_decay", "maximize"):
        del saved["param_groups"][0][key]
    again = CPUAdam(parameters(), adamw=False)
    again.load_state_dict(saved)
    train(again, range(4, 5))
    assert again.param_groups[0]["decoupled_weight_decay"] is False


@pytest.mark.parametrize("way", ["in place", "other memory"])
def test_a_written_weight_is_what_training_goes_on_from(way: str) -> None:
    parameter = nn.Parameter(random(64, seed=1, dtype=BF16))
    optimizer = CPUAdam([parameter], lr=1e-3, weight_decay=0.0)
    train(optimizer)
    master = optimizer.state[parameter]["master"].clone()
    if way == "other memory":
        other = parameter.detach().clone()
        other[:10] = 3.0
        parameter.data = other
    else:
        with torch.no_grad():
            parameter[:10] = 3.0
    parameter.grad = torch.zeros_like(parameter)
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    found = optimizer.state[parameter]["master"]
    assert same(found[10:], master[10:]) and found[:10].tolist() == [3.0] * 10
    assert not torch.equal(master, master.bfloat16().float())
    assert parameter[:10].tolist() == [3.0] * 10


def test_masters_follow_the_weights_that_are_there_when_a_state_is_loaded() -> None:
    made = [nn.Parameter(random(64, seed=1, dtype=BF16))]
    optimizer = CPUAdam(made, lr=0.0, weight_decay=0.0)
    train(optimizer)
    other = [nn.Parameter(torch.full((64,), 5.0, dtype=BF16))]
    fresh = CPUAdam(other)
    fresh.load_state_dict(optimizer.state_dict())
    train(fresh, range(4, 5))
    assert other[0].tolist() == [5.0] * 64


def test_a_parameter_that_was_cast_goes_on() -> None:
    model = nn.Linear(4, 4)
    optimizer = CPUAdam(model.parameters(), **OPTIONS)
    train(optimizer)
    model.bfloat16()
    for parameter in model.parameters():
        parameter.grad = None
    train(optimizer, range(4, 5))
    assert all(same(optimizer.state[p]["master"].bfloat16(), p.detach()) for p in model.parameters())
    model.float()
    for parameter in model.parameters():
        parameter.grad = None
    train(optimizer, range(5, 6))
    assert not any("master" in state for state in optimizer.state.values())


def test_groups_keep_their_options_and_what_has_no_gradient_stays() -> None:
    slow, fast, unused, late = (nn.Parameter(torch.zeros(2)) for _ in range(4))
    optimizer = CPUAdam([{"params": [slow]}, {"params": [fast, unused], "lr": 0.5}], lr=0.25, eps=0.0, weight_decay=0.0)
    slow.grad, fast.grad = torch.tensor([1.0, -1.0]), torch.tensor([-3.0, 3.0])
    optimizer.step()
    # at the first step each weight moves by the learning rate against the gradient's sign
    torch.testing.assert_close(slow.detach(), torch.tensor([-0.25, 0.25]), rtol=1e-6, atol=0)
    torch.testing.assert_close(fast.detach(), torch.tensor([0.5, -0.5]), rtol=1e-6, atol=0)
    assert unused.tolist() == [0.0, 0.0] and set(optimizer.state) == {slow, fast}
    optimizer.add_param_group({"params": late, "lr": 0.125})
    late.grad = torch.tensor([2.0, -2.0])
    optimizer.step()
    torch.testing.assert_close(late.detach(), torch.tensor([-0.125, 0.125]), rtol=1e-6, atol=0)
    assert [optimizer.state[p]["step"].item() for p in (slow, late)] == [2.0, 1.0]


def test_a_closure_runs_with_grad_before_the_update_and_its_loss_comes_back() -> None:
    parameter = nn.Parameter(torch.tensor([2.0]))
    optimizer = CPUAdam([parameter], lr=0.5, weight_decay=0.0)

    def closure() -> Tensor:
        loss = parameter.square().sum()
        loss.backward()
        return loss

    with torch.no_grad():
        assert optimizer.step(closure).item() == 4.0
    assert parameter.item() == pytest.approx(1.5, rel=1e-6)
    assert optimizer.step() is None


def test_a_learning_rate_may_be_a_tensor_that_a_scheduler_writes() -> None:
    by_tensor, by_number = parameters(), parameters()
    ours = CPUAdam(by_tensor, **{**OPTIONS, "lr": torch.tensor(0.125)})
    twin = CPUAdam(by_number, **{**OPTIONS, "lr": 0.125})
    schedules = [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5) for optimizer in (ours, twin)]
    for step in (1, 2, 3):
        for optimizer, schedule in zip((ours, twin), schedules, strict=True):
            train(optimizer, range(step, step + 1))
            schedule.step()
    assert all(same(a, b) for a, b in zip(by_tensor, by_number, strict=True))
    assert isinstance(ours.param_groups[0]["lr"], Tensor) and ours.param_groups[0]["lr"].item() == 0.125 / 8


def test_weight_decay_is_torchs_unless_it_is_given() -> None:
    made = parameters()
    assert CPUAdam(made).defaults["weight_decay"] == torch.optim.AdamW(made).defaults["weight_decay"] == 1e-2
    assert CPUAdam(made, adamw=False).defaults["weight_decay"] == torch.optim.Adam(made).defaults["weight_decay"] == 0


def test_a_graph_from_before_the_step_refuses_backward() -> None:
    parameter = nn.Parameter(torch.ones(3))
    loss = parameter.square().sum()
    parameter.grad = torch.ones(3)
    CPUAdam([parameter]).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
