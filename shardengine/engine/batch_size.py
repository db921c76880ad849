"""Other batches, between two steps: how many micro-batches make one, or how large each is. Owns: when that is allowed.

Must not know: forward, backward, the step.
"""

from __future__ import annotations

from typing import Any

from shardengine.comm import compare, run_on_all_ranks
from shardengine.config import Config
from shardengine.engine.assembly import rules_of
from shardengine.engine.core import Core
from shardengine.errors import UsageError


def change(core: Core, config: Config, call: str, *, total: Any = None, micro: Any = None) -> Config:
    """The config of steps from now on, on all ranks or, with an error, on none; collective.

    total: samples of a step over all ranks · micro: samples of one micro-batch on one rank; one of both.
    """
    core.schedule.finish_open_backward()

    def check() -> Config:
        core.step_state.require("another batch size", call)
        given = micro if total is None else total
        each = core.mesh.ranks * (config.train_micro_batch_size_per_gpu or 1) if micro is None else 1
        if isinstance(given, bool) or not isinstance(given, int) or given < 1 or given % each:
            raise UsageError(
                f"{call}: expected a number of samples above 0"
                + (
                    f" that {each} divides ({core.mesh.ranks} ranks with micro-batches of "
                    f"{config.train_micro_batch_size_per_gpu}, which stay)"
                    if micro is None
                    else ""
                )
                + f", got {given!r} (rank {core.mesh.rank}); nothing has changed"
            )
        return config.with_batch(core.mesh.ranks, total=total, micro=micro)

    new = run_on_all_ranks(core.collectives, call, check)
    compare(core.collectives, {f"number of samples given to {call}": [str(micro if total is None else total)]})
    core.window.resize(new.gradient_accumulation_steps or 1)
    core.reducer.follow(rules_of(new, core.stage, core.mesh.ranks))
    core.pool.clear()  # gradients may wait in other dtypes
    return new
