"""DeepSpeed's version checks, and its calls for devices and experts that need nothing here.

Must not know: engines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from shardengine.errors import UsageError


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())


def required_torch_version(min_version: Any = None, max_version: Any = None) -> bool:
    """Return whether torch's version is in this range, comparing the first two numbers."""
    here = _numbers(torch.__version__)
    low = min_version is None or here >= _numbers(str(min_version))
    return low and (max_version is None or here <= _numbers(str(max_version)))


class OnDevice:
    """A context manager that makes modules on ``device`` and in ``dtype``."""

    def __init__(self, dtype: torch.dtype | None = None, device: Any = "meta", enabled: bool = True) -> None:
        """enabled: if False, the context does nothing."""
        self._dtype, self._device, self._enabled = dtype, device, enabled
        self._inside = ExitStack()

    def __enter__(self) -> None:
        if not self._enabled:
            return
        if self._dtype is not None:
            self._inside.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(self._dtype)
        self._inside.enter_context(torch.device(self._device))

    def __exit__(self, *exception: Any) -> bool | None:
        return self._inside.__exit__(*exception)


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: Mapping[str, Any] | Sequence[Mapping[str, Any]], max_group_size: float = 0.0
) -> list[dict[str, Any]]:
    """Return the groups unchanged. UsageError if a parameter belongs to an expert that not every rank holds."""
    groups = [param_groups] if isinstance(param_groups, Mapping) else list(param_groups)
    if any(not getattr(each, "allreduce", True) for group in groups for each in group["params"]):
        raise UsageError(
            "split_params_into_different_moe_groups_for_optimizer: expected no parameters of deepspeed.moe.layer.MoE; "
            "every rank holds all experts of the model, and stages 1 to 3 shard them like other weights",
            code="deepspeed-moe-parameters",
        )
    return [dict(group) for group in groups]


_OPTIMIZERS = ("adagrad", "adam", "adamw", "lamb", "lion", "sgd", "muon")
_BACKENDS = {"cuda_version": torch.version.cuda or "0.0", "hip_version": torch.version.hip or "0.0"}
NAMES: dict[str, Any] = {
    "OnDevice": OnDevice,
    "utils.OnDevice": OnDevice,
    "utils.torch.required_torch_version": required_torch_version,
    "moe.utils.split_params_into_different_moe_groups_for_optimizer": (
        split_params_into_different_moe_groups_for_optimizer
    ),
    "git_version_info.torch_info": {
        "version": ".".join(map(str, _numbers(torch.__version__))),
        "bf16_support": True,
        "nccl_version": "0.0",
        **_BACKENDS,
    },
    "runtime.zero.utils.ZeRORuntimeException": UsageError,
    **{f"runtime.config.{name.upper()}_OPTIMIZER": name for name in _OPTIMIZERS},
    "__git_hash__": None,
    "__git_branch__": None,
}
"""Dotted name → the object."""
