"""Which classes of optimizers are admitted to slices, and the sentence for each that is not."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shardengine
from shardengine.errors import UsageError
from tests.support import cases, optimizer_classes
from tests.support.raising import raises


class Base(torch.optim.Optimizer):
    """A step of each parameter by ``new_value``."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(self.change(p, group), alpha=group["lr"])

    def change(self, p: Any, group: dict[str, Any]) -> torch.Tensor:
        return torch.as_tensor(p.grad)


class Normed(Base):
    def change(self, p: Any, group: dict[str, Any]) -> torch.Tensor:
        return torch.as_tensor(p.grad / (p.grad.norm() + 1e-8))


class Rows(Base):
    def change(self, p: Any, group: dict[str, Any]) -> torch.Tensor:
        return torch.as_tensor(p.grad * (2.0 if p.dim() > 1 else 1.0))


class Noisy(Base):
    def change(self, p: Any, group: dict[str, Any]) -> torch.Tensor:
        return torch.as_tensor(p.grad + random.random() * 1e-3)


class Counting(Base):
    """The count is in the object."""

    count = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count += 1
        super().step()

    def change(self, p: Any, group: dict[str, Any]) -> torch.Tensor:
        return torch.as_tensor(p.grad / self.count)


class OnParameter(Base):
    """Keeps its state on the parameter."""

    def change(self, p: Any, group: dict[str, Any]) -> torch.Tensor:
        p.moment = getattr(p, "moment", torch.zeros_like(p)) * 0.9 + p.grad
        return torch.as_tensor(p.moment)


class Lazy(Base):
    """Begins a state in the second step."""

    def change(self, p: Any, group: dict[str, Any]) -> torch.Tensor:
        state = self.state[p]
        state["step"] = state.get("step", 0) + 1
        if state["step"] > 1:
            state["moment"] = state.get("moment", p.grad).mul(0.9) + p.grad
            return torch.as_tensor(state["moment"])
        return torch.as_tensor(p.grad)


class Objects(Base):
    def change(self, p: Any, group: dict[str, Any]) -> torch.Tensor:
        self.state[p].setdefault("history", []).append(1)
        return torch.as_tensor(p.grad)


class Fp64(Base):
    def change(self, p: Any, group: dict[str, Any]) -> torch.Tensor:
        self.state[p]["moment"] = p.grad.double()
        return torch.as_tensor(p.grad)


class OtherGroup(Base):
    def change(self, p: Any, group: dict[str, Any]) -> torch.Tensor:
        return torch.as_tensor(p.grad * len(self.param_groups))


class PerParameter(Base):
    """Counts parameters in an option."""

    def change(self, p: Any, group: dict[str, Any]) -> torch.Tensor:
        group["count"] = group.get("count", 0) + 1
        return torch.as_tensor(p.grad)


class Muon(torch.optim.Muon):
    """Another library's, by its name."""


class Nothing(Base):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        pass


class Closure(Base):
    def step(self, closure: Callable[[], float]) -> float:  # type: ignore[override]
        return closure()


class Alias(Base):
    """One tensor under two names."""

    def change(self, p: Any, group: dict[str, Any]) -> torch.Tensor:
        state = self.state[p]
        if not state:
            state["one"] = state["other"] = torch.zeros_like(p)
        state["one"].add_(p.grad)
        return torch.as_tensor(state["other"])


class Clips(Base):
    """By the norm of a tensor, where that is large."""

    def change(self, p: Any, group: dict[str, Any]) -> torch.Tensor:
        return torch.as_tensor(p.grad * min(1.0, 1e3 / (p.grad.norm().item() + 1e-6)))


class ClipsFar(Base):
    """By a norm that only a gradient of a broken step has."""

    def change(self, p: Any, group: dict[str, Any]) -> torch.Tensor:
        return torch.as_tensor(p.grad * min(1.0, 1e8 / (p.grad.norm().item() + 1e-6)))


class Trusts(Base):
    """Weights of a larger tensor a little more, whatever its gradient."""

    def change(self, p: Any, group: dict[str, Any]) -> torch.Tensor:
        return torch.as_tensor(p.grad * (1 + 1e-6 * p.square().mean().sqrt()))


class Lifts(Base):
    """Gradients of a tensor in which all are small."""

    def change(self, p: Any, group: dict[str, Any]) -> torch.Tensor:
        return torch.as_tensor(p.grad * max(1.0, 0.1 / (p.grad.square().mean().sqrt().item() + 1e-6)))


class Low(Base):
    """Its state has a name that the engine has."""

    def change(self, p: Any, group: dict[str, Any]) -> torch.Tensor:
        return torch.as_tensor(self.state[p].setdefault("low", torch.zeros_like(p)).add_(p.grad))


class Lookahead(Base):
    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, lr)
        self.inner = torch.optim.SGD(self.param_groups[0]["params"], lr=lr)


REFUSED = {
    Normed: "looks at whole tensors",
    Rows: "looks at whole tensors",
    Noisy: "expected a class without random numbers",
    Counting: "keeps hidden state outside of optimizer.state",
    OnParameter: "keeps hidden state outside of optimizer.state",
    Lazy: "its state 'moment' is begun later",
    Objects: "'history' is list",
    Fp64: "'moment' is torch.float64",
    OtherGroup: "a group is stepped differently beside other groups",
    PerParameter: "looks at whole tensors",
    Nothing: "a trial of its step.. changed nothing",
    Closure: "raised TypeError: .*missing 1 required positional argument",
    Alias: "is the same tensor as 'one'",
    Clips: "looks at whole tensors",
    ClipsFar: "looks at whole tensors",
    Trusts: "looks at whole tensors",
    Lifts: "looks at whole tensors",
    Low: "its state is called 'low'",
    Lookahead: "holds another optimizer in its attribute 'inner'",
    Muon: "it looks at whole matrices",
    torch.optim.SparseAdam: "Adam or AdamW, since sparse gradients travel sparse and are stepped dense",
    torch.optim.LBFGS: "it evaluates the loss several times per step",
}


@pytest.mark.parametrize("made_by", REFUSED, ids=lambda made_by: made_by.__name__)
def test_a_class_that_cannot_be_stepped_on_slices_is_refused(made_by: Any) -> None:
    model = nn.Linear(20, 30, bias=False)
    groups: Any = [{"params": [model.weight]}]
    if made_by is OtherGroup:
        other = nn.Linear(2, 3)
        model = nn.Sequential(model, other)  # type: ignore[assignment]
        groups.append({"params": list(other.parameters())})
    before = [p.detach().clone() for p in model.parameters()]
    if made_by is torch.optim.LBFGS:
        groups = groups[0]["params"]
    with pytest.raises(UsageError, match=REFUSED[made_by]) as caught:
        shardengine.initialize(model, cases.config_of("2"), optimizer=made_by(groups))
    assert made_by.__name__ in str(caught.value) and "expected" in str(caught.value)
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


def test_a_class_with_a_rate_of_0_is_tried_with_another() -> None:
    model = cases.make_mlp()
    optimizer = torch.optim.NAdam(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1e-9, total_iters=3)
    engine = shardengine.initialize(model, cases.config_of("1"), optimizer=optimizer, lr_scheduler=schedule)
    cases.run_steps(engine, 2)
    assert engine.optimizer is not None and engine.optimizer.kind == "torch.optim.NAdam"
    engine.close()


class Sized(Base):
    """Keeps large parameters in another form, as optimizers with 8-bit states do."""

    def change(self, p: Any, group: dict[str, Any]) -> torch.Tensor:
        state = self.state[p]
        if p.numel() > 10_000:
            state["scale"] = 1.0
        state["moment"] = p.grad.bfloat16() if p.numel() > 5000 else p.grad.clone()
        return torch.as_tensor(state["moment"].float())


@pytest.mark.parametrize(
    ("size", "said"),
    [(6000, "its state 'moment' is torch.bfloat16, and was torch.float32"), (12_000, "it keeps .*'scale'")],
)
def test_a_class_that_does_something_else_with_large_parameters_is_found_out(size: int, said: str) -> None:
    model = nn.Linear(size, 1, bias=False)
    engine = shardengine.initialize(model, cases.config_of("0", zero={"reduce_bucket_size": 10**6}),
                                    optimizer=Sized(model.parameters()))  # fmt: skip
    engine.backward(engine(torch.ones(1, size)).sum())
    with pytest.raises(UsageError, match=said):
        engine.step()
    engine.close()


class Growing(Base):
    """Makes its gradients larger, and would see it if it was given one again."""

    def change(self, p: Any, group: dict[str, Any]) -> torch.Tensor:
        p.grad.mul_(1e12)
        if not torch.isfinite(p.grad).all():
            raise ValueError("a gradient is not finite")
        return torch.as_tensor(p.grad.sign())


def test_a_class_that_writes_gradients_is_given_new_ones_in_each_step() -> None:
    model = cases.make_mlp()
    engine = shardengine.initialize(model, {**cases.config_of("1"), "gradient_clipping": 0.0},
                                    optimizer=Growing(model.parameters()))  # fmt: skip
    cases.run_steps(engine, 5)
    engine.close()


def test_one_that_has_stepped_is_refused_and_a_new_one_with_states_is_not() -> None:
    model = cases.make_mlp()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=0.3)
    shardengine.initialize(model, cases.config_of("1"), optimizer=optimizer).close()
    model = cases.make_mlp()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    cases.loss_of(model, 0, 0, 0).backward()
    optimizer.step()
    with raises("optimizer-already-stepped"):
        shardengine.initialize(model, cases.config_of("1"), optimizer=optimizer)


def test_every_row_is_admitted() -> None:
    for name in optimizer_classes.ROWS:
        model = cases.make_mlp()
        optimizer = optimizer_classes.make(name, optimizer_classes.groups_of(model, name))
        engine = shardengine.initialize(model, cases.config_of("3"), optimizer=optimizer)
        assert engine.optimizer is not None
        assert engine.optimizer.state_names == optimizer_classes.ROWS[name][2]
        engine.close()
