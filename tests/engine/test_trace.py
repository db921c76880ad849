"""engine.trace(): one file with the lanes of all ranks, and the exposed communication that is always counted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardengine import trace
from tests.support import cases
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]


def record(folder: str, stage: str) -> dict[str, Any]:
    """Two traced steps, of which the collectives are counted from outside; then one that is not traced."""
    engine = cases.make_engine(cases.make_mlp(), cases.config_of(stage, zero={"reduce_bucket_size": 600}))
    issued: list[str] = []
    issue = engine._core.collectives._issue

    def counted(record: Any, *rest: Any) -> Any:
        issued.append(record.operation)
        return issue(record, *rest)

    def step(number: int) -> None:
        engine.backward(cases.loss_of(engine, number, engine.rank, 0))
        engine.step()

    step(0)
    with engine.trace(Path(folder) / "trace.json"):
        engine._core.collectives._issue = counted  # type: ignore[method-assign, assignment]
        step(1)
        step(2)
        engine._core.collectives._issue = issue  # type: ignore[method-assign]
    step(3)
    told = engine.traffic()
    assert not engine._core.collectives.trace.events
    engine.close()
    return {"issued": issued, "told": told}


@pytest.mark.parametrize("stage", list(cases.STAGES))
def test_every_collective_and_every_call_is_in_the_file(pools: Pools, tmp_path: Path, stage: str) -> None:
    results = pools(2).run(record, str(tmp_path), stage)
    tree = json.loads((tmp_path / "trace.json").read_text())
    events = [event for event in tree["traceEvents"] if event["ph"] == "X"]
    assert min(event["ts"] for event in events) == 0
    for rank, result in enumerate(results):
        mine = [event for event in events if event["pid"] == rank]
        lanes = {lane: [e for e in mine if e["cat"] == lane] for lane in trace.LANES}
        operations = sorted(event["name"].split()[0] for event in lanes["communication"])
        assert operations == sorted(result["issued"])
        calls = [e["name"] for e in lanes["compute"] if e["name"] in ("forward", "backward", "step")]
        assert calls == ["forward", "backward", "step"] * 2
        if stage.startswith("3"):
            names = [e["name"] for e in lanes["compute"]]
            assert names.count("forward blocks.1") == names.count("backward blocks.1") == 2
        for event in lanes["waiting"]:  # whoever waited, waited inside a call, and not longer than the collective took
            around = [e for e in lanes["compute"] if e["ts"] <= event["ts"] and end(event) <= end(e) + 1]
            assert around, event
        for event in lanes["communication"]:
            assert event["dur"] > 0 and event["args"]["purpose"]
        assert result["told"]["exposed_s_total"] > result["told"]["exposed_s_last_step"] > 0


def end(event: dict[str, Any]) -> float:
    return float(event["ts"] + event["dur"])


def test_a_trace_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "MAX_EVENTS", 3)
    found = trace.Trace()
    found.add(trace.COMPUTE, "before", 0, 1)
    found.begin()
    for number in range(5):
        found.add(trace.COMPUTE, str(number), number, number + 1)
    assert [event[1] for event in found.events] == ["0", "1", "2"]
    assert found.end()[1] == 2 and not found.events


def unwritable(folder: str) -> str:
    engine = cases.make_engine(cases.make_mlp(), cases.config_of("2"))
    try:
        with engine.trace(Path(folder) / "missing" / "trace.json"):
            engine.backward(cases.loss_of(engine, 0, engine.rank, 0))
    except Exception as error:
        engine.step()
        engine.close()
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_a_file_that_cannot_be_written_is_an_error_on_every_rank(pools: Pools, tmp_path: Path) -> None:
    first, second = pools(2).run(unwritable, str(tmp_path))
    assert first.startswith("FileNotFoundError") and "failed on rank 0" in second
