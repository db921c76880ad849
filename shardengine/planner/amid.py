"""Planning in a process that is going to train, or trains. Owns: that it leaves everything as it was, and ends in time.

Must not know: what is planned for whom.
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
"""The part of ``timeout_s`` for which other ranks may wait for a plan."""


def plan_amid(
    model: nn.Module,
    config: Config,
    where: Hardware,
    batch: Callable[[], Mapping[str, Any]],
    *,
    loss: Callable[[Any], Tensor] = batches.loss_of,
    **options: Any,
) -> Plan | str:
    """``plan`` as ``undisturbed``. A text says why there is no plan, in a few words: that is no reason to end a run.

    batch: makes a micro-batch. Other ranks may wait meanwhile: it ends when a part of ``timeout_s`` is over.
    """
    try:
        with undisturbed():
            asked = in_time(loss, config.timeout_s, _PATIENCE)
            return plan(model, config, where, batch=batch(), loss=asked, trains=True, **options)
    except (TooLong, Exception) as error:
        found = reason_of(error).partition(": expected")[0][:_LONGEST_REASON]
    gc.collect()  # what the exception held
    return found


class TooLong(BaseException):
    """Nobody between here and who wants a plan takes this for something that is wrong with a model."""


def reason_of(error: BaseException) -> str:
    """Why there is no plan, without the call that says so."""
    if not isinstance(error, (TooLong, UsageError, ConfigError)):
        return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}".removesuffix(": ")
    text = "; ".join(error.problems) if isinstance(error, ConfigError) else str(error)
    for call in ("choose: ", "no config can be planned: ", "plan: "):
        text = text.removeprefix(call)
    return text


def in_time(loss: Callable[[Any], Tensor], timeout_s: float, part: float) -> Callable[[Any], Tensor]:
    """``loss``, and ``TooLong`` when a part of ``timeout_s`` is over."""
    seconds = part * timeout_s
    end = time.monotonic() + seconds

    def asked(returned: Any) -> Tensor:
        if time.monotonic() > end:
            raise TooLong(f"it takes more than {seconds:g} s, a part of timeout_s")
        return loss(returned)

    return asked


@contextmanager
def undisturbed() -> Iterator[None]:
    """Inside, nothing is logged; afterwards random numbers and logs are as they were."""
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
    """What is drawn afterwards is what would have been drawn: by torch on the host, Python and numpy."""
    numbers: Any = sys.modules.get("numpy")
    python, array = random.getstate(), None if numbers is None else numbers.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(python)
            if array is not None:
                numbers.random.set_state(array)
