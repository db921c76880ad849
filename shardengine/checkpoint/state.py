"""Everything of a training that is no tensor of the model: JSON values, and the random states of a rank.

Owns: what counts as JSON, options of groups and scheduler, random states. Must not know: files, buckets.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import random
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor

from shardengine.core import Core
from shardengine.errors import UsageError
from shardengine.optim import ShardedOptimizer, stays

_NESTED = "_schedulers"
_PER_GROUP = {"base_lrs", "_last_lr", "lr_lambdas", "min_lrs", "max_lrs", "base_momentums", "max_momentums"}
"""What torch's schedulers keep as a list with one entry per optimizer group."""


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
    """``value`` as JSON: tuples become lists, integer keys strings and tensors of one element numbers; see ``like``."""
    if isinstance(value, dict):
        names = {str(k) if isinstance(k, int) and not isinstance(k, bool) else k: v for k, v in value.items()}
        result: Any = {key: plain(item, f"{path}.{key}") for key, item in names.items()}
    elif isinstance(value, tuple | list):
        result = [plain(item, f"{path}[{index}]") for index, item in enumerate(value)]
    else:
        result = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    require_json(result, path)
    return result


def like(value: Any, current: Any) -> Any:
    """``value``, read from JSON, with the types of ``current``, all the way down: schedulers hold other schedulers."""
    if isinstance(current, tuple | list) and isinstance(value, list):
        items = [like(item, beside) for item, beside in itertools.zip_longest(value, current[: len(value)])]
        return tuple(items) if isinstance(current, tuple) else items
    if isinstance(current, dict) and isinstance(value, dict):
        integers = _has_integer_keys(current)
        typed = {int(key) if integers else key: item for key, item in value.items()}
        typed = {key: like(item, current.get(key)) for key, item in typed.items()}
        return Counter(typed) if isinstance(current, Counter) else typed
    return torch.full_like(current, value) if isinstance(current, Tensor) and value is not None else value


def is_like(value: Any, current: Any) -> bool:
    """Whether ``value``, read from JSON, can stand for ``current``: finite numbers for numbers, all the way down.

    None is for None and flags.
    """
    if value is None or current is None:
        return all(each is None or isinstance(each, bool) for each in (value, current))
    if isinstance(current, tuple | list):
        return isinstance(value, list) and len(value) == len(current) and all(map(is_like, value, current))
    if isinstance(current, dict) or isinstance(value, dict | list):
        fine = isinstance(current, dict) and isinstance(value, dict)
        return fine and (not _has_integer_keys(current) or all(_is_entry(*item) for item in value.items()))
    if _is_number(current):
        return _is_number(value) and abs(value) <= sys.float_info.max  # neither NaN nor what no float can be
    return type(value) is type(current)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | Tensor) and not isinstance(value, bool)


def _has_integer_keys(value: dict[Any, Any]) -> bool:
    return all(isinstance(key, int) for key in value) and (bool(value) or isinstance(value, Counter))


def _is_entry(key: str, value: Any) -> bool:
    """Whether it can be one of a dict from integers to numbers."""
    return key.isdecimal() and len(key) < 20 and is_like(value, 0)


def optimizer_state(optimizer: ShardedOptimizer | None, core: Core) -> dict[str, Any] | None:
    """Class; the parameters (first names) and options of every group; steps of every parameter; the shapes of what is
    kept of parameters as a whole."""
    if optimizer is None:
        return None
    first = core.partition.first_names()
    groups = [
        {
            "params": [first[id(parameter)] for parameter in group["params"]],
            "options": plain(_each_named(options_of(group)), f"optimizer.param_groups[{index}]"),
        }
        for index, group in enumerate(optimizer.param_groups)
    ]
    names = [spec.name for spec in core.layout.parameters]
    steps = dict(zip(names, optimizer.steps, strict=True))
    facts = plain(optimizer.arithmetic.saved(), "optimizer.state")
    whole = {spec.name: {k: list(t.shape) for k, t in tensors.items()} for spec, tensors in optimizer.whole_states()}
    beside = {key: value for key, value in (("facts", facts), ("whole", whole)) if value}
    return {"kind": optimizer.kind, "groups": groups, "steps": steps, **beside}


def options_of(group: dict[str, Any]) -> dict[str, Any]:
    """What is saved of an optimizer group beside its parameters."""
    return {key: value for key, value in group.items() if key != "params" and not stays(value)}


def restore_optimizer(
    optimizer: ShardedOptimizer, groups: list[dict[str, Any] | None], steps: list[int], facts: dict[str, Any]
) -> None:
    """The opposite; None keeps a group's own options. The groups stay the same dicts: schedulers hold them. facts: what
    was kept of each parameter."""
    for group, options in zip(optimizer.param_groups, groups, strict=True):
        group.update({key: like(value, group[key]) for key, value in (options or {}).items()})
    optimizer.steps[:] = steps
    optimizer.arithmetic.restore(facts, optimizer.begun)


def changed_rates(
    before: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]], scheduled: bool = False
) -> str:
    """That options of parameter groups are those of a checkpoint, and not those that this run began with; "" where they
    are the same.

    before, now: the options of each group. scheduled: a scheduler goes on from the checkpoint. Then the rates that it
    began with are compared. ReduceLROnPlateau records none: then no rates are.
    """
    found = []
    for number, (own, loaded) in enumerate(zip(before, now, strict=False)):
        rate = "initial_lr" if scheduled or ("initial_lr" in own and "initial_lr" in loaded) else "lr"
        for key in (rate, "weight_decay"):
            if key in own and key in loaded and own[key] != loaded[key]:
                found.append(f"{key} of group {number} is {loaded[key]}, and this run began with {own[key]}")
    if not found:
        return ""
    return (
        f"options of the optimizer are the checkpoint's: {', '.join(found[:4])}. To go on with others, set them "
        "in engine.optimizer.param_groups after load_checkpoint, and the base_lrs of a scheduler; weights_only=True "
        "begins with a new optimizer"
    )


def scaler_state(optimizer: ShardedOptimizer | None) -> dict[str, Any] | None:
    """The loss scale and how it came to be; None where the loss is not scaled."""
    scaler = None if optimizer is None else optimizer.settings.scaler
    return None if scaler is None or optimizer is None else optimizer.scaling


def restore_scaler(optimizer: ShardedOptimizer | None, saved: dict[str, Any] | None) -> None:
    """The opposite; where only one side scales its loss, nothing."""
    scaler = None if optimizer is None else optimizer.settings.scaler
    if scaler is not None and saved is not None:
        scaler.load_state_dict(saved)


def restore_skipped(optimizer: ShardedOptimizer | None, saved: dict[str, Any] | None) -> None:
    """The count of skipped steps alone: a loss scale begins anew with its optimizer."""
    scaler = None if optimizer is None else optimizer.settings.scaler
    if scaler is not None and saved is not None:
        scaler.count_on(int(saved["skipped"]))


_INFINITE = {"inf": math.inf, "-inf": -math.inf}
"""What stands for a number that JSON has not: ReduceLROnPlateau begins with the worst one, a limit may be none."""


def scheduler_state(scheduler: Any) -> dict[str, Any] | None:
    """Class and state of torch's scheduler."""
    if scheduler is None:
        return None
    return {"type": type(scheduler).__name__, "state": plain(_each_named(scheduler.state_dict()), "lr_scheduler")}


def _each_named(values: dict[str, Any]) -> dict[str, Any]:
    """Infinite numbers by their names."""
    names = {number: name for name, number in _INFINITE.items()}
    return {k: names[v] if isinstance(v, float) and math.isinf(v) else v for k, v in values.items()}


def numbered(saved: dict[str, Any], current: dict[str, Any]) -> dict[str, Any]:
    """The opposite, of what is a number in ``current``."""
    names = {key for key, value in saved.items() if isinstance(value, str) and value in _INFINITE}
    return {k: _INFINITE[v] if k in names and _is_number(current.get(k)) else v for k, v in saved.items()}


def scheduler_problems(scheduler: Any, saved: dict[str, Any], origins: list[int | None]) -> list[str]:
    """Why ``scheduler`` cannot go on from the state of another one of its class. origins: as in ``fit.Plan``."""
    current = scheduler.state_dict()
    return _differences(_regrouped(saved["state"], current, origins), current, "lr_scheduler")


def _differences(saved: dict[str, Any], current: dict[str, Any], path: str) -> list[str]:
    found = [f"{path}.{_NESTED} is missing in the checkpoint"] if _NESTED in current.keys() - saved.keys() else []
    numbers = numbered(saved, current)
    for key in current.keys() & saved.keys():
        if not is_like(saved[key], current[key]) and numbers[key] is saved[key]:
            texts = [str(side[key])[:80] for side in (saved, current)]
            found.append(f"{path}.{key} is {texts[0]} in the checkpoint, {texts[1]} here")
        elif key == _NESTED:
            for number, (theirs, ours) in enumerate(zip(saved[key], current[key], strict=True)):
                place = f"{path}.{key}[{number}]"
                same = theirs.keys() == ours.keys()
                found += _differences(theirs, ours, place) if same else [f"{place} is another schedule here"]
    return sorted(found)


def _regrouped(saved: dict[str, Any], current: dict[str, Any], origins: list[int | None]) -> dict[str, Any]:
    """A scheduler's state with what it keeps per group in the order of the groups here; new groups keep their own."""
    found = dict(saved)
    for key in saved.keys() & current.keys():
        theirs, ours = saved[key], current[key]
        if key == _NESTED and is_like(theirs, ours):
            found[key] = [_regrouped(one, other, origins) for one, other in zip(theirs, ours, strict=True)]
        elif key in _PER_GROUP and isinstance(theirs, list):
            kept = dict(enumerate(theirs))
            found[key] = [
                plain(own, key) if at is None else kept.get(at, plain(own, key))
                for at, own in zip(origins, ours, strict=False)  # a group that joined later may have no entry
            ]
    return found


def restore_scheduler(scheduler: Any, saved: dict[str, Any], origins: list[int | None]) -> None:
    """The opposite. What the scheduler does not have itself is left out."""
    current = scheduler.state_dict()
    state = numbered(_regrouped(saved["state"], current, origins), current)
    scheduler.load_state_dict({key: like(value, current[key]) for key, value in state.items() if key in current})


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
    return list(states.items())


def require_random_states(states: dict[str, Tensor], device: torch.device) -> None:
    """``ValueError`` unless ``restore_random_states`` takes ``states``; nothing is changed."""
    try:
        if "torch" in states:
            torch.Generator().set_state(states["torch"])
        if "python" in states:
            kept = _python_state(states["python"])
            random.Random().setstate(kept)
            if not is_like(kept[2] or 0.0, 0.0):
                raise ValueError(f"{str(kept[2])[:40]!r} is no number")
        if "numpy" in states:
            _, _, *rest = kept = _numpy_state(states["numpy"])
            numpy.random.RandomState().set_state(kept)
            if not is_like(rest, [0, 0, 0.0]) or not 0 <= rest[0] <= 624:
                raise ValueError(f"{str(rest)[:80]} is no state of MT19937")
        if device.type == "cuda" and "cuda" in states:
            torch.Generator(device).set_state(states["cuda"])
    except (ValueError, TypeError, KeyError, RuntimeError, OverflowError, RecursionError) as error:
        raise ValueError(f"its random states cannot be used ({str(error)[:200]})") from error


def restore_random_states(states: dict[str, Tensor], device: torch.device) -> None:
    """The opposite. ``states``: name → uint8 tensor."""
    if "torch" in states:
        torch.set_rng_state(states["torch"])
    if "python" in states:
        random.setstate(_python_state(states["python"]))
    if "numpy" in states:
        numpy.random.set_state(_numpy_state(states["numpy"]))
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)


def _python_state(state: Tensor) -> tuple[Any, ...]:
    version, numbers, gauss = _decode(state)
    return version, tuple(numbers), gauss


def _numpy_state(state: Tensor) -> tuple[Any, ...]:
    key, position, has_gauss, cached = _decode(state)
    return "MT19937", numpy.array(key, dtype=numpy.uint32), position, has_gauss, cached


def seed_anew(states: dict[str, Tensor], rank: int) -> None:
    """Random states for a rank that the checkpoint does not have, from those of another: the same ones every time."""
    digest = hashlib.sha256(str(rank).encode())
    for name in sorted(states):
        digest.update(bytes(states[name].tolist()))
    seed = int.from_bytes(digest.digest()[:4], "little")
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)


def _encode(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _decode(state: Tensor) -> Any:
    return json.loads(bytes(state.tolist()))
