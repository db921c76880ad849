"""The values that options of optimizer groups may have. Owns: which are saved, which stay, the messages about others.

Must not know: which options a class has, files.

[Note: Options that stay] A checkpoint holds JSON, and reading it runs no code. So an option is saved, and compared
between ranks, if it is a number, a string, None, or a tuple, list or dict of these. A tensor of one element is saved as
its number. Functions, classes, dtypes and devices are not saved: a group keeps those it has, as torch's LambdaLR does.
Between ranks they are compared by name. Any other object may hold state that training changes. It is rejected when it
is passed in, not when the first checkpoint is written.
"""

from __future__ import annotations

import functools
import math
import numbers
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardengine.errors import UsageError

_STAYS = (
    types.FunctionType, types.BuiltinFunctionType, functools.partial, type, torch.dtype, torch.device,
    torch.layout, torch.memory_format,
)  # fmt: skip
_NAMES = ("params", "param_names")


def stays(value: Any) -> bool:
    """Whether an option is not saved ([Note: Options that stay])."""
    return isinstance(value, _STAYS)


def check_groups(groups: Sequence[Mapping[str, Any]], call: str, first: int = 0) -> None:
    """Raise ``UsageError`` for an option of ``groups``, from number ``first`` on, that prevents a step or a checkpoint.

    call: for messages.
    """
    for number, group in enumerate(groups[first:], first):
        if "lr" not in group:
            raise UsageError(
                f"{call}: optimizer group {number} has the options {sorted(set(group) - {*_NAMES})}: expected 'lr' "
                "among them, the learning rate, which is shown, scheduled and saved",
                code="optimizer-lr-missing",
            )
        rate_of(group, number, call)
        for key, value in group.items():
            if key not in _NAMES and not stays(value) and (problem := next(_problems(value), "")):
                raise UsageError(
                    f"{call}: option {key!r} of optimizer group {number} {problem}: expected Python's numbers, "
                    "strings, None, or tuples, lists or dicts of them, which checkpoints hold; or a function, class, "
                    "dtype or device, which stays as it is given",
                    code="optimizer-option-not-savable",
                )


def rate_of(group: Mapping[str, Any], number: int, call: str) -> Any:
    """Return the learning rate of ``group`` (number ``number``); raise ``UsageError`` unless it is a finite number.

    None if the optimizer finds its rate itself in each step (``relative_step``).
    """
    rate = group["lr"]
    value = rate.item() if isinstance(rate, Tensor) and rate.numel() == 1 else rate
    if value is None and group.get("relative_step"):
        return None
    if isinstance(value, numbers.Real) and math.isfinite(value):
        return value
    came = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)[:80]
    raise UsageError(
        f"{call}: the learning rate, option 'lr' of optimizer group {number}, is {came}: expected a finite number, or "
        "a tensor of one; set it in engine.optimizer.param_groups, or where the optimizer is made",
        code="optimizer-lr-invalid",
    )


def _problems(value: Any) -> Iterator[str]:
    """Yield the reasons why ``value`` cannot be saved."""
    if isinstance(value, Tensor):
        value = value.item() if value.numel() == 1 else value
    if isinstance(value, float) and math.isnan(value):
        yield "is NaN"
    elif isinstance(value, Tensor):
        yield f"is a tensor of shape {tuple(value.shape)}"
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _problems(each)
    elif isinstance(value, dict):
        for key, each in value.items():
            if not isinstance(key, str | int):
                yield f"has the key {key!r}"
            yield from _problems(each)
    elif not isinstance(value, str | int | float | None):
        kind = type(value)
        where = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
        yield f"is, or holds, {repr(value)[:80]}, of the type {where}{kind.__qualname__}"
