"""The parts below wired to one engine, and every operation that needs all parts at once.

parts               the record of the parts that most files here receive
assembly, closing   the parts put together, and taken down
shard_groups        the mesh of a config: which ranks share shards
kernel_trial        every kernel of a config is called once before training
rebuild             a new layout between steps: unfreezing, add_param_group
gathering           one bucket's tensors whole on every rank
full_access         full_params, full_grads, full_optimizer_state
export              the whole model: state_dict, save_pretrained
adapters            the tensors that peft saves of a model
loading_weights     load_state_dict
optimizer_dict      the optimizer's state dict, to rank 0 and back
optimizer_fit       whether a state dict fits the optimizer
offload_states      freeing the device between two phases of a program, and moving back
comm_hooks          a hook that users register between steps
exchanging          averages of weights in place of the weights, and back
replicas            averages of shard groups that step on their own (local SGD)
recovery            reset(): ranks that stopped at different places, back at one step
inspection          memory(), traffic(), learning rates
formulas            the stage's formulas for an engine
overflow            the messages about a skipped step

Must not know: the files of checkpoints, the public class, the commands.
"""

from __future__ import annotations

from shardengine.core import (
    adapters,
    assembly,
    closing,
    comm_hooks,
    exchanging,
    export,
    full_access,
    loading_weights,
    offload_states,
    optimizer_dict,
    overflow,
    rebuild,
    recovery,
    replicas,
)
from shardengine.core.assembly import rules_of
from shardengine.core.inspection import Inspection, StepReport, attached, check_free
from shardengine.core.parts import Core
from shardengine.core.recovery import ForWith, on_all_ranks, reports_failure, reports_failure_with, telling_all
from shardengine.core.shard_groups import check_beside, check_clips, group_size, in_shard_groups, mesh_of

__all__ = [
    "Core",
    "ForWith",
    "Inspection",
    "StepReport",
    "adapters",
    "assembly",
    "attached",
    "check_beside",
    "check_clips",
    "check_free",
    "closing",
    "comm_hooks",
    "exchanging",
    "export",
    "full_access",
    "group_size",
    "in_shard_groups",
    "loading_weights",
    "mesh_of",
    "offload_states",
    "on_all_ranks",
    "optimizer_dict",
    "overflow",
    "rebuild",
    "recovery",
    "replicas",
    "reports_failure",
    "reports_failure_with",
    "rules_of",
    "telling_all",
]
