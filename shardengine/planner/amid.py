"""Planning in a process that trains, or is about to. Owns: restoring the process's state, and ending in time.

Must not know: the purpose of a plan.
"""

from __future__ import annotations

import gc
import logging
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from shardengine.config import Config
from shardengine.errors import ConfigError, UsageError
from shardengine.planner import batches
from shardengine.planner.hardware import Hardware
from shardengine.planner.memory_plan import Plan, plan

_LONGEST_REASON = 120
_PATIENCE = 0.25
"""Other ranks may wait for a plan for this part of ``timeout_s``."""


def plan_amid(
    model: nn.Module,
    config: Config,
    where: Hardware,
    batch: Callable[[], Mapping[str, Any]],
    *,
    loss: Callable[[Any], Tensor] = batches.loss_of,
    **options: Any,
) -> Plan | str:
    """Call ``plan`` under ``undisturbed``; if there is no plan, return the reason as a short text.

    No plan is no reason to end a run. batch: makes a micro-batch. Other ranks may be waiting, so planning ends after a
    part of ``timeout_s``.
    """
    try:
        with undisturbed():
            asked = in_time(loss, config.timeout_s, _PATIENCE)
            return plan(model, config, where, batch=batch(), loss=asked, trains=True, **options)
    except (TooLong, Exception) as error:
        found = reason_of(error).partition(": expected")[0][:_LONGEST_REASON]
    gc.collect()  # objects that the exception held
    return found


class TooLong(BaseException):
    """A plan has taken too long.

    It is a BaseException, so that no ``except Exception`` takes it for an error of the model.
    """


def reason_of(error: BaseException) -> str:
    """Return why there is no plan, without the name of the call at the front."""
    if not isinstance(error, (TooLong, UsageError, ConfigError)):
        return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}".removesuffix(": ")
    text = "; ".join(error.problems) if isinstance(error, ConfigError) else str(error)
    for call in ("choose: ", "no config can be planned: ", "plan: "):
        text = text.removeprefix(call)
    return text


def in_time(loss: Callable[[Any], Tensor], timeout_s: float, part: float) -> Callable[[Any], Tensor]:
    """Wrap ``loss``: the wrapper raises ``TooLong`` once ``part`` of ``timeout_s`` has passed."""
    seconds = part * timeout_s
    end = time.monotonic() + seconds

    def asked(returned: Any) -> Tensor:
        if time.monotonic() > end:
            raise TooLong(f"it takes more than {seconds:g} s, a part of timeout_s")
        return loss(returned)

    return asked


@contextmanager
def undisturbed() -> Iterator[None]:
    """Inside, nothing is logged and no warning is shown; afterwards, random states and the log level are restored."""
    log = logging.getLogger("shardengine")
    level = log.level
    try:
        log.setLevel(logging.CRITICAL)
        with _same_random_numbers(), torch.enable_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)


@contextmanager
def _same_random_numbers() -> Iterator[None]:
    """Restore the random states of torch on the host, Python and numpy on exit."""
    numbers: Any = sys.modules.get("numpy")
    python, array = random.getstate(), None if numbers is None else numbers.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(python)
            if array is not None:
                numbers.random.set_state(array)
