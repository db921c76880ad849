"""Every key of the JSON config, once. Owns: names, kinds, ranges, defaults and notes.

A key is a field of its section's dataclass: `name: type = key(default, kind, note)`. The fields define the table that
files are checked with (`KEYS`), the JSON Schema and docs/config.md. Other fields hold sections. Must not know: how a
file is read.

A key's status decides what happens if it is in a file:

    ACTIVE     parsed and used, by the engine or, if the note says so, by the train command
    LATER      known; accepted while switched off, otherwise "not available yet"
    REFUSED    known from other engines; accepted while switched off, otherwise an error with the reason (`note`)
    NO_EFFECT  known from other engines; accepted, and reported once with the reason (`note`)

The last two are rows of `config/foreign.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from enum import Enum
from typing import Any, Literal, NamedTuple, TypeVar

from shardengine.config import foreign
from shardengine.config.kinds import (
    ANY,
    AUTOCAST_DTYPE,
    BETAS,
    BOOL,
    COUNT,
    COUNT_OR_AUTO,
    DTYPE,
    EPSILONS,
    EVERY,
    FRACTION,
    GROUP_SIZE,
    NAMES,
    NORM_TYPE,
    NOT_NEGATIVE,
    NOT_POSITIVE,
    OBJECT,
    PAIR,
    PART,
    PARTITION_SIZE,
    PLACE,
    SIZE,
    SIZE_OR_AUTO,
    STATE_DTYPE,
    TEXT,
    THREE,
    UNITS,
    FrozenMapping,
    Kind,
    Table,
    choice,
    frozen,
    integer,
    name,
    number,
    optional,
)

_T = TypeVar("_T")


def key(default: _T, kind: Kind, note: str) -> _T:
    """A field that is a key of the JSON. note: its description in docs/config.md and the JSON Schema."""
    return field(default=default, metadata={"kind": kind, "note": note})


def switch(default: bool, note: str) -> bool:
    """A key that is true or false."""
    return key(default, BOOL, note)


@dataclass(frozen=True)
class OptimizerConfig:
    """Optimizer by name; ``params`` are keyword arguments of its class."""

    type: str = field(
        metadata={
            "kind": TEXT,
            "note": 'AdamW, Adam (AdamW unless params have "adam_w_mode": false), SGD, Lion; AdamW8bit and Lion8bit '
            "(8-bit states); Muon (hidden matrices; AdamW for all other parameters); Adafactor; Adadelta, Adagrad, "
            "Adamax, ASGD, NAdam, RAdam, RMSprop, Rprop.",
        }
    )
    params: Mapping[str, Any] = key(FrozenMapping(), OBJECT, "The optimizer's hyper-parameters.")

    def __post_init__(self) -> None:
        object.__setattr__(self, "params", frozen(self.params))


@dataclass(frozen=True)
class EmaConfig:
    """An exponential moving average of the weights, kept next to the optimizer state."""

    decay: float | None = key(
        None,
        optional(FRACTION, "no average"),
        "After each step: average = decay · average + (1 - decay) · weights; `engine.ema()` gives access to it.",
    )


@dataclass(frozen=True)
class SchedulerConfig:
    """Learning-rate schedule by name, with its parameters unchanged; `lr_schedules.check` validates both."""

    type: str = field(
        metadata={"kind": TEXT, "note": "WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle or a torch scheduler class."}
    )
    params: Mapping[str, Any] = key(FrozenMapping(), OBJECT, "The schedule's parameters.")

    def __post_init__(self) -> None:
        object.__setattr__(self, "params", frozen(self.params))


_DEVICE = choice("none", "cpu", "nvme")
_PATH = optional(TEXT, "needed for nvme")
_PATH_NOTE = "A directory on the disk; each rank creates its own file in it and removes it."
_BUFFERS_NOTE = "Number of host buffers for transfers from and to the disk, each for one bucket."


@dataclass(frozen=True)
class OffloadOptimizerConfig:
    """Where gradient shards, master weights and optimizer state are kept, and which part of them."""

    device: Literal["none", "cpu", "nvme"] = key(
        "none", _DEVICE, "Where gradient shards, master weights and optimizer state are kept; the CPU steps them."
    )
    nvme_path: str | None = key(None, _PATH, _PATH_NOTE)
    ratio: float | Literal["auto"] = key(
        1.0, PART, 'The part of the bytes that is kept there; "auto": the smallest that device_memory allows.'
    )
    device_memory: int | None = key(
        None,
        optional(COUNT, "60% of its free memory at initialize, GPUs only"),
        'With "ratio": "auto": bytes of device memory per rank for model state and the engine\'s buffers.',
    )
    pin_memory: bool = switch(True, "Use page-locked host memory for transfers to and from a GPU, which is faster.")
    buffer_count: int = key(4, integer(2), _BUFFERS_NOTE)
    step_in_backward: bool = switch(
        False, "Stages 1 to 3: step offloaded buckets during backward. After such a backward only step() may be called."
    )


@dataclass(frozen=True)
class OffloadParamConfig:
    """Where weight shards are kept (stage 3)."""

    device: Literal["none", "cpu", "nvme"] = key("none", _DEVICE, "Stage 3: where weight shards are kept.")
    nvme_path: str | None = key(None, _PATH, _PATH_NOTE)
    pin_memory: bool = switch(True, "Keep weight shards in page-locked host memory, which a GPU copies faster.")
    buffer_count: int = key(5, integer(2), _BUFFERS_NOTE)


@dataclass(frozen=True)
class AioConfig:
    """How files are read and written."""

    block_size: int = key(1 << 20, COUNT, "Bytes per request to the disk; a multiple of 4096.")
    queue_depth: int = key(8, COUNT, "Reads in flight at the same time, and as many writes.")
    thread_count: int = key(1, COUNT, "Checksums computed at the same time.")


_FEEDBACK = {"error_feedback": (BOOL, False)}
COMM_HOOKS: Mapping[str, Table] = {
    "none": {},
    "noop": {},
    "fp16": _FEEDBACK,
    "bf16": _FEEDBACK,
    "int8": {"error_feedback": (BOOL, True)},
    "int4": {"error_feedback": (BOOL, True)},
    "power_sgd": {
        "rank": (COUNT, 1),
        "start_step": (integer(0), 1000),
        "warm_start": (BOOL, True),
        "error_feedback": (BOOL, True),
        "min_compression_rate": (number(1), 2.0),
        "square": (BOOL, False),
    },
    "post_local_sgd": {"start_step": (integer(0), 0), "period": (integer(1), 4)},
    "gossip": {"start_step": (integer(0), 0), "period": (integer(0), 4)},
}
"""Name → kind and default of each of its params."""
_HOOKS = choice(*COMM_HOOKS)
STEPPING_APART = ("post_local_sgd", "gossip")
"""The hooks that let shard groups step independently."""


@dataclass(frozen=True)
class CommHookConfig:
    """The messages that reduce gradients."""

    name: Literal["none", "noop", "fp16", "bf16", "int8", "int4", "power_sgd", "post_local_sgd", "gossip"] = key(
        "none",
        _HOOKS,
        "How gradients are sent. fp16, bf16: in that dtype, overflow becomes the largest number; int8, int4: as "
        "integers in blocks of 256 elements; power_sgd: matrices as products of two thin ones; post_local_sgd, gossip: "
        "a shard group exchanges gradients with no other group, or with one, and the groups are averaged "
        "periodically; noop: not at all, to measure communication.",
    )
    params: Mapping[str, Any] = key(
        FrozenMapping(),
        OBJECT,
        '"error_feedback": add rounding errors to the next message; off by default for fp16 and bf16. '
        'power_sgd also has "rank" (1), "start_step" (1000 uncompressed steps first), "warm_start" (true), '
        '"min_compression_rate" (2) and "square" (false; true reshapes each parameter to a square matrix). '
        'post_local_sgd and gossip have "start_step" (0 steps without the hook first) and "period" (4 steps between '
        "averages; gossip: 0 for none).",
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "params", frozen(self.params))

    @property
    def filled(self) -> dict[str, Any]:
        """``params``, completed with the defaults."""
        return {name: default for name, (_, default) in COMM_HOOKS[self.name].items()} | dict(self.params)


@dataclass(frozen=True)
class ZeroConfig:
    """Sharding, bucket sizes and offload. Sizes are in elements, not bytes."""

    stage: int = key(
        0,
        integer(0, 3),
        '0 replicates everything; 1 shards optimizer state, 2 also gradients, 3 also weights; "auto": a plan decides.',
    )
    reduce_bucket_size: int | Literal["auto"] = key(
        12_500_000,
        COUNT_OR_AUTO,
        "Most elements of a bucket, which is reduced, and at stage 3 gathered, in one collective; the first bucket of "
        'a unit is shorter. "auto": chosen by the measured speed of the group of ranks. Raised to the size of a '
        "parameter that is more than 8 times as large, up to 262,144.",
    )
    recut_buckets: bool = switch(
        True,
        "After the first step rebuild the buckets in the order of the gradients, if more is then sent during backward. "
        "Parameters move in memory, so code that keeps views or addresses of them needs false.",
    )
    stage3_prefetch_bucket_size: int | Literal["auto"] = key(
        12_500_000,
        SIZE_OR_AUTO,
        'Elements to prefetch; 0: no prefetch, otherwise at least one unit; "auto": as many as hide the latency.',
    )
    stage3_reshard_after_forward: bool = switch(
        True, "Free a unit's weights between its forward and its backward pass."
    )
    shard_group_size: Literal["all", "node"] | int = key(
        "all",
        GROUP_SIZE,
        "Number of consecutive ranks that shard the model among themselves; the groups are replicas of each other "
        '(HSDP). "node": the ranks of a node.',
    )
    zero_hpz_partition_size: Literal["node"] | int = key(
        1,
        PARTITION_SIZE,
        "Stage 3: number of consecutive ranks that shard a unit's weights among themselves from its forward to its "
        'backward, so the all-gather of backward stays within them (hpZ). "node": the ranks of a node; 1: off.',
    )
    zero_quantized_weights: bool = switch(
        False, "Stage 3: send weights as 8-bit integers in blocks of 256 elements, and compute with them (ZeRO++)."
    )
    zero_quantized_gradients: bool = switch(
        False, "Send gradients as the comm_hook int8 does, without error feedback (ZeRO++)."
    )
    units: Literal["auto"] | tuple[str, ...] = key(
        "auto", UNITS, 'Class names of modules that are gathered as one unit; "auto" finds them.'
    )
    offload_optimizer: OffloadOptimizerConfig = OffloadOptimizerConfig()
    offload_param: OffloadParamConfig = OffloadParamConfig()


@dataclass(frozen=True)
class Bf16Config:
    """Training in bf16. Without ``master_weights`` the bf16 weights are rounded to nearest or stochastically."""

    enabled: bool = switch(False, "Cast fp32 parameters to bf16; optimizers step fp32 master weights.")
    auto_cast: bool = switch(True, "Cast the model's floating-point inputs to bf16, also in containers.")
    master_weights: bool = switch(True, "Step fp32 master weights instead of the bf16 weights.")
    split_masters: bool = switch(
        False,
        "Store master weights as 8 bits of mantissa beyond the bf16 weights: 1 byte instead of 4. A step rounds them "
        "stochastically to 16 bits of mantissa.",
    )
    stochastic_rounding: bool = switch(
        False, "Round stepped bf16 weights up or down at random; only without master weights."
    )


@dataclass(frozen=True)
class Fp16Config:
    """Training in fp16, and the loss scale (also for fp16 autocast)."""

    enabled: bool = switch(False, "Cast parameters to fp16; optimizers step fp32 master weights; the loss is scaled.")
    auto_cast: bool = switch(True, "Cast the model's floating-point inputs to fp16, also in containers.")
    loss_scale: float = key(0.0, number(0, below=3e38), "A fixed loss scale; 0: a dynamic one.")
    initial_scale_power: int = key(16, integer(0, 127), "The first loss scale is 2 to this power.")
    loss_scale_window: int = key(1000, COUNT, "Number of steps without overflow until the loss scale is doubled.")
    loss_scale_delay: int = key(
        0, SIZE, "Additional steps before the first doubling, at the start and after each overflow; DeepSpeed has 1."
    )
    hysteresis: int = key(2, COUNT, "Number of overflows until the loss scale is halved.")
    min_loss_scale: float = key(
        1.0,
        number(0, above=True, below=3e38),
        "The loss scale is never halved below this; an overflow there is an error.",
    )
    consecutive_hysteresis: bool = switch(False, "Every step without overflow resets the hysteresis.")


@dataclass(frozen=True)
class TypesConfig:
    """Dtypes of gradients during accumulation and reduction, and of the optimizer state."""

    grad_accum_dtype: Literal["fp32", "bf16", "fp16"] = key(
        "fp32", optional(DTYPE, "fp32"), "dtype of accumulated gradients between micro-batches."
    )
    reduce_dtype: Literal["fp32", "bf16", "fp16"] = key(
        "fp32", optional(DTYPE, "fp32"), "dtype of sums over ranks; each addition is rounded to it."
    )
    optimizer_state_dtype: Literal["fp32", "bf16", "8bit"] = key(
        "fp32",
        optional(STATE_DTYPE, "fp32"),
        "dtype of the optimizer state of AdamW, Adam, SGD and Lion. 8bit: blocks of 256 elements, each with a scale. "
        "bf16 and 8bit are rounded stochastically.",
    )


@dataclass(frozen=True)
class AutocastConfig:
    """The region of ``torch.autocast`` around the module's forward."""

    enabled: bool = switch(False, "Run the module's forward under torch.autocast.")
    dtype: Literal["bfloat16", "float16"] = key(
        "bfloat16", AUTOCAST_DTYPE, "dtype of autocast; float16 scales the loss by the section fp16."
    )


@dataclass(frozen=True)
class ActivationsConfig:
    """Which activations blocks keep for backward, and where."""

    enabled: bool = switch(False, "Blocks keep only their inputs for backward, and backward recomputes their forward.")
    cpu_offload: bool = switch(False, "Keep the inputs of checkpointed blocks in host memory; only with enabled.")


@dataclass(frozen=True)
class CheckpointConfig:
    """How checkpoints are written, and how many are kept."""

    async_save: bool = switch(
        False, "save_checkpoint returns once weights and buffers are copied to host memory; threads do the rest."
    )
    keep_last: int | None = key(
        None,
        optional(COUNT, "all"),
        "Number of checkpoints to keep; older ones are removed once a new one is complete. Tags given by name stay.",
    )


@dataclass(frozen=True)
class SinkConfig:
    """One monitor, which writes to ``output_path``/``job_name``."""

    enabled: bool = switch(False, "Rank 0 writes the numbers of every optimizer step.")
    output_path: str | None = key(
        None, PLACE, "Parent of the job's directory. null: the working directory, or the run's directory with `train`."
    )
    job_name: str = key("shardengine", TEXT, "Name of the job's directory in output_path.")


_OF_SERVICE = "the package's own default"


@dataclass(frozen=True)
class WandbConfig:
    """Weights & Biases, by the package wandb, which handles the login."""

    enabled: bool = switch(False, "Rank 0 sends the numbers of every optimizer step to Weights & Biases.")
    project: str | None = key(None, name(_OF_SERVICE), "The run's project.")
    team: str | None = key(None, name(_OF_SERVICE), "The team or user that owns the run.")
    group: str | None = key(None, name("none"), "The run's group.")


@dataclass(frozen=True)
class MlflowConfig:
    """MLflow, by the package mlflow or mlflow-skinny; its environment variables replace null."""

    enabled: bool = switch(False, "Rank 0 sends the numbers of every optimizer step to MLflow.")
    tracking_uri: str | None = key(
        None, name(_OF_SERVICE), "Where runs are kept, for example http://host:5000 or sqlite:///runs.db."
    )
    experiment_name: str | None = key(None, name(_OF_SERVICE), "The run's experiment, created if it does not exist.")
    run_name: str | None = key(None, name(_OF_SERVICE), "The run's name.")


@dataclass(frozen=True)
class CometConfig:
    """Comet, by the package comet_ml."""

    enabled: bool = switch(False, "Rank 0 sends the numbers of optimizer steps to Comet.")
    samples_log_interval: int = key(1, COUNT, "Samples between two steps that are sent.")
    project: str | None = key(None, name(_OF_SERVICE), "The experiment's project.")
    workspace: str | None = key(None, name(_OF_SERVICE), "The project's workspace.")
    experiment_name: str | None = key(None, name(_OF_SERVICE), "The experiment's name.")
    experiment_key: str | None = key(None, name("a new experiment"), "The experiment to continue.")
    online: bool | None = key(None, optional(BOOL, _OF_SERVICE), "false: write to a file, for a later upload.")
    mode: str | None = key(
        None, optional(choice("get", "create", "get_or_create"), _OF_SERVICE), "Whether experiment_key must exist."
    )


@dataclass(frozen=True)
class MonitorConfig:
    """Where the numbers of every step are written, in addition to the monitors passed to ``initialize``."""

    csv: SinkConfig = SinkConfig()
    jsonl: SinkConfig = SinkConfig()
    tensorboard: SinkConfig = SinkConfig()
    wandb: WandbConfig = WandbConfig()
    mlflow: MlflowConfig = MlflowConfig()
    comet: CometConfig = CometConfig()


_BATCH_SIZE = optional(COUNT, "derived from the other two")


@dataclass(frozen=True, init=False, repr=False, eq=False)
class TopLevel:
    """The keys of the top level, and the sections; `load.Config` is built from it."""

    train_batch_size: int | None = key(None, _BATCH_SIZE, "Samples per optimizer step over all ranks.")
    train_micro_batch_size_per_gpu: int | None = key(
        None, _BATCH_SIZE, 'Samples per rank and micro-batch; "auto": a plan decides.'
    )
    gradient_accumulation_steps: int | None = key(None, _BATCH_SIZE, "Micro-batches per optimizer step.")
    gradient_clipping: float = key(0.0, NOT_NEGATIVE, "Largest global gradient norm; 0: no clipping.")
    gradient_clipping_norm_type: float | Literal["inf"] = key(
        2.0, NORM_TYPE, 'The order of that norm; "inf": the largest magnitude of an element.'
    )
    gradient_clipping_value: float = key(
        0.0,
        NOT_NEGATIVE,
        "Largest magnitude of a gradient element; 0: no clipping. An alternative to gradient_clipping.",
    )
    nonfinite_gradients: Literal["skip", "raise", "step"] | None = key(
        None,
        optional(choice("skip", "raise", "step"), "skip; raise with step_in_backward"),
        "If the gradients contain Inf or NaN: skip the step on all ranks, raise an error, or step anyway.",
    )
    max_nonfinite_steps: int = key(
        20,
        SIZE,
        "Raise an error after so many consecutive skipped steps (gradients that are not finite); 0: never. A dynamic "
        "loss scale has its own limit (fp16.min_loss_scale).",
    )
    gradient_allreduce_op: Literal["mean", "sum"] = key(
        "mean", choice("mean", "sum"), "How the gradients of the ranks are combined."
    )
    gradient_divide_factor: float | None = key(
        None,
        optional(number(0, above=True, below=3e38), "the number of ranks; 1 for a sum"),
        "Divisor of the sums of gradients over ranks, applied once to the complete sum.",
    )
    gradient_accumulation: Literal["full", "sharded"] | None = key(
        None,
        optional(choice("full", "sharded"), "the stage's third letter"),
        "How gradients are kept between micro-batches: full size and not reduced, or reduced and sharded.",
    )
    managed_gradient_accumulation: bool = switch(
        True,
        "The engine counts micro-batches; false: every step() is an optimizer step, after any number of them. Losses "
        "are divided by gradient_accumulation_steps either way.",
    )
    step_unused_parameters: bool = switch(
        False,
        "If no rank used a parameter in a step, step it with a gradient of zeros: weight decay and momentum apply. "
        "false: it is not changed.",
    )
    optimizer: OptimizerConfig | None = None
    scheduler: SchedulerConfig | None = None
    ema: EmaConfig = EmaConfig()
    zero_optimization: ZeroConfig = ZeroConfig()
    bf16: Bf16Config = Bf16Config()
    fp16: Fp16Config = Fp16Config()
    data_types: TypesConfig = TypesConfig()
    torch_autocast: AutocastConfig = AutocastConfig()
    activation_checkpointing: ActivationsConfig = ActivationsConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    monitor: MonitorConfig = MonitorConfig()
    comm_hook: CommHookConfig = CommHookConfig()
    communication_data_type: Literal["fp32", "bf16", "fp16"] | None = key(
        None,
        optional(DTYPE, "the parameter's dtype"),
        "dtype of gradients in messages and of the reduced gradients; sums are in data_types.reduce_dtype.",
    )
    overlap_comm: bool = switch(True, "Communicate during backward; does not change a bit of the result.")
    overlap_param_gather: bool = switch(
        False,
        "Stages 1 and 2: the next forward waits for the all-gather of weights, block by block, instead of step().",
    )
    reproducible: bool | None = key(
        None,
        optional(BOOL, "true on gloo, false on NCCL"),
        "Sum over ranks in the declared order on every backend; false: the backend sums gradients that are sent in "
        "fp32.",
    )
    hierarchical_reduce: bool | None = key(
        None,
        optional(BOOL, "true on NCCL, false on gloo"),
        "Sum gradients inside each node before sending them to other nodes, if each node has 2, 4, 8, … consecutive "
        "ranks; does not change a bit. On NCCL fp32 gradients also need reproducible. A comm_hook switches it off.",
    )
    static_graph: bool = switch(
        False,
        "Declares that each rank uses the same parameters in every step: the engine does not wait for unused ones, and "
        "a change raises an error.",
    )
    sparse_gradients: bool = switch(
        False,
        "Stage 0: send only the nonzero rows of gradients of nn.Embedding and nn.EmbeddingBag, as with sparse=True; "
        "does not change a bit.",
    )
    ignored_parameters: tuple[str, ...] = key(
        (),
        NAMES,
        "Names, or patterns such as `vision.*`, of parameters that the engine leaves alone: they are not moved, cast, "
        "sharded, sent, stepped or saved in checkpoints.",
    )
    aio: AioConfig = AioConfig()
    broadcast_buffers: bool = switch(
        True, "Broadcast rank 0's buffers; false: each rank keeps, saves and loads its own."
    )
    timeout_s: float = key(
        600.0,
        number(0, above=True, below=1e7),
        "Seconds until an unfinished collective raises an error; with initialize(mesh=...) the mesh's timeout applies.",
    )
    debug: bool = switch(False, "Compare sequence numbers and names of collectives over ranks.")
    seed: int = key(
        42, integer(0, 2**63 - 1), "Seed of stochastic rounding, and of the train command's data and dropout."
    )
    steps_per_print: int = key(
        10, EVERY, "Optimizer steps between two lines that the train command prints; 0 or Infinity: no lines."
    )


SECTION_TYPES: dict[str, type] = {
    "": TopLevel,
    "optimizer": OptimizerConfig,
    "scheduler": SchedulerConfig,
    "ema": EmaConfig,
    "zero_optimization": ZeroConfig,
    "bf16": Bf16Config,
    "fp16": Fp16Config,
    "data_types": TypesConfig,
    "torch_autocast": AutocastConfig,
    "activation_checkpointing": ActivationsConfig,
    "checkpoint": CheckpointConfig,
    "comm_hook": CommHookConfig,
    "zero_optimization.offload_optimizer": OffloadOptimizerConfig,
    "zero_optimization.offload_param": OffloadParamConfig,
    "aio": AioConfig,
    "monitor": MonitorConfig,
    "monitor.csv": SinkConfig,
    "monitor.jsonl": SinkConfig,
    "monitor.tensorboard": SinkConfig,
    "monitor.wandb": WandbConfig,
    "monitor.mlflow": MlflowConfig,
    "monitor.comet": CometConfig,
}
"""Each section's name in the JSON and its class, in the order of docs/config.md, outer sections first."""

_LATER: dict[str, Table] = {
    "torch_autocast": {"lower_precision_safe_modules": (ANY, None)},
}


class Status(Enum):
    """The treatment of a known key; see the module docstring."""

    ACTIVE = "active"
    LATER = "later"
    REFUSED = "refused"
    NO_EFFECT = "no effect"


class Key(NamedTuple):
    """One key by its dotted name. ``note`` describes it or, for REFUSED and NO_EFFECT, ends a "…, because" sentence.

    ``default`` of a REFUSED key: the values that switch it off, in addition to those of ``is_off``.
    """

    name: str
    status: Status
    kind: Kind
    default: Any
    note: str


def join(section: str, name: str) -> str:
    """The dotted name of a key of ``section``; "" is the top level."""
    return f"{section}.{name}" if section else name


def _keys() -> Iterator[Key]:
    for section, of in SECTION_TYPES.items():
        for each in fields(of):
            if each.metadata:
                default = None if each.default is MISSING else each.default
                yield Key(join(section, each.name), Status.ACTIVE, default=default, **each.metadata)
    for section, later in _LATER.items():
        yield from (Key(join(section, name), Status.LATER, *row, "") for name, row in later.items())
    for section, refused in foreign.REFUSED.items():
        yield from (Key(join(section, name), Status.REFUSED, ANY, *row) for name, row in refused.items())
    for section, ignored in foreign.NO_EFFECT.items():
        yield from (Key(join(section, name), Status.NO_EFFECT, ANY, None, why) for name, why in ignored.items())


KEYS: dict[str, Key] = {each.name: each for each in _keys()}
"""Every known key by its dotted name."""

SECTIONS: frozenset[str] = frozenset(name[:dot] for name in KEYS for dot in range(len(name)) if name[dot] == ".")
"""Every dotted name whose value is an object with declared keys."""

STAGES = (0, 1, 2, 3)
TRIPLE = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
"""The batch sizes. Any of them may be derived from the others."""

_COMMON: Table = {"lr": (NOT_NEGATIVE, 1e-3), "maximize": (BOOL, False)}
_ADAM: Table = {**_COMMON, "betas": (BETAS, (0.9, 0.999)), "eps": (NOT_NEGATIVE, 1e-8)}

_BY_CLASS: Table = {**_COMMON, "weight_decay": (NOT_NEGATIVE, 0.0)}
_ADAM_BY_CLASS: Table = {**_BY_CLASS, "betas": (BETAS, (0.9, 0.999)), "eps": (NOT_NEGATIVE, 1e-8)}

OPTIMIZERS: dict[str, Table] = {
    "AdamW": {**_ADAM, "weight_decay": (NOT_NEGATIVE, 0.01), "amsgrad": (BOOL, False)},
    "Adam": {**_ADAM, "weight_decay": (NOT_NEGATIVE, 0.0), "amsgrad": (BOOL, False)},
    "SGD": {
        **_COMMON,
        "momentum": (NOT_NEGATIVE, 0.0),
        "dampening": (number(0), 0.0),
        "weight_decay": (NOT_NEGATIVE, 0.0),
        "nesterov": (BOOL, False),
    },
    "Lion": {**_COMMON, "lr": (NOT_NEGATIVE, 1e-4), "betas": (BETAS, (0.9, 0.99)), "weight_decay": (NOT_NEGATIVE, 0.0)},
    "Muon": {
        "lr": (NOT_NEGATIVE, 1e-3),
        "muon_lr": (optional(NOT_NEGATIVE, "lr"), None),
        "adam_lr": (optional(NOT_NEGATIVE, "lr"), None),
        "weight_decay": (NOT_NEGATIVE, 0.1),
        "adam_weight_decay": (optional(NOT_NEGATIVE, "weight_decay"), None),
        "momentum": (NOT_NEGATIVE, 0.95),
        "nesterov": (BOOL, True),
        "ns_coefficients": (THREE, (3.4445, -4.775, 2.0315)),
        "ns_steps": (integer(1, 99), 5),
        "ns_eps": (NOT_NEGATIVE, 1e-7),
        "adjust_lr_fn": (optional(choice("original", "match_rms_adamw"), "original"), None),
        "betas": (BETAS, (0.9, 0.999)),
        "eps": (NOT_NEGATIVE, 1e-8),
    },
    "Adafactor": {
        **_COMMON,
        "lr": (NOT_NEGATIVE, 1e-2),
        "beta2_decay": (NOT_POSITIVE, -0.8),
        "eps": (EPSILONS, (None, 1e-3)),
        "d": (number(1), 1.0),
        "weight_decay": (NOT_NEGATIVE, 0.0),
    },
    "AdamW8bit": {**_ADAM, "weight_decay": (NOT_NEGATIVE, 0.01)},
    "Lion8bit": {
        **_COMMON,
        "lr": (NOT_NEGATIVE, 1e-4),
        "betas": (BETAS, (0.9, 0.99)),
        "weight_decay": (NOT_NEGATIVE, 0.0),
    },
    "Adadelta": {**_BY_CLASS, "lr": (NOT_NEGATIVE, 1.0), "rho": (FRACTION, 0.9), "eps": (NOT_NEGATIVE, 1e-6)},
    "Adagrad": {
        **_BY_CLASS,
        "lr": (NOT_NEGATIVE, 1e-2),
        "lr_decay": (NOT_NEGATIVE, 0.0),
        "initial_accumulator_value": (NOT_NEGATIVE, 0.0),
        "eps": (NOT_NEGATIVE, 1e-10),
    },
    "Adamax": {**_ADAM_BY_CLASS, "lr": (NOT_NEGATIVE, 2e-3)},
    "ASGD": {
        **_BY_CLASS,
        "lr": (NOT_NEGATIVE, 1e-2),
        "lambd": (number(0), 1e-4),
        "alpha": (number(0), 0.75),
        "t0": (NOT_NEGATIVE, 1e6),
    },
    "NAdam": {
        **_ADAM_BY_CLASS,
        "lr": (NOT_NEGATIVE, 2e-3),
        "momentum_decay": (NOT_NEGATIVE, 4e-3),
        "decoupled_weight_decay": (BOOL, False),
    },
    "RAdam": {**_ADAM_BY_CLASS, "decoupled_weight_decay": (BOOL, False)},
    "RMSprop": {
        **_BY_CLASS,
        "lr": (NOT_NEGATIVE, 1e-2),
        "alpha": (NOT_NEGATIVE, 0.99),
        "eps": (NOT_NEGATIVE, 1e-8),
        "momentum": (NOT_NEGATIVE, 0.0),
        "centered": (BOOL, False),
    },
    "Rprop": {
        "lr": (NOT_NEGATIVE, 1e-2),
        "etas": (PAIR, (0.5, 1.2)),
        "step_sizes": (PAIR, (1e-6, 50.0)),
        "maximize": (BOOL, False),
    },
}
"""The optimizers of this version: name -> hyper-parameter -> (kind, default as in torch.optim; Lion's authors')."""
