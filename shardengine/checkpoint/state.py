"""The state of a training run besides the tensors of model and optimizer: JSON values, and a rank's random states.

Owns: the conversion to and from JSON, options of groups and scheduler, random states. Must not know: files, buckets.
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
"""Entries of torch's schedulers that are lists with one value per optimizer group."""


def require_json(value: Any, path: str) -> None:
    """Raise ``UsageError`` with the path of the first value that JSON cannot restore exactly."""
    if value is None or isinstance(value, str | bool | int):
        return
    if isinstance(value, float):
        if not math.isfinite(value):
            raise UsageError(
                f"{path} is {value}: JSON has no such number; save None or a string", code="save-value-not-finite"
            )
    elif isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise UsageError(
                    f"{path}: key {key!r} is {type(key).__name__}, JSON has only strings as keys",
                    code="save-key-not-a-string",
                )
            require_json(item, f"{path}.{key}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            require_json(item, f"{path}[{index}]")
    else:
        raise UsageError(
            f"{path} is {type(value).__name__}: expected JSON (dict, list, str, int, float, bool, None); nothing is "
            "pickled into a checkpoint",
            code="save-value-not-json",
        )


def plain(value: Any, path: str) -> Any:
    """Return ``value`` as JSON: tuples become lists, integer keys strings, tensors of one element numbers.

    The inverse is ``like``. UsageError for other values that are not JSON.
    """
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
    """Return ``value``, read from JSON, with the types of ``current``, recursively (schedulers nest schedulers)."""
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
    """Return whether ``value``, read from JSON, can replace ``current``: the same structure, with finite numbers.

    None can replace None and flags, and be replaced by them.
    """
    if value is None or current is None:
        return all(each is None or isinstance(each, bool) for each in (value, current))
    if isinstance(current, tuple | list):
        return isinstance(value, list) and len(value) == len(current) and all(map(is_like, value, current))
    if isinstance(current, dict) or isinstance(value, dict | list):
        fine = isinstance(current, dict) and isinstance(value, dict)
        return fine and (not _has_integer_keys(current) or all(_is_entry(*item) for item in value.items()))
    if _is_number(current):
        return _is_number(value) and abs(value) <= sys.float_info.max  # neither NaN nor too large for a float
    return type(value) is type(current)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | Tensor) and not isinstance(value, bool)


def _has_integer_keys(value: dict[Any, Any]) -> bool:
    return all(isinstance(key, int) for key in value) and (bool(value) or isinstance(value, Counter))


def _is_entry(key: str, value: Any) -> bool:
    """Return whether the pair can be an entry of a dict from integers to numbers."""
    return key.isdecimal() and len(key) < 20 and is_like(value, 0)


def optimizer_state(optimizer: ShardedOptimizer | None, core: Core) -> dict[str, Any] | None:
    """Return the optimizer's kind, groups and steps; None without optimizer.

    groups: parameters (first names) and options · steps: per parameter · facts, if any: JSON values per parameter that
    the update rule keeps · whole, if any: the shapes of states that are kept per whole parameter.
    """
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
    """Return the options of an optimizer group that are saved."""
    return {key: value for key, value in group.items() if key != "params" and not stays(value)}


def restore_optimizer(
    optimizer: ShardedOptimizer, groups: list[dict[str, Any] | None], steps: list[int], facts: dict[str, Any]
) -> None:
    """Restore ``optimizer_state``. groups: options per group, None to keep its own · facts: as in ``optimizer_state``.

    The groups are updated in place, because schedulers hold the same dicts.
    """
    for group, options in zip(optimizer.param_groups, groups, strict=True):
        group.update({key: like(value, group[key]) for key, value in (options or {}).items()})
    optimizer.steps[:] = steps
    optimizer.arithmetic.restore(facts, optimizer.begun)


def changed_rates(
    before: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]], scheduled: bool = False
) -> str:
    """Return a warning if a load changed learning rates or weight decay that this run began with; "" if it did not.

    before, now: the options of each group. scheduled: a scheduler continues from the checkpoint. Then the initial rates
    are compared. ReduceLROnPlateau records none, so no rates are compared with it.
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
    """Return the loss scale with its counters; None if the loss is not scaled."""
    scaler = None if optimizer is None else optimizer.settings.scaler
    return None if scaler is None or optimizer is None else optimizer.scaling


def restore_scaler(optimizer: ShardedOptimizer | None, saved: dict[str, Any] | None) -> None:
    """Restore ``scaler_state``; do nothing if either side does not scale its loss."""
    scaler = None if optimizer is None else optimizer.settings.scaler
    if scaler is not None and saved is not None:
        scaler.load_state_dict(saved)


def restore_skipped(optimizer: ShardedOptimizer | None, saved: dict[str, Any] | None) -> None:
    """Restore only the count of skipped steps: the loss scale starts afresh together with the optimizer."""
    scaler = None if optimizer is None else optimizer.settings.scaler
    if scaler is not None and saved is not None:
        scaler.count_on(int(saved["skipped"]))


_INFINITE = {"inf": math.inf, "-inf": -math.inf}
"""Names for numbers that JSON lacks: ReduceLROnPlateau begins with the worst value, a limit may be infinite."""


def scheduler_state(scheduler: Any) -> dict[str, Any] | None:
    """Return the class name and the state of a torch scheduler; None if there is none."""
    if scheduler is None:
        return None
    return {"type": type(scheduler).__name__, "state": plain(_each_named(scheduler.state_dict()), "lr_scheduler")}


def _each_named(values: dict[str, Any]) -> dict[str, Any]:
    """Return ``values`` with infinite numbers replaced by their names."""
    names = {number: name for name, number in _INFINITE.items()}
    return {k: names[v] if isinstance(v, float) and math.isinf(v) else v for k, v in values.items()}


def numbered(saved: dict[str, Any], current: dict[str, Any]) -> dict[str, Any]:
    """Return ``saved`` with these names replaced by numbers, for the keys that are numbers in ``current``."""
    names = {key for key, value in saved.items() if isinstance(value, str) and value in _INFINITE}
    return {k: _INFINITE[v] if k in names and _is_number(current.get(k)) else v for k, v in saved.items()}


def scheduler_problems(scheduler: Any, saved: dict[str, Any], origins: list[int | None]) -> list[str]:
    """Return why ``scheduler`` cannot load a saved state of its class, a text each. origins: as in ``fit.Plan``."""
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
    """Return a scheduler's state with its per-group values in the order of the groups here; new groups keep theirs."""
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
    """Restore ``scheduler_state``, except entries that ``scheduler`` does not have. origins: as in ``fit.Plan``."""
    current = scheduler.state_dict()
    state = numbered(_regrouped(saved["state"], current, origins), current)
    scheduler.load_state_dict({key: like(value, current[key]) for key, value in state.items() if key in current})


def random_states(device: torch.device) -> list[tuple[str, Tensor]]:
    """Return this rank's random states as uint8 tensors: torch (CPU, and CUDA on a CUDA device), Python, numpy."""
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
    """Raise ``ValueError`` unless ``restore_random_states`` can restore ``states``; nothing is changed."""
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
    """Restore ``random_states``. states: name → uint8 tensor."""
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
    """Seed a rank that the checkpoint does not have, deterministically, from its number and another rank's states."""
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
