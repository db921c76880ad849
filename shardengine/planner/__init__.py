"""What a run will need before there is a device, a weight or another rank: the engine itself, run dry.

dry_run       some steps of an engine as one rank of many
no_values     tensors that have shapes and no values
absent_ranks  what the other ranks would answer
ledger        what is alive when

Must not know: how ranks are started, how a plan is printed.
"""

from __future__ import annotations

from shardengine.planner.absent_ranks import AbsentMesh, EchoStore, Issued, Silent, SilentWire, absent_mesh
from shardengine.planner.dry_run import DryRun, Place, dry_run
from shardengine.planner.ledger import Ledger, Moment, highest
from shardengine.planner.no_values import NoValues, without_values, without_weights

__all__ = [
    "AbsentMesh",
    "DryRun",
    "EchoStore",
    "Issued",
    "Ledger",
    "Moment",
    "NoValues",
    "Place",
    "Silent",
    "SilentWire",
    "absent_mesh",
    "dry_run",
    "highest",
    "without_values",
    "without_weights",
]
