"""What a script calls between its steps: one reduction for several backwards, states off the device and back.

Owns: what those calls are of ours, the names of the states. Must not know: how an engine does them.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from shardengine.compat.deepspeed import accelerators
from shardengine.compat.deepspeed.errors import AssertedError
from shardengine.engine import Engine
from shardengine.errors import UsageError


class OffloadDeviceEnum(enum.StrEnum):
    """Where something is kept, as a config has it."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(enum.StrEnum):
    """What ``engine.offload_states`` moves."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


_OURS = {"optim_states": ["optimizer"], "hp_params": ["optimizer"], "lp_params": ["weights"]}
"""Under which names the engine moves them; gradients do not rest between two steps."""


class Phases:
    """Of the engine's class."""

    _inside = ""
    """Inside of which of these ``with`` blocks the loop is."""
    _waits_for_step = False

    @property
    def _live(self) -> Engine:
        """The engine, if it is open."""
        raise NotImplementedError

    def scale(self, loss: Tensor) -> Tensor:
        """``loss`` with the loss scale, for a ``backward()`` of its own, which comes next."""
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            came = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise AssertedError(f"scale: expected loss to be a scalar tensor with a graph, got {came}")
        return self._live.scale(loss)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside of ``with`` this stay on their rank, and their micro-batches are not counted."""
        with self._entered("no_sync"), self._live.no_sync():
            yield

    @contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Backwards inside of ``with`` this stay on their rank; the next ``step()`` after it reduces their sum."""
        with self._entered("coalesce_grad_reduction"), self._live.no_sync():
            yield
        self._waits_for_step = True

    @contextmanager
    def _entered(self, call: str) -> Iterator[None]:
        if self._inside:
            raise AssertedError(f"{call}: expected to be outside of engine.{self._inside}(); these cannot be nested")
        self._inside = call
        try:
            yield
        finally:
            self._inside = ""

    def allreduce_gradients(self, *_: Any, **__: Any) -> None:
        """Nothing: gradients are reduced in the backward."""

    def _step_phase(self) -> None:
        if self._inside:
            raise AssertedError(f"step: expected after the `with engine.{self._inside}():` block, got a call inside")
        flush, self._waits_for_step = self._waits_for_step, False
        self._live.step(flush=flush)

    def offload_states(
        self,
        include: Iterable[OffloadStateTypeEnum | str] | None = None,
        device: OffloadDeviceEnum | str = OffloadDeviceEnum.cpu,
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Move states to host memory, until ``reload_states``. include: None: all · non_blocking: no effect.

        UsageError for another ``device``. Master weights and the optimizer's states move together.
        """
        if OffloadDeviceEnum(device) is not OffloadDeviceEnum.cpu:
            raise UsageError(f"offload_states: expected device cpu, got {OffloadDeviceEnum(device).value}")
        asked = list(OffloadStateTypeEnum) if include is None else [OffloadStateTypeEnum(each) for each in include]
        wanted = {name for each in asked for name in _OURS.get(each.value, [])}
        self._live.offload_states(sorted(wanted), pin_memory=pin_memory)

    def reload_states(self, non_blocking: bool = False) -> None:
        """They come back. non_blocking: no effect."""
        self._live.reload_states()

    def empty_partition_cache(self) -> None:
        """Give memory that is not used back to the device; gathered weights are freed when their use ends."""
        accelerators.get_accelerator().empty_cache()


NAMES: dict[str, Any] = {
    "runtime.zero.OffloadDeviceEnum": OffloadDeviceEnum,
    "runtime.zero.OffloadStateTypeEnum": OffloadStateTypeEnum,
    "runtime.zero.offload_config.OffloadDeviceEnum": OffloadDeviceEnum,
    "runtime.zero.offload_config.OffloadStateTypeEnum": OffloadStateTypeEnum,
}
"""Dotted name → the object."""
