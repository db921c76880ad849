"""Monitors that send the numbers of steps to a service, through the service's own package: wandb, mlflow, comet_ml.

Owns: the calls of each package. Must not know: engines, steps. A run that the script has opened with the package is
used and left open. Otherwise a run is opened, and closed with the engine. Accounts and keys are configured through the
package's own environment variables and files.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Mapping
from typing import Any

from shardengine.config import CometConfig, MlflowConfig, WandbConfig

PREFIX = "train/"
"""The prefix of each number's name."""


def _package(name: str, install: str | None = None) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ModuleNotFoundError(
            f"it needs the package {name} (pip install {install or name}), got: {error}"
        ) from error


class WandbMonitor:
    """Weights & Biases. The axis of each number is ``train/step``, so a resumed run may write a step again."""

    def __init__(self, config: WandbConfig, prefix: str = PREFIX) -> None:
        """Open a run, unless ``wandb.run`` is open. ModuleNotFoundError without the package."""
        wandb = _package("wandb")
        self._is_ours, self._prefix = wandb.run is None, prefix
        self._run = wandb.run or wandb.init(project=config.project, entity=config.team, group=config.group)
        self._known: set[str] = set()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Log the values of ``step``."""
        axis = f"{self._prefix}step"
        named = {f"{self._prefix}{name}": value for name, value in values.items()}
        for name in named.keys() - self._known:
            self._run.define_metric(name, step_metric=axis)
            self._known.add(name)
        self._run.log({**named, axis: step})

    def close(self) -> None:
        """End the run, if it was opened here."""
        if self._is_ours:
            self._run.finish()


class MlflowMonitor:
    """MLflow, through its client: a run that is opened here does not become the program's active run."""

    def __init__(self, config: MlflowConfig, prefix: str = PREFIX) -> None:
        """Begin a run, unless the program has an active one. ModuleNotFoundError without the package."""
        mlflow = _package("mlflow", "mlflow-skinny")
        self._metric, self._prefix = mlflow.entities.Metric, prefix
        self._client = mlflow.MlflowClient(tracking_uri=config.tracking_uri)
        is_here = config.tracking_uri in (None, mlflow.get_tracking_uri())
        active = mlflow.active_run() if is_here else None
        self._is_ours = active is None
        self._sent: Any = None
        self._run_id: str = self._begin(config) if active is None else active.info.run_id

    def _begin(self, config: MlflowConfig) -> str:
        number, name = os.environ.get("MLFLOW_EXPERIMENT_ID", "0"), os.environ.get("MLFLOW_EXPERIMENT_NAME")
        if name := config.experiment_name or name:
            known = self._client.get_experiment_by_name(name)
            number = known.experiment_id if known else self._client.create_experiment(name)
        run_id: str = self._client.create_run(number, run_name=config.run_name).info.run_id
        return run_id

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Log the values of ``step`` in one request, which is in flight while the next step computes.

        Raises the error of the previous request.
        """
        now = int(time.time() * 1000)
        metrics = [self._metric(f"{self._prefix}{name}", value, now, step) for name, value in values.items()]
        self._wait()
        self._sent = self._client.log_batch(self._run_id, metrics=metrics, synchronous=False)

    def _wait(self) -> None:
        if self._sent is not None:
            self._sent.wait()
            self._sent = None

    def close(self) -> None:
        """Wait for the last request, then end the run if it was begun here."""
        self._wait()
        if self._is_ours:
            self._client.set_terminated(self._run_id)


class CometMonitor:
    """Comet. Its key comes from the environment variable ``COMET_API_KEY`` or from Comet's own file."""

    def __init__(self, config: CometConfig, prefix: str = PREFIX) -> None:
        """Start an experiment, unless the program has one. ModuleNotFoundError without the package."""
        comet = _package("comet_ml")
        running = comet.get_running_experiment()
        self._is_ours, self._prefix = running is None, prefix
        self._experiment = running or comet.start(
            project_name=config.project,
            workspace=config.workspace,
            experiment_key=config.experiment_key,
            online=config.online,
            mode=config.mode,
            experiment_config=comet.ExperimentConfig(name=config.experiment_name),
        )
        self._every, self._next = config.samples_log_interval, 0.0

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Log the values of ``step`` if enough samples have passed since the last write."""
        samples = values.get("samples", self._next)
        if samples >= self._next:
            self._next = samples + self._every
            self._experiment.log_metrics({f"{self._prefix}{name}": value for name, value in values.items()}, step=step)

    def close(self) -> None:
        """End the experiment if it was started here. Pending values are sent first."""
        if self._is_ours:
            self._experiment.end()
