"""Monitors of services: what the packages are asked for, by stand-ins, and the packages where they are installed.

Nothing leaves the machine: wandb and comet_ml write files to be uploaded later, MLflow a database of its own.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardengine.compat.deepspeed import monitors as deepspeed_monitors
from shardengine.engine import monitors
from tests.engine.test_monitors import Recorder, small, train
from tests.support import HANG_S

Calls = list[tuple[Any, ...]]
NAMES = {f"train/{name}" for name in monitors.VALUES}
STEPS = [1, 2, 3]


def recording(calls: Calls, name: str, answer: Any = None) -> Callable[..., Any]:
    """A function that writes down what it is called with."""

    def call(*args: Any, **options: Any) -> Any:
        calls.append((name, *args, {key: value for key, value in options.items() if value is not None}))
        return answer

    return call


class FakeWandb(SimpleNamespace):
    def __init__(self, calls: Calls, *, opened: bool) -> None:
        run = SimpleNamespace(**{name: recording(calls, name) for name in ("define_metric", "log", "finish")})
        super().__init__(run=run if opened else None, init=recording(calls, "init", run))


class FakeMlflow(SimpleNamespace):
    def __init__(self, calls: Calls, *, opened: bool, known: bool = False) -> None:
        def run(number: str) -> Any:
            return SimpleNamespace(info=SimpleNamespace(run_id=number))

        experiment = SimpleNamespace(experiment_id="7") if known else None
        client = SimpleNamespace(
            get_experiment_by_name=recording(calls, "get_experiment_by_name", experiment),
            create_experiment=recording(calls, "create_experiment", "8"),
            create_run=recording(calls, "create_run", run("new")),
            log_batch=recording(calls, "log_batch", SimpleNamespace(wait=recording(calls, "wait"))),
            set_terminated=recording(calls, "set_terminated"),
        )
        super().__init__(
            entities=SimpleNamespace(Metric=lambda *args: args),
            active_run=lambda: run("theirs") if opened else None,
            get_tracking_uri=lambda: "sqlite:///here.db",
            MlflowClient=lambda tracking_uri: client,
        )


class FakeComet(SimpleNamespace):
    def __init__(self, calls: Calls, *, opened: bool) -> None:
        experiment = SimpleNamespace(**{name: recording(calls, name) for name in ("log_metrics", "end")})
        super().__init__(
            get_running_experiment=lambda: experiment if opened else None,
            start=recording(calls, "start", experiment),
            ExperimentConfig=lambda name: name,
        )


def ran(**config: Any) -> Recorder:
    """Three steps of an engine; what a monitor of ours was given."""
    recorder = Recorder()
    engine = small(recorder, **config)
    train(engine)
    engine.close()
    return recorder


@pytest.mark.parametrize("opened", [False, True], ids=["own run", "run of the script"])
def test_wandb_has_an_axis_of_steps(monkeypatch: pytest.MonkeyPatch, opened: bool) -> None:
    calls: Calls = []
    monkeypatch.setitem(sys.modules, "wandb", FakeWandb(calls, opened=opened))
    recorder = ran(wandb={"enabled": True, "team": "us", "project": "theirs"})
    logged = [call[1] for call in calls if call[0] == "log"]
    assert logged == [
        {**{f"train/{name}": value for name, value in values.items()}, "train/step": step}
        for step, values in recorder.rows
    ]
    axes = [call[1:] for call in calls if call[0] == "define_metric"]
    assert sorted(axes) == [(name, {"step_metric": "train/step"}) for name in sorted(NAMES)]
    ends = [call for call in calls if call[0] in ("init", "finish")]
    assert ends == ([] if opened else [("init", {"project": "theirs", "entity": "us"}), ("finish", {})])


@pytest.mark.parametrize("known", [False, True], ids=["new experiment", "known experiment"])
def test_mlflow_gets_one_batch_for_each_step(monkeypatch: pytest.MonkeyPatch, known: bool) -> None:
    calls: Calls = []
    monkeypatch.setitem(sys.modules, "mlflow", FakeMlflow(calls, opened=False, known=known))
    recorder = ran(monitor={"mlflow": {"enabled": True, "experiment_name": "e", "run_name": "r"}})
    batches = [call[2]["metrics"] for call in calls if call[:2] == ("log_batch", "new")]
    assert [{(name, value, step) for name, value, _, step in batch} for batch in batches] == [
        {(f"train/{name}", value, step) for name, value in values.items()} for step, values in recorder.rows
    ]
    made = [call[:2] for call in calls if call[0] in ("create_experiment", "create_run", "set_terminated")]
    ends = [("create_run", "7" if known else "8"), ("set_terminated", "new")]
    assert made == (ends if known else [("create_experiment", "e"), *ends])


@pytest.mark.parametrize("uri", [None, "sqlite:///here.db", "sqlite:///elsewhere.db"])
def test_mlflow_uses_the_active_run_unless_another_place_is_named(
    monkeypatch: pytest.MonkeyPatch, uri: str | None
) -> None:
    calls: Calls = []
    monkeypatch.setitem(sys.modules, "mlflow", FakeMlflow(calls, opened=True))
    ran(mlflow={"enabled": True, "tracking_uri": uri})
    elsewhere = uri == "sqlite:///elsewhere.db"
    assert [call[0] for call in calls if call[0] in ("log_batch", "wait")] == ["log_batch", "wait"] * 3
    assert {call[1] for call in calls if call[0] == "log_batch"} == ({"new"} if elsewhere else {"theirs"})
    assert [call[:2] for call in calls if call[0] == "create_run"] == ([("create_run", "0")] if elsewhere else [])
    assert any(call[0] == "set_terminated" for call in calls) is elsewhere


@pytest.mark.parametrize(("interval", "steps"), [(1, [1, 2, 3]), (3, [1, 3]), (100, [1])])
def test_comet_leaves_steps_out(monkeypatch: pytest.MonkeyPatch, interval: int, steps: list[int]) -> None:
    """Two samples a step: of three samples, every second step."""
    calls: Calls = []
    monkeypatch.setitem(sys.modules, "comet_ml", FakeComet(calls, opened=False))
    recorder = ran(comet={"enabled": True, "samples_log_interval": interval, "experiment_name": "n", "online": False})
    assert [call for call in calls if call[0] != "log_metrics"] == [
        ("start", {"online": False, "experiment_config": "n"}),
        ("end", {}),
    ]
    rows = dict(recorder.rows)
    assert [call[1:] for call in calls if call[0] == "log_metrics"] == [
        ({f"train/{name}": value for name, value in rows[step].items()}, {"step": step}) for step in steps
    ]


def test_comet_uses_the_experiment_of_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Calls = []
    monkeypatch.setitem(sys.modules, "comet_ml", FakeComet(calls, opened=True))
    ran(comet={"enabled": True})
    assert [call[0] for call in calls] == ["log_metrics"] * 3


@pytest.mark.parametrize(
    ("kind", "package", "install"),
    [("wandb", "wandb", "wandb"), ("mlflow", "mlflow", "mlflow-skinny"), ("comet", "comet_ml", "comet_ml")],
)
def test_without_the_package_training_goes_on_and_says_what_to_install(
    kind: str, package: str, install: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    assert len(ran(monitor={kind: {"enabled": True}}).rows) == 3
    assert f"monitor.{kind} is off from now on" in caplog.text and f"pip install {install})" in caplog.text


@pytest.mark.parametrize(("name", "make"), [("wandb", FakeWandb), ("comet", FakeComet)])
def test_scripts_of_deepspeed_write_events_of_their_own(name: str, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Calls = []
    monkeypatch.setitem(sys.modules, {"comet": "comet_ml"}.get(name, name), make(calls, opened=False))
    deepspeed = importlib.import_module("shardengine.compat.deepspeed.config_classes")
    config = deepspeed.get_monitor_config({name: {"enabled": True}})
    deepspeed_monitors.MonitorMaster(config).write_events([("Train/Loss", 1.5, 3), ("lr", 2, 4)])
    logged = [call[1:] for call in calls if call[0] in ("log", "log_metrics")]
    if name == "wandb":
        assert logged == [({"Train/Loss": 1.5, "step": 3}, {}), ({"lr": 2.0, "step": 4}, {})]
    else:
        assert logged == [({"Train/Loss": 1.5}, {"step": 3}), ({"lr": 2.0}, {"step": 4})]


# --- the packages themselves, each in a process of its own: they change torch, or leave threads

SCRIPT = """
import logging, sys
sys.path.insert(0, {root!r})
logging.basicConfig()
from tests.engine.test_monitor_services import ran
recorder = ran(monitor={config!r})
{after}
"""


def told(folder: Path, config: dict[str, Any], after: str, **environment: str) -> str:
    """What a process prints that trains with the real package."""
    root = str(Path(__file__).resolve().parents[2])
    code = SCRIPT.format(root=root, config=config, after=after)
    variables = {**os.environ, "DO_NOT_TRACK": "1", **environment}
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, cwd=folder, env=variables, capture_output=True, text=True, timeout=HANG_S, check=False
    )
    assert done.returncode == 0 and "is off from now on" not in done.stderr, done.stderr
    return done.stdout


def installed(package: str) -> pytest.MarkDecorator:
    found = find_spec(package) is not None
    return pytest.mark.skipif(not found, reason=f"{package} is not installed; it comes with the extra 'monitors'")


@pytest.mark.full  # a new interpreter with a large package
@installed("mlflow")
def test_the_real_mlflow_has_every_number(tmp_path: Path) -> None:
    config = {"mlflow": {"enabled": True, "tracking_uri": f"file:{tmp_path / 'runs'}", "experiment_name": "e"}}
    after = "\n".join((
        "import json, mlflow",
        f"client = mlflow.MlflowClient({config['mlflow']['tracking_uri']!r})",
        "(run,) = client.search_runs([client.get_experiment_by_name('e').experiment_id])",
        "rows = {name: [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, name)]",
        "        for name in run.data.metrics}",
        "print(json.dumps([run.info.status, rows, recorder.rows]))",
    ))  # fmt: skip
    status, rows, given = json.loads(told(tmp_path, config, after, MLFLOW_ALLOW_FILE_STORE="true").splitlines()[-1])
    assert status == "FINISHED" and rows.keys() == NAMES
    for name in monitors.VALUES:
        assert [tuple(each) for each in rows[f"train/{name}"]] == [(step, values[name]) for step, values in given]


@pytest.mark.full
@installed("wandb")
def test_the_real_wandb_writes_a_run(tmp_path: Path) -> None:
    told(tmp_path, {"wandb": {"enabled": True, "project": "p"}}, "", WANDB_MODE="offline", WANDB_SILENT="true")
    (run,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    written = run.read_bytes()
    assert all(name.encode() in written for name in (*NAMES, "train/step"))


@pytest.mark.full
@installed("comet_ml")
def test_the_real_comet_writes_an_experiment(tmp_path: Path) -> None:
    told(tmp_path, {"comet": {"enabled": True, "online": False}}, "", COMET_OFFLINE_DIRECTORY=str(tmp_path))
    (archive,) = tmp_path.glob("*.zip")
    with zipfile.ZipFile(archive) as file:
        written = b"".join(file.read(name) for name in file.namelist())
    assert all(name.encode() in written for name in NAMES)
