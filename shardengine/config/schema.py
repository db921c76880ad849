"""Every key that the JSON config knows, once. Owns: names, kinds, ranges, defaults and notes.

A key is a field of its section's dataclass: `name: type = key(default, kind, note)`. The table that files are checked
with (`KEYS`), the JSON Schema and docs/config.md follow from the fields. Fields that are no keys hold sections. It must
not know how a file is read.

A key's status says what happens when it is in a file:

    ACTIVE     parsed and used, by the engine or where its note says so by the train command
    LATER      known; accepted while switched off, otherwise "not available yet"
    REFUSED    known from other engines; accepted while switched off, otherwise refused with the reason (`note`)
    NO_EFFECT  known from other engines; accepted, and said once with the reason (`note`)

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
    """A field that is a key of the JSON. note: what it says, for docs/config.md and the JSON Schema."""
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
            "note": 'AdamW, Adam (AdamW unless params say "adam_w_mode": false), SGD, Lion; AdamW8bit and Lion8bit, '
            "with states of 8 bits; Muon, with AdamW for all but hidden matrices; Adafactor; or Adadelta, Adagrad, "
            "Adamax, ASGD, NAdam, RAdam, RMSprop, Rprop.",
        }
    )
    params: Mapping[str, Any] = key(FrozenMapping(), OBJECT, "The optimizer's hyper-parameters.")

    def __post_init__(self) -> None:
        object.__setattr__(self, "params", frozen(self.params))


@dataclass(frozen=True)
class EmaConfig:
    """An exponential moving average of the weights, beside the optimizer's state."""

    decay: float | None = key(
        None,
        optional(FRACTION, "no average"),
        "average = decay · average + (1 - decay) · weights, after each step; `engine.ema()` shows it.",
    )


@dataclass(frozen=True)
class SchedulerConfig:
    """Learning-rate schedule by name, with its parameters as written; `lr_schedules.check` validates both."""

    type: str = field(
        metadata={"kind": TEXT, "note": "WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle or a torch scheduler class."}
    )
    params: Mapping[str, Any] = key(FrozenMapping(), OBJECT, "The schedule's parameters.")

    def __post_init__(self) -> None:
        object.__setattr__(self, "params", frozen(self.params))


_DEVICE = choice("none", "cpu", "nvme")
_PATH = optional(TEXT, "needed for nvme")
_PATH_NOTE = "A directory on the disk; each rank makes and removes a file of its own in it."
_BUFFERS_NOTE = "Host buffers for transfers from and to the disk, each of one bucket."


@dataclass(frozen=True)
class OffloadOptimizerConfig:
    """Where gradients' shards, master weights and optimizer state rest, and which part of them."""

    device: Literal["none", "cpu", "nvme"] = key(
        "none", _DEVICE, "Where gradients' shards, master weights and optimizer state are kept; the CPU steps them."
    )
    nvme_path: str | None = key(None, _PATH, _PATH_NOTE)
    ratio: float | Literal["auto"] = key(
        1.0, PART, 'The part, by bytes, that is kept there; "auto": as little as device_memory allows.'
    )
    device_memory: int | None = key(
        None,
        optional(COUNT, "60% of its free memory at initialize, GPUs only"),
        'With "ratio": "auto": bytes of the device that model state and the engine\'s buffers may take, per rank.',
    )
    pin_memory: bool = switch(True, "What crosses to and from a GPU is in page-locked memory, which it copies faster.")
    buffer_count: int = key(4, integer(2), _BUFFERS_NOTE)
    step_in_backward: bool = switch(
        False, "Stages 1 to 3: step offloaded buckets while backward still runs; then only step() may follow."
    )


@dataclass(frozen=True)
class OffloadParamConfig:
    """Where the shards of the weights rest (stage 3)."""

    device: Literal["none", "cpu", "nvme"] = key("none", _DEVICE, "Stage 3: where the shards of the weights are kept.")
    nvme_path: str | None = key(None, _PATH, _PATH_NOTE)
    pin_memory: bool = switch(True, "Shards in host memory are page-locked, which a GPU copies faster.")
    buffer_count: int = key(5, integer(2), _BUFFERS_NOTE)


@dataclass(frozen=True)
class AioConfig:
    """How files are read and written."""

    block_size: int = key(1 << 20, COUNT, "Bytes of one request to the disk; a multiple of 4096.")
    queue_depth: int = key(8, COUNT, "Reads, and as many writes, that are with the disk at the same time.")
    thread_count: int = key(1, COUNT, "Checksums that are taken at the same time.")


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
"""Name → what its params may be."""
_HOOKS = choice(*COMM_HOOKS)
STEPPING_APART = ("post_local_sgd", "gossip")
"""Those with which shard groups step apart from each other."""


@dataclass(frozen=True)
class CommHookConfig:
    """What travels when gradients are reduced."""

    name: Literal["none", "noop", "fp16", "bf16", "int8", "int4", "power_sgd", "post_local_sgd", "gossip"] = key(
        "none",
        _HOOKS,
        "fp16, bf16: in that dtype, overflow becomes the largest number; int8, int4: integers in blocks of 256 "
        "elements; power_sgd: matrices as products of two thin ones; post_local_sgd, gossip: nothing between shard "
        "groups, or what one other needs, and averages of the groups now and then; noop: nothing, to measure.",
    )
    params: Mapping[str, Any] = key(
        FrozenMapping(),
        OBJECT,
        '"error_feedback": rounding errors are added to the next message; not by default for fp16 and bf16. '
        'Of power_sgd also "rank" (1), "start_step" (1000: updates before the first that is sent so), "warm_start" '
        '(true), "min_compression_rate" (2), "square" (false: of each parameter\'s elements in a square). '
        'Of post_local_sgd and gossip "start_step" (0: steps that are as without) and "period" (4: steps from one '
        "average to the next; gossip: 0 for none).",
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "params", frozen(self.params))

    @property
    def filled(self) -> dict[str, Any]:
        """``params``, with defaults for what is not there."""
        return {name: default for name, (_, default) in COMM_HOOKS[self.name].items()} | dict(self.params)


@dataclass(frozen=True)
class ZeroConfig:
    """What is sharded, in which pieces it travels, and where it rests. Sizes are in elements, not bytes."""

    stage: int = key(
        0,
        integer(0, 3),
        '0 replicates all; 1 shards optimizer state, 2 gradients too, 3 weights too; "auto": a plan decides.',
    )
    reduce_bucket_size: int | Literal["auto"] = key(
        12_500_000,
        COUNT_OR_AUTO,
        'Elements of a gradient bucket, at most; "auto": by the measured speed of the group of ranks. Raised to the '
        "size of a parameter that is more than 8 times as large, up to 262,144.",
    )
    recut_buckets: bool = switch(
        True,
        "After the first step rebuild the buckets in the order of the gradients, if more is then sent during backward; "
        "parameters move in memory. false: for code that keeps views or addresses of them.",
    )
    stage3_prefetch_bucket_size: int | Literal["auto"] = key(
        12_500_000,
        SIZE_OR_AUTO,
        'Elements gathered ahead; 0 = no prefetch, else >= one unit; "auto": as many as hide the latency.',
    )
    stage3_reshard_after_forward: bool = switch(
        True, "Free a unit's weights between its forward and its backward pass."
    )
    shard_group_size: Literal["all", "node"] | int = key(
        "all",
        GROUP_SIZE,
        "Consecutive ranks that shard the model among themselves; the groups are replicas of each other (HSDP). "
        '"node": those of a node.',
    )
    zero_hpz_partition_size: Literal["node"] | int = key(
        1,
        PARTITION_SIZE,
        "Stage 3: consecutive ranks over which a unit's weights stay sharded from its forward to its backward, so that "
        'the gather for backward stays among them (hpZ). "node": those of a node; 1: off.',
    )
    zero_quantized_weights: bool = switch(
        False, "Stage 3: weights travel as integers of 8 bits in blocks of 256 elements, and are used as such (ZeRO++)."
    )
    zero_quantized_gradients: bool = switch(
        False, "Gradients travel as with the comm_hook int8 without error feedback (ZeRO++)."
    )
    units: Literal["auto"] | tuple[str, ...] = key(
        "auto", UNITS, 'Class names of the modules that are gathered as one; "auto" finds them.'
    )
    offload_optimizer: OffloadOptimizerConfig = OffloadOptimizerConfig()
    offload_param: OffloadParamConfig = OffloadParamConfig()


@dataclass(frozen=True)
class Bf16Config:
    """Training in bf16. Without ``master_weights`` the bf16 weights are rounded to nearest, or stochastically."""

    enabled: bool = switch(False, "Cast fp32 parameters to bf16; optimizers step fp32 master weights.")
    auto_cast: bool = switch(True, "Cast the model's floating-point inputs to bf16, also in containers.")
    master_weights: bool = switch(True, "Step fp32 master weights, not the bf16 weights themselves.")
    split_masters: bool = switch(
        False,
        "Keep of master weights only 8 bits of mantissa that bf16 weights do not have: 1 byte instead of 4. A step "
        "rounds them stochastically, to 16 bits of mantissa.",
    )
    stochastic_rounding: bool = switch(
        False, "Round stepped bf16 weights up or down at random; without master weights."
    )


@dataclass(frozen=True)
class Fp16Config:
    """Training in fp16, and the loss scale, also that of fp16 autocast."""

    enabled: bool = switch(False, "Cast parameters to fp16; optimizers step fp32 master weights; the loss is scaled.")
    auto_cast: bool = switch(True, "Cast the model's floating-point inputs to fp16, also in containers.")
    loss_scale: float = key(0.0, number(0, below=3e38), "A fixed loss scale; 0: it follows overflows.")
    initial_scale_power: int = key(16, integer(0, 127), "The first loss scale is 2 to this power.")
    loss_scale_window: int = key(1000, COUNT, "Steps without overflow after which the loss scale is doubled.")
    loss_scale_delay: int = key(
        0, SIZE, "So many steps more before it is doubled first, at the start and after each overflow; DeepSpeed has 1."
    )
    hysteresis: int = key(2, COUNT, "Overflows until the loss scale is halved.")
    min_loss_scale: float = key(
        1.0,
        number(0, above=True, below=3e38),
        "The loss scale is never halved below this; an overflow there is an error.",
    )
    consecutive_hysteresis: bool = switch(False, "Every step without overflow restores the hysteresis.")


@dataclass(frozen=True)
class TypesConfig:
    """Dtypes of gradients on the way, and of the optimizer's states."""

    grad_accum_dtype: Literal["fp32", "bf16", "fp16"] = key(
        "fp32", optional(DTYPE, "fp32"), "dtype of accumulated gradients between micro-batches."
    )
    reduce_dtype: Literal["fp32", "bf16", "fp16"] = key(
        "fp32", optional(DTYPE, "fp32"), "The dtype to which each sum over ranks is rounded."
    )
    optimizer_state_dtype: Literal["fp32", "bf16", "8bit"] = key(
        "fp32",
        optional(STATE_DTYPE, "fp32"),
        "dtype of the optimizer state of AdamW, Adam, SGD and Lion. 8bit: blocks of 256 elements with a scale each. "
        "bf16 and 8bit are rounded stochastically.",
    )


@dataclass(frozen=True)
class AutocastConfig:
    """The region of ``torch.autocast`` around the module's forward."""

    enabled: bool = switch(False, "Run the module's forward under torch.autocast.")
    dtype: Literal["bfloat16", "float16"] = key(
        "bfloat16", AUTOCAST_DTYPE, "What autocast computes in; with float16 the loss is scaled as fp16 says."
    )


@dataclass(frozen=True)
class ActivationsConfig:
    """What blocks keep for backward, and where."""

    enabled: bool = switch(False, "Blocks keep only their inputs for backward, where their forward is computed again.")
    cpu_offload: bool = switch(False, "What checkpointed blocks keep waits in host memory; only with enabled.")


@dataclass(frozen=True)
class CheckpointConfig:
    """How checkpoints are written, and how many stay."""

    async_save: bool = switch(
        False, "save_checkpoint returns when the weights are copied to host memory; threads do the rest."
    )
    keep_last: int | None = key(
        None,
        optional(COUNT, "all"),
        "How many checkpoints stay; older ones go when a new one is whole. Tags that were given by name always stay.",
    )


@dataclass(frozen=True)
class SinkConfig:
    """One monitor, which writes below ``output_path``/``job_name``."""

    enabled: bool = switch(False, "Rank 0 writes the numbers of every optimizer step.")
    output_path: str | None = key(
        None, PLACE, "The directory of the job's; null: the working directory, of `train` the run's."
    )
    job_name: str = key("shardengine", TEXT, "The name of the job's directory in output_path.")


_OF_SERVICE = "the package's own default"


@dataclass(frozen=True)
class WandbConfig:
    """Weights & Biases, by the package wandb; who logs in where is the package's matter."""

    enabled: bool = switch(False, "Rank 0 sends the numbers of every optimizer step to Weights & Biases.")
    project: str | None = key(None, name(_OF_SERVICE), "The run's project.")
    team: str | None = key(None, name(_OF_SERVICE), "The team or user who owns the run.")
    group: str | None = key(None, name("none"), "The group of runs that it belongs to.")


@dataclass(frozen=True)
class MlflowConfig:
    """MLflow, by the package mlflow or mlflow-skinny; what is null is as in its environment variables."""

    enabled: bool = switch(False, "Rank 0 sends the numbers of every optimizer step to MLflow.")
    tracking_uri: str | None = key(
        None, name(_OF_SERVICE), "Where runs are kept, as http://host:5000 or sqlite:///runs.db."
    )
    experiment_name: str | None = key(None, name(_OF_SERVICE), "The run's experiment, made if it is new.")
    run_name: str | None = key(None, name(_OF_SERVICE), "The run's name.")


@dataclass(frozen=True)
class CometConfig:
    """Comet, by the package comet_ml."""

    enabled: bool = switch(False, "Rank 0 sends the numbers of optimizer steps to Comet.")
    samples_log_interval: int = key(1, COUNT, "A step is sent when so many samples have passed since the last one.")
    project: str | None = key(None, name(_OF_SERVICE), "The experiment's project.")
    workspace: str | None = key(None, name(_OF_SERVICE), "The workspace of that project.")
    experiment_name: str | None = key(None, name(_OF_SERVICE), "The experiment's name.")
    experiment_key: str | None = key(None, name("a new experiment"), "The experiment that is continued.")
    online: bool | None = key(None, optional(BOOL, _OF_SERVICE), "false: written to a file, to be uploaded later.")
    mode: str | None = key(
        None, optional(choice("get", "create", "get_or_create"), _OF_SERVICE), "Whether experiment_key must be there."
    )


@dataclass(frozen=True)
class MonitorConfig:
    """Where the numbers of every step go, beside the monitors that ``initialize`` is given."""

    csv: SinkConfig = SinkConfig()
    jsonl: SinkConfig = SinkConfig()
    tensorboard: SinkConfig = SinkConfig()
    wandb: WandbConfig = WandbConfig()
    mlflow: MlflowConfig = MlflowConfig()
    comet: CometConfig = CometConfig()


_BATCH_SIZE = optional(COUNT, "derived from the other two")


@dataclass(frozen=True, init=False, repr=False, eq=False)
class TopLevel:
    """The keys of the top level, and the sections; what is made of it is `load.Config`."""

    train_batch_size: int | None = key(None, _BATCH_SIZE, "Samples per optimizer step over all ranks.")
    train_micro_batch_size_per_gpu: int | None = key(
        None, _BATCH_SIZE, 'Samples per rank and micro-batch; "auto": a plan decides.'
    )
    gradient_accumulation_steps: int | None = key(None, _BATCH_SIZE, "Micro-batches per optimizer step.")
    gradient_clipping: float = key(0.0, NOT_NEGATIVE, "Largest global gradient norm; 0 switches clipping off.")
    gradient_clipping_norm_type: float | Literal["inf"] = key(
        2.0, NORM_TYPE, 'The order of that norm; "inf": the largest magnitude of an element.'
    )
    gradient_clipping_value: float = key(
        0.0,
        NOT_NEGATIVE,
        "Largest magnitude of an element of the gradient; 0 switches it off. Instead of gradient_clipping.",
    )
    nonfinite_gradients: Literal["skip", "raise", "step"] | None = key(
        None,
        optional(choice("skip", "raise", "step"), "skip; raise with step_in_backward"),
        "What happens to a step whose gradients hold Inf or NaN: skipped on all ranks, an error, or taken anyway.",
    )
    max_nonfinite_steps: int = key(
        20,
        SIZE,
        "How many steps in a row, skipped for gradients that are not finite, are an error; 0: never. A dynamic loss "
        "scale has its own end (fp16.min_loss_scale).",
    )
    gradient_allreduce_op: Literal["mean", "sum"] = key(
        "mean", choice("mean", "sum"), "How the gradients of the ranks are combined."
    )
    gradient_divide_factor: float | None = key(
        None,
        optional(number(0, above=True, below=3e38), "the number of ranks; 1 for a sum"),
        "What sums of gradients over ranks are divided by, once, when they are complete.",
    )
    gradient_accumulation: Literal["full", "sharded"] | None = key(
        None,
        optional(choice("full", "sharded"), "the stage's third letter"),
        "How gradients are kept between micro-batches: full size and unreduced, or reduced and sharded.",
    )
    managed_gradient_accumulation: bool = switch(
        True,
        "The engine counts micro-batches; false: every step() ends the window, whatever came before it. Losses are "
        "divided by gradient_accumulation_steps either way.",
    )
    step_unused_parameters: bool = switch(
        False,
        "A parameter that no rank used in a step is stepped with a gradient of zeros: it is decayed, and its momentum "
        "moves it. Otherwise it stays as it is.",
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
        "dtype of gradients in messages and when complete; sums are in data_types.reduce_dtype.",
    )
    overlap_comm: bool = switch(
        True, "Communicate while the backward pass computes; never changes a bit of the result."
    )
    overlap_param_gather: bool = switch(
        False, "Stages 1 and 2: step() does not wait for the stepped weights, the next forward does, block by block."
    )
    reproducible: bool | None = key(
        None,
        optional(BOOL, "true on gloo, false on NCCL"),
        "Sum over ranks in the declared order on every backend; false leaves gradients that are sent in fp32 to the "
        "backend.",
    )
    hierarchical_reduce: bool | None = key(
        None,
        optional(BOOL, "true on NCCL, false on gloo"),
        "Add gradients inside each node before they are sent to others, if each node has 2, 4, 8, … consecutive "
        "ranks; never changes a bit. On NCCL fp32 gradients also need reproducible; a comm_hook switches it off.",
    )
    static_graph: bool = switch(
        False,
        "Declares that each rank uses the same parameters in every step: the engine does not wait for unused ones, and "
        "a change is an error.",
    )
    sparse_gradients: bool = switch(
        False,
        "Stage 0: of the gradients of nn.Embedding and nn.EmbeddingBag only rows that are not zero travel, as of "
        "those with sparse=True; never changes a bit.",
    )
    ignored_parameters: tuple[str, ...] = key(
        (),
        NAMES,
        "Names, or patterns such as `vision.*`, of parameters that stay yours: they are not moved, cast, sharded, "
        "sent, stepped or saved in checkpoints.",
    )
    aio: AioConfig = AioConfig()
    broadcast_buffers: bool = switch(True, "Rank 0's buffers are all ranks'; off: each keeps, saves and loads its own.")
    timeout_s: float = key(
        600.0,
        number(0, above=True, below=1e7),
        "Seconds until an unfinished collective is an error; with initialize(mesh=...) the mesh's own number counts.",
    )
    debug: bool = switch(False, "Compare sequence numbers and names of collectives across ranks.")
    seed: int = key(
        42, integer(0, 2**63 - 1), "Seed of stochastic rounding, and of the train command's data and dropout."
    )
    steps_per_print: int = key(
        10, EVERY, "Optimizer steps between two lines of the train command; 0 or Infinity: none."
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
"""Each section's name in the JSON and its class, in the order of docs/config.md, an outer one before those in it."""

_LATER: dict[str, Table] = {
    "torch_autocast": {"lower_precision_safe_modules": (ANY, None)},
}


class Status(Enum):
    """What becomes of a known key; the module docstring says what each means."""

    ACTIVE = "active"
    LATER = "later"
    REFUSED = "refused"
    NO_EFFECT = "no effect"


class Key(NamedTuple):
    """One key by its dotted name. ``note`` describes it or, for REFUSED and NO_EFFECT, ends a "…, because" sentence.

    ``default`` of a REFUSED key: the values that switch it off, beside those that ``is_off`` knows.
    """

    name: str
    status: Status
    kind: Kind
    default: Any
    note: str


def join(section: str, name: str) -> str:
    """The name of a key of ``section``, "": the top level."""
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
"""The batch sizes, any of which may follow from the others."""

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
