"""deepspeed.ops: optimizers by DeepSpeed's names. The engine steps shards with the arithmetic of torch's optimizers.

Owns: the optimizer that a name makes, and its ``isinstance`` results. Must not know: engines.

[Note: A class that makes another's] ``FusedAdam(parameters)`` returns torch's AdamW, or Adam, which the engine steps
with its kernels. The object remembers the class that made it, and ``isinstance`` with that class is true.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NoReturn

import torch

from shardengine.compat.deepspeed import errors
from shardengine.errors import UsageError
from shardengine.optim import Lion

_MADE_BY = "_deepspeed_class"


class _NamedOptimizer(type):
    """The metaclass of these names ([Note: A class that makes another's])."""

    def __call__(cls, *values: Any, **options: Any) -> Any:
        known = {cls.parameters: errors.NEEDED, **cls.options}  # type: ignore[attr-defined]
        made = cls._make(errors.bound(cls.__name__, known, values, options))  # type: ignore[attr-defined]
        name_as(made, cls)
        return made

    def __instancecheck__(cls, instance: Any) -> bool:
        return issubclass(vars(instance).get(_MADE_BY, object) if hasattr(instance, "__dict__") else object, cls)


def name_as(optimizer: Any, kind: type) -> None:
    """Make ``isinstance(optimizer, kind)`` true from now on."""
    vars(optimizer)[_MADE_BY] = kind


def name_of(optimizer: Any) -> type | None:
    """Return the class of this module that made ``optimizer``; None if there is none."""
    found: type | None = vars(optimizer).get(_MADE_BY) if hasattr(optimizer, "__dict__") else None
    return found


class _Optimizer(metaclass=_NamedOptimizer):
    options: ClassVar[Mapping[str, Any]] = {}
    """Name → default, in order, after the parameters."""
    parameters = "params"
    """The name of the parameters' argument."""

    @classmethod
    def _make(cls, given: dict[str, Any]) -> torch.optim.Optimizer:
        raise NotImplementedError


class _Adam(_Optimizer):
    decoupled = "adamw_mode"

    @classmethod
    def _make(cls, given: dict[str, Any]) -> torch.optim.Optimizer:
        if not given["bias_correction"]:
            raise ValueError(f"{cls.__name__}: expected bias_correction to be true, moments are always bias-corrected")
        kind = torch.optim.AdamW if given[cls.decoupled] else torch.optim.Adam
        options = {name: given[name] for name in ("lr", "betas", "eps", "weight_decay", "amsgrad")}
        return kind(given[cls.parameters], **options)


_ADAM = {"lr": 1e-3, "bias_correction": True, "betas": (0.9, 0.999), "eps": 1e-8}


class FusedAdam(_Adam):
    """Makes torch's AdamW, or Adam without ``adam_w_mode``."""

    options: ClassVar[Mapping[str, Any]] = {
        **_ADAM,
        "adam_w_mode": True,
        "weight_decay": 0.0,
        "amsgrad": False,
        "set_grad_none": True,
    }
    decoupled = "adam_w_mode"


class DeepSpeedCPUAdam(_Adam):
    """Makes torch's AdamW, or Adam without ``adamw_mode``; ``offload_optimizer`` in the config decides its device."""

    options: ClassVar[Mapping[str, Any]] = {
        **_ADAM,
        "weight_decay": 0.0,
        "amsgrad": False,
        "adamw_mode": True,
        "fp32_optimizer_states": True,
    }
    parameters = "model_params"


class _Lion(_Optimizer):
    options: ClassVar[Mapping[str, Any]] = {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.0}

    @classmethod
    def _make(cls, given: dict[str, Any]) -> torch.optim.Optimizer:
        return Lion(given[cls.parameters], **{name: given[name] for name in ("lr", "betas", "weight_decay")})


class DeepSpeedCPULion(_Lion):
    """Makes shardengine.lion.Lion."""

    options: ClassVar[Mapping[str, Any]] = {**_Lion.options, "fp32_optimizer_states": True}
    parameters = "model_params"


class FusedLion(_Lion):
    """Makes shardengine.lion.Lion."""

    options: ClassVar[Mapping[str, Any]] = {**_Lion.options, "set_grad_none": True}


def of_config(section: Any, *, on_host: bool) -> type | None:
    """Return the class of these for the optimizer that a config names, None if none. on_host: it steps on the CPU."""
    name = section.get("type", "") if isinstance(section, Mapping) else ""
    params = (section.get("params") or {}) if isinstance(section, Mapping) else {}
    lower = str(name).lower()
    if lower in ("adam", "adamw") and not params.get("torch_adam"):
        return DeepSpeedCPUAdam if on_host else FusedAdam
    if lower == "lion":
        return DeepSpeedCPULion if on_host else FusedLion
    return None


class _Builder:
    """A builder of compiled operators. There are none here; ``load()`` raises UsageError."""

    NAME = "no operator"
    _here = False

    def is_compatible(self, verbose: bool = False) -> bool:
        """Return whether the feature of this operator is available here."""
        return self._here

    def load(self, verbose: bool = True) -> NoReturn:
        """Raise UsageError: there is no operator to load."""
        raise UsageError(
            f"deepspeed.ops.op_builder: there is no operator {self.NAME} to load; the engine's kernels step torch's "
            "optimizers, and no call of yours has to build them",
            code="deepspeed-no-operator-to-load",
        )


_OPERATORS = {
    "FusedAdam": ("fused_adam", True),
    "CPUAdam": ("cpu_adam", True),
    "FusedLion": ("fused_lion", True),
    "CPULion": ("cpu_lion", True),
    "AsyncIO": ("async_io", True),
    "FusedLamb": ("fused_lamb", False),
    "CPUAdagrad": ("cpu_adagrad", False),
}
"""Name of the builder → (name of the operator, whether its feature is available here)."""
BUILDERS: dict[str, type[_Builder]] = {
    f"{name}Builder": type(f"{name}Builder", (_Builder,), {"NAME": operator, "_here": here})
    for name, (operator, here) in _OPERATORS.items()
}
NAMES: dict[str, Any] = {
    "ops.adam.FusedAdam": FusedAdam,
    "ops.adam.DeepSpeedCPUAdam": DeepSpeedCPUAdam,
    "ops.adam.fused_adam.FusedAdam": FusedAdam,
    "ops.adam.cpu_adam.DeepSpeedCPUAdam": DeepSpeedCPUAdam,
    "ops.lion.FusedLion": FusedLion,
    "ops.lion.DeepSpeedCPULion": DeepSpeedCPULion,
    "ops.__compatible_ops__": dict(_OPERATORS.values()),
    **{f"ops.op_builder.{name}": kind for name, kind in BUILDERS.items()},
    "ops.aio.AsyncIOBuilder": BUILDERS["AsyncIOBuilder"],
}
"""Dotted name → the object."""
