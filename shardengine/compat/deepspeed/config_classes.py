"""DeepSpeed's config classes: the settings of a config with DeepSpeed's defaults, for scripts without an engine.

Owns: names, defaults and types of values. Must not know: engines. Only ``initialize`` checks whether a config trains.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, ClassVar, NoReturn

from shardengine.compat.deepspeed import foreign, leaves, processes
from shardengine.compat.deepspeed.errors import AssertedError
from shardengine.config import TRIPLE, OffloadOptimizerConfig, OffloadParamConfig, ZeroConfig, nearest
from shardengine.errors import ConfigError, UsageError

_OFF = {"": False, "0": False, "false": False, "off": False, "no": False}


class Section:
    """A section of a config as an object. The value "auto", which a framework fills in, becomes the default here."""

    defaults: ClassVar[Mapping[str, Any]] = {}
    """Attribute → default; a section class stands for an empty section."""
    keys: ClassVar[Mapping[str, str]] = {}
    """Key → attribute, for keys whose attribute has another name."""
    sections: ClassVar[Mapping[str, type[Section]]] = {}
    """Attribute → section class for a mapping, for attributes whose default is None."""
    others: ClassVar[frozenset[str]] = frozenset()
    """Further valid keys, whose values are kept unchanged."""

    def __init__(self, **written: Any) -> None:
        """Read the values. A wrong one raises pydantic's ValidationError if pydantic is imported, else ConfigError."""
        vars(self).update((name, _fresh(default)) for name, default in self.defaults.items())
        problems = []
        for key, value in written.items():
            name = self.keys.get(key, key)
            if name not in self.defaults and name not in self.others:
                near = nearest(key, [*self.defaults, *self.keys])
                problems.append(f"{key}: unknown key; the nearest valid key is {near!r}")
            elif value != "auto":
                try:
                    setattr(self, name, self._value(name, value))
                except (TypeError, ValueError) as error:
                    problems.append(f"{key}: {error}")
        if problems := problems or self._problems():
            _refuse(type(self).__name__, problems)

    def _value(self, name: str, value: Any) -> Any:
        default = self.defaults.get(name)
        kind = self.sections.get(name) or (default if isinstance(default, type) else None)
        if kind is not None:
            return kind(**value) if isinstance(value, Mapping) else value
        read = _READ.get(type(default))
        return value if read is None else read(value)

    def _problems(self) -> list[str]:
        """Return the problems of combinations of values."""
        return []

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"


def _fresh(default: Any) -> Any:
    return default() if isinstance(default, type) else copy.copy(default)


def _whether(value: Any) -> bool:
    return _OFF.get(value.lower(), True) if isinstance(value, str) else bool(value)


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str) or not math.isfinite(float(value)):
        raise ValueError(f"must be a number, got {value!r}")
    return float(value)


def _count(value: Any) -> int:
    number = _number(value)
    if number != int(number):
        raise ValueError(f"must be a whole number, got {value!r}")
    return int(value) if isinstance(value, int) else int(number)


_READ: dict[type, Callable[[Any], Any]] = {
    bool: _whether,
    int: _count,
    float: _number,
    list: lambda value: [value] if isinstance(value, str) else list(value),
}
"""Type of the default → function that reads a value."""


def _refuse(title: str, problems: Sequence[str]) -> NoReturn:
    core: Any = sys.modules.get("pydantic_core")  # a script that catches its ValidationError has imported it
    if core is None:
        raise ConfigError(list(problems), title)
    said = [
        {"type": core.PydanticCustomError("value", "{said}", {"said": each}), "loc": (each.partition(":")[0],)}
        for each in problems
    ]
    raise core.ValidationError.from_exception_data(title, said)


# Sections


class DeepSpeedFP16Config(Section):
    """``fp16``."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "enabled": False,
        "auto_cast": False,
        "loss_scale": 0.0,
        "initial_scale_power": 16,
        "loss_scale_window": 1000,
        "hysteresis": 2,
        "consecutive_hysteresis": False,
        "min_loss_scale": 1,
        "fp16_master_weights_and_grads": False,
    }
    others = frozenset({"loss_scale_delay"})
    enabled: bool
    loss_scale: float

    def _problems(self) -> list[str]:
        found = []
        if self.loss_scale < 0:
            found.append(f"loss_scale: must be a number of at least 0, where 0 finds itself, got {self.loss_scale}")
        if self.enabled and self.loss_scale == 0:
            for name in ("loss_scale_window", "min_loss_scale"):
                if vars(self)[name] <= 0:
                    found.append(f"{name}: must be a number above 0, got {vars(self)[name]}")
        return found


class DeepSpeedBF16Config(Section):
    """``bf16``."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "enabled": False,
        "immediate_grad_update": False,
        "check_grad_overflow": True,
        "bf16_master_weights_and_grads": False,
        "bf16_optimizer_states": False,
    }


class DeepSpeedZeroLeafModuleConfig(Section):
    """``zero_optimization.leaf_module``."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "classes": leaves.DEFAULT_CLASSES,
        "names": [],
        "name_suffixes": [],
    }


class DeepSpeedZeroOffloadParamConfig(Section):
    """``zero_optimization.offload_param``."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "device": "none",
        "nvme_path": None,
        "buffer_count": 5,
        "buffer_size": 100_000_000,
        "max_in_cpu": 1_000_000_000,
        "pin_memory": True,
    }
    others = frozenset(field.name for kind in (OffloadParamConfig, OffloadOptimizerConfig) for field in fields(kind))

    def _problems(self) -> list[str]:
        device = vars(self)["device"]
        return [] if device in ("none", "cpu", "nvme") else [f"device: expected none, cpu or nvme, got {device!r}"]


class DeepSpeedZeroOffloadOptimizerConfig(DeepSpeedZeroOffloadParamConfig):
    """``zero_optimization.offload_optimizer``."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "device": "none",
        "nvme_path": None,
        "buffer_count": 4,
        "pin_memory": True,
        "pipeline_read": False,
        "pipeline_write": False,
        "fast_init": False,
        "ratio": 1.0,
        "super_offload": False,
        "cpuadam_cores_perc": 0.8,
    }


_STAGE3 = (
    *("prefetch_bucket_size", "param_persistence_threshold", "model_persistence_threshold", "max_live_parameters"),
    *("max_reuse_distance", "gather_16bit_weights_on_model_save", "module_granularity_threshold"),
    *("use_all_reduce_for_fetch_params", "allgather_sequential"),
)
"""Attributes whose key begins with ``stage3_``."""


class DeepSpeedZeroConfig(Section):
    """``zero_optimization``."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "stage": 0,
        "contiguous_gradients": True,
        "reduce_scatter": True,
        "reduce_bucket_size": 500_000_000,
        "use_multi_rank_bucket_allreduce": True,
        "allgather_partitions": True,
        "allgather_bucket_size": 500_000_000,
        "overlap_comm": None,
        "compute_grad_norm": True,
        "load_from_fp32_weights": True,
        "elastic_checkpoint": False,
        "offload_param": None,
        "offload_optimizer": None,
        "zenflow": None,
        "sub_group_size": 1_000_000_000,
        "cpu_offload_param": None,
        "cpu_offload_use_pin_memory": None,
        "cpu_offload": None,
        "prefetch_bucket_size": 50_000_000,
        "param_persistence_threshold": 100_000,
        "model_persistence_threshold": sys.maxsize,
        "max_live_parameters": 1_000_000_000,
        "max_reuse_distance": 1_000_000_000,
        "gather_16bit_weights_on_model_save": False,
        "module_granularity_threshold": 0,
        "use_all_reduce_for_fetch_params": False,
        "allgather_sequential": False,
        "ignore_unused_parameters": True,
        "legacy_stage1": False,
        "round_robin_gradients": False,
        "parameter_alignment": False,
        "zero_hpz_partition_size": 1,
        "zero_quantized_weights": False,
        "zero_quantized_nontrainable_weights": False,
        "zero_quantized_gradients": False,
        "memory_efficient_linear": True,
        "pipeline_loading_checkpoint": False,
        "override_module_apply": True,
        "log_trace_cache_warnings": False,
        "enable_sanity_checks": False,
        "save_muon_momentum_buffer_in_memory": False,
        "leaf_module": DeepSpeedZeroLeafModuleConfig,
    }
    keys: ClassVar[Mapping[str, str]] = {
        **{f"stage3_{name}": name for name in _STAGE3},
        "stage3_gather_fp16_weights_on_model_save": "gather_16bit_weights_on_model_save",
        "gather_fp16_weights_on_model_save": "gather_16bit_weights_on_model_save",
    }
    sections: ClassVar[Mapping[str, type[Section]]] = {
        "offload_param": DeepSpeedZeroOffloadParamConfig,
        "offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig,
    }
    others = frozenset(
        {"mics_shard_size", "mics_hierarchical_params_gather"} | {each.name for each in fields(ZeroConfig)}
    )

    def __init__(self, **written: Any) -> None:
        """Read the values as every section; then set ``overlap_comm`` and sections of older keys."""
        super().__init__(**written)
        if self.overlap_comm is None:
            self.overlap_comm = foreign.shards({"zero_optimization": vars(self)}, "weights")
        for older, name in (("cpu_offload", "offload_optimizer"), ("cpu_offload_param", "offload_param")):
            if vars(self)[older] and vars(self)[name] is None:
                setattr(self, name, self.sections[name](device="cpu"))

    def _problems(self) -> list[str]:
        number = vars(self)["stage"]
        found = [] if number in range(4) else [f"stage: expected 0, 1, 2 or 3, got {number}"]
        if vars(self)["reduce_bucket_size"] <= 0:
            found.append(f"reduce_bucket_size: expected a number above 0, got {vars(self)['reduce_bucket_size']}")
        return found

    overlap_comm: bool | None


class _SinkConfig(Section):
    defaults: ClassVar[Mapping[str, Any]] = {"enabled": False, "output_path": "", "job_name": "DeepSpeedJobName"}


class TensorBoardConfig(_SinkConfig):
    """``tensorboard``."""


class CSVConfig(_SinkConfig):
    """``csv_monitor``."""


class WandbConfig(Section):
    """``wandb``."""

    defaults: ClassVar[Mapping[str, Any]] = {"enabled": False, "group": None, "team": None, "project": "deepspeed"}


class CometConfig(Section):
    """``comet``."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "enabled": False,
        "samples_log_interval": 100,
        **dict.fromkeys(
            ("project", "workspace", "api_key", "experiment_name", "experiment_key", "online", "mode"), None
        ),
    }


class DeepSpeedMonitorConfig(Section):
    """The sections of monitors."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "tensorboard": TensorBoardConfig,
        "comet": CometConfig,
        "wandb": WandbConfig,
        "csv_monitor": CSVConfig,
    }

    @property
    def enabled(self) -> bool:
        """Whether a monitor is enabled."""
        return any(each.enabled for each in vars(self).values())


# The whole config


def get_float16_config(param_dict: Mapping[str, Any]) -> DeepSpeedFP16Config:
    """Return a config's section ``fp16``."""
    return DeepSpeedFP16Config(**(param_dict.get("fp16") or {}))


def get_bfloat16_config(param_dict: Mapping[str, Any]) -> DeepSpeedBF16Config:
    """Return a config's section ``bf16``, or ``bfloat16``."""
    return DeepSpeedBF16Config(**(param_dict.get("bf16") or param_dict.get("bfloat16") or {}))


def get_monitor_config(param_dict: Mapping[str, Any]) -> DeepSpeedMonitorConfig:
    """Return a config's sections of monitors: ``tensorboard``, ``comet``, ``wandb``, ``csv_monitor``."""
    names = DeepSpeedMonitorConfig.defaults
    return DeepSpeedMonitorConfig(**{name: param_dict[name] for name in names if name in param_dict})


def get_log_level(param_dict: Mapping[str, Any]) -> Any:
    """Return a config's ``log_level``."""
    return param_dict.get("log_level")


def get_gradient_clipping(param_dict: Mapping[str, Any]) -> float:
    """Return a config's ``gradient_clipping``, or DeepSpeed's default."""
    return float(param_dict.get("gradient_clipping", foreign.default_clipping(param_dict)))


_PLAIN: dict[str, tuple[str, Any]] = {
    **{name: (name, None) for name in ("steps_per_print", "log_level", "communication_data_type")},
    **{
        name: (name, False)
        for name in (
            *("dump_state", "wall_clock_breakdown", "memory_breakdown", "dataloader_drop_last", "sparse_gradients"),
            *("prescale_gradients", "disable_allgather", "zero_allow_untested_optimizer"),
        )
    },
    "managed_gradient_accumulation": ("managed_gradient_accumulation", True),
    "zero_force_ds_cpu_optimizer": ("zero_force_ds_cpu_optimizer", True),
    "gradient_predivide_factor": ("gradient_predivide_factor", 1.0),
    "gradient_allreduce_op": ("gradient_allreduce_op", "mean"),
    "scheduler_name": ("scheduler.type", None),
    "scheduler_params": ("scheduler.params", None),
    "optimizer_params": ("optimizer.params", None),
    "grad_accum_dtype": ("data_types.grad_accum_dtype", None),
    "param_dtype": ("data_types.param_dtype", None),
    "buffer_dtype": ("data_types.buffer_dtype", None),
    "load_universal_checkpoint": ("checkpoint.load_universal", False),
    "use_node_local_storage": ("checkpoint.use_node_local_storage", False),
    "torch_autocast_enabled": ("torch_autocast.enabled", False),
}
"""Attribute → (dotted key, default)."""


class DeepSpeedConfig:
    """A config, from a dict or the path of a JSON file, with an attribute for each setting.

    It does not check whether the config trains here: ``initialize`` does.
    """

    train_batch_size: int | None
    train_micro_batch_size_per_gpu: int | None
    gradient_accumulation_steps: int | None

    def __init__(self, config: Any, mpu: Any = None, mesh_device: Any = None) -> None:
        """Read ``config``. AssertionError if batch sizes do not fit the world size; ValueError for wrong values."""
        if mpu is not None or mesh_device is not None:
            raise UsageError(
                "DeepSpeedConfig: expected no mpu and no mesh_device: all ranks are data-parallel",
                code="deepspeed-parallelism-unavailable",
            )
        tree = self._param_dict = foreign.written(foreign.given(config, None))
        self.world_size, self.global_rank = processes.get_world_size(), processes.get_rank()
        for name in TRIPLE:
            value = foreign.value(tree, name)
            setattr(self, name, None if value == "auto" else value)
        for name, (key, default) in _PLAIN.items():
            found = foreign.value(tree, key)
            setattr(self, name, default if found is None else found)
        self.gradient_allreduce_op = str(vars(self)["gradient_allreduce_op"]).lower()
        if self.gradient_allreduce_op not in ("mean", "sum"):
            raise ConfigError(f"gradient_allreduce_op: expected mean or sum, got {self.gradient_allreduce_op!r}")
        kind = foreign.value(tree, "optimizer.type")
        self.optimizer_name = None if kind is None else str(kind).lower()
        self.gradient_clipping = get_gradient_clipping(tree)
        zero = tree.get("zero_optimization") or {}
        self.zero_config = DeepSpeedZeroConfig(**(zero if isinstance(zero, Mapping) else {"stage": 1}))
        self.zero_optimization_stage = vars(self.zero_config)["stage"]
        self.zero_enabled = foreign.shards(tree, "states")
        self.float16_config, self.bfloat16_config = get_float16_config(tree), get_bfloat16_config(tree)
        self.monitor_config = get_monitor_config(tree)
        self._configure_train_batch_size()

    def _configure_train_batch_size(self) -> None:
        total, micro, steps = (vars(self)[name] for name in TRIPLE)
        if total is None and micro is None:
            raise AssertedError(
                "config: expected train_batch_size or train_micro_batch_size_per_gpu",
                code="deepspeed-batch-size-missing",
            )
        if steps is None:
            steps = 1 if total is None or micro is None else total // (micro * self.world_size)
        micro = total // (steps * self.world_size) if micro is None and steps else micro
        total = micro * steps * self.world_size if total is None else total
        if not (total and micro and steps) or total != micro * steps * self.world_size or min(micro, steps) < 1:
            raise AssertedError(
                f"config: expected train_batch_size = micro-batch × accumulation × ranks, got {total} and {micro} × "
                f"{steps} × {self.world_size}",
                code="deepspeed-batch-sizes-inconsistent",
            )
        self.train_batch_size, self.train_micro_batch_size_per_gpu, self.gradient_accumulation_steps = (
            total,
            micro,
            steps,
        )


NAMES: dict[str, Any] = {
    **dict.fromkeys(("DeepSpeedConfig", "runtime.config.DeepSpeedConfig"), DeepSpeedConfig),
    "runtime.config.get_log_level": get_log_level,
    "runtime.config.get_gradient_clipping": get_gradient_clipping,
    "runtime.constants.LOG_LEVEL_DEFAULT": None,
    "runtime.constants.GRADIENT_CLIPPING_DEFAULT": foreign.CLIPPED_TO,
    **{
        f"{module}.{each.__name__}": each
        for module, kinds in {
            "runtime.precision_config": (
                *(DeepSpeedFP16Config, DeepSpeedBF16Config, get_float16_config, get_bfloat16_config),
            ),
            "runtime.zero.config": (DeepSpeedZeroConfig,),
            "runtime.zero.leaf_module_config": (DeepSpeedZeroLeafModuleConfig,),
            "runtime.zero.offload_config": (DeepSpeedZeroOffloadParamConfig, DeepSpeedZeroOffloadOptimizerConfig),
            "monitor.config": (
                *(DeepSpeedMonitorConfig, TensorBoardConfig, CSVConfig, WandbConfig, CometConfig, get_monitor_config),
            ),
        }.items()
        for each in kinds
    },
}
"""Dotted name → the object."""
