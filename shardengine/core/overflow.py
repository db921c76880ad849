"""The messages about a step that was skipped because gradients are not finite.

Must not know: when a step is skipped.
"""

from __future__ import annotations

import logging
from typing import NoReturn

import torch

from shardengine.core.parts import Core
from shardengine.errors import LossScaleError, NonfiniteGradientError
from shardengine.optim import LossScaler, Verdict

_SHOWN = 5
_log = logging.getLogger(__name__)


def describe(core: Core, verdict: Verdict) -> str:
    """Name the first parameters whose complete gradient is not finite; the same text on every rank."""
    squares = verdict.squares
    finite = [] if squares is None else torch.isfinite(squares).tolist()
    found = [index for index, is_finite in enumerate(finite) if not is_finite]
    names = ", ".join(repr(core.layout.parameters[index].name) for index in found[:_SHOWN])
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return f"Inf or NaN in {names}{more}" if found else "finite ones whose norm is larger than fp32 holds"


def report(core: Core, scaler: LossScaler, verdict: Verdict, *, taken: bool = False) -> NoReturn:
    """Raise the error about a step with such gradients, on every rank.

    taken: some buckets may have taken the step already.
    """
    came = f"rank {core.mesh.rank}: expected finite ones, got {describe(core, verdict)}"
    left = "The step was skipped, the weights are those of the last one"
    if scaler.policy.dynamic:
        raise LossScaleError(
            f"gradients are not finite although the loss scale is at its minimum ({scaler.policy.minimum:g}), {came}. "
            f"{left}: look for a division by zero or a learning rate that is too high, or compute in bf16",
            code="grad-nonfinite-at-minimum-scale",
        )
    if taken:
        left = (
            "Buckets may have taken the step in backward (offload_optimizer.step_in_backward): call engine.reset() on "
            "every rank, which goes back to the last step or says that a checkpoint must be loaded"
        )
    limit = scaler.policy.limit
    often = f" in {limit} steps in a row (max_nonfinite_steps)" if limit > 1 else ""
    raise NonfiniteGradientError(
        f"gradients are not finite{often}, {came}. {left}. Look for a division by zero, a logarithm of zero, a "
        "learning rate that is too high or an overflow in a low-precision sum; the config's nonfinite_gradients "
        '("skip", "raise" or "step") says what happens to such a step.',
        code="grad-nonfinite",
    )


def tell(core: Core, verdict: Verdict, step: int, limit: int) -> None:
    """Warn on rank 0 that ``step`` was skipped. limit: this many in a row are an error."""
    found = describe(core, verdict)
    if core.mesh.rank == 0:
        end = f"{limit} in a row are an error (max_nonfinite_steps)" if limit else "they are no error"
        _log.warning(
            "step %d was skipped on all ranks: expected finite gradients, got %s. Weights, optimizer state and "
            'engine.lr_scheduler stay as they were. Later ones are only counted (engine.skipped_steps); %s. '
            '"nonfinite_gradients": "raise" stops at the first.',
            step, found, end,
        )  # fmt: skip
