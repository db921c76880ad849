"""Communication hooks: what travels when gradients are reduced.

hook             what a hook is
floats           fp16 and bf16
blocks           int8 and int4 in blocks
error_feedback   around another one: what was lost is added to the next message
noop             nothing
whole_gradients  functions of the user's, and torch's hooks

Must not know: groups, stages, where gradients rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardengine.comm import Coding
from shardengine.config import STEPPING_APART
from shardengine.ddp.comm_hooks.blocks import BLOCK, BlockHook
from shardengine.ddp.comm_hooks.error_feedback import ErrorFeedback
from shardengine.ddp.comm_hooks.floats import FloatHook
from shardengine.ddp.comm_hooks.hook import CommHook, Messages
from shardengine.ddp.comm_hooks.noop import NoopHook
from shardengine.ddp.comm_hooks.whole_gradients import FutureWork, GradBucket, WholeGradients


def by_name(name: str, params: Mapping[str, Any]) -> CommHook | None:
    """The hook that the config names; None for none, and where it says what shard groups do (ddp/replicas)."""
    if name == "none" or name in STEPPING_APART:
        return None
    if name == "noop":
        return NoopHook()
    hook = FloatHook(name) if name in ("fp16", "bf16") else BlockHook(name)
    return ErrorFeedback(hook) if params.get("error_feedback", name in ("int8", "int4")) else hook


def bytes_per_element(hook: Coding | None) -> float | None:
    """That travel in a reduction, the scales of whole blocks included; None: what travels without a hook."""
    return None if hook is None else hook.bytes_of(BLOCK) / BLOCK


__all__ = [
    "BlockHook",
    "CommHook",
    "ErrorFeedback",
    "FloatHook",
    "FutureWork",
    "GradBucket",
    "Messages",
    "NoopHook",
    "WholeGradients",
    "by_name",
    "bytes_per_element",
]
