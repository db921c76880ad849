"""deepspeed.monitor: write a script's own metrics on rank 0 with ``write_events([(name, value, step), …])``.

Owns: CSV files, event files and services, by DeepSpeed's names. Must not know: engines, which have their own monitors.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

from shardengine import engine
from shardengine.compat.deepspeed import processes
from shardengine.config import CometConfig, WandbConfig
from shardengine.engine import Monitor, summary_writer

_Events = Iterable[tuple[str, Any, int]]


class _Monitor:
    folder = ""
    """The folder in the home directory that is used if ``output_path`` is empty."""

    def __init__(self, config: Any) -> None:
        """config: a section, as ``DeepSpeedConfig(…).monitor_config`` has them; its values are attributes."""
        vars(self).update(vars(config))
        self.enabled: bool = config.enabled
        if self.enabled:
            self._begin()

    def _begin(self) -> None:
        """Prepare for writing; called if the monitor is enabled."""

    @property
    def _directory(self) -> Path:
        given = vars(self)["output_path"]
        return Path(given or Path.home() / self.folder, vars(self)["job_name"])

    def write_events(self, event_list: _Events) -> None:
        """Write these values on rank 0, if the monitor is enabled."""
        if self.enabled and processes.get_rank() == 0:
            for name, value, step in event_list:
                self._write(name, float(value), int(step))

    def _write(self, name: str, value: float, step: int) -> None:
        raise NotImplementedError


class csvMonitor(_Monitor):
    """Writes a CSV file per name: "Train/Loss" in ``Train_Loss.csv``."""

    folder = "csv_monitor"

    def _write(self, name: str, value: float, step: int) -> None:
        path = self._directory / f"{name.replace('/', '_')}.csv"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", newline="", encoding="utf-8") as file:
            rows = csv.writer(file, lineterminator="\n")
            if not file.tell():
                rows.writerow(["step", name.rpartition("/")[2]])
            rows.writerow([step, value])


class TensorBoardMonitor(_Monitor):
    """Writes scalars to event files, with torch.utils.tensorboard."""

    folder = "tensorboard"

    def _begin(self) -> None:
        if processes.get_rank() == 0:
            self._writer = summary_writer(self._directory)

    def write_events(self, event_list: _Events, flush: bool = True) -> None:
        """Write these values on rank 0, if the monitor is enabled. flush: write them to the file at once."""
        super().write_events(event_list)
        if flush:
            self.flush()

    def flush(self) -> None:
        """Flush all values to the file."""
        if self.enabled and processes.get_rank() == 0:
            self._writer.flush()

    def _write(self, name: str, value: float, step: int) -> None:
        self._writer.add_scalar(name, value, step)


class _Service(_Monitor):
    def _begin(self) -> None:
        if processes.get_rank() == 0:
            self._sent = self._opened()

    def _opened(self) -> Monitor:
        raise NotImplementedError

    def _write(self, name: str, value: float, step: int) -> None:
        self._sent.write(step, {name: value})


class WandbMonitor(_Service):
    """Writes to Weights & Biases, with the package wandb; the axis of each name is ``step``."""

    def _opened(self) -> Monitor:
        given = vars(self)
        return engine.WandbMonitor(WandbConfig(True, given["project"], given["team"], given["group"]), prefix="")


class CometMonitor(_Service):
    """Writes to Comet, with the package comet_ml, at every step; the API key comes from the environment."""

    def _opened(self) -> Monitor:
        given = {each.name: vars(self)[each.name] for each in fields(CometConfig)}
        return engine.CometMonitor(CometConfig(**given), prefix="")


_KINDS: dict[str, type[_Monitor]] = {
    "tensorboard": TensorBoardMonitor,
    "csv_monitor": csvMonitor,
    "wandb": WandbMonitor,
    "comet": CometMonitor,
}


class MonitorMaster:
    """All monitors that a config enables."""

    def __init__(self, monitor_config: Any) -> None:
        """monitor_config: a ``DeepSpeedMonitorConfig``."""
        self.enabled: bool = monitor_config.enabled
        self._open = [kind(section) for name, kind in _KINDS.items() if (section := vars(monitor_config)[name]).enabled]

    def write_events(self, event_list: _Events) -> None:
        """Write these values with each enabled monitor."""
        events = list(event_list)
        for each in self._open:
            each.write_events(events)


NAMES: dict[str, Any] = {
    "monitor.monitor.MonitorMaster": MonitorMaster,
    "monitor.csv_monitor.csvMonitor": csvMonitor,
    "monitor.tensorboard.TensorBoardMonitor": TensorBoardMonitor,
    "monitor.wandb.WandbMonitor": WandbMonitor,
    "monitor.comet.CometMonitor": CometMonitor,
}
"""Dotted name → the object."""
