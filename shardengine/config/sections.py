"""The sections of the JSON config as frozen dataclasses. Owns: what each section holds, with its defaults.

Must not know: how a file is read and checked (`config/reader.py`, `config/load.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from shardengine.config.kinds import FrozenMapping, frozen


@dataclass(frozen=True)
class OptimizerConfig:
    """Optimizer by name: "AdamW", "Adam" (L2), "SGD" or "Lion"; ``params`` are keyword arguments of its class."""

    type: str
    params: Mapping[str, Any] = field(default_factory=FrozenMapping)

    def __post_init__(self) -> None:
        object.__setattr__(self, "params", frozen(self.params))


@dataclass(frozen=True)
class SchedulerConfig:
    """Learning-rate schedule by name, with its parameters as written; `lr_schedules.check` validates both."""

    type: str
    params: Mapping[str, Any] = field(default_factory=FrozenMapping)

    def __post_init__(self) -> None:
        object.__setattr__(self, "params", frozen(self.params))


@dataclass(frozen=True)
class OffloadOptimizerConfig:
    """Where gradients' shards, master weights and optimizer state rest.

    ratio: which part of them, by bytes; "auto": what does not fit into ``device_memory`` bytes of the device (None:
    what is free there at the start) · step_in_backward: what rests there is stepped while backward goes on.
    """

    device: Literal["none", "cpu", "nvme"] = "none"
    nvme_path: str | None = None
    ratio: float | Literal["auto"] = 1.0
    device_memory: int | None = None
    pin_memory: bool = True
    buffer_count: int = 4
    step_in_backward: bool = False


@dataclass(frozen=True)
class OffloadParamConfig:
    """Where the shards of the weights rest (stage 3)."""

    device: Literal["none", "cpu", "nvme"] = "none"
    nvme_path: str | None = None
    pin_memory: bool = True
    buffer_count: int = 5


@dataclass(frozen=True)
class AioConfig:
    """How files are read and written. block_size: bytes of one request."""

    block_size: int = 1 << 20
    queue_depth: int = 8
    thread_count: int = 1


@dataclass(frozen=True)
class ZeroConfig:
    """What is sharded, in which pieces it travels, and where it rests. Sizes are in elements, not bytes."""

    stage: int = 0
    reduce_bucket_size: int = 12_500_000
    stage3_prefetch_bucket_size: int = 12_500_000
    stage3_reshard_after_forward: bool = True
    units: Literal["auto"] | tuple[str, ...] = "auto"
    offload_optimizer: OffloadOptimizerConfig = field(default_factory=OffloadOptimizerConfig)
    offload_param: OffloadParamConfig = field(default_factory=OffloadParamConfig)


@dataclass(frozen=True)
class Bf16Config:
    """``enabled``: fp32 parameters are cast to bf16 and what was given becomes their fp32 master weights.

    Without ``master_weights`` the bf16 weights are stepped themselves, rounded to nearest or stochastically.
    ``auto_cast``: the model's floating-point inputs are cast to bf16, too.
    """

    enabled: bool = False
    auto_cast: bool = True
    master_weights: bool = True
    stochastic_rounding: bool = False


@dataclass(frozen=True)
class Fp16Config:
    """``enabled``: parameters are cast to fp16, with fp32 master weights and a scaled loss; the rest is the scale's.

    ``auto_cast``: the model's floating-point inputs are cast to fp16, too.
    """

    enabled: bool = False
    auto_cast: bool = True
    loss_scale: float = 0.0
    initial_scale_power: int = 16
    loss_scale_window: int = 1000
    hysteresis: int = 2
    min_loss_scale: float = 1.0
    consecutive_hysteresis: bool = False


@dataclass(frozen=True)
class TypesConfig:
    """In which dtype gradients wait for later micro-batches, and to which sums over ranks are rounded."""

    grad_accum_dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    reduce_dtype: Literal["fp32", "bf16", "fp16"] = "fp32"


@dataclass(frozen=True)
class AutocastConfig:
    """``enabled``: the engine runs the module's forward under ``torch.autocast`` with ``dtype``."""

    enabled: bool = False
    dtype: Literal["bfloat16", "float16"] = "bfloat16"


@dataclass(frozen=True)
class ActivationsConfig:
    """``enabled``: blocks keep their inputs for backward and are computed again; ``cpu_offload``: in host memory."""

    enabled: bool = False
    cpu_offload: bool = False


@dataclass(frozen=True)
class CheckpointConfig:
    """``async_save``: write behind training. ``keep_last``: how many checkpoints stay, None: all."""

    async_save: bool = False
    keep_last: int | None = None


@dataclass(frozen=True)
class SinkConfig:
    """``enabled``: rank 0 writes the numbers of every step below ``output_path``/``job_name``; no path: right here."""

    enabled: bool = False
    output_path: str | None = None
    job_name: str = "shardengine"


@dataclass(frozen=True)
class MonitorConfig:
    """Where the numbers of every step go, beside the monitors that ``initialize`` is given."""

    csv: SinkConfig = field(default_factory=SinkConfig)
    jsonl: SinkConfig = field(default_factory=SinkConfig)
    tensorboard: SinkConfig = field(default_factory=SinkConfig)


SECTION_TYPES: dict[str, type] = {
    "zero_optimization.offload_optimizer": OffloadOptimizerConfig,
    "zero_optimization.offload_param": OffloadParamConfig,
    "zero_optimization": ZeroConfig,
    "aio": AioConfig,
    "bf16": Bf16Config,
    "fp16": Fp16Config,
    "data_types": TypesConfig,
    "torch_autocast": AutocastConfig,
    "activation_checkpointing": ActivationsConfig,
    "checkpoint": CheckpointConfig,
    "monitor.csv": SinkConfig,
    "monitor.jsonl": SinkConfig,
    "monitor.tensorboard": SinkConfig,
    "monitor": MonitorConfig,
}
"""Each section's name in the JSON and its class; one inside of another comes before it."""
