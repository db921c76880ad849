"""One table: dotted name in ``deepspeed`` → the object, or the reason why there is none. Modules are built from it.

Owns: the set of names, the message for a missing one. Must not know: the work of the objects, how modules are found.

The names are those that transformers, accelerate, trl, peft and Lightning use, and that training scripts call;
tests/compat/test_names.py reads the installed ones and fails for every name that is not in here.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from shardengine.compat.deepspeed import (
    accelerators,
    checkpoints,
    config_classes,
    facade,
    gathering,
    helpers,
    leaves,
    monitors,
    one_parameter,
    optimizers,
    phases,
    processes,
    schedules,
    versions,
    whole_files,
)  # fmt: skip
from shardengine.config import nearest
from shardengine.errors import ConfigError, UsageError
from shardengine.version import __version__

DEEPSPEED = "0.19.8"
"""The version of DeepSpeed that has these names; frameworks compare with it."""
VERSION = f"{DEEPSPEED}+shardengine.{__version__}"

_TENSOR_PARALLEL = "tensor parallelism changes the model, and data-parallel ranks each run all of it"
_SEQUENCES = "sequences are not cut over ranks: every rank trains on whole ones"
_PIPELINE = "the model is not cut into pipeline stages; stage 3 trains what one device cannot hold"
_EXPERTS = "every rank holds all experts of the model; stages 1 to 3 shard them like other weights"
_INFERENCE = "there is no engine for inference: call generate() of the engine, or inside of zero.GatheredParameters"
_BY_CONFIG = "take torch.optim.AdamW, Adam or SGD, or name one in the config's `optimizer`"
_RECOMPUTATION = "set `activation_checkpointing.enabled` in the config, or use torch.utils.checkpoint"

REFUSED: dict[str, str] = {
    "tp_model_init": _TENSOR_PARALLEL,
    "PipelineModule": _PIPELINE,
    "PipelineEngine": _PIPELINE,
    "init_inference": _INFERENCE,
    "InferenceEngine": _INFERENCE,
    "DeepSpeedHybridEngine": _INFERENCE,
    "pipe.PipelineModule": _PIPELINE,
    "pipe.LayerSpec": _PIPELINE,
    "moe.layer.MoE": _EXPERTS,
    "ops.adagrad.DeepSpeedCPUAdagrad": f"Adagrad is not available; {_BY_CONFIG}",
    "ops.lamb.FusedLamb": f"it needs the norm of each full parameter; {_BY_CONFIG}",
    "elasticity.compute_elastic_config": (
        "the number of ranks does not choose the batch size: the config's train_batch_size stays the same on any number"
    ),
    "sequence.layer.DistributedAttention": _SEQUENCES,
    "sequence.cross_entropy.vocab_sequence_parallel_cross_entropy": _SEQUENCES,
    "runtime.utils.move_to_device": "call .to(device) on each tensor of the batch",
    "runtime.sequence_parallel.ulysses_sp.TiledMLP": (
        "nothing is cut over tokens; the config's activation_checkpointing spares activations"
    ),
    "runtime.sequence_parallel.ulysses_sp.UlyssesSPAttentionHF": _SEQUENCES,
    "runtime.sequence_parallel.ulysses_sp.UlyssesSPDataLoaderAdapter": _SEQUENCES,
    "utils.groups._get_sequence_parallel_group": _SEQUENCES,
    "utils.groups._get_sequence_parallel_rank": _SEQUENCES,
    "utils.groups._get_sequence_parallel_world_size": _SEQUENCES,
    "utils.zero_to_fp32.get_model_state_file": "`shardengine export` writes whole weights",
    "utils.zero_to_fp32.get_optim_files": "`shardengine export` writes whole weights",
    "runtime.pipe.module.PipelineModule": _PIPELINE,
    "checkpoint.ds_to_universal.main": "a checkpoint loads at any stage and number of ranks as it is",
    "checkpoint.utils.get_model_ckpt_name_for_rank": (
        "a checkpoint has no file of torch.save: utils.zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint reads it"
    ),
    "checkpointing.checkpoint": _RECOMPUTATION,
    "checkpointing.configure": _RECOMPUTATION,
}
"""Dotted name → why it is not available. Importing it is no error; calling it or reading its attributes raises."""


class _Refusing(type):
    """The metaclass of names that are not available: a call or an attribute access raises an error with the reason."""

    def __call__(cls, *_: Any, **__: Any) -> NoReturn:
        raise UsageError(cls.__doc__, code="deepspeed-name-unavailable")

    def __getattr__(cls, name: str) -> NoReturn:
        raise AttributeError(cls.__doc__, name=name, obj=cls)


def _refusing(name: str, reason: str) -> type:
    said = f"deepspeed.{name} is not available through shardengine: {reason}"
    return _Refusing(name.rpartition(".")[2], (), {"__doc__": said})


PROVIDED: dict[str, Any] = {
    "initialize": facade.initialize,
    "DeepSpeedEngine": facade.DeepSpeedEngine,
    "DeepSpeedConfigError": ConfigError,
    "runtime.config.DeepSpeedConfigError": ConfigError,
    "runtime.engine.DeepSpeedEngine": facade.DeepSpeedEngine,
    "runtime.base_optimizer.DeepSpeedOptimizer": facade.DeepSpeedOptimizer,
    "runtime.base_optimizer.ZeROOptimizer": facade.ZeROOptimizer,
    "add_config_arguments": helpers.add_config_arguments,
    **accelerators.NAMES,
    **config_classes.NAMES,
    **leaves.NAMES,
    **monitors.NAMES,
    **{
        f"__version_{part}__": int(n) for part, n in zip(("major", "minor", "patch"), DEEPSPEED.split("."), strict=True)
    },
    **one_parameter.NAMES,
    **optimizers.NAMES,
    **phases.NAMES,
    **processes.NAMES,
    **schedules.NAMES,
    **versions.NAMES,
    **whole_files.NAMES,
    "zero.Init": gathering.Init,
    "zero.GatheredParameters": gathering.GatheredParameters,
    "zero.register_external_parameter": gathering.register_external_parameter,
    "zero.unregister_external_parameter": gathering.register_external_parameter,
    "runtime.zero.unwrap_model_for_generation": gathering.unwrap_model_for_generation,
    "runtime.zero.ZeroParamStatus": gathering.ZeroParamStatus,
    "runtime.zero.Init": gathering.Init,
    "runtime.zero.GatheredParameters": gathering.GatheredParameters,
    "runtime.zero.partition_parameters.Init": gathering.Init,
    "runtime.zero.partition_parameters.GatheredParameters": gathering.GatheredParameters,
    "runtime.zero.partition_parameters.ZeroParamStatus": gathering.ZeroParamStatus,
    "runtime.zero.partition_parameters.zero_wrapper_for_fp_tensor_constructor": helpers.constructor_as_it_is,
    "runtime.zero.partition_parameters._orig_torch_arange": torch.arange,
    "utils.logger": helpers.logger,
    "utils.logging.logger": helpers.logger,
    "utils.is_initialized": dist.is_initialized,
    "utils.log_dist": helpers.log_dist,
    "utils.logging.log_dist": helpers.log_dist,
    "utils.RepeatingLoader": helpers.RepeatingLoader,
    "runtime.dataloader.RepeatingLoader": helpers.RepeatingLoader,
    "runtime.utils.see_memory_usage": helpers.see_memory_usage,
    "utils.zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint": checkpoints.get_fp32_state_dict_from_zero_checkpoint,
    "utils.zero_to_fp32.load_state_dict_from_zero_checkpoint": checkpoints.load_state_dict_from_zero_checkpoint,
    "checkpoint.utils.clone_tensors_for_torch_save": helpers.clone_tensors_for_torch_save,
    "compression.helper.recursive_getattr": helpers.recursive_getattr,
    "compression.helper.recursive_setattr": helpers.recursive_setattr,
    "git_version_info.version": VERSION,
    "launcher.runner.DEEPSPEED_ENVIRONMENT_NAME": ".deepspeed_env",
    **{name: _refusing(name, reason) for name, reason in REFUSED.items()},
}
"""Dotted name → the object; one that is not available raises when it is called."""

MODULES: frozenset[str] = frozenset(
    name.rsplit(".", depth)[0] for name in PROVIDED for depth in range(1, name.count(".") + 1)
)
"""The dotted names of all submodules of ``deepspeed``."""


def missing(name: str) -> str:
    """Return the error message for a dotted name that is not in the table."""
    known = sorted(name for name in PROVIDED if name not in REFUSED)
    return (
        f"deepspeed.{name} is not provided by shardengine {__version__}, which stands for deepspeed here: expected one "
        f"of the names in shardengine.compat.deepspeed.table; the nearest is deepspeed.{nearest(name, known)}"
    )


def fill(module: ModuleType, dotted: str) -> None:
    """Set the names of the table directly in the module ``dotted`` on ``module``; "" is the package itself."""
    start = f"{dotted}." if dotted else ""

    def unknown(name: str) -> NoReturn:
        ours = not name.startswith("__")  # `inspect` asks every module for its __file__: no search for similar names
        said = missing(start + name) if ours else f"module {module.__name__!r} has no attribute {name!r}"
        raise AttributeError(said, name=name, obj=module)

    for name, value in PROVIDED.items():
        if name.startswith(start) and "." not in name[len(start) :]:
            setattr(module, name[len(start) :], value)
    vars(module)["__getattr__"] = unknown


def install_below(package: str) -> None:
    """Make all modules of the table importable as submodules, and attributes, of ``package``."""
    for dotted in sorted(MODULES):
        module = ModuleType(f"{package}.{dotted}", f"Names of deepspeed.{dotted}.")
        module.__path__, module.__spec__ = [], ModuleSpec(module.__name__, None, is_package=True)
        fill(module, dotted)
        sys.modules[module.__name__] = module
        holder, _, leaf = module.__name__.rpartition(".")
        setattr(sys.modules[holder], leaf, module)
