"""What of a config means something else under DeepSpeed than here. Everything else is the business of `load_config`.

Owns: reading what a script calls a config, the few differences, a notice for each. Must not know: engines, models.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardengine.errors import UsageError

_STAGE_OF_SHARDED_WEIGHTS = 3
"""DeepSpeed's number, which its keys depend on."""


def written(config: Any, args: Any) -> dict[str, Any]:
    """The config of ``initialize`` as a dict: one, the path of a JSON file, or what ``args.deepspeed_config`` says."""
    found = config if config is not None else getattr(args, "deepspeed_config", None)
    if isinstance(found, str | Path):
        found = json.loads(Path(found).read_text(encoding="utf-8"))
    if not isinstance(found, Mapping):
        raise UsageError(
            "deepspeed.initialize: expected config=, a dict or the path of a JSON file, or args.deepspeed_config, got "
            f"{type(found).__name__}"
        )
    return dict(found)


def shards_weights(config: Mapping[str, Any]) -> bool:
    """Whether weights are sharded, as DeepSpeed counts stages."""
    return bool(_section(config, "zero_optimization").get("stage") == _STAGE_OF_SHARDED_WEIGHTS)


def translate(config: Mapping[str, Any], *, optimizer: bool, scheduler: bool) -> tuple[dict[str, Any], list[str]]:
    """``config`` as our engine reads it, and what was left out, a sentence each.

    optimizer, scheduler: whether ``initialize`` was given one, which then counts, as under DeepSpeed.
    """
    tree, told = copy.deepcopy(dict(config)), list[str]()
    zero = _section(tree, "zero_optimization")
    if not shards_weights(tree) and zero.pop("offload_param", None):
        told.append("zero_optimization.offload_param has no effect below stage 3, where weights are not sharded")
    if _section(tree, "checkpoint").pop("async_save", False):
        told.append("checkpoint.async_save is left off: frameworks move a checkpoint as soon as it is saved")
    if optimizer and tree.pop("optimizer", None):
        told.append("optimizer has no effect, because initialize was given one")
    if scheduler and tree.pop("scheduler", None):
        told.append("scheduler has no effect, because initialize was given one")
    if not optimizer and not tree.get("optimizer"):
        tree.pop("optimizer", None)
        tree.pop("scheduler", None)
        zero.pop("offload_optimizer", None)  # of a model that is not trained, nothing is said
    return tree, told


def _section(tree: Mapping[str, Any], name: str) -> dict[str, Any]:
    inside = tree.get(name)
    return inside if isinstance(inside, dict) else {}
