"""The public object: a table of calls over ``core`` and ``checkpoint``.

engine                  the public class: every method, save_checkpoint and load_checkpoint included
arguments               the arguments of ``initialize``, checked
settings_between_steps  settings that may change between two optimizer steps
joining                 join(): ranks with different numbers of batches
tracing                 the events of all ranks in one file
monitors                destinations of each step's numbers: files, TensorBoard, a user's object
monitor_services        wandb, mlflow, comet_ml
notices                 a run that may not be the intended one, logged once
holding                 an engine that its model holds

Must not know: the commands, the planner.
"""

from __future__ import annotations

from shardengine.engine import arguments, holding
from shardengine.engine.engine import Engine
from shardengine.engine.monitor_services import CometMonitor, WandbMonitor
from shardengine.engine.monitors import Monitor, summary_writer

__all__ = [
    "CometMonitor",
    "Engine",
    "Monitor",
    "WandbMonitor",
    "arguments",
    "holding",
    "summary_writer",
]
