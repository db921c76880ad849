"""The intermediate form of another program's checkpoint: names, options and counters; tensors are read on demand.

Must not know: any file format.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shardengine.errors import CheckpointError

_MOST = 1 << 53
KINDS: dict[type, str] = {
    Mapping: "a dict", dict: "a dict", list: "a list", tuple: "a tuple", str: "a string", bool: "true or false",
    int: "a whole number", float: "a number", Tensor: "a tensor",
}  # fmt: skip
"""The names of types in messages."""


@dataclass(frozen=True)
class ForeignParameter:
    """One parameter of the model.

    names: all of them, the one registered first at the front (tied weights have several) · dtype: of the model's weight
    (bf16, …) · group: of the optimizer, -1: none · steps: of the optimizer · states: "weight" and the optimizer's
    ("exp_avg", …) · read: state → the whole tensor, not cached; "weight" is the fp32 master weight if there is one
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool
    group: int
    steps: int
    states: tuple[str, ...]
    read: Callable[[str], Tensor]

    @property
    def is_stepped(self) -> bool:
        """Whether the optimizer steps this parameter."""
        return self.group >= 0


@dataclass(frozen=True)
class Foreign:
    """A checkpoint of another program.

    source: a phrase, "DeepSpeed 0.19.8, ZeRO stage 2, 2 ranks" · kind: the optimizer's class here, None: no optimizer
    state · groups: options of each group by torch's names, JSON only · notes: contents that are not imported, and
    assumptions · client_state: the program's own data, JSON only; a scheduler's state as "lr_scheduler"
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
    client_state: dict[str, Any] = field(default_factory=dict)


def whole_number(value: Any, what: str) -> int:
    """Return ``value``, a number or one-element tensor, as a count; CheckpointError if it is none. what: its name."""
    plain = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    fine = isinstance(plain, int | float) and not isinstance(plain, bool) and 0 <= plain < _MOST
    if not fine or plain != int(plain):
        text = f"a tensor of shape {tuple(plain.shape)}" if isinstance(plain, Tensor) else repr(plain)[:80]
        raise CheckpointError(
            f"{what}: expected a whole number that is not negative, got {text}", code="import-number-invalid"
        )
    return int(plain)


def named(value: Any) -> str:
    """Return the type of ``value`` in words, for a message."""
    if value is None:
        return "nothing"
    return next((name for kind, name in KINDS.items() if isinstance(value, kind)), f"a {type(value).__name__}")


def digest(value: Tensor) -> bytes:
    """Return a hash of the bytes of ``value``; it identifies equal tensors of one dtype and number of elements."""
    return hashlib.blake2b(value.contiguous().reshape(-1).view(torch.uint8).numpy().data, digest_size=32).digest()
