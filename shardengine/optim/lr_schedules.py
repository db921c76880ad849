"""Learning-rate schedules by name. Owns: the four schedules of the config and torch's own classes, with their checks.

A schedule's step t is the number of optimizer steps done, so the first step runs with the value at t = 0. Every named
schedule is a torch LambdaLR: a group's base rate times a ratio. It must not know buckets, stages or ranks.

[Note: Base rates]
WarmupCosineLR is a ratio: each parameter group keeps its own base rate. WarmupLR, WarmupDecayLR and OneCycle name
absolute rates; their peak then becomes the base rate of every group (`lr` and `initial_lr`). If WarmupLR and
WarmupDecayLR leave `warmup_max_lr` out, the peak is each group's own rate.
"""

from __future__ import annotations

import copy
import inspect
import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim import lr_scheduler

from shardengine.config import SchedulerConfig, kinds, nearest, plain
from shardengine.errors import ConfigError, UsageError

Ratio = Callable[[int], float]

REQUIRED: Any = object()
_RATIO = _MOMENTUM = kinds.NOT_NEGATIVE
_WARMUP: kinds.Table = {"warmup_num_steps": (kinds.SIZE, 1000), "warmup_type": (kinds.choice("log", "linear"), "log")}
_WARMUP_RATES: kinds.Table = {
    "warmup_min_lr": (kinds.NOT_NEGATIVE, 0.0),
    "warmup_max_lr": (kinds.optional(kinds.NOT_NEGATIVE, "each group's own rate"), None),
    **_WARMUP,
}
_TOTAL: kinds.Table = {"total_num_steps": (kinds.COUNT, REQUIRED)}
NAMED: dict[str, kinds.Table] = {
    "WarmupLR": _WARMUP_RATES,
    "WarmupDecayLR": {**_TOTAL, **_WARMUP_RATES},
    "WarmupCosineLR": {**_TOTAL, "warmup_min_ratio": (_RATIO, 0.0), "cos_min_ratio": (_RATIO, 1e-4), **_WARMUP},
    "OneCycle": {
        "cycle_min_lr": (kinds.NOT_NEGATIVE, REQUIRED),
        "cycle_max_lr": (kinds.POSITIVE, REQUIRED),
        "cycle_first_step_size": (kinds.COUNT, 2000),
        "cycle_second_step_size": (kinds.optional(kinds.COUNT, "as long as the first"), None),
        "decay_step_size": (kinds.SIZE, 0),
        "decay_lr_rate": (kinds.NOT_NEGATIVE, 0.0),
        "cycle_momentum": (kinds.BOOL, True),
        "cycle_min_mom": (_MOMENTUM, 0.8),
        "cycle_max_mom": (_MOMENTUM, 0.9),
        "decay_mom_rate": (kinds.NOT_NEGATIVE, 0.0),
    },
}
"""The schedules of the config: name -> parameter -> (kind, default). OneCycle with `max_lr` is torch's OneCycleLR."""

_NOT_FROM_JSON = {
    **dict.fromkeys(("LambdaLR", "MultiplicativeLR"), "it needs a Python function"),
    **dict.fromkeys(("SequentialLR", "ChainedScheduler"), "it needs other schedule objects"),
    "ReduceLROnPlateau": "it needs a metric, which the loop gives to its step()",
}
_AND_THEN = {"ReduceLROnPlateau": "; then call engine.lr_scheduler.step(metric) after each evaluation"}
_TORCH: dict[str, type[lr_scheduler.LRScheduler]] = {
    name: found
    for name, found in vars(lr_scheduler).items()
    if isinstance(found, type)
    and issubclass(found, lr_scheduler.LRScheduler)
    and "LRScheduler" not in name
    and name not in _NOT_FROM_JSON
}


def check(config: SchedulerConfig) -> None:
    """Raise ConfigError with every problem of the name and the parameters that can be seen without an optimizer."""
    _read(config)


def check_attached(scheduler: object, optimizer: torch.optim.Optimizer) -> None:
    """Raise ``UsageError`` unless the engine can step ``scheduler`` and it drives ``optimizer``'s groups."""
    if not isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler):
        raise UsageError(
            f"lr_scheduler: expected a torch LRScheduler, got {type(scheduler).__name__}", code="scheduler-wrong-type"
        )
    theirs, ours = scheduler.optimizer.param_groups, optimizer.param_groups
    if len(theirs) != len(ours) or any(a is not b for a, b in zip(theirs, ours, strict=True)):
        raise UsageError(
            "lr_scheduler: it was made for another optimizer; expected one over the optimizer given to initialize, "
            "or a function from the engine's optimizer to a scheduler",
            code="scheduler-of-another-optimizer",
        )


def check_extended(scheduler: Any, optimizer: torch.optim.Optimizer) -> None:
    """Raise ``UsageError`` unless ``scheduler`` (None: there is none) has a rate for every group, new ones included."""
    for part in () if scheduler is None else getattr(scheduler, "_schedulers", (scheduler,)):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns that get_last_lr is meant for users
                rates = len(part.min_lrs if needs_metric(part) else part.get_lr())
            problem = f"it has rates for {rates} groups" if rates != len(optimizer.param_groups) else ""
        except (KeyError, ValueError, IndexError) as error:
            problem = f"it says {type(error).__name__}: {error}"
        if problem:
            raise UsageError(
                f"add_param_group: the scheduler {type(part).__name__} cannot schedule the new group ({problem}, "
                f"expected {len(optimizer.param_groups)}). Give it the group first (for LambdaLR append to its "
                "lr_lambdas and base_lrs, for ReduceLROnPlateau to its min_lrs; for OneCycleLR put initial_lr, max_lr "
                "and min_lr into the group), or use one that works with any groups, such as CosineAnnealingLR",
                code="scheduler-cannot-add-group",
            )


def make(given: Any, config: SchedulerConfig | None, optimizer: torch.optim.Optimizer) -> Any:
    """Return the scheduler over ``optimizer``: ``given``, or its result if it is a function, else the config's."""
    if given is None and config is not None and any(group.get("relative_step") for group in optimizer.param_groups):
        raise UsageError(
            f"scheduler: expected none, got {config.type}: with relative_step=True the optimizer finds its learning "
            "rate itself; set relative_step=False and give it lr=",
            code="scheduler-with-relative-step",
        )
    if given is None:
        return None if config is None else build(config, optimizer)
    scheduler = given if isinstance(given, lr_scheduler.LRScheduler) else given(optimizer)
    check_attached(scheduler, optimizer)
    return scheduler


def needs_metric(scheduler: Any) -> bool:
    """Whether the user steps ``scheduler`` himself, because its step() needs a metric of the model."""
    return isinstance(scheduler, lr_scheduler.ReduceLROnPlateau)


def is_named(scheduler: Any) -> bool:
    """Whether ``scheduler``, from ``build`` or None, depends on the number of steps alone, so a step can be undone."""
    return scheduler is None or type(scheduler) in (lr_scheduler.LambdaLR, _OneCycle)


def step_for_now(scheduler: lr_scheduler.LRScheduler) -> Callable[[], None]:
    """Step ``scheduler``, which must satisfy ``is_named``, and return a function that undoes the step.

    It leaves options of groups that were set in the meantime as they are.
    """
    groups = scheduler.optimizer.param_groups
    state, before = copy.deepcopy(scheduler.state_dict()), [_options(group) for group in groups]
    scheduler.step()
    after = [_options(group) for group in groups]

    def take_back() -> None:
        scheduler.load_state_dict(state)
        for group, old, new in zip(groups, before, after, strict=False):
            for name in old.keys() & group.keys():
                if _same(group[name], new[name]) and not _same(new[name], old[name]):
                    if isinstance(group[name], torch.Tensor):
                        group[name].copy_(old[name])
                    else:
                        group[name] = old[name]

    return take_back


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    options = {name: value for name, value in group.items() if name != "params"}
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in options.items()}


def _same(one: Any, other: Any) -> bool:
    tensors = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
    return torch.equal(one, other) if tensors else bool(one == other or (one != one and other != other))


def build(config: SchedulerConfig, optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    """Return the schedule over ``optimizer``, with the rates of step 0 already set in its ``param_groups``.

    Absolute rates replace the groups' own ([Note: Base rates]). Raises ConfigError with every problem of the
    parameters, or with torch's message if one of torch's classes rejects them.
    """
    torch_class, params = _read(config)
    if torch_class is not None:
        try:
            return torch_class(optimizer, **plain(config.params))
        except (TypeError, ValueError, ZeroDivisionError) as error:
            raise ConfigError(f"scheduler.params: torch's {torch_class.__name__} says: {error}") from error
    if config.type == "OneCycle":
        return _OneCycle(optimizer, params)
    if config.type == "WarmupCosineLR":
        return lr_scheduler.LambdaLR(optimizer, warmup_cosine(params))
    ratios: list[Ratio] = []
    for group in optimizer.param_groups:
        if params["warmup_max_lr"] is not None:
            _set_base(group, params["warmup_max_lr"])
        peak = float(group.get("initial_lr", group["lr"]))
        if params["warmup_min_lr"] > peak:
            expected = f"expected at most the rate of every parameter group, one has {peak:g}"
            raise ConfigError(f"scheduler.params.warmup_min_lr: {expected}, got {params['warmup_min_lr']:g}")
        ratios.append(warmup(params, peak))
    return lr_scheduler.LambdaLR(optimizer, ratios)


def rising(params: Mapping[str, Any]) -> Ratio:
    """The warm-up from 0 at step 0 to 1: linear in t, or log(t + 1) / log(n), which reaches 1 one step earlier."""
    steps: int = params["warmup_num_steps"]

    def ratio(step: int) -> float:
        if step >= steps:
            return 1.0
        if params["warmup_type"] == "linear":
            return step / steps
        return math.log(step + 1) / math.log(max(2, steps))

    return ratio


def warmup(params: Mapping[str, Any], peak: float) -> Ratio:
    """Ratio to ``peak`` of WarmupLR (stays at 1) and WarmupDecayLR (linear to the minimum at `total_num_steps`)."""
    rise, steps, total = rising(params), params["warmup_num_steps"], params.get("total_num_steps")
    low = params["warmup_min_lr"] / peak if peak else 0.0

    def ratio(step: int) -> float:
        part = rise(step)
        if total is not None and step >= steps:
            part = max(0.0, (total - step) / max(1, total - steps))
        return low + (1.0 - low) * part

    return ratio


def warmup_cosine(params: Mapping[str, Any]) -> Ratio:
    """Ratio of WarmupCosineLR: from `warmup_min_ratio` to 1, then half a cosine to `cos_min_ratio` at the last step."""
    rise, steps, total = rising(params), params["warmup_num_steps"], params["total_num_steps"]
    first, last = params["warmup_min_ratio"], params["cos_min_ratio"]

    def ratio(step: int) -> float:
        if step < steps:
            return float(first + (1.0 - first) * rise(step))
        progress = min(1.0, (step - steps) / max(1, total - steps))
        return float(last + (1.0 - last) * 0.5 * (1.0 + math.cos(math.pi * progress)))

    return ratio


def one_cycle(params: Mapping[str, Any], step: int) -> tuple[float, float]:
    """Return (part, decay) of OneCycle: part rises 0 → 1 → 0 over the cycle, decay counts decay intervals after it."""
    up: int = params["cycle_first_step_size"]
    down: int = params["cycle_second_step_size"] or up
    if step <= up:
        return step / up, 0.0
    if step <= up + down:
        return (up + down - step) / down, 0.0
    return 0.0, (step - up - down) / params["decay_step_size"] if params["decay_step_size"] else 0.0


class _OneCycle(lr_scheduler.LambdaLR):
    """One cycle of the rate and, against it, of momentum (`momentum`, or the first of `betas`), then decay."""

    def __init__(self, optimizer: torch.optim.Optimizer, params: Mapping[str, Any]) -> None:
        self._params = dict(params)
        for group in optimizer.param_groups:
            if params["cycle_momentum"] and "betas" not in group and "momentum" not in group:
                needs = "expected an optimizer with momentum or betas"
                raise ConfigError(
                    f"scheduler.params.cycle_momentum: {needs}, got {type(optimizer).__name__}; set it to false"
                )
            _set_base(group, params["cycle_max_lr"])
        super().__init__(optimizer, self._ratio)

    def _ratio(self, step: int) -> float:
        low = self._params["cycle_min_lr"] / self._params["cycle_max_lr"]
        part, decay = one_cycle(self._params, step)
        return float((low + (1.0 - low) * part) / (1.0 + self._params["decay_lr_rate"] * decay))

    def get_lr(self) -> list[float | torch.Tensor]:
        """Return the rates of the current step per group; momentum is set on the groups, as in torch's OneCycleLR."""
        if self._params["cycle_momentum"]:
            high, low = self._params["cycle_max_mom"], self._params["cycle_min_mom"]
            part, decay = one_cycle(self._params, self.last_epoch)
            momentum = (high - (high - low) * part) * (1.0 + self._params["decay_mom_rate"] * decay)
            for group in self.optimizer.param_groups:
                if "betas" in group:
                    group["betas"] = (momentum, *group["betas"][1:])
                else:
                    group["momentum"] = momentum
        return super().get_lr()


def _set_base(group: dict[str, Any], rate: float) -> None:
    group["lr"] = rate
    group["initial_lr"] = rate


def _read(config: SchedulerConfig) -> tuple[type[lr_scheduler.LRScheduler] | None, dict[str, Any]]:
    """Return (torch's class or None, the checked parameters with defaults)."""
    if config.type == "OneCycle" and "max_lr" in config.params:
        return _read_torch(lr_scheduler.OneCycleLR, config.params)
    if config.type in _TORCH:
        return _read_torch(_TORCH[config.type], config.params)
    if config.type in _NOT_FROM_JSON:
        raise ConfigError(
            f"scheduler.type: {config.type} cannot come from JSON, because {_NOT_FROM_JSON[config.type]}; leave the "
            "section out and pass a function from the optimizer to the scheduler, initialize(lr_scheduler=lambda "
            f"optimizer: {config.type}(optimizer, ...)){_AND_THEN.get(config.type, '')}"
        )
    if config.type not in NAMED:
        close = nearest(config.type, (*NAMED, *_TORCH))
        raise ConfigError(f'scheduler.type: unknown schedule "{config.type}"; the nearest valid name is "{close}"')
    table = NAMED[config.type]
    problems = _names(config, set(table), {name for name, (_, default) in table.items() if default is REQUIRED})
    params = kinds.check_table(
        table, config.params, lambda name, text: problems.append(f"scheduler.params.{name}: {text}")
    )
    problems = problems or _cross_checks(params)
    if problems:
        raise ConfigError(problems)
    return None, params


def _cross_checks(params: Mapping[str, Any]) -> list[str]:
    problems = []
    if params.get("total_num_steps", math.inf) < params.get("warmup_num_steps", 0):
        total, steps = params["total_num_steps"], params["warmup_num_steps"]
        problems.append(
            f"scheduler.params.total_num_steps: expected at least warmup_num_steps, which is {steps}, got {total}"
        )
    for low, high in (
        ("warmup_min_lr", "warmup_max_lr"),
        ("cycle_min_lr", "cycle_max_lr"),
        ("cycle_min_mom", "cycle_max_mom"),
    ):
        if params.get(high) is not None and params[low] > params[high]:
            expected = f"expected at most {high}, which is {params[high]:g}"
            problems.append(f"scheduler.params.{low}: {expected}, got {params[low]:g}")
    for rate in ("decay_lr_rate", "decay_mom_rate"):
        if params.get(rate, 0.0) > 0 and params["decay_step_size"] == 0:
            problems.append(f"scheduler.params.decay_step_size: expected an integer >= 1 beside {rate}, got 0")
    return problems


def _read_torch(
    found: type[lr_scheduler.LRScheduler], given: Mapping[str, Any]
) -> tuple[type[lr_scheduler.LRScheduler], dict[str, Any]]:
    parameters = {
        name: parameter
        for name, parameter in inspect.signature(found).parameters.items()
        if name not in ("optimizer", "last_epoch", "scale_fn")
    }
    required = {name for name, parameter in parameters.items() if parameter.default is inspect.Parameter.empty}
    problems = _names(SchedulerConfig(found.__name__, given), set(parameters), required)
    if problems:
        raise ConfigError(problems)
    return found, dict(given)


def _names(config: SchedulerConfig, known: set[str], required: set[str]) -> list[str]:
    problems = [
        f"scheduler.params.{name}: unknown parameter of {config.type}; "
        f'the nearest valid key is "scheduler.params.{nearest(name, known)}"'
        for name in config.params
        if name not in known
    ]
    missing = sorted(required - config.params.keys())
    return problems + [f"scheduler.params.{name}: the key is missing, {config.type} needs it" for name in missing]
