"""Writes the numbers of every optimizer step: to CSV or JSON-lines files, TensorBoard, services, the user's objects.

Owns: the protocol, the built-in monitors, and that a monitor never stops a training: its first exception is logged, and
the monitor is off from then on. Must not know: engines, steps, config files. Only rank 0 has monitors.

[Note: One step late] Loss and norm are computed on the device. They are copied to the host after the step's kernels and
written when they have arrived: immediately on a CPU, after the next step at the latest on a GPU. So the host does not
wait for a step that was just launched. A run that is killed on a GPU loses only its last line.
"""

from __future__ import annotations

import csv
import errno
import importlib
import io
import json
import logging
import math
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from shardengine.config import MonitorConfig, SinkConfig
from shardengine.engine.monitor_services import CometMonitor, MlflowMonitor, WandbMonitor
from shardengine.errors import UsageError
from shardengine.offload import Fetched, Platform

VALUES = ("loss", "lr", "grad_norm", "loss_scale", "skipped_steps", "samples")
"""The numbers that the engine writes for each step.

loss: the mean of rank 0's losses over the micro-batches, as passed to ``backward``; missing after ``loss.backward()`` ·
lr: the learning rate of the first parameter group in this step · grad_norm: before clipping · loss_scale: the scale of
this step's loss · skipped_steps, samples: totals so far.
"""

_log = logging.getLogger(__name__)
_TAIL = 1 << 16


class Monitor(Protocol):
    """Receives the numbers of optimizer steps, on rank 0. Its first exception is logged and switches it off."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write the numbers of step ``step``, counted from 1. ``values`` has the known numbers of `VALUES`."""

    def close(self) -> None:
        """Close the monitor, because the engine is closed."""


class _Lines:
    """A file that gets whole lines, each in one write, so that a killed process leaves no partial line."""

    def __init__(self, path: Path) -> None:
        """Open ``path``; create it if it is missing."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115  (closed by close)
        self.is_new = os.fstat(self._file.fileno()).st_size == 0

    def mend(self) -> None:
        """Remove a partial last line, left by a full disk, from a file that is known to be ours."""
        size, path = os.fstat(self._file.fileno()).st_size, self.path
        if size:
            with path.open("rb") as before:
                before.seek(max(0, size - _TAIL))
                tail = before.read()
            if b"\n" in tail:
                self._file.truncate(size - len(tail) + tail.rindex(b"\n") + 1)

    def append(self, text: str) -> None:
        """Write ``text``, which ends with a newline; OSError if the disk is full."""
        data = text.encode()
        if self._file.write(data) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class CsvMonitor:
    """Writes a CSV line per step to ``path``, whose first line has the names.

    A restarted run appends to the same file.
    """

    def __init__(self, path: str | Path, columns: Sequence[str] = VALUES) -> None:
        """Open ``path`` and write the first line if the file is new.

        columns: the values to write, beside the step. A value of another name is an error; a missing one leaves an
        empty cell.
        """
        self._columns = ("step", *columns)
        self._lines = _Lines(Path(path))
        try:
            self._begin()
        except BaseException:
            self._lines.close()
            raise

    def _begin(self) -> None:
        if self._lines.is_new:
            self._lines.append(self._line(self._columns))
            return
        with self._lines.path.open(newline="", encoding="utf-8") as file:
            there = tuple(next(csv.reader(file), ()))
        if there != self._columns:
            raise ValueError(
                f"expected a file that begins with {','.join(self._columns)}, got {','.join(there)[:200]!r}; move it "
                "away or choose another job_name"
            )
        self._lines.mend()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Append the line of ``step``."""
        if unknown := values.keys() - set(self._columns):
            raise ValueError(f"expected values of {', '.join(self._columns[1:])}, got {', '.join(sorted(unknown))}")
        row = {"step": step, **values}
        self._lines.append(self._line([row.get(name, "") for name in self._columns]))

    def close(self) -> None:
        """Close the file."""
        self._lines.close()

    @staticmethod
    def _line(cells: Sequence[Any]) -> str:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerow(cells)
        return text.getvalue()


class JsonMonitor:
    """Writes a line with a JSON object per step to ``path``. Values that are not finite are strings ("nan", "inf")."""

    def __init__(self, path: str | Path) -> None:
        self._lines = _Lines(Path(path))
        self._lines.mend()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Append the line of ``step``."""
        shown = {name: value if math.isfinite(value) else str(value) for name, value in values.items()}
        self._lines.append(json.dumps({"step": step, **shown}) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._lines.close()


def summary_writer(directory: str | Path) -> Any:
    """Return torch.utils.tensorboard's writer. ModuleNotFoundError if the package tensorboard is missing."""
    try:
        module = importlib.import_module("torch.utils.tensorboard")
    except ImportError as error:
        raise ModuleNotFoundError(f"it needs the package tensorboard (pip install tensorboard): {error}") from error
    return module.SummaryWriter(str(directory))


class TensorBoardMonitor:
    """Scalars ``train/<name>`` in event files in ``directory``, written with torch.utils.tensorboard."""

    def __init__(self, directory: str | Path) -> None:
        """As ``summary_writer``."""
        self._writer = summary_writer(directory)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add the values and flush, so that a killed run keeps them."""
        for name, value in values.items():
            self._writer.add_scalar(f"train/{name}", value, step)
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


def _folder(sink: SinkConfig) -> Path:
    return Path(sink.output_path or "") / sink.job_name


KINDS: dict[str, Callable[[Any], Monitor]] = {
    "csv": lambda sink: CsvMonitor(_folder(sink) / "metrics.csv"),
    "jsonl": lambda sink: JsonMonitor(_folder(sink) / "metrics.jsonl"),
    "tensorboard": lambda sink: TensorBoardMonitor(_folder(sink)),
    "wandb": WandbMonitor,
    "mlflow": MlflowMonitor,
    "comet": CometMonitor,
}
"""A section of the config's ``monitor`` → the function that makes its monitor."""


@dataclass
class _PendingRow:
    """The numbers of one step; ``names`` are those of ``arriving``, which may be in flight from the device."""

    step: int
    values: dict[str, float]
    late: Mapping[str, Callable[[], float]]
    names: tuple[str, ...]
    arriving: Fetched


class Monitors:
    """All monitors of one engine."""

    def __init__(self, config: MonitorConfig, given: Sequence[Monitor], rank: int, platform: Platform) -> None:
        """Open the monitors that ``config`` enables, beside those in ``given``. Raises nothing."""
        self._platform = platform
        self._open: dict[str, Monitor] = {}
        self._loss: Tensor | None = None
        self._share: Tensor | None = None
        self._scale = 1.0
        self._pending: deque[_PendingRow] = deque()
        if rank:
            return
        for kind, make in KINDS.items():
            section, name = getattr(config, kind), f"monitor.{kind}"
            if section.enabled:
                try:
                    self._open[name] = make(section)
                except Exception as error:
                    self._tell(name, error)
        for number, monitor in enumerate(given):
            self._open[f"monitors[{number}] ({type(monitor).__name__})"] = monitor

    def __bool__(self) -> bool:
        return bool(self._open)

    def add_loss(self, loss: Tensor, scale: float, *, divided: bool = False) -> None:
        """Add a ``loss`` that ``backward`` multiplied with ``scale``; only scalars count.

        divided: it is a share of the step's loss.
        """
        self._scale = scale
        if not self._open or loss.numel() != 1:
            return
        value = loss.detach().reshape(()).float()
        if divided:
            self._share = value if self._share is None else self._share + value
        else:
            self._loss = value if self._loss is None else self._loss + value

    def forget(self) -> None:
        """Drop the losses of the accumulation window."""
        self._loss = self._share = None

    def note(
        self,
        step: int,
        values: dict[str, float],
        late: Mapping[str, Callable[[], float]],
        norm: Tensor | None,
        micro_batches: int,
    ) -> None:
        """Record the numbers of a finished step ([Note: One step late]).

        values: known on the host · late: functions of numbers that the host will know later · norm: on the device.
        """
        if not self._open:
            return
        parts = [] if self._loss is None else [self._loss / max(1, micro_batches)]
        parts += [] if self._share is None else [self._share]
        loss = torch.stack(parts).sum() if parts else None
        self.forget()
        try:
            known = {**values, "loss_scale": self._scale}
            self._pending.append(_read(step, known, late, {"grad_norm": norm, "loss": loss}, self._platform))
        except Exception as error:
            self._tell(f"what monitors are given ({', '.join(self._open)})", error)
            self.close()
        while self._pending and (len(self._pending) > 1 or self._pending[0].arriving.reached):
            self._write(self._pending.popleft())

    def close(self) -> None:
        """Write pending rows, then close all monitors."""
        while self._pending:
            self._write(self._pending.popleft())
        for name, monitor in list(self._open.items()):
            self._shielded(name, monitor.close)
        self._open.clear()

    def _write(self, reading: _PendingRow) -> None:
        arrived = dict(zip(reading.names, reading.arriving.get().tolist(), strict=True))
        known = {**reading.values, **arrived, **{name: value() for name, value in reading.late.items()}}
        values = {name: known[name] for name in VALUES if name in known}
        for name, monitor in list(self._open.items()):
            self._shielded(name, lambda monitor=monitor: monitor.write(reading.step, dict(values)))  # type: ignore[misc]

    def _shielded(self, name: str, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            monitor = self._open.pop(name)
            self._tell(name, error)
            try:
                monitor.close()
            except Exception:
                _log.debug("%s could not be closed", name, exc_info=True)

    @staticmethod
    def _tell(name: str, error: Exception) -> None:
        _log.warning("%s is off from now on, training goes on without it: %s: %s", name, type(error).__name__, error)


def _read(
    step: int,
    values: dict[str, float],
    late: Mapping[str, Callable[[], float]],
    on_device: dict[str, Tensor | None],
    platform: Platform,
) -> _PendingRow:
    there = {name: value.detach().reshape(()) for name, value in on_device.items() if value is not None}
    if not there:
        return _PendingRow(step, values, late, (), platform.fetch(torch.empty(0)))
    device = next(iter(there.values())).device
    numbers = torch.stack([value.to(device, torch.float64) for value in there.values()])
    return _PendingRow(step, values, late, tuple(there), platform.fetch(numbers))


def check(given: Sequence[Any]) -> None:
    """Raise ``UsageError`` for the first object of ``initialize``'s monitors that is no monitor."""
    for number, monitor in enumerate(given):
        if not all(callable(getattr(monitor, name, None)) for name in ("write", "close")):
            raise UsageError(
                f"initialize: monitors[{number}] is {type(monitor).__name__}: expected an object with write(step, "
                "values) and close()",
                code="monitor-without-write-and-close",
            )
