"""The table of every key that the JSON config knows. Owns: names, kinds, ranges, defaults and notes.

One row per key: `Key(name, status, kind, default, note)`. The loader (`config/load.py`), the JSON Schema and the frozen
list in the tests are all read from this table, so a key exists in exactly one place. It must not know torch, files or
the dataclasses.

A row's status says what happens when the key is in a file:

    ACTIVE     parsed and used, by the engine or where its note says so by the train command
    LATER      known; accepted while switched off, otherwise "not available yet"
    REFUSED    known from other engines; accepted while switched off, otherwise refused with the reason (`note`)
    NO_EFFECT  known from other engines; accepted, and said once with the reason (`note`)

Keys that `reader.is_comment` knows are no keys at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from shardengine.config import foreign
from shardengine.config.kinds import (
    ANY,
    AUTOCAST_DTYPE,
    BETAS,
    BOOL,
    COUNT,
    DTYPE,
    EVERY,
    GROUP_SIZE,
    NOT_NEGATIVE,
    OBJECT,
    PART,
    PLACE,
    SIZE,
    TEXT,
    UNITS,
    Kind,
    choice,
    integer,
    number,
    optional,
)

TRIPLE = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
"""The batch sizes, any of which may follow from the others."""


class Status(Enum):
    """What becomes of a known key; the module docstring says what each means."""

    ACTIVE = "active"
    LATER = "later"
    REFUSED = "refused"
    NO_EFFECT = "no effect"


@dataclass(frozen=True)
class Key:
    """One key by its dotted name. ``note`` describes it or, for REFUSED and NO_EFFECT, ends a "…, because" sentence.

    ``default`` of a REFUSED key: the values that switch it off, beside those that ``is_off`` knows.
    """

    name: str
    status: Status
    kind: Kind
    default: Any
    note: str


def _rows(status: Status, section: str, rows: Mapping[str, tuple[Kind, Any, str] | tuple[Kind, Any]]) -> Iterable[Key]:
    for name, row in rows.items():
        kind, default, note = row if len(row) == 3 else (*row, "")
        yield Key(f"{section}.{name}" if section else name, status, kind, default, note)


_DERIVED = "derived from the other two"
_ACTIVE_TOP: dict[str, tuple[Kind, Any, str]] = {
    "train_batch_size": (optional(COUNT, _DERIVED), None, "Samples per optimizer step over all ranks."),
    "train_micro_batch_size_per_gpu": (optional(COUNT, _DERIVED), None, "Samples per rank and micro-batch."),
    "gradient_accumulation_steps": (optional(COUNT, _DERIVED), None, "Micro-batches per optimizer step."),
    "gradient_clipping": (NOT_NEGATIVE, 0.0, "Largest global gradient norm; 0 switches clipping off."),
    "nonfinite_gradients": (
        optional(choice("skip", "raise", "step"), "skip; raise with step_in_backward"),
        None,
        "What happens to a step whose gradients hold Inf or NaN: left out on all ranks, an error, or taken anyway.",
    ),
    "max_nonfinite_steps": (
        SIZE,
        20,
        "Steps left out in a row for gradients that are not finite that are an error; 0: never. A dynamic loss scale "
        "has its own end (fp16.min_loss_scale).",
    ),
    "gradient_allreduce_op": (choice("mean", "sum"), "mean", "How the gradients of the ranks are combined."),
    "gradient_accumulation": (
        optional(choice("full", "sharded"), "the stage's third letter"),
        None,
        "How gradients rest between micro-batches: full size and unreduced, or reduced and sharded.",
    ),
    "communication_data_type": (
        optional(DTYPE, "the parameter's dtype"),
        None,
        "The dtype in which gradients are sent and completed; sums are in data_types.reduce_dtype.",
    ),
    "overlap_comm": (BOOL, True, "Communicate while the backward pass computes; never changes a bit of the result."),
    "overlap_param_gather": (
        BOOL,
        False,
        "Stages 1 and 2: step() does not wait for the stepped weights, the next forward does, block by block.",
    ),
    "reproducible": (
        optional(BOOL, "true on gloo, false on NCCL"),
        None,
        "Sum over ranks in the declared order on every backend.",
    ),
    "broadcast_buffers": (BOOL, True, "Rank 0's buffers are all ranks'; off: each keeps, saves and loads its own."),
    "timeout_s": (
        number(0, above=True, below=1e7),
        600.0,
        "Seconds until an unfinished collective is an error; with initialize(mesh=...) the mesh's own number counts.",
    ),
    "debug": (BOOL, False, "Compare sequence numbers and names of collectives across ranks."),
    "seed": (integer(0, 2**63 - 1), 42, "Seed of stochastic rounding, and of the train command's data and dropout."),
    "steps_per_print": (EVERY, 10, "Optimizer steps between two lines of the train command; 0 or Infinity: none."),
    "optimizer.type": (TEXT, None, 'AdamW, Adam (AdamW unless params say "adam_w_mode": false), SGD or Lion.'),
    "optimizer.params": (OBJECT, {}, "The optimizer's hyper-parameters."),
    "scheduler.type": (TEXT, None, "WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle or a torch scheduler class."),
    "scheduler.params": (OBJECT, {}, "The schedule's parameters."),
}
_ACTIVE_ZERO: dict[str, tuple[Kind, Any, str]] = {
    "stage": (integer(0, 3), 0, "0 replicates all; 1 shards optimizer state, 2 gradients too, 3 weights too."),
    "reduce_bucket_size": (COUNT, 12_500_000, "Elements of a gradient bucket, at most."),
    "stage3_prefetch_bucket_size": (SIZE, 12_500_000, "Elements gathered ahead; 0 = no prefetch, else >= one unit."),
    "stage3_reshard_after_forward": (BOOL, True, "Free a unit's weights between its forward and its backward pass."),
    "units": (UNITS, "auto", 'Class names of the modules that are gathered as one; "auto" finds them.'),
}
_ACTIVE_BF16: dict[str, tuple[Kind, Any, str]] = {
    "enabled": (BOOL, False, "Cast fp32 parameters to bf16; optimizers step fp32 master weights."),
    "auto_cast": (BOOL, True, "Cast the model's floating-point inputs to bf16, in containers, too."),
    "master_weights": (BOOL, True, "Step fp32 master weights, not the bf16 weights themselves."),
    "stochastic_rounding": (BOOL, False, "Round stepped bf16 weights up or down at random; without master weights."),
}
_ACTIVE_FP16: dict[str, tuple[Kind, Any, str]] = {
    "enabled": (BOOL, False, "Cast parameters to fp16; optimizers step fp32 master weights; the loss is scaled."),
    "auto_cast": (BOOL, True, "Cast the model's floating-point inputs to fp16, in containers, too."),
    "loss_scale": (number(0, below=3e38), 0.0, "A fixed loss scale; 0: it follows overflows."),
    "initial_scale_power": (integer(0, 127), 16, "The first loss scale is 2 to this power."),
    "loss_scale_window": (COUNT, 1000, "Steps without overflow after which the loss scale is doubled."),
    "hysteresis": (COUNT, 2, "Overflows until the loss scale is halved."),
    "min_loss_scale": (
        number(0, above=True, below=3e38),
        1.0,
        "The loss scale is never halved below this; an overflow there is an error.",
    ),
    "consecutive_hysteresis": (BOOL, False, "Every step without overflow makes the hysteresis whole again."),
}
_ACTIVE_TYPES: dict[str, tuple[Kind, Any, str]] = {
    "grad_accum_dtype": (optional(DTYPE, "fp32"), "fp32", "The dtype in which gradients wait for later micro-batches."),
    "reduce_dtype": (optional(DTYPE, "fp32"), "fp32", "The dtype to which each sum over ranks is rounded."),
}
_ACTIVE_AUTOCAST: dict[str, tuple[Kind, Any, str]] = {
    "enabled": (BOOL, False, "Run the module's forward under torch.autocast."),
    "dtype": (
        AUTOCAST_DTYPE,
        "bfloat16",
        "What autocast computes in; with float16 the loss is scaled as fp16 says.",
    ),
}
_ACTIVE_ACTIVATIONS: dict[str, tuple[Kind, Any, str]] = {
    "enabled": (BOOL, False, "Blocks keep only their inputs for backward, where their forward is computed again."),
    "cpu_offload": (BOOL, False, "What checkpointed blocks keep waits in host memory; only with enabled."),
}
_ACTIVE_CHECKPOINT: dict[str, tuple[Kind, Any, str]] = {
    "async_save": (
        BOOL,
        False,
        "save_checkpoint returns when the weights are copied to host memory; threads do the rest.",
    ),
    "keep_last": (
        optional(COUNT, "all"),
        None,
        "How many checkpoints stay; older ones go when a new one is whole. Tags that were given by name always stay.",
    ),
}
_TIER = choice("none", "cpu", "nvme")
_PATH = optional(TEXT, "needed for nvme")
_ACTIVE_OFFLOAD_OPTIMIZER: dict[str, tuple[Kind, Any, str]] = {
    "device": (_TIER, "none", "Where gradients' shards, master weights and optimizer state rest; the CPU steps them."),
    "nvme_path": (_PATH, None, "A directory on the disk; each rank makes and removes a file of its own in it."),
    "ratio": (PART, 1.0, 'The part, by bytes, that rests there; "auto": as little as device_memory allows.'),
    "device_memory": (
        optional(COUNT, "what is free there at initialize, GPUs only"),
        None,
        'With "ratio": "auto": bytes of the device that model state and the engine\'s buffers may take, per rank.',
    ),
    "pin_memory": (BOOL, True, "What crosses to and from a GPU is in page-locked memory, which it copies faster."),
    "buffer_count": (integer(2), 4, "Host buffers for what is on its way from and to the disk, each of one bucket."),
    "step_in_backward": (
        BOOL,
        False,
        "Stages 1 to 3: what rests there is stepped while backward goes on; then only step() may follow.",
    ),
}
_ACTIVE_OFFLOAD_PARAM: dict[str, tuple[Kind, Any, str]] = {
    "device": (_TIER, "none", "Stage 3: where the shards of the weights rest."),
    "nvme_path": (_PATH, None, "A directory on the disk; each rank makes and removes a file of its own in it."),
    "pin_memory": (BOOL, True, "Shards in host memory are page-locked, which a GPU copies faster."),
    "buffer_count": (integer(2), 5, "Host buffers for what is on its way from and to the disk, each of one bucket."),
}
_ACTIVE_AIO: dict[str, tuple[Kind, Any, str]] = {
    "block_size": (COUNT, 1 << 20, "Bytes of one request to the disk; a multiple of 4096."),
    "queue_depth": (COUNT, 8, "Reads, and as many writes, that are with the disk at the same time."),
    "thread_count": (COUNT, 1, "Checksums that are taken at the same time."),
}
_ACTIVE_MONITOR: dict[str, tuple[Kind, Any, str]] = {
    "enabled": (BOOL, False, "Rank 0 writes the numbers of every optimizer step."),
    "output_path": (PLACE, None, "The directory that holds the job's; null: the working directory."),
    "job_name": (TEXT, "shardengine", "The name of the job's directory in output_path."),
}
MONITORS = ("csv", "jsonl", "tensorboard")
"""The monitors that are built: sections of "monitor"."""
_LATER: dict[str, dict[str, tuple[Kind, Any]]] = {
    "": {"static_graph": (BOOL, False)},
    "torch_autocast": {"lower_precision_safe_modules": (ANY, None)},
    "zero_optimization": {
        "zero_hpz_partition_size": (COUNT, 1),
        "shard_group_size": (GROUP_SIZE, "all"),
        "zero_quantized_weights": (BOOL, False),
        "zero_quantized_gradients": (BOOL, False),
    },
    "comm_hook": {"name": (TEXT, "none"), "params": (OBJECT, None)},
}
KEYS: dict[str, Key] = {
    key.name: key
    for rows in (
        _rows(Status.ACTIVE, "", _ACTIVE_TOP),
        _rows(Status.ACTIVE, "zero_optimization", _ACTIVE_ZERO),
        _rows(Status.ACTIVE, "bf16", _ACTIVE_BF16),
        _rows(Status.ACTIVE, "fp16", _ACTIVE_FP16),
        _rows(Status.ACTIVE, "data_types", _ACTIVE_TYPES),
        _rows(Status.ACTIVE, "torch_autocast", _ACTIVE_AUTOCAST),
        _rows(Status.ACTIVE, "activation_checkpointing", _ACTIVE_ACTIVATIONS),
        _rows(Status.ACTIVE, "checkpoint", _ACTIVE_CHECKPOINT),
        _rows(Status.ACTIVE, "zero_optimization.offload_optimizer", _ACTIVE_OFFLOAD_OPTIMIZER),
        _rows(Status.ACTIVE, "zero_optimization.offload_param", _ACTIVE_OFFLOAD_PARAM),
        _rows(Status.ACTIVE, "aio", _ACTIVE_AIO),
        *(_rows(Status.ACTIVE, f"monitor.{name}", _ACTIVE_MONITOR) for name in MONITORS),
        *(_rows(Status.LATER, section, keys) for section, keys in _LATER.items()),
        *(
            _rows(Status.REFUSED, section, {name: (ANY, *row) for name, row in keys.items()})
            for section, keys in foreign.REFUSED.items()
        ),
        *(
            _rows(Status.NO_EFFECT, section, {name: (ANY, None, why) for name, why in keys.items()})
            for section, keys in foreign.NO_EFFECT.items()
        ),
    )
    for key in rows
}
"""Every known key by its dotted name."""

SECTIONS: frozenset[str] = frozenset(name[:dot] for name in KEYS for dot in range(len(name)) if name[dot] == ".")
"""Every dotted name whose value is an object with declared keys."""

GATES: dict[str, str] = {
    section: gate for section, keys in _LATER.items() for gate in ("enabled", "device", "name") if gate in keys
}
"""Sections of later features -> the key that switches the whole section on; the others mean nothing without it."""


_COMMON: dict[str, tuple[Kind, Any]] = {"lr": (NOT_NEGATIVE, 1e-3), "maximize": (BOOL, False)}
_ADAM: dict[str, tuple[Kind, Any]] = {**_COMMON, "betas": (BETAS, (0.9, 0.999)), "eps": (NOT_NEGATIVE, 1e-8)}

OPTIMIZERS: dict[str, dict[str, tuple[Kind, Any]]] = {
    "AdamW": {**_ADAM, "weight_decay": (NOT_NEGATIVE, 0.01)},
    "Adam": {**_ADAM, "weight_decay": (NOT_NEGATIVE, 0.0)},
    "SGD": {
        **_COMMON,
        "momentum": (NOT_NEGATIVE, 0.0),
        "dampening": (number(0), 0.0),
        "weight_decay": (NOT_NEGATIVE, 0.0),
        "nesterov": (BOOL, False),
    },
    "Lion": {**_COMMON, "lr": (NOT_NEGATIVE, 1e-4), "betas": (BETAS, (0.9, 0.99)), "weight_decay": (NOT_NEGATIVE, 0.0)},
}
"""The optimizers of this version: name -> hyper-parameter -> (kind, default as in torch.optim; Lion's authors')."""

OPTIMIZERS_LATER: tuple[str, ...] = (*("Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD", "RMSprop", "Rprop"),)
"""Elementwise optimizers that a later version will run."""
