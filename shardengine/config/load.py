"""The JSON config as frozen dataclasses. Owns: reading, checking, the batch triple, notices, and the way back to JSON.

Strict: an unknown key is an error that names the nearest valid one, and every problem of a file is reported in one
ConfigError. The keys themselves are rows of `config/keys.py`, read by `config/reader.py`. It must not know torch,
devices, groups or any runtime object; the number of ranks comes in as an integer (`Config.resolve_batch`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from shardengine.config.keys import KEYS, TRIPLE, Status
from shardengine.config.kinds import FrozenMapping, describe, frozen, plain
from shardengine.config.reader import Reader, Source, read_json
from shardengine.config.sections import (
    SECTION_TYPES,
    ActivationsConfig,
    AioConfig,
    AutocastConfig,
    Bf16Config,
    CheckpointConfig,
    Fp16Config,
    MonitorConfig,
    OptimizerConfig,
    SchedulerConfig,
    TypesConfig,
    ZeroConfig,
)
from shardengine.errors import ConfigError, UsageError

_SMALLEST_SCALE = 2.0**-126
EQUATION = f"{TRIPLE[0]} = {TRIPLE[1]} * {TRIPLE[2]} * world size must hold"


@dataclass(frozen=True)
class Config:
    """Everything that a config file says. ``gradient_clipping`` 0.0 is off; ``timeout_s`` is in seconds.

    ``gradient_accumulation`` None is the stage's own letter, ``reproducible`` None is decided by the backend,
    ``communication_data_type`` None is the parameter's dtype, ``nonfinite_gradients`` None is "skip", or "raise" where
    ``step_in_backward`` cannot skip.
    ``sources`` says for each dotted key where its value came from; ``notices`` are sentences to print once on rank 0.
    Neither takes part in comparisons.
    """

    train_batch_size: int | None = None
    train_micro_batch_size_per_gpu: int | None = None
    gradient_accumulation_steps: int | None = None
    gradient_clipping: float = 0.0
    nonfinite_gradients: Literal["skip", "raise", "step"] | None = None
    max_nonfinite_steps: int = 20
    gradient_allreduce_op: Literal["mean", "sum"] = "mean"
    gradient_accumulation: Literal["full", "sharded"] | None = None
    optimizer: OptimizerConfig | None = None
    scheduler: SchedulerConfig | None = None
    zero_optimization: ZeroConfig = field(default_factory=ZeroConfig)
    bf16: Bf16Config = field(default_factory=Bf16Config)
    fp16: Fp16Config = field(default_factory=Fp16Config)
    data_types: TypesConfig = field(default_factory=TypesConfig)
    torch_autocast: AutocastConfig = field(default_factory=AutocastConfig)
    activation_checkpointing: ActivationsConfig = field(default_factory=ActivationsConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    monitor: MonitorConfig = field(default_factory=MonitorConfig)
    communication_data_type: Literal["fp32", "bf16", "fp16"] | None = None
    overlap_comm: bool = True
    overlap_param_gather: bool = False
    reproducible: bool | None = None
    aio: AioConfig = field(default_factory=AioConfig)
    broadcast_buffers: bool = True
    timeout_s: float = 600.0
    debug: bool = False
    seed: int = 42
    steps_per_print: int = 10
    sources: Mapping[str, Source] = field(default_factory=FrozenMapping, compare=False)
    notices: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sources", frozen(self.sources))

    def resolve_batch(self, world_size: int) -> Config:
        """Return a copy whose three batch sizes are set and fit ``world_size`` ranks.

        Values that an earlier call derived are derived again. Raises ConfigError, showing the equation, if they
        cannot fit.
        """
        if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
            raise UsageError(f"resolve_batch: expected a world size >= 1, came {describe(world_size)}")
        given = {name: vars(self)[name] for name in TRIPLE if self.sources.get(name) != "derived"}
        total, micro, steps = (given.get(name) for name in TRIPLE)
        if total is None and micro is None:
            raise ConfigError(_MISSING_TRIPLE)
        if steps is None and (total is None or micro is None):
            steps = 1
        known = math.prod(factor for factor in (micro, steps, world_size) if factor is not None)
        if total is None:
            total = known
        shown = " * ".join("?" if factor is None else str(factor) for factor in (micro, steps, world_size))
        if total % known or (micro is not None and steps is not None and total != known):
            result = f"{known}" if "?" not in shown else f"{known} * ?, and {total} / {known} is not an integer"
            fitting = [] if steps is not None or micro is None else fitting_ranks(total, micro)
            more = f". Numbers of ranks that fit: {', '.join(map(str, fitting))}" if fitting else ""
            raise ConfigError(
                f"{EQUATION}, but {total} != {shown} = {result}; change one of them or leave one out{more}"
            )
        micro = total // known if micro is None else micro
        steps = total // known if steps is None else steps
        sizes: dict[str, int] = dict(zip(TRIPLE, (total, micro, steps), strict=True))
        derived = {name: "derived" for name in TRIPLE if given.get(name) is None}
        return dataclasses.replace(
            self,
            train_batch_size=total,
            train_micro_batch_size_per_gpu=micro,
            gradient_accumulation_steps=steps,
            sources=FrozenMapping({**dict.fromkeys(sizes, "file"), **self.sources, **derived}),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values that ``load_config`` turns into an equal Config."""
        tree = {name: value for name, value in vars(self).items() if name not in ("sources", "notices")}
        tree |= {name: plain(dataclasses.asdict(tree[name])) for name in SECTION_TYPES if name in tree}
        for name, part in (("optimizer", self.optimizer), ("scheduler", self.scheduler)):
            tree[name] = None if part is None else plain(vars(part))
        if self.optimizer is not None and self.optimizer.type == "Adam":
            tree["optimizer"]["params"]["adam_w_mode"] = False
        return tree

    def resolved(self) -> list[tuple[str, Any, str]]:
        """Return (dotted key, value, source) for every value, in the order of ``to_dict``."""

        def rows(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any, str]]:
            for name, value in tree.items():
                if isinstance(value, dict) and value:
                    yield from rows(value, f"{prefix}{name}.")
                else:
                    yield prefix + name, value, self.sources.get(prefix + name, "default")

        return list(rows(self.to_dict(), ""))


NOT_CLIPPED = "gradients are not clipped, because gradient_clipping is not in the config"
_MISSING_TRIPLE = (
    f"the batch size is missing: {EQUATION}; expected {TRIPLE[0]} or {TRIPLE[1]} (one alone, or any two of the three)"
)


def load_config(source: Mapping[str, Any] | str | Path | Config, auto: Mapping[str, Any] | None = None) -> Config:
    """Read and check a config: a path to JSON, a mapping (left as it is) or a Config (returned as it is).

    auto: dotted name → the value that counts where the config says "auto", for example
    ``{"train_micro_batch_size_per_gpu": 4, "optimizer.params.lr": 1e-4}``; what the config sets itself stays.
    Raises ConfigError with every problem found.
    """
    if isinstance(source, Config):
        return source
    if isinstance(source, (str, Path)):
        return _build(read_json(Path(source)), str(source), auto)
    if isinstance(source, Mapping):
        return _build(plain(source), "config", auto)
    raise ConfigError(f"expected a path to a JSON file, a mapping or a Config, came {describe(source)}")


def fitting_ranks(total: int, each: int) -> list[int]:
    """The numbers of ranks over which a global batch of ``total`` samples divides, in portions of ``each``."""
    if total % each:
        return []
    portions = total // each
    small = [number for number in range(1, math.isqrt(portions) + 1) if portions % number == 0]
    return sorted({*small, *(portions // number for number in small)})


def timeout_of(config: Any, auto: Mapping[str, Any] | None = None) -> float:
    """The config's timeout; the default where the config is wrong, which is said a moment later on every rank."""
    try:
        return load_config(config, auto).timeout_s
    except ConfigError:
        return Config().timeout_s


def _build(tree: dict[str, Any], source: str, auto: Mapping[str, Any] | None = None) -> Config:
    reader = Reader(auto)
    reader.read(tree)
    optimizer, scheduler = reader.optimizer(), reader.named("scheduler", "WarmupCosineLR")
    _check_precision(reader)
    _check_offload(reader)
    if reader.values.get("activation_checkpointing.cpu_offload"):
        _check_offloaded_activations(reader)
    if not reader.failed.intersection(TRIPLE):
        _check_triple(reader)
    if reader.problems:
        raise ConfigError(reader.problems, source)
    if "gradient_clipping" not in reader.values and "gradient_clipping" not in reader.automatic:
        reader.notices.append(NOT_CLIPPED)
    for key in KEYS.values():
        named = key.name.startswith(("optimizer.", "scheduler."))
        missing = reader.values.get(key.name) is None and (key.name not in reader.values or key.default is not None)
        if key.status is Status.ACTIVE and not named and missing:
            reader.values[key.name], reader.sources[key.name] = key.default, "default"
    sections: dict[str, dict[str, Any]] = {name: {} for name in (*SECTION_TYPES, "")}
    for name, value in reader.values.items():
        section, _, leaf = name.rpartition(".")
        sections[section][leaf] = value
    for name, section_type in SECTION_TYPES.items():
        outer, _, leaf = name.rpartition(".")
        sections[outer][leaf] = section_type(**sections[name])
    return Config(
        **sections[""],
        optimizer=None if optimizer is None else OptimizerConfig(*optimizer),
        scheduler=None if scheduler is None else SchedulerConfig(*scheduler),
        sources=reader.sources,
        notices=tuple(reader.notices),
    )


def _check_precision(reader: Reader) -> None:
    value = {key.name: reader.values.get(key.name, key.default) for key in KEYS.values()}
    if value["fp16.enabled"] and value["bf16.enabled"]:
        reader.problem("fp16.enabled", "expected fp16 or bf16, came both; switch one of them off")
    if value["bf16.enabled"] and value["bf16.stochastic_rounding"] and value["bf16.master_weights"]:
        reader.problem(
            "bf16.stochastic_rounding",
            "it rounds bf16 weights that are stepped themselves, and with fp32 master weights they are not; set "
            '"master_weights": false, or leave it out',
        )
    for name in ("fp16.loss_scale", "fp16.min_loss_scale"):
        if 0 < value[name] < _SMALLEST_SCALE:
            reader.problem(name, f"expected a number that fp32 can divide by, at least 2 ** -126, came {value[name]:g}")
    if _scales_loss(value) and not value["fp16.loss_scale"] and value["nonfinite_gradients"] in ("raise", "step"):
        reader.problem(
            "nonfinite_gradients",
            'expected "skip" with a dynamic loss scale, which finds its value by leaving steps out, came '
            f'"{value["nonfinite_gradients"]}"; give fp16.loss_scale a fixed value, or leave this key out',
        )
    scale = value["fp16.loss_scale"] or 2.0 ** value["fp16.initial_scale_power"]
    if _scales_loss(value) and not value["fp16.loss_scale"] and scale < value["fp16.min_loss_scale"]:
        reader.problem(
            "fp16.min_loss_scale",
            f"expected at most the first loss scale, 2 ** initial_scale_power = {scale:g}, came "
            f"{value['fp16.min_loss_scale']:g}",
        )


def _scales_loss(value: Mapping[str, Any]) -> bool:
    autocast = value["torch_autocast.enabled"] and value["torch_autocast.dtype"] == "float16"
    return bool(value["fp16.enabled"] or autocast)


def _check_offload(reader: Reader) -> None:
    value = {key.name: reader.values.get(key.name, key.default) for key in KEYS.values()}
    for name in ("zero_optimization.offload_optimizer", "zero_optimization.offload_param"):
        device, path = value[f"{name}.device"], value[f"{name}.nvme_path"]
        if device == "nvme" and path is None and f"{name}.nvme_path" not in reader.failed:
            reader.problem(f"{name}.nvme_path", "expected a directory on the disk, because device is nvme, came none")
    _check_ratio(reader, value)
    stage = value["zero_optimization.stage"]
    if value["zero_optimization.offload_param.device"] != "none" and stage < 3:
        reader.problem(
            "zero_optimization.offload_param.device",
            f"expected stage 3, where weights rest sharded, came stage {stage}; offload_optimizer is for every stage",
        )
    name = "zero_optimization.offload_optimizer.step_in_backward"
    if value[name] and value["zero_optimization.offload_optimizer.device"] == "none":
        reader.problem(
            name, "expected a device that is not none: what rests with the weights is stepped after backward"
        )
    if value[name] and stage == 0:
        reader.problem(name, "expected stage 1, 2 or 3: at stage 0 every rank steps everything, after backward")
    if value[name] and value["gradient_clipping"]:
        reader.problem(name, "expected gradient_clipping 0: the norm that clips is known after backward")
    if value[name] and _scales_loss(value):
        reader.problem(name, "expected no fp16: whether the scaled gradients are finite is known after backward")
    if value[name] and value["nonfinite_gradients"] == "skip":
        reader.problem(
            name,
            'expected nonfinite_gradients "raise" (its default here) or "step", came "skip": a step that has begun in '
            "backward cannot be left out",
        )
    if value["aio.block_size"] % 4096:
        reader.problem("aio.block_size", f"expected a multiple of 4096 bytes, came {value['aio.block_size']}")


def _check_ratio(reader: Reader, value: dict[str, Any]) -> None:
    ratio, device, memory = (
        f"zero_optimization.offload_optimizer.{name}" for name in ("ratio", "device", "device_memory")
    )
    if reader.failed & {ratio, device, memory}:
        return
    if value[ratio] == "auto" and value[device] == "none":
        reader.problem(
            ratio, 'expected device "cpu" or "nvme" beside "auto", came "none": there is nowhere to go; set it'
        )
    elif value[memory] is not None and value[ratio] != "auto":
        came = f"ratio {value[ratio]:g}, which says itself what stays"
        reader.problem(memory, f'expected "ratio": "auto" beside it, came {came}; set that, or leave this out')


def _check_offloaded_activations(reader: Reader) -> None:
    if not reader.values.get("activation_checkpointing.enabled"):
        reader.problem(
            "activation_checkpointing.cpu_offload",
            "it moves what checkpointed blocks keep to host memory, and no block is checkpointed; set "
            '"activation_checkpointing": {"enabled": true}, or leave it out',
        )


def _check_triple(reader: Reader) -> None:
    total, micro, steps = (reader.values.get(name) for name in TRIPLE)
    if total is None and micro is None:
        automatic = [name for name in TRIPLE[:2] if name in reader.automatic]
        more = (
            f'; {" and ".join(automatic)} "auto" is filled by Hugging Face\'s Trainer from its arguments: here '
            f'write a number, or give one: load_config(file, auto={{"{TRIPLE[1]}": …}})'
        )
        reader.problems.append(_MISSING_TRIPLE + (more if automatic else ""))
    elif total is not None and total % ((micro or 1) * (steps or 1)):
        shown = " * ".join("?" if factor is None else str(factor) for factor in (micro, steps, None))
        reader.problems.append(f"{EQUATION}, but {total} = {shown} holds for no world size; change one of them")
