"""The benchmarks' own arithmetic, and one tiny run of ``benchmarks.step`` with real ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.import_time import import_ms
from benchmarks.reporting import Ratio, paired_ratio, short_cpu_name, table, verdict, write_result
from benchmarks.step import check_losses, check_memory, parse, summarise
from benchmarks.variants import REFERENCE, VARIANTS, Setting, batch_of, make_model

ROOT = Path(__file__).resolve().parent.parent
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
        check_memory(Setting(1024, 96, 12288, 50304, 1, 2048), ["ddp"])


def test_summary_takes_the_slowest_rank_of_each_round() -> None:
    traffic = {name: {"sent_bytes_per_step": 0.0, "limit_bytes_per_step": 0.0} for name in ("compute", "ddp")}
    losses = {"compute": 1.0, "ddp": 1.0}
    found = [
        {"seconds": {"compute": [1.0, 1.0, 1.0], "ddp": [2.0, 1.0, 2.0]}, "losses": losses, "traffic": traffic},
        {"seconds": {"compute": [1.0, 1.0, 1.0], "ddp": [1.0, 2.0, 1.0]}, "losses": losses, "traffic": traffic},
    ]
    row = summarise(found, TINY, {"compute": 0.5})["compute"]
    assert row["ratio_to_ddp"]["median"] == 0.5 and row["verdict"] == "not decided"
    assert summarise(found, TINY, {})["ddp"]["exposed_ms"] == 1000.0


@pytest.mark.parametrize("bad", [["--hidden", "100"], ["--rounds", "0"], ["--target", "ddp"], ["--variants", "none"]])
def test_bad_usage_is_refused(bad: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse(bad)
    assert stopped.value.code == 2 and bad[0].lstrip("-") in capsys.readouterr().err


def test_import_ms_reports_a_failing_import() -> None:
    assert import_ms("import json") < 1000
    with pytest.raises(SystemExit, match="no_such_module"):
        import_ms("import no_such_module")


def run_step(*options: str) -> dict:
    """Run the tiny benchmark in a process of its own and return its JSON."""
    size = ["--layers", "1", "--hidden", "64", "--vocabulary", "96", "--sequence", "8", "--batch", "2"]
    command = [sys.executable, "-m", "benchmarks.step", "--json", *size, *options]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=180)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_step_times_every_variant() -> None:
    result = run_step("--rounds", "2", "--warmup", "1", "--target", "ddp=1.0")
    assert list(result["variants"]) == list(VARIANTS)
    for row in result["variants"].values():
        assert len(row["seconds"]) == 2 and row["fraction_of_limit"] > 0
    assert result["variants"]["ddp"]["ratio_to_ddp"]["median"] == 1.0
    assert result["variants"]["ddp"]["verdict"] == "not decided"
    assert result["variants"]["ours-3"]["sent_bytes_per_step"] > result["variants"]["ours-0"]["sent_bytes_per_step"]


@pytest.mark.slow
def test_step_measures_peak_memory_per_variant() -> None:
    result = run_step("--rss", "--variants", "compute", "--ranks", "1")
    row = result["variants"]["compute"]
    assert row["peak_rss_bytes"] > row["before_bytes"] > 0
