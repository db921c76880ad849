"""poison.py: what a parameter is while its weights are elsewhere, and what it says when somebody asks for them."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardengine.offload import Done, Fetched, Platform
from shardengine.sharding.poison import AWAY, hide, poison, restore_poison, reveal, stand_in
from tests.support.parts import CPU
from tests.support.raising import raises

NAME = "parameter 'blocks.0.weight' (rank 1)"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_poison_reads_as_nan_of_the_right_shape_and_dtype(dtype: torch.dtype) -> None:
    value = poison(dtype, (3, 4), CPU)
    assert value.shape == (3, 4) and value.dtype is dtype
    assert value.isnan().all() and value.sum().isnan()


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.uint8])
def test_poison_of_integers_reads_as_their_smallest_value(dtype: torch.dtype) -> None:
    assert (poison(dtype, (2, 2), CPU) == torch.iinfo(dtype).min).all()


def test_writing_to_poison_raises() -> None:
    with pytest.raises(RuntimeError):
        poison(torch.float32, (5,), CPU).add_(1)


class Hanging(Platform):
    """A device that never reaches what it is asked."""

    class _Never:
        reached = False

    def fetch(self, flag: torch.Tensor) -> Any:
        return self._Never()


def test_a_device_that_hangs_hides_no_write_from_other_engines() -> None:
    ordinary, hanging = Platform(CPU), Hanging(CPU)
    for _ in range(2):
        assert not restore_poison(torch.float32, hanging)
        poison(torch.float32, (), CPU).fill_(1.0)
        assert restore_poison(torch.float32, ordinary)
        assert not restore_poison(torch.float32, ordinary)


def test_poison_takes_the_memory_of_one_element() -> None:
    assert poison(torch.float32, (1000, 1000), CPU).untyped_storage().nbytes() == 4


def test_poison_without_dimensions_or_elements_keeps_its_shape() -> None:
    assert poison(torch.float32, (), CPU).shape == ()
    assert poison(torch.float32, (0, 3), CPU).shape == (0, 3)


class Behind(Platform):
    """A device that runs behind the host: what is fetched is there once the host has asked for it twice more."""

    def fetch(self, values: Tensor) -> Fetched:
        class Asked(Done):
            times = 0

            @property
            def reached(self) -> bool:
                self.times += 1
                return self.times > 2

        return Fetched(values, Asked())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.int8])
@pytest.mark.parametrize("platform", [Platform(CPU), Behind(CPU)])
def test_a_fill_of_poison_is_mended_at_once_and_told_when_the_device_knows(
    platform: Platform, dtype: torch.dtype
) -> None:
    mine, other = poison(dtype, (3,), CPU), poison(dtype, (2, 2), CPU)
    before = other.clone()
    assert not any(restore_poison(dtype, platform) for _ in range(6))
    for value in (0, 1):
        mine.fill_(value)
        told = [restore_poison(dtype, platform)]
        assert torch.equal(other.isnan(), before.isnan()) and torch.equal(other.nan_to_num(), before.nan_to_num())
        told += [restore_poison(dtype, platform) for _ in range(5)]
        assert told == [place == (2 if isinstance(platform, Behind) else 0) for place in range(6)]


def hidden(parameter: nn.Parameter | None = None) -> nn.Parameter:
    parameter = nn.Parameter(torch.ones(3, 4)) if parameter is None else parameter
    hide(parameter, poison(parameter.dtype, tuple(parameter.shape), CPU), NAME)
    return parameter


READS: dict[str, Callable[[nn.Parameter], Any]] = {
    "lerp_": lambda p: torch.zeros(3, 4).lerp_(p, 0.1),
    "_foreach_lerp_": lambda p: torch._foreach_lerp_([torch.zeros(3, 4)], [p], 0.1),
    "add": lambda p: p.detach() + 1,
    "mul": lambda p: torch.mul(p.data, 2),
    "clone": lambda p: copy.deepcopy(p),
    "linear": lambda p: F.linear(torch.ones(1, 4), p),
    "item": lambda p: p[0, 0].item(),
    "float": lambda p: p.chunk(3)[2][0].double(),
    "tolist": lambda p: p.tolist(),
    "numpy": lambda p: p.detach().numpy(),
    "__reduce_ex__": lambda p: torch.save(p, io.BytesIO()),
    "copy_": lambda p: torch.zeros(3, 4).copy_(p.t().t()),
    "cat": lambda p: nn.utils.parameters_to_vector([p, nn.Parameter(torch.ones(1))]),
    "contiguous": lambda p: p.contiguous(),
    "data_ptr": lambda p: p.detach().data_ptr(),
    "untyped_storage": lambda p: p.data.untyped_storage(),
    "__deepcopy__": lambda p: copy.deepcopy(p.detach()),
    "sum": lambda p: stand_in(torch.ones(3, 4), NAME).sum(),
}
WRITES: dict[str, Callable[[nn.Parameter], Any]] = {
    "zero_": lambda p: p.data.zero_(),
    "fill_": lambda p: p.detach()[0].fill_(2),
    "normal_": nn.init.normal_,
    "copy_": lambda p: p.copy_(torch.ones(3, 4)),
    "add_": lambda p: p.add_(1),
    "_foreach_zero_": lambda p: torch._foreach_zero_([p]),
    "mul": lambda p: torch.mul(torch.ones(3, 4), 2, out=p.data),
}


@pytest.mark.parametrize("name", READS)
def test_a_read_of_hidden_values_is_refused(name: str) -> None:
    sentence = f"read by {name}" if name != "float" else "moved or cast by double"
    with (
        torch.no_grad(),
        raises("weights-used-while-sharded", "its weights are sharded", "expected this inside") as caught,
    ):
        READS[name](hidden())
    assert f"{NAME} was {sentence} " in str(caught.value) and "`with engine.full_params():`" in str(caught.value)


@pytest.mark.parametrize("name", WRITES)
def test_a_write_to_hidden_values_is_refused_at_once(name: str) -> None:
    parameter = hidden()
    with torch.no_grad(), raises("weights-used-while-sharded", "full_params(writable=True)") as caught:
        WRITES[name](parameter)
    assert f"{NAME} was written by {name} " in str(caught.value)
    assert not restore_poison(torch.float32, Platform(CPU)), "nothing was written"


def test_what_needs_no_values_works() -> None:
    parameter = hidden()
    assert isinstance(parameter, nn.Parameter) and parameter.shape == (3, 4) and parameter.numel() == 12
    assert parameter.dtype is torch.float32 and parameter.device == CPU and parameter.is_leaf and len(parameter) == 3
    assert parameter.cpu() is parameter and parameter.float() is parameter and parameter.to("cpu") is parameter
    assert torch.zeros_like(parameter).sum() == 0 and parameter.new_ones(2).sum() == 2
    assert parameter.view(-1).shape == (12,) and parameter.expand_as(parameter).grad_fn is not None
    assert torch.autograd.graph.get_gradient_edge(parameter).node is not None
    assert parameter in {parameter} and {parameter: 1}[parameter] == 1
    assert torch.optim.SGD([parameter], lr=1.0).param_groups[0]["params"] == [parameter]
    parameter.grad = torch.ones(3, 4)
    assert parameter.grad is not None and parameter.grad.sum() == 12
    parameter.grad = None
    assert "weights are sharded" in repr(parameter) and "(3, 4)" in f"{parameter}"


def test_what_is_shown_again_is_what_it_was() -> None:
    parameter = nn.Parameter(torch.ones(3, 4))
    parameter.mine = "kept"  # type: ignore[attr-defined]
    detached = hidden(parameter).detach()
    for _ in range(2):
        hidden(parameter)  # hidden twice is hidden
    reveal(parameter, torch.full((3, 4), 2.0))
    assert type(parameter) is nn.Parameter and vars(parameter) == {"mine": "kept"} and parameter.sum() == 24
    assert pickle.loads(pickle.dumps(parameter)).sum() == 24
    reveal(parameter, torch.ones(3, 4))  # as often as one likes
    with raises("weights-used-while-sharded", "weights are sharded"):
        detached.sum()


def test_what_a_user_puts_into_a_hidden_parameter_is_refused_where_it_would_be_lost() -> None:
    parameter, other = hidden(), hidden()
    hide(other, other.data, "parameter 'other' (rank 1)")
    for given in (torch.ones(3, 4), other.data):
        with raises("weights-used-while-sharded", "written", "an assignment to .data", "writable=True"):
            parameter.data = given
    parameter.data = parameter.data  # as module.to(device) does
    hide(parameter, parameter.data, "parameter 'blocks.0.weight' (rank 1)", AWAY)
    with raises("weights-used-while-sharded", "reload_states"):
        parameter.data = other.data
    parameter.data = torch.ones(3, 4)
    assert parameter.sum() == 12


class Own(nn.Parameter):
    """A class of parameters of somebody else."""


class Taking(nn.Parameter):
    """One that takes torch's functions into its own hands."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return nn.Parameter.__torch_function__(function, types, args, kwargs or {})


def test_classes_of_parameters() -> None:
    parameter = hidden(Own(torch.ones(3, 4)))
    assert isinstance(parameter, Own) and type(parameter).__name__ == "Own"
    with raises("weights-used-while-sharded", "read", "sum"):
        parameter.sum()
    reveal(parameter, torch.ones(3, 4))
    assert type(parameter) is Own
    taking = hidden(Taking(torch.ones(3, 4)))
    assert type(taking) is Taking and taking.isnan().all(), "not seen, documented"


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_ordinary_tensors_of_a_device_without_values_are_not_taken_for_poison(device: str) -> None:
    parameter = nn.Parameter(torch.ones(3, 4, device=device))
    hide(parameter, poison(torch.float32, (3, 4), parameter.device), NAME)
    assert (torch.ones(2, 2, device=device) + 1).shape == (2, 2)
    with raises("weights-used-while-sharded", "read", "add"):
        torch.ones(3, 4, device=device) + parameter
