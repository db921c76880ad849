"""``plan_scaling`` and ``plan_published``: small runs, the formula by hand, what is said of published numbers."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import plan_published, plan_scaling
from benchmarks.plan_published import DEGREES, RUNS, SIZES, TABLE_1, TABLE_2, by_paper, table_1
from benchmarks.plan_scaling import HYBRID, Costs, formula, hardware_of, replayed, without_links
from benchmarks.reporting import RESULTS
from shardengine.planner import Rates

SMALL = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 176, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 128, "use_cache": False}  # fmt: skip


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A narrow model with small buckets on slow hardware."""
    for name, value in {"LLAMA": SMALL, "TOKENS": 64, "BUCKET": 100_000, "LAYERS": 6, "GLOBAL_BATCH": 64}.items():
        monkeypatch.setattr(plan_scaling, name, value)
    monkeypatch.setattr(plan_scaling, "ENDS", (16, 64))
    caches = (plan_scaling.run, plan_scaling.model_of, plan_scaling.parameters)
    for each in caches:
        each.cache_clear()
    yield plan_scaling
    for each in caches:
        each.cache_clear()


def test_three_ranks_need_the_same_and_model_state_is_that_of_the_formula(small: Any) -> None:
    (row,) = small.memory_rows(["3"], [16])
    assert row["alike"] and row["spread_bytes"] == 0 and set(row["peak_bytes"]) == {0, 8, 15}
    assert row["state_bytes"] == row["formula_state_bytes"] < row["peak_bytes"][0]
    assert row["initialize_s"] > 0 < row["step_s"]


def test_curves_begin_at_one_node_and_replay_the_tapes_of_others(small: Any, tmp_path: Path) -> None:
    assert small.curves([HYBRID], [8]) == [], "one shard group"
    rows = small.curves(["2"], [8, 16, 32, 64])
    first, few, middle, last = rows
    assert first["weak_efficiency"] == 1 and [row["micros"] for row in rows] == [8, 4, 2, 1]
    rates = Rates.given(hardware_of(64))
    assert last["weak"]["seconds"] == pytest.approx(small.whole("2", 64, 64, rates).seconds), "an end is itself"
    assert last["strong_s"] == last["weak"]["seconds"]
    assert few["strong_s"] == pytest.approx(few["weak"]["seconds"] + 3 * few["micro_s"])
    seconds = [row["weak"]["seconds"] for row in (few, middle, last)]
    assert 0 < middle["weak"]["compute"] < min(seconds) and min(seconds[::2]) < seconds[1] < max(seconds[::2])
    result = {"curves": rows, "setting": {"parameters": 1, "hardware": ""}, "memory": [],
              "reuse": small.reuse(["2"]), "latency": small.latencies(["2"], 64)}  # fmt: skip
    assert abs(result["reuse"][0]["error"]) < 0.02
    by_latency = [row["seconds"] for row in result["latency"]]
    assert by_latency == sorted(by_latency) and by_latency[0] < by_latency[-1]
    assert "stage 2, 64 ranks, α of 1000 µs" in small.tables(result)
    small.draw(result, tmp_path / "chart.svg")


def test_links_of_other_ranks_are_replayed(small: Any) -> None:
    tape = small.run("2", 16).found.tape
    slow = dataclasses.replace(hardware_of(64), link=hardware_of(64).link._replace(bytes_per_s=1e6))  # type: ignore[union-attr]
    busy = {ranks: replayed(tape, ranks, Rates.given(slow)).part("links between nodes").limit for ranks in (16, 64)}
    sent = [sum(each.bytes for each in tape.begun() if each.group == name) for name in ("across", "gather")]
    near = hardware_of(64).node_link.bytes_per_s  # type: ignore[union-attr]
    for ranks in (16, 64):
        nodes = ranks // 8
        across, gathered = sent[0] * (nodes - 1) / nodes, sent[1] * (ranks - 8) / (ranks * 8)
        assert gathered / 1e6 > sent[1] / near and busy[ranks] == pytest.approx((across + gathered) / 1e6, rel=1e-3)
    assert replayed(tape, 64, without_links(Rates.given(slow))).part("links between nodes").busy < 1e-9


def test_the_formula_by_hand() -> None:
    """16 ranks: a byte of a bucket takes 7/8 of 5 ps inside, sums of twice the bytes 1/16 of 20 ps across."""
    costs = Costs.of("2", 16)
    assert [costs.inside, costs.across] == pytest.approx([7 / 8 / 200e9, 2 / 16 / 50e9])
    assert costs.gather == pytest.approx(15 / 16 / 200e9) and costs.far_gather == 0
    hybrid = Costs.of(HYBRID, 16)
    assert hybrid.gather == hybrid.inside and hybrid.far_gather == pytest.approx(1 / 16 / 50e9)
    alone = {"phase forward": 1.0, "phase backward": 2.0, "phase step": 0.5}
    count = 2 * plan_scaling.BUCKET
    last = 2 * plan_scaling.BUCKET * (costs.inside + costs.across) + 20e-6
    assert formula("2", 16, alone, count) == pytest.approx(1 + 2 + last + 0.5), "all but the last bucket is hidden"
    short = {"phase forward": 0.0, "phase backward": 0.0, "phase step": 0.0}
    hidden_by_nothing = last + 2 * plan_scaling.BUCKET * max(costs.inside, costs.across)
    assert formula("2", 16, short, count) == pytest.approx(hidden_by_nothing + 2 * count * costs.gather + 10e-6)


@pytest.mark.parametrize("module", [plan_scaling, plan_published])
def test_tables_of_the_page_are_those_of_the_result(module: Any) -> None:
    name = module.__name__.rpartition(".")[2]
    found = json.loads((RESULTS / f"{name}-xeon-2core.json").read_text(encoding="utf-8"))
    page = (RESULTS.parents[1] / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    for text in module.markdown(found):
        assert text in page


def test_cells_of_the_published_table_are_those_of_its_formula() -> None:
    for size, stages in TABLE_1.items():
        count, rows, columns = SIZES[size]
        for stage, cells in stages.items():
            for ranks, said in zip(DEGREES, cells, strict=True):
                exact = by_paper(stage, ranks) * count * rows * columns / 1e9
                assert said == pytest.approx(exact, rel=0.025), (size, stage, ranks)
    for stage, said in TABLE_2.items():
        assert 32e9 / by_paper(stage, 64) == pytest.approx(said, rel=0.05)


def test_model_state_of_our_stages_is_that_of_the_paper() -> None:
    found = table_1(["7.5B"], [64])
    assert len(found) == 3 and all(0 <= row["over_formula"] < 1e-4 and abs(row["error"]) < 0.01 for row in found)


def test_a_deep_gpt_2_is_a_line_in_its_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_published, "WORDS", 512)
    monkeypatch.setattr(plan_published, "TOKENS", 64)
    run = dataclasses.replace(RUNS[0], layers=12, hidden=128, heads=4, batch=2)
    found = plan_published.run_row(run)
    deep = plan_published.Deep("2", 128, 4, 2, plan_published.RUN_RANKS, 16)
    assert found["parameters"] == 12 * (12 * 128**2 + 13 * 128) + (512 + 64 + 2) * 128
    assert deep.peak(12) == pytest.approx(deep.run(12).peak.bytes, rel=0.03) and found["fits"]
    assert 0 < found["model_tflops"] < found["tflops"] <= found["if_nothing_were_sent"] < 125
    layers, count = plan_published.largest(deep, deep.peak(12))
    assert (layers, count) == (12, found["parameters"])
