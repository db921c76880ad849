"""Adafactor as in torch and in transformers: the arithmetic on slices, with its states of rows and columns.

Owns: the step computed from a gradient and the sums of its squares, and the states. Must not know: who adds sums up,
messages, buckets.

[Note: Adafactor] N. Shazeer and M. Stern, Adafactor: Adaptive learning rates with sublinear memory cost (2018,
https://arxiv.org/abs/1804.04235), as implemented by torch.optim.Adafactor and by transformers' class of that name. The
two differ in the place where small numbers are added, in the learning rate, and in names. In step t of a matrix with
gradient g

    kept      = kept + (mean - kept) · t^decay    of each row, and of each column: mean is that of g²
    direction = g · (1 / sqrt(row / mean of rows)) · (1 / sqrt(column))
    weight    = weight - rate · direction / max(1, root mean square of direction / threshold)

In a parameter with fewer than two dimensions every element has a mean of its own. Sums are exact
(``kernels.factored``). Values derived from them are fp64. The states and the elements of a direction are rounded once
to fp32. All else is fp32, and each operation is rounded separately. So no bit depends on how a parameter is sliced. The
classes of torch and transformers add up in fp32, in an order of their own, so their results may differ in the last
bits.

[Note: Everywhere] Rows and columns are few: every rank keeps all of them, in addition to the shards. A step computes
the new ones before it writes anything, and stores them when it ends.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardengine.errors import UsageError
from shardengine.kernels import (
    Factored,
    Noise,
    Span,
    Spans,
    direction_of_slice,
    exact_sum_of_squares,
    join_sums,
    round_stochastically,
    squares_of_direction,
    squares_of_slice,
    step_along,
    sum_over,
)
from shardengine.optim.arithmetic import Action, Arithmetic, Stepped, WholeSums
from shardengine.optim.sums import sums_of
from shardengine.sharding import Layout, ParameterSpec

TORCHS, TRANSFORMERS = "Adafactor", "transformers.Adafactor"
_AVERAGE = "exp_avg"
_NAMES = {TORCHS: ("row_var", "col_var", "variance"), TRANSFORMERS: ("exp_avg_sq_row", "exp_avg_sq_col", "exp_avg_sq")}


def kind_of(made_by: type[torch.optim.Optimizer]) -> str | None:
    """Return which of the two Adafactors a class is; None for any other class."""
    if made_by is torch.optim.Adafactor:
        return TORCHS
    of_library = made_by.__module__ == "transformers.optimization" and made_by.__name__ == "Adafactor"
    return TRANSFORMERS if of_library else None


@dataclass(frozen=True)
class _AdafactorOptions:
    """The options of a group in step number ``step``.

    take: weight of the new mean in the update of a state · added: to means of squares · least: lower bound of a mean
    over rows or columns and of the root that divides the gradient · threshold: of a direction's root mean square ·
    average: decay of the average of directions; None: there is no average.
    """

    step: int
    take: float
    added: float
    least: float
    threshold: float
    sign: float
    average: float | None
    group: Mapping[str, Any]

    @classmethod
    def of(cls, group: Mapping[str, Any], step: int) -> _AdafactorOptions:
        first, _ = group["eps"]
        if "beta2_decay" in group:
            least = torch.finfo(torch.float32).eps if first is None else first
            sign = -1.0 if group["maximize"] else 1.0
            return cls(step, step ** group["beta2_decay"], 0.0, least, group["d"], sign, None, group)
        take = step ** group["decay_rate"]
        return cls(step, take, first, 0.0, group["clip_threshold"], 1.0, group["beta1"], group)

    def rates(self, size: float) -> tuple[float, float]:
        """Return the learning rate of a parameter whose root mean square is ``size``, and the weight decay factor."""
        group, rate = self.group, _number(self.group["lr"])
        if "beta2_decay" in group:
            relative = min(rate, 1 / math.sqrt(self.step))
            return max(group["eps"][1], size) * relative, rate * group["weight_decay"]
        if group["relative_step"]:
            rate = min(1e-6 * self.step if group["warmup_init"] else 1e-2, 1 / math.sqrt(self.step))
        if group["scale_parameter"]:
            rate *= max(group["eps"][1], size)
        return rate, rate * group["weight_decay"]


@dataclass
class _New:
    """Results for one parameter in the running step. kept: its state after the step, fp32 · scales: of rows and
    columns, fp64 · size: the root mean square of its weights · divisor: of its direction."""

    options: _AdafactorOptions
    kept: Tensor
    scales: Tensor
    size: float
    divisor: float = 1.0


class Adafactor(Arithmetic):
    """The arithmetic of [Note: Adafactor]. kind: ``TORCHS`` or ``TRANSFORMERS``."""

    by_parameter = True
    waits = True
    by_sums = True
    passed_over = ("RMS",)

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._specs: list[ParameterSpec] = []
        self._numbers: list[int] = []
        self._kept: dict[str, Tensor] = {}
        self._new: dict[str, _New] = {}

    def state_names(self, groups: list[dict[str, Any]], *, scheduled: bool = False) -> tuple[str, ...]:
        """See ``Arithmetic``."""
        return (_AVERAGE,) if any(group.get("beta1") is not None for group in groups) else ()

    def counts_steps(self, group: Mapping[str, Any]) -> bool:
        """See ``Arithmetic``."""
        return True

    def whole_shapes(self, shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
        """See ``Arithmetic``."""
        rows, columns, single = _NAMES[self.kind]
        if len(shape) < 2:
            return {single: tuple(shape)}
        if self.kind == TORCHS:
            return {rows: (*shape[:-1], 1), columns: (*shape[:-2], 1, shape[-1])}
        return {rows: tuple(shape[:-1]), columns: (*shape[:-2], shape[-1])}

    def whole_states(self, spec: ParameterSpec) -> dict[str, Tensor]:
        """See ``Arithmetic``."""
        form, kept = _form(spec), self._kept[spec.name]
        shapes = self.whole_shapes(spec.shape)
        if not form.is_matrix:
            return {name: kept.view(shape) for name, shape in shapes.items()}
        parts = kept.split([form.all_rows, form.all_columns])
        named = zip(shapes.items(), reversed(parts) if form.turned else parts, strict=True)
        return {name: part.view(shape) for (name, shape), part in named}

    def lay_out(self, layout: Layout, begun: Collection[str], device: torch.device) -> None:
        """See ``Arithmetic``."""
        self._specs = sorted((spec for spec in layout.parameters if spec.is_stepped), key=lambda spec: spec.number)
        self._numbers = [spec.number for spec in self._specs]
        before, self._kept, self._new = self._kept, {}, {}
        for spec in self._specs:
            kept = before.get(spec.name) if spec.name in begun else None
            self._kept[spec.name] = torch.zeros(_kept_of(_form(spec)), device=device) if kept is None else kept

    def check_extended(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """See ``Arithmetic``."""
        self.check_options(groups[-1], "add_param_group", len(groups) - 1, groups[0])

    def check_options(self, group: Mapping[str, Any], what: str, index: int, first: Mapping[str, Any]) -> None:
        """See ``Arithmetic``."""
        if (group.get("beta1") is None) != (first.get("beta1") is None):
            raise UsageError(
                f"{what}: expected beta1 to be None in all groups, or in none, got {group.get('beta1')} in group "
                f"{index} and {first.get('beta1')} in group 0",
                code="optimizer-groups-differ",
            )

    def begin_sums(self, groups: Sequence[dict[str, Any]], steps: Mapping[int, int], sums: WholeSums) -> None:
        """See ``Arithmetic``."""
        self._new = {}
        specs = {number: sums.spec(number) for number in sums.numbers}
        parts: dict[int, Tensor] = {}
        for each in sums.slices(weights=True):
            gradient, form = _gradient(each.flats, each.span, each.factor), _form(specs[each.number])
            squares = squares_of_slice(form, gradient, each.span.first)
            weight = each.flats["weight"][each.span.start : each.span.end].float()
            add_slice(parts, each, torch.cat([squares, exact_sum_of_squares(weight).view(2, 1)], dim=1), sums)
        found = sums.add(parts, sums_of)
        for number, size in _root_mean_squares({n: each[-1:] for n, each in found.items()}, specs).items():
            options = self._options(groups, specs[number].group, steps[number])
            self._new[specs[number].name] = self._advance(specs[number], options, found[number][:-1], size)
        parts = {}
        for each in sums.slices(weights=False):
            gradient, spec = _gradient(each.flats, each.span, each.factor), specs[each.number]
            part = squares_of_direction(_form(spec), gradient, each.span.first, *self._how(spec, gradient.device))
            add_slice(parts, each, part.view(2, 1), sums)
        for number, size in _root_mean_squares(sums.add(parts, lambda _: 1), specs).items():
            new = self._new[specs[number].name]
            new.divisor = max(1.0, size / new.options.threshold)

    def _options(self, groups: Sequence[dict[str, Any]], index: int, step: int) -> _AdafactorOptions:
        try:
            self.check_options(groups[index], "step", index, groups[0])
            return _AdafactorOptions.of(groups[index], step)
        except (TypeError, ValueError, KeyError, IndexError) as error:
            options = {key: value for key, value in groups[index].items() if key not in ("params", "param_names")}
            raise UsageError(
                f"step: optimizer group {index} has other options than {self.kind} takes: expected those that its "
                f"class was made with, numbers where they were numbers, got {str(options)[:300]} ({error})",
                code="optimizer-option-invalid",
            ) from error

    def _advance(self, spec: ParameterSpec, options: _AdafactorOptions, found: Tensor, size: float) -> _New:
        """Return the state after this step. found: sums of squares of the gradient's rows, then of its columns · size:
        as in ``_New``."""
        form = _form(spec)
        count, rows, columns = form.sizes
        of_rows, of_columns = found.split([form.all_rows, form.all_columns])
        means = torch.cat([of_rows / columns, of_columns / rows]) if form.is_matrix else of_rows
        before = self._kept[spec.name].double()
        kept = (before + (means + options.added - before) * options.take).float()
        if not form.is_matrix:
            scales = torch.cat([_inverse_root(kept.double()), found.new_ones(1)])
            return _New(options, kept, scales, size)
        of_rows, of_columns = kept.double().split([form.all_rows, form.all_columns])
        across, along = (of_columns, columns) if form.turned else (of_rows, rows)
        mean = sum_over(across.view(count, along), 1)[0].view(count, 1) / along
        across.view(count, along).div_(mean.clamp_(min=options.least))
        return _New(options, kept, _inverse_root(torch.cat([of_rows, of_columns])), size)

    def _how(self, spec: ParameterSpec, device: torch.device) -> tuple[Tensor, float]:
        """Return the last arguments of ``kernels.direction_of_slice``: scales and the upper bound of their products."""
        new = self._new[spec.name]
        return new.scales.to(device), 1 / new.options.least if new.options.least else math.inf

    def action(self, group: dict[str, Any], index: int, step: int, seed: int | None) -> Action:
        """See ``Arithmetic``."""
        return _AdafactorStep(self, None if seed is None else Noise(seed, step))

    def step_slice(self, flats: Mapping[str, Tensor], span: Span, factor: Tensor | None, noise: Noise | None) -> None:
        """Step elements ``span`` of one parameter. ``span.first`` is a number in the order of all parameters of the
        model."""
        spec = self._specs[bisect_right(self._numbers, span.first) - 1]
        new, cut = self._new[spec.name], slice(span.start, span.end)
        here = Span(span.start, span.end, span.first - spec.number)
        rate, decay = new.options.rates(new.size)
        gradient, stored = _gradient(flats, here, factor), flats["weight"][cut]
        keep, rate = 1 - decay, new.options.sign * rate / new.divisor
        weight = stored.float()  # no copy if it is fp32
        how = (_form(spec), gradient, here.first, *self._how(spec, gradient.device))
        if new.options.average is None:
            step_along(weight, *how, (keep, rate))
        else:
            average, part = flats[_AVERAGE][cut], direction_of_slice(*how).mul_(rate)
            average.mul_(new.options.average).add_(part.mul_(1 - new.options.average))
            weight.mul_(keep).sub_(average)
        if stored.dtype is not torch.float32:
            stored.copy_(weight if noise is None else round_stochastically(weight, noise, span.first))
        if "low" in flats:
            flats["low"][cut].copy_(weight)

    def end_step(self, groups: Sequence[dict[str, Any]]) -> None:
        """See ``Arithmetic``."""
        for name, new in self._new.items():
            self._kept[name].copy_(new.kept)
        self._new = {}


@dataclass(frozen=True)
class _AdafactorStep:
    """The step of the weights, once the sums are known."""

    arithmetic: Adafactor
    noise: Noise | None

    def __call__(
        self, flats: Mapping[str, Tensor], spans: Spans, *, factor: Tensor | None = None, skip: Tensor | None = None
    ) -> None:
        """See ``Action``."""
        if skip is None or not bool(skip):
            for span in spans:
                self.arithmetic.step_slice(flats, span, factor, self.noise)


def _form(spec: ParameterSpec) -> Factored:
    return Factored(spec.shape, spec.order)


def _kept_of(form: Factored) -> int:
    """Return how many numbers are kept of a parameter."""
    return form.all_rows + form.all_columns if form.is_matrix else form.all_rows


def _gradient(flats: Mapping[str, Tensor], span: Span, factor: Tensor | None) -> Tensor:
    given = flats["gradient"][span.start : span.end].float()
    return given if factor is None else given * factor


def _root_mean_squares(squares: Mapping[int, Tensor], specs: Mapping[int, ParameterSpec]) -> dict[int, float]:
    """Return number of each parameter → root mean square. squares: its sum of squares, [1]. The host waits once."""
    means = [each / specs[number].numel for number, each in squares.items()]
    return dict(zip(squares, torch.cat(means).sqrt().tolist(), strict=True)) if means else {}


def _inverse_root(values: Tensor) -> Tensor:
    return values.sqrt().reciprocal()


def add_slice(parts: dict[int, Tensor], each: Stepped, part: Tensor, sums: WholeSums) -> None:
    """Add ``part``, the sums of a slice, to the sums of the parameter's earlier slices."""
    near = part.to(sums.device)
    parts[each.number] = join_sums(parts[each.number], near) if each.number in parts else near


def _number(rate: Any) -> float:
    return math.nan if rate is None else float(rate)  # a rate of None is not used
