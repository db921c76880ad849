"""Find our optimizer for another program's, and the options of its groups, as torch names them.

Must not know: files, tensors of parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any

from torch import Tensor

from shardengine.errors import CheckpointError, UsageError
from shardengine.interchange.foreign import named
from shardengine.kernels import STATE_NAMES
from shardengine.optim import check_options

_ADAM = ("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize")
_TAKEN = {
    "AdamW": _ADAM,
    "Adam": _ADAM,
    "SGD": ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize"),
    "Lion": ("lr", "betas", "weight_decay", "maximize"),
}
_SILENT = frozenset(
    "params param_names step bias_correction decoupled_weight_decay foreach fused capturable differentiable initial_lr "
    "_ds_source_param_group_id".split()
)
"""Keys of a group that name its parameters, choose an implementation or belong to a scheduler; ignored silently."""


def kind_of(groups: list[dict[str, Any]], config: Mapping[str, Any] | None, notes: list[str]) -> str | None:
    """Return our name for the optimizer that ``groups`` belong to; None, with a note, if we have none.

    config: DeepSpeed's "optimizer" section, for groups that do not state whether weight decay is decoupled.
    """
    first = groups[0] if groups else {}
    if any(group.get("bias_correction", True) is not True for group in groups):
        raise UsageError(
            "import: the optimizer works without bias correction (bias_correction), which we do not have",
            code="import-optimizer-without-bias-correction",
        )
    if "betas" in first and "eps" in first and "use_muon" not in first:
        return _adam(groups, config or {}, notes)
    if "betas" in first and first.keys() <= _SILENT.union(_TAKEN["Lion"]):
        return "Lion"
    if "momentum" in first and "dampening" in first:
        return "SGD"
    named = (config or {}).get("type")
    notes.append(
        f"optimizer state: its groups have the options {', '.join(sorted(map(str, first.keys() - _SILENT))) or 'none'}"
        f"{f' (type {named})' if named else ''}, which is none of {', '.join(STATE_NAMES)}; the weights alone are taken"
    )
    return None


def states_of(kind: str | None, groups: list[dict[str, Any]]) -> tuple[str, ...]:
    """Return the states that our ``kind`` keeps for ``groups``; SGD has one only if a group has momentum."""
    if kind == "SGD" and not any(group.get("momentum") for group in groups):
        return ()
    return STATE_NAMES.get(kind or "", ())


def _adam(groups: list[dict[str, Any]], config: Mapping[str, Any], notes: list[str]) -> str:
    said = groups[0].get("decoupled_weight_decay")
    if isinstance(said, bool):
        return "AdamW" if said else "Adam"
    if "bias_correction" in groups[0]:  # DeepSpeed's own: decoupled unless its config disables it
        options = config.get("params")
        mode = options.get("adam_w_mode", True) if isinstance(options, Mapping) else True
        return "AdamW" if mode or str(config.get("type")).lower() == "adamw" else "Adam"
    if str(config.get("type")).lower() == "adamw" or not any(group.get("weight_decay") for group in groups):
        return "AdamW"
    notes.append(
        "optimizer: whether weight decay is decoupled is not said (written by an old torch); AdamW is assumed. Where "
        "it was Adam, its state is the same and only the class differs"
    )
    return "AdamW"


def options_of(groups: list[dict[str, Any]], kind: str, notes: list[str]) -> list[dict[str, Any]]:
    """Return the options of every group as JSON; add those that our optimizer does not have to ``notes``."""
    found: list[dict[str, Any]] = []
    for number, group in enumerate(groups):
        options = {k: _plain(group[k], f"optimizer group {number}: {k}") for k in _TAKEN[kind] if k in group}
        if not isinstance(options.get("lr"), int | float):
            raise CheckpointError(
                f"optimizer group {number}: expected a learning rate (lr), got {options.get('lr')!r}",
                code="import-learning-rate-missing",
            )
        betas = options.get("betas", [0.0, 0.0])
        if not isinstance(betas, list) or len(betas) != 2:
            raise CheckpointError(
                f"optimizer group {number}: expected two numbers as betas, got {betas!r}", code="import-betas-invalid"
            )
        found.append(options)
        check_options(options, f"import of {kind}", number, found[0])
        strange = sorted(str(key) for key in group.keys() - _SILENT.union(_TAKEN[kind]))
        if strange:
            notes.append(f"options of optimizer group {number}: {', '.join(strange)}")
    return found


def _plain(value: Any, what: str) -> Any:
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, tuple | list):
        return [_plain(item, what) for item in value]
    if not isinstance(value, bool | int | float | None):
        raise CheckpointError(f"{what} is {named(value)}, expected a number", code="import-option-not-a-number")
    if isinstance(value, float) and not isfinite(value):
        raise CheckpointError(f"{what} is {value}, expected a finite number", code="import-option-not-finite")
    return value
