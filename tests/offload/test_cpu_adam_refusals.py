"""offload/cpu_adam.py: what cannot be stepped is refused by its position, before anything changes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardengine.errors import UsageError
from shardengine.offload import CPUAdam
from tests.support.raising import raises


class Elsewhere(Tensor):
    """A tensor without memory of its own, as DTensor is."""

    @staticmethod
    def __new__(cls, shape: tuple[int, ...]) -> Elsewhere:
        made: Elsewhere = Tensor._make_wrapper_subclass(cls, shape, dtype=torch.float32)
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return cls((2, 3)) if "detach" in str(func) else NotImplemented


BAD: list[tuple[Callable[[], Tensor], str]] = [
    (
        lambda: nn.Parameter(torch.zeros(2, 3, dtype=torch.complex64)),
        "torch.complex64; give its real and imaginary part",
    ),
    (lambda: nn.Parameter(torch.zeros(2, 3, dtype=torch.float64)), "torch.float64; cast the model"),
    (lambda: nn.Parameter(torch.zeros(2, 3).to_sparse()), r"layout torch.sparse_coo; make it dense"),
    (lambda: nn.Parameter(torch.zeros(2, 3, device="meta")), "one on meta; move the model to the CPU"),
    (lambda: nn.Parameter(torch.zeros(2, 6)[:, ::2]), r"strides \(6, 2\) with gaps or overlaps; make it from"),
    (lambda: nn.Parameter(torch.zeros(2, 1).expand(2, 3)), r"strides \(1, 0\) with gaps or overlaps"),
    (lambda: nn.Parameter(Elsewhere((2, 3))), "a .*Elsewhere, which has no memory of its own; pass its local"),
]


@pytest.mark.parametrize(("make", "why"), BAD)
def test_a_parameter_that_cannot_be_stepped_is_named(make: Callable[[], Tensor], why: str) -> None:
    good = nn.Parameter(torch.zeros(1))
    named = [("first", good), ("second.weight", make())]
    place = r"CPUAdam: group 0, parameter 1 'second.weight' \(shape \(2, 3\)\): expected a dense .* got "
    with pytest.raises(UsageError, match=place + why):
        CPUAdam(named)
    optimizer = CPUAdam([good])
    with raises("cpu-adam-parameter-unsupported", "group 1, parameter 0 (shape"):
        optimizer.add_param_group({"params": [make()]})
    assert len(optimizer.param_groups) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_parameter_on_a_gpu_is_named() -> None:
    with pytest.raises(UsageError, match="one on cuda:0; move the model to the CPU"):
        CPUAdam([nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1, device="cuda"))])


def test_a_lazy_parameter_is_named() -> None:
    with raises("cpu-adam-parameter-unsupported", "parameter 0 (no shape yet)", "a lazy one", "run one forward"):
        CPUAdam(nn.LazyLinear(3).parameters())


OUT_OF_RANGE: list[tuple[dict[str, Any], str]] = [
    ({"lr": -1.0}, "lr: expected a number of at least 0, got -1.0"),
    ({"lr": float("nan")}, "lr: expected"),
    ({"lr": torch.ones(2)}, r"lr: expected a number or a tensor of one, got \(2,\)"),
    ({"eps": -1e-8}, "eps: expected"),
    ({"weight_decay": -0.1}, "weight_decay: expected"),
    ({"betas": (0.9, 1.0)}, r"betas: expected two numbers in \[0, 1\), got \(0.9, 1.0\)"),
    ({"betas": (-0.1, 0.9)}, "betas: expected"),
    ({"betas": (0.9,)}, "betas: expected"),
    ({"amsgrad": True}, "option amsgrad=True is not available"),
]


@pytest.mark.parametrize(("options", "why"), OUT_OF_RANGE)
def test_options_out_of_range_are_refused_in_any_group(options: dict[str, Any], why: str) -> None:
    groups = [{"params": [nn.Parameter(torch.zeros(1))]}, {"params": [nn.Parameter(torch.zeros(1))], **options}]
    with pytest.raises(UsageError, match="CPUAdam: group 1: " + why):
        CPUAdam(groups)
    if "amsgrad" not in options:
        with pytest.raises(UsageError, match="CPUAdam: group 0: " + why):
            CPUAdam(groups[0]["params"], **options)


def embedding() -> tuple[nn.Embedding, nn.Linear]:
    rows, head = nn.Embedding(5, 3, sparse=True), nn.Linear(3, 2)
    head(rows(torch.tensor([1, 2]))).sum().backward()
    return rows, head


def test_a_step_that_is_refused_has_changed_nothing() -> None:
    rows, head = embedding()
    made = [*head.parameters(), *rows.parameters()]
    before = [parameter.detach().clone() for parameter in made]
    optimizer = CPUAdam(made)
    why = r"group 0, parameter 2 \(shape \(5, 3\)\): expected a dense gradient .*sparse_coo .*sparse=True switch that"
    with pytest.raises(UsageError, match=why):
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(made, before, strict=True)) and not optimizer.state


def test_a_parameter_that_can_no_longer_be_stepped_is_refused_at_the_step() -> None:
    model = nn.Linear(2, 2)
    optimizer = CPUAdam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    model.weight.data = torch.zeros(2, 4)[:, ::2]
    with raises("cpu-adam-parameter-unsupported", "parameter 0", "strides (4, 2) with gaps"):
        optimizer.step()
    model.double()
    with raises("cpu-adam-parameter-unsupported", "parameter 0", "torch.float64", "cast"):
        optimizer.step()
    assert not optimizer.state


def trained(optimizer: type[torch.optim.Optimizer], **options: Any) -> dict[str, Any]:
    made = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))]
    for parameter in made:
        parameter.grad = torch.ones_like(parameter)
    stepped = optimizer(made, **options)
    stepped.step()
    return stepped.state_dict()


def of_other_shapes() -> dict[str, Any]:
    saved = trained(CPUAdam)
    saved["state"] = {0: saved["state"][1], 1: saved["state"][0]}
    return saved


WRONG: list[tuple[Callable[[], dict[str, Any]], str]] = [
    (
        lambda: trained(torch.optim.SGD, lr=0.1, momentum=0.9),
        "expected the states step, exp_avg .* got momentum_buffer;",
    ),
    (lambda: trained(torch.optim.AdamW, amsgrad=True), "group 0: option amsgrad=True is not available"),
    (of_other_shapes, r"group 0, parameter 0 \(shape \(3,\)\): exp_avg has shape \(2,\), expected the parameter's"),
]


@pytest.mark.parametrize(("make", "why"), WRONG)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(make: Callable[[], dict[str, Any]], why: str) -> None:
    optimizer = CPUAdam([nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))], lr=0.5)
    optimizer.load_state_dict(trained(CPUAdam))
    before = copy.deepcopy(optimizer.state_dict())
    for _ in range(2):  # what the first try registered is gone
        with pytest.raises(UsageError, match=why):
            optimizer.load_state_dict(make())
    after = optimizer.state_dict()
    assert str(after) == str(before) and len(after["state"]) == 2
    assert not optimizer._optimizer_load_state_dict_pre_hooks and not optimizer._optimizer_load_state_dict_post_hooks
