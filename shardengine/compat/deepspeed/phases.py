"""Calls of a script between its steps: one reduction for several backwards, moving states to host memory and back.

Owns: the mapping of those calls to ours, the names of the states. Must not know: how an engine implements them.
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
    """The devices of offloading, as in a config."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(enum.StrEnum):
    """The states that ``engine.offload_states`` can move."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


_OURS = {"optim_states": ["optimizer"], "hp_params": ["optimizer"], "lp_params": ["weights"]}
"""The engine's names for these states; between two steps there are no gradients to move."""


class Phases:
    """A mixin of DeepSpeedEngine."""

    _inside = ""
    """The name of the context manager that the loop is in; "" if it is in none."""
    _waits_for_step = False

    @property
    def _live(self) -> Engine:
        """The engine; UsageError if it was destroyed."""
        raise NotImplementedError

    def scale(self, loss: Tensor) -> Tensor:
        """Return ``loss`` multiplied by the loss scale; call ``backward()`` on the result next."""
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            came = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise AssertedError(
                f"scale: expected loss to be a scalar tensor with a graph, got {came}",
                code="loss-not-scalar-with-graph",
            )
        return self._live.scale(loss)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep the gradients of backwards inside on their rank, and do not count their micro-batches."""
        with self._entered("no_sync"), self._live.no_sync():
            yield

    @contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Keep the gradients of backwards inside on their rank; the next ``step()`` reduces their sum."""
        with self._entered("coalesce_grad_reduction"), self._live.no_sync():
            yield
        self._waits_for_step = True

    @contextmanager
    def _entered(self, call: str) -> Iterator[None]:
        if self._inside:
            raise AssertedError(
                f"{call}: expected to be outside of engine.{self._inside}(); these cannot be nested",
                code="deepspeed-no-sync-nested",
            )
        self._inside = call
        try:
            yield
        finally:
            self._inside = ""

    def allreduce_gradients(self, *_: Any, **__: Any) -> None:
        """Do nothing: gradients are reduced during the backward."""

    def _step_phase(self) -> None:
        if self._inside:
            raise AssertedError(
                f"step: expected after the `with engine.{self._inside}():` block, got a call inside",
                code="deepspeed-step-inside-no-sync",
            )
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
            raise UsageError(
                f"offload_states: expected device cpu, got {OffloadDeviceEnum(device).value}",
                code="offload-states-device-not-cpu",
            )
        asked = list(OffloadStateTypeEnum) if include is None else [OffloadStateTypeEnum(each) for each in include]
        wanted = {name for each in asked for name in _OURS.get(each.value, [])}
        self._live.offload_states(sorted(wanted), pin_memory=pin_memory)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Move the states back. non_blocking: no effect."""
        self._live.reload_states()

    def empty_partition_cache(self) -> None:
        """Return unused cached memory to the device; gathered weights are freed after use in any case."""
        accelerators.get_accelerator().empty_cache()


NAMES: dict[str, Any] = {
    "runtime.zero.OffloadDeviceEnum": OffloadDeviceEnum,
    "runtime.zero.OffloadStateTypeEnum": OffloadStateTypeEnum,
    "runtime.zero.offload_config.OffloadDeviceEnum": OffloadDeviceEnum,
    "runtime.zero.offload_config.OffloadStateTypeEnum": OffloadStateTypeEnum,
}
"""Dotted name → the object."""
