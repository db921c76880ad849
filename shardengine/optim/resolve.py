"""The forms in which ``initialize`` takes an optimizer: a torch optimizer, a function, the config. Checks, by name.

Must not know: shards, the step.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from shardengine.config import OptimizerConfig
from shardengine.errors import UsageError
from shardengine.offload import CPUAdam
from shardengine.optim import foreign
from shardengine.optim.lion import Lion
from shardengine.optim.optimizer import OptimizerForm, ShardedOptimizer

_REFUSED_OPTIONS = ("amsgrad", "differentiable")
_DECOUPLED = "decoupled_weight_decay"

_FROM_CONFIG: dict[str, type[torch.optim.Optimizer]] = {
    "AdamW": torch.optim.AdamW,
    "Adam": torch.optim.Adam,
    "SGD": torch.optim.SGD,
    "Lion": Lion,
}


def kind_of(optimizer: torch.optim.Optimizer) -> tuple[str, str]:
    """The declared arithmetic that ``optimizer`` stands for; ``UsageError`` by name where there is none.

    And what is different about it, a sentence, "" where nothing is.
    """
    known = {made_by: name for name, made_by in _FROM_CONFIG.items()} | {CPUAdam: "AdamW"}
    kind, notice = known.get(type(optimizer)), ""
    name = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    if kind is None and (found := foreign.recognise(optimizer)) is not None:
        kind, notice = found
    if kind is None:
        reason = foreign.advice_for(optimizer) or (
            "shards of flat buckets are stepped elementwise, and other elementwise optimizers are not available yet "
            "(optimizers that look at whole matrices, such as Adafactor, Shampoo, Muon or LBFGS, cannot work on shards)"
        )
        raise UsageError(
            f"optimizer {name}: expected torch.optim.AdamW, Adam or SGD, shardengine.lion.Lion or offload.CPUAdam; "
            f"{reason}"
        )
    if optimizer.state:
        raise UsageError(
            f"optimizer {name} has already taken steps: expected a new one, because its state would be lost; "
            "pass it to shardengine.initialize before its first step"
        )
    for index, group in enumerate(optimizer.param_groups):
        check_options(group, f"optimizer {name}", index, optimizer.param_groups[0])
    if kind in ("Adam", "AdamW"):  # in torch each group's option decides, whatever the class
        kind = "AdamW" if optimizer.param_groups[0].get(_DECOUPLED, kind == "AdamW") else "Adam"
    return kind, notice


def check_options(group: dict[str, Any], optimizer: str, index: int, first: dict[str, Any]) -> None:
    """``UsageError`` for an option of ``group`` (number ``index``) that our arithmetic does not have.

    first: group 0, which says whether weight decay is decoupled in all of them.
    """
    for option in _REFUSED_OPTIONS:
        if group.get(option):
            raise UsageError(f"{optimizer}: option {option}=True in group {index} is not available; set it to False")
    if bool(group.get(_DECOUPLED)) != bool(first.get(_DECOUPLED)):
        raise UsageError(
            f"{optimizer}: {_DECOUPLED}={group.get(_DECOUPLED)} in group {index}, expected {first.get(_DECOUPLED)} as "
            "in group 0: one engine runs one kind of optimizer"
        )


def groups_for(
    model: nn.Module, config: OptimizerConfig | None, given: Any, model_parameters: Iterable[Any] | None
) -> OptimizerForm:
    """The optimizer that ``initialize`` was given, in any form.

    given: an optimizer, a function from a list of parameters to one, or None (from ``config``).
    """
    chosen = (
        list(model_parameters) if model_parameters is not None else [p for p in model.parameters() if p.requires_grad]
    )
    if isinstance(given, torch.optim.Optimizer):
        if model_parameters is not None:
            raise UsageError(
                "initialize: expected optimizer= or model_parameters=, got both; the optimizer has its own groups"
            )
        optimizer = given
    elif not chosen and (given is not None or config is not None):
        raise UsageError("initialize: an optimizer was asked for, but no parameter is trainable (requires_grad)")
    elif given is not None:
        optimizer = given(chosen)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise UsageError(f"initialize: optimizer= returned {type(optimizer).__name__}, expected a torch optimizer")
    elif config is not None:
        optimizer = _FROM_CONFIG[config.type](chosen, **config.params)
    else:
        return OptimizerForm(None, [], {})
    check_owned(model, optimizer.param_groups)
    if not any(parameter.requires_grad for group in optimizer.param_groups for parameter in group["params"]):
        raise UsageError("initialize: all of the optimizer's parameters are frozen (requires_grad=False)")
    kind, notice = kind_of(optimizer)
    return OptimizerForm(kind, optimizer.param_groups, optimizer.defaults, notice)


_LENT = ("step", "zero_grad", "add_param_group", "state_dict", "load_state_dict")
_SCHEDULED = "_wrapped_by_lr_sched"
"""What torch's schedulers look for on ``optimizer.step``."""


def lend(given: torch.optim.Optimizer, to: ShardedOptimizer) -> Callable[[], None]:
    """The user's optimizer ``given`` does what the engine's, ``to``, does: a loop that was written for it trains.

    Its own methods would see no gradients and step nothing. Returns what gives it back.
    """
    before = {name: given.__dict__[name] for name in _LENT if name in given.__dict__}

    def method_of(name: str) -> Callable[..., Any]:
        def call(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            if name == "step":
                optimizer.__dict__["_opt_called"] = True  # for torch's schedulers
            return getattr(to, name)(*args, **kwargs)

        call.__name__, call.__doc__ = name, getattr(to, name).__doc__
        if hasattr(before.get(name), _SCHEDULED):
            setattr(call, _SCHEDULED, True)
        return call

    for name in _LENT:
        setattr(given, name, types.MethodType(method_of(name), given))

    def give_back() -> None:
        for name in _LENT:
            given.__dict__.pop(name, None)
        given.__dict__.update(before)

    to.stand_in_for(given)
    return give_back


def check_owned(model: nn.Module, groups: list[dict[str, Any]]) -> None:
    """``UsageError`` for a parameter of ``groups`` that is not one of ``model``'s."""
    owned = {id(parameter) for parameter in model.parameters()}
    for number, group in enumerate(groups):
        for position, parameter in enumerate(group["params"]):
            if id(parameter) not in owned:
                raise UsageError(
                    f"optimizer group {number}, parameter {position} (shape {tuple(parameter.shape)}) is not one "
                    "of the model's: expected an optimizer over model.parameters(), made after the model's last change"
                )
