"""Communication hooks: the messages of a reduction of gradients.

hook             the interface of a hook
floats           fp16 and bf16
blocks           int8 and int4 in blocks
error_feedback   around another hook: the error of a message is added to the next one
power_sgd        low-rank approximations, which bring the whole sum in rounds
noop             sends nothing
whole_gradients  functions of the user's, and torch's hooks

Must not know: groups, stages, where gradients are kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from shardengine.comm import Coding
from shardengine.config import STEPPING_APART
from shardengine.ddp.comm_hooks.blocks import BLOCK, BlockHook
from shardengine.ddp.comm_hooks.error_feedback import ErrorFeedback
from shardengine.ddp.comm_hooks.floats import FloatHook
from shardengine.ddp.comm_hooks.hook import CommHook, HookMessages, HookPiece
from shardengine.ddp.comm_hooks.noop import NoopHook
from shardengine.ddp.comm_hooks.power_sgd import LowRank, PowerSGD
from shardengine.ddp.comm_hooks.whole_gradients import FutureWork, GradBucket, WholeGradients
from shardengine.sharding import BucketLayout, Layout


def by_name(name: str, params: Mapping[str, Any], seed: int = 0) -> CommHook | None:
    """Return the hook that the config names, with all of its params.

    None for "none", and for names that make replicas diverge (ddp/replicas). seed: of its random numbers.
    """
    if name == "none" or name in STEPPING_APART:
        return None
    if name == "noop":
        return NoopHook()
    if name == "power_sgd":
        return PowerSGD(LowRank(**params, seed=seed))
    hook = FloatHook(name) if name in ("fp16", "bf16") else BlockHook(name)
    return ErrorFeedback(hook) if params["error_feedback"] else hook


def bytes_per_element(coding: Coding | None) -> float | None:
    """Return the bytes of a message per element, scales of whole blocks included; None: without a coding."""
    return None if coding is None else coding.bytes_of(BLOCK) / BLOCK


def buffers_per_element(hook: CommHook | None) -> float | None:
    """Return the most bytes per element of a hook's send buffer, and of its receive buffer; None: as without a hook."""
    return 4.0 if hook is not None and hook.whole_parameters else bytes_per_element(hook)


def kept_bytes(hook: CommHook | None, layout: Layout) -> int:
    """Return the most bytes that each rank keeps from step to step: errors of all trainable elements."""
    return 4 * layout.elements(trainable=True) if hook is not None and hook.keeps_errors and layout.ranks > 1 else 0


def said_per_element(hook: CommHook | None, buckets: Sequence[BucketLayout]) -> float | Fraction | None:
    """Return the bytes sent per element of ``buckets`` in a reduction of this step; None: as without a hook."""
    if hook is None or (hook.whole_parameters and not hook.in_rounds):
        return None
    if not hook.in_rounds:
        return bytes_per_element(hook)
    return Fraction(sum(hook.bytes_of_bucket(each.index) for each in buckets), sum(each.length for each in buckets))


__all__ = [
    "BlockHook",
    "CommHook",
    "ErrorFeedback",
    "FloatHook",
    "FutureWork",
    "GradBucket",
    "HookMessages",
    "HookPiece",
    "LowRank",
    "NoopHook",
    "PowerSGD",
    "WholeGradients",
    "buffers_per_element",
    "by_name",
    "bytes_per_element",
    "kept_bytes",
    "said_per_element",
]
