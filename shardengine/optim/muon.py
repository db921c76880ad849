"""Muon, with AdamW for parameters that are not hidden matrices: the arithmetic on slices and on whole matrices.

Owns: the computation of torch.optim.Muon, divided at the point where an element needs its whole matrix. Must not know:
who owns a matrix, messages, buckets.

[Note: Two thirds by element] Momentum and the direction that is orthogonalized are computed by element. The iteration
begins by rounding the direction to bf16, so the owner of the matrix gets bf16 and no bit is lost. The iteration ends in
bf16, and that result is sent back. The step of the weights is by element again. It computes the momentum a second time
and stores it then, because nothing may be written before all results are there.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardengine.errors import UsageError
from shardengine.kernels import Noise, Span, Spans, StateForm, round_stochastically, state_forms
from shardengine.optim.arithmetic import UPDATE, Action, Arithmetic, Declared, OnMatrix
from shardengine.sharding import Layout

KIND = "Muon"
MOMENTUM = "momentum_buffer"
USES_MUON = "use_muon"
"""The option of a group that says whether Muon steps it; Muon does if the option is missing."""


def uses_muon(group: Mapping[str, Any]) -> bool:
    """Whether Muon steps ``group``, and not the optimizer of the rest."""
    return bool(group.get(USES_MUON, True))


def defaults_of(made_by: Callable[..., torch.optim.Optimizer]) -> dict[str, Any]:
    """Return the default options of one of torch's classes."""
    return dict(made_by([nn.Parameter(torch.zeros(1, 1, device="cpu"))]).defaults)


def complete(group: dict[str, Any], of_muon: Mapping[str, Any] | None, of_rest: Mapping[str, Any] | None) -> None:
    """Give ``group`` the options that it lacks. of_muon, of_rest: the defaults of either kind; None: torch's."""
    given = of_muon if uses_muon(group) else of_rest
    if given is None:
        given = defaults_of(torch.optim.Muon if uses_muon(group) else torch.optim.AdamW)
    for key, value in given.items():
        group.setdefault(key, value)


def check_matrices(group: Mapping[str, Any], what: str) -> None:
    """Raise ``UsageError`` if Muon is to step a parameter that is no matrix. what: names the call."""
    for parameter in group["params"] if uses_muon(group) else ():
        if parameter.dim() != 2:
            raise UsageError(
                f"{what}: Muon steps matrices, got a parameter of shape {tuple(parameter.shape)}: expected it in a "
                f'group with "{USES_MUON}": False, which AdamW steps',
                code="optimizer-muon-not-a-matrix",
            )


def orthogonalized(matrix: Tensor, coefficients: Sequence[float], steps: int, eps: float) -> Tensor:
    """Return ``matrix`` (bf16) after ``steps`` of a quintic Newton-Schulz iteration with these ``coefficients``.

    K. Jordan et al., 2024, https://kellerjordan.github.io/posts/muon; operation by operation as in torch.optim.Muon.
    """
    linear, cubic, quintic = coefficients
    tall = matrix.size(0) > matrix.size(1)
    wide = matrix.T if tall else matrix
    wide = wide.div(wide.norm().clamp(min=eps))
    for _ in range(steps):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=cubic, alpha=quintic), wide, beta=linear)
    return wide.T if tall else wide


def adjusted_rate(rate: float, how: str | None, shape: Sequence[int]) -> float:
    """Return the learning rate for a matrix of ``shape``. how: torch.optim.Muon's ``adjust_lr_fn``."""
    rows, columns = shape
    if how == "match_rms_adamw":
        return rate * (0.2 * math.sqrt(max(rows, columns)))
    if how not in (None, "original"):
        raise UsageError(
            f'Muon: expected adjust_lr_fn to be null, "original" or "match_rms_adamw", got {how!r}',
            code="optimizer-muon-adjust-unknown",
        )
    return rate * math.sqrt(max(1, rows / columns))


class Muon(Arithmetic):
    """torch.optim.Muon's arithmetic for the groups that use it, ``rest`` for the others."""

    by_parameter = True
    waits = True

    def __init__(
        self,
        rest: Declared | None = None,
        of_muon: Mapping[str, Any] | None = None,
        of_rest: Mapping[str, Any] | None = None,
    ) -> None:
        """rest: the arithmetic of the other groups, AdamW by default.

        of_muon, of_rest: default options of new groups, torch's by default.
        """
        self.kind = KIND
        self._rest = rest or Declared("AdamW")
        self.draws = self._rest.draws
        self._defaults = {True: of_muon, False: of_rest}
        self._numbers: list[int] = []
        self._shapes: list[tuple[int, ...]] = []

    def state_names(self, groups: list[dict[str, Any]], *, scheduled: bool = False) -> tuple[str, ...]:
        """See ``Arithmetic``."""
        rest = [group for group in groups if not uses_muon(group)]
        own = (MOMENTUM,) if len(rest) < len(groups) else ()
        return (*own, *(self._rest.state_names(rest, scheduled=scheduled) if rest else ()))

    def family(self, group: Mapping[str, Any]) -> int:
        """See ``Arithmetic``."""
        return 0 if uses_muon(group) else 1

    def counts_steps(self, group: Mapping[str, Any]) -> bool:
        """See ``Arithmetic``. Muon keeps no step count."""
        return not uses_muon(group) and self._rest.counts_steps(group)

    def kernel_of(self, group: Mapping[str, Any]) -> str | None:
        """See ``Arithmetic``."""
        return None if uses_muon(group) else self._rest.kind

    def forms(self, states: Iterable[str]) -> dict[str, StateForm]:
        """See ``Arithmetic``. Momentum is always kept in fp32, whatever the format of the other states."""
        names = list(states)
        found = state_forms([MOMENTUM], "fp32") if MOMENTUM in names else {}
        return found | self._rest.forms(name for name in names if name != MOMENTUM)

    def lay_out(self, layout: Layout, begun: Collection[str], device: torch.device) -> None:
        """See ``Arithmetic``."""
        specs = sorted((spec for spec in layout.parameters if spec.is_stepped), key=lambda spec: spec.number)
        self._numbers, self._shapes = [spec.number for spec in specs], [spec.shape for spec in specs]

    def action(self, group: dict[str, Any], index: int, step: int, seed: int | None) -> Action:
        """See ``Arithmetic``."""
        if not uses_muon(group):
            return self._rest.action(group, index, step, seed)
        return _MuonStep(self, _MuonOptions.of(group), None if seed is None else Noise(seed, step))

    def on_matrix(self, group: dict[str, Any]) -> OnMatrix | None:
        """See ``Arithmetic``."""
        return _MuonOptions.of(group) if uses_muon(group) else None

    def check_extended(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """See ``Arithmetic``."""
        self.check_options(groups[-1], "add_param_group", len(groups) - 1, groups[0])
        check_matrices(groups[-1], "add_param_group")

    def complete(self, group: dict[str, Any]) -> None:
        """See ``Arithmetic``."""
        complete(group, self._defaults[True], self._defaults[False])

    def check_options(self, group: Mapping[str, Any], what: str, index: int, first: Mapping[str, Any]) -> None:
        """See ``Arithmetic``."""
        if uses_muon(group):
            adjusted_rate(0.0, group.get("adjust_lr_fn"), (1, 1))
        else:
            self._rest.check_options(group, what, index, group)

    def shape_at(self, number: int) -> tuple[int, ...]:
        """Return the shape of the parameter that contains the element with this number."""
        return self._shapes[bisect_right(self._numbers, number) - 1]


@dataclass(frozen=True)
class _MuonOptions:
    """The options of a group that uses Muon; the computations before and on whole matrices.

    See [Note: Two thirds by element].
    """

    rate: float
    decay: float
    momentum: float
    nesterov: bool
    coefficients: tuple[float, ...]
    eps: float
    steps: int
    adjusts: str | None

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> _MuonOptions:
        rate = group["lr"]
        return cls(
            rate.item() if isinstance(rate, Tensor) else rate,
            group["weight_decay"],
            group["momentum"],
            group["nesterov"],
            tuple(group["ns_coefficients"]),
            group["eps"],
            group["ns_steps"],
            group["adjust_lr_fn"],
        )

    def enter(self, flats: Mapping[str, Tensor], span: Span, *, factor: Tensor | None) -> Tensor:
        """See ``OnMatrix``."""
        gradient, momentum = self.momentum_after(flats, slice(span.start, span.end), factor)
        direction = gradient.lerp(momentum, self.momentum) if self.nesterov else momentum
        return direction.to(torch.bfloat16)

    def momentum_after(self, flats: Mapping[str, Tensor], cut: slice, factor: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return, for some elements, the gradient times ``factor`` and their momentum after this step."""
        gradient = flats["gradient"][cut].float()
        if factor is not None:
            gradient = gradient * factor
        return gradient, flats[MOMENTUM][cut].lerp(gradient, 1 - self.momentum)

    def solve(self, matrix: Tensor) -> Tensor:
        """See ``OnMatrix``."""
        return orthogonalized(matrix, self.coefficients, self.steps, self.eps)


@dataclass(frozen=True)
class _MuonStep:
    """The step of the weights, once the results of the matrices are back."""

    arithmetic: Muon
    options: _MuonOptions
    noise: Noise | None

    def __call__(
        self, flats: Mapping[str, Tensor], spans: Spans, *, factor: Tensor | None = None, skip: Tensor | None = None
    ) -> None:
        """See ``Action``."""
        if skip is None or not bool(skip):
            for span in spans:
                self._step(flats, span, factor)

    def _step(self, flats: Mapping[str, Tensor], span: Span, factor: Tensor | None) -> None:
        options, cut = self.options, slice(span.start, span.end)
        _, momentum = options.momentum_after(flats, cut, factor)
        flats[MOMENTUM][cut].copy_(momentum)
        stored = flats["weight"][cut]
        weight = stored.float()  # no copy if it is fp32
        rate = adjusted_rate(options.rate, options.adjusts, self.arithmetic.shape_at(span.first))
        weight.mul_(1 - options.rate * options.decay).add_(flats[UPDATE][cut], alpha=-rate)
        if stored.dtype is not torch.float32:
            stored.copy_(weight if self.noise is None else round_stochastically(weight, self.noise, span.first))
        if "low" in flats:
            flats["low"][cut].copy_(weight)
