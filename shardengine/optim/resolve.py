"""The forms of an optimizer that ``initialize`` accepts: a torch optimizer, a function, the config. Checks, by name.

Must not know: shards, the step.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardengine.config import Config, OptimizerConfig
from shardengine.errors import UsageError
from shardengine.offload import CPUAdam
from shardengine.optim import adafactor, foreign, muon_with_adamw, options, probe
from shardengine.optim.arithmetic import DECOUPLED, Arithmetic, Declared, is_declared
from shardengine.optim.lion import Lion
from shardengine.optim.muon import KIND, USES_MUON, Muon, uses_muon
from shardengine.optim.muon_with_adamw import MuonWithAdamW
from shardengine.optim.optimizer import OptimizerForm, ShardedOptimizer
from shardengine.sharding import ignored_by

_IN_8_BITS = "8bit"
"""Suffix of names in a config: the optimizer keeps its states in 8 bits."""
_OWN: dict[str, type[torch.optim.Optimizer]] = {"Lion": Lion}
_DECLARED: dict[type[torch.optim.Optimizer], str] = {
    torch.optim.AdamW: "AdamW", torch.optim.Adam: "Adam", torch.optim.SGD: "SGD", Lion: "Lion", CPUAdam: "AdamW",
}  # fmt: skip


def arithmetic_of(
    optimizer: torch.optim.Optimizer, kept_in: str = "fp32", seed: int = 0, *, splits: bool = False
) -> tuple[Arithmetic, str]:
    """Return the arithmetic that steps ``optimizer``'s elements, and a sentence about its differences or "".

    The kernels' arithmetic is used if it is the same, otherwise the optimizer's own class after a trial. Raises
    ``UsageError`` if the class cannot work on slices of parameters. kept_in, seed, splits: as in ``Declared``.
    """
    kind, notice = _DECLARED.get(type(optimizer)), ""
    name = name_of(type(optimizer))
    if type(optimizer) in (torch.optim.Muon, MuonWithAdamW):
        return _muon_of(optimizer, name, kept_in, seed, splits=splits)
    if (by_rows := adafactor.kind_of(type(optimizer))) is not None:
        return _adafactor_of(optimizer, by_rows, kept_in, splits=splits), ""
    _refuse_sparse(optimizer, name)
    if kind is None and (found := foreign.recognise(optimizer)) is not None:
        kind, own, notice = found
        kept_in = own if kept_in == "fp32" else kept_in
    if kind is None and foreign.is_of_library(optimizer):
        reason = foreign.advice_for(optimizer) or "with its options, or at all, it is none that the engine knows"
        raise UsageError(
            f"optimizer {name}: expected torch.optim.AdamW, Adam or SGD, shardengine.lion.Lion, or a class that steps "
            f"each element from that element alone; {reason}",
            code="optimizer-not-supported",
        )
    if kind is None or not all(is_declared(group, optimizer.param_groups[0]) for group in optimizer.param_groups):
        if splits:
            raise UsageError(
                f"bf16.split_masters: expected AdamW, Adam, SGD or Lion, got {name}, whose class steps fp32 master "
                "weights; set that key to false",
                code="optimizer-without-split-masters",
            )
        if kept_in != "fp32":
            raise UsageError(
                f'data_types.optimizer_state_dtype: expected "fp32" for {name}, whose class keeps its states itself, '
                f'got "{kept_in}"; AdamW, Adam, SGD with momentum and Lion have their states in fewer bytes',
                code="optimizer-states-only-fp32",
            )
        return probe.elementwise(optimizer, name, foreign.advice_for(optimizer)), ""
    if optimizer.state:
        raise probe.already_stepped(name)
    if kind in ("Adam", "AdamW"):  # as in torch, a group's option decides, whatever the class
        kind = "AdamW" if optimizer.param_groups[0].get(DECOUPLED, kind == "AdamW") else "Adam"
    made = Declared(kind, kept_in, seed, splits=splits)
    for number, group in enumerate(optimizer.param_groups):
        made.action(group, number, 1, None)  # raises for an invalid option
    return made, notice


def _refuse_sparse(optimizer: torch.optim.Optimizer, name: str) -> None:
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise UsageError(
            f"optimizer {name} steps sparse gradients alone: expected torch.optim.Adam or AdamW, since sparse "
            "gradients travel sparse and are stepped dense; rows that no rank has used are then stepped, too, by "
            "momentum and weight decay",
            code="optimizer-sparse-only",
        )


def _muon_of(
    optimizer: torch.optim.Optimizer, name: str, kept_in: str, seed: int, *, splits: bool
) -> tuple[Arithmetic, str]:
    """``arithmetic_of`` for Muon, alone or with AdamW."""
    if optimizer.state:
        raise probe.already_stepped(name)
    _refuse_split_masters(name, splits=splits)
    if kept_in != "fp32" and all(map(uses_muon, optimizer.param_groups)):
        raise UsageError(
            f'data_types.optimizer_state_dtype: expected "fp32" for {name}, whose momentum is kept in fp32, got '
            f'"{kept_in}"',
            code="optimizer-states-only-fp32",
        )
    made = Muon(Declared("AdamW", kept_in, seed))
    for number, group in enumerate(optimizer.param_groups):
        made.check_options(group, f"optimizer {name}", number, group)
    return made, _told(kept_in)


def _adafactor_of(optimizer: torch.optim.Optimizer, kind: str, kept_in: str, *, splits: bool) -> Arithmetic:
    """``arithmetic_of`` for Adafactor."""
    name = name_of(type(optimizer))
    if optimizer.state:
        raise probe.already_stepped(name)
    _refuse_split_masters(name, splits=splits)
    if kept_in != "fp32":
        raise UsageError(
            f'data_types.optimizer_state_dtype: expected "fp32" for {name}, which keeps rows and columns alone, got '
            f'"{kept_in}"',
            code="optimizer-states-only-fp32",
        )
    made = adafactor.Adafactor(kind)
    for number, group in enumerate(optimizer.param_groups):
        made.check_options(group, f"optimizer {name}", number, optimizer.param_groups[0])
    return made


def _refuse_split_masters(name: str, *, splits: bool) -> None:
    if splits:
        raise UsageError(
            f"bf16.split_masters: expected AdamW, Adam, SGD or Lion, got {name}, which steps fp32 master weights; set "
            "that key to false",
            code="optimizer-without-split-masters",
        )


def name_of(made_by: type[torch.optim.Optimizer]) -> str:
    """Return the name under which a user finds the class."""
    public = getattr(torch.optim, made_by.__name__, None) is made_by
    return f"torch.optim.{made_by.__name__}" if public else f"{made_by.__module__}.{made_by.__qualname__}"


def groups_for(model: nn.Module, config: Config, given: Any, model_parameters: Iterable[Any] | None) -> OptimizerForm:
    """Return the optimizer that was passed to ``initialize``, in any form.

    given: an optimizer, Muon's and AdamW's in a list, a function from a list of parameters to an optimizer, or None
    (from ``config``).
    """
    named = config.optimizer
    ignored = ignored_by(model, config.ignored_parameters)
    alone = {id(parameter) for parameter in ignored.values()}
    trainable = (p for p in model.parameters() if p.requires_grad and id(p) not in alone)
    chosen = list(trainable if model_parameters is None else model_parameters)
    if isinstance(given, torch.optim.Optimizer | list | tuple):
        if model_parameters is not None:
            raise UsageError(
                "initialize: expected optimizer= or model_parameters=, got both; the optimizer has its own groups",
                code="optimizer-and-model-parameters",
            )
        if not isinstance(given, torch.optim.Optimizer):
            check_not_ignored(ignored, [group for each in given for group in each.param_groups])
            return _form_of_two(model, given, config)
        optimizer = given
    elif not chosen and (given is not None or named is not None):
        found = "all trainable ones are in ignored_parameters" if alone else "no parameter is trainable (requires_grad)"
        raise UsageError(f"initialize: an optimizer was asked for, but {found}", code="optimizer-nothing-trainable")
    elif given is not None:
        optimizer = given(chosen)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise UsageError(
                f"initialize: optimizer= returned {type(optimizer).__name__}, expected a torch optimizer",
                code="optimizer-function-returned-other",
            )
    elif named is not None:
        optimizer = _made_by_name(named, model, chosen)
    else:
        return OptimizerForm(None, [], {})
    check_not_ignored(ignored, optimizer.param_groups)
    _check_groups(model, optimizer.param_groups)
    by_name = "8bit" if given is None and named is not None and named.type.endswith(_IN_8_BITS) else None
    kept_in, splits = (
        by_name or config.data_types.optimizer_state_dtype,
        config.bf16.enabled and config.bf16.split_masters,
    )
    arithmetic, notice = arithmetic_of(optimizer, kept_in, config.seed, splits=splits)
    return OptimizerForm(arithmetic, optimizer.param_groups, optimizer.defaults, notice)


def _check_groups(model: nn.Module, groups: list[dict[str, Any]]) -> None:
    check_owned(model, groups)
    options.check_groups(groups, "initialize")
    if not any(parameter.requires_grad for group in groups for parameter in group["params"]):
        raise UsageError(
            "initialize: all of the optimizer's parameters are frozen (requires_grad=False)",
            code="optimizer-nothing-trainable",
        )


def _form_of_two(model: nn.Module, given: Sequence[Any], config: Config) -> OptimizerForm:
    """Return the form of torch's Muon and of the optimizer of the rest, in a list.

    The group dicts stay the user's; each gets the option that says which of the two steps it.
    """
    muons = [each for each in given if type(each) is torch.optim.Muon]
    others = [each for each in given if type(each) in (torch.optim.AdamW, torch.optim.Adam)]
    if len(muons) != 1 or len(others) != 1 or len(given) != 2:
        came = ", ".join(type(each).__name__ for each in given) or "nothing"
        raise UsageError(
            f"initialize: expected one optimizer, or [torch.optim.Muon(...), torch.optim.AdamW(...)], got [{came}]: "
            "one engine has one optimizer, with several groups where that is wanted",
            code="optimizer-pair-unsupported",
        )
    muon, other = muons[0], others[0]
    kept_in, splits = config.data_types.optimizer_state_dtype, config.bf16.enabled and config.bf16.split_masters
    (rest, _), _ = arithmetic_of(other, kept_in, config.seed), arithmetic_of(muon, splits=splits)
    if not isinstance(rest, Declared):
        raise UsageError(
            f"initialize: beside Muon {name_of(type(other))} is expected without amsgrad, capturable and "
            "differentiable",
            code="optimizer-pair-option-unsupported",
        )
    twice = {id(p) for g in muon.param_groups for p in g["params"]}
    if any(id(p) in twice for g in other.param_groups for p in g["params"]):
        raise UsageError(
            "initialize: expected each parameter in one of the two optimizers, got one that is in both",
            code="optimizer-pair-shares-parameter",
        )
    groups = []
    for each in given:
        for group in each.param_groups:
            group[USES_MUON] = each is muon
            groups.append(group)
    _check_groups(model, groups)
    return OptimizerForm(Muon(rest, dict(muon.defaults), dict(other.defaults)), groups, {}, _told(kept_in))


def _told(kept_in: str) -> str:
    """Return the sentence about Muon's momentum if AdamW's states are kept in another format than fp32."""
    return "" if kept_in == "fp32" else f'Muon: its momentum is kept in fp32, what AdamW keeps beside it in "{kept_in}"'


def _made_by_name(config: OptimizerConfig, model: nn.Module, chosen: list[Any]) -> torch.optim.Optimizer:
    """Return the optimizer that the config's ``type`` names, over ``chosen``."""
    if config.type == KIND:
        return muon_with_adamw.from_config(model, chosen, config.params)
    name = config.type.removesuffix(_IN_8_BITS)
    made_by: type[torch.optim.Optimizer] = _OWN.get(name) or getattr(torch.optim, name)
    return made_by(chosen, **config.params)


_LENT = ("step", "zero_grad", "add_param_group", "state_dict", "load_state_dict", "train", "eval")
_SCHEDULED = "_wrapped_by_lr_sched"
"""The attribute of ``optimizer.step`` that torch's schedulers look for."""


def lend(given: Any, to: ShardedOptimizer) -> Callable[[], None]:
    """Redirect the methods of the user's optimizer ``given``, or of each in a list, to the engine's, ``to``.

    So a training loop that was written for it works; its own methods would see no gradients and step nothing. In a
    list, only the last one steps. Returns a function that undoes the redirection.
    """
    if not isinstance(given, list | tuple):
        return _lend(given, to, {})
    undo = []
    for each in given:
        instead: dict[str, Callable[..., Any]] = {}
        for name in ("state_dict", "load_state_dict"):
            instead[name] = functools.partial(_refuse_alone, name)
        instead["add_param_group"] = functools.partial(_extend, each, to)
        if each is not given[-1]:
            instead["step"] = _count_nothing
        undo.append(_lend(each, to, instead))

    def give_back() -> None:
        for each in undo:
            each()

    return give_back


def _refuse_alone(name: str, *args: Any, **kwargs: Any) -> Any:
    raise UsageError(
        f"{name}() of one of two optimizers, which the engine steps as one: expected engine.optimizer.{name}(), which "
        "has the states of both",
        code="optimizer-pair-called-singly",
    )


def _extend(given: torch.optim.Optimizer, to: ShardedOptimizer, group: dict[str, Any]) -> None:
    group[USES_MUON] = type(given) is torch.optim.Muon
    to.add_param_group(group)
    given.param_groups.append(group)


def _count_nothing(closure: Callable[[], Any] | None = None) -> Any:
    """Stand in for ``step`` of the first of two optimizers: the other one's ``step`` steps both."""
    return None if closure is None else closure()


def _lend(
    given: torch.optim.Optimizer, to: ShardedOptimizer, instead: Mapping[str, Callable[..., Any]]
) -> Callable[[], None]:
    """instead: replacements for some of its methods."""
    before = {name: given.__dict__[name] for name in _LENT if name in given.__dict__}

    def method_of(name: str) -> Callable[..., Any]:
        def call(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            if name == "step":
                optimizer.__dict__["_opt_called"] = True  # for torch's schedulers
            return (instead.get(name) or getattr(to, name))(*args, **kwargs)

        call.__name__, call.__doc__ = name, getattr(to, name).__doc__
        if hasattr(before.get(name), _SCHEDULED):
            setattr(call, _SCHEDULED, True)
        return call

    for name in (each for each in _LENT if hasattr(given, each)):
        setattr(given, name, types.MethodType(method_of(name), given))

    def give_back() -> None:
        for name in _LENT:
            given.__dict__.pop(name, None)
        given.__dict__.update(before)

    to.stand_in_for(given)
    return give_back


def check_not_ignored(ignored: Mapping[str, Tensor], groups: list[dict[str, Any]]) -> None:
    """Raise ``UsageError`` for a parameter of ``groups`` that is in the config's ``ignored_parameters``. ignored: by
    name."""
    name_of = {id(parameter): name for name, parameter in ignored.items()}
    for number, group in enumerate(groups):
        for parameter in group["params"]:
            if id(parameter) in name_of:
                raise UsageError(
                    f"parameter {name_of[id(parameter)]!r} is in ignored_parameters and in optimizer group {number}: "
                    "expected it in an optimizer of your own, which you step beside the engine, or in none",
                    code="optimizer-holds-ignored-parameter",
                )


def check_owned(model: nn.Module, groups: list[dict[str, Any]]) -> None:
    """Raise ``UsageError`` for a parameter of ``groups`` that does not belong to ``model``."""
    owned = {id(parameter) for parameter in model.parameters()}
    for number, group in enumerate(groups):
        for position, parameter in enumerate(group["params"]):
            if id(parameter) not in owned:
                raise UsageError(
                    f"optimizer group {number}, parameter {position} (shape {tuple(parameter.shape)}) is not one "
                    "of the model's: expected an optimizer over model.parameters(), made after the model's last change",
                    code="optimizer-of-another-model",
                )
