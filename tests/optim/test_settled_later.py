"""Whether a step was applied, learnt a step later where the device is apart: all is as where it is known at once."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

import shardengine
from shardengine.comm import Mesh
from shardengine.errors import UsageError
from shardengine.optim import lr_schedules
from tests.support import cases
from tests.support.late_streams import adversary
from tests.support.raising import raises
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]
BAD = (0, 2, 3, 6)
"""Steps whose gradients hold a NaN."""
STEPS = 8
ALONE = Mesh(0, 1, torch.device("cpu"))


SCHEDULES: dict[str, Any] = {
    "none": {},
    "WarmupLR": {"warmup_num_steps": 5},
    "WarmupDecayLR": {"total_num_steps": 6, "warmup_num_steps": 2},
    "WarmupCosineLR": {"total_num_steps": 9, "warmup_num_steps": 2},
    "OneCycle": {"cycle_min_lr": 0.001, "cycle_max_lr": 0.1, "cycle_first_step_size": 3},
    "OneCycleLR": {"max_lr": 0.1, "total_steps": 20},
    "MultiStepLR": {"milestones": [1, 3], "gamma": 0.5},
}
GIVEN: dict[str, Any] = {
    "a lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "one that ends": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=STEPS - len(BAD)),
}
AT_ONCE = {"OneCycleLR", "MultiStepLR", *GIVEN}
"""What is not the engine's own, so that the host waits for each step."""


class Rows:
    """A monitor."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []

    def write(self, step: int, values: Any) -> None:
        self.rows.append((step, dict(values)))

    def close(self) -> None:
        pass


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def take_step(engine: Any, step: int, bad: bool) -> None:
    for micro in range(engine.gradient_accumulation_steps()):
        loss = cases.loss_of(engine, step, engine.rank, micro)
        engine.backward(loss * float("nan") if bad and engine.rank == engine.world_size - 1 and not micro else loss)
        engine.step()


def is_known(engine: Any) -> bool:
    """Whether the host has learnt what became of the last step."""
    return "applied" in vars(engine._verdict)


def whole_state(engine: Any) -> str:
    """A digest, whichever elements are this rank's: a device apart has them at other places."""
    with engine.full_optimizer_state() as states:
        held = [(name, key, states[name][key]) for name in sorted(states) for key in sorted(states[name])]
        return cases.digest(
            [[(name, key, 0, values.reshape(-1).numpy()) for name, key, values in held if key != "step"]]
        )


@contextmanager
def on_late_streams() -> Any:
    """A mesh over a device apart, on which the host knows nothing before it asks."""
    mesh = cases.mesh_of_this_process() if torch.distributed.is_initialized() else ALONE
    with adversary(mesh) as foe:
        yield foe.mesh


@contextmanager
def engine_of(mesh: Mesh | None, stage: str, schedule: str = "none", **options: Any) -> Any:
    torch.manual_seed(0)
    model, monitors = cases.make_mlp(), [options.pop("monitor")] if "monitor" in options else []
    if params := SCHEDULES.get(schedule):
        options["scheduler"] = {"type": schedule, "params": params}
    config = cases.config_of(stage, options.pop("micros", 1), reproducible=True, **options)
    engine = shardengine.initialize(
        model, config, optimizer=cases.make_optimizer(model, "AdamW"), lr_scheduler=GIVEN.get(schedule), mesh=mesh,
        monitors=monitors,
    )  # fmt: skip
    try:
        yield engine
    finally:
        engine.close()


def trained(late: bool, stage: str, schedule: str, micros: int, asks: str) -> dict[str, Any]:
    """What a run leaves. asks: what the user reads after each step."""
    heard, rows, seen, known = Lines(), Rows(), list[Any](), list[bool]()
    logging.getLogger("shardengine").addHandler(heard)
    with (
        on_late_streams() if late else nullcontext(cases.mesh_of_this_process()) as mesh,
        engine_of(mesh, stage, schedule, micros=micros, monitor=rows) as engine,
    ):
        for step in range(STEPS):
            take_step(engine, step, step in BAD)
            known.append(is_known(engine))
            if asks == "applied":
                seen.append((engine.was_step_applied(), engine.skipped_steps))
            elif asks == "rates":
                seen.append(engine.get_lr())
            elif asks == "scheduler":
                seen.append(engine.lr_scheduler and engine.lr_scheduler.get_last_lr())
        scheduler = engine.lr_scheduler
        found = {
            "state": whole_state(engine),
            "steps": list(cases.steps_of(engine)),
            "skipped": engine.skipped_steps,
            "rates": engine.get_lr(),
            "betas": [group["betas"] for group in engine.optimizer.param_groups],
            "scheduler": scheduler and (scheduler.last_epoch if hasattr(scheduler, "last_epoch") else None),
            "said": [line for line in heard.lines if "skipped" in line],
            "seen": seen,
        }
    logging.getLogger("shardengine").removeHandler(heard)
    return {**found, "rows": str(rows.rows), "known": known}


RUNS = [
    *((stage, "WarmupDecayLR", 1, "nothing") for stage in cases.STAGES),
    *(("2", schedule, 1, "nothing") for schedule in (*SCHEDULES, *GIVEN)),
    ("1", "OneCycle", 3, "nothing"),
    ("3", "WarmupLR", 2, "applied"),
    ("2", "WarmupCosineLR", 1, "rates"),
    ("0", "WarmupLR", 1, "scheduler"),
]


@pytest.mark.parametrize(("stage", "schedule", "micros", "asks"), RUNS)
def test_a_run_with_skipped_steps_is_the_same(pools: Pools, stage: str, schedule: str, micros: int, asks: str) -> None:
    args = (stage, schedule, micros, asks)
    expected, found = (pools(2).run(trained, late, *args) for late in (False, True))
    for rank in range(2):
        assert all(expected[rank].pop("known"))
        known = found[rank].pop("known")
        assert known == [schedule in AT_ONCE] * STEPS, "the host waited for a step"
        assert found[rank] == expected[rank]
    assert found[0]["skipped"] == len(BAD) and found[0]["steps"] == [STEPS - len(BAD)] * len(found[0]["steps"])
    assert len(found[0]["said"]) == 1 and found[0]["said"][0].startswith("step 1 was skipped on all ranks")


def test_what_the_user_sets_after_a_skipped_step_stays() -> None:
    with on_late_streams() as mesh, engine_of(mesh, "2", "WarmupDecayLR") as engine:
        group = engine.optimizer.param_groups[0]
        before = group["lr"]
        take_step(engine, 0, bad=True)
        assert not is_known(engine) and group["lr"] != before, "as if it had been applied"
        group["weight_decay"], group["lr"] = 0.25, 0.125
        assert engine.get_lr()[0] == 0.125 and group["weight_decay"] == 0.25
        assert engine.lr_scheduler.last_epoch == 0


def test_a_rate_that_is_a_tensor_stays_the_same_object() -> None:
    torch.manual_seed(0)
    rate, model = torch.tensor(0.5), cases.make_mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    optimizer._opt_called = True  # type: ignore[attr-defined]
    before = [float(group["lr"]) for group in optimizer.param_groups]
    take_back = lr_schedules.step_for_now(scheduler)
    assert float(optimizer.param_groups[0]["lr"]) == 0.25
    kept = optimizer.param_groups[0]["lr"]
    take_back()
    assert [float(group["lr"]) for group in optimizer.param_groups] == before and optimizer.param_groups[0][
        "lr"
    ] is kept


@pytest.mark.parametrize(
    "options",
    [{"nonfinite_gradients": "raise"}, {"max_nonfinite_steps": 1}, {"fp16": {"enabled": True, "loss_scale": 0}}],
    ids=str,
)
def test_where_an_error_or_the_scale_depends_on_it_the_host_waits(options: dict[str, Any]) -> None:
    with on_late_streams() as mesh, engine_of(mesh, "2", "WarmupDecayLR", **options) as engine:
        take_step(engine, 0, bad=False)
        assert is_known(engine)


def test_too_many_in_a_row_are_an_error_in_the_last_of_them() -> None:
    with on_late_streams() as mesh, engine_of(mesh, "2", "WarmupDecayLR", max_nonfinite_steps=3) as engine:
        for step, bad in enumerate((True, True, False, True, True)):
            take_step(engine, step, bad)
        with raises("grad-nonfinite", "in 3 steps in a row", "Inf or NaN in"):
            take_step(engine, 5, bad=True)
        assert engine.skipped_steps == 5 and engine.lr_scheduler.last_epoch == 1
        take_step(engine, 6, bad=False)
        assert engine.was_step_applied()


def test_a_checkpoint_after_a_skipped_step(tmp_path: Path) -> None:
    with on_late_streams() as mesh, engine_of(mesh, "2", "WarmupDecayLR") as engine:
        for step, bad in enumerate((False, True)):
            take_step(engine, step, bad)
        engine.save_checkpoint(tmp_path, "skipped")
        for step in (2, 3):
            take_step(engine, step, bad=True)
        engine.load_checkpoint(tmp_path, "skipped")
        assert set(cases.steps_of(engine)) == {1} and engine.skipped_steps == 1
        assert engine.lr_scheduler.last_epoch == 1
    with engine_of(None, "1", "WarmupDecayLR") as other:
        other.load_checkpoint(tmp_path, "skipped")
        assert set(cases.steps_of(other)) == {1} and other.skipped_steps == 1


def test_calls_after_a_skipped_step_see_it() -> None:
    with on_late_streams() as mesh, engine_of(mesh, "1", "WarmupDecayLR") as engine:
        take_step(engine, 0, bad=True)
        with engine.full_optimizer_state() as states:
            assert {kinds["step"] for kinds in states.values()} == {0}
        take_step(engine, 1, bad=True)
        engine.reset()
        assert engine.skipped_steps == 2 and engine.lr_scheduler.last_epoch == 0


def test_closing_after_a_skipped_step_takes_the_rate_back() -> None:
    with on_late_streams() as mesh:
        model = cases.make_mlp()
        optimizer = cases.make_optimizer(model, "AdamW")
        config = cases.config_of("2", scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 5}})
        engine = shardengine.initialize(model, config, optimizer=optimizer, mesh=mesh)
        before = engine.get_lr()
        take_step(engine, 0, bad=True)
        assert [group["lr"] for group in optimizer.param_groups] != before
        engine.close()
        assert [group["lr"] for group in optimizer.param_groups] == before


def rank_0_asks() -> list[Any]:
    with on_late_streams() as mesh, engine_of(mesh, "2", "WarmupLR") as engine:
        rates = []
        for step in range(4):
            take_step(engine, step, bad=step == 1)
            if engine.rank == 0:
                engine.get_lr()
        rates.append(engine.get_lr())
        return [rates, engine.skipped_steps, whole_state(engine)]


def test_one_rank_may_ask_alone(pools: Pools) -> None:
    first, second = pools(2).run(rank_0_asks)
    assert first == second and first[1] == 1


def test_another_scheduler_may_be_set() -> None:
    with on_late_streams() as mesh, engine_of(mesh, "2", "WarmupLR") as engine:
        take_step(engine, 0, bad=True)
        epoch = engine.lr_scheduler.last_epoch
        engine.lr_scheduler = None
        take_step(engine, 1, bad=False)
        assert not is_known(engine) and epoch == 0
        engine.lr_scheduler = lr_scheduler.ExponentialLR(engine.optimizer, 0.5)
        rate = engine.get_lr()[0]
        take_step(engine, 2, bad=False)
        assert is_known(engine) and engine.get_lr()[0] == rate / 2
        for wrong in ("linear", lr_scheduler.ExponentialLR(torch.optim.SGD([torch.zeros(1)], 0.1), 0.5)):
            with pytest.raises(UsageError, match="lr_scheduler"):
                engine.lr_scheduler = wrong


class Curious(Rows):
    """A monitor that asks the engine, as those of services do."""

    engine: Any = None

    def write(self, step: int, values: Any) -> None:
        super().write(step, {**values, "asked": self.engine.get_lr()[0], "applied": self.engine.was_step_applied()})


def watched_by_the_curious() -> list[Any]:
    monitor = Curious()
    with on_late_streams() as mesh, engine_of(mesh, "2", "WarmupLR", monitor=monitor) as engine:
        monitor.engine = engine
        for step in range(5):
            take_step(engine, step, bad=step in (1, 2))
        found = [engine.get_lr(), engine.lr_scheduler.last_epoch, whole_state(engine)]
    assert len(monitor.rows) == (5 if engine.rank == 0 else 0), "the last one was written, too"
    return found


def test_monitors_may_ask_the_engine(pools: Pools) -> None:
    first, second = pools(2).run(watched_by_the_curious)
    assert first == second and first[1] == 3
