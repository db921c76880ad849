"""The public object, and every operation that needs all parts at once.

engine              the public class, with inspection, offload_states and checkpointing
arguments           what initialize is called with
core                the parts
assembly, closing   the parts put together, and taken apart
rebuild             a new layout between steps: unfreezing, add_param_group
gathering           one bucket's tensors whole on every rank
full_access         full parameters, gradients and optimizer states inside a with
export              the whole model: state dict, Hugging Face directories
tracing             the events of all ranks in one file
recovery            after a failure
formulas            what the stage's formulas say of an engine
overflow            what a step that was left out says
monitors            where the numbers of every step go

Must not know: the files of checkpoints (loaded at the first call), the commands.
"""

from __future__ import annotations

from shardengine.engine.core import Core
from shardengine.engine.engine import Engine, initialize
from shardengine.engine.inspection import Inspection
from shardengine.engine.monitors import Monitor

__all__ = [
    "Core",
    "Engine",
    "Inspection",
    "Monitor",
    "initialize",
]
