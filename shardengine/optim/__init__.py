"""The update: norm, clipping, the step on shards, loss scale, schedules, and the optimizers that exist only here.

arithmetic         interface for stepping elements; the updates that the kernels implement
elementwise        a class of torch's or of the user's, on slices of parameters
probe              whether a class can be stepped on slices
needs              requirements of an optimizer on a layout
adafactor          Adafactor's arithmetic, with its states of rows and columns
sums               sums over whole parameters, computed from slices: owners, messages
muon               Muon's arithmetic, which needs whole matrices
muon_with_adamw    Muon with AdamW for the rest, as one torch optimizer
matrices           whole matrices, assembled from slices: owners, batches, messages
optimizer          torch's optimizer interface over shards; norm, clipping factor, the order of buckets
options            which values the options of groups may have
resolve            an optimizer in any form that initialize takes, checked
foreign            optimizers of other libraries, by name
averages           moving averages of the weights
agreed_facts       facts of a step that must be the same on every rank, and the message if they are not
update             the step of one bucket, and which of its elements are stepped together
torch_hooks        torch's hooks of an optimizer, and the contents of optimizer.state
in_backward        steps during backward
loss_scale         fp16's scale, and which steps are skipped
lr_schedules       the schedules of the config
lion               Lion as a torch optimizer

Must not know: stages, checkpoints, the engine.
"""

from __future__ import annotations

from shardengine.optim import lr_schedules
from shardengine.optim.arithmetic import check_options
from shardengine.optim.averages import AVERAGE
from shardengine.optim.lion import Lion
from shardengine.optim.loss_scale import LossScaler
from shardengine.optim.matrices import MatrixPlan
from shardengine.optim.muon_with_adamw import MuonWithAdamW, hidden_matrices
from shardengine.optim.needs import Needs
from shardengine.optim.optimizer import EngineCalls, OptimizerForm, ShardedOptimizer
from shardengine.optim.options import check_groups, stays
from shardengine.optim.resolve import check_not_ignored, check_owned, groups_for, lend
from shardengine.optim.update import StepSettings, Verdict

__all__ = [
    "AVERAGE",
    "EngineCalls",
    "Lion",
    "LossScaler",
    "MatrixPlan",
    "MuonWithAdamW",
    "Needs",
    "OptimizerForm",
    "ShardedOptimizer",
    "StepSettings",
    "Verdict",
    "check_groups",
    "check_not_ignored",
    "check_options",
    "check_owned",
    "groups_for",
    "hidden_matrices",
    "lend",
    "lr_schedules",
    "stays",
]
