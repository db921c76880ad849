"""The public object, and every operation that needs all parts at once.

engine              the public class: every method, save_checkpoint and load_checkpoint included
inspection          what it says about itself: memory(), traffic(), learning rates
arguments           what ``initialize`` is called with
core                the record of the parts that most files here are handed
assembly, closing   the parts put together, and taken apart
rebuild             a new layout between steps: unfreezing, add_param_group
gathering           one bucket's tensors whole on every rank
full_access         full_params, full_grads, full_optimizer_state
export              the whole model: state_dict, save_pretrained
adapters            what peft saves of a model
holding             an engine that its model holds
loading_weights     load_state_dict
optimizer_dict      the optimizer's state dict, to rank 0 and back
optimizer_fit       whether one fits
offload_states      freeing the device between two phases of a program, and back
tracing             the events of all ranks in one file
recovery            reset(): ranks that stopped at different places, back at one step
formulas            what the stage's formulas say of an engine
overflow            what is said of a step that was skipped
monitors            where the numbers of every step go
monitor_services    to services: wandb, mlflow, comet_ml
notices             what is said once of a run that may not be the one that was meant

Must not know: the files of checkpoints (loaded at the first call), the commands.
"""

from __future__ import annotations

from shardengine.engine import adapters, arguments, holding
from shardengine.engine.core import Core
from shardengine.engine.engine import Engine
from shardengine.engine.inspection import Inspection, check_free
from shardengine.engine.monitor_services import CometMonitor, WandbMonitor
from shardengine.engine.monitors import Monitor, summary_writer
from shardengine.engine.recovery import on_all_ranks, telling_all
from shardengine.engine.shard_groups import mesh_of

__all__ = [
    "CometMonitor",
    "Core",
    "Engine",
    "Inspection",
    "Monitor",
    "WandbMonitor",
    "adapters",
    "arguments",
    "check_free",
    "holding",
    "mesh_of",
    "on_all_ranks",
    "summary_writer",
    "telling_all",
]
