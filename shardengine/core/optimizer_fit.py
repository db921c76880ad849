"""Checks whether an optimizer's state dict, torch's or ours, fits the engine, and assigns its entries.

Owns: torch's numbering of parameters, names and options on both sides, the error messages about differences. Must not
know: how tensors travel. All checks run before anything changes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NoReturn

import torch
from torch import Tensor

from shardengine.core.parts import Core
from shardengine.errors import UsageError
from shardengine.kernels import REMAINDER
from shardengine.optim import AVERAGE, ShardedOptimizer, stays
from shardengine.sharding import ParameterSpec

STEP = "step"
MASTER_ENTRY = "master"
"""The key of a parameter's fp32 master weight among its states."""
SCALER = "loss_scaler"
"""The key of the loss scale beside torch's two."""
_CALL = "optimizer.load_state_dict"
_TELLING = ("lr", "betas", "eps", "weight_decay", "momentum", "dampening", "rho", "alpha", "lambd", "etas")
"""Options that identify the class of a group."""
_KIND_OPTION = "decoupled_weight_decay"


@dataclass
class Fit:
    """The result of checking a dict: everything that loading it will set.

    steps: per parameter of the layout · groups: per group its options, as ``_packed`` returns them · masters: numbers
    of the parameters whose master weight is loaded · states: number → names of the loaded states · scaler: the loss
    scale, None for none · notes: parts that are left out, for a user · kept: by parameter name, the facts that its
    class keeps of the parameter as a whole · values: number → name → whole tensor, on rank 0.
    """

    steps: list[int]
    groups: list[dict[str, Any]]
    masters: set[int] = field(default_factory=set)
    states: dict[int, list[str]] = field(default_factory=dict)
    scaler: dict[str, Any] | None = None
    notes: list[str] = field(default_factory=list)
    kept: dict[str, dict[str, Any]] = field(default_factory=dict)
    values: dict[int, dict[str, Tensor]] = field(default_factory=dict)

    @property
    def facts(self) -> list[Any]:
        """Everything but the values, as JSON."""
        states = [[number, names] for number, names in sorted(self.states.items())]
        return [self.steps, self.groups, sorted(self.masters), states, self.scaler, self.notes, self.kept]

    @classmethod
    def of(cls, facts: list[Any], values: dict[int, dict[str, Tensor]]) -> Fit:
        """The inverse of ``facts``."""
        steps, groups, masters, states, scaler, notes, kept = facts
        return cls(steps, groups, set(masters), dict(states), scaler, notes, kept, values)


def numbered(groups: list[dict[str, Any]]) -> dict[int, int]:
    """id(parameter) → its number in torch's state dicts."""
    return {id(p): number for number, p in enumerate(chain.from_iterable(group["params"] for group in groups))}


def fit(core: Core, optimizer: ShardedOptimizer, given: Any) -> Fit | None:
    """Return how the engine loads ``given``; None if it is empty, which is allowed on all ranks except 0; local.

    Raises ``UsageError`` if it does not fit.
    """
    if not isinstance(given, Mapping) or (given and not {"state", "param_groups"} <= given.keys()):
        came = f"a dict with {sorted(map(str, given))}"[:200] if isinstance(given, Mapping) else type(given).__name__
        _refuse(core, f'expected "state" and "param_groups", as an optimizer\'s state_dict() has them, got {came}')
    if not given:
        if core.mesh.rank == 0:
            _refuse(core, "expected the whole dict on rank 0, or on every rank, got {}")
        return None
    number_of = _matched(core, optimizer, given)
    found = Fit([0] * len(core.layout.parameters), _options(core, optimizer, given["param_groups"]))
    _find_states(core, optimizer, given, number_of, found)
    if given.get(SCALER) is not None and core.precision.scales_loss:
        found.scaler = _scaler(core, optimizer, given[SCALER])
    return found


def take_options(optimizer: ShardedOptimizer, found: Fit) -> None:
    """Set steps, options and the loss scale. The groups stay the same dicts, because schedulers hold them."""
    for group, options in zip(optimizer.param_groups, found.groups, strict=True):
        group.update({key: _unpacked(value) for key, value in options.items()})
    optimizer.steps[:] = found.steps
    optimizer.arithmetic.restore(found.kept, optimizer.begun)
    if found.scaler is not None and optimizer.settings.scaler is not None:
        optimizer.settings.scaler.load_state_dict(found.scaler)


def _refuse(core: Core, text: str) -> NoReturn:
    raise UsageError(
        f"{_CALL} (rank {core.mesh.rank}): {text}; nothing was loaded", code="optimizer-state-does-not-fit"
    )


# Parameters


def _matched(core: Core, optimizer: ShardedOptimizer, given: Mapping[str, Any]) -> dict[Any, int]:
    """The dict's key of a parameter → that parameter's number in the engine's optimizer.

    Parameters are matched by position, as in torch. If the dict's keys are the model's names, as in
    ``get_optimizer_state_dict``, they are matched by name.
    """
    groups, saved, names = optimizer.param_groups, list(given["param_groups"]), core.partition.names
    if len(groups) != len(saved):
        _refuse(core, f"expected {len(groups)} parameter group(s), as the engine's optimizer has, got {len(saved)}")
    ours, found = numbered(groups), dict[Any, int]()
    every = [each for group in saved for each in group.get("params", ())]
    by_name = bool(every) and all(isinstance(each, str) and each in names for each in every)
    for index, (group, theirs) in enumerate(zip(groups, saved, strict=True)):
        given_names = list(theirs.get("params", ()))
        if by_name:
            here, there = {id(p) for p in group["params"]}, {id(names[name]) for name in given_names}
            if here != there:
                first = core.partition.first_names()
                odd = sorted(first[each] for each in here ^ there)
                _refuse(core, f"group {index} holds other parameters than the engine's, for example {odd[0]!r}")
            found |= {name: ours[id(names[name])] for name in given_names}
        elif len(given_names) != len(group["params"]):
            _refuse(core, f"group {index}: expected {len(group['params'])} parameters, got {len(given_names)}")
        else:
            found |= {each: ours[id(p)] for each, p in zip(given_names, group["params"], strict=True)}
    if unknown := [each for each in given["state"] if each not in found]:
        _refuse(core, f"it has states of parameter {unknown[0]!r}, which is in none of its groups")
    return found


def _find_states(
    core: Core, optimizer: ShardedOptimizer, given: Mapping[str, Any], number_of: dict[Any, int], found: Fit
) -> None:
    parameters = list(chain.from_iterable(group["params"] for group in optimizer.param_groups))
    layout = {id(p): n for n, p in enumerate(core.partition.inside) if core.layout.parameters[n].is_stepped}
    first, frozen, without, split = core.partition.first_names(), [], [], list[str]()
    for each, entry in given["state"].items():
        parameter = parameters[number_of[each]]
        name, number = first[id(parameter)], layout.get(id(parameter))
        if number is None:
            frozen += [name] if entry and parameter.numel() else []
            continue
        spec = core.layout.parameters[number]
        whole = optimizer.arithmetic.whole_shapes(spec.shape)
        expected = (*optimizer.names_for(*found_groups(optimizer, found, spec.group)), *whole)
        if isinstance(entry, Mapping) and entry.get(REMAINDER) is not None and REMAINDER not in expected:
            entry = {key: value for key, value in entry.items() if key != REMAINDER}
            split.append(name)
        values = dict(_tensors(core, optimizer, spec, entry, expected))
        master = values.pop(MASTER_ENTRY, None)
        if master is not None and _is_stepped_in_fp32(core, spec.dtype):
            values[MASTER_ENTRY] = master
            found.masters.add(number)
        elif master is not None:
            without.append(name)
        found.values[number] = values
        found.states[number] = sorted(values)
        stepped = bool(values.keys() - {MASTER_ENTRY})
        found.steps[number] = _step(core, optimizer, spec, entry, stepped=stepped)
        _find_facts(core, optimizer, spec.name, entry, found, stepped=found.steps[number] > 0)
    for names, text in (
        (frozen, "states of parameters that the engine does not step (they are frozen) are left out"),
        (without, "master weights are left out of parameters that have none here"),
        (split, "remainders of master weights are left out of parameters that have none here"),
    ):
        if names:
            more = f" and {len(names) - 4} more" if len(names) > 4 else ""
            found.notes.append(f"{text}: {', '.join(names[:4])}{more}")


def _find_facts(
    core: Core, optimizer: ShardedOptimizer, name: str, entry: Mapping[str, Any], found: Fit, *, stepped: bool
) -> None:
    """Take the facts that the class keeps of the parameter as a whole, as JSON."""
    if not optimizer.arithmetic.keeps_facts or not stepped:
        return
    facts = {key: entry[key] for key in optimizer.arithmetic.fact_names if key in entry}
    for key, value in facts.items():
        facts[key] = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    if problem := optimizer.arithmetic.problem({name: facts}, [name]):
        _refuse(core, problem)
    found.kept[name] = facts


def found_groups(optimizer: ShardedOptimizer, found: Fit, index: int) -> list[dict[str, Any]]:
    """Group ``index`` with the loaded options, in a list."""
    options = {key: _unpacked(value) for key, value in found.groups[index].items()}
    return [{**optimizer.param_groups[index], **options}]


def _is_stepped_in_fp32(core: Core, dtype: str) -> bool:
    weights = getattr(torch, dtype)
    return weights is torch.float32 or core.precision.master_dtype(weights) is torch.float32


def _tensors(
    core: Core, optimizer: ShardedOptimizer, spec: ParameterSpec, entry: Any, expected: tuple[str, ...]
) -> Iterator[tuple[str, Tensor]]:
    """Check and yield the states of one parameter, by name. A momentum that is missing or None has not begun."""
    name, shape = spec.name, spec.shape
    if not isinstance(entry, Mapping):
        _refuse(core, f"the states of {name!r}: expected a dict, got {type(entry).__name__}")
    aside = {STEP, *optimizer.arithmetic.fact_names, *optimizer.arithmetic.passed_over}
    given = {key: value for key, value in entry.items() if value is not None and key not in aside}
    shapes = optimizer.arithmetic.whole_shapes(shape)
    texts = [", ".join(map(repr, names)) or "none" for names in ((*expected, MASTER_ENTRY), given)]
    if unknown := given.keys() - {*expected, MASTER_ENTRY}:
        _refuse(
            core,
            f"{name!r} has the state {sorted(map(str, unknown))[0]!r}, which {optimizer.kind} has not here: expected "
            f"{texts[0]}, got {texts[1]}; the dict is another optimizer's, or made with other options",
        )
    lacks = [key for key in expected if key not in given and key not in (AVERAGE, REMAINDER)]
    if lacks and (_counts(optimizer, spec) or given.keys() & set(expected)):
        _refuse(core, f"{name!r} lacks the state {lacks[0]!r} of {optimizer.kind}: expected {texts[0]}, got {texts[1]}")
    for key, value in given.items():
        wanted = shapes.get(key, shape)
        if not isinstance(value, Tensor) or tuple(value.shape) != tuple(wanted):
            came = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            as_what = "" if key in shapes else ", as the parameter's,"
            _refuse(core, f"{key!r} of {name!r}: expected a tensor of shape {wanted}{as_what} got {came}")
        if not value.is_floating_point():
            _refuse(core, f"{key!r} of {name!r}: expected a floating-point tensor, got {value.dtype}")
        if problem := optimizer.misfit({key: value}):
            _refuse(core, f"{name!r}: {problem}")
        yield key, value.detach()


def _counts(optimizer: ShardedOptimizer, spec: ParameterSpec) -> bool:
    """Whether torch's class counts the steps of a parameter."""
    return optimizer.arithmetic.counts_steps(optimizer.param_groups[spec.group])


def _step(
    core: Core, optimizer: ShardedOptimizer, spec: ParameterSpec, entry: Mapping[str, Any], *, stepped: bool
) -> int:
    """The steps that the parameter has taken; if torch does not count them, 1 if it has taken any, else 0."""
    name = spec.name
    if entry.get(STEP) is None:
        if _counts(optimizer, spec):
            _refuse(core, f"{name!r} has no 'step', the number of steps that {optimizer.kind} has taken")
        return int(stepped)
    value = entry[STEP]
    is_number = value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, int | float)
    number = float(value) if is_number else -1.0
    if not math.isfinite(number) or number < 0 or number != int(number):
        _refuse(core, f"the step of {name!r}: expected a whole number of steps, 0 or more, got {value!r}")
    return int(number)


def _scaler(core: Core, optimizer: ShardedOptimizer, given: Any) -> dict[str, Any]:
    ours = optimizer.scaling
    fine = isinstance(given, Mapping) and given.keys() == ours.keys()
    if not fine or not all(isinstance(v, int | float) and math.isfinite(v) for v in given.values()):
        _refuse(core, f"{SCALER!r}: expected finite numbers under {', '.join(ours)}, got {str(given)[:200]}")
    return dict(given)


# Options


def _options(core: Core, optimizer: ShardedOptimizer, saved: list[Any]) -> list[dict[str, Any]]:
    """The saved options per group, packed.

    Raises ``UsageError`` if they are options of another class, or not available.
    """
    packed = []
    for index, (group, theirs) in enumerate(zip(optimizer.param_groups, saved, strict=True)):
        options = {key: value for key, value in theirs.items() if key != "params" and not stays(value)}
        if optimizer.arithmetic.family({**group, **options}) != optimizer.arithmetic.family(group):
            _refuse(
                core, f"group {index} is stepped by another optimizer in the dict (use_muon): expected the same one"
            )
        for key in _TELLING:
            if (key in group) != (key in options):
                has, lacks = ("the engine's", "the dict's") if key in group else ("the dict's", "the engine's")
                _refuse(
                    core,
                    f"group {index} of {has} optimizer has the option {key!r}, {lacks} has not: expected the options "
                    f"of {optimizer.kind}; the dict is another optimizer's",
                )
        if _KIND_OPTION in options and bool(options[_KIND_OPTION]) != bool(group.get(_KIND_OPTION)):
            _refuse(
                core,
                f"group {index}: {_KIND_OPTION} is {options[_KIND_OPTION]} in the dict, {group.get(_KIND_OPTION)} "
                "here: one has Adam's weight decay, the other AdamW's",
            )
        optimizer.arithmetic.check_options(
            {**group, **options}, _CALL, index, {**optimizer.param_groups[0], **saved[0]}
        )
        packed.append({key: _packed(core, index, key, value) for key, value in options.items()})
        for key in ("lr", "weight_decay"):
            value = options.get(key, 0.0)
            has_none = value is None and group.get(key, 0.0) is None
            if not has_none and (not isinstance(value, int | float | Tensor) or isinstance(value, bool)):
                _refuse(core, f"group {index}: expected {key!r} to be a number, got {value!r}")
        merged = optimizer.names_for({**group, **options})
        if missing := set(merged) - set(optimizer.state_names):
            _refuse(
                core,
                f"group {index} keeps {sorted(missing)[0]!r}, which the engine's optimizer does not: expected an "
                "engine made with the options of the dict (for SGD, momentum from the start)",
            )
    return packed


def _packed(core: Core, index: int, key: str, value: Any) -> Any:
    """An option as JSON that records its type."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple | list):
        return {type(value).__name__: [_packed(core, index, key, each) for each in value]}
    if isinstance(value, Tensor) and value.numel() == 1:
        return {"tensor": value.item(), "dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
    _refuse(core, f"group {index}, option {key!r}: expected numbers, strings or lists of them, got {value!r}"[:400])


def _unpacked(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return torch.full(value["shape"], value["tensor"], dtype=getattr(torch, value["dtype"]))
    kind, items = next(iter(value.items()))
    return (tuple if kind == "tuple" else list)(_unpacked(each) for each in items)
