"""The stages: one frozen record each, and the one place where a stage's number is looked at.

    stage   weights after forward   weights after backward   gradients between micro-batches   master weights + state
    0       R                       R                        P                                 R
    1       R                       R                        P                                 S
    2       R                       R                        S                                 S
    3k      R                       S                        S                                 S
    3       S                       S                        S                                 S

R replicated, S sharded, P partial: full size, still to be summed over the ranks. From row to row exactly one letter
falls to S.

placement           the letters, and which collective moves a bucket from one to another
stage               the record: its letters, the formulas that follow from them
stage0 … stage3     the rows; stage3_keep is 3k

Must not know: torch.
"""

from __future__ import annotations

from dataclasses import replace

from shardengine.config import Config
from shardengine.errors import ConfigError
from shardengine.stages.placement import Operation, Placement, operation
from shardengine.stages.stage import Stage, Volume
from shardengine.stages.stage0 import STAGE0
from shardengine.stages.stage1 import STAGE1
from shardengine.stages.stage2 import STAGE2
from shardengine.stages.stage3 import STAGE3
from shardengine.stages.stage3_keep import STAGE3_KEEP

STAGES = {stage.name: stage for stage in (STAGE0, STAGE1, STAGE2, STAGE3_KEEP, STAGE3)}

_GRADIENT_LETTER = {"full": Placement.PARTIAL, "sharded": Placement.SHARDED}


def select(config: Config) -> Stage:
    """The record that ``config`` asks for, its third letter overridden where ``gradient_accumulation`` says so."""
    zero = config.zero_optimization
    name = str(zero.stage) if zero.stage != 3 or zero.stage3_reshard_after_forward else STAGE3_KEEP.name
    if name not in STAGES:
        raise ConfigError(f"zero_optimization.stage: expected one of 0, 1, 2, 3, got {zero.stage!r}")
    if config.gradient_accumulation is None:
        return STAGES[name]
    return replace(STAGES[name], gradients=_GRADIENT_LETTER[config.gradient_accumulation])


__all__ = ["STAGES", "Operation", "Placement", "Stage", "Volume", "operation", "select"]
