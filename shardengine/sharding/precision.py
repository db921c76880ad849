"""The dtypes of an engine, the scale of the loss, and the rule for skipped steps: the config's settings, for torch.

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
    """How the loss scale changes (Micikevicius et al., 2018, section 3.2, with a tolerance).

    - initial: the first scale.
    - window: steps without overflow after which it is doubled.
    - hysteresis: overflows until it is halved. Tolerated overflows are forgotten when the scale is doubled, or with
      ``consecutive`` at every step without overflow.
    - delay: additional steps without overflow before it is first doubled, at the start and after each overflow.
    - minimum: it is never halved below this.
    - dynamic: False keeps the initial scale.
    - limit: this many skipped steps in a row are an error if the scale is not dynamic; 0: never.
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
    """The dtypes of one engine.

    - cast: of floating-point parameters; None: their own.
    - inputs: the dtype that the model's floating-point inputs are cast to; None: no cast.
    - keeps_masters: weights other than fp32 have fp32 master weights.
    - seed: of stochastic rounding of weights without master; None: rounding to nearest.
    - autocast: the dtype of the forward's computations; None: no autocast.
    - scaling: how the loss is scaled and when a step is skipped; None: neither.
    - wire: of gradients while they are sent; None: the parameter's.
    - reduce: sums over ranks are rounded to it.
    - accumulate: of gradients between micro-batches.
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
        """Whether the loss is multiplied with a factor other than 1. Then only ``engine.backward`` is right."""
        return self.scaling is not None and (self.scaling.dynamic or self.scaling.initial != 1)

    @property
    def trains_fp16(self) -> bool:
        """Whether parameters may be fp16, because the loss is scaled."""
        return self.cast is torch.float16 or self.scales_loss

    def master_dtype(self, weights: torch.dtype, *, copied: bool = False) -> torch.dtype | None:
        """The dtype of master weights for ``weights``; None if the optimizer steps the weights themselves.

        copied: they are stepped in another tier than they are kept in.
        """
        if self.keeps_masters and weights is not torch.float32:
            return torch.float32
        return weights if copied else None

    def forward(self, device: str) -> AbstractContextManager[Any]:
        """The context that the module's forward runs in.

        Without autocast in the config, a region that the user has opened stays active.
        """
        return nullcontext() if self.autocast is None else torch.autocast(device, self.autocast)


def nonfinite(config: Config) -> str:
    """The treatment of a step whose gradients are not finite: "skip", "raise" or "step"."""
    default = "raise" if config.zero_optimization.offload_optimizer.step_in_backward else "skip"
    return config.nonfinite_gradients or default


def of(config: Config) -> Precision:
    """The precision that ``config`` sets."""
    fp16, bf16, autocast, types = config.fp16, config.bf16, config.torch_autocast, config.data_types
    limit = {"skip": config.max_nonfinite_steps, "raise": 1, "step": 0}[nonfinite(config)]
    fp16_sums = "fp16" in (config.communication_data_type, types.reduce_dtype, types.grad_accum_dtype)
    scaling = None
    if nonfinite(config) != "step" or fp16_sums:  # an overflow of fp16 is skipped, never trained on
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
