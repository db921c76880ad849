"""The benchmarks' own arithmetic, and one tiny run of ``benchmarks.step`` with real ranks."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks.charts import draw, headline, markdown
from benchmarks.import_time import import_ms
from benchmarks.peers import DEEPSPEED_INSTALL
from benchmarks.phases import PARTS, BlockedClock, StepTimes, breakdown, slowest
from benchmarks.ranks import groups_of
from benchmarks.reporting import RESULTS, Ratio, paired_ratio, short_cpu_name, table, verdict, write_result
from benchmarks.step import check_losses, chosen_variants, default_targets, main, parse, summarise, write
from benchmarks.variants import VARIANTS, missing
from benchmarks.workload import REFERENCE, Setting, batch_of, make_model
from tests.support.ranks import RankPool

ROOT = Path(__file__).resolve().parents[2]
TINY = Setting(ranks=2, layers=2, hidden=64, vocabulary=96, batch=2, sequence=8)


def test_paired_ratio_cancels_what_both_share() -> None:
    base = [1.0 + 0.5 * (i % 7) for i in range(40)]
    ratio = paired_ratio([1.1 * value for value in base], base)
    assert ratio.median == pytest.approx(1.1) and ratio.low == pytest.approx(1.1) and ratio.high == pytest.approx(1.1)


def test_paired_ratio_interval_holds_the_median_and_is_reproducible() -> None:
    ours = [1.0 + 0.01 * ((7 * i) % 11) for i in range(30)]
    ratio = paired_ratio(ours, [1.0] * 30)
    assert ratio.low < ratio.median < ratio.high
    assert ratio == paired_ratio(ours, [1.0] * 30)


def test_paired_ratio_refuses_what_does_not_pair() -> None:
    with pytest.raises(ValueError, match="2 rounds of one and 1 of the other"):
        paired_ratio([1.0, 2.0], [1.0])


@pytest.mark.parametrize(
    ("low", "high", "rounds", "expected"),
    [
        (0.95, 1.02, 20, "reached"),
        (0.95, 1.03, 20, "not decided"),
        (1.02, 1.10, 20, "not decided"),
        (1.03, 1.10, 20, "missed"),
        (0.90, 0.91, 19, "not decided"),
    ],
)
def test_verdict(low: float, high: float, rounds: int, expected: str) -> None:
    assert verdict(Ratio((low + high) / 2, low, high, rounds), 1.0) == expected


@pytest.mark.parametrize(
    ("brand", "name"),
    [
        ("AMD EPYC 7763 64-Core Processor", "epyc-7763-2core"),
        ("AMD EPYC", "epyc-2core"),
        ("Intel(R) Xeon(R) Platinum 8480C CPU @ 2.00GHz", "xeon-platinum-8480c-2core"),
        ("", "cpu-2core"),
    ],
)
def test_machine_names_name_the_processor(brand: str, name: str) -> None:
    assert short_cpu_name(brand, 2) == name


def test_write_result_names_the_file_after_the_machine(tmp_path: Path) -> None:
    path = write_result("step", {"machine": {"name": "epyc-2core"}, "x": 1.5}, tmp_path / "new")
    assert path.name == "step-epyc-2core.json"
    assert json.loads(path.read_text(encoding="utf-8"))["x"] == 1.5


def test_table_aligns() -> None:
    assert table(["a", "b"], [["long", "1"], ["x", "200"]]).splitlines() == [
        "a       b", "----  ---", "long    1", "x     200"
    ]  # fmt: skip


def test_setting_counts_the_parameters_of_its_model() -> None:
    model = make_model(TINY)
    assert TINY.parameters() == sum(parameter.numel() for parameter in model.parameters())
    assert round(REFERENCE.parameters() / 1e6) == 63


def test_batches_differ_by_rank_and_step_only() -> None:
    first = batch_of(TINY, 0, 0)["input_ids"]
    assert first.equal(batch_of(TINY, 0, 0)["input_ids"])
    assert not first.equal(batch_of(TINY, 1, 0)["input_ids"])
    assert not first.equal(batch_of(TINY, 0, 1)["input_ids"])


def test_a_variant_that_trains_something_else_is_refused() -> None:
    check_losses({"ddp": 5.0, "compute": 9.0, "ours-0": 5.001})
    with pytest.raises(SystemExit, match="not the same training"):
        check_losses({"ddp": 5.0, "ours-0": 5.2})
    with pytest.raises(SystemExit, match="not the same training"):
        check_losses({"ddp": 5.0, "ours-0": float("nan")})


def test_a_run_that_does_not_fit_is_refused() -> None:
    with pytest.raises(SystemExit, match="choose fewer with --variants"):
        groups_of(Setting(1024, 96, 12288, 50304, 1, 2048), ["ddp"], 2**34)


def test_groups_keep_libraries_apart_and_carry_their_own_references() -> None:
    groups = groups_of(REFERENCE, list(VARIANTS), 2**45)
    assert [group[:2] for group in groups] == [["compute", "ddp"]] * 3
    assert [group[2] for group in groups] == ["zero1-torch", "deepspeed-0", "ours-0"]
    assert sorted(name for group in groups for name in group[2:]) == sorted(list(VARIANTS)[2:])
    assert groups_of(REFERENCE, ["compute", "ddp"], 2**45) == [["compute", "ddp"]]


def test_groups_are_cut_where_memory_ends() -> None:
    ours = ["ddp", "ours-0", "ours-1", "ours-2"]
    assert len(groups_of(REFERENCE, ours, 2**45)) == 1
    cut = groups_of(REFERENCE, ours, 8 * 2**30)
    assert len(cut) > 1 and all(group[0] == "ddp" and len(group) > 1 for group in cut)


def steps(*seconds: float) -> list[StepTimes]:
    """Rounds of one rank whose backward takes all the time."""
    return [StepTimes((0.0, value, 0.0), (0.0, 0.0, 0.0)) for value in seconds]


def found_on(ranks: list[dict[str, list[StepTimes]]], loss: float = 1.0) -> list[dict]:
    """What ``run_group`` returns."""
    return [
        {"times": times, "losses": {name: [9.0, loss] for name in times}, "traffic": dict.fromkeys(times)}
        for times in ranks
    ]


def test_summary_takes_the_slowest_rank_of_each_round() -> None:
    found = found_on([
        {"compute": steps(1.0, 1.0, 1.0), "ddp": steps(2.0, 1.0, 2.0)},
        {"compute": steps(1.0, 1.0, 1.0), "ddp": steps(1.0, 2.0, 1.0)},
    ])  # fmt: skip
    row = summarise(found, TINY, {"compute": 0.5})["compute"]
    assert row["ratio"]["median"] == 0.5 and row["verdict"] == "not decided"
    assert summarise(found, TINY, {})["ddp"]["over_limit_ms"] == 1000.0


def test_a_loss_that_differs_on_any_rank_is_refused() -> None:
    found = found_on([{"ddp": steps(1.0), "ours-0": steps(1.0)}] * 2)
    summarise(found, TINY, {})
    found[1]["losses"] = {"ddp": [9.0, 1.0], "ours-0": [9.0, 1.1]}
    with pytest.raises(SystemExit, match="not the same training"):
        summarise(found, TINY, {})


def test_on_one_rank_the_plain_loop_is_the_base() -> None:
    alone = Setting(1, 2, 64, 96, 2, 8)
    row = summarise(found_on([{"compute": steps(2.0), "ours-0": steps(3.0)}]), alone, {})["ours-0"]
    assert row["ratio"]["median"] == 1.5
    assert chosen_variants(alone, None) == ["compute", "ours-0", "ours-1", "ours-2", "ours-3k", "ours-3"]


def test_targets_belong_to_the_reference_model() -> None:
    assert (
        default_targets(REFERENCE)["ours-3"] == 1.06 and default_targets(replace(REFERENCE, ranks=1))["ours-3"] == 1.02
    )
    assert default_targets(replace(REFERENCE, ranks=4)) == default_targets(TINY) == {}


def test_parts_of_a_step_add_up_and_waits_are_taken_off_their_phase() -> None:
    times = StepTimes((1.0, 2.0, 3.0), (0.1, 0.2, 0.3))
    parts = breakdown([times] * 3, None)
    assert list(parts.values()) == pytest.approx([900.0, 1800.0, 600.0, 2700.0])
    assert sum(parts.values()) == pytest.approx(times.total * 1e3)
    free = StepTimes((1.0, 1.5, 3.0), (0.0, 0.0, 0.0))
    hidden = breakdown([StepTimes((1.0, 2.0, 3.0), (0.0, 0.0, 0.25))], [free])
    assert list(hidden) == list(PARTS)
    assert list(hidden.values()) == pytest.approx([1000.0, 1500.0, 750.0, 2750.0])


def test_a_round_is_its_slowest_rank() -> None:
    assert [times.total for times in slowest([steps(1.0, 4.0), steps(2.0, 3.0)])] == [2.0, 4.0]


LATE_S = 2.0


def count_a_wait() -> tuple[float, float]:
    """Rank 1 comes ``LATE_S`` late to an all-reduce: (seconds blocked while watching, after it)."""
    clock = BlockedClock()
    with clock.watching():
        dist.barrier()
        clock.seconds = 0.0
        time.sleep(LATE_S * dist.get_rank())
        dist.all_reduce(torch.zeros(1))
        inside = clock.seconds
    dist.all_reduce(torch.zeros(1))
    return inside, clock.seconds


def test_the_blocked_clock_sees_a_late_rank(pools: Callable[[int], RankPool]) -> None:
    (early, early_after), (late, _) = pools(2).run(count_a_wait)
    assert LATE_S / 2 < early == early_after and late < early  # either may be held up by other programs


def test_what_is_not_installed_is_left_out_by_default_and_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert set(missing(list(VARIANTS)).values()) == {"deepspeed"}
    chosen = chosen_variants(TINY, None)
    assert "fsdp2" in chosen and not any(name.startswith("deepspeed") for name in chosen)
    assert "left out: deepspeed-0, deepspeed-1, deepspeed-2, deepspeed-3" in capsys.readouterr().err
    with pytest.raises(SystemExit, match=r"deepspeed-3 needs deepspeed.*pip install"):
        chosen_variants(TINY, ["ddp", "deepspeed-3"])


def test_the_pages_hold_the_tables_of_the_results() -> None:
    """``python -m benchmarks.charts --markdown`` prints them."""
    root = RESULTS.parent.parent
    assert markdown(RESULTS, "epyc-2core") in (root / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    short = headline(RESULTS, "epyc-2core")
    assert short.count("\n") == 7 and short in (root / "README.md").read_text(encoding="utf-8")
    assert headline(RESULTS, "no-such-machine") == ""


def test_a_smaller_run_does_not_replace_a_larger_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "step-x.json"
    monkeypatch.setattr("benchmarks.step.result_path", lambda name, result: path)
    monkeypatch.setattr("benchmarks.step.write_result", lambda name, result: path)
    result = {"benchmark": "step", "machine": {"name": "x"}, "variants": {"ddp": {}, "fsdp2": {}}}
    assert write(result, REFERENCE).startswith("written to")
    path.write_text(json.dumps(result), encoding="utf-8")
    assert write(result, REFERENCE).startswith("written to")
    assert "also holds fsdp2" in write(result | {"variants": {"ddp": {}}}, REFERENCE)
    assert "reference setting only" in write(result, TINY)


@pytest.mark.parametrize("bad", [["--hidden", "100"], ["--rounds", "0"], ["--target", "ddp"], ["--variants", "none"]])
def test_bad_usage_is_refused(bad: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse(bad)
    assert stopped.value.code == 2 and bad[0].lstrip("-") in capsys.readouterr().err


def test_import_ms_reports_a_failing_import(tmp_path: Path) -> None:
    assert import_ms("import json", str(tmp_path)) > 0
    with pytest.raises(SystemExit, match="no_such_module"):
        import_ms("import no_such_module", str(tmp_path))


SMALL = ["--json", "--layers", "1", "--hidden", "64", "--vocabulary", "96", "--sequence", "8", "--batch", "2"]


@pytest.mark.usefixtures("forked_ranks")
def test_step_times_every_variant(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--rounds", "2", "--warmup", "1", "--target", "ddp=1.0"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert list(result["variants"]) == [name for name in VARIANTS if name not in missing(list(VARIANTS))]
    for row in result["variants"].values():
        assert len(row["seconds"]) == 2 and row["fraction_of_limit"] > 0
        assert list(row["parts_ms"]) == list(PARTS) and row["parts_ms"]["backward"] > 0
    assert result["variants"]["ddp"]["ratio"]["median"] == 1.0
    assert result["variants"]["ddp"]["verdict"] == "not decided"
    # its one block is there from forward to backward
    assert result["variants"]["ours-3"]["sent_bytes_per_step"] == result["variants"]["ours-0"]["sent_bytes_per_step"]
    assert result["variants"]["compute"]["parts_ms"]["exposed communication"] == 0
    for reference in result["references"]:
        assert list(reference) == ["compute", "ddp"]
    charts = draw(result, None, tmp_path)
    assert [chart.name for chart in charts] == [f"{name}-{result['machine']['name']}.svg" for name in ("step", "parts")]
    assert all("<svg" in chart.read_text(encoding="utf-8") for chart in charts)


def train(name: str) -> list[float]:
    """This rank's losses of a variant on the tiny model; rank 0's where there is no process group."""
    variant = VARIANTS[name].build(make_model(TINY), TINY)
    losses = []
    for number in range(4):
        loss = variant.forward(batch_of(TINY, dist.get_rank() if dist.is_initialized() else 0, number))
        variant.backward(loss)
        variant.update()
        losses.append(float(loss.detach()))
    variant.close()
    return losses


@pytest.mark.parametrize("name", ["zero1-torch", "fsdp2", "ours-0", "ours-3", "deepspeed-0", "deepspeed-3"])
def test_every_competitor_trains_what_ddp_trains(name: str, pools: Callable[[int], RankPool]) -> None:
    if missing([name]):
        pytest.skip("DeepSpeed is not installed: " + DEEPSPEED_INSTALL)
    expected, other = pools(2).run(train, "ddp"), pools(2).run(train, name)
    for rank in range(2):  # the norm and the sums over ranks are added up in another order
        assert other[rank] == pytest.approx(expected[rank], rel=1e-5)
    assert train("compute") != pytest.approx(expected[0], rel=1e-5)  # so the bound does tell a missing reduction


def test_step_measures_peak_memory_per_variant(capsys: pytest.CaptureFixture[str]) -> None:
    """With a rank that is a process of its own, as users start it."""
    assert main([*SMALL, "--rss", "--variants", "compute", "--ranks", "1"]) == 0
    result = json.loads(capsys.readouterr().out)
    row = result["variants"]["compute"]
    assert row["peak_rss_bytes"] >= row["steps_peak_bytes"] > row["before_bytes"] > 0
