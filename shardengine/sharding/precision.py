"""Which dtype everything has, how the loss is scaled and when a step is skipped: what the config says, for torch.

Must not know: buckets, the step itself.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from shardengine.config import Config

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class ScalePolicy:
    """How the scale changes (Micikevicius et al., 2018, section 3.2, with a tolerance).

    initial: the first scale · window: steps without overflow after which it is doubled · hysteresis: overflows until it
    is halved; tolerated ones are forgotten when it is doubled, or with every step without one where ``consecutive`` ·
    delay: so many further steps without overflow before it is doubled first, at the start and after each overflow ·
    minimum: it is never halved below · dynamic: False keeps the initial one · limit: so many skipped steps in a row
    are an error where the scale is not dynamic; 0: none are.
    """

    initial: float = 2.0**16
    window: int = 1000
    hysteresis: int = 2
    minimum: float = 1.0
    consecutive: bool = False
    delay: int = 0
    dynamic: bool = True
    limit: int = 0


@dataclass(frozen=True)
class Precision:
    """Dtypes of one engine.

    cast: of floating parameters, None: their own · inputs: to which the model's floating-point inputs are cast, None:
    they are not · keeps_masters: fp32 master weights for what is not fp32 · seed: of stochastic rounding of weights
    without master, None: to nearest · autocast: what the forward computes in, None: no autocast · scaling: how the loss
    is scaled and when a step is skipped, None: neither · wire: of gradients that are sent, None: the parameter's ·
    reduce: to which sums over ranks are rounded · accumulate: in which gradients wait for
    micro-batches.
    """

    cast: torch.dtype | None = None
    inputs: torch.dtype | None = None
    keeps_masters: bool = True
    seed: int | None = None
    autocast: torch.dtype | None = None
    scaling: ScalePolicy | None = None
    wire: torch.dtype | None = None
    reduce: torch.dtype = torch.float32
    accumulate: torch.dtype = torch.float32

    @property
    def scales_loss(self) -> bool:
        """Whether the loss is multiplied with anything but 1, so that only ``engine.backward`` is right."""
        return self.scaling is not None and (self.scaling.dynamic or self.scaling.initial != 1)

    @property
    def trains_fp16(self) -> bool:
        """Whether parameters may be fp16: their gradients need the loss scale."""
        return self.cast is torch.float16 or self.scales_loss

    def master_dtype(self, weights: torch.dtype, *, copied: bool = False) -> torch.dtype | None:
        """The dtype of what an optimizer steps instead of weights in that dtype; None where it steps these themselves.

        copied: they are stepped in another tier than they are kept in.
        """
        if self.keeps_masters and weights is not torch.float32:
            return torch.float32
        return weights if copied else None

    def forward(self, device: str) -> AbstractContextManager[Any]:
        """What the module's forward runs in; a region of the user's around the engine stays as it is."""
        return nullcontext() if self.autocast is None else torch.autocast(device, self.autocast)


def nonfinite(config: Config) -> str:
    """What happens to a step whose gradients are not finite: "skip", "raise" or "step"."""
    default = "raise" if config.zero_optimization.offload_optimizer.step_in_backward else "skip"
    return config.nonfinite_gradients or default


def of(config: Config) -> Precision:
    """What ``config`` says."""
    fp16, bf16, autocast, types = config.fp16, config.bf16, config.torch_autocast, config.data_types
    limit = {"skip": config.max_nonfinite_steps, "raise": 1, "step": 0}[nonfinite(config)]
    fp16_sums = "fp16" in (config.communication_data_type, types.reduce_dtype, types.grad_accum_dtype)
    scaling = None
    if nonfinite(config) != "step" or fp16_sums:  # what fp16 does not hold is skipped, never trained on
        scaling = ScalePolicy(initial=1.0, dynamic=False, limit=limit)
    if fp16.enabled or (autocast.enabled and autocast.dtype == "float16"):
        scaling = ScalePolicy(
            initial=fp16.loss_scale or 2.0**fp16.initial_scale_power,
            window=fp16.loss_scale_window,
            delay=fp16.loss_scale_delay,
            hysteresis=fp16.hysteresis,
            minimum=fp16.min_loss_scale,
            consecutive=fp16.consecutive_hysteresis,
            dynamic=not fp16.loss_scale,
            limit=limit,
        )
    cast = torch.bfloat16 if bf16.enabled else torch.float16 if fp16.enabled else None
    auto_cast = bf16.auto_cast if bf16.enabled else fp16.auto_cast
    return Precision(
        cast=cast,
        inputs=cast if auto_cast and not autocast.enabled else None,
        keeps_masters=not bf16.enabled or (bf16.master_weights and not bf16.split_masters),
        seed=config.seed if bf16.enabled and bf16.stochastic_rounding else None,
        autocast=getattr(torch, autocast.dtype) if autocast.enabled else None,
        scaling=scaling,
        wire=None if config.communication_data_type is None else _DTYPES[config.communication_data_type],
        reduce=_DTYPES[types.reduce_dtype],
        accumulate=_DTYPES[types.grad_accum_dtype],
    )
