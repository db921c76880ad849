"""Optimizers whose class steps each element from that element alone: torch's, other libraries', the user's own.

Owns: the class's step over slices of parameters, and its numbers per parameter. ``probe`` decides whether a class may
be stepped on slices. Must not know: buckets, stages, where states are kept.

[Note: A class on slices] The user's own class does the arithmetic. For each action the engine makes a worker: an
instance with all attributes of the user's optimizer except its groups and states. The worker's group holds one flat
``nn.Parameter`` per slice. The slice of the gradient (unscaled and clipped) is its ``.grad``; the class may write to
it, because nothing reads it afterwards. Entries of the class's state that have the parameter's shape are kept by
element, with the master weights, on any device; the worker gets a slice of them. A parameter's first step begins with
an empty state, so that the class initializes it itself (NAdam with zeros, Rprop with the learning rate). The result is
then kept.

[Note: Facts] All other entries of the state (step counts, products of them) are the same for every element. Every rank
needs all of them, to save them and because it may hold other slices later, but it has slices of some parameters only.
So every rank makes the step for a few additional elements of its own (the pilot), one slice for each different set of
facts. It takes the new facts, and the class's changes to the options of the group, from the pilot. The old facts stay
in use until the step is done.
"""

from __future__ import annotations

import copy
import inspect
import math
from bisect import bisect_right
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shardengine.errors import UsageError
from shardengine.kernels import Noise, Span, Spans, round_stochastically
from shardengine.optim.arithmetic import Action, Arithmetic
from shardengine.sharding import Layout

Facts = dict[str, Any]
"""The state that a class keeps of a parameter as a whole, by name: numbers, None, or tensors of one element."""


_STAYS = "expected what a class keeps to depend neither on sizes nor on options that change on the way"


@dataclass
class Slice:
    """A slice of a parameter, or a whole parameter.

    states: of its elements, by name; None: the class initializes them · facts: of the parameter. After a step, both are
    the class's new values.
    """

    weight: Tensor
    gradient: Tensor | None
    states: dict[str, Tensor] | None
    facts: Facts = field(default_factory=dict)

    def give(self, gradient: Tensor) -> None:
        """Set the gradient of the next step."""
        self.gradient = gradient


class Workers:
    """Makes instances of one class, which step slices.

    name: for messages · states, facts: names that the class keeps by element and by parameter, once known; until then
    entries that have the parameter's shape are states.
    """

    states: tuple[str, ...] | None = None
    facts: tuple[str, ...] = ()

    def __init__(self, optimizer: torch.optim.Optimizer, name: str) -> None:
        """optimizer: the user's; it is not changed."""
        self.made_by = type(optimizer)
        self.name = name
        own = {"param_groups", "state", "step", "zero_grad"}  # the last two are set by a scheduler
        self._attributes = {key: value for key, value in vars(optimizer).items() if key not in own}
        for key in self._attributes:
            if key.startswith("_optimizer_"):
                self._attributes[key] = OrderedDict()  # hooks are called once per step, not here
        self.begins_early = bool(optimizer.state)
        """Whether the class's constructor makes states."""

    def know(self, states: tuple[str, ...] | None, facts: tuple[str, ...] = ()) -> None:
        """Set the names of the class's states and facts; states None: not known yet."""
        self.states, self.facts = states, facts

    def run(self, options: Mapping[str, Any], slices: Sequence[Slice], method: str = "step") -> dict[str, Any]:
        """Call ``method`` over slices of one group. Return the group's options afterwards; the results are in
        ``slices``."""
        worker = self.make([(options, slices)])
        self.call(worker, method)
        self.take(worker, [slices])
        return options_of(worker.param_groups[0])

    def make(self, groups: Sequence[tuple[Mapping[str, Any], Sequence[Slice]]]) -> torch.optim.Optimizer:
        """Return an instance over slices, group by group (options, slices)."""
        worker = object.__new__(self.made_by)
        vars(worker).update({key: copy.copy(value) for key, value in self._attributes.items()})
        vars(worker).update(state=defaultdict(dict), param_groups=[])
        for options, slices in groups:
            parameters = [self._enter(worker, each) for each in slices]
            worker.param_groups.append({**copy.deepcopy(dict(options)), "params": parameters})
        return worker

    def call(self, worker: torch.optim.Optimizer, method: str) -> None:
        """Call ``method`` without the hooks that torch puts around a step."""
        call: Callable[..., Any] = getattr(self.made_by, method)
        while getattr(call, "hooked", False):
            call = call.__wrapped__  # type: ignore[attr-defined]
        with torch.no_grad():
            call(worker)

    def take(self, worker: torch.optim.Optimizer, groups: Sequence[Sequence[Slice]]) -> None:
        """Copy the worker's results back to the slices from which it was made."""
        with torch.no_grad():
            for slices, group in zip(groups, worker.param_groups, strict=True):
                for each, parameter in zip(slices, group["params"], strict=True):
                    self._take(each, parameter, worker.state.get(parameter, {}))

    def begun(self, parameter: nn.Parameter) -> dict[str, Any]:
        """Return the state of a parameter that the class's constructor makes, with the user's defaults."""
        known = inspect.signature(self.made_by).parameters
        defaults: dict[str, Any] = self._attributes["defaults"]
        made = self.made_by([parameter], **{key: value for key, value in defaults.items() if key in known})
        return dict(made.state.get(parameter, {}))

    def _enter(self, worker: torch.optim.Optimizer, each: Slice) -> nn.Parameter:
        parameter = nn.Parameter(each.weight)
        parameter.grad = each.gradient
        if each.states is not None:
            worker.state[parameter] = {**each.states, **copy.deepcopy(each.facts)}
        elif self.begins_early:
            worker.state[parameter] = self.begun(parameter)
        return parameter

    def _take(self, each: Slice, parameter: nn.Parameter, state: Mapping[str, Any]) -> None:
        """Copy one parameter's results to its slice; the class may have written in place or replaced tensors."""
        if parameter.data_ptr() != each.weight.data_ptr():
            each.weight.copy_(parameter.detach().view(each.weight.shape))
        if not state and each.states is None:
            return
        if self.states is not None and state.keys() != {*self.states, *self.facts}:
            raise UsageError(
                f"optimizer {self.name}: it keeps {sorted(state)} of a parameter of shape {tuple(each.weight.shape)}, "
                f"and kept {sorted((*self.states, *self.facts))} in a trial at initialize; {_STAYS}",
                code="optimizer-state-unlike-trial",
            )
        before, found = each.states or {}, dict(state)
        states = {key: found.pop(key) for key in state if self._is_by_element(key, state[key], each.weight)}
        if self.states is None:
            self._refuse_one_under_two_names(states, parameter)
        for key, value in states.items():
            if key in before and value.data_ptr() != before[key].data_ptr():
                states[key] = before[key].copy_(value)
        each.states, each.facts = states, found

    def _refuse_one_under_two_names(self, states: Mapping[str, Tensor], parameter: Tensor) -> None:
        """Raise ``UsageError`` if two states are one tensor. They are stored separately: a write to one would miss the
        other."""
        names = {parameter.data_ptr(): "the parameter itself"} if parameter.numel() else {}
        for name, value in states.items() if parameter.numel() else ():
            if (other := names.setdefault(value.data_ptr(), repr(name))) != repr(name):
                raise UsageError(
                    f"optimizer {self.name}: its state {name!r} is the same tensor as {other}: expected tensors of "
                    "their own, which are kept apart",
                    code="optimizer-state-shared",
                )

    def _is_by_element(self, name: str, value: Any, weight: Tensor) -> bool:
        shaped = isinstance(value, Tensor) and value.shape == weight.shape
        if self.states is None:
            return shaped
        if (name in self.states) is not shaped and (name in self.states or weight.numel() > 1):
            came = tuple(value.shape) if isinstance(value, Tensor) else repr(value)[:80]
            raise UsageError(
                f"optimizer {self.name}: its state {name!r} is {came} for a parameter of shape {tuple(weight.shape)}, "
                f"and was {'of' if name in self.states else 'not of'} the parameter's shape in a trial at initialize; "
                f"{_STAYS}",
                code="optimizer-state-unlike-trial",
            )
        return name in self.states


@dataclass(frozen=True)
class Learnt:
    """The result of a trial of a class. states: name and dtype of its states by element · facts: of a parameter, as
    examples · changes_options: whether it changes the options of its groups · pilot: a slice after a step, with other
    numbers."""

    states: dict[str, torch.dtype]
    facts: Facts
    changes_options: bool
    pilot: Slice


class Elementwise(Arithmetic):
    """Steps slices with the user's class ([Note: A class on slices])."""

    by_parameter = True
    keeps_facts = True
    waits = True

    def __init__(self, workers: Workers, learn: Callable[[Any], Learnt], groups: list[Any]) -> None:
        """learn: makes the trial with the options of groups; raises UsageError if the class cannot step slices."""
        self.kind = workers.name
        self._workers = workers
        self._learn = learn
        self._learnt = learn(groups)
        workers.know(tuple(self._learnt.states), tuple(self._learnt.facts))
        self.fact_names = tuple(self._learnt.facts)
        self.modes = tuple(name for name in ("train", "eval") if callable(getattr(workers.made_by, name, None)))
        """Methods of the class that exchange weights for others."""
        self._facts: dict[str, Facts] = {}  # of parameters that were stepped; equal facts often share one object
        self._next: dict[str, Facts] = {}
        self._changed: dict[int, dict[str, Any]] = {}
        self._options: list[dict[str, Any]] = []
        self._method = "step"
        self._names: list[str] = []
        self._numbers: list[int] = []

    def state_names(self, groups: list[dict[str, Any]], *, scheduled: bool = False) -> tuple[str, ...]:
        """See ``Arithmetic``."""
        return tuple(self._learnt.states)

    def lay_out(self, layout: Layout, begun: Collection[str], device: torch.device) -> None:
        """See ``Arithmetic``."""
        specs = sorted((spec for spec in layout.parameters if spec.is_stepped), key=lambda spec: spec.number)
        self._names, self._numbers = [spec.name for spec in specs], [spec.number for spec in specs]
        self._facts = {name: facts for name, facts in self._facts.items() if name in begun}

    def begin_step(
        self, groups: Sequence[dict[str, Any]], stepped: Iterable[tuple[str, int]], method: str = "step"
    ) -> None:
        """See ``Arithmetic``. method: the method of the class to call. For the pilot's part see [Note: Facts]."""
        self._method = method
        self._options = [copy.deepcopy(options_of(group)) for group in groups]
        self._next, self._changed, self.moves_weights = {}, {}, False
        cohorts: dict[tuple[int, int | None], list[str]] = {}
        for name, group in stepped:
            facts = self._facts.get(name)
            cohorts.setdefault((group, None if facts is None else id(facts)), []).append(name)
        for number, options in enumerate(self._options):
            of_group = [names for (group, _), names in cohorts.items() if group == number]
            slices = [self._pilot(self._facts.get(names[0])) for names in of_group]
            if not slices and self._learnt.changes_options:
                slices = [Slice(torch.ones(1), None, None)]
            try:
                after = self._workers.run(options, slices, method) if slices else options
            except UsageError:
                raise
            except Exception as error:
                raise UsageError(
                    f"optimizer {self.kind}: its {method}() raised {type(error).__name__}: {str(error)[:300]}; nothing "
                    "was stepped",
                    code="optimizer-raised-in-step",
                ) from error
            self.moves_weights |= any(not self._is_example(pilot) for pilot in slices)
            for names, pilot in zip(of_group, slices, strict=False):
                self._next.update(dict.fromkeys(names, pilot.facts) if pilot.states is not None else {})
            self._changed[number] = {key: value for key, value in after.items() if not same(value, options.get(key))}

    def _pilot(self, facts: Facts | None) -> Slice:
        example = self._learnt.pilot
        gradient = None if self._method != "step" else example.gradient
        gradient = None if gradient is None else gradient.clone()
        states = {name: state.clone() for name, state in (example.states or {}).items()}
        return Slice(example.weight.clone(), gradient, None if facts is None else states, dict(facts or {}))

    def _is_example(self, pilot: Slice) -> bool:
        example = self._learnt.pilot
        states = {name: state for name, state in (pilot.states or {}).items() if name in (example.states or {})}
        return same(pilot.weight, example.weight) and all(
            same(state, (example.states or {})[name]) for name, state in states.items()
        )

    def end_step(self, groups: Sequence[dict[str, Any]]) -> None:
        """See ``Arithmetic``."""
        self._facts.update(self._next)
        for number, changed in self._changed.items():
            groups[number].update(changed)
        self._next, self._changed = {}, {}

    def action(self, group: dict[str, Any], index: int, step: int, seed: int | None) -> Action:
        """See ``Arithmetic``."""
        return _ClassAction(self, index, None if seed is None else Noise(seed, step))

    def check_extended(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """See ``Arithmetic``."""
        new = self._learn(groups)
        if unknown := new.states.keys() - self._learnt.states.keys():
            raise UsageError(
                f"add_param_group: {self.kind} keeps {sorted(unknown)[0]!r} with the options of the new group, and not "
                "with those of the others: expected options with which it keeps the same",
                code="optimizer-groups-differ",
            )

    def apply(
        self, index: int, flats: Mapping[str, Tensor], spans: Spans, factor: Tensor | None, noise: Noise | None
    ) -> None:
        """Step the slices ``spans`` of group number ``index``."""
        slices = [self._slice(flats, span, factor) for span in spans]
        self._workers.run(self._options[index], slices, self._method)
        for span, each in zip(spans, slices, strict=True):
            cut = slice(span.start, span.end)
            for name, state in (each.states or {}).items():
                if state.dtype is not self._learnt.states[name]:
                    raise UsageError(
                        f"optimizer {self.kind}: its state {name!r} is {state.dtype}, and was "
                        f"{self._learnt.states[name]} in a trial at initialize; {_STAYS}",
                        code="optimizer-state-unlike-trial",
                    )
                if state.data_ptr() != flats[name][cut].data_ptr():
                    flats[name][cut].copy_(state)
            stored = flats["weight"][cut]
            if stored.dtype is not torch.float32:
                rounded = each.weight if noise is None else round_stochastically(each.weight, noise, span.first)
                stored.copy_(rounded)
            if "low" in flats:
                flats["low"][cut].copy_(each.weight)

    def _slice(self, flats: Mapping[str, Tensor], span: Span, factor: Tensor | None) -> Slice:
        cut = slice(span.start, span.end)
        weight, gradient = flats["weight"][cut].float(), None
        if "gradient" in flats:
            given = flats["gradient"][cut]
            gradient = given.float() if factor is None else torch.mul(given.float(), factor)
        facts = self._facts.get(self._names[bisect_right(self._numbers, span.first) - 1])
        if facts is None:
            return Slice(weight, gradient, None)
        states = {name: flats[name][cut].to(dtype) for name, dtype in self._learnt.states.items()}
        return Slice(weight, gradient, states, self._near(facts, weight.device))

    def _near(self, facts: Facts, device: torch.device) -> Facts:
        """Return the facts, on ``device`` if some group's option ``fused`` is on: fused kernels read them there."""
        if device.type == "cpu" or not any(options.get("fused") for options in self._options):
            return facts
        return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in facts.items()}

    def saved(self) -> dict[str, Any]:
        """See ``Arithmetic``."""
        return {
            name: {key: value.item() if isinstance(value, Tensor) else value for key, value in facts.items()}
            for name, facts in self._facts.items()
        }

    def problem(self, saved: Mapping[str, Any], begun: Collection[str]) -> str:
        """See ``Arithmetic``."""
        example = self._learnt.facts
        if example and (left := sorted(set(begun) - saved.keys())):
            return f"{left[0]}: what is loaded has nothing of what {self.kind} keeps of a parameter ({sorted(example)})"
        for name, facts in saved.items():
            if not isinstance(facts, dict) or facts.keys() != example.keys():
                keys = sorted(facts) if isinstance(facts, dict) else facts
                return f"{name}: {self.kind} keeps {sorted(example)} of a parameter here, {keys} in what is loaded"
            for key, value in facts.items():
                number = isinstance(value, int | float) and not (isinstance(value, float) and math.isnan(value))
                if not (number or (value is None and not isinstance(example[key], Tensor))):
                    return f"{name}: {key} is {str(value)[:80]!r} in what is loaded, expected a number"
        return ""

    def restore(self, saved: Mapping[str, Any], begun: Collection[str]) -> None:
        """See ``Arithmetic``."""
        known: dict[str, Facts] = {}
        self._facts = {name: facts for name, facts in self._facts.items() if name in begun}
        for name, facts in saved.items():
            made = {key: _like(value, self._learnt.facts[key]) for key, value in facts.items()}
            self._facts[name] = known.setdefault(repr(sorted(facts.items())), made)

    def facts_of(self, name: str) -> Facts | None:
        """See ``Arithmetic``."""
        return self._facts.get(name)

    def example_facts(self) -> Facts:
        """See ``Arithmetic``."""
        return copy.deepcopy(self._learnt.facts)


@dataclass(frozen=True)
class _ClassAction:
    """A step of one group by its class."""

    arithmetic: Elementwise
    index: int
    noise: Noise | None

    def __call__(
        self, flats: Mapping[str, Tensor], spans: Spans, *, factor: Tensor | None = None, skip: Tensor | None = None
    ) -> None:
        """See ``Action``."""
        if skip is None or not bool(skip):
            self.arithmetic.apply(self.index, flats, spans, factor, self.noise)


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer group without its parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def same(one: Any, other: Any) -> bool:
    """Whether two options or facts are equal; NaN is equal to itself."""
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        tensors = isinstance(one, Tensor) and isinstance(other, Tensor)
        return tensors and torch.equal(one.nan_to_num(), other.nan_to_num())
    return repr(one) == repr(other)


def _like(value: Any, example: Any) -> Any:
    if isinstance(example, Tensor) and value is not None:
        return torch.full_like(example, value)
    return type(example)(value) if type(example) in (int, float, bool) and value is not None else value
