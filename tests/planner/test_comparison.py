"""A plan beside the run for which it was made: what is measured is what torch's allocator gave out, what is not
foreseen is named, and a plan amid a run leaves that as it was."""

from __future__ import annotations

import json
import logging
import random
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy
import pytest
import torch
from torch import nn

import shardengine
from benchmarks.plan import counted, highest_of, loss_of
from benchmarks.plan_cases import Case
from shardengine.config import load_config
from shardengine.planner import (
    Hardware,
    Plan,
    Taken,
    compare,
    line_of,
    memory_plan,
    plan,
    plan_amid,
    taken_by,
    this_machine,
    watched,
)
from shardengine.planner import machine as machine_module
from tests.planner.test_memory import BUCKET, SMALL, TOKENS, mixtral
from tests.support.forks import Forks
from tests.support.program_runs import free_port, join

CPU = torch.device("cpu")
ACTIVATIONS, BUFFERS, STATES, WEIGHTS = "activations", "gradients and buffers", "states", "weights"
Say = Callable[[Any], None]


def config_of(case: Case, **more: Any) -> Any:
    return load_config({**case.config(), **more}).resolve_batch(case.ranks)


def planned(case: Case, batch: Callable[[], Mapping[str, Any]] | None = None, ranks: int | None = None) -> Plan:
    small = SMALL[case.model]
    where = Hardware(ranks or case.ranks, 1 << 34, is_gpu=False)
    found = plan_amid(small.make(), config_of(case), where, batch or small.batch, loss=loss_of)
    assert isinstance(found, Plan), found
    return found


# What is measured


def step_of(engine: Any, batch: Callable[[], Mapping[str, Any]]) -> None:
    for _ in range(engine.gradient_accumulation_steps()):
        engine.backward(loss_of(engine(**batch())))
        engine.step()


def life(say: Say, rank: int, port: int, case: Case) -> None:
    """Says what was watched of a step, and what the allocator has given out in it."""
    join(rank, case.ranks, port)
    chosen = SMALL[case.model]
    found: list[Taken] = []

    def step() -> None:
        if len(steps) < 4:
            step_of(engine, chosen.batch)
        else:
            with watched(engine) as taken:
                step_of(engine, chosen.batch)
            found.append(taken)
        steps.append(0)

    steps: list[int] = []
    with counted():
        engine = shardengine.initialize(chosen.make(), case.config())
        own = highest_of(step, 5)
        rests = taken_by(engine)
    say((found[0].peak, dict(found[0].at_peak), own["bytes"], dict(rests.rests), own["at_rest"]))
    engine.close()


RUN = {
    "stage 0": Case("GPT-2", 2, "0", bucket=BUCKET),
    "stage 2, accumulated": Case("Llama", 2, "2", micros=2, bucket=BUCKET),
    "stage 3, bf16": Case("Llama", 2, "3", "bf16", bucket=BUCKET),
}


@pytest.mark.parametrize("name", list(RUN))
def test_what_is_watched_is_what_the_allocator_gave_out_and_what_was_planned(forks: Forks, name: str) -> None:
    case = RUN[name]
    plan = planned(case)
    for ((watched_bytes, parts, given, rests, at_rest),) in forks.live(life, free_port(), case, ranks=2):
        assert given > 3e6 and watched_bytes == pytest.approx(given, rel=0.02)
        assert watched_bytes == sum(parts.values())
        assert sum(rests.values()) == pytest.approx(at_rest, rel=0.02)
        found = compare(plan, Taken(watched_bytes, parts, rests))
        assert found.planned == plan.device.peak and found.measured == watched_bytes and not found.exceeds
        assert all(abs(more) < 0.02 * given for more in found.beyond.values()), found.beyond
        assert not compare(plan, Taken(None, {}, rests)).exceeds


# What is not foreseen


def half(case: Case) -> Callable[[], dict[str, Any]]:
    return lambda: {name: each[:, : TOKENS // 2] for name, each in SMALL[case.model].batch().items()}


def taken_as(plan: Plan) -> Taken:
    """As if a run had taken to the byte what ``plan`` says."""
    return Taken(plan.device.peak, plan.device.at_peak, plan.device.at_rest)


FORESEEN = {
    ACTIVATIONS: (RUN["stage 3, bf16"], RUN["stage 3, bf16"]),
    STATES: (Case("Llama", 8, "1", bucket=BUCKET), Case("Llama", 8, "0", bucket=BUCKET)),
    WEIGHTS: (Case("Llama", 8, "3", bucket=BUCKET), Case("Llama", 8, "2", bucket=BUCKET)),
}
"""Part → what is planned, what is run; activations: as half of the micro-batch."""


@pytest.mark.parametrize("part", list(FORESEEN))
@pytest.mark.parametrize("known", ["at_peak", "peak", "rests"])
def test_the_part_that_is_more_than_planned_is_named(part: str, known: str) -> None:
    """Where it is known of what the peak consists, where only the peak is (a GPU), and where that is not either."""
    of, made = FORESEEN[part]
    plan = planned(of, None if part == STATES else half(of))
    run = taken_as(planned(made, half(made) if part == WEIGHTS else None))
    if known == "rests" and part == ACTIVATIONS:
        assert not compare(plan, Taken(None, {}, run.rests)).exceeds  # they are not there between steps
        return
    taken = {"at_peak": run, "peak": Taken(run.peak, {}, run.rests), "rests": Taken(None, {}, run.rests)}[known]
    found = compare(plan, taken)
    assert found.exceeds
    more = found.beyond[part]
    assert more > 0.02 * found.planned and more == max(found.beyond.values())
    assert f"): {part} have " in found.sentence() and "more than planned" in found.sentence()
    assert ("shape" in found.sentence()) == (part == ACTIVATIONS)
    assert ("between steps" in found.line()) == (known == "rests")


def test_a_plan_that_is_kept_is_no_sentence() -> None:
    plan = planned(RUN["stage 3, bf16"])
    found = compare(plan, taken_as(plan))
    assert found.sentence() == "" and found.line().endswith(" measured at most (+0.0%)")
    assert sum(found.beyond.values()) == 0
    over = Taken(round(plan.device.peak * 1.031), {}, plan.device.at_rest)
    assert "exceeded by" in compare(plan, over).sentence()
    assert compare(plan, Taken(round(plan.device.peak * 1.029), {}, over.rests)).sentence() == ""


# Amid a run


class Drawing(nn.Module):
    """Draws random numbers of every kind in forward, and in eval mode fails."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.rest = nn.Dropout(0.5)

    def forward(self, x: Any) -> Any:
        assert self.training
        random.random()
        numpy.random.random()
        torch.rand(())
        return self.rest(self.layer(x)).square().mean()


def test_planning_amid_a_run_leaves_it_as_it_was(tmp_path: Path) -> None:
    model = Drawing().eval()
    model.rest.train()
    sink = {"enabled": True, "output_path": str(tmp_path)}
    config = config_of(Case("", 1, "2"), monitor={"csv": sink, "jsonl": sink}, train_micro_batch_size_per_gpu=2)
    log = logging.getLogger("shardengine")
    state, python, array = torch.get_rng_state(), random.getstate(), numpy.random.get_state()
    level, threads = log.level, set(threading.enumerate())
    found = plan_amid(model, config, Hardware(1, 1 << 30, is_gpu=False), lambda: {"x": torch.zeros(2, 8)})
    assert isinstance(found, Plan), found
    assert torch.equal(state, torch.get_rng_state()) and random.getstate() == python
    assert all(numpy.array_equal(one, other) for one, other in zip(array, numpy.random.get_state(), strict=True))
    assert log.level == level and set(threading.enumerate()) <= threads
    assert (model.training, model.layer.training, model.rest.training) == (False, False, True)
    assert not list(tmp_path.iterdir())


def test_why_there_is_no_plan_is_said_in_a_few_words() -> None:
    where, threads = Hardware(2, 1 << 30, is_gpu=False), set(threading.enumerate())
    batch = SMALL["Llama"].batch
    asks = plan_amid(mixtral("eager"), config_of(Case("Mixtral", 2, "2")), where, batch)
    assert isinstance(asks, str) and asks.startswith("the model's shapes depend on data (aten.nonzero.default)")
    assert line_of(asks) == f"none: {asks}"
    assert set(threading.enumerate()) <= threads  # of the engine that was not closed there is none left

    late = plan_amid(SMALL["Llama"].make(), config_of(Case("Llama", 2, "2"), timeout_s=0.004), where, batch)
    assert late == "it takes more than 0.001 s, a part of timeout_s"

    def no_batch() -> Any:
        raise ValueError("no rows\nat all")

    assert plan_amid(Drawing(), config_of(Case("", 2, "2")), where, no_batch) == "ValueError: no rows"

    class Uncopied(Drawing):
        def __deepcopy__(self, memo: Any) -> Any:
            raise RuntimeError("one of a kind")

    found = plan_amid(Uncopied(), config_of(Case("", 2, "2")), where, lambda: {"x": torch.zeros(2, 8)})
    assert found == "RuntimeError: one of a kind"
    assert isinstance(planned(RUN["stage 0"]), Plan)  # nothing of those that failed is in the way


@pytest.mark.parametrize("stage", ["0", "2", "3"])
def test_of_many_micro_batches_two_are_planned(stage: str) -> None:
    case = Case("Llama", 2, stage, micros=5, bucket=BUCKET)
    small, where = SMALL["Llama"], Hardware(2, 1 << 34, is_gpu=False)
    seen: list[int] = []

    def counting(returned: Any) -> Any:
        seen.append(0)
        return loss_of(returned)

    with patch.object(memory_plan, "_RUN", 5):
        whole = plan(small.make(), config_of(case), where, batch=small.batch(), loss=loss_of)
    found = plan_amid(small.make(), config_of(case), where, small.batch, loss=counting)
    assert isinstance(found, Plan) and len(seen) % 2 == 0 and len(seen) < 10
    assert found.device.peak == pytest.approx(whole.device.peak, rel=1e-5)
    assert found.device.rests == pytest.approx(whole.device.rests, rel=1e-5)


# This machine


def test_ranks_of_a_cpu_share_its_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = load_config({"train_micro_batch_size_per_gpu": 1})
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    total = this_machine(CPU, 1, config).device_bytes
    assert total > 1 << 28 and this_machine(CPU, 4, config).device_bytes == total // 4
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    half = this_machine(CPU, 4, config)
    assert half.device_bytes == total // 2 and half.node_ranks == 2 and half.disk_bytes is None and not half.is_gpu
    assert this_machine(CPU, 3, config).node_ranks == 3  # nodes of another size than this one
    assert this_machine(CPU, 1, config).device_bytes == total // 2, "the other process has its part"
    limit = tmp_path / "limit"
    limit.write_text("max\n")
    monkeypatch.setattr(machine_module, "_LIMITS", (tmp_path / "none", limit))
    whole = machine_module.host_bytes()
    limit.write_text(f"{total // 3}\n")
    assert machine_module.host_bytes() == total // 3 < whole


def test_a_disk_is_where_the_config_has_it(tmp_path: Path) -> None:
    place = tmp_path / "not" / "made"
    tier = {"device": "nvme", "nvme_path": str(place)}
    config = load_config(
        {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2, "offload_optimizer": tier}}
    )
    found = this_machine(CPU, 2, config)
    assert found.disk_bytes and found.disk_bytes > 0 and not place.exists()
    assert json.dumps(found.per_rank(found.disk_bytes))


def test_a_gpu_of_this_machine_has_a_host_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=8_000_000_000))
    case = RUN["stage 2, accumulated"]
    where = this_machine(torch.device("cuda", 0), 4, config_of(case))
    assert where.is_gpu and where.device_bytes == 8_000_000_000 and where.host_bytes == machine_module.host_bytes()
    small = SMALL[case.model]
    found = plan_amid(small.make(), config_of(case), replace(where, host_bytes=1000), small.batch, loss=loss_of)
    assert isinstance(found, Plan), found
    assert re.fullmatch(
        r"GPU [\d.]+ MB of 6.9 GB, host [\d.]+ kB of 500 B \(does not fit\) at most per rank", line_of(found)
    )
