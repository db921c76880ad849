"""Translate the settings of a DeepSpeed config whose meaning differs from ours. `load_config` reads everything else.

Owns: reading a script's config, the few differences, the one message about all of them. Must not know: engines.

[Note: "auto"] Frameworks replace "auto" by numbers before they pass a config on. An "auto" that remains and would
change results is an error, as under DeepSpeed. For a bucket size it is no error; our default is used. Frameworks
replace "auto" for ``reduce_bucket_size`` by hidden_size squared. If that is smaller than our default, our default is
used as well, because a small model would otherwise need thousands of collectives. Results do not depend on it.
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
"""The stages of DeepSpeed that shard each of these."""
_GATHERS_ON_SAVE = tuple(
    f"{start}gather_{kind}_weights_on_model_save" for start in ("stage3_", "") for kind in ("16bit", "fp16")
)
_UNTOLD = ("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "dataloader_drop_last", "log_level")
"""Keys without a notice, because they have their effect here or frameworks write them into every config."""
_FILLED = (
    *("gradient_clipping", "fp16.enabled", "bf16.enabled", "bfloat16.enabled"),
    *(f"optimizer.params.{name}" for name in ("betas", "eps", "weight_decay")),
)
"""Keys whose "auto" is an error, because results depend on them ([Note: "auto"]); `load_config` rejects others."""
CLIPPED_TO = 1.0
"""DeepSpeed's default norm of gradient clipping."""
_DECAY_OF_TORCH = 0.01
_OF_OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adam": {"weight_decay": 0.0},
    "adamw": {"weight_decay": 0.0},
    "lion": {"lr": 1e-3, "betas": [0.9, 0.999]},
    "muon": {"weight_decay": 0.0, "betas": [0.9, 0.95], "eps": 1e-10},
}
_RATES_OF_MUON = {"muon_lr": 0.02, "adam_lr": 3e-4}
"""Hyperparameters whose defaults differ in DeepSpeed, by optimizer; "torch_adam" uses torch's defaults."""
_OF_PARAMS = ("torch_adam", "adam_w_mode", "lr", "betas", "eps", "weight_decay")
_TAG_VALIDATION = ("ignore", "warn", "fail")
_INSIDE = ("zero_optimization.", "activation_checkpointing.", "aio.", "optimizer.")
"""Sections whose keys without effect tune DeepSpeed's implementation, which is different here."""


def given(config: Any, args: Any) -> Any:
    """Return the config of ``initialize``, a dict or the path of a JSON file: ``config``, or ``args.deepspeed_config``.

    UsageError if there is none.
    """
    found = (
        config
        if config is not None
        else getattr(args, "deepspeed_config", None) or getattr(args, "deepscale_config", None)
    )
    if not isinstance(found, str | os.PathLike | Mapping):
        raise UsageError(
            "deepspeed.initialize: expected config=, a dict or the path of a JSON file, or args.deepspeed_config, got "
            f"{type(found).__name__}",
            code="config-wrong-type",
        )
    return found


def written(config: str | os.PathLike[str] | Mapping[str, Any]) -> dict[str, Any]:
    """Return the config as a new dict. ConfigError if the file is no JSON, nor HJSON if hjson is installed."""
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
    """Return whether "states", "gradients" or "weights" are sharded at the config's stage."""
    return _section(config, "zero_optimization").get("stage") in _SHARDED[what]


def steps_on_host(config: Mapping[str, Any]) -> bool:
    """Return whether the optimizer is offloaded."""
    return bool(_device(_section(config, "zero_optimization").get("offload_optimizer")) not in (None, "none"))


def leaf_modules(config: Mapping[str, Any]) -> Any:
    """Return the section that names leaf modules, which are marked as gathered as one."""
    return _section(config, "zero_optimization").get("leaf_module")


def gathers_on_save(config: Mapping[str, Any]) -> bool:
    """Return whether the config enables gathering whole weights on save, under any of its names."""
    zero = _section(config, "zero_optimization")
    return any(bool(zero.get(name, False)) for name in _GATHERS_ON_SAVE)


def translate(
    config: dict[str, Any], *, optimizer: bool, scheduler: bool, model: Any = None
) -> tuple[dict[str, Any], list[str]]:
    """Return ``config`` in the form that our engine reads, and notices of changes, one sentence each.

    optimizer, scheduler: whether ``initialize`` got one, which overrides the config's, as under DeepSpeed · model: its
    ``config`` may have a hidden size. ConfigError for an "auto" that remains ([Note: "auto"]).
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
            tree.pop(name, None)  # no notice for a model that is not trained
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
    """Return the norm that gradients are clipped to if there is no ``gradient_clipping``; 0: no clipping."""
    offload = _section(_section(tree, "zero_optimization"), "offload_optimizer")
    return 0.0 if "gradient_clipping_value" in tree or offload.get("step_in_backward") else CLIPPED_TO


def check_given(config: Mapping[str, Any], optimizer: Any, kind: type | None) -> None:
    """Raise UsageError if ``config`` does not allow the user's ``optimizer``. kind: its DeepSpeed class, if any."""
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
            "the key left out",
            code="deepspeed-optimizer-untested",
        )
    if config.get("zero_force_ds_cpu_optimizer") is True and steps_on_host(config):
        raise UsageError(
            f"zero_force_ds_cpu_optimizer is true, and the optimizer is {name}: expected DeepSpeedCPUAdam, or false, "
            "or the key left out",
            code="deepspeed-optimizer-not-on-cpu",
        )


_TESTED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)


def cast_buffers(model: nn.Module, tree: dict[str, Any]) -> None:
    """Cast the model's floating-point buffers to ``data_types.buffer_dtype``, and remove that key from ``tree``."""
    wanted = _section(tree, "data_types").pop("buffer_dtype", None)
    if wanted is None:
        return
    if wanted not in _DTYPES:
        raise ConfigError(f"data_types.buffer_dtype: expected one of {', '.join(_DTYPES)}, got {wanted!r}")
    cast: dict[int, torch.Tensor] = {}  # a buffer that modules share stays shared
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                module._buffers[name] = cast.setdefault(id(buffer), buffer.to(_DTYPES[wanted]))


_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def tell(tree: dict[str, Any], told: Iterable[str], *, trained: bool) -> Config | dict[str, Any]:
    """Log the given notices and those of our config on rank 0, in one message; return a config for ``initialize``.

    The returned config has no notices. If it is not valid, ``tree`` is returned, and ``initialize`` raises on every
    rank. trained: whether the model is trained.
    """
    try:
        config = load_config(tree)
    except ConfigError:
        return tree  # the engine raises the error, on every rank
    said = _message(told, config.notices, trained=trained)
    if said and processes.get_rank() == 0:
        _log.warning("of the DeepSpeed config:%s", said)
    return replace(config, notices=())


def _message(told: Iterable[str], notices: Iterable[str], *, trained: bool) -> str:
    """Return the message about a config, a list item per notice; "" if there is none.

    Keys without effect are grouped by their reason. Keys that tune DeepSpeed's implementation, and the notice that
    gradients are not clipped, are listed only if the model is ``trained``. Notices that a key is read under one of our
    names are left out.
    """
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
    """Remove dotted keys like "zero_optimization.stage", which DeepSpeed does not read; return those to report."""
    found = [name for name in tree if "." in name]
    for name in found:
        del tree[name]
    return [name for name in found if not name.endswith(_SIZES)]  # trl writes these, for a reference model


def _their_defaults(tree: dict[str, Any]) -> list[str]:
    """Write DeepSpeed's defaults that differ from ours into ``tree``; return notices."""
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
        params.pop("adam_w_mode", None)  # has an effect only for Adam
    defaults = _OF_OPTIMIZERS.get(kind, {})
    if kind in ("adam", "adamw") and params.get("torch_adam") and params.get("adam_w_mode", True):
        defaults = {"weight_decay": _DECAY_OF_TORCH}
    if kind == "muon" and "lr" not in params:
        defaults = {**defaults, **_RATES_OF_MUON}
    if defaults:
        optimizer["params"] = {**defaults, **params}
    return told


def _own_sizes(zero: dict[str, Any], hidden: int | None) -> list[str]:
    """Remove sizes that frameworks wrote for "auto" if ours are larger; return notices ([Note: "auto"])."""
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
    """Return the hidden size in a model's config, found as frameworks do; None if there is none."""
    config = getattr(model, "config", None)
    for holder in (config, getattr(config, "text_config", None)):
        for found in (getattr(holder, "hidden_size", None), getattr(holder, "hidden_sizes", None)):
            if isinstance(found, int) or (isinstance(found, (list, tuple)) and found):
                return found if isinstance(found, int) else max(found)
    return None


def _device(offload: Any) -> Any:
    return offload.get("device", "none") if isinstance(offload, Mapping) else offload


def value(tree: Mapping[str, Any], dotted: str) -> Any:
    """Return the value at the dotted key; None if it is missing."""
    found: Any = tree
    for name in dotted.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def _section(tree: Mapping[str, Any], name: str) -> dict[str, Any]:
    inside = tree.get(name)
    return inside if isinstance(inside, dict) else {}
