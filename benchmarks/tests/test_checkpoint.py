"""``benchmarks.checkpoint``: plain files, a cold cache, its arithmetic, every competitor, and a tiny run."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from benchmarks.charts import checkpoint_markdown
from benchmarks.checkpoint import HEADER, best_ways, cells, chosen_savers, groups_of, main, parse, summarise, write
from benchmarks.checkpoint_ranks import KEPT_WAYS, Plan, Rounds, measure, state_bytes
from benchmarks.disk import PlainFile, Way, bytes_in, drop_cache, make_durable, resident, takes_direct, ways
from benchmarks.reporting import RESULTS, Ratio, verdict
from benchmarks.savers import READERS, SAVERS, missing
from benchmarks.workload import REFERENCE, Setting
from tests.support.ranks import RankPool

TINY = Setting(ranks=2, layers=1, hidden=64, vocabulary=96, batch=2, sequence=8)


@pytest.mark.parametrize(
    ("low", "high", "rounds", "expected"),
    [
        (0.78, 0.90, 20, "reached"),
        (0.77, 0.90, 20, "not decided"),
        (0.60, 0.78, 20, "not decided"),
        (0.60, 0.77, 20, "missed"),
        (0.90, 0.91, 19, "not decided"),
    ],
)
def test_a_target_may_be_a_lower_bound(low: float, high: float, rounds: int, expected: str) -> None:
    assert verdict(Ratio((low + high) / 2, low, high, rounds), 0.80, at_least=True) == expected


@pytest.mark.parametrize("direct", [False, True])
def test_plain_files_hold_their_share_and_come_back(direct: bool, tmp_path: Path) -> None:
    if direct and not takes_direct(tmp_path):
        pytest.skip("the file system of the temporary directory refuses O_DIRECT")
    total = (9 << 20) + 4099
    for huge, processes in itertools.product((True, False), (1, 2)):
        way = Way(direct, 4 if direct else 1, huge, processes)
        files = [PlainFile(tmp_path, total, number) for number in range(2)]
        for file in files:
            file.write(way)
            held = file.path(way).read_bytes() if file.path(way).exists() else b""
            assert held == file.memory[huge][: len(held)]
            file.memory[huge][:] = bytes(len(file.memory[huge]))
            file.read(way)
            assert held == file.memory[huge][: len(held)] and bool(held) == (file.number < way.processes)
        written = sum(file.path(way).stat().st_size for file in files[: way.processes])
        assert total <= written <= total + 2 * 4096
        with pytest.raises(FileExistsError):
            files[0].write(way)


def test_ways_are_those_that_the_file_system_offers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ways(tmp_path, 2)[0] == Way(False, 1, True, 1)
    monkeypatch.setattr("benchmarks.disk.takes_direct", lambda folder: False)
    one, two = Way(False, 1, True, 1), Way(False, 1, True, 2)
    assert ways(tmp_path, 2) == [one, two] and ways(tmp_path, 1) == [one]
    assert list(tmp_path.iterdir()) == []


def test_a_dropped_cache_is_cold_and_a_read_warms_it(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    file = tmp_path / "deep" / "x"
    file.write_bytes(os.urandom(1 << 20))
    assert resident(tmp_path) == 1.0
    make_durable(tmp_path, 0, 1)
    with (tmp_path / "deep" / "probe").open("wb") as probe:
        probe.write(bytes(4096))
        probe.flush()
        os.fsync(probe.fileno())
        os.posix_fadvise(probe.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if resident(tmp_path) == 1.0:
        pytest.skip("the temporary directory is in memory")
    assert resident(tmp_path) == 256 / 257
    (tmp_path / "deep" / "probe").unlink()
    drop_cache(tmp_path)
    assert resident(tmp_path) == 0.0
    file.read_bytes()
    assert resident(tmp_path) == 1.0 and bytes_in(tmp_path) == 1 << 20


def test_ranks_make_every_file_and_directory_durable_between_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "deep").mkdir()
    paths = {tmp_path, tmp_path / "deep", *(tmp_path / "deep" / name for name in "abc"), tmp_path / "d"}
    for path in paths:
        path.is_dir() or path.write_text("x", encoding="utf-8")
    synced: list[Path] = []
    monkeypatch.setattr(os, "fsync", lambda number: synced.append(Path(os.readlink(f"/proc/self/fd/{number}"))))
    for rank in range(3):
        make_durable(tmp_path, rank, 3)
    assert sorted(synced) == sorted(paths)


def found(rounds: int, **seconds: float) -> list[dict]:
    """What two ranks found; the second is faster."""
    names = {
        "write": "write A", "better": "write B", "read": "read A", "copy": "copy",
        "saved": "save ours-2", "behind": "save ours-2 async", "block": "block ours-2 async", "loaded": "load ours-2",
    }  # fmt: skip
    times = {names[key]: [value] * rounds for key, value in seconds.items()}
    other = {key: [value / 2 for value in values] for key, values in times.items()}
    peaks = {key: [2**20] * rounds for key in times}
    written = dict.fromkeys(SAVERS, 1000)
    return [{"seconds": each, "peaks": peaks, "written": written, "warm": 0.0} for each in (times, other)]


TIMES = {
    "write": 3.0,
    "better": 1.7,
    "read": 1.0,
    "copy": 0.5,
    "saved": 2.0,
    "behind": 4.0,
    "block": 0.6,
    "loaded": 1.5,
}


def test_summary_compares_the_slowest_rank_with_the_best_plain_way() -> None:
    group = summarise(found(20, **TIMES), TINY, targets=True)
    assert group["best"] == {"write": "write B", "read": "read A"}
    saved, behind, loaded = group["saves"]["ours-2"], group["saves"]["ours-2 async"], group["loads"]["ours-2"]
    assert saved["ratio"]["median"] == 0.85 and saved["verdict"] == "reached"
    assert saved["gb_per_s"] == state_bytes(TINY) / 2.0 / 1e9 and saved["written_bytes"] == 1000
    assert loaded["ratio"]["median"] == pytest.approx(2 / 3) and loaded["verdict"] == "missed"
    assert "verdict" not in behind and behind["ratio"]["median"] == 0.425
    assert behind["block"]["ratio"]["median"] == 1.2 and behind["block"]["verdict"] == "missed"
    assert "verdict" not in summarise(found(20, **TIMES), TINY, targets=False)["saves"]["ours-2"]


def test_the_table_has_a_row_for_the_disk_and_one_for_each_name(tmp_path: Path) -> None:
    result = {"groups": [{"rounds": 20, **summarise(found(20, **TIMES), TINY, targets=True)}], "state_bytes": 1_000_000}
    rows = cells(result)
    assert [row[0] for row in rows] == ["the disk", "ours-2", "ours-2 async"]
    assert {len(row) for row in rows} == {len(HEADER)}
    assert rows[1][2:4] == ["0.85 [0.85, 0.85]", "0.80: reached"] and rows[2][7:10] == [
        "600", "1.20 [1.20, 1.20]", "1.00: missed"
    ]  # fmt: skip
    assert best_ways(result) == "the disk, group by group: write B (20 rounds); read A (20 rounds)"
    assert checkpoint_markdown(tmp_path, "x") == ""
    (tmp_path / "checkpoint-x.json").write_text(json.dumps(result), encoding="utf-8")
    lines = checkpoint_markdown(tmp_path, "x").splitlines()
    assert len(lines) == 7 and lines[3].startswith("| **shardengine 2** |") and "| 0.80: reached |" in lines[3]


def test_the_page_of_benchmarks_holds_the_table_of_the_results() -> None:
    """``python -m benchmarks.charts --markdown`` prints it."""
    page = (RESULTS.parent.parent / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    table = checkpoint_markdown(RESULTS, "epyc-2core")
    assert " ".join(table.split()) in " ".join(page.split())  # text is wrapped there


def test_savers_of_one_library_share_processes_and_readers_exist() -> None:
    assert [group[0] for group in groups_of(list(SAVERS))] == ["ours-2", "torch.save", "deepspeed-2"]
    assert {name for saver in SAVERS.values() for name in saver.loads} == set(READERS)


def test_what_is_not_installed_is_left_out_or_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert chosen_savers(None) == [name for name in SAVERS if not name.startswith("deepspeed")]
    assert "left out: deepspeed-2 (deepspeed is not installed" in capsys.readouterr().err
    with pytest.raises(SystemExit, match=r"deepspeed-3 needs deepspeed.*pip install"):
        chosen_savers(["dcp", "deepspeed-3"])


def test_a_smaller_run_does_not_replace_a_larger_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "checkpoint-x.json"
    monkeypatch.setattr("benchmarks.checkpoint.result_path", lambda name, result: path)
    monkeypatch.setattr("benchmarks.checkpoint.write_result", lambda name, result: path)
    groups: list[dict] = [{"saves": {"ours-2": {}}}, {"saves": {"dcp": {}}}]
    result = {"machine": {"name": "x"}, "groups": groups}
    assert write(result, REFERENCE).startswith("written to")
    path.write_text(json.dumps(result), encoding="utf-8")
    assert write(result, REFERENCE).startswith("written to")
    assert "also holds dcp" in write(result | {"groups": groups[:1]}, REFERENCE)
    assert "reference setting only" in write(result, replace(REFERENCE, layers=1))


@pytest.mark.parametrize("bad", [["--hidden", "100"], ["--warmup", "0"], ["--directory", "none"], ["--savers", "none"]])
def test_bad_usage_is_refused(bad: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse(bad)
    assert stopped.value.code == 2 and bad[0] in capsys.readouterr().err


def one_round(name: str, place: str) -> tuple[dict, int]:
    """The first round of one saver, with its proof; (seconds by key, bytes written)."""
    rounds = Rounds(Plan(TINY, (name,), (), 1, 1, "", place))
    rounds.saver(name, True)
    rounds.remove_old(0)
    for variant in rounds.states.values():
        variant.close()
    dist.barrier()
    return rounds.seconds, rounds.written[name]


@pytest.mark.parametrize("name", list(SAVERS))
def test_every_competitor_loads_what_it_saved(name: str, pools: Callable[[int], RankPool], tmp_path: Path) -> None:
    if missing([name]):
        pytest.skip("DeepSpeed is not installed")
    for seconds, written in pools(2).run(one_round, name, str(tmp_path)):
        kinds = ["block", "save"] if SAVERS[name].asynchronous else ["save"]
        assert list(seconds) == [
            *(f"{kind} {name}" for kind in kinds),
            *(f"load {each}" for each in SAVERS[name].loads),
        ]
        assert written >= state_bytes(TINY) and all(value[0] > 0 for value in seconds.values())
        assert seconds[f"save {name}"][0] >= seconds.get(f"block {name}", [0.0])[0]
    assert list(tmp_path.iterdir()) == []


def lost_state(place: str) -> str:
    """What the proof says of a reader that loads nothing but the weights' right values."""
    rounds = Rounds(Plan(TINY, ("torch.save",), (), 1, 1, "", place))
    reader = READERS["torch.save"]

    def load(variant, place) -> None:
        kept = variant.optimizer.load_state_dict
        variant.optimizer.load_state_dict = lambda state: None
        reader.load(variant, place)
        variant.optimizer.load_state_dict = kept

    READERS["torch.save"] = replace(reader, load=load)
    try:
        rounds.saver("torch.save", True)
    except RuntimeError as error:
        return str(error)
    finally:
        READERS["torch.save"] = reader
    return ""


def test_a_load_that_loses_the_optimizer_is_noticed(pools: Callable[[int], RankPool], tmp_path: Path) -> None:
    for said in pools(2).run(lost_state, str(tmp_path)):
        assert "torch.save: step 2 after the load has loss" in said


@pytest.mark.usefixtures("forked_ranks")
def test_a_tiny_run_reports_and_leaves_nothing_behind(
    pools: Callable[[int], RankPool],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """All of it but the start of processes, which it shares with ``benchmarks.step``."""

    def run_group(setting, savers, ways, rounds, warmup, place) -> list[dict]:
        return pools(2).run(measure, Plan(setting, tuple(savers), tuple(ways), rounds, warmup, "", str(place)))

    monkeypatch.setattr("benchmarks.checkpoint.run_group", run_group)
    size = ["--layers", "1", "--hidden", "64", "--vocabulary", "96", "--rounds", "2", "--warmup", "1"]
    savers = ["ours-2", "ours-2 async"]
    assert main([*size, "--savers", *savers, "--directory", str(tmp_path), "--json"]) == 0
    result = json.loads(capfd.readouterr().out)
    (group,) = result["groups"]
    assert list(group["saves"]) == savers and list(group["loads"]) == list(SAVERS["ours-2"].loads)
    assert group["saves"]["ours-2"]["ratio"]["rounds"] == 2 and "target" not in group["saves"]["ours-2"]
    assert group["saves"]["ours-2 async"]["block"]["median_s"] > 0
    assert sum(key.startswith("read ") for key in group["seconds"]) <= KEPT_WAYS + 1
    assert {len(values) for values in group["seconds"].values()} == {2}
    assert list(tmp_path.iterdir()) == []
