"""The public object, and every operation that needs all parts at once.

engine (with inspection, parking, checkpointing)   the public class      given      what initialize is called with
core, assembly, ending     the parts, put together and taken apart        relayout   unfreezing, add_param_group
gathered, whole            whole parameters, gradients and states         recovery   after a fault
formulas, overflow         what the formulas say; what a left-out step says      monitors   numbers of every step

Must not know: files of checkpoints (loaded at the first call), the commands.
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
