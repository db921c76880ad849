"""What of a config means something else under DeepSpeed than here. Everything else is the business of `load_config`.

Owns: reading what a script calls a config, the few differences, the one message that tells all. Must not know: engines.

[Note: "auto"] Frameworks write numbers for "auto" before they hand a config over. What is left then, and would change
what is computed, is an error, as under DeepSpeed; the size of a bucket is not, and takes our default. So does the one
that they write for "auto", hidden_size squared, where it is smaller: a small model would travel in thousands of
collectives. Results do not depend on it.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardengine.compat.deepspeed import processes
from shardengine.config import NO_EFFECT_BECAUSE, NOT_CLIPPED, READ_AS, Config, ZeroConfig, load_config, read_tree
from shardengine.errors import ConfigError, UsageError

_log = logging.getLogger(__name__)
_SIZES = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
_STAGE_OF_SHARDED_WEIGHTS = 3
"""DeepSpeed's number, which its keys depend on."""
_GATHERS_ON_SAVE = tuple(
    f"{start}gather_{kind}_weights_on_model_save" for start in ("stage3_", "") for kind in ("16bit", "fp16")
)
_UNTOLD = ("zero_allow_untested_optimizer", "dataloader_drop_last")
"""Keys that do what they say, or that frameworks write into every config: no notice."""
_FILLED = (
    *("gradient_clipping", "fp16.enabled", "bf16.enabled", "bfloat16.enabled"),
    *(f"optimizer.params.{name}" for name in ("betas", "eps", "weight_decay")),
)
"""Keys without which nobody can know what to compute ([Note: "auto"]); `load_config` refuses others itself."""
_INSIDE = ("zero_optimization.", "activation_checkpointing.", "aio.", "optimizer.")
"""Sections whose keys without effect say how DeepSpeed does something, which is done in another way here."""


def given(config: Any, args: Any) -> Any:
    """The config of ``initialize``: a dict, the path of a JSON file, or what ``args.deepspeed_config`` says.

    UsageError where there is none.
    """
    found = config if config is not None else getattr(args, "deepspeed_config", None)
    if not isinstance(found, str | Path | Mapping):
        raise UsageError(
            "deepspeed.initialize: expected config=, a dict or the path of a JSON file, or args.deepspeed_config, got "
            f"{type(found).__name__}"
        )
    return found


def written(config: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """The config as a dict of its own. ConfigError where it is no file of JSON."""
    return dict(config) if isinstance(config, Mapping) else read_tree(Path(config))


def shards_weights(config: Mapping[str, Any]) -> bool:
    """Whether weights are sharded, as DeepSpeed counts stages."""
    return bool(_section(config, "zero_optimization").get("stage") == _STAGE_OF_SHARDED_WEIGHTS)


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
    if not shards_weights(tree) and zero.pop("offload_param", None) and _device(offload) != "none":
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
    for name in _UNTOLD:
        tree.pop(name, None)
    for name in _GATHERS_ON_SAVE:
        zero.pop(name, None)
    told += [f"{name} has no effect, as under DeepSpeed: write it into its section" for name in _dotted(tree)]
    told += _own_sizes(zero, _hidden_size(model))
    left = [name for name in _FILLED if _value(tree, name) == "auto"]
    if left:
        raise ConfigError(
            [f'{name}: "auto", which no framework has replaced; expected a value' for name in left], "config"
        )
    return tree, told


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


def _own_sizes(zero: dict[str, Any], hidden: int | None) -> list[str]:
    """Take sizes that frameworks have written for "auto" out of ``zero`` where ours are larger ([Note: "auto"])."""
    if hidden is None:
        return []
    written = {"reduce_bucket_size": hidden * hidden, "stage3_prefetch_bucket_size": int(0.9 * hidden * hidden)}
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


def _value(tree: Mapping[str, Any], dotted: str) -> Any:
    found: Any = tree
    for name in dotted.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def _section(tree: Mapping[str, Any], name: str) -> dict[str, Any]:
    inside = tree.get(name)
    return inside if isinstance(inside, dict) else {}
