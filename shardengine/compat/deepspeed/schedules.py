"""The five schedules of DeepSpeed, as classes that give its values. Owns: the rates of each schedule per iteration.

Must not know: engines. WarmupLR in the native config counts differently (``shardengine.optim``).

[Note: Iterations] A schedule counts from -1: a new one sets the first rates, and the first ``step``, which follows the
first update, is iteration 0. So a warm-up runs the first two updates at its smallest rate.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch.optim import lr_scheduler

from shardengine.compat.deepspeed import errors
from shardengine.errors import ConfigError

_log = logging.getLogger(__name__)
_LOG, _LINEAR = "log", "linear"
_BETA2 = 0.99
"""OneCycle sets an optimizer's second beta to this."""
_WARMUP: dict[str, Any] = {"warmup_num_steps": 1000, "warmup_type": _LOG}


class Schedule(lr_scheduler.LRScheduler):
    """A schedule over ``optimizer``; call ``step()`` after each update. Arguments are ``options``, in this order."""

    options: ClassVar[dict[str, Any]] = {}
    """Name → default; ``last_batch_iteration`` follows as the last argument."""

    def __init__(self, optimizer: Any, *values: Any, **named: Any) -> None:
        """optimizer: a torch optimizer, or an object with one as ``optimizer``. Raises TypeError, ValueError."""
        self.optimizer: torch.optim.Optimizer = _optimizer_of(optimizer)
        given = self.bound(values, named)
        self.last_batch_iteration: int = given.pop("last_batch_iteration")
        self._begin(given)
        if self.last_batch_iteration == -1:
            self._set(self._first())

    @classmethod
    def bound(cls, values: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
        """Return the value of every option. TypeError: too many, or one is unknown, given twice or missing."""
        return errors.bound(cls.__name__, {**cls.options, "last_batch_iteration": -1}, values, named)

    def _begin(self, given: dict[str, Any]) -> None:
        raise NotImplementedError

    def _first(self) -> list[Any]:
        """Return the rates before the first update."""
        return self.get_lr()

    def get_lr(self) -> list[Any]:
        """Return the rates of this iteration, one per parameter group."""
        raise NotImplementedError

    def get_last_lr(self) -> list[Any]:
        """Return the rates that were set last."""
        return self._last_lr

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Set the rates of the next iteration, or of ``last_batch_iteration``."""
        after = self.last_batch_iteration + 1
        self.last_batch_iteration = after if last_batch_iteration is None else last_batch_iteration
        self._set(self.get_lr())

    def state_dict(self) -> dict[str, Any]:
        """Return the count of iterations; the rates are in the optimizer's groups."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the count of iterations, also from a torch scheduler's state, as other engines save."""
        steps = state_dict.get("last_epoch")
        self.last_batch_iteration = state_dict["last_batch_iteration"] if steps is None else steps - 1

    def _set(self, rates: Sequence[Any]) -> None:
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        self._last_lr = [group["lr"] for group in self.optimizer.param_groups]

    def _each(self, name: str, value: Any) -> list[Any]:
        """Return one value per group; ``value`` is one for all groups, or a list. ValueError for a wrong length."""
        groups = len(self.optimizer.param_groups)
        if not isinstance(value, list | tuple):
            return [value] * groups
        if len(value) != groups:
            raise ValueError(f"{name}: expected {groups} values, one per parameter group, got {len(value)}")
        return list(value)


class LRRangeTest(Schedule):
    """Raises the rates without end, to find the largest that still trains; optionally in stairs."""

    options: ClassVar[dict[str, Any]] = {
        "lr_range_test_min_lr": 1e-3,
        "lr_range_test_step_size": 2000,
        "lr_range_test_step_rate": 1.0,
        "lr_range_test_staircase": False,
    }

    def _begin(self, given: dict[str, Any]) -> None:
        self.min_lr = self._each("lr_range_test_min_lr", given["lr_range_test_min_lr"])
        self.step_size = _count("lr_range_test_step_size", given["lr_range_test_step_size"])
        self.step_rate, self.staircase = given["lr_range_test_step_rate"], given["lr_range_test_staircase"]

    def _first(self) -> list[Any]:
        return self.min_lr

    def get_lr(self) -> list[Any]:
        """Return the smallest rate times 1 + ``lr_range_test_step_rate`` per ``lr_range_test_step_size`` iterations."""
        intervals = float(self.last_batch_iteration + 1) / self.step_size
        increase = 1 + self.step_rate * (math.floor(intervals) if self.staircase else intervals)
        return [rate * increase for rate in self.min_lr]


class OneCycle(Schedule):
    """Moves the rate up and down once, and momentum (the first of ``betas``) inversely; then both decay."""

    options: ClassVar[dict[str, Any]] = {
        "cycle_min_lr": errors.NEEDED,
        "cycle_max_lr": errors.NEEDED,
        "decay_lr_rate": 0.0,
        "cycle_first_step_size": 2000,
        "cycle_second_step_size": None,
        "cycle_first_stair_count": 0,
        "cycle_second_stair_count": None,
        "decay_step_size": 0,
        "cycle_momentum": True,
        "cycle_min_mom": 0.8,
        "cycle_max_mom": 0.9,
        "decay_mom_rate": 0.0,
    }

    def _begin(self, given: dict[str, Any]) -> None:
        up, down = given["cycle_first_step_size"], given["cycle_second_step_size"]
        self.first_step_size, self.second_step_size = float(up), float(up if down is None else down)
        if self.first_step_size <= 0 or self.second_step_size < 0:
            raise ValueError(
                "OneCycle: expected cycle_first_step_size above 0 and cycle_second_step_size of at least 0, got "
                f"{up} and {down}"
            )
        self.total_size = self.first_step_size + self.second_step_size
        self.step_ratio = self.first_step_size / self.total_size
        first, second = given["cycle_first_stair_count"], given["cycle_second_stair_count"]
        self._stairs = (first, first if second is None else second)
        self.min_lrs = self._each("cycle_min_lr", given["cycle_min_lr"])
        self.max_lrs = self._each("cycle_max_lr", given["cycle_max_lr"])
        self.decay_step_size, self.decay_lr_rate = given["decay_step_size"], given["decay_lr_rate"]
        self.decay_mom_rate = given["decay_mom_rate"]
        self.cycle_momentum = bool(given["cycle_momentum"])
        if self.cycle_momentum and "betas" not in self.optimizer.defaults:
            kind = type(self.optimizer).__name__
            _log.warning("OneCycle: momentum is not cycled, because %s has no betas", kind)
            self.cycle_momentum = False
        if self.cycle_momentum:
            self.min_moms = [(each, _BETA2) for each in self._each("cycle_min_mom", given["cycle_min_mom"])]
            self.max_moms = [(each, _BETA2) for each in self._each("cycle_max_mom", given["cycle_max_mom"])]
            if self.last_batch_iteration == -1:
                self._set_betas(self.min_moms)

    def _first(self) -> list[Any]:
        return self.min_lrs

    def get_lr(self) -> list[Any]:
        """Return the rates of this iteration: of the cycle, or of the decay after it."""
        after = self._after()
        if after is None:
            part = self._part()
            return [low + (high - low) * part for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]
        if not self._decays(self.decay_lr_rate):
            return self.min_lrs
        factor = 1 + self.decay_lr_rate * (after / self.decay_step_size)
        return [rate / factor for rate in self.min_lrs]

    def get_mom(self) -> list[Any] | None:
        """Return the betas of this iteration, one pair per parameter group; None if momentum is not cycled."""
        if not self.cycle_momentum:
            return None
        after = self._after()
        if after is None:
            part = self._part()
            pairs = zip(self.min_moms, self.max_moms, strict=True)
            return [(high[0] - (high[0] - low[0]) * part, low[1]) for low, high in pairs]
        if not self._decays(self.decay_mom_rate):
            return self.max_moms
        factor = 1 + self.decay_mom_rate * (after / self.decay_step_size)
        return [(first * factor, second) for first, second in self.max_moms]

    def step(self, batch_iteration: int | None = None) -> None:
        """Set the rates and betas of the next iteration, or of ``batch_iteration``."""
        super().step(batch_iteration)
        betas = self.get_mom()
        if betas is not None:
            self._set_betas(betas)

    def _set_betas(self, betas: Sequence[Any]) -> None:
        for group, pair in zip(self.optimizer.param_groups, betas, strict=True):
            group["betas"] = pair

    def _after(self) -> float | None:
        """Return how many iterations ago the cycle ended, counted from 1; None during the cycle."""
        length = self.total_size
        return None if self.last_batch_iteration < length else self.last_batch_iteration - length + 1

    def _decays(self, rate: float) -> bool:
        return not (math.isclose(self.decay_step_size, 0) or math.isclose(rate, 0))

    def _part(self) -> float:
        """Return how far the cycle is between its ends (0) and its middle (1), in whole stairs if it has stairs."""
        length, middle, at = self.total_size, self.step_ratio, self.last_batch_iteration + 1
        place = 1.0 + at / length - math.floor(1 + at / length)
        rises = place <= middle
        stairs = self._stairs[0 if rises else 1]
        if stairs <= 0:
            return place / middle if rises else (place - 1) / (middle - 1)
        at_in_cycle = at % length
        up = at_in_cycle <= self.first_step_size
        height = (
            at_in_cycle * stairs / self.first_step_size
            if up
            else (length - at_in_cycle) * stairs / self.second_step_size
        )
        return math.floor(height) / stairs


class WarmupLR(Schedule):
    """Raises rates from ``warmup_min_lr`` to ``warmup_max_lr`` in ``warmup_num_steps``; then keeps them constant.

    warmup_max_lr: None: each group's own rate.
    """

    options: ClassVar[dict[str, Any]] = {"warmup_min_lr": 0.0, "warmup_max_lr": None, **_WARMUP}

    def _begin(self, given: dict[str, Any]) -> None:
        self.warmup_num_steps, self.warmup_type = _warmup(given)
        top = given["warmup_max_lr"]
        own = [group["lr"] for group in self.optimizer.param_groups]
        self.min_lrs = self._each("warmup_min_lr", given["warmup_min_lr"])
        self.max_lrs = self._each("warmup_max_lr", own if top is None else top)

    def get_lr(self) -> list[Any]:
        """Return the rates of this iteration; the smallest before the first."""
        if self.last_batch_iteration < 0:
            return self.min_lrs
        part = self._part()
        return [low + (high - low) * part for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]

    def _part(self) -> float:
        return _risen(self.last_batch_iteration, self.warmup_num_steps, self.warmup_type)


class WarmupDecayLR(WarmupLR):
    """``WarmupLR`` with a linear decay to the smallest rate at ``total_num_steps``."""

    options: ClassVar[dict[str, Any]] = {
        "total_num_steps": errors.NEEDED,
        "warmup_min_lr": 0.0,
        "warmup_max_lr": 0.001,
        **_WARMUP,
    }

    def _begin(self, given: dict[str, Any]) -> None:
        super()._begin(given)
        self.total_num_steps = given["total_num_steps"]
        _say_if_short(self, self.total_num_steps, self.warmup_num_steps)

    def _part(self) -> float:
        if self.last_batch_iteration < self.warmup_num_steps:
            return super()._part()
        return max(
            0.0,
            float(self.total_num_steps - self.last_batch_iteration)
            / float(max(1.0, self.total_num_steps - self.warmup_num_steps)),
        )


class WarmupCosineLR(Schedule):
    """Scales each group's own rate: warm-up from ``warmup_min_ratio``, then half a cosine down to ``cos_min_ratio``."""

    options: ClassVar[dict[str, Any]] = {
        "total_num_steps": errors.NEEDED,
        "warmup_min_ratio": 0.0,
        "warmup_num_steps": 1000,
        "cos_min_ratio": 0.0001,
        "warmup_type": _LOG,
    }

    def _begin(self, given: dict[str, Any]) -> None:
        self.warmup_num_steps, self.warmup_type = _warmup(given)
        self.total_num_steps, self.warmup_min_ratio = given["total_num_steps"], given["warmup_min_ratio"]
        self.cos_min_ratio = given["cos_min_ratio"]
        _say_if_short(self, self.total_num_steps, self.warmup_num_steps)
        rates = [group["lr"] for group in self.optimizer.param_groups]
        self.org_lrs = [rate.clone() if isinstance(rate, torch.Tensor) else rate for rate in rates]

    def get_lr(self) -> list[Any]:
        """Return the rates of this iteration; 0 before the first."""
        if self.last_batch_iteration < 0:
            return [0.0 for _ in self.org_lrs]
        ratio = self.get_lr_ratio()
        return [rate * ratio for rate in self.org_lrs]

    def get_lr_ratio(self) -> float:
        """Return the factor of each group's rate in this iteration; 0 before the first."""
        now, steps = self.last_batch_iteration, self.warmup_num_steps
        if now < 0:
            return 0.0
        if now < steps:
            return float(self.warmup_min_ratio + _risen(now, steps, self.warmup_type) * (1.0 - self.warmup_min_ratio))
        progress = min(1.0, (now - steps + 1) / max(1, self.total_num_steps - steps))
        level = (1 + math.cos(math.pi * progress)) / 2
        return float(max(0.0, self.cos_min_ratio + (1.0 - self.cos_min_ratio) * level))


CLASSES: dict[str, type[Schedule]] = {
    kind.__name__: kind for kind in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)
}
"""The schedules by their names in a config."""


def of_config(tree: dict[str, Any]) -> Callable[[torch.optim.Optimizer], Schedule] | None:
    """Remove one of these schedules from a config and return a function from an optimizer to it; None if there is none.

    ConfigError if its options are wrong; the function may raise it as well.
    """
    section = tree.get("scheduler")
    kind = CLASSES.get(section.get("type", "")) if isinstance(section, Mapping) else None
    params = (section or {}).get("params") or {}
    if kind is None or not isinstance(params, Mapping) or "max_lr" in params:  # torch's OneCycleLR
        return None
    del tree["scheduler"]

    def make(optimizer: torch.optim.Optimizer) -> Schedule:
        with _saying_config():
            return kind(optimizer, **params)

    with _saying_config():
        kind.bound((), params)
    return make


@contextmanager
def _saying_config() -> Iterator[None]:
    try:
        yield
    except (TypeError, ValueError) as error:
        raise ConfigError(f"scheduler.params: {error}") from error


def constants() -> dict[str, str]:
    """Return the constants that scripts use for keys of a config: LR_RANGE_TEST, WARMUP_NUM_STEPS, …"""
    keys = {name for kind in CLASSES.values() for name in kind.options}
    kinds = {
        "LR_RANGE_TEST": "LRRangeTest",
        "ONE_CYCLE": "OneCycle",
        "WARMUP_LR": "WarmupLR",
        "WARMUP_DECAY_LR": "WarmupDecayLR",
        "WARMUP_COSINE_LR": "WarmupCosineLR",
        "WARMUP_LOG_RATE": _LOG,
        "WARMUP_LINEAR_RATE": _LINEAR,
    }
    return {**{name.upper(): name for name in sorted(keys)}, **kinds}


def _optimizer_of(given: Any) -> torch.optim.Optimizer:
    for found in (given, getattr(given, "optimizer", None)):
        if isinstance(found, torch.optim.Optimizer):
            return found
    raise TypeError(f"expected a torch optimizer, got {type(given).__name__}")


def _count(name: str, value: Any) -> int:
    if not isinstance(value, int) or value <= 0:
        raise ValueError(f"{name}: expected a whole number above 0, got {value}")
    return value


def _warmup(given: dict[str, Any]) -> tuple[int, str]:
    """Return the number of steps of a warm-up, at least 2, and its type; warn of an unknown type."""
    steps, kind = max(2, _count("warmup_num_steps", given["warmup_num_steps"])), given["warmup_type"]
    if kind not in (_LOG, _LINEAR):
        _log.warning("warmup_type: expected %s or %s, got %s; %s counts", _LOG, _LINEAR, kind, _LOG)
    return steps, kind if kind in (_LOG, _LINEAR) else _LOG


def _risen(at: int, steps: int, kind: str) -> float:
    """Return the fraction of a warm-up of ``steps`` that is complete at iteration ``at``."""
    if at >= steps:
        return 1.0
    return (1.0 / math.log(steps)) * math.log(at + 1) if kind == _LOG else at / steps


def _say_if_short(schedule: Schedule, total: int, warmup: int) -> None:
    if total < warmup:
        _log.warning("%s: total_num_steps %d is less than warmup_num_steps %d", type(schedule).__name__, total, warmup)


NAMES: dict[str, Any] = {
    "runtime.lr_schedules.VALID_LR_SCHEDULES": list(CLASSES),
    **{f"runtime.lr_schedules.{name}": found for name, found in {**CLASSES, **constants()}.items()},
}
"""Dotted name → the object."""
