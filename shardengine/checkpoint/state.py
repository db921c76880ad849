"""Everything of a training that is no tensor of the model: JSON values, and the random states of a rank.

Owns: what counts as JSON, options of groups and scheduler, random states. Must not know: files, buckets.
"""

from __future__ import annotations

import itertools
import json
import math
import random
from collections import Counter
from typing import Any

import numpy
import torch
from torch import Tensor

from shardengine.errors import UsageError
from shardengine.optimizer import ShardedOptimizer


def require_json(value: Any, path: str) -> None:
    """``UsageError`` with the path of the first value that JSON would not give back as it is."""
    if value is None or isinstance(value, str | bool | int):
        return
    if isinstance(value, float):
        if not math.isfinite(value):
            raise UsageError(f"{path} is {value}: JSON has no such number; save None or a string")
    elif isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise UsageError(f"{path}: key {key!r} is {type(key).__name__}, JSON has only strings as keys")
            require_json(item, f"{path}.{key}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            require_json(item, f"{path}[{index}]")
    else:
        raise UsageError(
            f"{path} is {type(value).__name__}: expected JSON (dict, list, str, int, float, bool, None); nothing is "
            "pickled into a checkpoint"
        )


def plain(value: Any, path: str) -> Any:
    """``value`` as JSON: tuples become lists and integer keys strings; ``like`` turns them back."""
    if isinstance(value, dict):
        names = {str(k) if isinstance(k, int) and not isinstance(k, bool) else k: v for k, v in value.items()}
        result: Any = {key: plain(item, f"{path}.{key}") for key, item in names.items()}
    elif isinstance(value, tuple | list):
        result = [plain(item, f"{path}[{index}]") for index, item in enumerate(value)]
    else:
        result = value
    require_json(result, path)
    return result


def like(value: Any, current: Any) -> Any:
    """``value``, read from JSON, with the types of ``current``, all the way down: schedulers hold other schedulers."""
    if isinstance(current, tuple | list) and isinstance(value, list):
        items = [like(item, beside) for item, beside in itertools.zip_longest(value, current[: len(value)])]
        return tuple(items) if isinstance(current, tuple) else items
    if isinstance(current, dict) and isinstance(value, dict):
        integers = bool(current) and all(isinstance(key, int) for key in current)
        typed = {int(key) if integers else key: item for key, item in value.items()}
        typed = {key: like(item, current.get(key)) for key, item in typed.items()}
        return Counter(typed) if isinstance(current, Counter) else typed
    return value


def optimizer_state(optimizer: ShardedOptimizer | None, names: list[str]) -> dict[str, Any] | None:
    """Class, options of every group, steps of every parameter."""
    if optimizer is None:
        return None
    groups = [
        plain({key: value for key, value in group.items() if key != "params"}, f"optimizer.param_groups[{index}]")
        for index, group in enumerate(optimizer.param_groups)
    ]
    return {"kind": optimizer.kind, "groups": groups, "steps": dict(zip(names, optimizer.steps, strict=True))}


def restore_optimizer(optimizer: ShardedOptimizer, saved: dict[str, Any], names: list[str]) -> None:
    """The opposite. The groups stay the same dicts: schedulers and the user's own optimizer hold them."""
    for group, options in zip(optimizer.param_groups, saved["groups"], strict=True):
        group.update({key: like(value, group.get(key)) for key, value in options.items()})
    optimizer.steps[:] = [int(saved["steps"][name]) for name in names]


def scheduler_state(scheduler: Any) -> dict[str, Any] | None:
    """Class and state of torch's scheduler."""
    if scheduler is None:
        return None
    return {"type": type(scheduler).__name__, "state": plain(scheduler.state_dict(), "lr_scheduler")}


def restore_scheduler(scheduler: Any, saved: dict[str, Any]) -> None:
    """The opposite."""
    current = scheduler.state_dict()
    scheduler.load_state_dict({key: like(value, current.get(key)) for key, value in saved["state"].items()})


def random_states(device: torch.device) -> list[tuple[str, Tensor]]:
    """This rank's random states as uint8 tensors: torch (CPU, and CUDA where it computes there), Python, numpy."""
    legacy: Any = numpy.random.get_state(legacy=True)
    _, key, position, has_gauss, cached = legacy
    states = {
        "torch": torch.get_rng_state(),
        "python": _encode(random.getstate()),
        "numpy": _encode([numpy.asarray(key).tolist(), int(position), int(has_gauss), float(cached)]),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return [(f"rng/{name}", state) for name, state in states.items()]


def restore_random_states(states: dict[str, Tensor], device: torch.device) -> None:
    """The opposite. ``states``: name → uint8 tensor."""
    torch.set_rng_state(states["rng/torch"])
    version, numbers, gauss = _decode(states["rng/python"])
    random.setstate((version, tuple(numbers), gauss))
    key, position, has_gauss, cached = _decode(states["rng/numpy"])
    numpy.random.set_state(("MT19937", numpy.array(key, dtype=numpy.uint32), position, has_gauss, cached))
    if device.type == "cuda" and "rng/cuda" in states:
        torch.cuda.set_rng_state(states["rng/cuda"], device)


def _encode(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _decode(state: Tensor) -> Any:
    return json.loads(bytes(state.tolist()))
