"""What of a config means something else under DeepSpeed than here. Everything else is the business of `load_config`.

Owns: reading what a script calls a config, the few differences, the one message that tells all. Must not know: engines.

[Note: "auto"] Frameworks write numbers for "auto" before they hand a config over. What is left then, and would change
what is computed, is an error, as under DeepSpeed; the size of a bucket is not, and takes our default. So does the one
that they write for "auto", hidden_size squared, where it is smaller: a small model would travel in thousands of
collectives. Results do not depend on it.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardengine.compat.deepspeed import processes
from shardengine.compat.deepspeed.errors import AssertedError
from shardengine.config import NO_EFFECT_BECAUSE, NOT_CLIPPED, READ_AS, Config, ZeroConfig, load_config, read_tree
from shardengine.errors import ConfigError, UsageError

_log = logging.getLogger(__name__)
_SIZES = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
_SHARDED = {"states": (1, 2, 3), "gradients": (2, 3), "weights": (3,)}
"""At which of DeepSpeed's stages; its keys depend on that."""
_GATHERS_ON_SAVE = tuple(
    f"{start}gather_{kind}_weights_on_model_save" for start in ("stage3_", "") for kind in ("16bit", "fp16")
)
_UNTOLD = ("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "dataloader_drop_last", "log_level")
"""Keys that do what they say, or that frameworks write into every config: no notice."""
_FILLED = (
    *("gradient_clipping", "fp16.enabled", "bf16.enabled", "bfloat16.enabled"),
    *(f"optimizer.params.{name}" for name in ("betas", "eps", "weight_decay")),
)
"""Keys without which nobody can know what to compute ([Note: "auto"]); `load_config` refuses others itself."""
CLIPPED_TO = 1.0
"""DeepSpeed's norm, where a config says nothing."""
_DECAY_OF_TORCH = 0.01
_OF_OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adam": {"weight_decay": 0.0},
    "adamw": {"weight_decay": 0.0},
    "lion": {"lr": 1e-3, "betas": [0.9, 0.999]},
    "muon": {"weight_decay": 0.0, "betas": [0.9, 0.95], "eps": 1e-10},
}
_RATES_OF_MUON = {"muon_lr": 0.02, "adam_lr": 3e-4}
"""Hyper-parameters that DeepSpeed has other defaults for, by its classes; "torch_adam" takes torch's."""
_OF_PARAMS = ("torch_adam", "adam_w_mode", "lr", "betas", "eps", "weight_decay")
_TAG_VALIDATION = ("ignore", "warn", "fail")
_INSIDE = ("zero_optimization.", "activation_checkpointing.", "aio.", "optimizer.")
"""Sections whose keys without effect say how DeepSpeed does something, which is done in another way here."""


def given(config: Any, args: Any) -> Any:
    """The config of ``initialize``: a dict, the path of a JSON file, or what ``args.deepspeed_config`` says.

    UsageError where there is none.
    """
    found = (
        config
        if config is not None
        else getattr(args, "deepspeed_config", None) or getattr(args, "deepscale_config", None)
    )
    if not isinstance(found, str | os.PathLike | Mapping):
        raise UsageError(
            "deepspeed.initialize: expected config=, a dict or the path of a JSON file, or args.deepspeed_config, got "
            f"{type(found).__name__}"
        )
    return found


def written(config: str | os.PathLike[str] | Mapping[str, Any]) -> dict[str, Any]:
    """The config as a dict of its own. ConfigError where it is no file of JSON, nor of HJSON if that is installed."""
    if isinstance(config, Mapping):
        return dict(config)
    try:
        return read_tree(Path(config))
    except ConfigError as error:
        is_json = not isinstance(error.__cause__, json.JSONDecodeError)
        if is_json or importlib.util.find_spec("hjson") is None:
            raise
        try:
            return dict(importlib.import_module("hjson").loads(Path(config).read_text(encoding="utf-8")))
        except ValueError:
            raise error from None


def shards(config: Mapping[str, Any], what: str) -> bool:
    """Whether "states", "gradients" or "weights" are sharded, as DeepSpeed counts stages."""
    return _section(config, "zero_optimization").get("stage") in _SHARDED[what]


def steps_on_host(config: Mapping[str, Any]) -> bool:
    """Whether the optimizer is offloaded."""
    return bool(_device(_section(config, "zero_optimization").get("offload_optimizer")) not in (None, "none"))


def leaf_modules(config: Mapping[str, Any]) -> Any:
    """The section that names modules to be marked as gathered in one."""
    return _section(config, "zero_optimization").get("leaf_module")


def gathers_on_save(config: Mapping[str, Any]) -> bool:
    """Whether the config says that whole weights are gathered to be saved, under any of its names."""
    zero = _section(config, "zero_optimization")
    return any(bool(zero.get(name, False)) for name in _GATHERS_ON_SAVE)


def translate(
    config: dict[str, Any], *, optimizer: bool, scheduler: bool, model: Any = None
) -> tuple[dict[str, Any], list[str]]:
    """``config`` as our engine reads it, and what was left out, a sentence each.

    optimizer, scheduler: whether ``initialize`` was given one, which then counts, as under DeepSpeed · model: whose
    ``config`` may have a hidden size. ConfigError for "auto" that is left ([Note: "auto"]).
    """
    tree, told = copy.deepcopy(config), list[str]()
    zero = _section(tree, "zero_optimization")
    offload = zero.get("offload_param")
    if not shards(tree, "weights") and zero.pop("offload_param", None) and _device(offload) != "none":
        told.append("zero_optimization.offload_param has no effect below stage 3, where weights are not sharded")
    if _section(tree, "checkpoint").pop("async_save", False):
        told.append("checkpoint.async_save is left off: frameworks move a checkpoint as soon as it is saved")
    if optimizer and tree.pop("optimizer", None):
        told.append("optimizer has no effect, because initialize was given one")
    if scheduler and tree.pop("scheduler", None):
        told.append("scheduler has no effect, because initialize was given one")
    if not optimizer and not tree.get("optimizer"):
        for name in ("optimizer", "scheduler", "gradient_clipping"):
            tree.pop(name, None)  # of a model that is not trained, nothing is said
        zero.pop("offload_optimizer", None)
    else:
        told += _their_defaults(tree)
    for name in _UNTOLD:
        tree.pop(name, None)
    if isinstance(tree.setdefault("fp16", {}), dict):
        tree["fp16"].setdefault("loss_scale_delay", 1)  # as DeepSpeed counts
    tags = _section(tree, "checkpoint").get("tag_validation", "Warn")
    if str(tags).lower() not in _TAG_VALIDATION:
        raise ConfigError([f"checkpoint.tag_validation: expected one of {', '.join(_TAG_VALIDATION)}, got {tags!r}"])
    for name in _GATHERS_ON_SAVE:
        zero.pop(name, None)
    optimizer_keys = _section(tree, "optimizer")
    for name in [each for each in optimizer_keys if each in _OF_PARAMS]:
        del optimizer_keys[name]
        told.append(f"optimizer.{name} has no effect, as under DeepSpeed: write it into optimizer.params")
    told += [f"{name} has no effect, as under DeepSpeed: write it into its section" for name in _dotted(tree)]
    told += _own_sizes(zero, _hidden_size(model))
    left = [name for name in _FILLED if value(tree, name) == "auto"]
    if left:
        raise ConfigError(
            [f'{name}: "auto", which no framework has replaced; expected a value' for name in left], "config"
        )
    return tree, told


def default_clipping(tree: Mapping[str, Any]) -> float:
    """The norm to which gradients are clipped where ``gradient_clipping`` is not there; 0: they are not."""
    offload = _section(_section(tree, "zero_optimization"), "offload_optimizer")
    return 0.0 if "gradient_clipping_value" in tree or offload.get("step_in_backward") else CLIPPED_TO


def check_given(config: Mapping[str, Any], optimizer: Any, kind: type | None) -> None:
    """UsageError where ``config`` does not allow the caller's ``optimizer``. kind: which of DeepSpeed's made it."""
    if optimizer is None or kind is not None or not shards(config, "states"):
        return
    adam = isinstance(optimizer, _TESTED)
    name = getattr(optimizer, "__name__", type(optimizer).__name__)
    if (
        config.get("zero_allow_untested_optimizer") is False
        and isinstance(optimizer, torch.optim.Optimizer)
        and not adam
    ):
        raise AssertedError(
            f"zero_allow_untested_optimizer is false, and {name} is none that DeepSpeed has tested: expected true, or "
            "the key left out"
        )
    if config.get("zero_force_ds_cpu_optimizer") is True and steps_on_host(config):
        raise UsageError(
            f"zero_force_ds_cpu_optimizer is true, and the optimizer is {name}: expected DeepSpeedCPUAdam, or false, "
            "or the key left out"
        )


_TESTED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)


def cast_buffers(model: nn.Module, tree: dict[str, Any]) -> None:
    """Cast the model's buffers of floating point as ``data_types.buffer_dtype`` says, which leaves ``tree``."""
    wanted = _section(tree, "data_types").pop("buffer_dtype", None)
    if wanted is None:
        return
    if wanted not in _DTYPES:
        raise ConfigError(f"data_types.buffer_dtype: expected one of {', '.join(_DTYPES)}, got {wanted!r}")
    cast: dict[int, torch.Tensor] = {}  # one that two modules share stays one
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                module._buffers[name] = cast.setdefault(id(buffer), buffer.to(_DTYPES[wanted]))


_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def tell(tree: dict[str, Any], told: Iterable[str], *, trained: bool) -> Config | dict[str, Any]:
    """Log on rank 0, in one message, the sentences ``told`` and all that our config has to say; what ``initialize``
    takes, of which nothing is said any more. trained: whether the model is."""
    try:
        config = load_config(tree)
    except ConfigError:
        return tree  # which the engine says, on every rank
    said = _message(told, config.notices, trained=trained)
    if said and processes.get_rank() == 0:
        _log.warning("of the DeepSpeed config:%s", said)
    return replace(config, notices=())


def _message(told: Iterable[str], notices: Iterable[str], *, trained: bool) -> str:
    """Left out: under which name of ours a key is read. Keys without effect are told by what they have in common; those
    of how something is done, and that nothing is clipped, only where a model is ``trained``."""
    inside, others, said = list[str](), dict[str, list[str]](), list(told)
    for notice in notices:
        key, mark, reason = notice.partition(NO_EFFECT_BECAUSE)
        if mark and key.startswith(_INSIDE):
            inside.append(key)
        elif mark:
            others.setdefault(reason, []).append(key)
        elif READ_AS not in notice and (trained or notice != NOT_CLIPPED):
            said.append(notice)
    said += [
        f"{', '.join(keys)} {'has' if len(keys) == 1 else 'have'} no effect: {why}" for why, keys in others.items()
    ]
    if inside and trained:
        said.append(f"without effect, because it is done in another way (docs/config.md): {', '.join(inside)}")
    return "".join(f"\n- {sentence}" for sentence in said)


def _dotted(tree: dict[str, Any]) -> list[str]:
    """Take keys like "zero_optimization.stage", which DeepSpeed does not read, out of ``tree``; those to be told."""
    found = [name for name in tree if "." in name]
    for name in found:
        del tree[name]
    return [name for name in found if not name.endswith(_SIZES)]  # trl writes these, for a reference model


def _their_defaults(tree: dict[str, Any]) -> list[str]:
    """Write into ``tree`` what DeepSpeed computes with where nothing is said, and we with something else."""
    told = []
    if "gradient_clipping" not in tree and (clipping := default_clipping(tree)):
        tree["gradient_clipping"] = clipping
        told.append(
            f"gradient_clipping is not in it: gradients are clipped to a norm of {CLIPPED_TO}, DeepSpeed's default; 0 "
            "switches that off"
        )
    if _section(tree, "comm_hook").get("name", "none") == "none":
        tree.setdefault("step_unused_parameters", True)
    optimizer = _section(tree, "optimizer")
    kind, params = str(optimizer.get("type")).lower(), optimizer.get("params") or {}
    if kind == "adamw":
        params.pop("adam_w_mode", None)  # which counts for Adam alone
    defaults = _OF_OPTIMIZERS.get(kind, {})
    if kind in ("adam", "adamw") and params.get("torch_adam") and params.get("adam_w_mode", True):
        defaults = {"weight_decay": _DECAY_OF_TORCH}
    if kind == "muon" and "lr" not in params:
        defaults = {**defaults, **_RATES_OF_MUON}
    if defaults:
        optimizer["params"] = {**defaults, **params}
    return told


def _own_sizes(zero: dict[str, Any], hidden: int | None) -> list[str]:
    """Take sizes that frameworks have written for "auto" out of ``zero`` where ours are larger ([Note: "auto"])."""
    if hidden is None:
        return []
    written = {"reduce_bucket_size": hidden * hidden}
    replaced = [name for name, size in written.items() if zero.get(name) == size < getattr(ZeroConfig, name)]
    for name in replaced:
        del zero[name]
    return [
        f'zero_optimization.{name}: {written[name]} is what frameworks write for "auto"; our default of '
        f"{getattr(ZeroConfig, name)} counts"
        for name in replaced
    ]


def _hidden_size(model: Any) -> int | None:
    """The hidden size of a model, where frameworks look for it."""
    config = getattr(model, "config", None)
    for holder in (config, getattr(config, "text_config", None)):
        for found in (getattr(holder, "hidden_size", None), getattr(holder, "hidden_sizes", None)):
            if isinstance(found, int) or (isinstance(found, (list, tuple)) and found):
                return found if isinstance(found, int) else max(found)
    return None


def _device(offload: Any) -> Any:
    return offload.get("device", "none") if isinstance(offload, Mapping) else offload


def value(tree: Mapping[str, Any], dotted: str) -> Any:
    """What is at ``dotted``; None where nothing is."""
    found: Any = tree
    for name in dotted.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def _section(tree: Mapping[str, Any], name: str) -> dict[str, Any]:
    inside = tree.get(name)
    return inside if isinstance(inside, dict) else {}
