"""The stages: one frozen record each, and the one place where a stage's number is looked at.

    stage   weights after forward   weights after backward   gradients between micro-batches   master weights + state
    0       R                       R                        P                                 R
    1       R                       R                        P                                 S
    2       R                       R                        S                                 S
    3k      R                       S                        S                                 S
    3       S                       S                        S                                 S

R replicated, S sharded, P partial: full size, still to be summed over the ranks. From row to row exactly one letter
changes to S. On a hybrid mesh there is a letter for each axis, inside of a shard group and across the groups:

    stage     weights after forward   weights after backward   gradients between micro-batches   master weights + state
    1 hybrid  R                       R                        P                                 SR
    2 hybrid  R                       R                        SP                                SR
    3k hybrid R                       SR                       SP                                SR
    3 hybrid  SR                      SR                       SP                                SR
    3 hpZ     SR                      S                        S                                 S

placement           the letters, and the collectives that move a bucket from one to another
stage               the record: its letters, the formulas that follow from them
stage0 … stage3     the rows; stage3_keep is 3k, stage3_hpz 3 hpZ
hybrid              from a row to that of a hybrid mesh

Must not know: torch.
"""

from __future__ import annotations

from dataclasses import replace

from shardengine.config import Config
from shardengine.errors import ConfigError
from shardengine.stages.hybrid import hybrid
from shardengine.stages.placement import Axis, Operation, Placement, axes, operation
from shardengine.stages.stage import Stage, Volume
from shardengine.stages.stage0 import STAGE0
from shardengine.stages.stage1 import STAGE1
from shardengine.stages.stage2 import STAGE2
from shardengine.stages.stage3 import STAGE3
from shardengine.stages.stage3_hpz import STAGE3_HPZ
from shardengine.stages.stage3_keep import STAGE3_KEEP

STAGES = {stage.name: stage for stage in (STAGE0, STAGE1, STAGE2, STAGE3_KEEP, STAGE3)}

HYBRID = {stage.name: stage for stage in (*map(hybrid, (STAGE1, STAGE2, STAGE3_KEEP, STAGE3)), STAGE3_HPZ)}

_GRADIENT_LETTER = {"full": Placement.PARTIAL, "sharded": Placement.SHARDED}


def select(config: Config, replicas: int = 1) -> Stage:
    """Return the record that ``config`` asks for; ``gradient_accumulation``, if set, overrides its third letter.

    replicas: the number of shard groups of the mesh; with more than one the mesh is hybrid.
    """
    zero = config.zero_optimization
    name = str(zero.stage) if zero.stage != 3 or zero.stage3_reshard_after_forward else STAGE3_KEEP.name
    if name not in STAGES:
        raise ConfigError(f"zero_optimization.stage: expected one of 0, 1, 2, 3, got {zero.stage!r}")
    stage = STAGES[name]
    if replicas > 1:
        stage = STAGE3_HPZ if zero.zero_hpz_partition_size != 1 else hybrid(stage)
    if config.gradient_accumulation is None:
        return stage
    return replace(stage, gradients=_GRADIENT_LETTER[config.gradient_accumulation])


__all__ = [
    "HYBRID",
    "STAGES",
    "Axis",
    "Operation",
    "Placement",
    "Stage",
    "Volume",
    "axes",
    "operation",
    "select",
]
