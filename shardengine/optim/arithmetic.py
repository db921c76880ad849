"""The interface between the step, which knows buckets, groups and step counts, and the arithmetic on elements.

Elements are stepped by an update that ``kernels`` implements, or by a class of torch's or of the user's
(``elementwise``).

Must not know: buckets, which parameters were used, the norm.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from shardengine import kernels
from shardengine.errors import UsageError
from shardengine.kernels import (
    REMAINDER,
    REMAINDER_FORM,
    STATE_NAMES,
    Noise,
    Rule,
    Span,
    Spans,
    StateForm,
    state_forms,
)
from shardengine.sharding import MASTER, WEIGHT, Layout, ParameterSpec

_NOT_DECLARED = ("amsgrad", "differentiable", "capturable")
"""Options of torch's classes that the kernels do not have."""
RESERVED = (WEIGHT, "gradient", "low", MASTER, "ema", REMAINDER)
"""Names of other tensors of an action or of a bucket, which no state of a class may have."""
_OF_STATES = 0x5741_5445  # states are rounded with other random bits than weights
DECOUPLED = "decoupled_weight_decay"
"""The option of torch's Adam and AdamW that says how weights decay."""


class Action(Protocol):
    """The step of the elements of one group and step count. Equal actions do the same."""

    def __call__(
        self, flats: Mapping[str, Tensor], spans: Spans, *, factor: Tensor | None = None, skip: Tensor | None = None
    ) -> None:
        """flats, factor, skip: as in ``kernels.update``."""
        ...


class OnMatrix(Protocol):
    """The part of a step that needs a whole matrix; the parts before and after it work on elements. The messages to the
    matrix's owner and back are bf16."""

    def enter(self, flats: Mapping[str, Tensor], span: Span, *, factor: Tensor | None) -> Tensor:
        """Return the owner's input for the elements ``span``. ``flats`` are not written. factor: as in ``Action``."""
        ...

    def solve(self, matrix: Tensor) -> Tensor:
        """Return the results, one per element. ``matrix`` is whole and has the parameter's shape and strides."""
        ...


class Stepped(NamedTuple):
    """A slice of parameter ``number`` of the layout, stepped by this rank. flats, factor: as in ``Action`` · span: the
    slice's place in them; ``span.first`` is its first element in the parameter."""

    number: int
    flats: Mapping[str, Tensor]
    span: Span
    factor: Tensor | None


class WholeSums(Protocol):
    """Adds up the parts that ranks have of the parameters of one step."""

    numbers: Sequence[int]
    """Numbers of the parameters in the layout, the same on every rank."""
    device: torch.device
    """The device on which sums are added up."""

    def spec(self, number: int) -> ParameterSpec:
        """Return the specification of parameter ``number``."""
        ...

    def slices(self, *, weights: bool) -> Iterator[Stepped]:
        """Yield all slices of those parameters that this rank steps; each is valid until the next one is requested.
        weights: include the weights in ``flats``."""
        ...

    def add(self, parts: Mapping[int, Tensor], length_of: Callable[[ParameterSpec], int]) -> dict[int, Tensor]:
        """Return number of each parameter → its sums over all ranks, fp64 [length]; collective. parts: this rank's
        parts, fp64 [2, length] on ``device``, as ``kernels.join_sums`` takes them."""
        ...


UPDATE = "update"
"""The name, in the flats of an action, of the results that the owners sent back."""


class Arithmetic:
    """The arithmetic of one optimizer. kind: its name in checkpoints."""

    kind: str
    by_parameter = False
    """Whether each span of an action must lie in a single parameter and be numbered."""
    keeps_facts = False
    """Whether it may keep values of parameters as a whole."""
    draws = False
    """Whether states are rounded with random bits; spans must then lie in single parameters and be numbered."""
    by_sums = False
    """Whether a step needs sums over whole parameters, which ``begin_sums`` computes."""
    waits = False
    """Whether the host must know before a step whether it is applied."""

    def state_names(self, groups: list[dict[str, Any]], *, scheduled: bool = False) -> tuple[str, ...]:
        """Return the names of the states of each element. scheduled: a scheduler may later change the options of
        ``groups``."""
        raise NotImplementedError

    def family(self, group: Mapping[str, Any]) -> int:
        """Return a number for the set of states of an element of ``group``. All elements of one bucket have the same
        number."""
        return 0

    def counts_steps(self, group: Mapping[str, Any]) -> bool:
        """Whether torch's class keeps the step count of a parameter of ``group`` among its states, as "step"."""
        return False

    def kernel_of(self, group: Mapping[str, Any]) -> str | None:
        """Return the kind of the kernels' update that steps ``group``; None: another class steps it."""
        return None

    def forms(self, states: Iterable[str]) -> dict[str, StateForm]:
        """Return the stored form of each state, by the name under which it is stored."""
        return state_forms(states, "fp32")

    def action(self, group: dict[str, Any], index: int, step: int, seed: int | None) -> Action:
        """Return step number ``step`` (from 1) of optimizer group ``group``, which has number ``index``. seed: of
        stochastic rounding."""
        raise NotImplementedError

    def on_matrix(self, group: dict[str, Any]) -> OnMatrix | None:
        """Return the computation on whole matrices that precedes the actions of ``group``; None: there is none."""
        return None

    def lay_out(self, layout: Layout, begun: Collection[str], device: torch.device) -> None:
        """Expect spans of this layout from now on. begun: first names of the parameters that were stepped before;
        values kept of others are dropped. device: the mesh's."""

    def begin_step(
        self, groups: Sequence[dict[str, Any]], stepped: Iterable[tuple[str, int]], method: str = "step"
    ) -> None:
        """Begin a step that will be applied. stepped: first names of parameters, each with its group's number."""

    def begin_sums(self, groups: Sequence[dict[str, Any]], steps: Mapping[int, int], sums: WholeSums) -> None:
        """Compute the sums, after ``begin_step``, if ``by_sums``; collective. steps: number of each parameter in the
        layout → the number of this step of it, from 1. Must not write any state."""

    def end_step(self, groups: Sequence[dict[str, Any]]) -> None:
        """End the step: all of its actions are done."""

    def complete(self, group: dict[str, Any]) -> None:
        """Add to ``group``, a new one, the options that it lacks and that differ between groups."""

    def check_extended(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Raise ``UsageError`` if the last of ``groups``, a new one, cannot be stepped with the others."""

    def check_options(self, group: Mapping[str, Any], what: str, index: int, first: Mapping[str, Any]) -> None:
        """Raise ``UsageError`` for an option of ``group`` (number ``index``) that it does not support. what: names the
        call · first: group 0."""

    passed_over: tuple[str, ...] = ()
    """States of its class that are recomputed in each step and so not kept."""
    fact_names: tuple[str, ...] = ()
    """Names of the other states of its class that belong to a parameter as a whole."""
    modes: tuple[str, ...] = ()
    """Calls that exchange the weights for others that the optimizer keeps, "train" and "eval"."""
    moves_weights = True
    """Whether the step or call that has begun writes any element."""

    # State of a parameter as a whole, in addition to its step count: tensors, on every rank

    def whole_shapes(self, shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
        """Return names and shapes of the fp32 tensors that every rank keeps, whole, of a parameter of ``shape``."""
        return {}

    def whole_states(self, spec: ParameterSpec) -> dict[str, Tensor]:
        """Return those tensors, to be read or, between steps, written; zeros if the parameter was not stepped yet."""
        return {}

    # and numbers

    def facts_of(self, name: str) -> dict[str, Any] | None:
        """Return the numbers kept of parameter ``name``; None if it was not stepped yet, {} if none are ever kept."""
        return {}

    def example_facts(self) -> dict[str, Any]:
        """Return an example of those numbers: the right names and types, any values."""
        return {}

    def saved(self) -> dict[str, Any]:
        """Return the numbers of all parameters for a checkpoint: JSON values by first name."""
        return {}

    def problem(self, saved: Mapping[str, Any], begun: Collection[str]) -> str:
        """Return why ``saved`` cannot be restored; "" if it can. begun: as in ``lay_out``."""
        return "" if not saved else f"{self.kind} keeps nothing of parameters here"

    def restore(self, saved: Mapping[str, Any], begun: Collection[str]) -> None:
        """Load the result of ``saved``; drop the numbers of parameters that are not in ``begun``."""


@dataclass(frozen=True)
class KernelAction:
    """An update that the kernels implement. noise, state_noise: as in ``kernels.update``."""

    rule: Rule
    noise: Noise | None
    state_noise: Noise | None = None

    def __call__(
        self, flats: Mapping[str, Tensor], spans: Spans, *, factor: Tensor | None = None, skip: Tensor | None = None
    ) -> None:
        """See ``Action``."""
        kernels.update(
            flats, spans, self.rule, noise=self.noise, state_noise=self.state_noise, factor=factor, skip=skip
        )


class Declared(Arithmetic):
    """The arithmetic of the kernels: AdamW, Adam, SGD and Lion."""

    def __init__(self, kind: str, kept_in: str = "fp32", seed: int = 0, *, splits: bool = False) -> None:
        """kind: a key of STATE_NAMES.

        kept_in: the format of the states, a key of KEPT_IN · seed: for rounding states · splits: keep only the
        remainders of the master weights beside bf16 weights.
        """
        self.kind = kind
        self.kept_in = kept_in
        self._seed = seed ^ _OF_STATES
        self.splits = splits
        self.draws = splits or kept_in != "fp32"

    def state_names(self, groups: list[dict[str, Any]], *, scheduled: bool = False) -> tuple[str, ...]:
        """See ``Arithmetic``. A scheduler may later raise SGD's momentum from 0."""
        accelerates = self.kind != "SGD" or scheduled or any(group["momentum"] for group in groups)
        return (*(STATE_NAMES[self.kind] if accelerates else ()), *([REMAINDER] if self.splits else []))

    def counts_steps(self, group: Mapping[str, Any]) -> bool:
        """See ``Arithmetic``."""
        return self.kind not in ("SGD", "Lion")

    def kernel_of(self, group: Mapping[str, Any]) -> str | None:
        """See ``Arithmetic``."""
        return self.kind

    def action(self, group: dict[str, Any], index: int, step: int, seed: int | None) -> Action:
        """See ``Arithmetic``."""
        noise = None if seed is None else Noise(seed, step)
        state_noise = Noise(self._seed, step) if self.draws else None
        try:
            rule = kernels.rule_for(self.kind, group, step)
        except (TypeError, ValueError, KeyError) as error:
            options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
            raise UsageError(
                f"optimizer group {index}: {self.kind} cannot be stepped with {str(options)[:300]}: expected its "
                f"options as torch has them, numbers that are numbers ({type(error).__name__}: {error})",
                code="optimizer-option-invalid",
            ) from error
        return KernelAction(rule, noise, state_noise)

    def forms(self, states: Iterable[str]) -> dict[str, StateForm]:
        """See ``Arithmetic``."""
        names = list(states)
        forms = state_forms((name for name in names if name != REMAINDER), self.kept_in)
        return forms | {name: REMAINDER_FORM for name in names if name == REMAINDER}

    def check_extended(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """See ``Arithmetic``."""
        self.check_options(groups[-1], "add_param_group", len(groups) - 1, groups[0])

    def check_options(self, group: Mapping[str, Any], what: str, index: int, first: Mapping[str, Any]) -> None:
        """See ``Arithmetic``."""
        check_options(group, what, index, first)


def is_declared(group: Mapping[str, Any], first: Mapping[str, Any]) -> bool:
    """Whether the kernels support the options of ``group``, next to those of group 0."""
    same_decay = bool(group.get(DECOUPLED)) == bool(first.get(DECOUPLED))
    return same_decay and not any(group.get(option) for option in _NOT_DECLARED)


def check_options(group: Mapping[str, Any], optimizer: str, index: int, first: Mapping[str, Any]) -> None:
    """Raise ``UsageError`` for an option of ``group`` (number ``index``) that the kernels do not support.

    first: group 0; weight decay must be decoupled in every group or in none.
    """
    for option in _NOT_DECLARED:
        if group.get(option):
            raise UsageError(
                f"{optimizer}: option {option}=True in group {index} is not in the arithmetic of the other groups; set "
                "it to False, or to True in all groups of the optimizer that initialize is given",
                code="optimizer-groups-differ",
            )
    if bool(group.get(DECOUPLED)) != bool(first.get(DECOUPLED)):
        raise UsageError(
            f"{optimizer}: {DECOUPLED}={group.get(DECOUPLED)} in group {index}, expected {first.get(DECOUPLED)} as "
            "in group 0: one engine runs one kind of optimizer",
            code="optimizer-groups-differ",
        )
