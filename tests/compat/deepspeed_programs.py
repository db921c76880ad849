"""Small training programs that run under DeepSpeed and under shardengine's names alike, and what they compute.

Each takes the module ``deepspeed`` and a stage, and returns JSON of numbers. What the installed DeepSpeed says is in
``tests/data/deepspeed_numbers.json`` (``python -m tests.data.make_deepspeed_numbers``). Nothing of shardengine here.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

SGD = {"type": "SGD", "params": {"lr": 0.05}}
ADAM = {"type": "Adam", "params": {"lr": 0.05, "torch_adam": True, "weight_decay": 0.0}}
LINEAR = {"type": "WarmupLR", "params": {"warmup_num_steps": 6, "warmup_max_lr": 0.1, "warmup_type": "linear"}}
STAGES = (0, 1, 2, 3)


class Sides(nn.Module):
    """A part that is always used, one that is at times, one that never is."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.at_times, self.never = nn.Linear(4, 1), nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        out: Tensor = self.always(x)
        return out + self.at_times(x) if both else out


def model_of(kind: Callable[[], nn.Module] | None = None) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)) if kind is None else kind()


def batch(deepspeed: Any, number: int) -> Tensor:
    ranks, rank = deepspeed.comm.get_world_size(), deepspeed.comm.get_rank()
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(100 + number * ranks + rank)) * 3


def make(deepspeed: Any, stage: int, steps: int = 1, model: nn.Module | None = None, **more: Any) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": steps,
        "zero_optimization": {"stage": stage},
        "optimizer": SGD,
        "zero_allow_untested_optimizer": True,
        **more,
    }
    model = model_of() if model is None else model
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)


def whole(deepspeed: Any, engine: Any) -> dict[str, list[float]]:
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        return {name: p.detach().float().flatten().tolist() for name, p in engine.module.named_parameters()}


def run(deepspeed: Any, engine: Any, numbers: range, way: str = "engine") -> dict[str, list[float]]:
    for number in numbers:
        loss = engine(batch(deepspeed, number)).square().mean()
        if way == "engine":
            engine.backward(loss)
        else:
            loss.backward()
        engine.step()
    return whole(deepspeed, engine)


def clipping(deepspeed: Any, stage: int, _folder: Path) -> Any:
    """Gradients of a norm above 1, and nothing said of clipping."""
    return run(deepspeed, make(deepspeed, stage)[0], range(3))


def accumulation(deepspeed: Any, stage: int, _folder: Path) -> Any:
    """Four micro-batches, by ``engine.backward(loss)`` and by ``loss.backward()``, not at stage 0."""
    ways = ("engine", "loss") if stage else ("engine",)
    more: dict[str, Any] = {"gradient_clipping": 0.0}
    return {way: run(deepspeed, make(deepspeed, stage, 4, **more)[0], range(8), way) for way in ways}


def unmanaged(deepspeed: Any, stage: int, _folder: Path) -> Any:
    """As many micro-batches in a step as the caller likes."""
    found = {}
    for steps in (1, 4):
        more: dict[str, Any] = {"gradient_clipping": 0.0, "managed_gradient_accumulation": False}
        engine = make(deepspeed, stage, steps, **more)[0]
        for window, count in enumerate((1, 3, 2, 5)):
            for micro in range(count):
                engine.backward(engine(batch(deepspeed, 10 * window + micro)).square().mean())
            said = engine.is_gradient_accumulation_boundary()
            engine.step()
        found[str(steps)] = [whole(deepspeed, engine), engine.global_steps, engine.global_samples, said]
    return found


def unused(deepspeed: Any, stage: int, _folder: Path) -> Any:
    """A parameter without a gradient in a step, and one that never has one."""
    adam = {"type": "AdamW", "params": {"lr": 0.05, "torch_adam": True, "weight_decay": 0.1}}
    engine = make(deepspeed, stage, model=model_of(Sides), optimizer=adam)[0]
    for number in range(4):
        engine.backward(engine(batch(deepspeed, number), number == 0).square().mean())
        engine.step()
    return whole(deepspeed, engine)


def loading(deepspeed: Any, stage: int, folder: Path) -> Any:
    """What goes on from a checkpoint, and what does not."""
    engine = make(deepspeed, stage, optimizer=ADAM, scheduler=LINEAR)[0]
    run(deepspeed, engine, range(4))
    engine.save_checkpoint(str(folder), "one", {"epoch": 1})
    options: tuple[dict[str, bool], ...] = (
        {},
        {"load_optimizer_states": False},
        {"load_lr_scheduler_states": False},
        {"load_optimizer_states": False, "load_lr_scheduler_states": False},
        *([{"load_module_only": True}] if stage < 3 else []),
    )
    found = {}
    for given in options:
        engine, optimizer, *_ = make(deepspeed, stage, optimizer=ADAM, scheduler=LINEAR)
        _, client = engine.load_checkpoint(str(folder), "one", **given)
        said = [engine.global_steps, engine.global_samples, engine.skipped_steps, client["epoch"]]
        rates = []
        for number in range(3):
            engine.backward(engine(batch(deepspeed, number)).square().mean())
            rates.append(optimizer.param_groups[0]["lr"])
            engine.step()
        found[" ".join(given)] = [said, rates, whole(deepspeed, engine)]
    return found


def latest(deepspeed: Any, stage: int, folder: Path) -> Any:
    """What ``latest`` names."""
    engine = make(deepspeed, stage)[0]
    engine.save_checkpoint(str(folder), "one")
    engine.save_checkpoint(str(folder), "two", save_latest=False)
    deepspeed.comm.barrier()
    return [
        (folder / "latest").read_text(encoding="utf-8").strip(),
        sorted(p.name for p in folder.iterdir() if p.is_dir()),
    ]


def schedules(deepspeed: Any, stage: int, _folder: Path) -> Any:
    """Rates and betas of ten steps."""
    found = {}
    for name, params in SCHEDULES.items():
        section = {"type": name.partition(" ")[0], "params": params}
        engine, optimizer, _, _ = make(deepspeed, stage, optimizer=ADAM, scheduler=section)
        rows = found[name] = list[Any]()
        for number in range(10):
            group = optimizer.param_groups[0]
            rows.append([group["lr"], *group["betas"]])
            engine.backward(engine(batch(deepspeed, number)).square().mean())
            engine.step()
        rows.append(engine.get_lr())
    return found


SCHEDULES: dict[str, dict[str, Any]] = {
    "WarmupLR linear": {"warmup_num_steps": 4, "warmup_max_lr": 0.1, "warmup_type": "linear"},
    "WarmupLR log": {"warmup_num_steps": 5, "warmup_max_lr": 0.1, "warmup_min_lr": 0.01},
    "WarmupLR own": {"warmup_num_steps": 3},
    "WarmupLR short": {"warmup_num_steps": 1, "warmup_type": "linear"},
    "WarmupDecayLR linear": {
        "warmup_num_steps": 3, "total_num_steps": 7, "warmup_max_lr": 0.1, "warmup_type": "linear",
    },
    "WarmupDecayLR own": {"warmup_num_steps": 3, "total_num_steps": 7},
    "WarmupCosineLR linear": {
        "warmup_num_steps": 3, "total_num_steps": 7, "warmup_min_ratio": 0.1, "cos_min_ratio": 0.01,
        "warmup_type": "linear",
    },
    "WarmupCosineLR log": {"warmup_num_steps": 3, "total_num_steps": 7},
    "OneCycle decay": {
        "cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 3, "cycle_second_step_size": 4,
        "decay_step_size": 2, "decay_lr_rate": 0.5, "decay_mom_rate": 0.01,
    },
    "OneCycle stairs": {
        "cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 4, "cycle_first_stair_count": 2,
        "cycle_second_stair_count": 1,
    },
    "LRRangeTest": {"lr_range_test_min_lr": 0.01, "lr_range_test_step_size": 2, "lr_range_test_step_rate": 0.5},
}  # fmt: skip


def defaults(deepspeed: Any, stage: int, _folder: Path) -> Any:
    """What an optimizer has of which nothing is said."""
    found = {}
    for name, params in OPTIMIZERS.items():
        section = {"type": name.partition(" ")[0], "params": params}
        optimizer = make(deepspeed, stage, optimizer=section)[1]
        found[name] = [{key: g[key] for key in ("lr", "weight_decay")} for g in optimizer.param_groups]
    return found


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "Adam torch": {"lr": 0.1, "torch_adam": True},
    "AdamW torch": {"torch_adam": True},
    "AdamW torch mode": {"torch_adam": True, "adam_w_mode": False},
    "Adam torch mode": {"torch_adam": True, "adam_w_mode": False},
    "Adagrad": {},
    "SGD": {"lr": 0.1},
}
"""Those that need no operations of DeepSpeed's own."""


def configs(_deepspeed: Any, _stage: int, _folder: Path) -> Any:
    """What a config says without an engine."""
    module = importlib.import_module(f"{_deepspeed.__name__}.runtime.config")
    found = {}
    for name, tree in CONFIGS.items():
        config = module.DeepSpeedConfig({"train_micro_batch_size_per_gpu": 2, **tree})
        found[name] = {each: _plain(functools.reduce(getattr, each.split("."), config)) for each in ASKED}
    return found


def _plain(value: Any) -> Any:
    shown = getattr(value, "value", value)  # of an enumeration
    return shown if isinstance(shown, (int, float, str, list, dict)) or shown is None else str(shown)


CONFIGS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "much": {
        "gradient_accumulation_steps": 3, "gradient_clipping": 0.5, "steps_per_print": 7, "log_level": "ERROR",
        "fp16": {"enabled": True, "loss_scale": "128", "initial_scale_power": 8},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}, "scheduler": {"type": "WarmupLR", "params": {}},
        "zero_optimization": {"stage": 3, "stage3_gather_fp16_weights_on_model_save": True, "reduce_bucket_size": 50,
            "stage3_max_live_parameters": 9, "leaf_module": {"classes": "a.B"}, "overlap_comm": False,
            "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}},
        "tensorboard": {"enabled": True, "output_path": "x"}, "csv_monitor": {"job_name": "y"},
    },
    "older": {
        "bfloat16": {"enabled": True}, "prescale_gradients": True, "dataloader_drop_last": True,
        "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": 7},
    },
}  # fmt: skip
_ZERO = (
    *("stage", "reduce_bucket_size", "allgather_bucket_size", "overlap_comm", "contiguous_gradients", "sub_group_size"),
    *("reduce_scatter", "allgather_partitions", "load_from_fp32_weights", "elastic_checkpoint", "max_live_parameters"),
    *("max_reuse_distance", "prefetch_bucket_size", "param_persistence_threshold", "ignore_unused_parameters"),
    *("model_persistence_threshold", "gather_16bit_weights_on_model_save", "round_robin_gradients"),
    *("module_granularity_threshold", "use_all_reduce_for_fetch_params", "zero_hpz_partition_size"),
    *("zero_quantized_weights", "zero_quantized_gradients", "memory_efficient_linear"),
    *("leaf_module.classes", "leaf_module.names", "leaf_module.name_suffixes", "enable_sanity_checks"),
)
ASKED = (
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"),
    *("steps_per_print", "log_level", "optimizer_name", "optimizer_params", "scheduler_name", "scheduler_params"),
    *("prescale_gradients", "gradient_predivide_factor", "gradient_allreduce_op", "dataloader_drop_last"),
    *("zero_enabled", "zero_optimization_stage", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"),
    *("managed_gradient_accumulation", "dump_state", "wall_clock_breakdown", "memory_breakdown"),
    *("communication_data_type", "grad_accum_dtype", "param_dtype", "buffer_dtype", "load_universal_checkpoint"),
    *(f"zero_config.{name}" for name in _ZERO),
    *(f"float16_config.{name}" for name in ("enabled", "auto_cast", "loss_scale", "initial_scale_power")),
    *(f"float16_config.{name}" for name in ("loss_scale_window", "hysteresis", "min_loss_scale")),
    *("bfloat16_config.enabled", "bfloat16_config.immediate_grad_update", "monitor_config.enabled"),
    *(f"monitor_config.tensorboard.{name}" for name in ("enabled", "output_path", "job_name")),
    *(f"monitor_config.csv_monitor.{name}" for name in ("enabled", "output_path", "job_name")),
    *(f"monitor_config.wandb.{name}" for name in ("enabled", "group", "team", "project")),
)

PROGRAMS: dict[str, Callable[[Any, int, Path], Any]] = {
    program.__name__: program
    for program in (clipping, accumulation, unmanaged, unused, loading, latest, schedules, defaults, configs)
}
ALL = [
    (name, stage)
    for name in PROGRAMS
    for stage in STAGES
    if stage == 1 or name not in ("schedules", "latest", "defaults", "configs")
]


def rank_and_ranks() -> tuple[int, int]:
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
