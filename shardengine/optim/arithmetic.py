"""How elements are stepped: by the declared arithmetic of ``kernels``, or (``elementwise``) by a class of torch's or of
the user's. The seam between the step, which knows buckets, groups and counts, and what it does to elements.

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
"""Names in what an action is given, or in what is kept of each element, that no state of a class may have."""
_OF_STATES = 0x5741_5445  # so that what rounds states has other random bits than what rounds weights
DECOUPLED = "decoupled_weight_decay"
"""The option of torch's Adam and AdamW that says how weights decay."""


class Action(Protocol):
    """What one step does to the elements of one group and step count. Equal ones do the same."""

    def __call__(
        self, flats: Mapping[str, Tensor], spans: Spans, *, factor: Tensor | None = None, skip: Tensor | None = None
    ) -> None:
        """flats, factor, skip: as in ``kernels.update``."""
        ...


class OnMatrix(Protocol):
    """The part of a step that needs a whole matrix, between two that need an element each. What goes to the matrix's
    owner and what comes back is bf16."""

    def enter(self, flats: Mapping[str, Tensor], span: Span, *, factor: Tensor | None) -> Tensor:
        """What the owner needs of the elements ``span``. Nothing of ``flats`` is written. factor: as in ``Action``."""
        ...

    def solve(self, matrix: Tensor) -> Tensor:
        """Of the whole matrix, with the parameter's shape and strides, what each element gets back."""
        ...


class Stepped(NamedTuple):
    """What this rank steps of parameter ``number`` of the layout, by itself: flats, and the gradient's factor, as
    actions have them. span: in these, with the parameter's element that comes first."""

    number: int
    flats: Mapping[str, Tensor]
    span: Span
    factor: Tensor | None


class WholeSums(Protocol):
    """Adds up what ranks have of the parameters of one step."""

    numbers: Sequence[int]
    """Of the parameters in the layout, the same on every rank."""
    device: torch.device
    """On which sums are added up."""

    def spec(self, number: int) -> ParameterSpec:
        """Of parameter ``number``."""
        ...

    def slices(self, *, weights: bool) -> Iterator[Stepped]:
        """All that this rank steps of those parameters; each is valid until the next one is asked for. weights: with
        them."""
        ...

    def add(self, parts: Mapping[int, Tensor], length_of: Callable[[ParameterSpec], int]) -> dict[int, Tensor]:
        """Number of each parameter → its sums over all ranks, fp64 [length]; collective. parts: what this rank has of
        them, fp64 [2, length] on ``device``, as ``kernels.join_sums`` takes it."""
        ...


UPDATE = "update"
"""Among the flats of an action: what came back from the owners."""


class Arithmetic:
    """One optimizer's. kind: its name, as checkpoints have it."""

    kind: str
    by_parameter = False
    """Whether an action needs spans that are of single parameters, with their numbers."""
    keeps_facts = False
    """Whether it keeps something of parameters as a whole, or would."""
    draws = False
    """Whether its states are rounded with random bits, for which spans are of single parameters, with their numbers."""
    by_sums = False
    """Whether a step needs sums over whole parameters, which ``begin_sums`` makes."""
    waits = False
    """Whether the host must know before a step whether it is applied."""

    def state_names(self, groups: list[dict[str, Any]], *, scheduled: bool = False) -> tuple[str, ...]:
        """What it keeps of each element. scheduled: a scheduler may yet change the options of ``groups``."""
        raise NotImplementedError

    def family(self, group: Mapping[str, Any]) -> int:
        """A number for what is kept of the elements of ``group``: elements of one bucket have the same."""
        return 0

    def counts_steps(self, group: Mapping[str, Any]) -> bool:
        """Whether torch's class has the engine's count of a parameter's steps among its states of ``group``, as
        "step"."""
        return False

    def kernel_of(self, group: Mapping[str, Any]) -> str | None:
        """The kind of the kernels' update that steps ``group``; None: another class does."""
        return None

    def forms(self, states: Iterable[str]) -> dict[str, StateForm]:
        """What is stored for those ``states``, by name."""
        return state_forms(states, "fp32")

    def action(self, group: dict[str, Any], index: int, step: int, seed: int | None) -> Action:
        """Of step number ``step`` (from 1) of optimizer group ``group``, which has number ``index``. seed: of
        stochastic rounding."""
        raise NotImplementedError

    def on_matrix(self, group: dict[str, Any]) -> OnMatrix | None:
        """What is done to whole matrices before the actions of ``group``; None: these need an element each."""
        return None

    def lay_out(self, layout: Layout, begun: Collection[str], device: torch.device) -> None:
        """Spans are of this layout from now on. begun: the parameters that were stepped before, by first name; what was
        kept of others is forgotten. device: the mesh's."""

    def begin_step(
        self, groups: Sequence[dict[str, Any]], stepped: Iterable[tuple[str, int]], method: str = "step"
    ) -> None:
        """A step begins that will be applied. stepped: first names of parameters, each with its group's number."""

    def begin_sums(self, groups: Sequence[dict[str, Any]], steps: Mapping[int, int], sums: WholeSums) -> None:
        """After ``begin_step``, where ``by_sums``; collective. steps: number of each parameter in the
        layout → which of its steps this is, from 1. Nothing that is kept is written."""

    def end_step(self, groups: Sequence[dict[str, Any]]) -> None:
        """All of its actions are done."""

    def complete(self, group: dict[str, Any]) -> None:
        """Give ``group``, a new one, those options that it does not say and that are not the same in all groups."""

    def check_extended(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """``UsageError`` where the last of ``groups``, a new one, cannot be stepped with the others."""

    def check_options(self, group: Mapping[str, Any], what: str, index: int, first: Mapping[str, Any]) -> None:
        """``UsageError`` for an option of ``group`` (number ``index``) that it does not have. what: names the call ·
        first: group 0."""

    passed_over: tuple[str, ...] = ()
    """What its class has among its states and makes anew in each step."""
    fact_names: tuple[str, ...] = ()
    """What else its class has there of a parameter as a whole."""
    modes: tuple[str, ...] = ()
    """Calls that exchange the weights for others that the optimizer keeps, "train" and "eval"."""
    moves_weights = True
    """Whether what has begun writes anything by element."""

    # What is kept of a parameter beside its step count and what is kept of each element: tensors, on every rank

    def whole_shapes(self, shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the fp32 tensors that every rank keeps of a parameter of that ``shape`` as a whole."""
        return {}

    def whole_states(self, spec: ParameterSpec) -> dict[str, Tensor]:
        """Those tensors, to be read or, between steps, written; zeros where the parameter was not stepped yet."""
        return {}

    # and numbers

    def facts_of(self, name: str) -> dict[str, Any] | None:
        """What is kept of parameter ``name``; None where it was not stepped yet, {} where nothing ever is."""
        return {}

    def example_facts(self) -> dict[str, Any]:
        """Of what kind that is, with any values."""
        return {}

    def saved(self) -> dict[str, Any]:
        """All of that, for a checkpoint: JSON values by first name."""
        return {}

    def problem(self, saved: Mapping[str, Any], begun: Collection[str]) -> str:
        """Why ``saved`` cannot be gone on with; "" where it can. begun: as in ``lay_out``."""
        return "" if not saved else f"{self.kind} keeps nothing of parameters here"

    def restore(self, saved: Mapping[str, Any], begun: Collection[str]) -> None:
        """The opposite of ``saved``; what is not in ``begun`` is forgotten."""


@dataclass(frozen=True)
class KernelAction:
    """An update of the kernels. noise, state_noise: as in ``kernels.update``."""

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
    """The kernels': AdamW, Adam, SGD and Lion."""

    def __init__(self, kind: str, kept_in: str = "fp32", seed: int = 0, *, splits: bool = False) -> None:
        """kind: a key of STATE_NAMES · kept_in: in what states are kept, a key of KEPT_IN · seed: of their rounding ·
        splits: of master weights the remainders are kept beside bf16 weights."""
        self.kind = kind
        self.kept_in = kept_in
        self._seed = seed ^ _OF_STATES
        self.splits = splits
        self.draws = splits or kept_in != "fp32"

    def state_names(self, groups: list[dict[str, Any]], *, scheduled: bool = False) -> tuple[str, ...]:
        """See ``Arithmetic``. A scheduler may yet raise SGD's momentum from 0."""
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
                f"options as torch has them, numbers that are numbers ({type(error).__name__}: {error})"
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
    """Whether the kernels have the options of ``group``, beside those of group 0."""
    same_decay = bool(group.get(DECOUPLED)) == bool(first.get(DECOUPLED))
    return same_decay and not any(group.get(option) for option in _NOT_DECLARED)


def check_options(group: Mapping[str, Any], optimizer: str, index: int, first: Mapping[str, Any]) -> None:
    """``UsageError`` for an option of ``group`` (number ``index``) that the declared arithmetic does not have.

    first: group 0, which says whether weight decay is decoupled in all of them.
    """
    for option in _NOT_DECLARED:
        if group.get(option):
            raise UsageError(
                f"{optimizer}: option {option}=True in group {index} is not in the arithmetic of the other groups; set "
                "it to False, or to True in all groups of the optimizer that initialize is given"
            )
    if bool(group.get(DECOUPLED)) != bool(first.get(DECOUPLED)):
        raise UsageError(
            f"{optimizer}: {DECOUPLED}={group.get(DECOUPLED)} in group {index}, expected {first.get(DECOUPLED)} as "
            "in group 0: one engine runs one kind of optimizer"
        )
