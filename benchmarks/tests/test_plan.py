"""The matrix of plans: what its report says, and that the docs have its last result."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.plan import markdown, peer_sentence, sentence, summary
from benchmarks.plan_cases import HELD_OUT, MATRIX

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "benchmarks" / "results" / "plan-xeon-2core.json"


def test_the_docs_have_the_result() -> None:
    result = json.loads(RESULT.read_text(encoding="utf-8"))
    docs = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert markdown(result) in docs
    for text in (sentence(result), peer_sentence(result)):
        assert text in " ".join(docs.split())


def test_the_matrix_is_as_large_as_it_is_said_to_be() -> None:
    cases = [*MATRIX, *HELD_OUT]
    assert len(cases) >= 40 and len(set(cases)) == len(cases)
    assert {case.stage[0] for case in cases} == set("0123")
    assert {case.ranks for case in cases} == {1, 2, 3, 4} and {case.micros for case in cases} == {1, 3}
    assert not {case.model for case in HELD_OUT} & {case.model for case in MATRIX}


def test_a_summary_counts_errors_of_both_signs() -> None:
    row = {"measured_at": "step", "planned_at": "step", "seconds": 1.0}
    rows = [{**row, "error": error} for error in (-0.04, -0.02, 0.0, 0.031)]
    found = summary(rows)
    assert (found["within_goal"], found["rows"], found["largest_error"]) == (2, 4, 0.04)
    assert found["median_error"] == pytest.approx(0.0255) and found["same_phase"] == 4
