"""``benchmarks.scaling``: one process of it, and what is said of growth."""

from __future__ import annotations

from pathlib import Path

from benchmarks import scaling
from shardengine.comm.frames import FRAME


def test_one_rank_of_many_sends_by_the_formula(tmp_path: Path) -> None:
    row = scaling.in_a_process(16, "2 direct", "GPT-2 1.5B")
    assert row["sent_bytes"] == row["formula_bytes"] and len(row["step_s"]) == scaling.STEPS
    assert row["messages"]["all_to_all, reduce"] == row["buckets"]
    assert row["messages"]["all_gather, gather"] == row["buckets"] + 1  # and the norm
    assert row["messages"]["all_gather, control"] == 1
    exchange = row["received_bytes"]["all_gather, control"] // 16
    assert 21 + row["parameters"] / 8 + 1 <= exchange == FRAME
    result = {"rows": [row], "growth": scaling.growth([row]), "layout": "", "machine": {"processor": ""}}
    assert "the same" in scaling.tables(result)
    scaling.draw(result, tmp_path / "chart.svg")


def test_a_hybrid_mesh_reduces_inside_and_across() -> None:
    row = scaling.in_a_process(16, "3 hybrid", "GPT-2 1.5B")
    assert row["sent_bytes"] == row["formula_bytes"]
    assert row["messages"]["reduce_scatter, across"] == row["messages"]["reduce_scatter, inside"] == row["buckets"]
    assert row["received_bytes"]["all_gather, gather inside"] > row["received_bytes"]["all_gather, gather across"] > 0


def test_growth_is_from_the_fewest_ranks_to_the_most() -> None:
    rows = [{"stage": "0", "ranks": ranks, "step_s": [9.0, step, step]} for ranks, step in ((64, 5.0), (8, 1.0))]
    assert scaling.growth(rows) == {"0": {"step": 5.0, "verdict": "grows"}}
