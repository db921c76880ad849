"""How ``plan_time`` ranks rows, and one small run of it."""

from __future__ import annotations

import pytest

from benchmarks import plan_time
from benchmarks.plan_cases import Case
from benchmarks.plan_time import MATRIX, ranking, row_of, rows_of, summary, title
from tests.support.forks import Forks


def row(case: str, measured: float, planned: float, stage: str = "0") -> dict[str, object]:
    return {
        "case": case, "measured": measured, "planned": planned, "stage": stage, "ranks": 1,
        "error": planned / measured - 1,
    }  # fmt: skip


def test_pairs_that_differ_by_more_than_a_twentieth_are_ranked() -> None:
    rows = [row("a", 1.0, 2.0), row("b", 1.04, 1.0), row("c", 2.0, 1.5), row("d", 3.0, 4.0, "3")]
    found = ranking(rows)
    assert found["pairs"] == 5, "a and b are alike"
    assert found["wrong"] == [("a", "c")] and found["right"] == pytest.approx(4 / 5)
    assert ranking([row("a", 1, 1), row("b", 2, 1)])["right"] == 0, "equal times are no order"
    errors = summary(rows)["errors"]
    assert errors["stage 0"]["rows"] == 3 and errors["all"]["largest"] == 1.0


def test_a_row_is_the_slowest_rank_of_each_round() -> None:
    plan = {"seconds": 0.5, "bound_seconds": 0.25}
    turns = [[([[0.1, 0.2, 0.1], [0.3, 0.5, 0.2]], plan), ([[0.2, 0.2, 0.2], [0.1, 0.1, 0.1]], plan)]]
    found = row_of(Case("narrow", 2, "3"), turns)
    assert found["rounds"] == pytest.approx([0.6, 1.0]) and found["measured"] == pytest.approx(0.8)
    assert found["error"] == pytest.approx(0.5 / 0.8 - 1) and found["phases"]["backward"] == pytest.approx(0.35)


def test_the_matrix_has_every_stage_and_no_row_twice() -> None:
    assert len({title(case) for case in MATRIX}) == len(MATRIX) >= 24
    assert {case.stage for case in MATRIX} == set("0123") and {case.ranks for case in MATRIX} == {1, 2}


def test_a_run(forks: Forks, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("narrow", 2, "3")
    monkeypatch.setattr(plan_time, "WARMUP", 1)
    found = row_of(case, [rows_of(forks, [case], 1)[title(case)]])
    assert 0 < found["bound"] < found["planned"] < 60 and found["measured"] > 0
    parts = found["plan"]["parts"]
    assert parts["links in a node"]["busy"] > 0 < parts["Python"]["exposed"]
