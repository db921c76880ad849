"""The form between another program's checkpoint and ours: names, options and counters, tensors read when asked for.

Must not know: any file format.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

WEIGHT = "weight"


@dataclass(frozen=True)
class ForeignParameter:
    """One parameter of the model.

    names: all of them, the one registered first at the front (tied weights have several) · dtype: of the model's weight
    (bf16, …) · group: of the optimizer, -1: none · steps: of the optimizer · states: "weight" and the optimizer's
    ("exp_avg", …) · read: state → the whole tensor, "weight" in fp32 where there are masters; nothing is kept
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool
    group: int
    steps: int
    states: tuple[str, ...]
    read: Callable[[str], Tensor]


@dataclass(frozen=True)
class Foreign:
    """A checkpoint of another program.

    source: a phrase, "DeepSpeed 0.19.8, ZeRO stage 2, 2 ranks" · kind: the optimizer's class here, None: no optimizer
    state · groups: options of each group by torch's names, JSON only · notes: what was in it and is not taken over
    """

    source: str
    parameters: list[ForeignParameter]
    buffers: dict[str, Tensor]
    kind: str | None
    groups: list[dict[str, Any]]
    global_steps: int
    global_samples: int
    micro_steps: int
    loss_scale: float | None
    notes: list[str]
