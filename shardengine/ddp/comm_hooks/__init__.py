"""Communication hooks: what travels when gradients are reduced.

hook             what a hook is
floats           fp16 and bf16
blocks           int8 and int4 in blocks
error_feedback   around another one: what was lost is added to the next message
power_sgd        low-rank approximations, which bring the whole sum in rounds
noop             nothing
whole_gradients  functions of the user's, and torch's hooks

Must not know: groups, stages, where gradients rest.
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
    """The hook that the config names, with all of its params; None for none, and where it says what shard groups do
    (ddp/replicas). seed: of what it draws."""
    if name == "none" or name in STEPPING_APART:
        return None
    if name == "noop":
        return NoopHook()
    if name == "power_sgd":
        return PowerSGD(LowRank(**params, seed=seed))
    hook = FloatHook(name) if name in ("fp16", "bf16") else BlockHook(name)
    return ErrorFeedback(hook) if params["error_feedback"] else hook


def bytes_per_element(coding: Coding | None) -> float | None:
    """Of messages, the scales of whole blocks included; None: what travels without a coding."""
    return None if coding is None else coding.bytes_of(BLOCK) / BLOCK


def buffers_per_element(hook: CommHook | None) -> float | None:
    """Bytes that a hook takes for what travels, and as much for what comes, at most; None: what that is without one."""
    return 4.0 if hook is not None and hook.whole_parameters else bytes_per_element(hook)


def kept_bytes(hook: CommHook | None, layout: Layout) -> int:
    """On each rank from step to step, at most: errors of all that is trainable."""
    return 4 * layout.elements(trainable=True) if hook is not None and hook.keeps_errors and layout.ranks > 1 else 0


def said_per_element(hook: CommHook | None, buckets: Sequence[BucketLayout]) -> float | Fraction | None:
    """Bytes that travel in a reduction of ``buckets`` in the present step, by their elements; None: as without one."""
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
