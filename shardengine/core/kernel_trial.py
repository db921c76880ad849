"""Launches the kernels of a training once on a few elements before it begins, while ranks can still agree.

Owns: the operations that a step needs and their dtypes, as ``ddp/`` and ``optim/update.py`` request them; a test
compares them with those that a training compiles. Must not know: buckets, the implementation of the operations.

Not launched here, and compiled at their first use: operations that the config does not imply (``no_sync()``, late
gradients, an accumulation window that is ended early, clipping by hand, parameters that are unfrozen), and a slice or
parameter of 2^31 elements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardengine import kernels
from shardengine.comm import Collectives
from shardengine.config import Config
from shardengine.ddp import Rules
from shardengine.kernels import Noise, Spans, StateForm
from shardengine.sharding import ParameterSpec, Precision, precision

_FEW = 16
"""Elements of a slice: the least that is aligned."""
_MANY = 65_537
"""Elements whose sum of squares takes two launches."""


@dataclass(frozen=True)
class KernelTrial:
    """The facts that determine the kernels of one engine.

    is_direct, nodes: of ``Collectives`` · several: a step has several micro-batches · leaves: gradients may be summed
    for another device · clips: the update multiplies gradients by a factor · options: of each optimizer group · states:
    the optimizer's states of each element.
    """

    device: torch.device
    ranks: int
    is_direct: Callable[[torch.dtype], bool]
    nodes: Callable[[torch.dtype], int]
    rules: Rules
    precision: Precision
    several: bool
    leaves: bool
    clips: bool
    kind: str | None
    options: Sequence[dict[str, Any]]
    states: Mapping[str, StateForm]

    @classmethod
    def of(
        cls,
        config: Config,
        rules: Rules,
        collectives: Collectives,
        kind: str | None,
        groups: Sequence[dict[str, Any]],
        states: Mapping[str, StateForm],
    ) -> KernelTrial:
        """The trial of an engine. kind: the optimizer's name, None for none · states: its states of each element."""
        mesh = collectives.mesh
        which = precision.of(config)
        leaves = config.zero_optimization.offload_optimizer.device != "none" and mesh.platform.has_own_memory
        clips = bool(config.gradient_clipping) or which.scales_loss
        several = (config.gradient_accumulation_steps or 1) > 1
        summed = (collectives.is_direct, collectives.nodes)
        return cls(mesh.device, mesh.ranks, *summed, rules, which, several, leaves, clips, kind, groups, states)

    def run(self, specs: Iterable[ParameterSpec]) -> None:
        """Launch the kernels. specs: the model's parameters."""
        for dtype in {getattr(torch, spec.dtype) for spec in specs if spec.trainable}:
            for leaves in (False, True) if self.leaves else (False,):
                gradient = self._sum_gradients(dtype, leaves=leaves)
                if self.kind is not None and not leaves:
                    for length in (1, _FEW, _FEW + 1, _MANY):  # parameters have any length
                        kernels.sum_of_squares(self._zeros(gradient, length))
                    if self.kind in kernels.STATE_NAMES:  # any other is a class of torch operations
                        self._update(dtype, gradient)

    def _zeros(self, dtype: torch.dtype, length: int = _FEW) -> Tensor:
        return torch.zeros(length, dtype=dtype, device=self.device)

    def _sum_gradients(self, dtype: torch.dtype, *, leaves: bool) -> torch.dtype:
        """The operations from a gradient in ``dtype`` to the complete gradient. Returns the dtype of the latter."""
        rules, wire = self.rules, self.rules.wire or dtype
        collects = self.several and not rules.sharded
        begun = rules.accumulate if collects else wire
        whole = self._zeros(begun)
        kernels.flatten([self._zeros(dtype)], [0], whole)
        if collects:
            kernels.flatten([self._zeros(dtype)], [0], whole, add=True)
        if begun is not wire:
            kernels.flatten([whole], [0], self._zeros(wire))
        terms = self._terms(wire)
        total = None
        if self.several and rules.sharded:
            total = self._zeros(rules.accumulate)
            kernels.ordered_sum(terms, total, reduce_dtype=rules.reduce)
            kernels.ordered_sum(terms, total, total=total, reduce_dtype=rules.reduce)
        if leaves and total is not None:
            here = self._zeros(torch.float32 if len(terms) > 1 else wire)
            kernels.ordered_sum(terms, here, reduce_dtype=rules.reduce)
            return wire
        rests = rules.accumulate if self.several and not leaves else wire
        complete = self._zeros(rests if rests in (torch.float32, wire) else wire)
        kernels.ordered_sum(
            terms, complete, total=total, divisor=rules.divisor, rounded=wire, reduce_dtype=rules.reduce
        )
        return wire if rules.gathers else complete.dtype

    def _terms(self, wire: torch.dtype) -> list[Tensor]:
        """The terms of a sum over ranks of gradients in dtype ``wire``: the ranks' gradients, or the nodes' sums."""
        nodes = self.nodes(wire)
        if nodes > 1:
            summed = self._zeros(self.rules.reduce, nodes * _FEW)
            count = self.ranks // nodes if self.is_direct(wire) else 1
            inside = self._zeros(wire, count * nodes * _FEW).chunk(count)
            kernels.ordered_sum(inside, summed, reduce_dtype=self.rules.reduce)
            return list(summed.chunk(nodes))
        count = self.ranks if self.is_direct(wire) else 1
        return list(self._zeros(wire, count * _FEW).chunk(count))

    def _update(self, dtype: torch.dtype, gradient: torch.dtype) -> None:
        """The update of weights in ``dtype``, in the first step and in later ones."""
        which, kind = self.precision, self.kind or ""
        master = which.master_dtype(dtype)
        flats = {"weight": self._zeros(master or dtype), "gradient": self._zeros(gradient)}
        flats |= {name: self._zeros(form.dtype) for name, form in self.states.items()}
        if master is None and dtype is not torch.bfloat16:
            flats.pop(kernels.REMAINDER, None)
        if master is not None:
            flats["low"] = self._zeros(dtype)
        noise = None if which.seed is None else Noise(which.seed, 1)
        rounds = any(form.dtype is not torch.float32 for form in self.states.values())
        drawn = Noise(0, 1) if rounds else None
        ends = (_FEW,) if noise is drawn is None else (_FEW, _FEW - 1)  # numbered elements are stepped by parameter
        factor = torch.ones((), device=self.device) if self.clips else None
        skip = None if which.scaling is None else torch.zeros((), dtype=torch.bool, device=self.device)
        rules = [kernels.rule_for(kind, group, step) for group in self.options for step in (1, 2)]
        forms = {(rule.l2 != 0, rule.keep != 0, rule.maximize, rule.nesterov, rule.first): rule for rule in rules}
        for rule in forms.values():
            for end in ends:
                kernels.update(flats, Spans([(0, end)]), rule, factor=factor, skip=skip, noise=noise, state_noise=drawn)
