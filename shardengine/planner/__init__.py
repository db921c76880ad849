"""Plans the needs of a run before there is a device, a weight or another rank: the engine itself, run dry.

memory_plan   `shardengine.plan`: the memory that each tier needs, and whether it fits; by a dry run (formulas: budget)
choice        `shardengine.choose`: the fastest config that fits
hardware      ranks and memory, as people write them
machine       the hardware of this machine
automatic     the values that a config leaves to "auto", decided at ``initialize``
amid          planning in a process that trains
comparison    a plan beside its run
batches       a micro-batch for a model of transformers
dry_engine    some steps of an engine as one rank of many
no_disk       a file of the tier nvme that keeps nothing
no_values     tensors that have shapes and no values
absent_ranks  the answers of the other ranks
ledger        the storages that are alive at each moment, and their sum: the peaks
layers        layers that are alike, and the needs of more of them
deep_model    a run of a deep model, by runs of shorter ones
costs         FLOPs and bytes of an operation
tape          the events of a step that take time, in order
rates         declared speeds of hardware
calibration   measured speeds of this machine
replay        when the events of a tape happen

Must not know: how ranks are started, how a plan is printed.
"""

from __future__ import annotations

from shardengine.planner import automatic, batches
from shardengine.planner.absent_ranks import AbsentMesh, EchoStore, Issued, Silent, SilentWire, absent_mesh
from shardengine.planner.amid import plan_amid
from shardengine.planner.calibration import measured, measured_calls
from shardengine.planner.choice import Choice, Question, Undecided, choose, columns_of, global_batch, table_of
from shardengine.planner.comparison import (
    SETTLED_STEPS,
    Comparison,
    Taken,
    compare,
    line_of,
    taken_by,
    watched,
)
from shardengine.planner.dry_engine import DryRun, ModelPlace, dry_run
from shardengine.planner.hardware import Hardware, Link, show_bytes, table
from shardengine.planner.ledger import MemoryLedger, MemoryMoment, highest
from shardengine.planner.machine import this_machine
from shardengine.planner.memory_plan import Plan, PlannedTier, plan, summary_of
from shardengine.planner.no_values import NoValues, without_values, without_weights
from shardengine.planner.rates import Rates
from shardengine.planner.replay import ReplayPart, Times, simulate
from shardengine.planner.tape import Tape

__all__ = [
    "SETTLED_STEPS",
    "AbsentMesh",
    "Choice",
    "Comparison",
    "DryRun",
    "EchoStore",
    "Hardware",
    "Issued",
    "Link",
    "MemoryLedger",
    "MemoryMoment",
    "ModelPlace",
    "NoValues",
    "Plan",
    "PlannedTier",
    "Question",
    "Rates",
    "ReplayPart",
    "Silent",
    "SilentWire",
    "Taken",
    "Tape",
    "Times",
    "Undecided",
    "absent_mesh",
    "automatic",
    "batches",
    "choose",
    "columns_of",
    "compare",
    "dry_run",
    "global_batch",
    "highest",
    "line_of",
    "measured",
    "measured_calls",
    "plan",
    "plan_amid",
    "show_bytes",
    "simulate",
    "summary_of",
    "table",
    "table_of",
    "taken_by",
    "this_machine",
    "watched",
    "without_values",
    "without_weights",
]
