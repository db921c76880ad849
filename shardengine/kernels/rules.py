"""The numbers of one optimizer update, computed from a group's options once per step, on the host.

Owns: the formulas that do not depend on an element, their rounding to fp32. The arithmetic per element is
``reference_update``'s ([Note: One update]). Must not know: tensors.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

STATE_NAMES: Mapping[str, tuple[str, ...]] = {
    "AdamW": ("exp_avg", "exp_avg_sq"),
    "Adam": ("exp_avg", "exp_avg_sq"),
    "SGD": ("momentum_buffer",),
    "Lion": ("exp_avg",),
}


class Rule(NamedTuple):
    """One kind's numbers for one step. Every float is an fp32 number; numbers that a kind does not use are 0.

    kind: a key of STATE_NAMES · rate: the factor of the direction · decay: the factor of the weight before the update
    (1: none) · l2: the factor of the weight that is added to the gradient · keep, take: the first moment's factors, of
    its old value and of the gradient (SGD: momentum and 1 - dampening) · keep_square, take_square: the second moment's
    · epsilon: added to its root · maximize, nesterov, first (SGD: its buffer is empty).
    """

    kind: str
    rate: float
    decay: float = 1.0
    l2: float = 0.0
    keep: float = 0.0
    take: float = 0.0
    keep_square: float = 0.0
    take_square: float = 0.0
    epsilon: float = 0.0
    maximize: bool = False
    nesterov: bool = False
    first: bool = False

    @property
    def states(self) -> tuple[str, ...]:
        """The states that the update reads and writes."""
        return () if self.kind == "SGD" and not self.keep else STATE_NAMES[self.kind]


def rule_for(kind: str, group: Mapping[str, Any], step: int) -> Rule:
    """Return the numbers for step ``step`` (from 1) of the group with options ``group``, named as in torch.

    Adam (Kingma & Ba, 2015, in the form that ends its section 2: bias corrections folded into rate and epsilon), AdamW
    (Loshchilov & Hutter, 2019), SGD as in torch.optim, Lion (Chen et al., 2023, arXiv 2302.06675).
    """
    rate, weight_decay = float(group["lr"]), float(group["weight_decay"])
    maximize = bool(group.get("maximize", False))
    decay, l2 = _fp32(1 - rate * weight_decay), _fp32(weight_decay)
    if kind == "SGD":
        momentum, take = _fp32(group["momentum"]), _fp32(1 - float(group["dampening"]))
        nesterov = bool(group["nesterov"])
        return Rule(kind, _fp32(rate), l2=l2, keep=momentum, take=take, maximize=maximize, nesterov=nesterov,
                    first=step == 1)  # fmt: skip
    beta1, beta2 = (float(beta) for beta in group["betas"])
    moments = {"keep": beta1, "take": 1 - beta1, "keep_square": beta2, "take_square": 1 - beta2}
    rounded: dict[str, Any] = {name: _fp32(value) for name, value in moments.items()}
    if kind == "Lion":
        return Rule(kind, _fp32(rate), decay, maximize=maximize, **rounded)
    try:
        root = math.sqrt(1 - beta2**step)
        corrected = rate * root / (1 - beta1**step)
    except (ArithmeticError, ValueError):  # betas that are not in [0, 1)
        root = corrected = math.nan
    rounded |= {"rate": _fp32(corrected), "epsilon": _fp32(float(group["eps"]) * root)}
    return Rule(kind, decay=decay if kind == "AdamW" else 1.0, l2=l2 if kind == "Adam" else 0.0, maximize=maximize,
                **rounded)  # fmt: skip


def _fp32(value: float) -> float:
    return ctypes.c_float(value).value
