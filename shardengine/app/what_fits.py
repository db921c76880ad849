"""Finds the smallest change that makes a plan fit, and the command for it.

Owns: the changes to try, and their order, from those that only cost time to those that change the training. Must not
know: how a plan is made.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from shardengine import stages
from shardengine.config import MICRO, TRIPLE
from shardengine.errors import ConfigError, UsageError
from shardengine.planner import Plan

WHOLE, _, STEPS = TRIPLE
_SHORTEST = 256
"""Tokens. Shorter rows are not proposed."""
_ZERO = "zero_optimization"


class _SuggestedChange(NamedTuple):
    """option: of ``shardengine plan`` · values: of that option; --set KEY=VALUE is added to those that are given."""

    option: str
    values: tuple[str, ...]

    def __str__(self) -> str:
        return " ".join(f"{self.option} {shlex.quote(value)}" for value in self.values)

    def applied(self, options: argparse.Namespace) -> argparse.Namespace:
        given = vars(options)
        if self.option == "--set":
            given = {**given, "set": [*(options.set or ()), *self.values]}
            if any(value.startswith(MICRO) for value in self.values):
                given["micro_batch"] = None
        elif self.option == "--length":
            given = {**given, "length": int(self.values[0])}
        else:
            given = {**given, "gpus": self.values[0]}
        return argparse.Namespace(**given)


def sentences(options: argparse.Namespace, found: Plan, planned: Callable[[argparse.Namespace], Plan]) -> Iterator[str]:
    """Yield the change that fits, for people.

    found: the plan of ``options``, which does not fit · planned: makes another one.
    """
    yield "looking for the smallest change with which it fits …"
    chosen = _chosen(options, found, planned)
    if chosen is None:
        yield (
            "nothing that was tried fits: smaller micro-batches, stage 3, activations computed again, host memory "
            "(--host-memory), shorter rows, four times the GPUs; --choose tries more, also a disk (--nvme)"
        )
        return
    changes, plan = chosen
    words = " ".join(map(str, changes))
    yield f"it fits with {words}: {'; '.join(plan.sentences())}"
    yield f"  {_command(_all(options, changes))}"


def _chosen(
    options: argparse.Namespace, found: Plan, planned: Callable[[argparse.Namespace], Plan]
) -> tuple[Sequence[_SuggestedChange], Plan] | None:
    """Return the changes that make it fit, and the plan; None if none do.

    Changes are added until it fits. Then those that are not needed are removed again, the most costly first.
    """
    taken: list[_SuggestedChange] = []
    for change in _changes(options, found):
        before = taken
        taken = [each for each in taken if each.option == "--set" or each.option != change.option] + [change]
        plan = _tried(_all(options, taken), planned)
        if plan is None:
            taken = before
        elif plan.fits:
            break
    else:
        return None
    for change in reversed(taken[:-1]):
        fewer = [each for each in taken if each is not change]
        less = _tried(_all(options, fewer), planned)
        if less is not None and less.fits:
            taken, plan = fewer, less
    return taken, plan


def _changes(options: argparse.Namespace, found: Plan) -> Iterator[_SuggestedChange]:
    """Yield changes. Those that keep the global batch, and so the training, come first."""
    config, hardware = found.config, found.hardware
    micro, steps = config.train_micro_batch_size_per_gpu or 1, config.gradient_accumulation_steps or 1
    if micro > 1:
        follows = config.sources.get(STEPS) == "derived" and config.sources.get(WHOLE) == "file"
        kept = () if follows and options.micro_batch is None else (f"{STEPS}={micro * steps}",)
        yield _SuggestedChange("--set", (f"{MICRO}=1", *kept))
    if not stages.select(config).moves_weights:
        yield _SuggestedChange("--set", (f"{_ZERO}.stage=3",))
    if not config.activation_checkpointing.enabled:
        yield _SuggestedChange("--set", ("activation_checkpointing.enabled=true",))
    if hardware.host_bytes is not None:
        yield _SuggestedChange("--set", (f"{_ZERO}.offload_optimizer.device=cpu",))
        yield _SuggestedChange("--set", (f"{_ZERO}.offload_param.device=cpu",))
    length = found.shape[1] // 2 if len(found.shape) == 2 else 0
    while length >= _SHORTEST:
        yield _SuggestedChange("--length", (str(length),))
        length //= 2
    size = options.gpus.lower().partition("x")[2] or options.gpus
    for times in (2, 4):
        yield _SuggestedChange("--gpus", (f"{times * hardware.ranks}x{size.upper().replace('GIB', 'GiB')}",))


def _tried(options: argparse.Namespace, planned: Callable[[argparse.Namespace], Plan]) -> Plan | None:
    """Return the plan; None if the config or the model does not allow the change."""
    try:
        return planned(options)
    except (ConfigError, UsageError):
        return None


def _all(options: argparse.Namespace, changes: Sequence[_SuggestedChange]) -> argparse.Namespace:
    for change in changes:
        options = change.applied(options)
    return options


def _command(options: argparse.Namespace) -> str:
    """Return ``shardengine plan`` with these options, in the order of its help."""
    words = ["shardengine", "plan"]
    for name in ("model", "gpus", "host_memory", "nvme", "node", "config", "length", "micro_batch", "lr", "lora"):
        value = getattr(options, name)
        words += [f"--{name.replace('_', '-')}", str(value)] if value is not None else []
    for change in options.set or ():
        words += ["--set", change]
    return shlex.join([*words, *(["--script"] if options.script else [])])
