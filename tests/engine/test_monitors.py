"""Monitors: what is written of each step, at every stage, and that none of them ever stops a training."""

from __future__ import annotations

import csv
import importlib
import importlib.util
import json
import logging
import math
import subprocess
import sys
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardengine
from shardengine.engine import monitors
from shardengine.errors import ConfigError, UsageError
from shardengine.offload import Done, Fetched, Platform
from tests.support import HANG_S, cases
from tests.support.comparing import assert_equal_to_truth
from tests.support.raising import raises
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]
MICROS, STEPS = 2, 4
PROBLEM = monitors.__name__


class Recorder:
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.closed = 0

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self.rows.append((step, dict(values)))

    def close(self) -> None:
        self.closed += 1


class Broken:
    """Raises in ``write`` from step ``first`` on, and in ``close``."""

    def __init__(self, first: int = 1) -> None:
        self.first, self.calls = first, 0

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self.calls += 1
        if step >= self.first:
            raise RuntimeError(f"no more at {step}")

    def close(self) -> None:
        raise OSError("nor here")


def section(folder: Path | str, *names: str) -> dict[str, Any]:
    return {name: {"enabled": True, "output_path": str(folder), "job_name": "job"} for name in names}


def small(*given: Any, **config: Any) -> shardengine.Engine:
    torch.manual_seed(3)
    options = {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0, "optimizer": {"type": "SGD"}, **config}
    return shardengine.initialize(nn.Linear(3, 2), options, monitors=given)


def train(engine: Any, steps: int = 3) -> None:
    for _ in range(steps):
        engine.backward(engine(torch.ones(2, 3)).square().mean())
        engine.step()


def rows_of(path: Path) -> list[list[str]]:
    with path.open(newline="") as file:
        return list(csv.reader(file))


def observed(stage: str, folder: str, failing: bool) -> dict[str, Any]:
    """One rank's training with monitors; what the engine says itself after each step is beside what they were given."""
    recorder = Recorder()
    config = cases.config_of(stage, MICROS, monitor=section(folder, "csv", "jsonl"))
    given = [recorder, *([Broken(2)] if failing else [])]
    engine = cases.make_engine(cases.MODELS["mlp"](), config, "AdamW", monitors=given)
    result = cases.run_steps(engine, STEPS)
    engine.close()
    return {**result, "rows": recorder.rows, "closed": recorder.closed}


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("stage", cases.STAGES)
def test_what_is_written_is_what_the_engine_says_and_changes_no_bit(
    pools: Pools, stage: str, ranks: int, tmp_path: Path
) -> None:
    truth = cases.truth("mlp", "AdamW", ranks, MICROS, cases.LETTER[stage], STEPS)
    results = pools(ranks).run(observed, stage, str(tmp_path), failing=True)
    assert_equal_to_truth(results, truth)
    assert all(not result["rows"] and not result["closed"] for result in results[1:])  # rank 0 alone writes
    first = results[0]
    assert first["closed"] == 1
    for number, ((step, values), losses, norm) in enumerate(
        zip(first["rows"], first["losses"], first["norms"], strict=True), start=1
    ):
        assert step == number and tuple(values) == monitors.VALUES
        assert values["loss"] == pytest.approx(sum(losses) / MICROS, rel=1e-6)
        assert values["grad_norm"] == norm
        assert values["lr"] == cases.groups_of(cases.MODELS["mlp"](), "AdamW")[0]["lr"]
        assert (values["loss_scale"], values["skipped_steps"]) == (1.0, 0)
        assert values["samples"] == number * MICROS * ranks
    written = [json.loads(line) for line in (tmp_path / "job" / "metrics.jsonl").read_text().splitlines()]
    assert written == [{"step": step, **values} for step, values in first["rows"]]
    head, *rows = rows_of(tmp_path / "job" / "metrics.csv")
    assert head == ["step", *monitors.VALUES]
    assert [[float(cell) for cell in row] for row in rows] == [[s, *values.values()] for s, values in first["rows"]]


def test_shares_of_a_loss_are_added_and_whole_ones_averaged() -> None:
    recorder = Recorder()
    engine = small(recorder, gradient_accumulation_steps=2)
    for divide in (True, False):
        for micro in (1.0, 3.0):
            engine.backward(engine(torch.zeros(2, 3)).sum() * 0 + micro, divide=divide)
            engine.step()
    engine.close()
    assert [values["loss"] for _, values in recorder.rows] == [2.0, 4.0]


def test_a_monitor_that_raises_is_said_once_and_is_off(caplog: pytest.LogCaptureFixture) -> None:
    broken, recorder = Broken(first=2), Recorder()
    engine = small(broken, recorder)
    train(engine, 4)
    engine.close()
    engine.close()
    assert [step for step, _ in recorder.rows] == [1, 2, 3, 4] and recorder.closed == 1
    assert broken.calls == 2
    said = [record.getMessage() for record in caplog.records if record.name == PROBLEM]
    assert said == [
        "monitors[0] (Broken) is off from now on, training goes on without it: RuntimeError: no more at 2",
    ]


def test_an_interrupt_goes_through() -> None:
    class Interrupted(Recorder):
        def write(self, step: int, values: Mapping[str, float]) -> None:
            raise KeyboardInterrupt

    engine = small(Interrupted())
    with pytest.raises(KeyboardInterrupt):
        train(engine, 1)
    engine._monitors.close()
    engine.close()


@pytest.mark.parametrize("name", ["csv", "jsonl"])
def test_a_full_disk_does_not_stop_the_training(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / f"metrics.{name}").symlink_to("/dev/full")
    recorder = Recorder()
    engine = small(recorder, monitor=section(tmp_path, name))
    train(engine)
    assert engine.global_steps == 3 and len(recorder.rows) == 3
    engine.close()
    said = [record.getMessage() for record in caplog.records if record.name == PROBLEM]
    assert len(said) == 1 and f"monitor.{name} is off" in said[0] and "No space left on device" in said[0]


@pytest.mark.parametrize("name", ["csv", "jsonl"])
def test_a_place_that_cannot_be_written_does_not_stop_the_training(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "job").write_text("a file where the directory should be")
    engine = small(monitor=section(tmp_path, name))
    train(engine)
    assert engine.global_steps == 3
    engine.close()
    said = [record.getMessage() for record in caplog.records if record.name == PROBLEM]
    assert len(said) == 1 and f"monitor.{name} is off" in said[0] and "job" in said[0]


def test_a_restart_goes_on_in_the_same_file_and_removes_a_torn_line(tmp_path: Path) -> None:
    for torn in ("", "4,0.5,0.0"):
        engine = small(monitor=section(tmp_path, "csv", "jsonl"))
        train(engine, 2)
        engine.close()
        with (tmp_path / "job" / "metrics.csv").open("a") as file:
            file.write(torn)
        with (tmp_path / "job" / "metrics.jsonl").open("a") as file:
            file.write(torn and '{"step": 4, "lo')
    engine = small(monitor=section(tmp_path, "csv", "jsonl"))
    train(engine, 1)
    engine.close()
    table = rows_of(tmp_path / "job" / "metrics.csv")
    assert [row[0] for row in table] == ["step", "1", "2", "1", "2", "1"] and {len(row) for row in table} == {7}
    lines = (tmp_path / "job" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 1, 2, 1]


def test_a_file_of_other_columns_stays_as_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "job").mkdir()
    path = tmp_path / "job" / "metrics.csv"
    path.write_text("step,accuracy\n1,0.5\n")
    engine = small(monitor=section(tmp_path, "csv"))
    train(engine, 1)
    engine.close()
    assert path.read_text() == "step,accuracy\n1,0.5\n"
    assert "got 'step,accuracy'; move it away or choose another job_name" in caplog.text


def test_a_csv_monitor_has_the_columns_that_it_was_made_with(tmp_path: Path) -> None:
    monitor = monitors.CsvMonitor(tmp_path / "own.csv", ["b", "a"])
    monitor.write(7, {"a": 1.5})
    with pytest.raises(ValueError, match="expected values of b, a, got c"):
        monitor.write(8, {"c": 1.0})
    monitor.close()
    assert (tmp_path / "own.csv").read_text() == "step,b,a\n7,,1.5\n"


def test_numbers_that_cannot_be_read_do_not_stop_the_training(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*given: Any) -> None:
        raise RuntimeError("no such device")

    recorder = Recorder()
    engine = small(recorder)
    train(engine, 1)
    monkeypatch.setattr(monitors, "_read", fail)
    train(engine, 2)
    engine.close()
    assert engine.global_steps == 3 and len(recorder.rows) == recorder.closed == 1
    said = [record.getMessage() for record in caplog.records if record.name == PROBLEM]
    assert len(said) == 1 and "what monitors are given" in said[0] and "no such device" in said[0]


def test_close_that_is_refused_keeps_the_monitors() -> None:
    recorder = Recorder()
    engine = small(recorder)
    with engine.full_params(), pytest.raises(UsageError, match="inside full_params"):
        engine.close()
    before = recorder.closed
    train(engine, 1)
    engine.close()
    assert (before, len(recorder.rows), recorder.closed) == (0, 1, 1)


def differing(folder: str) -> list[int]:
    """Rank 1 asks for another monitor than rank 0."""
    rank = cases.mesh_of_this_process().rank
    config = cases.config_of("2", monitor=section(folder, ("csv", "jsonl")[rank]))
    engine = cases.make_engine(cases.MODELS["mlp"](), config)
    cases.run_steps(engine, 1)
    engine.close()
    return [rank]


def test_what_ranks_other_than_0_ask_for_does_not_count(pools: Pools, tmp_path: Path) -> None:
    pools(2).run(differing, str(tmp_path))
    assert [path.name for path in (tmp_path / "job").iterdir()] == ["metrics.csv"]


def test_a_killed_run_keeps_its_lines(tmp_path: Path) -> None:
    program = (
        "import os, sys\nfrom pathlib import Path\nfrom tests.engine import test_monitors as own\n"
        "engine = own.small(monitor=own.section(sys.argv[1], 'csv', 'jsonl'))\nown.train(engine, 3)\nos._exit(9)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], timeout=HANG_S, check=False)
    assert done.returncode == 9
    assert [row[0] for row in rows_of(tmp_path / "job" / "metrics.csv")] == ["step", "1", "2", "3"]
    assert len((tmp_path / "job" / "metrics.jsonl").read_text().splitlines()) == 3


def test_a_step_that_is_left_out_is_written_with_its_scale(tmp_path: Path) -> None:
    """fp16: the loss overflows in step 1, is halved after it; what JSON does not have is a string."""

    class Line(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x: float) -> Tensor:
            return (self.weight.float() * x).sum()

    recorder = Recorder()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD"},
        "fp16": {"enabled": True, "initial_scale_power": 3, "hysteresis": 1},
        "monitor": section(tmp_path, "jsonl"),
    }
    engine = shardengine.initialize(Line(), config, monitors=[recorder])
    for factor in (math.inf, 1.0, 1.0):
        engine.backward(engine(factor))
        engine.step()
    engine.close()
    assert [values["loss_scale"] for _, values in recorder.rows] == [8.0, 4.0, 4.0]
    assert [values["skipped_steps"] for _, values in recorder.rows] == [1, 1, 1]
    assert recorder.rows[1][1]["loss"] == 4.0 and not math.isfinite(recorder.rows[0][1]["loss"])
    first = json.loads((tmp_path / "job" / "metrics.jsonl").read_text().splitlines()[0])
    assert first["loss"] == "inf" and first["grad_norm"] in ("inf", "nan")


def test_losses_that_the_engine_does_not_see_are_not_written() -> None:
    """A window that is dropped, ``loss.backward()``, a loss that is no scalar."""
    recorder = Recorder()
    engine = small(recorder, gradient_accumulation_steps=2)
    engine.backward(engine(torch.full((2, 3), 9.0)).square().mean())
    engine.zero_grad()
    losses = []
    for _ in range(2):
        loss = engine(torch.ones(2, 3)).square().mean()
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    for _ in range(2):
        engine(torch.ones(2, 3)).square().mean().backward()
        engine.step()
    for _ in range(2):
        engine.backward(engine(torch.ones(2, 3)), gradient=torch.ones(2, 2))
        engine.step()
    engine.close()
    (_, first), (_, second), (_, third) = recorder.rows
    assert first["loss"] == pytest.approx(sum(losses) / 2)
    assert "loss" not in second and "loss" not in third and second["grad_norm"] > 0


def test_the_learning_rate_is_the_one_of_the_step() -> None:
    recorder = Recorder()
    scheduler = {"type": "StepLR", "params": {"step_size": 1, "gamma": 0.5}}
    engine = small(recorder, optimizer={"type": "SGD", "params": {"lr": 1.0}}, scheduler=scheduler)
    train(engine, 3)
    engine.close()
    assert [values["lr"] for _, values in recorder.rows] == [1.0, 0.5, 0.25]


def test_on_a_device_a_step_is_written_when_its_numbers_have_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host asks whether they have, and waits only for those of the step before."""
    waited: list[int] = []

    numbers = iter(range(1, 9))

    class Later(Done):
        reached = False

        def __init__(self) -> None:
            self.number = next(numbers)

        def wait_on_host(self) -> None:
            waited.append(self.number)

    class Apart(Platform):
        def fetch(self, values: torch.Tensor) -> Fetched:
            return Fetched(values, Later())

    recorder = Recorder()
    engine = small(recorder)
    monkeypatch.setattr(engine._monitors, "_platform", Apart(engine.device))
    train(engine, 1)
    assert not recorder.rows and not waited
    train(engine, 2)
    assert [step for step, _ in recorder.rows] == waited == [1, 2]
    engine.close()
    assert [step for step, _ in recorder.rows] == waited == [1, 2, 3]


def test_something_that_is_no_monitor_is_refused() -> None:
    with raises("monitor-without-write-and-close", "1", "dict"):
        small(Recorder(), {})


# --- TensorBoard


def test_without_the_package_the_notice_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    engine = small(tensorboard=section(tmp_path, "tensorboard")["tensorboard"])
    train(engine)
    assert engine.global_steps == 3
    engine.close()
    assert "monitor.tensorboard is off from now on" in caplog.text and "pip install tensorboard" in caplog.text


def test_scalars_are_written_and_flushed_each_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a writer that only has what torch's is asked for here."""
    calls: list[tuple[Any, ...]] = []

    class SummaryWriter:
        def __init__(self, place: str) -> None:
            calls.append(("open", place))

        def add_scalar(self, name: str, value: float, step: int) -> None:
            calls.append((name, step))

        def flush(self) -> None:
            calls.append(("flush",))

        def close(self) -> None:
            calls.append(("close",))

    fake = types.SimpleNamespace(SummaryWriter=SummaryWriter)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", fake)
    engine = small(monitor=section(tmp_path, "tensorboard"))
    train(engine, 2)
    engine.close()
    steps = [[*((f"train/{name}", step) for name in monitors.VALUES), ("flush",)] for step in (1, 2)]
    assert calls == [("open", str(tmp_path / "job")), *steps[0], *steps[1], ("close",)]


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="the package tensorboard is not installed")
def test_tensorboard_reads_what_is_written(tmp_path: Path) -> None:
    backend = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")

    recorder = Recorder()
    engine = small(recorder, monitor=section(tmp_path, "tensorboard"))
    train(engine)
    read = backend.EventAccumulator(str(tmp_path / "job"))
    read.Reload()  # before the engine is closed: each step is flushed
    for name in monitors.VALUES:
        found = [(event.step, event.value) for event in read.Scalars(f"train/{name}")]
        assert found == [(step, pytest.approx(values[name])) for step, values in recorder.rows]
    engine.close()


# --- what initialize says of the config


def test_initialize_says_what_it_made_of_the_config(caplog: pytest.LogCaptureFixture) -> None:
    engine = small(comms_logger={"enabled": True}, bf16={"enabled": "auto"})
    engine.close()
    (said,) = [record.getMessage() for record in caplog.records if record.name == "shardengine.engine.notices"]
    assert said.startswith("of the config: ") and "`engine.traffic()` counts the bytes of every collective" in said
    assert 'bf16.enabled is "auto"' in said
    caplog.clear()
    small().close()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_given_optimizer_knows_the_learning_rate_that_is_auto() -> None:
    model = nn.Linear(3, 2)
    automatic = {"type": "AdamW", "params": {"lr": "auto"}}
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": automatic}
    with pytest.raises(ConfigError, match=r'optimizer\.params\.lr: "auto", which'):
        shardengine.initialize(model, config)
    engine = shardengine.initialize(model, config, optimizer=torch.optim.SGD(model.parameters(), lr=0.25))
    assert engine.get_lr() == [0.25]
    engine.close()


def test_batch_sizes_that_are_auto_are_said_by_initialize() -> None:
    """What a file for Hugging Face's Trainer says, without the Trainer."""
    automatic = dict.fromkeys(sizes := ("train_batch_size", "train_micro_batch_size_per_gpu"), "auto")
    with pytest.raises(UsageError, match=r'^train_micro_batch_size_per_gpu: "auto" cannot be decided: '):
        shardengine.initialize(nn.Linear(3, 2), {**automatic, "optimizer": {"type": "SGD"}})
    with pytest.raises(ConfigError, match=r"the batch size is missing.*load_config\(file, auto="):
        shardengine.load_config({**automatic, "optimizer": {"type": "SGD"}}).resolve_batch(1)
    given = shardengine.load_config({**automatic, "optimizer": {"type": "SGD"}}, {sizes[1]: 5})
    engine = shardengine.initialize(nn.Linear(3, 2), given)
    assert engine.train_batch_size() == 5
    engine.close()
