"""Settings of the config that may change between two steps. Owns: the conditions, and that all ranks change or none.

Must not know: forward, backward, the step.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from shardengine.comm import compare, run_on_all_ranks
from shardengine.config import Config
from shardengine.core import Core, rules_of
from shardengine.ddp import comm_hooks
from shardengine.errors import UsageError


def set_batch(core: Core, config: Config, call: str, *, total: Any = None, micro: Any = None) -> Config:
    """Return the config of the following steps, with another batch size; collective.

    total: samples of a step over all ranks · micro: samples of one micro-batch on one rank. Exactly one of them is
    given.
    """

    def check() -> Config:
        given, stays = micro if total is None else total, ""
        each = core.mesh.ranks * (config.train_micro_batch_size_per_gpu or 1) if micro is None else 1
        if micro is None:
            sizes = f"{core.mesh.ranks} ranks with micro-batches of {config.train_micro_batch_size_per_gpu}"
            stays = f" that {each} divides ({sizes}, which stay)"
        if isinstance(given, bool) or not isinstance(given, int) or given < 1 or given % each:
            raise UsageError(
                f"{call}: expected a number of samples above 0{stays}, got {given!r} (rank {core.mesh.rank}); nothing "
                "has changed",
                code="batch-size-invalid",
            )
        return config.with_batch(core.mesh.ranks, total=total, micro=micro)

    return _follow(core, call, check, f"number of samples given to {call}", micro if total is None else total)


def set_divide_factor(core: Core, config: Config, call: str, factor: Any) -> Config:
    """Return the config of the following steps, which divide sums over ranks by ``factor``; collective."""

    def check() -> Config:
        known = isinstance(factor, int | float) and not isinstance(factor, bool)
        if not known or not 0 < factor < math.inf:
            raise UsageError(
                f"{call}: expected a finite number above 0, got {factor!r} (rank {core.mesh.rank}); nothing has "
                "changed",
                code="divide-factor-invalid",
            )
        if core.step_state.replicas.name:
            raise UsageError(
                f"{call}: expected no comm_hook {core.step_state.replicas.name}, which takes means (rank "
                f"{core.mesh.rank}); nothing has changed",
                code="divide-factor-with-averaging-hook",
            )
        if isinstance(core.reducer.hook, comm_hooks.WholeGradients):
            raise UsageError(
                f"{call}: expected no function from engine.register_comm_hook, which brings a mean that is not divided "
                f"any more (rank {core.mesh.rank}): let that function divide by {factor:g}; nothing has changed",
                code="hook-with-divide-factor",
            )
        return dataclasses.replace(config, gradient_divide_factor=float(factor))

    return _follow(core, call, check, f"factor given to {call}", factor)


def _follow(core: Core, call: str, check: Callable[[], Config], topic: str, given: Any) -> Config:
    """Apply the config that ``check`` returns; collective.

    Raises on all ranks, and changes nothing, if a rank's ``check`` raises or ranks have different values of ``given``.
    """
    core.schedule.finish_open_backward()

    def checked() -> Config:
        core.step_state.require("another setting", call)
        return check()

    new = run_on_all_ranks(core.collectives, call, checked)
    compare(core.collectives, {topic: [str(given)]})
    core.window.resize(new.gradient_accumulation_steps or 1)
    core.reducer.follow(rules_of(new, core.stage, core.mesh.ranks))
    core.pool.clear()  # gradients may have other dtypes now
    return new
