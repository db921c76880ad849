"""Where the numbers of every optimizer step go: files of CSV or JSON lines, TensorBoard, services, the user's objects.

Owns: the protocol, the built monitors, and that a monitor never stops a training: what one raises is said once, and it
is off from then on. Must not know: engines, steps, config files. Rank 0 alone writes; the others hold none.

[Note: One step late] Loss and norm are computed on the device. They are copied to the host behind the step's kernels,
and written when they have arrived: on a CPU at once, on a GPU after the next step at the latest, so that the host does
not wait for a step that has just been launched. What a killed run loses on a GPU is its last line.
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
"""What the engine writes of each step.

loss: rank 0's, as given to ``backward``: the mean over the micro-batches; not there after ``loss.backward()`` · lr: of
the first parameter group, with which the step was taken · grad_norm: before clipping · loss_scale: of this step's loss
· skipped_steps, samples: so far.
"""

_log = logging.getLogger(__name__)
_TAIL = 1 << 16


class Monitor(Protocol):
    """Takes the numbers of optimizer steps, on rank 0. What it raises is said once and switches it off."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """``step`` was step number so many, from 1 on; ``values`` has what is known of `VALUES`."""

    def close(self) -> None:
        """The engine is closed."""


class _Lines:
    """A file to which whole lines are appended, each by one write, so that a killed process leaves no half ones."""

    def __init__(self, path: Path) -> None:
        """Open ``path``, made where it is missing."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115  (closed by close)
        self.is_new = os.fstat(self._file.fileno()).st_size == 0

    def mend(self) -> None:
        """Remove a last line that a full disk has cut off, from a file that is known to be ours."""
        size, path = os.fstat(self._file.fileno()).st_size, self.path
        if size:
            with path.open("rb") as before:
                before.seek(max(0, size - _TAIL))
                tail = before.read()
            if b"\n" in tail:
                self._file.truncate(size - len(tail) + tail.rindex(b"\n") + 1)

    def append(self, text: str) -> None:
        """Write ``text``, which ends with a line's end; OSError where it does not fit."""
        data = text.encode()
        if self._file.write(data) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class CsvMonitor:
    """A line of CSV per step in ``path``, whose first line has the names; a restarted run goes on in the same file."""

    def __init__(self, path: str | Path, columns: Sequence[str] = VALUES) -> None:
        """columns: what is written, beside the step; values of other names are an error, missing ones are empty."""
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
    """A JSON object per step and line in ``path``; numbers that JSON does not have are the strings "nan" and "inf"."""

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
    """torch.utils.tensorboard's writer. ModuleNotFoundError where the package tensorboard is not installed."""
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
"""A section of the config's ``monitor`` → what makes its monitor of it."""


@dataclass
class _PendingRow:
    """Numbers of one step, some of which may be on their way from the device: ``names`` of ``arriving``."""

    step: int
    values: dict[str, float]
    late: Mapping[str, Callable[[], float]]
    names: tuple[str, ...]
    arriving: Fetched


class Monitors:
    """All monitors of one engine."""

    def __init__(self, config: MonitorConfig, given: Sequence[Monitor], rank: int, platform: Platform) -> None:
        """Open what ``config`` asks for beside the monitors that are ``given``; raises nothing."""
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
        """``loss`` was given to ``backward``, which multiplied it with ``scale``; only a scalar counts. divided: it is
        a share of the step's loss."""
        self._scale = scale
        if not self._open or loss.numel() != 1:
            return
        value = loss.detach().reshape(()).float()
        if divided:
            self._share = value if self._share is None else self._share + value
        else:
            self._loss = value if self._loss is None else self._loss + value

    def forget(self) -> None:
        """The window was dropped."""
        self._loss = self._share = None

    def note(
        self,
        step: int,
        values: dict[str, float],
        late: Mapping[str, Callable[[], float]],
        norm: Tensor | None,
        micro_batches: int,
    ) -> None:
        """A step ended. values: what the host knows · late: what it will know · norm: on the device; see [Note: One
        step late]."""
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
        """Write what is pending, then close all."""
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
    """``UsageError`` for the first of ``initialize``'s monitors that is none."""
    for number, monitor in enumerate(given):
        if not all(callable(getattr(monitor, name, None)) for name in ("write", "close")):
            raise UsageError(
                f"initialize: monitors[{number}] is {type(monitor).__name__}: expected an object with write(step, "
                "values) and close()",
                code="monitor-without-write-and-close",
            )
